//! An accelerator's tensors as what a communicator moves in memory of devices.

use std::any::Any;
use std::ops::Range;

use guildhall_comm::{DeviceBuffer, Reduce};
use guildhall_tensor::{LentTensor, Reduction};

/// A tensor on its way.
#[derive(Debug)]
pub(super) struct LentBuffer(pub(super) LentTensor);

/// What a peer lends, whose buffers are of this type: an operation's are in memory of one kind.
fn of(buffer: &dyn DeviceBuffer) -> &LentTensor {
    let LentBuffer(tensor) = (buffer as &dyn Any).downcast_ref().expect("ranks lend their tensors");
    tensor
}

impl DeviceBuffer for LentBuffer {
    fn copy(&self, first: usize, from: &dyn DeviceBuffer, bytes: Range<usize>) {
        self.0.copy(first, of(from), bytes);
    }

    fn reduce(&self, first: usize, reduce: Reduce, from: &[&dyn DeviceBuffer], bytes: Range<usize>) {
        let reduction = match reduce {
            Reduce::Sum => Reduction::Sum,
            Reduce::Max => Reduction::Max,
            Reduce::Min => Reduction::Min,
        };
        let from: Vec<&LentTensor> = from.iter().map(|buffer| of(*buffer)).collect();
        self.0.reduce(first, reduction, &from, bytes);
    }

    fn mark(&self) {
        self.0.mark();
    }

    fn wait(&self, other: &dyn DeviceBuffer) {
        self.0.wait(of(other));
    }

    fn settle(&self) {
        self.0.settle();
    }
}
