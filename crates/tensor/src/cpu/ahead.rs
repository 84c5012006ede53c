//! What kernels of products ask memory for ahead of time: a few lines in each round of their sums. Many at once would keep
//! those lines of B waiting that the sums need next.

use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::mat::{Mat, MatMut};
use super::rows::prefetch;

/// Numbers of a cache line.
const LINE: usize = 16;
/// Numbers of the largest block that is asked for. More than 256 KiB would push out of the cache what is multiplied.
const LARGEST: usize = 1 << 16;

/// Asks for the rows of a tile of C that belong to this round. The tile has R rows of V vectors of sums.
#[inline(always)]
pub(super) fn expect<const R: usize, const V: usize, T>(c: MatMut<T>, round: usize, rounds: usize) {
    // No `step_by`: it divides.
    let mut r = round;
    while r < R {
        for v in 0..V {
            prefetch(c.data.wrapping_add(r * c.row_stride + 16 * v).cast());
        }
        r += rounds;
    }
}

/// The lines of memory from which a block will be packed, while another is multiplied: packing then finds them in the
/// second-level cache.
#[derive(Clone, Copy)]
pub(super) struct Upcoming {
    from: *const f32,
    /// From a column to the next.
    pitch: usize,
    /// Lines of a column, and those of the present one that have been asked for.
    lines: usize,
    asked: usize,
    /// Lines to ask for in a round, and in all.
    at_once: usize,
    left: usize,
}

impl Upcoming {
    pub(super) const NOTHING: Upcoming =
        Upcoming { from: std::ptr::null(), pitch: 0, lines: 0, asked: 0, at_once: 0, left: 0 };

    /// The block of `m` from row `at[0]` and column `at[1]` on, or what there is of it, to be asked for in so many rounds.
    /// Only a block of contiguous columns is asked for. Each of them may lie in a page of its own, and the hardware does not
    /// look ahead from page to page.
    pub(super) fn of(m: Mat, at: [usize; 2], [rows, columns]: [usize; 2], rounds: usize) -> Upcoming {
        let [rows, columns] = [m.rows.saturating_sub(at[0]).min(rows), m.cols.saturating_sub(at[1]).min(columns)];
        let is_by_columns = m.row_stride == 1 && m.col_stride != 1;
        if !is_by_columns || rows * columns * rounds == 0 || rows * columns > LARGEST {
            return Upcoming::NOTHING;
        }
        // One more, since a column need not begin with a line.
        let lines = rows.div_ceil(LINE) + 1;
        let from = m.data.wrapping_add(at[0] + at[1] * m.col_stride);
        let left = lines * columns;
        Upcoming { from, pitch: m.col_stride, lines, asked: 0, at_once: left.div_ceil(rounds), left }
    }

    /// Asks for a round's lines.
    #[inline(always)]
    pub(super) fn ask(&mut self) {
        let count = self.at_once.min(self.left);
        self.left -= count;
        for _ in 0..count {
            // SAFETY: a prefetch reads nothing and faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.from.wrapping_add(self.asked * LINE).cast()) };
            self.asked += 1;
            if self.asked == self.lines {
                (self.asked, self.from) = (0, self.from.wrapping_add(self.pitch));
            }
        }
    }
}
