//! Collectives on the tape, each beside its adjoint.
//!
//! | forward | backward |
//! |---|---|
//! | all_to_all with counts | all_to_all, counts swapped |

use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Payload, Span};
use guildhall_tensor::{Cause, Dtype, Tensor, Var};

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
    let (to, dtype, tape) = (x.input(), x.dtype(), x.tape().clone());
    let out = exchange(x.into_value().into_f32(), counts, group)?;
    let (group, back) = (group.clone(), counts.swapped());
    Ok(tape.consuming_op("all_to_all_rows", out.cast(dtype), &[to], move |gradient, gradients| {
        gradients.add(to, exchange(gradient, &back, &group)?);
        Ok(())
    }))
}

#[track_caller]
fn exchange(rows: Tensor, counts: &RowCounts, group: &Arc<dyn Communicator>) -> Result<Tensor, Error> {
    let (device, width) = (rows.device().clone(), rows.cols());
    let elements = |counts: &[usize]| counts.iter().map(|n| n * width).collect::<Vec<_>>();
    let received: usize = counts.receive.iter().sum();
    let _charge = device.charge(Cause::Communication);
    let receive = Tensor::stale(&device, &[received, width], Dtype::F32);
    let done = group.all_to_all(payload(rows), elements(&counts.send), payload(receive), elements(&counts.receive))?;
    if let Some(sent) = done.send {
        // Back to the device, whose next tensor of this size takes it.
        drop(tensor(&device, &[sent.len()], sent));
    }
    Ok(tensor(&device, &[received, width], done.recv))
}

/// A tensor's memory as a collective's buffer.
pub(crate) fn payload(tensor: Tensor) -> Payload {
    let (data, range) = tensor.into_window();
    Payload::F32(Span { data, range })
}

/// A collective's buffer as a tensor again.
pub(crate) fn tensor(device: &Arc<guildhall_tensor::Device>, shape: &[usize], payload: Payload) -> Tensor {
    match payload {
        Payload::F32(Span { data, range }) => Tensor::from_window(device, shape, data, range),
        other => panic!("an f32 collective returned {:?}", other.kind()),
    }
}
