//! The kernel of pairs (AVX512-BF16): a vector of 16 words by one word, in one instruction.

use core::arch::x86_64::*;

use super::{FactorRows, MR_IN_PLACE, MR_PAIRS, NR, NR_IN_PLACE, RowLayout, SIDE, SQUARE, SumStore, WordOrder};
use crate::cpu::ahead::expect;
use crate::cpu::gemm::Onto;
use crate::cpu::mat::MatMut;
use crate::cpu::sgemm_avx512::low_mask;

/// Where a word of a factor's row lies, from the first of its depth of 32 on.
trait WordPlace {
    /// Whether the rows are those that were stored, and nobody has read them yet.
    const IS_STORED: bool;

    fn offset(a: &FactorRows, row: usize, word: usize) -> usize;
}

/// Rows as they were stored.
struct InPlace;
/// A packed line is a row.
struct LineByLine;
/// A packed line is a word of each row.
struct WordByWord;

impl WordPlace for InPlace {
    const IS_STORED: bool = true;

    #[inline(always)]
    fn offset(a: &FactorRows, row: usize, word: usize) -> usize {
        row * a.line + word * size_of::<u32>()
    }
}

impl WordPlace for LineByLine {
    const IS_STORED: bool = false;

    #[inline(always)]
    fn offset(_: &FactorRows, row: usize, word: usize) -> usize {
        (row * SIDE + word) * size_of::<u32>()
    }
}

impl WordPlace for WordByWord {
    const IS_STORED: bool = false;

    #[inline(always)]
    fn offset(_: &FactorRows, row: usize, word: usize) -> usize {
        (word * SIDE + row) * size_of::<u32>()
    }
}

/// Rows and columns of C that are in registers at once: few rows, however far apart, have room in one set of a cache.
pub(super) fn tile(layout: RowLayout) -> [usize; 2] {
    match layout {
        RowLayout::InPlace => [MR_IN_PLACE, NR_IN_PLACE],
        RowLayout::Squares(_) => [MR_PAIRS, NR],
    }
}

/// A tile of C, or what is left of one at its edges.
///
/// # Safety
/// As [`multiply_block`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_pairs<T: SumStore>(c: MatMut<T>, a: FactorRows, b: *const u32, onto: Onto<T>) {
    macro_rules! by_rows {
        ($place:ty, $vectors:literal, $($rows:literal)*) => {
            match c.rows {
                // SAFETY: forwarded from the caller.
                $($rows => unsafe { pairs::<$rows, $vectors, $place, T>(c, a, b, onto) },)*
                rows => unreachable!("a register tile has no {rows} rows"),
            }
        };
    }
    match a.layout {
        RowLayout::InPlace if c.cols > NR => by_rows!(InPlace, 4, 1 2 3 4 5 6),
        RowLayout::InPlace => by_rows!(InPlace, 2, 1 2 3 4 5 6),
        RowLayout::Squares(WordOrder::LineByLine) => by_rows!(LineByLine, 2, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
        RowLayout::Squares(WordOrder::WordByWord) => by_rows!(WordByWord, 2, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
    }
}

/// The register tile: `R` rows by `V` vectors. Each word of k loads the vectors of B and broadcasts a word of each row of A.
///
/// # Safety
/// As [`multiply_pairs`]; C has R rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs<const R: usize, const V: usize, P: WordPlace, T: SumStore>(
    c: MatMut<T>,
    a: FactorRows,
    b: *const u32,
    onto: Onto<T>,
) {
    let mut sums = [[_mm512_setzero_ps(); V]; R];
    let halves = |words: __m512i| {
        // SAFETY: both are 64 bytes.
        unsafe { core::mem::transmute::<__m512i, __m512bh>(words) }
    };
    let panels = panels::<V>(b, a.steps, c.cols);
    // SAFETY: the panels hold squares of 16 words for each of 16 columns; A has the words; C's rows hold `c.cols` columns.
    unsafe {
        macro_rules! word {
            ($step:expr, $word:expr) => {
                let mut line = [halves(_mm512_setzero_si512()); V];
                for (vector, panel) in line.iter_mut().zip(panels) {
                    *vector = halves(_mm512_load_si512(panel.add($step * SQUARE + $word * SIDE).cast()));
                }
                let words = a.data.add($step * a.step);
                for r in 0..R {
                    let x = words.add(P::offset(&a, r, $word)).cast::<i32>().read_unaligned();
                    let x = halves(_mm512_set1_epi32(x));
                    for v in 0..V {
                        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, line[v]);
                    }
                }
            };
        }
        for step in 0..a.words / SIDE {
            expect::<R, V, T>(c, step, a.words / SIDE);
            if P::IS_STORED {
                for r in 0..R {
                    // The next tile's rows.
                    _mm_prefetch::<_MM_HINT_T1>(a.data.wrapping_add(step * a.step + (r + R) * a.line).cast());
                }
            }
            for word in 0..SIDE {
                word!(step, word);
            }
        }
        for word in 0..a.words % SIDE {
            word!(a.words / SIDE, word);
        }
        if !a.words.is_multiple_of(SIDE) {
            // Squares end in words of zeros, which make +0 of a sum that has become -0. So does one.
            let zero = halves(_mm512_setzero_si512());
            for sums in &mut sums {
                for sum in sums {
                    *sum = _mm512_dpbf16_ps(*sum, zero, zero);
                }
            }
        }
        // Here, and not in a function that would be handed the sums: they would have to be in memory for it.
        let scale = _mm512_set1_ps(onto.alpha);
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                let mask = low_mask(c.cols.saturating_sub(SIDE * v).min(SIDE));
                let to = c.data.wrapping_add(r * c.row_stride + SIDE * v);
                T::keep(to, mask, *sum, scale, onto.at(r, SIDE * v));
            }
        }
    }
}

/// The panels of B. Where C has no columns for one there may be none; the first stands for it, and its products are not kept.
#[inline]
fn panels<const V: usize>(first: *const u32, steps: usize, cols: usize) -> [*const u32; V] {
    let mut panels = [first; V];
    for (v, panel) in panels.iter_mut().enumerate() {
        if SIDE * v < cols {
            *panel = first.wrapping_add(v * steps * SQUARE);
        }
    }
    panels
}
