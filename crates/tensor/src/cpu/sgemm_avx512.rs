//! Single-precision matrix product for CPUs with AVX-512: one thread, any strides, `C = alpha A B (+ start)`.
//!
//! The classic three-level blocking: a block of B is packed so that the innermost kernel reads it with unit
//! stride. Where numbers of a row of A are adjacent, a kernel reads them where they lie, and keeps a `6 x 64` tile of C
//! in 24 vector registers: six rows, however far apart, have room in one set of an 8-way cache. Otherwise, and where C
//! is no wider than a panel of B, blocks of A (`MC x KC`) are packed, too, and the kernel keeps a `14 x 32` tile. Either
//! sums the same numbers in the same order.
//! Edges are handled by smaller kernels (rows) and masked loads and stores (columns), never by padding C.

use core::arch::x86_64::*;
use std::cell::RefCell;

use super::ahead::{Upcoming, expect};
use super::gemm::{Onto, ProductBlocks};
use super::mat::{Mat, MatMut};

/// Rows of C in registers where A is packed.
const MR: usize = 14;
/// Packed A holds this many rows per panel: `MR` rounded up to a vector, so that one transposition writes
/// whole vectors.
const MR_PACKED: usize = 16;
/// Columns of a packed panel of B, and of C in registers where A is packed: two vectors.
const NR: usize = 32;
/// Depth of a packed block: panels of A and B, `KC x MR_PACKED` and `KC x NR`, fill the first-level cache.
const KC: usize = 256;
/// Rows of a packed block of A: enough panels for the packing to read whole cache lines of a transposed operand.
const MC: usize = MR * 8;
/// Steps of k between two requests for memory: as many as a cache line has numbers of a row of A.
const ROUND: usize = 16;
/// Rows of C in registers where A is not packed.
const MR_IN_PLACE: usize = 6;
/// Columns of C in registers there: two panels of B.
const NR_IN_PLACE: usize = 2 * NR;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([f32; 16]);

thread_local! {
    /// Packing space, kept for the thread's life: fresh pages would cost as much as the packing.
    static SCRATCH: RefCell<(Vec<CacheLine>, Vec<CacheLine>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Whether this CPU can run [`sgemm`].
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f")
}

/// Whether [`sgemm`] reads A where it lies, for a product of `cols` columns: its rows are lines of memory, and C is wide
/// enough for the tile.
pub(super) fn reads_in_place(a: Mat, cols: usize, blocks: ProductBlocks) -> bool {
    blocks.in_place_kib.is_some() && a.col_stride == 1 && cols > NR
}

/// Rows and columns of C in registers, where A is read in place or packed.
pub(super) fn tile(is_in_place: bool) -> [usize; 2] {
    if is_in_place { [MR_IN_PLACE, NR_IN_PLACE] } else { [MR, NR] }
}

/// `c = alpha * a * b + start`. Shapes: a `[m, k]`, b `[k, n]`, c `[m, n]`.
///
/// # Safety
/// The CPU supports AVX-512F, the matrices cover the memory their shapes and strides say, and the start is one of C.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn sgemm(c: MatMut, a: Mat, b: Mat, onto: Onto, blocks: ProductBlocks) {
    let is_in_place = reads_in_place(a, b.cols, blocks);
    let kib = blocks.in_place_kib.filter(|_| is_in_place).unwrap_or(blocks.packed_kib);
    SCRATCH.with_borrow_mut(|(a_space, b_space)| {
        let depth = block_depth(a.cols);
        let n_block = ProductBlocks::columns(kib, depth, size_of::<f32>(), tile(is_in_place)[1]);
        if !is_in_place {
            grow(a_space, MC / MR * MR_PACKED * depth / 16);
        }
        grow(b_space, b.cols.min(n_block).next_multiple_of(NR) * depth / 16);
        let (a_packed, b_packed) = (a_space.as_mut_ptr().cast::<f32>(), b_space.as_mut_ptr().cast::<f32>());
        for j in (0..b.cols).step_by(n_block) {
            let n = n_block.min(b.cols - j);
            for p in (0..a.cols).step_by(depth) {
                let (k, onto) = (depth.min(a.cols - p), onto.after_terms(p, c));
                // SAFETY: every block below lies inside the matrices, by the loop bounds.
                unsafe {
                    pack::<NR>(b_packed, b.block(p, j, k, n).transposed());
                    if is_in_place {
                        let (tile, a) = (c.block(0, j, a.rows, n), a.block(0, p, a.rows, k));
                        multiply_in_place(tile, a, b_packed, onto.block(0, j, c.rows, n));
                        continue;
                    }
                    let rounds = |rows: usize| rows.div_ceil(MR) * n.div_ceil(NR) * (k / ROUND);
                    let b_next = Upcoming::of(b.transposed(), [j, p + depth], [n, depth], rounds(a.rows));
                    let mut next = [Upcoming::NOTHING, b_next];
                    for i in (0..a.rows).step_by(MC) {
                        let m = MC.min(a.rows - i);
                        pack::<MR>(a_packed, a.block(i, p, m, k));
                        let place = if i + MC < a.rows { [i + MC, p] } else { [0, p + depth] };
                        next[0] = Upcoming::of(a, place, [MC, depth], rounds(m));
                        let (tile, onto) = (c.block(i, j, m, n), onto.block(i, j, m, n));
                        multiply_block(tile, [a_packed, b_packed].map(<*mut f32>::cast_const), k, onto, &mut next);
                    }
                }
            }
        }
    });
}

/// Splits the depth evenly into blocks of at most `KC`, so that no thin last block is left over.
fn block_depth(k: usize) -> usize {
    let blocks = k.div_ceil(KC).max(1);
    k.div_ceil(blocks).max(1).next_multiple_of(16)
}

fn grow(space: &mut Vec<CacheLine>, lines: usize) {
    if space.len() < lines {
        space.resize(lines, CacheLine([0.0; 16]));
    }
}

/// Packs `m` (`[rows, k]`) into panels of `P` rows: panel by panel, for each k the panel's rows side by side. Places
/// of rows past the end hold zeros or whatever the memory held; the kernels never store their products.
#[target_feature(enable = "avx512f")]
unsafe fn pack<const P: usize>(to: *mut f32, m: Mat) {
    let width = P.next_multiple_of(16);
    if m.col_stride != 1 {
        // SAFETY: `to` has room for whole panels (see `sgemm`).
        return unsafe { pack_copying::<P>(to, width, m) };
    }
    for panel in 0..m.rows.div_ceil(P) {
        let rows = P.min(m.rows - panel * P);
        // SAFETY: as above; the source lies inside `m`.
        unsafe { pack_transposing(to.add(panel * width * m.cols), width, m.block(panel * P, 0, rows, m.cols)) };
    }
}

/// The source's columns are contiguous in memory (row stride 1): copy a few of them for all panels, then the next few. Where
/// columns lie pages apart, they meet in one set of the first-level cache, which holds eight lines.
#[target_feature(enable = "avx512f")]
unsafe fn pack_copying<const P: usize>(to: *mut f32, width: usize, m: Mat) {
    const COLUMNS: usize = 8;
    /// Columns may lie pages apart, where the hardware does not look ahead.
    const AHEAD: usize = 32;
    for first in (0..m.cols).step_by(COLUMNS) {
        let last = (first + COLUMNS).min(m.cols);
        for panel in 0..m.rows.div_ceil(P) {
            for half in (0..width).step_by(16) {
                let row = panel * P + half;
                let rows = (m.rows.saturating_sub(row)).min(P.saturating_sub(half)).min(16);
                for k in first..last {
                    // SAFETY: masked lanes are not read, and a prefetch may point anywhere; each panel is `m.cols * width`
                    // floats.
                    unsafe {
                        let from = m.data.wrapping_add(row * m.row_stride + k * m.col_stride);
                        _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(AHEAD * m.col_stride).cast());
                        let v = if m.row_stride == 1 {
                            _mm512_maskz_loadu_ps(low_mask(rows), from)
                        } else {
                            gather(m, row, rows, k)
                        };
                        _mm512_store_ps(to.add((panel * m.cols + k) * width + half), v);
                    }
                }
            }
        }
    }
}

/// One column of a matrix with no unit stride, lane by lane. Only odd layouts (a single row or column) come here.
#[target_feature(enable = "avx512f")]
unsafe fn gather(m: Mat, first: usize, rows: usize, k: usize) -> __m512 {
    let mut lanes = [0.0f32; 16];
    for (r, lane) in lanes.iter_mut().enumerate().take(rows) {
        // SAFETY: `first + r < m.rows`.
        *lane = unsafe { *m.data.add((first + r) * m.row_stride + k * m.col_stride) };
    }
    // SAFETY: sixteen floats on the stack.
    unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
}

/// The source's rows are contiguous in memory: transpose 16 x 16 blocks in registers.
#[target_feature(enable = "avx512f")]
unsafe fn pack_transposing(to: *mut f32, width: usize, m: Mat) {
    for half in (0..width).step_by(16) {
        let rows = m.rows.saturating_sub(half).min(16);
        for k in (0..m.cols).step_by(16) {
            let count = (m.cols - k).min(16);
            let mask = low_mask(count);
            let mut block = [_mm512_setzero_ps(); 16];
            for (r, line) in block.iter_mut().enumerate() {
                // The next sixteen rows at this place: a row is too short for the hardware to look ahead in it. They are
                // needed so much later that they would only be in the way in the first-level cache.
                let ahead = m.data.wrapping_add((half + r + 16) * m.row_stride + k);
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                if r < rows {
                    // SAFETY: row `half + r`, columns `k..k + count` exist.
                    *line = unsafe { _mm512_maskz_loadu_ps(mask, m.data.add((half + r) * m.row_stride + k)) };
                }
            }
            let block = transpose(block);
            for (c, line) in block.iter().enumerate().take(count) {
                // SAFETY: the panel has `m.cols` rows of `width` floats.
                unsafe { _mm512_store_ps(to.add((k + c) * width + half), *line) };
            }
        }
    }
}

/// Transposes a 16 x 16 block: pairs, then quads within 128-bit lanes, then the lanes themselves.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(r: [__m512; 16]) -> [__m512; 16] {
    let mut t = [_mm512_setzero_ps(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let mut u = [_mm512_setzero_ps(); 16];
    for i in 0..4 {
        let quad = |x: __m512| _mm512_castps_pd(x);
        let back = |x: __m512d| _mm512_castpd_ps(x);
        u[4 * i] = back(_mm512_unpacklo_pd(quad(t[4 * i]), quad(t[4 * i + 2])));
        u[4 * i + 1] = back(_mm512_unpackhi_pd(quad(t[4 * i]), quad(t[4 * i + 2])));
        u[4 * i + 2] = back(_mm512_unpacklo_pd(quad(t[4 * i + 1]), quad(t[4 * i + 3])));
        u[4 * i + 3] = back(_mm512_unpackhi_pd(quad(t[4 * i + 1]), quad(t[4 * i + 3])));
    }
    // u[4i + j] holds, in lane l, column 4l + j of rows 4i..4i+4.
    let mut out = [_mm512_setzero_ps(); 16];
    for j in 0..4 {
        let a = _mm512_shuffle_f32x4::<0x88>(u[j], u[4 + j]);
        let b = _mm512_shuffle_f32x4::<0xdd>(u[j], u[4 + j]);
        let c = _mm512_shuffle_f32x4::<0x88>(u[8 + j], u[12 + j]);
        let d = _mm512_shuffle_f32x4::<0xdd>(u[8 + j], u[12 + j]);
        out[j] = _mm512_shuffle_f32x4::<0x88>(a, c);
        out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(a, c);
        out[4 + j] = _mm512_shuffle_f32x4::<0x88>(b, d);
        out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(b, d);
    }
    out
}

/// Multiplies one packed block pair into a tile of C, one register tile after the other. Tiles go along C's rows: its
/// lines are then met in the order of memory, page by page, and the panel of A, which every tile of a row needs, is
/// half the size of one of B, which comes from the second-level cache.
#[target_feature(enable = "avx512f")]
unsafe fn multiply_block(c: MatMut, [a, b]: [*const f32; 2], k: usize, onto: Onto, next: &mut [Upcoming; 2]) {
    for i in (0..c.rows).step_by(MR) {
        let m = MR.min(c.rows - i);
        for j in (0..c.cols).step_by(NR) {
            let n = NR.min(c.cols - j);
            // SAFETY: panels were packed by `pack` with these widths; the tile lies inside C.
            unsafe {
                let a = a.add(i / MR * MR_PACKED * k);
                let b = b.add(j * k);
                kernel_of_rows(m, c.block(i, j, m, n), [a, b], k, onto.block(i, j, m, n), next);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn kernel_of_rows(
    m: usize,
    c: MatMut,
    factors: [*const f32; 2],
    k: usize,
    onto: Onto,
    next: &mut [Upcoming; 2],
) {
    macro_rules! by_rows {
        ($($rows:literal)*) => {
            match m {
                // SAFETY: forwarded from the caller.
                $($rows => unsafe { kernel::<$rows>(c, factors, k, onto, next) },)*
                _ => unreachable!("a register tile has 1 to 14 rows, not {m}"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// The register tile: `R` rows by two vectors. Each step of k loads two vectors of B and broadcasts `R` values of A.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn kernel<const R: usize>(c: MatMut, [a, b]: [*const f32; 2], k: usize, onto: Onto, next: &mut [Upcoming; 2]) {
    let mut left = [_mm512_setzero_ps(); R];
    let mut right = [_mm512_setzero_ps(); R];
    // SAFETY: the packed panels hold k steps of `MR_PACKED` and `NR` floats; C's rows hold `c.cols` columns.
    unsafe {
        macro_rules! step {
            ($at:expr) => {
                let (b0, b1) = (_mm512_load_ps(b.add($at * NR)), _mm512_load_ps(b.add($at * NR + 16)));
                for r in 0..R {
                    let x = _mm512_set1_ps(*a.add($at * MR_PACKED + r));
                    left[r] = _mm512_fmadd_ps(x, b0, left[r]);
                    right[r] = _mm512_fmadd_ps(x, b1, right[r]);
                }
            };
        }
        for round in 0..k / ROUND {
            expect::<R, 2, f32>(c, round, k / ROUND);
            next.iter_mut().for_each(Upcoming::ask);
            // Two steps at once: the loop's own instructions compete with the products for the same ports.
            for at in (0..ROUND / 2).map(|pair| round * ROUND + 2 * pair) {
                step!(at);
                step!(at + 1);
            }
        }
        for at in k / ROUND * ROUND..k {
            step!(at);
        }
        let scale = _mm512_set1_ps(onto.alpha);
        let (mask0, mask1) = (low_mask(c.cols.min(16)), low_mask(c.cols.saturating_sub(16)));
        for r in 0..R {
            let to = c.data.add(r * c.row_stride);
            store(to, mask0, left[r], scale, onto.at(r, 0));
            store(to.wrapping_add(16), mask1, right[r], scale, onto.at(r, 16));
        }
    }
}

/// Multiplies rows of A, whose numbers are adjacent, by a packed block of B into rows of C.
#[target_feature(enable = "avx512f")]
unsafe fn multiply_in_place(c: MatMut, a: Mat, b: *const f32, onto: Onto) {
    for i in (0..c.rows).step_by(MR_IN_PLACE) {
        let m = MR_IN_PLACE.min(c.rows - i);
        for j in (0..c.cols).step_by(NR_IN_PLACE) {
            let n = NR_IN_PLACE.min(c.cols - j);
            // SAFETY: panels were packed by `pack`, a second one where the tile is wider than one; the tile lies inside
            // C, and its rows inside A.
            unsafe {
                let (a, onto) = (a.block(i, 0, m, a.cols), onto.block(i, j, m, n));
                in_place_of_rows(c.block(i, j, m, n), a, b.add(j * a.cols), onto)
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn in_place_of_rows(c: MatMut, a: Mat, b: *const f32, onto: Onto) {
    macro_rules! by_rows {
        ($($rows:literal)*) => {
            match (c.rows, c.cols > NR) {
                // SAFETY: forwarded from the caller.
                $(($rows, true) => unsafe { kernel_in_place::<$rows, 4>(c, a, b, onto) },
                ($rows, false) => unsafe { kernel_in_place::<$rows, 2>(c, a, b, onto) },)*
                (m, _) => unreachable!("a register tile has 1 to 6 rows, not {m}"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6)
}

/// The register tile: `R` rows by `V` vectors. Each step of k loads the vectors of B and broadcasts a number of each row
/// of A.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn kernel_in_place<const R: usize, const V: usize>(c: MatMut, a: Mat, b: *const f32, onto: Onto) {
    let mut sums = [[_mm512_setzero_ps(); V]; R];
    let (k, panel) = (a.cols, NR * a.cols);
    // SAFETY: the packed panels hold k steps of `NR` floats; rows of A hold k floats, rows of C `c.cols`.
    unsafe {
        macro_rules! step {
            ($at:expr) => {
                let mut line = [_mm512_setzero_ps(); V];
                for (v, vector) in line.iter_mut().enumerate() {
                    *vector = _mm512_load_ps(b.add(v / 2 * panel + $at * NR + v % 2 * 16));
                }
                for r in 0..R {
                    let x = _mm512_set1_ps(*a.data.add(r * a.row_stride + $at));
                    for v in 0..V {
                        sums[r][v] = _mm512_fmadd_ps(x, line[v], sums[r][v]);
                    }
                }
            };
        }
        for round in 0..k / ROUND {
            expect::<R, V, f32>(c, round, k / ROUND);
            for r in 0..R {
                // The next tile's rows.
                _mm_prefetch::<_MM_HINT_T1>(a.data.wrapping_add((r + R) * a.row_stride + round * ROUND).cast());
            }
            for at in (0..ROUND / 2).map(|pair| round * ROUND + 2 * pair) {
                step!(at);
                step!(at + 1);
            }
        }
        for at in k / ROUND * ROUND..k {
            step!(at);
        }
        let scale = _mm512_set1_ps(onto.alpha);
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                let mask = low_mask(c.cols.saturating_sub(16 * v).min(16));
                store(c.data.wrapping_add(r * c.row_stride + 16 * v), mask, *sum, scale, onto.at(r, 16 * v));
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store(to: *mut f32, mask: __mmask16, v: __m512, scale: __m512, start: Option<*const f32>) {
    // SAFETY: masked lanes are neither read nor written.
    unsafe {
        let out = match start {
            Some(start) => _mm512_fmadd_ps(v, scale, _mm512_maskz_loadu_ps(mask, start)),
            None => _mm512_mul_ps(v, scale),
        };
        _mm512_mask_storeu_ps(to, mask, out);
    }
}

pub(super) fn low_mask(lanes: usize) -> __mmask16 {
    ((1u32 << lanes) - 1) as __mmask16
}
