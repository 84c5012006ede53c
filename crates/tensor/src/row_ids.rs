//! The numbers of a tensor's rows among all rows. Random draws are keyed by these numbers, so that a row gets the same
//! draws wherever it is computed.

use std::ops::Range;

/// The numbers of a tensor's rows, as runs of consecutive numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowIds {
    runs: Vec<Range<u64>>,
}

/// Consecutive elements of a tensor, and the number of the first one among the elements of all rows.
pub(crate) struct NumberedElements {
    pub(crate) range: Range<usize>,
    pub(crate) first: u64,
}

impl RowIds {
    /// The numbers of rows in this order; adjacent runs are joined.
    pub fn new(runs: impl IntoIterator<Item = Range<u64>>) -> RowIds {
        let mut joined: Vec<Range<u64>> = Vec::new();
        for run in runs.into_iter().filter(|run| !run.is_empty()) {
            match joined.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => joined.push(run),
            }
        }
        RowIds { runs: joined }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| (run.end - run.start) as usize).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }

    /// The number of every row, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.runs.iter().cloned().flatten()
    }

    /// The numbers of a range of the rows.
    ///
    /// # Panics
    /// If the range ends after the last row.
    #[track_caller]
    pub fn part(&self, rows: Range<usize>) -> RowIds {
        assert!(rows.end <= self.len(), "rows {rows:?} of {}", self.len());
        let mut start = 0;
        let within = self.runs.iter().map(|run| {
            let here = start..start + (run.end - run.start) as usize;
            start = here.end;
            let cut = |row: usize| run.start + (row.clamp(here.start, here.end) - here.start) as u64;
            cut(rows.start)..cut(rows.end)
        });
        RowIds::new(within)
    }

    /// The elements of rows of width `width`, run by run.
    pub(crate) fn elements(&self, width: usize) -> Vec<NumberedElements> {
        let mut start = 0;
        let of_run = |run: &Range<u64>| {
            let range = start..start + (run.end - run.start) as usize * width;
            start = range.end;
            NumberedElements { range, first: run.start * width as u64 }
        };
        self.runs.iter().map(of_run).collect()
    }
}

impl From<Range<u64>> for RowIds {
    fn from(run: Range<u64>) -> RowIds {
        RowIds::new([run])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_joined_and_cut() {
        let ids = RowIds::new([4..6, 6..6, 6..8, 2..4, 9..10]);
        assert_eq!((ids.runs(), ids.len()), (&[4..8, 2..4, 9..10][..], 7));
        assert_eq!(ids.iter().collect::<Vec<_>>(), [4, 5, 6, 7, 2, 3, 9]);
        assert_eq!(ids.part(3..6).runs(), [7..8, 2..4]);
        assert_eq!((ids.part(0..7), ids.part(4..4)), (ids.clone(), RowIds::default()));
        let elements: Vec<_> = ids.elements(3).into_iter().map(|of| (of.range, of.first)).collect();
        assert_eq!(elements, [(0..12, 12), (12..18, 6), (18..21, 27)]);
    }
}
