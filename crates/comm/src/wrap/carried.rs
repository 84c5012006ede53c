//! Devices' memory carried from rank to rank beside a communicator that moves the host's.
//!
//! An operation on a device is begun by what it comes to in messages, as one on the host is
//! ([`crate::messages`]), and handed back at once: its buffers bear marks that the device's further work waits for.

use std::mem;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use super::Wrapper;
use crate::Communicator;
use crate::device::{DeviceBuffer, DeviceCarrier, DeviceCarriers, DeviceParcel};
use crate::error::Error;
use crate::messages::moves::{Message, MessagePlace, MessageStage, Moves};
use crate::operation::{Completed, Operation, Reduce, Request};
use crate::payload::Payload;
use crate::pending::{InFlight, Pending};
use crate::validate::validate_in_memory;

/// A communicator that has devices' memory carried, once it is told by whom ([`Communicator::carry_by`]).
///
/// Nothing here compares requests of ranks, and a device that waits for a rank that asks for something else waits for ever:
/// [`crate::wrap::Agreement::beside`] compares them, and ends what is under way where they differ.
pub struct Carried {
    inner: Arc<dyn Communicator>,
    rank: Arc<CarriedRank>,
    /// Of this group, under whatever name.
    carrier: Arc<Mutex<Option<Arc<dyn DeviceCarrier>>>>,
}

/// What all groups of a rank share.
struct CarriedRank {
    /// Of the world.
    number: usize,
    carriers: Mutex<Option<Arc<dyn DeviceCarriers>>>,
    ended: OnceLock<String>,
}

impl CarriedRank {
    fn carriers(&self) -> Option<Arc<dyn DeviceCarriers>> {
        lock(&self.carriers).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Carried {
    /// `inner`, a world.
    pub fn around(inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        let rank = CarriedRank { number: inner.rank(), carriers: Mutex::default(), ended: OnceLock::new() };
        Arc::new(Carried { inner, rank: Arc::new(rank), carrier: Arc::default() })
    }

    /// A group that has come from this one, with a carrier of its own if there are any.
    fn child(&self, inner: Arc<dyn Communicator>) -> Result<Arc<dyn Communicator>, Error> {
        let child = Carried { inner, rank: self.rank.clone(), carrier: Arc::default() };
        if let Some(carriers) = self.rank.carriers() {
            child.open(&carriers)?;
        }
        Ok(Arc::new(child))
    }

    #[track_caller]
    fn open(&self, carriers: &Arc<dyn DeviceCarriers>) -> Result<(), Error> {
        let opened = carriers.open(&self.inner);
        let opened = opened.map_err(|detail| self.failed("carrying devices' memory", Location::caller(), detail))?;
        *lock(&self.carrier) = Some(opened);
        Ok(())
    }

    /// What ended under way or does not go on: by the world's end, where there was one.
    fn failed(&self, operation: &str, site: &'static Location<'static>, detail: String) -> Error {
        let communicator = self.inner.name().to_owned();
        match self.rank.ended.get() {
            // Whose it was is known where the world was ended.
            Some(reason) => Error::aborted(self.rank.number, reason.clone()),
            None => {
                let detail = format!("rank {}: {detail}", self.rank.number);
                Error::Transport { communicator, operation: operation.to_owned(), site, detail }
            }
        }
    }

    fn begin(&self, carrier: &Arc<dyn DeviceCarrier>, request: Request) -> Result<Pending, Error> {
        let (rank, size) = (self.inner.rank(), self.inner.size());
        validate_in_memory(&request, rank, size, self.rank.number)?;
        let Request { operation, site } = request;
        let begun = CarriedOperation { operation: Some(operation) };
        let told = |detail| self.failed(&begun.operation().to_string(), site, detail);
        begun.begin(&**carrier, rank, size).map_err(told)?;
        Ok(Pending::in_flight(Box::new(begun)))
    }
}

impl Wrapper for Carried {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    /// The same group, under another name.
    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Carried { inner, rank: self.rank.clone(), carrier: self.carrier.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let carrier = request.operation.is_on_device().then(|| lock(&self.carrier).clone()).flatten();
        match carrier {
            Some(carrier) => self.begin(&carrier, request),
            None => self.inner.start(request),
        }
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        self.child(self.inner.split(color, key)?)
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        self.child(self.inner.duplicate()?)
    }

    fn moves_devices(&self) -> bool {
        lock(&self.carrier).is_some()
    }

    fn carry_by(&self, carriers: Option<Arc<dyn DeviceCarriers>>) -> Result<bool, Error> {
        // What was there may end with it, which takes time and may look at either.
        let before = (lock(&self.carrier).take(), mem::replace(&mut *lock(&self.rank.carriers), carriers.clone()));
        drop(before);
        if let Some(carriers) = carriers {
            // A world that has ended has ended nothing of these.
            self.rank.ended.get().iter().for_each(|reason| carriers.end(reason));
            self.open(&carriers)?;
        }
        Ok(true)
    }

    fn abort(&self, reason: &str) {
        let reason = self.rank.ended.get_or_init(|| reason.to_owned());
        self.rank.carriers().iter().for_each(|carriers| carriers.end(reason));
        self.inner.abort(reason);
    }
}

/// An operation that has been begun.
struct CarriedOperation {
    /// There until it is awaited.
    operation: Option<Operation>,
}

impl CarriedOperation {
    fn operation(&self) -> &Operation {
        self.operation.as_ref().expect("it is awaited once")
    }

    /// What is sent and what is received; in place both are the same.
    fn buffers(&self) -> [&dyn DeviceBuffer; 2] {
        match self.operation() {
            Operation::Barrier => unreachable!("it has no buffers"),
            Operation::Broadcast { buf, .. } | Operation::AllReduce { buf, .. } => [buffer(buf); 2],
            Operation::AllGather { send, recv, .. }
            | Operation::ReduceScatter { send, recv, .. }
            | Operation::AllToAll { send, recv, .. } => [buffer(send), buffer(recv)],
        }
    }

    fn begin(&self, carrier: &dyn DeviceCarrier, rank: usize, size: usize) -> Result<(), String> {
        let [send, receive] = self.buffers();
        let place = |place| match place {
            MessagePlace::Send => send,
            MessagePlace::Receive => receive,
            MessagePlace::Part(_) | MessagePlace::Token => unreachable!("a carrier has parts itself, and no barriers"),
        };
        let parcels = |messages: &[Message]| -> Vec<DeviceParcel> {
            let parcel =
                |of: &Message| DeviceParcel { peer: of.peer, buffer: place(of.place), bytes: of.bytes.clone() };
            messages.iter().map(parcel).collect()
        };
        let Moves { first, copy, sum, second } = Moves::of(self.operation(), rank, size);
        if let Some([from, to]) = copy {
            carrier.copy((receive, to.start), send, from);
        }
        match sum {
            Some(sum) => {
                let (own, to) = ((place(sum.own.0), sum.own.1), (place(sum.to.0), sum.to.1.start));
                carrier.reduce(self.reduction(), &parcels(&first.send), own, to)?;
            }
            None => carrier.exchange(&parcels(&first.send), &parcels(&first.receive))?,
        }
        if second != MessageStage::default() {
            carrier.exchange(&parcels(&second.send), &parcels(&second.receive))?;
        }
        Ok(())
    }

    fn reduction(&self) -> Reduce {
        match self.operation() {
            Operation::AllReduce { reduce, .. } | Operation::ReduceScatter { reduce, .. } => *reduce,
            _ => unreachable!("nothing else has a sum"),
        }
    }

    /// The device's further work comes after it.
    fn order(&self) {
        self.buffers().into_iter().for_each(|buffer| buffer.wait(buffer));
    }
}

fn buffer(payload: &Payload) -> &dyn DeviceBuffer {
    let Payload::Device(.., buffer) = payload else { unreachable!("an operation's buffers are in one memory") };
    &**buffer
}

impl InFlight for CarriedOperation {
    fn wait(mut self: Box<Self>) -> Result<Completed, Error> {
        self.order();
        let operation = self.operation.take().expect("it is awaited once");
        Ok(operation.into_completed())
    }
}

impl Drop for CarriedOperation {
    /// Its memory is used for something else after it.
    fn drop(&mut self) {
        if self.operation.is_none() {
            return;
        }
        if thread::panicking() {
            // A device that has failed orders nothing: peers may write there yet.
            mem::forget(self.operation.take());
        } else {
            self.order();
        }
    }
}

/// A communicator that does not move devices' memory though the one inside does.
pub struct OnHost {
    inner: Arc<dyn Communicator>,
}

impl OnHost {
    pub fn wrap(inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(OnHost { inner })
    }
}

impl Wrapper for OnHost {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        OnHost::wrap(inner)
    }

    fn moves_devices(&self) -> bool {
        false
    }
}
