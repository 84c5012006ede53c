//! Collectives on the tape, each beside its adjoint.
//!
//! | forward | backward |
//! |---|---|
//! | all_to_all with counts | all_to_all, counts swapped |
//! | all_gather of parts of a weight | reduce_scatter, added into the parts |
//!
//! A collective is started in one place and awaited in another. The tape knows both: going back, the adjoint is started
//! where this one was awaited and awaited where this one was started, so what ran meanwhile hides both.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_comm::{Communicator, Completed, Error, Payload, Pending, Reduce, Request, Span};
use guildhall_tensor::{Cause, Device, Dtype, Elements, Gradients, Input, Tape, Tensor, Var};

/// Rows each rank of a group sends to and receives from each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowCounts {
    pub send: Vec<usize>,
    pub receive: Vec<usize>,
}

impl RowCounts {
    /// The counts of the way back.
    pub fn swapped(&self) -> RowCounts {
        RowCounts { send: self.receive.clone(), receive: self.send.clone() }
    }
}

/// Rows sorted by destination go out, rows sorted by source come in: x `[sum(send), D]` gives `[sum(receive), D]`. Memory
/// that nobody else holds is sent as it is; shared memory is copied first.
///
/// # Errors
/// What the group reports, on the way forward here and on the way back from the tape.
pub fn all_to_all_rows(x: Var, counts: &RowCounts, group: &Arc<dyn Communicator>) -> Result<Var, Error> {
    start_all_to_all_rows(x, counts, group)?.finish()
}

/// [`all_to_all_rows`], under way.
///
/// # Errors
/// As it.
pub fn start_all_to_all_rows(x: Var, counts: &RowCounts, group: &Arc<dyn Communicator>) -> Result<Underway, Error> {
    let (to, tape, dtype) = (x.input(), x.tape().clone(), x.dtype());
    let (sent, shape) = (x.shape().to_vec(), vec![counts.receive.iter().sum(), x.value().cols()]);
    let pending = exchange(x.into_value().into_f32(), counts, group)?;
    let (group, back) = (group.clone(), counts.swapped());
    let way_back = WayBack {
        start: Box::new(move |gradient| exchange(gradient, &back, &group)),
        deliver: Box::new(move |device, done, gradients| gradients.add(to, received(device, &sent, done))),
    };
    Ok(Underway::new(&tape, ("all_to_all_rows", to), pending, (shape, dtype), way_back))
}

fn exchange(rows: Tensor, counts: &RowCounts, group: &Arc<dyn Communicator>) -> Result<Pending, Error> {
    let (device, width) = (rows.device().clone(), rows.cols());
    let elements = |counts: &[usize]| counts.iter().map(|n| n * width).collect::<Vec<_>>();
    let receive = buffer(&device, &[counts.receive.iter().sum(), width]);
    group.start(Request::all_to_all(payload(rows), elements(&counts.send), payload(receive), elements(&counts.receive)))
}

/// Parts of a weight from all ranks: x `[L, ...]`, of which this rank gives the parts `own`; gives `[sum(counts), ...]`, rank
/// r's `counts[r]` parts after those of lower ranks. Going back, what the ranks made of a part is added up where it came
/// from.
///
/// # Errors
/// What the group reports, on the way forward here and on the way back from the tape.
pub fn start_gather_parts(
    x: &Var,
    own: &[usize],
    counts: &[usize],
    group: &Arc<dyn Communicator>,
) -> Result<Underway, Error> {
    let (to, device, whole) = (x.input(), x.device().clone(), x.shape().to_vec());
    let with_parts = |n: usize| [&[n][..], &whole[1..]].concat();
    let size: usize = whole[1..].iter().product();
    let value = x.value().to_f32();
    let mut send = buffer(&device, &with_parts(own.len()));
    for (to, &from) in send.f32s_mut().chunks_exact_mut(size).zip(own) {
        to.copy_from_slice(&value.f32s()[from * size..][..size]);
    }
    let (shape, mine) = (with_parts(counts.iter().sum()), with_parts(own.len()));
    let elements: Vec<usize> = counts.iter().map(|n| n * size).collect();
    let receive = buffer(&device, &shape);
    let pending = group.start(Request::all_gather(payload(send), payload(receive), elements.clone()))?;
    let (group, own, received_shape) = (group.clone(), own.to_vec(), mine.clone());
    let way_back = WayBack {
        start: Box::new(move |gradient: Tensor| {
            let receive = buffer(gradient.device(), &mine);
            group.start(Request::reduce_scatter(Reduce::Sum, payload(gradient), payload(receive), elements))
        }),
        deliver: Box::new(move |device, done, gradients| {
            let sums = received(device, &received_shape, done);
            gradients.write(device, to, &whole, |dx, accumulate| {
                if !accumulate {
                    dx.fill(0.0);
                }
                for (sum, &part) in sums.f32s().chunks_exact(size).zip(&own) {
                    dx[part * size..][..size].iter_mut().zip(sum).for_each(|(x, s)| *x += s);
                }
            });
        }),
    };
    Ok(Underway::new(x.tape(), ("gather_parts", to), pending, (shape, x.dtype()), way_back))
}

/// A collective that has been started, on the tape too.
#[must_use = "peers count on this collective: finish it"]
pub struct Underway {
    name: &'static str,
    /// The place of the start on the tape; empty.
    mark: Var,
    pending: Pending,
    shape: Vec<usize>,
    dtype: Dtype,
    start_back: StartBack,
    /// The adjoint, between its start and its end.
    returning: Rc<RefCell<Option<Pending>>>,
}

type StartBack = Box<dyn FnOnce(Tensor) -> Result<Pending, Error>>;
type Deliver = Box<dyn FnOnce(&Arc<Device>, Completed, &mut Gradients)>;

/// The adjoint of a collective: how it is started from a gradient, and what is done with its result.
struct WayBack {
    start: StartBack,
    deliver: Deliver,
}

impl Underway {
    fn new(
        tape: &Tape,
        (name, to): (&'static str, Input),
        pending: Pending,
        (shape, dtype): (Vec<usize>, Dtype),
        way_back: WayBack,
    ) -> Underway {
        let returning = Rc::new(RefCell::new(None::<Pending>));
        let (device, arriving, deliver) = (tape.device().clone(), returning.clone(), way_back.deliver);
        let mark = tape.consuming_op(name, Tensor::zeros(&device, &[0]), &[to], move |_, gradients| {
            if let Some(pending) = arriving.take() {
                deliver(&device, pending.wait()?, gradients);
            }
            Ok(())
        });
        Underway { name, mark, pending, shape, dtype, start_back: way_back.start, returning }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// What the group reports.
    pub fn finish(self) -> Result<Var, Error> {
        let (to, tape, device) = (self.mark.input(), self.mark.tape().clone(), self.mark.device().clone());
        let value = received(&device, &self.shape, self.pending.wait()?).cast(self.dtype);
        let (start, returning) = (self.start_back, self.returning);
        Ok(tape.consuming_op(self.name, value, &[to], move |gradient, gradients| {
            *returning.borrow_mut() = Some(start(gradient)?);
            gradients.add(to, Tensor::zeros(&device, &[0]));
            Ok(())
        }))
    }
}

/// Memory that a collective will fill.
pub(super) fn buffer(device: &Arc<Device>, shape: &[usize]) -> Tensor {
    let _charge = device.charge(Cause::Communication);
    Tensor::stale(device, shape, Dtype::F32)
}

/// What arrived; what was sent goes back to the device, whose next tensor of its size takes it.
pub(super) fn received(device: &Arc<Device>, shape: &[usize], done: Completed) -> Tensor {
    let _charge = device.charge(Cause::Communication);
    if let Some(sent) = done.send {
        drop(tensor(device, &[sent.len()], sent));
    }
    tensor(device, shape, done.recv)
}

/// A tensor's memory as a collective's buffer.
pub(crate) fn payload(tensor: Tensor) -> Payload {
    match tensor.into_window() {
        (Elements::F32(data), range) => Payload::F32(Span { data, range }),
        (Elements::Bf16(data), range) => Payload::Bf16(Span { data, range }),
    }
}

/// A collective's buffer as a tensor again.
pub(crate) fn tensor(device: &Arc<Device>, shape: &[usize], payload: Payload) -> Tensor {
    let (data, range) = match payload {
        Payload::F32(Span { data, range }) => (Elements::F32(data), range),
        Payload::Bf16(Span { data, range }) => (Elements::Bf16(data), range),
        other => panic!("a collective on tensors returned {:?}", other.kind()),
    };
    Tensor::from_window(device, shape, data, range)
}
