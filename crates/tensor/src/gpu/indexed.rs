//! Sums of rows by index on accelerators. The sources of each row are put into lists first, so that a row's block finds its own
//! without looking at all. Lists come in any order and a block sorts its own: sums have the CPU's order.

#![allow(clippy::too_many_arguments, reason = "a function has the operands and arguments of its line of the table")]

use super::call::Call;
use super::memory::Temporary;
use super::{Gpu, KernelArgument, OperandKind};
use crate::cpu::gather::Width;
use crate::cpu::select::NOWHERE;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// Threads of a block that sums a row's sources, where these are few: what it holds leaves room for many blocks of so many.
const THREADS: u32 = 64;

/// The first source of each row, and the next of each source.
struct SourceLists<'a> {
    heads: Temporary<'a>,
    next: Temporary<'a>,
}

impl<'a> SourceLists<'a> {
    /// Of rows of which the first is `first`, by the row of each source.
    fn new(gpu: &Gpu, device: &'a Device, rows: usize, of_sources: &Tensor, first: usize) -> SourceLists<'a> {
        let list = |len| Temporary::new(gpu, device, Dtype::U32, len);
        let lists = SourceLists { heads: list(rows), next: list(of_sources.len()) };
        let mut call = Call::new(gpu, device, "stored", "count_up");
        call.write(lists.heads.device_elements(), OperandKind::U32);
        NOWHERE.pass(&mut call);
        1u32.pass(&mut call);
        call.launch();
        let mut call = Call::new(gpu, device, "gather", "list_sources");
        call.write(lists.heads.device_elements(), OperandKind::U32);
        call.write(lists.next.device_elements(), OperandKind::U32);
        call.input(of_sources, OperandKind::U32);
        first.pass(&mut call);
        call.launch();
        lists
    }

    fn pass(&self, call: &mut Call) {
        call.read(self.heads.device_elements(), OperandKind::U32);
        call.read(self.next.device_elements(), OperandKind::U32);
    }
}

fn rows_of(tensor: &Tensor, width: usize) -> usize {
    tensor.len().checked_div(width).unwrap_or(0)
}

pub(crate) fn scatter_add(
    gpu: &Gpu,
    device: &Device,
    out: &mut Tensor,
    x: &Tensor,
    index: &Tensor,
    width: usize,
    accumulate: bool,
) {
    let lists = SourceLists::new(gpu, device, rows_of(out, width), index, 0);
    let mut call = Call::new(gpu, device, "gather", "scatter_add");
    call.output(out, OperandKind::F32);
    call.input(x, OperandKind::Any);
    call.input(index, OperandKind::U32);
    lists.pass(&mut call);
    width.pass(&mut call);
    accumulate.pass(&mut call);
    call.launch_by(THREADS);
}

pub(crate) fn weighted_sum_back_rows(
    gpu: &Gpu,
    device: &Device,
    dx: &mut Tensor,
    g: &Tensor,
    w: &Tensor,
    places: &Tensor,
    width: Width,
    accumulate: bool,
) {
    // Nowhere is beyond the last row.
    let lists = SourceLists::new(gpu, device, rows_of(dx, width.row), places, 0);
    let mut call = Call::new(gpu, device, "gather", "weighted_sum_back_rows");
    call.output(dx, OperandKind::F32);
    call.input(g, OperandKind::F32);
    call.input(w, OperandKind::F32);
    call.input(places, OperandKind::U32);
    lists.pass(&mut call);
    width.pass(&mut call);
    accumulate.pass(&mut call);
    call.launch_by(THREADS);
}

/// A row's sum is f32 in its block, so there is no need of the scratch.
pub(crate) fn look_up_back(
    gpu: &Gpu,
    device: &Device,
    table: &mut Tensor,
    _: &mut Tensor,
    g: &Tensor,
    ids: &Tensor,
    first: usize,
    width: usize,
    accumulate: bool,
) {
    let lists = SourceLists::new(gpu, device, rows_of(table, width), ids, first);
    let mut call = Call::new(gpu, device, "embedding", "look_up_back");
    call.output(table, OperandKind::Any);
    call.input(g, OperandKind::F32);
    call.input(ids, OperandKind::U32);
    lists.pass(&mut call);
    first.pass(&mut call);
    width.pass(&mut call);
    accumulate.pass(&mut call);
    call.launch();
}
