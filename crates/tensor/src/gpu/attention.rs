//! Attention on accelerators: in bf16 by warps that each have a tile (`kernels/warp_attention.cu`), where heads are small
//! enough and nothing is added to scores, and by blocks (`kernels/attention.cu`) otherwise.

#![allow(clippy::too_many_arguments, reason = "a function has the operands and arguments of its line of the table")]

use super::call::{Call, DeviceElements};
use super::memory::Temporary;
use super::{Gpu, KernelArgument, OperandKind};
use crate::cpu::attention_call::AttentionSizes;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

const BLOCKS: &str = "attention";
const WARPS: &str = "warp_attention";

/// Lines that a warp multiplies with at once: heads have whole numbers of them.
const LINES: usize = 32;

/// Queries, keys and values side by side in a matrix, or each in its own.
#[derive(Clone, Copy)]
enum Projections<'a> {
    Fused(&'a Tensor),
    Apart([&'a Tensor; 3]),
}

/// Whose heads.
#[derive(Clone, Copy)]
enum Part {
    Queries,
    Keys,
    Values,
}

impl<'a> Projections<'a> {
    fn is_fused(self) -> bool {
        matches!(self, Projections::Fused(_))
    }

    fn of(self, part: Part) -> &'a Tensor {
        match self {
            Projections::Fused(qkv) => qkv,
            Projections::Apart(each) => each[part as usize],
        }
    }

    /// The kernels of warps for heads of this size, if there are any.
    fn by_warps(self, shape: &AttentionSizes) -> Option<WarpKernels> {
        let dim = shape.head_dim.max(shape.value_dim);
        let in_bf16 = self.of(Part::Queries).dtype() == Dtype::Bf16;
        WARP_KERNELS.into_iter().find(|kernels| in_bf16 && dim <= kernels.dim && shape.scale > 0.0)
    }
}

/// Names of kernels for heads that are filled up to so many numbers.
#[derive(Clone, Copy)]
struct WarpKernels {
    dim: usize,
    forward: &'static str,
    back_queries: &'static str,
    back_keys: &'static str,
}

const WARP_KERNELS: [WarpKernels; 3] = [
    WarpKernels {
        dim: 32,
        forward: "warp_attention_32",
        back_queries: "warp_attention_back_queries_32",
        back_keys: "warp_attention_back_keys_32",
    },
    WarpKernels {
        dim: 64,
        forward: "warp_attention_64",
        back_queries: "warp_attention_back_queries_64",
        back_keys: "warp_attention_back_keys_64",
    },
    WarpKernels {
        dim: 128,
        forward: "warp_attention_128",
        back_queries: "warp_attention_back_queries_128",
        back_keys: "warp_attention_back_keys_128",
    },
];

/// Which arrangements of heads a kernel takes.
#[derive(Clone, Copy)]
enum Arranged {
    Lines,
    Columns,
    Both,
}

/// Heads in bf16 as warps take them, line by line and column by column, as far as they are needed.
struct Heads<'a> {
    lines: Temporary<'a>,
    columns: Temporary<'a>,
}

/// One call by warps.
struct WarpCall<'a> {
    gpu: &'a Gpu,
    device: &'a Device,
    kernels: WarpKernels,
    shape: AttentionSizes,
    /// Cosines and sines.
    turns: [&'a Tensor; 2],
}

impl<'a> WarpCall<'a> {
    fn call(&self, name: &'static str) -> Call<'a> {
        Call::new(self.gpu, self.device, WARPS, name)
    }

    /// Lines of heads, filled up.
    fn lines_of(&self, part: Part) -> usize {
        let lines = if matches!(part, Part::Queries) { self.shape.seq } else { self.shape.key_seq };
        lines.next_multiple_of(LINES)
    }

    fn room(&self, part: Part, heads: usize, arranged: Arranged) -> Heads<'a> {
        let len = self.shape.rows * heads * self.lines_of(part) * self.kernels.dim;
        let room = |is_needed| Temporary::new(self.gpu, self.device, Dtype::Bf16, if is_needed { len } else { 0 });
        Heads {
            lines: room(!matches!(arranged, Arranged::Columns)),
            columns: room(!matches!(arranged, Arranged::Lines)),
        }
    }

    fn arrange(&self, from: Projections, part: Part, arranged: Arranged) -> Heads<'a> {
        let heads = if matches!(part, Part::Queries) { self.shape.heads } else { self.shape.kv_heads };
        let to = self.room(part, heads, arranged);
        let mut call = self.call("arrange_heads");
        to.write(&mut call);
        call.input(from.of(part), OperandKind::Any);
        self.turns.iter().for_each(|turns| call.input(turns, OperandKind::F32));
        self.shape.pass(&mut call);
        (part as u32).pass(&mut call);
        from.is_fused().pass(&mut call);
        self.lines_of(part).pass(&mut call);
        self.kernels.dim.pass(&mut call);
        call.launch();
        to
    }

    /// Of the output's gradient.
    fn arrange_slopes(&self, slopes: &Tensor) -> Heads<'a> {
        let to = self.room(Part::Queries, self.shape.heads, Arranged::Both);
        let mut call = self.call("arrange_slopes");
        to.write(&mut call);
        call.input(slopes, OperandKind::F32);
        self.shape.pass(&mut call);
        self.lines_of(Part::Queries).pass(&mut call);
        self.kernels.dim.pass(&mut call);
        call.launch();
        to
    }

    /// What the backward knows of each query: the log-sum-exp of scores, and the output's product with its gradient.
    fn arrange_sums(&self, out: &Tensor, lse: &Tensor, slopes: &Tensor) -> [Temporary<'a>; 2] {
        let len = self.shape.rows * self.shape.heads * self.lines_of(Part::Queries);
        let sums = [(); 2].map(|()| Temporary::new(self.gpu, self.device, Dtype::F32, len));
        let mut call = self.call("arrange_sums");
        sums.iter().for_each(|sums| call.write(sums.device_elements(), OperandKind::F32));
        call.input(out, OperandKind::Any);
        [lse, slopes].into_iter().for_each(|input| call.input(input, OperandKind::F32));
        self.shape.pass(&mut call);
        self.lines_of(Part::Queries).pass(&mut call);
        call.launch();
        sums
    }

    fn pass_lines(&self, call: &mut Call) {
        [Part::Queries, Part::Keys].into_iter().for_each(|part| self.lines_of(part).pass(call));
    }

    fn forward(&self, [out, lse]: [&mut Tensor; 2], from: Projections, keys: &Tensor) {
        let q = self.arrange(from, Part::Queries, Arranged::Lines);
        let k = self.arrange(from, Part::Keys, Arranged::Lines);
        let v = self.arrange(from, Part::Values, Arranged::Columns);
        let mut call = self.call(self.kernels.forward);
        call.output(out, OperandKind::F32);
        call.output(lse, OperandKind::F32);
        [&q.lines, &k.lines, &v.columns].into_iter().for_each(|heads| read(&mut call, heads));
        call.input(keys, OperandKind::U32);
        self.shape.pass(&mut call);
        self.pass_lines(&mut call);
        call.launch();
    }

    /// Fills dq, dk and dv, which may all be the same.
    fn backward(&self, [dq, dk, dv]: [DeviceElements; 3], from: Projections, [out, lse, slopes, keys]: [&Tensor; 4]) {
        let q = self.arrange(from, Part::Queries, Arranged::Both);
        let k = self.arrange(from, Part::Keys, Arranged::Both);
        let v = self.arrange(from, Part::Values, Arranged::Lines);
        let sums = self.arrange_sums(out, lse, slopes);
        let slopes = self.arrange_slopes(slopes);
        let finish = |mut call: Call<'a>| {
            sums.iter().for_each(|sums| call.read(sums.device_elements(), OperandKind::F32));
            call.input(keys, OperandKind::U32);
            self.shape.pass(&mut call);
            from.is_fused().pass(&mut call);
            self.pass_lines(&mut call);
            call.launch();
        };
        let mut call = self.call(self.kernels.back_queries);
        call.write(dq, OperandKind::F32);
        [&q.lines, &k.lines, &k.columns, &v.lines, &slopes.lines].into_iter().for_each(|heads| read(&mut call, heads));
        finish(call);
        let mut call = self.call(self.kernels.back_keys);
        [dk, dv].into_iter().for_each(|to| call.write(to, OperandKind::F32));
        [&q.lines, &q.columns, &k.lines, &v.lines, &slopes.lines, &slopes.columns]
            .into_iter()
            .for_each(|heads| read(&mut call, heads));
        finish(call);
        self.turn_back(dq, Part::Queries, from.is_fused());
        self.turn_back(dk, Part::Keys, from.is_fused());
    }

    fn turn_back(&self, to: DeviceElements, part: Part, is_fused: bool) {
        if self.shape.rotary_dim == 0 {
            return;
        }
        let mut call = self.call("turn_heads_back");
        call.write(to, OperandKind::F32);
        self.turns.iter().for_each(|turns| call.input(turns, OperandKind::F32));
        self.shape.pass(&mut call);
        (part as u32).pass(&mut call);
        is_fused.pass(&mut call);
        call.launch();
    }
}

impl Heads<'_> {
    fn write(&self, call: &mut Call) {
        [&self.lines, &self.columns].into_iter().for_each(|to| call.write(to.device_elements(), OperandKind::Any));
    }
}

fn read(call: &mut Call, heads: &Temporary) {
    call.read(heads.device_elements(), OperandKind::Any);
}

pub(crate) fn attention(
    gpu: &Gpu,
    device: &Device,
    out: &mut Tensor,
    lse: &mut Tensor,
    qkv: &Tensor,
    keys: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    shape: AttentionSizes,
) {
    let from = Projections::Fused(qkv);
    if let Some(kernels) = from.by_warps(&shape) {
        return WarpCall { gpu, device, kernels, shape, turns: [cos, sin] }.forward([out, lse], from, keys);
    }
    let mut call = Call::new(gpu, device, BLOCKS, "attention");
    [out, lse].into_iter().for_each(|output| call.output(output, OperandKind::F32));
    call.input(qkv, OperandKind::Any);
    call.input(keys, OperandKind::U32);
    [cos, sin].into_iter().for_each(|input| call.input(input, OperandKind::F32));
    shape.pass(&mut call);
    call.launch();
}

pub(crate) fn attention_back(
    gpu: &Gpu,
    device: &Device,
    dqkv: &mut Tensor,
    qkv: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    g: &Tensor,
    keys: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    shape: AttentionSizes,
) {
    let from = Projections::Fused(qkv);
    if let Some(kernels) = from.by_warps(&shape) {
        let to = [dqkv.device_elements(); 3];
        return WarpCall { gpu, device, kernels, shape, turns: [cos, sin] }.backward(to, from, [out, lse, g, keys]);
    }
    let mut call = Call::new(gpu, device, BLOCKS, "attention_back");
    call.output(dqkv, OperandKind::F32);
    [qkv, out].into_iter().for_each(|input| call.input(input, OperandKind::Any));
    [lse, g].into_iter().for_each(|input| call.input(input, OperandKind::F32));
    call.input(keys, OperandKind::U32);
    [cos, sin].into_iter().for_each(|input| call.input(input, OperandKind::F32));
    shape.pass(&mut call);
    call.launch();
}

pub(crate) fn attention_apart(
    gpu: &Gpu,
    device: &Device,
    out: &mut Tensor,
    lse: &mut Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    keys: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    bias: &Tensor,
    sinks: &Tensor,
    shape: AttentionSizes,
) {
    let from = Projections::Apart([q, k, v]);
    if let Some(kernels) = from.by_warps(&shape).filter(|_| bias.len() + sinks.len() == 0) {
        return WarpCall { gpu, device, kernels, shape, turns: [cos, sin] }.forward([out, lse], from, keys);
    }
    let mut call = Call::new(gpu, device, BLOCKS, "attention_apart");
    [out, lse].into_iter().for_each(|output| call.output(output, OperandKind::F32));
    [q, k, v].into_iter().for_each(|input| call.input(input, OperandKind::Any));
    call.input(keys, OperandKind::U32);
    [cos, sin, bias, sinks].into_iter().for_each(|input| call.input(input, OperandKind::F32));
    shape.pass(&mut call);
    call.launch();
}

pub(crate) fn attention_apart_back(
    gpu: &Gpu,
    device: &Device,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
    dbias: &mut Tensor,
    dsinks: &mut Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    g: &Tensor,
    keys: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    bias: &Tensor,
    sinks: &Tensor,
    shape: AttentionSizes,
) {
    let from = Projections::Apart([q, k, v]);
    if let Some(kernels) = from.by_warps(&shape).filter(|_| bias.len() + sinks.len() == 0) {
        let to = [dq, dk, dv].map(|to| to.device_elements());
        return WarpCall { gpu, device, kernels, shape, turns: [cos, sin] }.backward(to, from, [out, lse, g, keys]);
    }
    let mut call = Call::new(gpu, device, BLOCKS, "attention_apart_back");
    [dq, dk, dv, dbias, dsinks].into_iter().for_each(|output| call.output(output, OperandKind::F32));
    [q, k, v, out].into_iter().for_each(|input| call.input(input, OperandKind::Any));
    [lse, g].into_iter().for_each(|input| call.input(input, OperandKind::F32));
    call.input(keys, OperandKind::U32);
    [cos, sin, bias, sinks].into_iter().for_each(|input| call.input(input, OperandKind::F32));
    shape.pass(&mut call);
    call.launch();
}
