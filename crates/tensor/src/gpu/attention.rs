//! Attention on accelerators: in bf16 tile by tile in registers (`kernels/flash_attention.cu`), where heads are small enough
//! and nothing is added to scores, and through shared memory (`kernels/attention.cu`) otherwise.

#![allow(clippy::too_many_arguments, reason = "a function has the operands and arguments of its line of the table")]

use super::call::{Call, DeviceElements};
use super::memory::Temporary;
use super::{Gpu, KernelArgument, OperandKind};
use crate::cpu::attention_call::AttentionSizes;
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

const OF_ANY_HEADS: &str = "attention";
const FLASH: &str = "flash_attention";

/// Lines that a block brings at once at most: heads have whole numbers of them.
const LINES: usize = 64;
/// How many times their size heads may be filled up to: an account knows nothing of this memory.
const FULLNESS: usize = 8;
/// Threads of a block: what its warps hold leaves room for a few.
const THREADS: u32 = 128;

/// Queries, keys and values side by side in a matrix, or each in its own.
#[derive(Clone, Copy)]
enum HeadSources<'a> {
    Fused(&'a Tensor),
    Apart([&'a Tensor; 3]),
}

/// Whose heads.
#[derive(Clone, Copy)]
enum HeadPart {
    Queries,
    Keys,
    Values,
}

const PARTS: [HeadPart; 3] = [HeadPart::Queries, HeadPart::Keys, HeadPart::Values];

impl<'a> HeadSources<'a> {
    fn is_fused(self) -> bool {
        matches!(self, HeadSources::Fused(_))
    }

    fn of(self, part: HeadPart) -> &'a Tensor {
        match self {
            HeadSources::Fused(qkv) => qkv,
            HeadSources::Apart(each) => each[part as usize],
        }
    }

    /// The kernels for heads of this size, if there are any.
    fn in_flash(self, shape: &AttentionSizes) -> Option<FlashKernels> {
        let dim = shape.head_dim.max(shape.value_dim);
        let in_bf16 = self.of(HeadPart::Queries).dtype() == Dtype::Bf16;
        // Many short rows would be filled up to many times their size.
        let is_full = |dim: usize| {
            let lines = [shape.seq, shape.key_seq].map(|lines| [lines.next_multiple_of(LINES) * dim, lines]);
            lines.iter().all(|[filled, lines]| *filled <= FULLNESS * lines * shape.head_dim.min(shape.value_dim))
        };
        FLASH_KERNELS
            .into_iter()
            .find(|kernels| in_bf16 && dim <= kernels.dim && is_full(kernels.dim) && shape.scale > 0.0)
    }
}

/// Names of kernels for heads that are filled up to so many numbers.
#[derive(Clone, Copy)]
struct FlashKernels {
    dim: usize,
    forward: &'static str,
    back_queries: &'static str,
    back_keys: &'static str,
}

const FLASH_KERNELS: [FlashKernels; 3] = [
    FlashKernels {
        dim: 32,
        forward: "flash_attention_32",
        back_queries: "flash_attention_back_queries_32",
        back_keys: "flash_attention_back_keys_32",
    },
    FlashKernels {
        dim: 64,
        forward: "flash_attention_64",
        back_queries: "flash_attention_back_queries_64",
        back_keys: "flash_attention_back_keys_64",
    },
    FlashKernels {
        dim: 128,
        forward: "flash_attention_128",
        back_queries: "flash_attention_back_queries_128",
        back_keys: "flash_attention_back_keys_128",
    },
];

/// One call of these kernels.
struct FlashCall<'a> {
    gpu: &'a Gpu,
    device: &'a Device,
    kernels: FlashKernels,
    shape: AttentionSizes,
    /// Cosines and sines.
    turns: [&'a Tensor; 2],
}

impl<'a> FlashCall<'a> {
    fn call(&self, name: &'static str) -> Call<'a> {
        Call::new(self.gpu, self.device, FLASH, name)
    }

    /// Lines of heads, filled up.
    fn lines_of(&self, part: HeadPart) -> usize {
        let lines = if matches!(part, HeadPart::Queries) { self.shape.seq } else { self.shape.key_seq };
        lines.next_multiple_of(LINES)
    }

    fn room(&self, part: HeadPart, heads: usize) -> Temporary<'a> {
        let len = self.shape.rows * heads * self.lines_of(part) * self.kernels.dim;
        Temporary::new(self.gpu, self.device, Dtype::Bf16, len)
    }

    /// Heads in bf16, turned by position, line by line.
    fn arrange(&self, from: HeadSources, part: HeadPart) -> Temporary<'a> {
        let heads = if matches!(part, HeadPart::Queries) { self.shape.heads } else { self.shape.kv_heads };
        let to = self.room(part, heads);
        let mut call = self.call("arrange_heads");
        call.write(to.device_elements(), OperandKind::Any);
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
    fn arrange_slopes(&self, slopes: &Tensor) -> Temporary<'a> {
        let to = self.room(HeadPart::Queries, self.shape.heads);
        let mut call = self.call("arrange_slopes");
        call.write(to.device_elements(), OperandKind::Any);
        call.input(slopes, OperandKind::F32);
        self.shape.pass(&mut call);
        self.lines_of(HeadPart::Queries).pass(&mut call);
        self.kernels.dim.pass(&mut call);
        call.launch();
        to
    }

    /// What the backward knows of each query: the log-sum-exp of scores, and the output's product with its gradient.
    fn arrange_sums(&self, out: &Tensor, lse: &Tensor, slopes: &Tensor) -> [Temporary<'a>; 2] {
        let len = self.shape.rows * self.shape.heads * self.lines_of(HeadPart::Queries);
        let sums = [(); 2].map(|()| Temporary::new(self.gpu, self.device, Dtype::F32, len));
        let mut call = self.call("arrange_sums");
        sums.iter().for_each(|sums| call.write(sums.device_elements(), OperandKind::F32));
        call.input(out, OperandKind::Any);
        [lse, slopes].into_iter().for_each(|input| call.input(input, OperandKind::F32));
        self.shape.pass(&mut call);
        self.lines_of(HeadPart::Queries).pass(&mut call);
        call.launch();
        sums
    }

    fn pass_lines(&self, call: &mut Call) {
        [HeadPart::Queries, HeadPart::Keys].into_iter().for_each(|part| self.lines_of(part).pass(call));
    }

    fn forward(&self, [out, lse]: [&mut Tensor; 2], from: HeadSources, keys: &Tensor) {
        let [q, k, v] = PARTS.map(|part| self.arrange(from, part));
        let mut call = self.call(self.kernels.forward);
        call.output(out, OperandKind::F32);
        call.output(lse, OperandKind::F32);
        read_all(&mut call, [&q, &k, &v]);
        call.input(keys, OperandKind::U32);
        self.shape.pass(&mut call);
        self.pass_lines(&mut call);
        call.launch_by(THREADS);
    }

    /// Fills dq, dk and dv, which may all be the same.
    fn backward(&self, [dq, dk, dv]: [DeviceElements; 3], from: HeadSources, [out, lse, slopes, keys]: [&Tensor; 4]) {
        let [q, k, v] = PARTS.map(|part| self.arrange(from, part));
        let (sums, slopes) = (self.arrange_sums(out, lse, slopes), self.arrange_slopes(slopes));
        for (name, outputs) in [(self.kernels.back_queries, &[dq][..]), (self.kernels.back_keys, &[dk, dv])] {
            let mut call = self.call(name);
            outputs.iter().for_each(|&to| call.write(to, OperandKind::F32));
            read_all(&mut call, [&q, &k, &v, &slopes]);
            sums.iter().for_each(|sums| call.read(sums.device_elements(), OperandKind::F32));
            call.input(keys, OperandKind::U32);
            self.shape.pass(&mut call);
            from.is_fused().pass(&mut call);
            self.pass_lines(&mut call);
            call.launch_by(THREADS);
        }
        self.turn_back(dq, HeadPart::Queries, from.is_fused());
        self.turn_back(dk, HeadPart::Keys, from.is_fused());
    }

    fn turn_back(&self, to: DeviceElements, part: HeadPart, is_fused: bool) {
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

fn read_all<const N: usize>(call: &mut Call, parts: [&Temporary; N]) {
    parts.into_iter().for_each(|heads| call.read(heads.device_elements(), OperandKind::Any));
}

/// The kernel that takes any heads: inputs of either float type, and those that are f32.
fn launch_for_any(
    gpu: &Gpu,
    device: &Device,
    name: &'static str,
    outputs: &[&Tensor],
    [inputs, sums]: [&[&Tensor]; 2],
    keys: &Tensor,
    tables: &[&Tensor],
    shape: AttentionSizes,
) {
    let mut call = Call::new(gpu, device, OF_ANY_HEADS, name);
    outputs.iter().for_each(|output| call.write(output.device_elements(), OperandKind::F32));
    inputs.iter().for_each(|input| call.input(input, OperandKind::Any));
    sums.iter().for_each(|input| call.input(input, OperandKind::F32));
    call.input(keys, OperandKind::U32);
    tables.iter().for_each(|input| call.input(input, OperandKind::F32));
    shape.pass(&mut call);
    call.launch();
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
    let from = HeadSources::Fused(qkv);
    if let Some(kernels) = from.in_flash(&shape) {
        return FlashCall { gpu, device, kernels, shape, turns: [cos, sin] }.forward([out, lse], from, keys);
    }
    launch_for_any(gpu, device, "attention", &[out, lse], [&[qkv], &[]], keys, &[cos, sin], shape);
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
    let from = HeadSources::Fused(qkv);
    if let Some(kernels) = from.in_flash(&shape) {
        let to = [dqkv.device_elements(); 3];
        return FlashCall { gpu, device, kernels, shape, turns: [cos, sin] }.backward(to, from, [out, lse, g, keys]);
    }
    launch_for_any(gpu, device, "attention_back", &[dqkv], [&[qkv, out], &[lse, g]], keys, &[cos, sin], shape);
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
    let from = HeadSources::Apart([q, k, v]);
    if let Some(kernels) = from.in_flash(&shape).filter(|_| bias.len() + sinks.len() == 0) {
        return FlashCall { gpu, device, kernels, shape, turns: [cos, sin] }.forward([out, lse], from, keys);
    }
    let tables = [cos, sin, bias, sinks];
    launch_for_any(gpu, device, "attention_apart", &[out, lse], [&[q, k, v], &[]], keys, &tables, shape);
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
    let from = HeadSources::Apart([q, k, v]);
    if let Some(kernels) = from.in_flash(&shape).filter(|_| bias.len() + sinks.len() == 0) {
        let to = [dq, dk, dv].map(|to| to.device_elements());
        return FlashCall { gpu, device, kernels, shape, turns: [cos, sin] }.backward(to, from, [out, lse, g, keys]);
    }
    let (outputs, tables) = ([&*dq, dk, dv, dbias, dsinks], [cos, sin, bias, sinks]);
    let inputs = [&[q, k, v, out][..], &[lse, g]];
    launch_for_any(gpu, device, "attention_apart_back", &outputs, inputs, keys, &tables, shape);
}
