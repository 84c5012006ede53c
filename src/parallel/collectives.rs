//! Collectives on the tape, each beside its adjoint.
//!
//! | forward | backward |
//! |---|---|
//! | all_to_all with counts | all_to_all, counts swapped |
//! | all_gather of parts of a weight | reduce_scatter, added into the parts |
//!
//! Rows, weights and their gradients are sent in the type in which the values are stored: in bf16, half the bytes of
//! f32.
//!
//! A collective is started at one point and awaited at another, and the tape records both points. In backward, the
//! adjoint is started at the point where forward waited for the collective, and awaited at the point where forward
//! started it. The computation between the two points therefore overlaps with both.
//!
//! What was received from other ranks may be kept for the recomputation of a segment ([`Kept::Communication`]). The
//! recomputation then starts no collective, and does not need the value that it would send. Backward is the same.

use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_comm::{Communicator, Completed, Error, Reduce, Request};
use guildhall_tensor::{Cause, Device, Gradients, Input, Kept, Tape, Tensor, Var};

use super::flight::{Flight, arriving, buffer, payload, received};

/// For each rank of a group, the number of rows that this rank sends to it and receives from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    pub send: Vec<usize>,
    pub receive: Vec<usize>,
}

impl RowCounts {
    /// The counts of the reverse exchange.
    pub fn swapped(&self) -> RowCounts {
        RowCounts { send: self.receive.clone(), receive: self.send.clone() }
    }
}

/// Sends rows sorted by destination and receives rows sorted by source: x `[sum(send), D]` gives `[sum(receive), D]`.
/// Memory without another owner is sent without a copy; shared memory is copied first.
///
/// # Errors
/// Any error of the group's communicator, in this call or later in backward.
#[track_caller]
pub fn all_to_all_rows(x: Var, counts: &RowCounts, group: &Arc<dyn Communicator>) -> Result<Var, Error> {
    start_all_to_all_rows(x, counts, group)?.finish()
}

/// Starts [`all_to_all_rows`].
///
/// # Errors
/// As [`all_to_all_rows`].
#[track_caller]
pub fn start_all_to_all_rows(x: Var, counts: &RowCounts, group: &Arc<dyn Communicator>) -> Result<Underway, Error> {
    let site = Location::caller();
    let (to, tape, dtype) = (x.input(), x.tape().clone(), x.dtype());
    let (sent, shape) = (x.shape().to_vec(), vec![counts.receive.iter().sum(), x.cols()]);
    let started = unless_kept(&tape, kept(group), shape, || exchange(x.into_value(), counts, group, site))?;
    let (group, back) = (group.clone(), counts.swapped());
    let way_back = WayBack {
        start: Box::new(move |gradient| exchange(gradient.into_dtype(dtype), &back, &group, site)),
        deliver: Box::new(move |device, done, gradients| gradients.add(to, received(device, &sent, done))),
    };
    Ok(Underway::new(&tape, "all_to_all_rows", to, started, way_back))
}

/// `site` is the line that asks for it.
fn exchange(
    rows: Tensor,
    counts: &RowCounts,
    group: &Arc<dyn Communicator>,
    site: &'static Location<'static>,
) -> Result<Flight, Error> {
    let (device, width) = (rows.device().clone(), rows.cols());
    if group.size() == 1 {
        return Ok(Flight::stays(&device, Cause::Communication, payload(group, rows)));
    }
    let elements = |counts: &[usize]| counts.iter().map(|n| n * width).collect::<Vec<_>>();
    let receive = arriving(group, &device, &[counts.receive.iter().sum(), width], rows.dtype());
    let (send, receive) = ((payload(group, rows), elements(&counts.send)), (receive, elements(&counts.receive)));
    let request = Request::all_to_all(send.0, send.1, receive.0, receive.1);
    Flight::start(group, &device, Cause::Communication, Request { site, ..request })
}

/// All-gathers parts of a weight. This rank contributes the parts `own` of x `[L, ...]`. The result
/// `[sum(counts), ...]` has rank r's `counts[r]` parts after those of lower ranks. In backward, a reduce-scatter sums
/// the gradients of each part on the rank that contributed it.
///
/// # Errors
/// Any error of the group's communicator, in this call or later in backward.
pub fn start_gather_parts(
    x: &Var,
    own: &[usize],
    counts: &[usize],
    group: &Arc<dyn Communicator>,
) -> Result<Underway, Error> {
    let (to, device, whole, dtype) = (x.input(), x.device().clone(), x.shape().to_vec(), x.dtype());
    let with_parts = |n: usize| [&[n][..], &whole[1..]].concat();
    let size: usize = whole[1..].iter().product();
    let (shape, mine) = (with_parts(counts.iter().sum()), with_parts(own.len()));
    let elements: Vec<usize> = counts.iter().map(|n| n * size).collect();
    let started = unless_kept(x.tape(), kept(group), shape.clone(), || {
        let mut send = buffer(&device, &mine, dtype);
        for (place, &part) in own.iter().enumerate() {
            send.copy_part(place * size, x.value(), part * size..(part + 1) * size);
        }
        let request =
            Request::all_gather(payload(group, send), arriving(group, &device, &shape, dtype), elements.clone());
        Flight::start(group, &device, Cause::Communication, request)
    })?;
    let (group, own, received_shape) = (group.clone(), own.to_vec(), mine.clone());
    let way_back = WayBack {
        start: Box::new(move |gradient: Tensor| {
            let (device, gradient) = (gradient.device().clone(), gradient.into_dtype(dtype));
            let receive = arriving(&group, &device, &mine, dtype);
            let request = Request::reduce_scatter(Reduce::Sum, payload(&group, gradient), receive, elements);
            Flight::start(&group, &device, Cause::Communication, request)
        }),
        deliver: Box::new(move |device, done, gradients| {
            let sums = received(device, &received_shape, done).into_f32();
            gradients.write_stored(device, to, &whole, |dx, accumulate| {
                if !accumulate {
                    dx.fill(0.0);
                }
                for (place, &part) in own.iter().enumerate() {
                    dx.add_to_part(part * size, &sums, place * size..(place + 1) * size);
                }
            });
        }),
    };
    Ok(Underway::new(x.tape(), "gather_parts", to, started, way_back))
}

/// A collective in flight whose start is on the tape.
#[must_use = "peers count on this collective: finish it"]
pub struct Underway {
    name: &'static str,
    /// The tape's entry for the start; an empty tensor.
    mark: Var,
    started: WayForward,
    start_back: StartBack,
    /// The adjoint, while it is in flight.
    returning: Rc<RefCell<Option<Flight>>>,
}

/// A collective in forward.
struct WayForward {
    /// `None` if the result is kept from the segment's first run.
    flight: Option<Flight>,
    kept: Kept,
    /// Shape of the result.
    shape: Vec<usize>,
}

type StartBack = Box<dyn FnOnce(Tensor) -> Result<Flight, Error>>;
type Deliver = Box<dyn FnOnce(&Arc<Device>, Completed, &mut Gradients)>;

/// The adjoint of a collective: how it is started from a gradient, and what is done with its result.
struct WayBack {
    start: StartBack,
    deliver: Deliver,
}

impl Underway {
    fn new(tape: &Tape, name: &'static str, to: Input, started: WayForward, way_back: WayBack) -> Underway {
        let returning = Rc::new(RefCell::new(None::<Flight>));
        let (device, arriving, deliver) = (tape.device().clone(), returning.clone(), way_back.deliver);
        let mark = tape.consuming_op(name, Tensor::zeros(&device, &[0]), &[to], move |_, gradients| {
            if let Some(flight) = arriving.take() {
                deliver(&device, flight.wait()?, gradients);
            }
            Ok(())
        });
        Underway { name, mark, started, start_back: way_back.start, returning }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn finish(self) -> Result<Var, Error> {
        let (to, tape, device) = (self.mark.input(), self.mark.tape().clone(), self.mark.device().clone());
        let WayForward { flight, kept, shape } = self.started;
        let value = tape.keep(kept, || {
            let flight = flight.expect("what is not kept was started");
            Ok::<_, Error>(received(&device, &shape, flight.wait()?))
        })?;
        let (start, returning) = (self.start_back, self.returning);
        Ok(tape.consuming_stored_op(self.name, value, &[to], move |gradient, gradients| {
            *returning.borrow_mut() = Some(start(gradient)?);
            gradients.add(to, Tensor::zeros(&device, &[0]));
            Ok(())
        }))
    }
}

/// What a group's results are for a recomputed segment: its own if the group has one rank, since nothing was received
/// from others.
pub(super) fn kept(group: &Arc<dyn Communicator>) -> Kept {
    if group.size() > 1 { Kept::Communication } else { Kept::Own }
}

/// Starts a collective with a result of this shape, unless the result is kept from the segment's first run.
fn unless_kept(
    tape: &Tape,
    kept: Kept,
    shape: Vec<usize>,
    start: impl FnOnce() -> Result<Flight, Error>,
) -> Result<WayForward, Error> {
    let flight = if tape.has_kept(kept) { None } else { Some(start()?) };
    Ok(WayForward { flight, kept, shape })
}
