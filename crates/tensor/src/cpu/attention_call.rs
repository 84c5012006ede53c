//! What one attention call works on: sizes, masks and positions, and where the heads of its matrices lie.

use std::ops::Range;

use half::bf16;

use crate::cpu::gemm::{Numbers, View};
use crate::cpu::rows::{prefetch_run, put_line};
use crate::cpu::stored::{StoredNumber, StoredRef};

/// Which two of the numbers that turn with positions turn together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TurningPairs {
    /// One of the first half and one of the second (GPT-NeoX).
    #[default]
    Halves,
    /// Two that stand side by side (Su et al. 2021).
    Neighbours,
}

/// Sizes of one attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AttentionSizes {
    pub(crate) rows: usize,
    /// Queries of a row.
    pub(crate) seq: usize,
    /// Keys of a row.
    pub(crate) key_seq: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Of queries and keys.
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// The last numbers of a head's queries and keys that turn with positions; 0 where none do.
    pub(crate) rotary_dim: usize,
    pub(crate) pairs: TurningPairs,
    /// Factor on products of queries and keys.
    pub(crate) scale: f32,
}

impl AttentionSizes {
    /// Columns of the fused projection.
    pub(crate) fn width(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.value_dim
    }
}

/// Where the heads of queries, keys or values lie.
#[derive(Clone, Copy)]
pub(super) struct HeadLines {
    /// Lines of a row of the batch.
    pub(super) seq: usize,
    /// Numbers of a line.
    pub(super) width: usize,
    /// Of the first head.
    pub(super) column: usize,
    /// Numbers of a head.
    pub(super) dim: usize,
    pub(super) rotates: bool,
}

/// Sizes, masks and positions.
pub(super) struct AttentionCall<'a> {
    pub(super) shape: AttentionSizes,
    /// Whether products are of bf16.
    pub(super) in_bf16: bool,
    /// Of queries, keys and values.
    pub(super) lines: [HeadLines; 3],
    /// For every query, the first key of its row that it sees and the one after the last; neither ever falls within a
    /// row.
    pub(super) keys: &'a [[u32; 2]],
    /// Cosines and sines `[T, rotary_dim / 2]` of rotary positions.
    pub(super) rotary: [&'a [f32]; 2],
    /// Added to scores, `[seq - 1 + key_seq, heads]`: by how much farther in its row the key is than the query, from
    /// `1 - seq` on. Empty if nothing is.
    pub(super) bias: &'a [f32],
    /// A score a head that takes part in the softmax and has no value; empty if none does.
    pub(super) sinks: &'a [f32],
}

impl<'a> AttentionCall<'a> {
    /// Queries, keys and values side by side.
    pub(super) fn fused(
        (shape, in_bf16): (AttentionSizes, bool),
        keys: &'a [u32],
        rotary: [&'a [f32]; 2],
    ) -> AttentionCall<'a> {
        let (queries, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let lines = [(0, true), (queries, true), (queries + kv, false)];
        let (seq, width, dim) = (shape.seq, shape.width(), shape.head_dim);
        let lines = lines.map(|(column, rotates)| HeadLines { seq, width, column, dim, rotates });
        AttentionCall { shape, in_bf16, lines, keys: keys.as_chunks().0, rotary, bias: &[], sinks: &[] }
    }

    /// Each in a matrix of its own.
    pub(super) fn apart(
        (shape, in_bf16): (AttentionSizes, bool),
        keys: &'a [u32],
        rotary: [&'a [f32]; 2],
        [bias, sinks]: [&'a [f32]; 2],
    ) -> AttentionCall<'a> {
        let of = |seq, heads: usize, dim, rotates| HeadLines { seq, width: heads * dim, column: 0, dim, rotates };
        let AttentionSizes { seq, key_seq, heads, kv_heads, head_dim, value_dim, .. } = shape;
        let keys_of = |dim, rotates| of(key_seq, kv_heads, dim, rotates);
        let lines = [of(seq, heads, head_dim, true), keys_of(head_dim, true), keys_of(value_dim, false)];
        AttentionCall { lines, bias, sinks, ..AttentionCall::fused((shape, in_bf16), keys, rotary) }
    }

    /// What is added to a head's scores, by distance; empty if nothing is.
    pub(super) fn bias_of(&self, head: usize) -> Vec<f32> {
        self.bias.iter().skip(head).step_by(self.shape.heads).copied().collect()
    }

    /// Where the heads of outputs lie.
    pub(super) fn output_lines(&self) -> HeadLines {
        let AttentionSizes { seq, heads, value_dim: dim, .. } = self.shape;
        HeadLines { seq, width: heads * dim, column: 0, dim, rotates: false }
    }

    pub(super) fn group(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Where the distances of a query begin among those of [`AttentionCall::bias`].
    pub(super) fn first_distance(&self, query: usize) -> usize {
        self.shape.seq - 1 - query
    }
}

/// A pointer that tasks writing disjoint elements may share.
#[derive(Clone, Copy)]
pub(super) struct Shared(*mut f32, usize);

// SAFETY: every task writes only the columns of its own heads in its own rows.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(data: &mut [f32]) -> Shared {
        Shared(data.as_mut_ptr(), data.len())
    }

    /// # Safety
    /// No other task touches these elements.
    #[expect(clippy::mut_from_ref, reason = "the point of the type; disjointness is the caller's promise")]
    pub(super) unsafe fn slice(&self, start: usize, len: usize) -> &mut [f32] {
        assert!(start + len <= self.1);
        // SAFETY: in bounds by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Tokens to look ahead: one head's columns of the next token lie in another page.
const AHEAD: usize = 4;

/// One head's columns of one batch row, `[seq, dim]`, as products take them: rounded once, if they multiply bf16.
pub(super) struct HeadMatrix {
    numbers: HeadNumbers,
    dim: usize,
}

enum HeadNumbers {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl HeadMatrix {
    pub(super) fn new(in_bf16: bool) -> HeadMatrix {
        let numbers = if in_bf16 { HeadNumbers::Bf16(Vec::new()) } else { HeadNumbers::F32(Vec::new()) };
        HeadMatrix { numbers, dim: 0 }
    }

    pub(super) fn rows(&self, rows: Range<usize>) -> View<'_> {
        let numbers = match &self.numbers {
            HeadNumbers::F32(numbers) => Numbers::F32(numbers),
            HeadNumbers::Bf16(numbers) => Numbers::Bf16(numbers),
        };
        View::of(numbers.tail(rows.start * self.dim), rows.len(), self.dim, self.dim)
    }

    /// Takes the place of what was there; rotated by position if they are queries or keys.
    #[inline(always)]
    pub(super) fn load(&mut self, call: &AttentionCall, lines: HeadLines, from: StoredRef, place: (usize, usize)) {
        self.dim = lines.dim;
        match (&mut self.numbers, from) {
            (HeadNumbers::F32(to), StoredRef::F32(from)) => load_from(to, call, lines, from, place),
            (HeadNumbers::F32(to), StoredRef::Bf16(from)) => load_from(to, call, lines, from, place),
            (HeadNumbers::Bf16(to), StoredRef::F32(from)) => load_from(to, call, lines, from, place),
            (HeadNumbers::Bf16(to), StoredRef::Bf16(from)) => load_from(to, call, lines, from, place),
            (_, StoredRef::U32(_)) => unreachable!("heads are no indices"),
        }
    }
}

#[inline(always)]
fn load_from<O: StoredNumber, T: StoredNumber>(
    to: &mut Vec<O>,
    call: &AttentionCall,
    lines: HeadLines,
    from: &[T],
    (row, head): (usize, usize),
) {
    let (d, column) = (lines.dim, lines.column + head * lines.dim);
    to.resize(lines.seq * d, O::of(0.0));
    for (t, line) in to.chunks_exact_mut(d).enumerate() {
        let token = row * lines.seq + t;
        let from = &from[token * lines.width + column..][..d];
        prefetch_run(from.as_ptr().wrapping_add(AHEAD * lines.width).cast(), d * size_of::<T>() / size_of::<f32>());
        match lines.rotates {
            true => turn(line, from, call.rotary, token, &call.shape, 1.0),
            false => put_line(line, from, false),
        }
    }
}

/// The adjoint of [`HeadMatrix::load`].
#[inline(always)]
pub(super) fn store(call: &AttentionCall, lines: HeadLines, to: Shared, (row, head): (usize, usize), from: &[f32]) {
    let (d, column) = (lines.dim, lines.column + head * lines.dim);
    for (t, from) in from.chunks_exact(d).enumerate() {
        let token = row * lines.seq + t;
        // SAFETY: this head's columns of this row belong to this task.
        let line = unsafe { to.slice(token * lines.width + column, d) };
        prefetch_run(line.as_ptr().wrapping_add(AHEAD * lines.width), d);
        match lines.rotates {
            true => turn(line, from, call.rotary, token, &call.shape, -1.0),
            false => line.copy_from_slice(from),
        }
    }
}

/// Turns the last `rotary_dim` numbers of a head by the angles of token `t`, or back with `sign` -1; the others stay.
#[inline(always)]
pub(crate) fn turn<O: StoredNumber, T: StoredNumber>(
    to: &mut [O],
    from: &[T],
    [cos, sin]: [&[f32]; 2],
    t: usize,
    shape: &AttentionSizes,
    sign: f32,
) {
    let (half, still) = (shape.rotary_dim / 2, from.len() - shape.rotary_dim);
    put_line(&mut to[..still], &from[..still], false);
    let (to, from) = (&mut to[still..], &from[still..]);
    let angles = [cos, sin].map(|table| &table[t * half..][..half]);
    match shape.pairs {
        TurningPairs::Halves => turn_halves(to, from, angles, sign),
        TurningPairs::Neighbours => turn_neighbours(to, from, angles, sign),
    }
}

/// The pairs (x[i], x[i + d/2]).
#[inline(always)]
fn turn_halves<O: StoredNumber, T: StoredNumber>(to: &mut [O], from: &[T], [cos, sin]: [&[f32]; 2], sign: f32) {
    let half = from.len() / 2;
    let ((low, high), (x, y)) = (to.split_at_mut(half), from.split_at(half));
    // Slices of one length: the loop then needs no checks and becomes vector code.
    let (high, y, cos, sin) = (&mut high[..half], &y[..half], &cos[..half], &sin[..half]);
    for i in 0..half {
        let s = sin[i] * sign;
        let (x, y) = (x[i].wide(), y[i].wide());
        low[i] = O::of(x * cos[i] - y * s);
        high[i] = O::of(y * cos[i] + x * s);
    }
}

/// The pairs (x[2 i], x[2 i + 1]).
#[inline(always)]
fn turn_neighbours<O: StoredNumber, T: StoredNumber>(to: &mut [O], from: &[T], [cos, sin]: [&[f32]; 2], sign: f32) {
    let pairs = to.as_chunks_mut().0.iter_mut().zip(from.as_chunks().0);
    for (([low, high], [x, y]), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
        let (s, x, y) = (sin * sign, x.wide(), y.wide());
        *low = O::of(x * cos - y * s);
        *high = O::of(y * cos + x * s);
    }
}
