//! Tensors as buffers of collectives, and back. In between they are no tensors, and counted all the same.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Completed, ElementKind, Error, Payload, Pending, Request, Span};
use guildhall_tensor::{Cause, Device, Dtype, Elements, Held, Tensor};

/// A collective under way, whose buffers count as this rank's until it is over.
pub(crate) struct Flight {
    pending: Pending,
    held: Held,
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
        Ok(Flight { pending: group.start(request)?, held })
    }

    /// # Errors
    /// What the group reports.
    pub(crate) fn wait(self) -> Result<Completed, Error> {
        let Flight { pending, held } = self;
        let done = pending.wait();
        drop(held);
        done
    }
}

/// Memory that a collective will fill.
pub(crate) fn buffer(device: &Arc<Device>, shape: &[usize], dtype: Dtype) -> Tensor {
    let _charge = device.charge(Cause::Communication);
    Tensor::stale(device, shape, dtype)
}

/// The same as a collective's buffer. Of a device with memory of its own there is nothing to bring over: it is the host's.
pub(crate) fn arriving(device: &Arc<Device>, shape: &[usize], dtype: Dtype) -> Payload {
    if device.has_own_memory() {
        let (elements, range) = device.host_window(dtype, shape.iter().product());
        return span(elements, range);
    }
    payload(buffer(device, shape, dtype))
}

/// What arrived; what was sent is given back.
pub(crate) fn received(device: &Arc<Device>, shape: &[usize], done: Completed) -> Tensor {
    let _charge = device.charge(Cause::Communication);
    give_back(device, done.send);
    tensor(device, shape, done.recv)
}

/// Gives the device back what was sent, for its next tensor of that size. A device with memory of its own only copied it.
pub(crate) fn give_back(device: &Arc<Device>, sent: Option<Payload>) {
    match sent {
        Some(sent) if device.has_own_memory() => elements(sent).into_iter().for_each(|(copy, _)| device.give(copy)),
        Some(sent) => drop(tensor(device, &[sent.len()], sent)),
        None => {}
    }
}

/// A tensor's memory as a collective's buffer, of the kind it is stored in; its size, where it is nothing more.
pub(crate) fn payload(tensor: Tensor) -> Payload {
    let (kind, len) = (kind(tensor.dtype()), tensor.len());
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
