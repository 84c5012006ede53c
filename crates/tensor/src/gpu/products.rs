//! Products on accelerators: the composed lines of the table that are made of the engine's product of two matrices and of
//! kernels in between.
//!
//! An engine multiplies two matrices of one type. Where one factor is bf16, the other is rounded first, as the CPU does
//! while it packs; counts of rows by expert are on the host, so experts are a list of products, which an engine may do
//! together.

#![allow(clippy::too_many_arguments, reason = "a function has the operands and arguments of its line of the table")]

use super::call::{Call, DeviceElements};
use super::memory::Temporary;
use super::{DeviceMatrix, DeviceProduct, Gpu, KernelArgument, OperandKind};
use crate::cpu::grouped_swiglu::Widths;
use crate::cpu::product::{Matrix, Product};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// Elements as a matrix of all their rows.
fn matrix(elements: DeviceElements, cols: usize) -> DeviceMatrix {
    let rows = elements.len().checked_div(cols).unwrap_or(0);
    DeviceMatrix { elements, first: 0, rows, cols, transposed: false }
}

fn of_rows(elements: DeviceElements, of: &Matrix) -> DeviceMatrix {
    let first = of.rows.start * of.cols;
    DeviceMatrix { elements, first, rows: of.rows.len(), cols: of.cols, transposed: of.transposed }
}

/// What a product of these two multiplies.
fn type_of(a: Dtype, b: Dtype) -> Dtype {
    if a == Dtype::Bf16 || b == Dtype::Bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

/// Elements `range` of `from` over all of `to`, in its type.
pub(super) fn convert(
    gpu: &Gpu,
    device: &Device,
    to: (DeviceElements, usize),
    from: DeviceElements,
    range: std::ops::Range<usize>,
) {
    let mut call = Call::new(gpu, device, "stored", "convert");
    call.write(to.0, OperandKind::Any);
    call.read(from, OperandKind::Any);
    to.1.pass(&mut call);
    range.pass(&mut call);
    call.launch();
}

/// A factor in the type that is multiplied: itself, or a copy, which lives as long as the second.
fn factor<'a>(
    gpu: &Gpu,
    device: &'a Device,
    from: DeviceMatrix,
    dtype: Dtype,
) -> (DeviceMatrix, Option<Temporary<'a>>) {
    if from.elements.dtype() == dtype {
        return (from, None);
    }
    let len = from.rows * from.cols;
    let copy = Temporary::new(gpu, device, dtype, len);
    convert(gpu, device, (copy.device_elements(), 0), from.elements, from.first..from.first + len);
    (DeviceMatrix { elements: copy.device_elements(), first: 0, ..from }, Some(copy))
}

/// Calls `f` with memory for a result whose factors are of `dtype`: an engine sums f32 in f32 alone, so that results in bf16
/// go through a copy.
fn result(gpu: &Gpu, device: &Device, c: DeviceMatrix, dtype: Dtype, accumulate: bool, f: impl FnOnce(DeviceMatrix)) {
    if c.elements.dtype() == Dtype::F32 || c.elements.dtype() == dtype {
        return f(c);
    }
    let len = c.rows * c.cols;
    let sums = Temporary::new(gpu, device, Dtype::F32, len);
    if accumulate {
        convert(gpu, device, (sums.device_elements(), 0), c.elements, c.first..c.first + len);
    }
    f(DeviceMatrix { elements: sums.device_elements(), first: 0, ..c });
    convert(gpu, device, (c.elements, c.first), sums.device_elements(), 0..len);
}

pub(crate) fn multiply_into(gpu: &Gpu, device: &Device, out: &mut Tensor, a: &Tensor, b: &Tensor, p: &Product) {
    let [rows, _, cols] = p.dims();
    let c = DeviceMatrix { elements: out.device_elements(), first: p.first * cols, rows, cols, transposed: false };
    let dtype = type_of(a.dtype(), b.dtype());
    let (a, _a) = factor(gpu, device, of_rows(a.device_elements(), &p.a), dtype);
    let (b, _b) = factor(gpu, device, of_rows(b.device_elements(), &p.b), dtype);
    result(gpu, device, c, dtype, p.accumulate, |c| {
        gpu.multiply(device, &DeviceProduct { c, a, b, accumulate: p.accumulate });
    });
}

pub(crate) fn linear(
    gpu: &Gpu,
    device: &Device,
    out: &mut Tensor,
    a: &Tensor,
    b: &Tensor,
    row: &Tensor,
    read: [&Matrix; 2],
) {
    let [read_a, read_b] = read.map(Matrix::clone);
    let p = Product { a: read_a, b: read_b, first: 0, accumulate: true };
    // A pass that no plan counts: products of cuBLAS add to what is there alone.
    let mut call = Call::new(gpu, device, "product", "fill_rows");
    call.write(out.device_elements(), OperandKind::Any);
    call.read(row.device_elements(), OperandKind::Any);
    p.dims()[0].pass(&mut call);
    call.launch();
    multiply_into(gpu, device, out, a, b, &p);
}

pub(crate) fn weight_gradient(
    gpu: &Gpu,
    device: &Device,
    dw: &mut Tensor,
    _: &mut Tensor,
    g: &Tensor,
    x: &Tensor,
    widths: [usize; 2],
    accumulate: bool,
) {
    let rows = g.len().checked_div(widths[0]).unwrap_or(0);
    gradient_by_expert(gpu, device, dw, [g, x], &[rows], widths, accumulate);
}

pub(crate) fn grouped_multiply(
    gpu: &Gpu,
    device: &Device,
    y: &mut Tensor,
    x: &Tensor,
    w: &Tensor,
    counts: &[usize],
    w_dims: [usize; 2],
    by_transpose: bool,
    accumulate: bool,
) {
    multiply_by_expert(
        gpu,
        device,
        y.device_elements(),
        [x.device_elements(), w.device_elements()],
        counts,
        (w_dims, by_transpose),
        accumulate,
    );
}

fn multiply_by_expert(
    gpu: &Gpu,
    device: &Device,
    y: DeviceElements,
    [x, w]: [DeviceElements; 2],
    counts: &[usize],
    ([w_rows, w_cols], by_transpose): ([usize; 2], bool),
    accumulate: bool,
) {
    let (inner, outer) = if by_transpose { (w_cols, w_rows) } else { (w_rows, w_cols) };
    let dtype = type_of(x.dtype(), w.dtype());
    let (x, _x) = factor(gpu, device, matrix(x, inner), dtype);
    let (w, _w) = factor(gpu, device, matrix(w, w_cols), dtype);
    result(gpu, device, matrix(y, outer), dtype, accumulate, |y| {
        let (mut products, mut first) = (Vec::new(), 0);
        for (expert, &rows) in counts.iter().enumerate().filter(|(_, rows)| **rows > 0) {
            let b = DeviceMatrix { transposed: by_transpose, ..w.at_rows(expert * w_rows, w_rows) };
            products.push(DeviceProduct { c: y.at_rows(first, rows), a: x.at_rows(first, rows), b, accumulate });
            first += rows;
        }
        gpu.multiply_all(device, &products);
    });
}

pub(crate) fn grouped_weight_gradient(
    gpu: &Gpu,
    device: &Device,
    dw: &mut Tensor,
    _: &mut Tensor,
    g: &Tensor,
    x: &Tensor,
    counts: &[usize],
    widths: [usize; 2],
    accumulate: bool,
) {
    gradient_by_expert(gpu, device, dw, [g, x], counts, widths, accumulate);
}

fn gradient_by_expert(
    gpu: &Gpu,
    device: &Device,
    dw: &mut Tensor,
    [g, x]: [&Tensor; 2],
    counts: &[usize],
    [outer, inner]: [usize; 2],
    accumulate: bool,
) {
    let dtype = type_of(g.dtype(), x.dtype());
    let (g, _g) = factor(gpu, device, matrix(g.device_elements(), outer), dtype);
    let (x, _x) = factor(gpu, device, matrix(x.device_elements(), inner), dtype);
    result(gpu, device, matrix(dw.device_elements(), inner), dtype, accumulate, |dw| {
        let (mut products, mut first) = (Vec::new(), 0);
        for (expert, &rows) in counts.iter().enumerate() {
            let c = dw.at_rows(expert * outer, outer);
            match rows {
                0 if accumulate => {}
                0 => fill(gpu, device, c),
                _ => {
                    let a = DeviceMatrix { transposed: true, ..g.at_rows(first, rows) };
                    products.push(DeviceProduct { c, a, b: x.at_rows(first, rows), accumulate });
                }
            }
            first += rows;
        }
        gpu.multiply_all(device, &products);
    });
}

/// Zeros.
fn fill(gpu: &Gpu, device: &Device, to: DeviceMatrix) {
    let mut call = Call::new(gpu, device, "stored", "fill");
    call.write(to.elements, OperandKind::Any);
    0.0f32.pass(&mut call);
    (to.first..to.first + to.rows * to.cols).pass(&mut call);
    call.launch();
}

pub(crate) fn gate_and_up(
    gpu: &Gpu,
    device: &Device,
    kept: &mut Tensor,
    x: &Tensor,
    first: &Tensor,
    counts: &[usize],
    widths: Widths,
) {
    let (Widths { outer, inner }, factors) = (widths, [x.device_elements(), first.device_elements()]);
    multiply_by_expert(gpu, device, kept.device_elements(), factors, counts, ([2 * inner, outer], true), false);
}

pub(crate) fn swiglu_experts(
    gpu: &Gpu,
    device: &Device,
    kept: &mut Tensor,
    y: &mut Tensor,
    x: &Tensor,
    first: &Tensor,
    second: &Tensor,
    counts: &[usize],
    widths: Widths,
) {
    gate_and_up(gpu, device, kept, x, first, counts, widths);
    from_gate_and_up(gpu, device, y, kept, second, counts, widths);
}

pub(crate) fn from_gate_and_up(
    gpu: &Gpu,
    device: &Device,
    y: &mut Tensor,
    kept: &Tensor,
    second: &Tensor,
    counts: &[usize],
    Widths { outer, inner }: Widths,
) {
    let hidden = Temporary::new(gpu, device, kept.dtype(), kept.len() / 2);
    let mut call = Call::new(gpu, device, "grouped_swiglu", "gated");
    call.write(hidden.device_elements(), OperandKind::Any);
    call.read(kept.device_elements(), OperandKind::Any);
    inner.pass(&mut call);
    call.launch();
    let factors = [hidden.device_elements(), second.device_elements()];
    multiply_by_expert(gpu, device, y.device_elements(), factors, counts, ([outer, inner], true), false);
}

pub(crate) fn swiglu_experts_back(
    gpu: &Gpu,
    device: &Device,
    kept: &mut Tensor,
    hidden: &mut Tensor,
    dx: &mut Tensor,
    g: &Tensor,
    first: &Tensor,
    second: &Tensor,
    counts: &[usize],
    Widths { outer, inner }: Widths,
    accumulate: bool,
) {
    let slopes = Temporary::new(gpu, device, Dtype::F32, hidden.len());
    let factors = [g.device_elements(), second.device_elements()];
    multiply_by_expert(gpu, device, slopes.device_elements(), factors, counts, ([outer, inner], false), false);
    let mut call = Call::new(gpu, device, "grouped_swiglu", "gated_gradient");
    call.write(kept.device_elements(), OperandKind::Any);
    call.write(hidden.device_elements(), OperandKind::Any);
    call.read(slopes.device_elements(), OperandKind::F32);
    inner.pass(&mut call);
    call.launch();
    let factors = [kept.device_elements(), first.device_elements()];
    multiply_by_expert(gpu, device, dx.device_elements(), factors, counts, ([2 * inner, outer], false), accumulate);
}
