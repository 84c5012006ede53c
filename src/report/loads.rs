//! Expert loads over a run of unknown length, in a bounded number of columns.

/// Columns of a heat map at most.
pub(super) const COLUMNS_MAX: usize = 120;

/// Routes per expert, summed over as many steps a column as the run's length asks for.
///
/// A long run of many experts has more numbers than memory has room for, so columns are merged in pairs,
/// and take twice as many steps from then on, whenever there are too many.
#[derive(Default)]
pub(super) struct Loads {
    pub(super) columns: Vec<Column>,
    /// Doublings so far: a full column has 2^doublings steps.
    doublings: u32,
}

/// The loads of neighbouring steps.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column {
    pub(super) first: u64,
    pub(super) last: u64,
    steps: u64,
    /// By expert; floats because sums over a long run may pass any integer.
    pub(super) routes: Vec<f64>,
}

impl Loads {
    pub(super) fn push(&mut self, step: u64, load: &[u64]) {
        let column =
            Column { first: step, last: step, steps: 1, routes: load.iter().map(|&routes| routes as f64).collect() };
        let width = 1u64 << self.doublings;
        match self.columns.last_mut().filter(|last| last.steps < width) {
            Some(last) => last.absorb(&column),
            None => self.columns.push(column),
        }
        if self.columns.len() > COLUMNS_MAX {
            self.halve();
        }
    }

    /// Experts of the layer.
    pub(super) fn experts(&self) -> usize {
        self.columns.iter().map(|column| column.routes.len()).max().unwrap_or(0)
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
    /// Share of `expert` times the number of experts: 1 is uniform. 0 if nothing was routed.
    pub(super) fn relative(&self, expert: usize, experts: usize) -> f64 {
        let total: f64 = self.routes.iter().sum();
        let routes = self.routes.get(expert).copied().unwrap_or(0.0);
        if total > 0.0 { routes / total * experts as f64 } else { 0.0 }
    }

    fn absorb(&mut self, other: &Column) {
        self.last = other.last;
        self.steps += other.steps;
        if self.routes.len() < other.routes.len() {
            self.routes.resize(other.routes.len(), 0.0);
        }
        for (mine, routes) in self.routes.iter_mut().zip(&other.routes) {
            *mine += routes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_bounded_and_lose_no_route() {
        for steps in [1, 119, 120, 121, 1000, 12_345] {
            let mut loads = Loads::default();
            (1..=steps).for_each(|step| loads.push(step, &[1, 3]));
            let columns = &loads.columns;
            assert!(
                columns.len() <= COLUMNS_MAX && columns.len() as u64 >= steps.min(60),
                "{steps}: {}",
                columns.len()
            );
            assert_eq!(columns.iter().map(|column| column.routes[1]).sum::<f64>(), 3.0 * steps as f64);
            assert_eq!((columns[0].first, columns.last().unwrap().last), (1, steps));
            let widths: Vec<u64> = columns.iter().map(|column| column.last + 1 - column.first).collect();
            assert!(widths[..widths.len() - 1].iter().all(|&width| width == widths[0]), "{steps}: {widths:?}");
            assert!(columns.windows(2).all(|pair| pair[0].last + 1 == pair[1].first), "{steps}");
        }
    }

    #[test]
    fn shares_are_relative_to_uniform() {
        let mut loads = Loads::default();
        loads.push(1, &[1, 3]);
        loads.push(2, &[0, 0]);
        assert_eq!(loads.columns[0].relative(1, 2), 1.5);
        assert_eq!(loads.columns[1].relative(1, 2), 0.0);
    }
}
