//! Single-precision matrix product for CPUs with AVX2 and FMA: one thread, any strides, `C = alpha A B (+ start)`.
//!
//! Blocking for a small second-level cache: a packed block of A (`MC x KC`) stays there while the panels of a packed
//! block of B, one after the other in the first-level cache, pass by it. The kernel keeps a `6 x 16` tile of
//! C in 12 of 16 vector registers. Edges are handled as in `sgemm_avx512`: smaller kernels, masked loads and stores.

use core::arch::x86_64::*;
use std::cell::RefCell;

use super::gemm::{Onto, ProductBlocks};
use super::mat::{Mat, MatMut};

/// Rows of C in registers.
pub(super) const MR: usize = 6;
/// Packed A holds this many rows per panel: `MR` rounded up to a vector, so that a transposition writes whole vectors.
const MR_PACKED: usize = 8;
/// Columns of C in registers: two vectors.
pub(super) const NR: usize = 16;
/// Depth of a packed block: a panel of B, `KC x NR` floats, is half of a 32 KiB first-level cache.
const KC: usize = 256;
/// Rows of a packed block of A: `MC x KC` floats are less than half of a 512 KiB second-level cache.
const MC: usize = MR * 24;
/// Floats of a vector.
const LANES: usize = 8;

#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct Vector([f32; LANES]);

thread_local! {
    /// Packing space, kept for the thread's life: fresh pages would cost as much as the packing.
    static SCRATCH: RefCell<[Vec<Vector>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Whether this CPU can run [`sgemm`].
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// `c = alpha * a * b + start`. Shapes: a `[m, k]`, b `[k, n]`, c `[m, n]`.
///
/// # Safety
/// The CPU supports AVX2 and FMA, the matrices cover the memory their shapes and strides say, and the start is one of C.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn sgemm(c: MatMut, a: Mat, b: Mat, onto: Onto, blocks: ProductBlocks) {
    SCRATCH.with_borrow_mut(|[a_space, b_space]| {
        let depth = block_depth(a.cols);
        let a_packed = room(a_space, MC / MR * MR_PACKED * depth);
        let n_block = ProductBlocks::columns(blocks.packed_kib, depth, size_of::<f32>(), NR);
        let b_packed = room(b_space, b.cols.min(n_block).next_multiple_of(NR) * depth);
        for j in (0..b.cols).step_by(n_block) {
            let n = n_block.min(b.cols - j);
            for p in (0..a.cols).step_by(depth) {
                let (k, onto) = (depth.min(a.cols - p), onto.after_terms(p, c));
                // SAFETY: every block below lies inside the matrices, by the loop bounds; the space was made for them.
                unsafe {
                    pack::<NR, NR>(b_packed, b.block(p, j, k, n).transposed());
                    for i in (0..a.rows).step_by(MC) {
                        let m = MC.min(a.rows - i);
                        pack::<MR, MR_PACKED>(a_packed, a.block(i, p, m, k));
                        multiply_block(c.block(i, j, m, n), a_packed, b_packed, k, onto.block(i, j, m, n));
                    }
                }
            }
        }
    });
}

/// Splits the depth evenly into blocks of at most `KC`, so that no thin last block is left over.
fn block_depth(k: usize) -> usize {
    let blocks = k.div_ceil(KC).max(1);
    k.div_ceil(blocks).max(1).next_multiple_of(LANES)
}

fn room(space: &mut Vec<Vector>, floats: usize) -> *mut f32 {
    if space.len() * LANES < floats {
        space.resize(floats.div_ceil(LANES), Vector([0.0; LANES]));
    }
    space.as_mut_ptr().cast()
}

/// Packs `m` (`[rows, k]`) into panels of `P` rows: panel by panel, for each k the panel's rows side by side, `W` places
/// wide. What fills a panel up to its width is not used: products with it are never stored.
#[target_feature(enable = "avx2,fma")]
unsafe fn pack<const P: usize, const W: usize>(to: *mut f32, m: Mat) {
    if m.row_stride == 1 {
        // SAFETY: `to` has room for whole panels (see `sgemm`).
        return unsafe { pack_copying::<P, W>(to, m) };
    }
    for first in (0..m.rows).step_by(P) {
        for half in (0..W).step_by(LANES) {
            let rows = (m.rows - first).min(P).saturating_sub(half).min(LANES);
            // SAFETY: as above; without rows nothing is read.
            unsafe {
                let part = m.block((first + half).min(m.rows - 1), 0, rows, m.cols);
                let to = to.add(first / P * W * m.cols + half);
                if m.col_stride == 1 { pack_transposing::<W>(to, part) } else { pack_each::<W>(to, part) }
            }
        }
    }
}

/// The source's columns are contiguous in memory (row stride 1): copy them one after the other, several panels at a
/// time, so that each visit to a column, which lies in a page of its own, takes whole cache lines along.
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_copying<const P: usize, const W: usize>(to: *mut f32, m: Mat) {
    const PANELS: usize = 8;
    const AHEAD: usize = 8;
    let panels = m.rows.div_ceil(P);
    for first in (0..panels).step_by(PANELS) {
        let last = (first + PANELS).min(panels);
        for k in 0..m.cols {
            let column = m.data.wrapping_add(k * m.col_stride);
            for line in (first * P..last * P).step_by(2 * LANES) {
                // Columns lie pages apart, where the hardware does not look ahead.
                _mm_prefetch::<_MM_HINT_T0>(column.wrapping_add(AHEAD * m.col_stride + line).cast());
            }
            for panel in first..last {
                for half in (0..W).step_by(LANES) {
                    let row = panel * P + half;
                    // SAFETY: lanes past the last row are not read; each panel is `m.cols * W` floats.
                    unsafe {
                        let rows = if row + LANES <= m.rows {
                            _mm256_loadu_ps(column.add(row))
                        } else {
                            _mm256_maskload_ps(column.wrapping_add(row), low_mask(m.rows.saturating_sub(row)))
                        };
                        _mm256_store_ps(to.add((panel * m.cols + k) * W + half), rows);
                    }
                }
            }
        }
    }
}

/// The source's rows are contiguous in memory: transpose 8 x 8 blocks in registers.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_transposing<const W: usize>(to: *mut f32, m: Mat) {
    for k in (0..m.cols).step_by(LANES) {
        let count = (m.cols - k).min(LANES);
        let mask = low_mask(count);
        let mut block = [_mm256_setzero_ps(); LANES];
        for (r, line) in block.iter_mut().enumerate() {
            // The next eight rows at this place: a row is too short for the hardware to look ahead in it.
            _mm_prefetch::<_MM_HINT_T0>(m.data.wrapping_add((r + LANES) * m.row_stride + k).cast());
            if r < m.rows {
                // SAFETY: row r, columns `k..k + count` exist; masked lanes are not read.
                *line = unsafe { _mm256_maskload_ps(m.data.add(r * m.row_stride + k), mask) };
            }
        }
        for (c, line) in transpose(block).into_iter().enumerate().take(count) {
            // SAFETY: the panel has `m.cols` lines.
            unsafe { _mm256_store_ps(to.add((k + c) * W), line) };
        }
    }
}

/// No unit stride. Only odd layouts (a single row or column) come here.
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_each<const W: usize>(to: *mut f32, m: Mat) {
    for k in 0..m.cols {
        for r in 0..LANES {
            // SAFETY: element (r, k) is read where it exists; the panel has `m.cols` lines.
            unsafe {
                let x = if r < m.rows { *m.data.add(r * m.row_stride + k * m.col_stride) } else { 0.0 };
                *to.add(k * W + r) = x;
            }
        }
    }
}

/// Transposes an 8 x 8 block: pairs, then quads within 128-bit lanes, then the lanes themselves.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transpose(r: [__m256; LANES]) -> [__m256; LANES] {
    let mut out = [_mm256_setzero_ps(); LANES];
    for half in 0..2 {
        let [a, b, c, d] = [r[4 * half], r[4 * half + 1], r[4 * half + 2], r[4 * half + 3]];
        let [ab, cd] = [_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d)];
        let [ab_high, cd_high] = [_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d)];
        out[4 * half] = _mm256_shuffle_ps::<0x44>(ab, cd);
        out[4 * half + 1] = _mm256_shuffle_ps::<0xee>(ab, cd);
        out[4 * half + 2] = _mm256_shuffle_ps::<0x44>(ab_high, cd_high);
        out[4 * half + 3] = _mm256_shuffle_ps::<0xee>(ab_high, cd_high);
    }
    // out[4 h + j] holds, in lane l, column 4 l + j of rows 4 h..4 h + 4.
    let mut columns = out;
    for j in 0..4 {
        columns[j] = _mm256_permute2f128_ps::<0x20>(out[j], out[4 + j]);
        columns[4 + j] = _mm256_permute2f128_ps::<0x31>(out[j], out[4 + j]);
    }
    columns
}

/// Multiplies one packed block pair into a tile of C: each panel of B meets all panels of A.
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_block(c: MatMut, a: *const f32, b: *const f32, k: usize, onto: Onto) {
    for j in (0..c.cols).step_by(NR) {
        for i in (0..c.rows).step_by(MR) {
            let (m, n) = (MR.min(c.rows - i), NR.min(c.cols - j));
            // SAFETY: panels were packed by `pack` with these widths; the tile lies inside C.
            unsafe {
                let (a, b) = (a.add(i / MR * MR_PACKED * k), b.add(j * k));
                let (c, onto) = (c.block(i, j, m, n), onto.block(i, j, m, n));
                match m {
                    1 => kernel::<1>(c, a, b, k, onto),
                    2 => kernel::<2>(c, a, b, k, onto),
                    3 => kernel::<3>(c, a, b, k, onto),
                    4 => kernel::<4>(c, a, b, k, onto),
                    5 => kernel::<5>(c, a, b, k, onto),
                    _ => kernel::<6>(c, a, b, k, onto),
                }
            }
        }
    }
}

/// The register tile: `R` rows by two vectors. Each step of k loads two vectors of B and broadcasts `R` values of A.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn kernel<const R: usize>(c: MatMut, a: *const f32, b: *const f32, k: usize, onto: Onto) {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: the packed panels hold k lines of `MR_PACKED` and `NR` floats; C's rows hold `c.cols` columns.
    unsafe {
        for r in 0..R {
            // The tile's lines arrive while the products are summed; a prefetch may point anywhere.
            _mm_prefetch::<_MM_HINT_T0>(c.data.wrapping_add(r * c.row_stride).cast());
        }
        macro_rules! step {
            ($at:expr) => {
                let columns = [_mm256_load_ps(b.add($at * NR)), _mm256_load_ps(b.add($at * NR + LANES))];
                for r in 0..R {
                    let x = _mm256_set1_ps(*a.add($at * MR_PACKED + r));
                    sums[r] = [_mm256_fmadd_ps(x, columns[0], sums[r][0]), _mm256_fmadd_ps(x, columns[1], sums[r][1])];
                }
            };
        }
        // Four steps a round: the loop's own instructions compete with the products.
        for at in (0..k / 4).map(|round| 4 * round) {
            step!(at);
            step!(at + 1);
            step!(at + 2);
            step!(at + 3);
        }
        for at in k / 4 * 4..k {
            step!(at);
        }
        let scale = _mm256_set1_ps(onto.alpha);
        for (r, [left, right]) in sums.into_iter().enumerate() {
            let to = c.data.add(r * c.row_stride);
            store(to, c.cols.min(LANES), left, scale, onto.at(r, 0));
            store(to.wrapping_add(LANES), c.cols.saturating_sub(LANES), right, scale, onto.at(r, LANES));
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn store(to: *mut f32, lanes: usize, v: __m256, scale: __m256, start: Option<*const f32>) {
    // SAFETY: masked lanes are neither read nor written.
    unsafe {
        if lanes == LANES {
            return _mm256_storeu_ps(to, onto_start(v, scale, start.map(|start| _mm256_loadu_ps(start))));
        }
        let mask = low_mask(lanes);
        _mm256_maskstore_ps(to, mask, onto_start(v, scale, start.map(|start| _mm256_maskload_ps(start, mask))));
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn onto_start(v: __m256, scale: __m256, start: Option<__m256>) -> __m256 {
    match start {
        Some(start) => _mm256_fmadd_ps(v, scale, start),
        None => _mm256_mul_ps(v, scale),
    }
}

/// Sets the first `lanes` of eight.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn low_mask(lanes: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}
