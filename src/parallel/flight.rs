//! Tensors as buffers of collectives, and back. In between they are no tensors, and counted all the same.

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

/// What arrived; what was sent goes back to the device, whose next tensor of its size takes it.
pub(crate) fn received(device: &Arc<Device>, shape: &[usize], done: Completed) -> Tensor {
    let _charge = device.charge(Cause::Communication);
    if let Some(sent) = done.send {
        drop(tensor(device, &[sent.len()], sent));
    }
    tensor(device, shape, done.recv)
}

/// A tensor's memory as a collective's buffer, of the kind it is stored in; its size, where it is nothing more.
pub(crate) fn payload(tensor: Tensor) -> Payload {
    let (kind, len) = (kind(tensor.dtype()), tensor.len());
    match tensor.into_window() {
        Some((Elements::F32(data), range)) => Payload::F32(Span { data, range }),
        Some((Elements::Bf16(data), range)) => Payload::Bf16(Span { data, range }),
        Some((Elements::U32(data), range)) => Payload::U32(Span { data, range }),
        None => Payload::Opaque(kind, len),
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
    let (elements, range) = match payload {
        Payload::F32(Span { data, range }) => (Elements::F32(data), range),
        Payload::Bf16(Span { data, range }) => (Elements::Bf16(data), range),
        Payload::U32(Span { data, range }) => (Elements::U32(data), range),
        Payload::Opaque(ElementKind::F32, _) => return Tensor::from_size(device, shape, Dtype::F32),
        Payload::Opaque(ElementKind::Bf16, _) => return Tensor::from_size(device, shape, Dtype::Bf16),
        Payload::Opaque(ElementKind::U32, _) => return Tensor::from_size(device, shape, Dtype::U32),
        other => panic!("a collective of tensors returned {:?}", other.kind()),
    };
    Tensor::from_window(device, shape, elements, range)
}
