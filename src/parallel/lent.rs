//! An accelerator's tensors as what a communicator moves in memory of devices.

use std::any::Any;
use std::ops::Range;

use guildhall_comm::{DeviceBuffer, DeviceCarrier, DeviceParcel, Reduce};
use guildhall_tensor::{LentParcel, LentTensor, NcclGroup, Reduction};

/// A tensor on its way.
#[derive(Debug)]
pub(super) struct LentBuffer(pub(super) LentTensor);

/// What a peer lends, whose buffers are of this type: an operation's are in memory of one kind.
fn of(buffer: &dyn DeviceBuffer) -> &LentTensor {
    let LentBuffer(tensor) = (buffer as &dyn Any).downcast_ref().expect("ranks lend their tensors");
    tensor
}

fn reduction(reduce: Reduce) -> Reduction {
    match reduce {
        Reduce::Sum => Reduction::Sum,
        Reduce::Max => Reduction::Max,
        Reduce::Min => Reduction::Min,
    }
}

impl DeviceBuffer for LentBuffer {
    fn copy(&self, first: usize, from: &dyn DeviceBuffer, bytes: Range<usize>) {
        self.0.copy(first, of(from), bytes);
    }

    fn reduce(&self, first: usize, reduce: Reduce, from: &[&dyn DeviceBuffer], bytes: Range<usize>) {
        let from: Vec<&LentTensor> = from.iter().map(|buffer| of(*buffer)).collect();
        self.0.reduce(first, reduction(reduce), &from, bytes);
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

/// A group of NCCL's, which carries tensors.
pub(crate) struct NcclCarrier(pub(crate) NcclGroup);

fn lent<'a>(parcels: &'a [DeviceParcel]) -> Vec<LentParcel<'a>> {
    let lent = |parcel: &'a DeviceParcel| LentParcel {
        peer: parcel.peer,
        tensor: of(parcel.buffer),
        bytes: parcel.bytes.clone(),
    };
    parcels.iter().map(lent).collect()
}

impl DeviceCarrier for NcclCarrier {
    fn copy(&self, (to, first): (&dyn DeviceBuffer, usize), from: &dyn DeviceBuffer, bytes: Range<usize>) {
        self.0.copy(of(to), first, of(from), bytes);
    }

    fn exchange(&self, sent: &[DeviceParcel], received: &[DeviceParcel]) -> Result<(), String> {
        self.0.exchange(&lent(sent), &lent(received))
    }

    fn reduce(
        &self,
        reduce: Reduce,
        sent: &[DeviceParcel],
        (own, bytes): (&dyn DeviceBuffer, Range<usize>),
        (to, first): (&dyn DeviceBuffer, usize),
    ) -> Result<(), String> {
        self.0.reduce(reduction(reduce), &lent(sent), (of(own), bytes), (of(to), first))
    }
}
