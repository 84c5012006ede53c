//! Long sums on accelerators. Many blocks each add up a part whose size depends on the operands alone, so that results do
//! not depend on the device; a second launch adds up the parts in their order.

#![allow(clippy::too_many_arguments, reason = "a function has the operands and arguments of its line of the table")]

use std::ops::Range;

use super::call::{Call, DeviceElements};
use super::memory::Temporary;
use super::products::convert;
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

/// Blocks that there are enough of for any device, and rows that are worth one.
const BLOCKS: usize = 2048;
const LEAST_ROWS: usize = 64;
/// Columns that a block sums at a time.
const STRIP: usize = 32;

/// Parts in which rows are summed.
fn parts_of(rows: usize, width: usize) -> usize {
    (BLOCKS / width.div_ceil(STRIP).max(1)).min(rows / LEAST_ROWS).max(1)
}

/// `sums (+)=` the sums of the columns of x.
fn add_columns(
    gpu: &Gpu,
    device: &Device,
    sums: DeviceElements,
    x: DeviceElements,
    [rows, parts]: [usize; 2],
    accumulate: bool,
) {
    let mut call = Call::new(gpu, device, "product", "column_sums");
    call.write(sums, OperandKind::F32);
    call.read(x, OperandKind::F32);
    rows.pass(&mut call);
    parts.pass(&mut call);
    accumulate.pass(&mut call);
    call.launch();
}

/// What kernel `name` sums over the rows of `inputs` for each column of `outs`, all of as many columns.
fn columns<const N: usize>(
    gpu: &Gpu,
    device: &Device,
    outs: [&mut Tensor; N],
    (module, name): (&'static str, &'static str),
    inputs: &[(&Tensor, OperandKind)],
    rows: usize,
) {
    let (outs, width) = (outs.each_ref().map(|out| out.device_elements()), outs[0].len());
    let parts = parts_of(rows, width);
    let sums = outs.map(|_| Temporary::new(gpu, device, Dtype::F32, parts * width));
    let mut call = Call::new(gpu, device, module, name);
    sums.iter().for_each(|sums| call.write(sums.device_elements(), OperandKind::F32));
    inputs.iter().for_each(|(input, kind)| call.input(input, *kind));
    parts.pass(&mut call);
    call.launch();
    for (out, sums) in outs.into_iter().zip(&sums) {
        add_columns(gpu, device, out, sums.device_elements(), [parts, 1], false);
    }
}

pub(crate) fn column_sums(gpu: &Gpu, device: &Device, sums: &mut Tensor, x: &Tensor, rows: usize, accumulate: bool) {
    let (width, sums) = (sums.len(), sums.device_elements());
    let parts = parts_of(rows, width);
    let of_parts = Temporary::new(gpu, device, Dtype::F32, parts * width);
    add_columns(gpu, device, of_parts.device_elements(), x.device_elements(), [rows, parts], false);
    add_columns(gpu, device, sums, of_parts.device_elements(), [parts, 1], accumulate);
}

pub(crate) fn convert_and_sum(gpu: &Gpu, device: &Device, out: &mut Tensor, sums: &mut Tensor, x: &Tensor) {
    convert(gpu, device, (out.device_elements(), 0), x.device_elements(), 0..x.len());
    let rows = x.len().checked_div(sums.len()).unwrap_or(0);
    column_sums(gpu, device, sums, x, rows, false);
}

pub(crate) fn rms_norm_back_weight(
    gpu: &Gpu,
    device: &Device,
    dw: &mut Tensor,
    x: &Tensor,
    g: &Tensor,
    inverse: &Tensor,
) {
    let inputs = [(x, OperandKind::Any), (g, OperandKind::F32), (inverse, OperandKind::F32)];
    columns(gpu, device, [dw], ("norm", "rms_norm_back_weight"), &inputs, inverse.len());
}

pub(crate) fn layer_norm_back_weight(
    gpu: &Gpu,
    device: &Device,
    dw: &mut Tensor,
    x: &Tensor,
    g: &Tensor,
    moments: &Tensor,
) {
    let inputs = [(x, OperandKind::Any), (g, OperandKind::F32), (moments, OperandKind::F32)];
    columns(gpu, device, [dw], ("norm", "layer_norm_back_weight"), &inputs, moments.len() / 2);
}

pub(crate) fn denormalise_back_affine(
    gpu: &Gpu,
    device: &Device,
    dw: &mut Tensor,
    db: &mut Tensor,
    x: &Tensor,
    moments: &Tensor,
    w: &Tensor,
    b: &Tensor,
    g: &Tensor,
) {
    let inputs = [x, moments, w, b, g].map(|input| (input, OperandKind::F32));
    columns(gpu, device, [dw, db], ("denorm", "denormalise_back_affine"), &inputs, moments.len() / 2);
}

/// Threads of a block that adds up squares: so few that even a small weight has blocks for much of a device.
const SQUARING_THREADS: u32 = 32;

/// To the CPU's bits: runs are compared by the bits of norms. Two launches, however many tiles.
pub(crate) fn add_squares(
    gpu: &Gpu,
    device: &Device,
    sums: &mut Tensor,
    x: &Tensor,
    place: usize,
    range: Range<usize>,
    tile: usize,
) {
    let parts = doubles(gpu, device, range.len().div_ceil(SQUARES));
    let mut call = Call::new(gpu, device, "adamw", "block_squares");
    call.write(parts.device_elements(), OperandKind::F64);
    call.input(x, OperandKind::F32);
    range.pass(&mut call);
    SQUARES.pass(&mut call);
    call.launch_by(SQUARING_THREADS);
    let mut call = Call::new(gpu, device, "adamw", "add_in_order");
    call.output(sums, OperandKind::F64);
    call.read(parts.device_elements(), OperandKind::F64);
    place.pass(&mut call);
    (tile / SQUARES).pass(&mut call);
    call.launch();
}
