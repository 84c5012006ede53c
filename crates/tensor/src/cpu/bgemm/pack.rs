//! Packing of bf16 in pairs: squares of 16 lines by 16 words, in the order that a kernel reads them.

use core::arch::x86_64::*;

use half::bf16;

use super::{SIDE, SQUARE, STEP};
use crate::cpu::mat::{Factor, Mat};
use crate::cpu::sgemm_avx512::{low_mask, transpose};

/// In which order the words of a square lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordOrder {
    LineByLine,
    WordByWord,
}

/// Packs lines `[lines, k]`, `per_panel` at most in a panel: panel by panel, square by square along k. Missing lines and
/// words are zeros.
///
/// # Safety
/// `to` has room for whole squares, and the matrix covers its memory.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack(to: *mut u32, lines: Factor, per_panel: usize, order: WordOrder) {
    // SAFETY: the caller's promise.
    unsafe {
        match lines {
            Factor::F32(mat) => pack_from(to, mat, per_panel, order),
            Factor::Bf16(mat) => pack_from(to, mat, per_panel, order),
        }
    }
}

/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_from<T: Packs>(to: *mut u32, m: Mat<T>, per_panel: usize, order: WordOrder) {
    // SAFETY: forwarded from the caller.
    unsafe {
        if m.col_stride != 1 && order == WordOrder::WordByWord {
            pack_across_k(to, m, per_panel);
        } else {
            pack_squares(to, m, per_panel, order);
        }
    }
}

/// A few pairs of k for all panels, then the next few: as many pieces of the matrix as one set of a cache has room for, if
/// k lie pages apart.
///
/// # Safety
/// As [`pack`]; lines are side by side in memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_across_k<T: Packs>(to: *mut u32, m: Mat<T>, per_panel: usize) {
    const PAIRS: usize = 4;
    /// In k. The hardware does not look ahead where each k lies in a page of its own.
    const AHEAD: usize = STEP;
    let (panels, steps) = (m.rows.div_ceil(per_panel), m.cols.div_ceil(STEP));
    debug_assert!(m.rows <= 1 || m.row_stride == 1, "lines are side by side");
    for first_pair in (0..steps * SIDE).step_by(PAIRS) {
        for panel in 0..panels {
            let first = panel * per_panel;
            let count = per_panel.min(m.rows - first);
            for pair in first_pair..first_pair + PAIRS {
                let run = |k: usize| {
                    let from = m.data.wrapping_add(first * m.row_stride + k * m.col_stride);
                    (from, if k < m.cols { count } else { 0 })
                };
                // SAFETY: a prefetch may point anywhere. Beyond the last k nothing is read, and the word lies inside the
                // packed memory.
                unsafe {
                    let ahead = run(2 * pair + AHEAD).0;
                    _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(m.col_stride).cast());
                    let word = T::pairs([run(2 * pair), run(2 * pair + 1)]);
                    _mm512_store_ps(to.add(panel * steps * SQUARE + pair * SIDE).cast(), word);
                }
            }
        }
    }
}

/// # Safety
/// As [`pack`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_squares<T: Packs>(to: *mut u32, m: Mat<T>, per_panel: usize, order: WordOrder) {
    let (panels, steps) = (m.rows.div_ceil(per_panel), m.cols.div_ceil(STEP));
    let square = |panel: usize, step: usize| {
        let (first, k) = (panel * per_panel, step * STEP);
        let (count, depth) = (per_panel.min(m.rows - first), STEP.min(m.cols - k));
        // SAFETY: the square lies inside the matrix, and its place inside the packed memory.
        unsafe {
            let from = m.block(first, k, count, depth);
            let lines = if m.col_stride == 1 { along_k(from) } else { transpose(across_k(from)) };
            let words = if order == WordOrder::LineByLine { lines } else { transpose(lines) };
            let to = to.add((panel * steps + step) * SQUARE);
            words.iter().enumerate().for_each(|(at, word)| _mm512_store_ps(to.add(at * SIDE).cast(), *word));
        }
    };
    // In the order of memory.
    if m.col_stride == 1 {
        (0..panels).for_each(|panel| (0..steps).for_each(|step| square(panel, step)));
    } else {
        (0..steps).for_each(|step| (0..panels).for_each(|panel| square(panel, step)));
    }
}

/// Up to 16 lines of up to 32 elements that follow each other in memory: a vector a line.
///
/// # Safety
/// The matrix covers its memory, and k is contiguous.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn along_k<T: Packs>(m: Mat<T>) -> [__m512; SIDE] {
    let mut words = [_mm512_setzero_ps(); SIDE];
    for (line, word) in words.iter_mut().enumerate().take(m.rows) {
        // SAFETY: the line exists.
        *word = unsafe { T::run(m.data.add(line * m.row_stride), m.cols) };
    }
    words
}

/// Up to 16 lines side by side in memory, up to 32 elements deep: a vector for each two of k.
///
/// # Safety
/// The matrix covers its memory, and its lines are side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn across_k<T: Packs>(m: Mat<T>) -> [__m512; SIDE] {
    let mut words = [_mm512_setzero_ps(); SIDE];
    for (pair, word) in words.iter_mut().enumerate().take(m.cols.div_ceil(2)) {
        let odd = if 2 * pair + 1 < m.cols { m.rows } else { 0 };
        // SAFETY: the first of k exists; of one that does not, nothing is read.
        *word = unsafe {
            let first = m.data.add(2 * pair * m.col_stride);
            T::pairs([(first, m.rows), (first.wrapping_add(m.col_stride), odd)])
        };
    }
    words
}

/// Elements that can be packed as bf16.
trait Packs: Copy {
    /// `count` elements, at most 32, as bf16 in pairs; zeros behind them.
    ///
    /// # Safety
    /// They exist, and the CPU has the instructions.
    unsafe fn run(from: *const Self, count: usize) -> __m512;

    /// The elements of two runs, of at most 16 each, pair by pair.
    ///
    /// # Safety
    /// As [`Packs::run`].
    unsafe fn pairs(runs: [(*const Self, usize); 2]) -> __m512;
}

impl Packs for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run(from: *const bf16, count: usize) -> __m512 {
        // SAFETY: masked lanes are not read.
        _mm512_castsi512_ps(unsafe { _mm512_maskz_loadu_epi16(((1u64 << count) - 1) as __mmask32, from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pairs(runs: [(*const bf16, usize); 2]) -> __m512 {
        // SAFETY: as above.
        let [even, odd] = runs.map(|(from, count)| unsafe { _mm256_maskz_loadu_epi16(low_mask(count), from.cast()) });
        interleave(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(even), odd))
    }
}

impl Packs for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run(from: *const f32, count: usize) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_castsi512_ps(unsafe {
            rounded([(from, count.min(16)), (from.wrapping_add(16), count.saturating_sub(16))])
        })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pairs(runs: [(*const f32, usize); 2]) -> __m512 {
        // SAFETY: the caller's promise.
        interleave(unsafe { rounded(runs) })
    }
}

/// The elements of two runs, of at most 16 each, as bf16: one run behind the other.
///
/// # Safety
/// As [`Packs::run`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn rounded(runs: [(*const f32, usize); 2]) -> __m512i {
    // SAFETY: masked lanes are not read; both types are 64 bytes.
    unsafe {
        let [low, high] = runs.map(|(from, count)| _mm512_maskz_loadu_ps(low_mask(count), from));
        core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Two runs of 16, one behind the other, pair by pair.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn interleave(runs: __m512i) -> __m512 {
    /// Where the word of each place comes from, two to a number.
    const FROM: [u32; 16] = {
        let mut from = [0; 16];
        let mut at = 0;
        while at < 16 {
            from[at] = at as u32 | (16 + at as u32) << 16;
            at += 1;
        }
        from
    };
    // SAFETY: sixteen numbers of 32 bits.
    let from = unsafe { _mm512_loadu_si512(FROM.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_permutexvar_epi16(from, runs))
}
