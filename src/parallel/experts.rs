//! Which rank of an expert group holds which experts.

/// Experts by rank. Every rank has at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertTable {
    of_rank: Vec<Vec<usize>>,
    experts: usize,
}

impl ExpertTable {
    /// Consecutive, equal shares.
    ///
    /// # Panics
    /// If `ranks` does not divide `experts`: configuration has been checked before.
    pub fn even(experts: usize, ranks: usize) -> ExpertTable {
        assert!(experts.is_multiple_of(ranks), "{experts} experts on {ranks} ranks");
        let share = experts / ranks;
        ExpertTable { of_rank: (0..ranks).map(|rank| (rank * share..(rank + 1) * share).collect()).collect(), experts }
    }

    /// Expert e on rank `owners[e]`.
    ///
    /// # Panics
    /// If an owner is no rank, or a rank owns nothing: configuration has been checked before.
    pub fn new(owners: &[usize], ranks: usize) -> ExpertTable {
        let mut of_rank = vec![Vec::new(); ranks];
        owners.iter().enumerate().for_each(|(expert, &rank)| of_rank[rank].push(expert));
        assert!(of_rank.iter().all(|experts| !experts.is_empty()), "a rank without experts: {owners:?}");
        ExpertTable { of_rank, experts: owners.len() }
    }

    /// Over all ranks.
    pub fn experts(&self) -> usize {
        self.experts
    }

    pub fn ranks(&self) -> usize {
        self.of_rank.len()
    }

    /// The rank of each expert.
    pub fn owners(&self) -> Vec<usize> {
        let mut owners = vec![0; self.experts];
        self.of_rank.iter().enumerate().for_each(|(rank, held)| held.iter().for_each(|&expert| owners[expert] = rank));
        owners
    }

    /// The experts of a rank, ascending.
    pub fn of(&self, rank: usize) -> &[usize] {
        &self.of_rank[rank]
    }
}
