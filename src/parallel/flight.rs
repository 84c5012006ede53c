//! Tensors as buffers of collectives, and back. In between they are no tensors, and counted all the same.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Completed, ElementKind, Error, Payload, Pending, Request, Span};
use guildhall_tensor::{Cause, Device, Dtype, Elements, Held, Tensor};

use super::lent::LentBuffer;

/// A collective under way, whose buffers count as this rank's until it is over.
pub(crate) struct Flight {
    state: FlightState,
    held: Held,
}

enum FlightState {
    Pending(Pending),
    /// What a rank would send to itself alone has arrived.
    Stays(Payload),
}

impl Flight {
    /// Starts `request`, its buffers held for `cause`.
    ///
    /// # Errors
    /// What the group reports.
    pub(crate) fn start(
        group: &Arc<dyn Communicator>,
        device: &Arc<Device>,
        cause: Cause,
        request: Request,
    ) -> Result<Flight, Error> {
        let held = device.hold(cause, request.operation.bytes() as u64);
        Ok(Flight { state: FlightState::Pending(group.start(request)?), held })
    }

    /// What goes to nobody else, held for `cause` all the same until somebody waits for it.
    pub(crate) fn stays(device: &Arc<Device>, cause: Cause, payload: Payload) -> Flight {
        let held = device.hold(cause, (payload.len() * payload.kind().size()) as u64);
        Flight { state: FlightState::Stays(payload), held }
    }

    /// # Errors
    /// What the group reports.
    pub(crate) fn wait(self) -> Result<Completed, Error> {
        let Flight { state, held } = self;
        let done = match state {
            FlightState::Pending(pending) => pending.wait(),
            FlightState::Stays(recv) => Ok(Completed { send: None, recv }),
        };
        drop(held);
        done
    }
}

/// Memory that a collective will fill.
pub(crate) fn buffer(device: &Arc<Device>, shape: &[usize], dtype: Dtype) -> Tensor {
    let _charge = device.charge(Cause::Communication);
    Tensor::stale(device, shape, dtype)
}

/// The same as a buffer of the group's collective. Of a device whose memory the group does not move there is nothing to bring
/// over: it is the host's.
pub(crate) fn arriving(group: &Arc<dyn Communicator>, device: &Arc<Device>, shape: &[usize], dtype: Dtype) -> Payload {
    if device.has_own_memory() && !group.moves_devices() {
        let (elements, range) = device.host_window(dtype, shape.iter().product());
        return span(elements, range);
    }
    payload(group, buffer(device, shape, dtype))
}

/// What arrived; what was sent is given back.
pub(crate) fn received(device: &Arc<Device>, shape: &[usize], done: Completed) -> Tensor {
    let _charge = device.charge(Cause::Communication);
    give_back(device, done.send);
    tensor(device, shape, done.recv)
}

/// Gives the device back what was sent, for its next tensor of that size. Of a device with memory of its own it may be a copy.
pub(crate) fn give_back(device: &Arc<Device>, sent: Option<Payload>) {
    match sent {
        Some(sent) if device.has_own_memory() && sent.is_on_host() => {
            elements(sent).into_iter().for_each(|(copy, _)| device.give(copy));
        }
        Some(sent) => drop(tensor(device, &[sent.len()], sent)),
        None => {}
    }
}

/// A tensor's memory as a buffer of the group's collective, of the kind it is stored in; its size, where it is nothing more.
pub(crate) fn payload(group: &Arc<dyn Communicator>, tensor: Tensor) -> Payload {
    let (kind, len) = (kind(tensor.dtype()), tensor.len());
    if tensor.device().has_own_memory() && group.moves_devices() {
        return Payload::Device(kind, len, Box::new(LentBuffer(tensor.into_lent())));
    }
    match tensor.into_window() {
        Some((elements, range)) => span(elements, range),
        None => Payload::Opaque(kind, len),
    }
}

fn span(elements: Elements, range: Range<usize>) -> Payload {
    match elements {
        Elements::F32(data) => Payload::F32(Span { data, range }),
        Elements::Bf16(data) => Payload::Bf16(Span { data, range }),
        Elements::U32(data) => Payload::U32(Span { data, range }),
    }
}

fn kind(dtype: Dtype) -> ElementKind {
    match dtype {
        Dtype::F32 => ElementKind::F32,
        Dtype::Bf16 => ElementKind::Bf16,
        Dtype::U32 => ElementKind::U32,
    }
}

/// A collective's buffer as a tensor again.
pub(crate) fn tensor(device: &Arc<Device>, shape: &[usize], payload: Payload) -> Tensor {
    let dtype = match payload.kind() {
        ElementKind::F32 => Dtype::F32,
        ElementKind::Bf16 => Dtype::Bf16,
        ElementKind::U32 => Dtype::U32,
        other => panic!("a collective of tensors returned {other:?}"),
    };
    let payload = match payload {
        Payload::Device(.., buffer) => {
            let buffer: Box<dyn Any> = buffer;
            let LentBuffer(lent) = *buffer.downcast().expect("a rank gets back what it lent");
            return lent.into_tensor(shape);
        }
        other => other,
    };
    match elements(payload) {
        Some((elements, range)) => Tensor::from_window(device, shape, elements, range),
        None => Tensor::from_size(device, shape, dtype),
    }
}

/// What a tensor may have of a buffer; nothing where there are only sizes.
fn elements(payload: Payload) -> Option<(Elements, Range<usize>)> {
    match payload {
        Payload::F32(Span { data, range }) => Some((Elements::F32(data), range)),
        Payload::Bf16(Span { data, range }) => Some((Elements::Bf16(data), range)),
        Payload::U32(Span { data, range }) => Some((Elements::U32(data), range)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use guildhall_comm::{messages, threads};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// The numbers of two ranks on simulated devices, gathered by each, and whether they stayed in devices' memory.
    #[track_caller]
    fn check(world: Vec<Arc<dyn Communicator>>, stays: bool) {
        let ranks = threads::run_on(world, |group| {
            let device = Device::simulated(1).expect("a C++ compiler");
            let own = Tensor::filled(&device, &[3], 1.0 + group.rank() as f32);
            let (send, receive) = (payload(&group, own), arriving(&group, &device, &[6], Dtype::F32));
            let lent = [&send, &receive].map(|lent| matches!(lent, Payload::Device(..)));
            let request = Request::all_gather(send, receive, vec![3; 2]);
            let done = Flight::start(&group, &device, Cause::Communication, request)?.wait()?;
            Ok::<_, Error>((received(&device, &[6], done).to_vec(), lent))
        });
        for rank in ranks {
            let (numbers, lent) = rank.unwrap_or_else(|failure| panic!("{failure}"));
            assert_eq!((&numbers[..], lent), (&[1.0, 1.0, 1.0, 2.0, 2.0, 2.0][..], [stays; 2]));
        }
    }

    #[test]
    fn devices_of_threads_copy_from_each_other() {
        check(threads::world(2, threads::Options { timeout: TIMEOUT }), true);
    }

    #[test]
    fn messages_go_by_way_of_the_host() {
        check(messages::local(2).into_iter().map(|post| messages::world(post, TIMEOUT)).collect(), false);
    }
}
