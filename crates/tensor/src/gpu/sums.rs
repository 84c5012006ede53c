//! Long sums on accelerators. Many blocks each add up a part whose size depends on the operands alone, so that results do
//! not depend on the device; a second launch adds up the parts in their order.

#![allow(clippy::too_many_arguments, reason = "a function has the operands and arguments of its line of the table")]

use std::ops::Range;

use super::call::{Call};
use super::memory::Temporary;
use super::{Gpu, KernelArgument, OperandKind};
use crate::cpu::adamw::SQUARES;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// Terms of a scalar that a block adds up.
const STRETCH: usize = 1 << 12;

/// Room for as many f64, in two halves each.
fn doubles<'a>(gpu: &Gpu, device: &'a Device, count: usize) -> Temporary<'a> {
    Temporary::new(gpu, device, Dtype::U32, 2 * count)
}

/// `out[0] = scale sum`, of terms that kernel `name` makes of the elements of `inputs`.
fn scalar(
    gpu: &Gpu,
    device: &Device,
    out: &mut Tensor,
    (module, name): (&'static str, &'static str),
    inputs: &[&Tensor],
    scale: f32,
) {
    let sums = doubles(gpu, device, inputs[0].len().div_ceil(STRETCH));
    let mut call = Call::new(gpu, device, module, name);
    call.write(sums.device_elements(), OperandKind::F64);
    inputs.iter().for_each(|input| call.input(input, OperandKind::F32));
    STRETCH.pass(&mut call);
    call.launch();
    let mut call = Call::new(gpu, device, "elementwise", "add_up");
    call.output(out, OperandKind::F32);
    call.read(sums.device_elements(), OperandKind::F64);
    scale.pass(&mut call);
    call.launch();
}

pub(crate) fn dot(gpu: &Gpu, device: &Device, out: &mut Tensor, x: &Tensor, y: &Tensor) {
    scalar(gpu, device, out, ("elementwise", "dots"), &[x, y], 1.0);
}

pub(crate) fn weighted_squares(gpu: &Gpu, device: &Device, out: &mut Tensor, lse: &Tensor, weights: &Tensor) {
    scalar(gpu, device, out, ("softmax", "squares_by_weight"), &[lse, weights], 1.0);
}

/// Whatever `block` the host adds by.
pub(crate) fn total(gpu: &Gpu, device: &Device, out: &mut Tensor, losses: &Tensor, _: usize, scale: f32) {
    scalar(gpu, device, out, ("cross_entropy", "loss_sums"), &[losses], scale);
}

/// To the CPU's bits: runs are compared by the bits of norms.
pub(crate) fn add_squares(
    gpu: &Gpu,
    device: &Device,
    sums: &mut Tensor,
    x: &Tensor,
    place: usize,
    range: Range<usize>,
) {
    let parts = doubles(gpu, device, range.len().div_ceil(SQUARES));
    let mut call = Call::new(gpu, device, "adamw", "block_squares");
    call.write(parts.device_elements(), OperandKind::F64);
    call.input(x, OperandKind::F32);
    range.pass(&mut call);
    SQUARES.pass(&mut call);
    call.launch();
    let mut call = Call::new(gpu, device, "adamw", "add_in_order");
    call.output(sums, OperandKind::F64);
    call.read(parts.device_elements(), OperandKind::F64);
    place.pass(&mut call);
    call.launch();
}
