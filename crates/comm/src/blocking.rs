//! Blocking conveniences: start, wait, unpack. Each records its caller's line as the call site.

use crate::Communicator;
use crate::error::Error;
use crate::operation::{Completed, Reduce, Request};
use crate::payload::Payload;

impl dyn Communicator {
    /// Returns when every rank has called it.
    #[track_caller]
    pub fn barrier(&self) -> Result<(), Error> {
        self.finish(Request::barrier()).map(drop)
    }

    /// `buf` of rank `root`, on every rank.
    #[track_caller]
    pub fn broadcast(&self, root: usize, buf: impl Into<Payload>) -> Result<Payload, Error> {
        Ok(self.finish(Request::broadcast(root, buf))?.recv)
    }

    /// The reduction of all ranks' `buf`, element by element, in place.
    #[track_caller]
    pub fn all_reduce(&self, reduce: Reduce, buf: impl Into<Payload>) -> Result<Payload, Error> {
        Ok(self.finish(Request::all_reduce(reduce, buf))?.recv)
    }

    /// All ranks' `send` one after the other, in `recv`; rank r gives `counts[r]` elements.
    #[track_caller]
    pub fn all_gather(
        &self,
        send: impl Into<Payload>,
        recv: impl Into<Payload>,
        counts: Vec<usize>,
    ) -> Result<Completed, Error> {
        self.finish(Request::all_gather(send, recv, counts))
    }

    /// This rank's part, of `counts[rank]` elements, of the reduction of all ranks' `send`, in `recv`.
    #[track_caller]
    pub fn reduce_scatter(
        &self,
        reduce: Reduce,
        send: impl Into<Payload>,
        recv: impl Into<Payload>,
        counts: Vec<usize>,
    ) -> Result<Completed, Error> {
        self.finish(Request::reduce_scatter(reduce, send, recv, counts))
    }

    /// What every rank sends to this one, in rank order, in `recv`.
    #[track_caller]
    pub fn all_to_all(
        &self,
        send: impl Into<Payload>,
        send_counts: Vec<usize>,
        recv: impl Into<Payload>,
        recv_counts: Vec<usize>,
    ) -> Result<Completed, Error> {
        self.finish(Request::all_to_all(send, send_counts, recv, recv_counts))
    }

    /// All ranks' `values`, in rank order; every rank gives equally many.
    #[track_caller]
    pub fn all_gather_u64(&self, values: &[u64]) -> Result<Vec<u64>, Error> {
        let recv = vec![0u64; values.len() * self.size()];
        let request = Request::all_gather(values.to_vec(), recv, vec![values.len(); self.size()]);
        Ok(self.finish(request)?.recv.into_u64())
    }

    /// The r-th of `size` equal parts of `values` goes to rank r; returns what the ranks sent here, in rank order.
    /// Panics if the length of `values` is no multiple of the group's size.
    #[track_caller]
    pub fn all_to_all_u64(&self, values: &[u64]) -> Result<Vec<u64>, Error> {
        let size = self.size();
        assert_eq!(values.len() % size, 0, "{} values do not divide into {size} equal parts", values.len());
        let counts = vec![values.len() / size; size];
        let request = Request::all_to_all(values.to_vec(), counts.clone(), vec![0u64; values.len()], counts);
        Ok(self.finish(request)?.recv.into_u64())
    }

    /// Replaces each value by its sum over the ranks, taken in rank order. On an error `values` are unchanged.
    #[track_caller]
    pub fn sum_f64(&self, values: &mut [f64]) -> Result<(), Error> {
        let sums = self.finish(Request::all_reduce(Reduce::Sum, values.to_vec()))?.recv;
        values.copy_from_slice(&sums.into_f64());
        Ok(())
    }
}
