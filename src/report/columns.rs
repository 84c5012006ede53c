//! Values by row over a run of unknown length, in a bounded number of columns.

/// Columns of a heat map at most.
pub(super) const COLUMNS_MAX: usize = 120;

/// Values of every row (an expert's routes, a rank's seconds), summed over as many steps a column as the run's length
/// asks for.
///
/// A long run of many rows has more numbers than memory has room for, so columns are merged in pairs,
/// and take twice as many steps from then on, whenever there are too many.
#[derive(Default)]
pub(super) struct Columns {
    pub(super) columns: Vec<Column>,
    /// Doublings so far: a full column has 2^doublings steps.
    doublings: u32,
}

/// The values of neighbouring steps.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column {
    pub(super) first: u64,
    pub(super) last: u64,
    steps: u64,
    /// By row; floats because sums over a long run may pass any integer.
    pub(super) sums: Vec<f64>,
}

impl Columns {
    pub(super) fn push(&mut self, step: u64, sums: Vec<f64>) {
        let column = Column { first: step, last: step, steps: 1, sums };
        let width = 1u64 << self.doublings;
        match self.columns.last_mut().filter(|last| last.steps < width) {
            Some(last) => last.absorb(&column),
            None => self.columns.push(column),
        }
        if self.columns.len() > COLUMNS_MAX {
            self.halve();
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.columns.iter().map(|column| column.sums.len()).max().unwrap_or(0)
    }

    fn halve(&mut self) {
        let pairs = self.columns.chunks(2).map(|pair| {
            let mut merged = pair[0].clone();
            pair[1..].iter().for_each(|second| merged.absorb(second));
            merged
        });
        self.columns = pairs.collect();
        self.doublings += 1;
    }
}

impl Column {
    /// Share of `row` times the number of rows: 1 is uniform. 0 if all sums are.
    pub(super) fn relative(&self, row: usize, rows: usize) -> f64 {
        let total: f64 = self.sums.iter().sum();
        if total > 0.0 { self.sum(row) / total * rows as f64 } else { 0.0 }
    }

    /// The mean of `row` over the column's steps.
    pub(super) fn mean(&self, row: usize) -> f64 {
        self.sum(row) / self.steps as f64
    }

    fn sum(&self, row: usize) -> f64 {
        self.sums.get(row).copied().unwrap_or(0.0)
    }

    fn absorb(&mut self, other: &Column) {
        self.last = other.last;
        self.steps += other.steps;
        if self.sums.len() < other.sums.len() {
            self.sums.resize(other.sums.len(), 0.0);
        }
        for (mine, others) in self.sums.iter_mut().zip(&other.sums) {
            *mine += others;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_bounded_and_lose_nothing() {
        for steps in [1, 119, 120, 121, 1000, 12_345] {
            let mut all = Columns::default();
            (1..=steps).for_each(|step| all.push(step, vec![1.0, 3.0]));
            let columns = &all.columns;
            assert!(
                columns.len() <= COLUMNS_MAX && columns.len() as u64 >= steps.min(60),
                "{steps}: {}",
                columns.len()
            );
            assert_eq!(columns.iter().map(|column| column.sums[1]).sum::<f64>(), 3.0 * steps as f64);
            assert!(columns.iter().all(|column| column.mean(1) == 3.0), "{steps}");
            assert_eq!((columns[0].first, columns.last().unwrap().last), (1, steps));
            let widths: Vec<u64> = columns.iter().map(|column| column.last + 1 - column.first).collect();
            assert!(widths[..widths.len() - 1].iter().all(|&width| width == widths[0]), "{steps}: {widths:?}");
            assert!(columns.windows(2).all(|pair| pair[0].last + 1 == pair[1].first), "{steps}");
        }
    }

    #[test]
    fn shares_are_relative_to_uniform() {
        let mut columns = Columns::default();
        columns.push(1, vec![1.0, 3.0]);
        columns.push(2, vec![0.0, 0.0]);
        assert_eq!(columns.columns[0].relative(1, 2), 1.5);
        assert_eq!(columns.columns[1].relative(1, 2), 0.0);
    }
}
