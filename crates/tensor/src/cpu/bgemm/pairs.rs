//! The kernel of pairs (AVX512-BF16): a vector of 16 words by one word, in one instruction.

use core::arch::x86_64::*;

use super::{FactorRows, SIDE, SQUARE, SumStore};
use crate::cpu::mat::MatMut;
use crate::cpu::sgemm_avx512::low_mask;

/// Up to 14 rows by 32 columns of C.
///
/// # Safety
/// As [`multiply_block`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pairs_of_rows<T: SumStore>(
    c: MatMut<T>,
    a: FactorRows,
    b: *const u32,
    alpha: f32,
    accumulate: bool,
) {
    macro_rules! by_rows {
        ($($rows:literal)*) => {
            match c.rows {
                // SAFETY: forwarded from the caller.
                $($rows => unsafe { pairs::<$rows, T>(c, a, b, alpha, accumulate) },)*
                rows => unreachable!("a register tile has 1 to 14 rows, not {rows}"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// The register tile: `R` rows by two vectors. Each word of k loads two vectors of B and broadcasts `R` words of A.
///
/// # Safety
/// As [`pairs_of_rows`]; C has R rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs<const R: usize, T: SumStore>(c: MatMut<T>, a: FactorRows, b: *const u32, alpha: f32, accumulate: bool) {
    let (mut left, mut right) = ([_mm512_setzero_ps(); R], [_mm512_setzero_ps(); R]);
    let halves = |words: __m512i| {
        // SAFETY: both are 64 bytes.
        unsafe { core::mem::transmute::<__m512i, __m512bh>(words) }
    };
    // With 16 columns or fewer there is no second panel; its products are not kept.
    let b_right = if c.cols > SIDE { b.wrapping_add(a.steps * SQUARE) } else { b };
    // SAFETY: the squares hold 16 words for each of 16 lines; C's rows hold `c.cols` columns.
    unsafe {
        for r in 0..R {
            _mm_prefetch::<_MM_HINT_T0>(c.data.wrapping_add(r * c.row_stride).cast());
            _mm_prefetch::<_MM_HINT_T0>(c.data.wrapping_add(r * c.row_stride + 16).cast());
        }
        for step in 0..a.steps {
            let lines: *const i32 = a.data.add(step * a.step).cast();
            for word in 0..SIDE {
                let at = step * SQUARE + word * SIDE;
                let [b0, b1] = [b, b_right].map(|b| halves(_mm512_load_si512(b.add(at).cast())));
                for r in 0..R {
                    let x = halves(_mm512_set1_epi32(*lines.add(r * SIDE + word)));
                    left[r] = _mm512_dpbf16_ps(left[r], x, b0);
                    right[r] = _mm512_dpbf16_ps(right[r], x, b1);
                }
            }
        }
        let scale = _mm512_set1_ps(alpha);
        let masks = [c.cols.min(16), c.cols.saturating_sub(16)].map(low_mask);
        for r in 0..R {
            let to = c.data.add(r * c.row_stride);
            T::keep(to, masks[0], left[r], scale, accumulate);
            T::keep(to.wrapping_add(16), masks[1], right[r], scale, accumulate);
        }
    }
}
