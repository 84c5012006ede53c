//! Shadowing: the weights of some experts are copied to every rank of their group for one micro-batch. Their rows are
//! then not sent, and every rank computes its own rows for them: the hottest experts (FasterMoE; spec 1.9, with the
//! prototype's latency model), or all of them (the exchange of experts; Liu et al. 2023, Janus).

use std::cmp::Reverse;

use guildhall_tensor::Dtype;

use crate::moe::plan::{Plan, RowRun};
use crate::parallel::{ExpertTable, Rates};

/// Keeps the rows of `experts` on this rank, behind all other rows, since the weights of these experts are sent
/// instead. `experts` must be in the order of [`by_owner`].
pub fn shadow(plan: Plan, experts: Vec<usize>) -> Plan {
    if experts.is_empty() {
        return plan;
    }
    let plan = plan.relabelled(|run| RowRun { rank: run.rank.filter(|_| !experts.contains(&run.expert)), ..run });
    Plan { shadowed: experts, ..plan }
}

/// The costs of rows and experts, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// One row through an expert, forward and backward.
    pub compute: f64,
    /// One row over a rank's link, in one direction.
    pub travel: f64,
    /// One expert's weights over a link, in one direction.
    pub visit: f64,
}

impl Cost {
    /// The costs of experts with `elements` weights each and of rows of `width`: two operations per weight in forward,
    /// four in backward (He et al. 2022, 4.1). Weights and rows are sent in the type `dtype`.
    pub fn new(rates: Rates, elements: usize, width: usize, dtype: Dtype) -> Cost {
        let bytes = |n: usize| (n * dtype.bytes()) as f64;
        Cost {
            compute: 6.0 * elements as f64 / rates.flops,
            travel: bytes(width) / rates.bandwidth,
            visit: bytes(elements) / rates.bandwidth,
        }
    }

    /// Seconds of a step: the computation of the most loaded rank, the rows over the most loaded link (to the experts
    /// and back, and the same for their gradients), and the weights of every shadowed expert (and their gradients
    /// back).
    fn of(&self, rows: &[Vec<u64>], table: &ExpertTable, shadowed: &[usize]) -> f64 {
        let ranks = 0..table.ranks();
        let travels = |expert: &&usize| !shadowed.contains(expert);
        let sent = |from: usize, to: usize| table.of(to).iter().filter(travels).map(|&e| rows[from][e]).sum::<u64>();
        let stays = |rank: usize| shadowed.iter().map(|&e| rows[rank][e]).sum::<u64>();
        let computes = |rank: usize| stays(rank) + ranks.clone().map(|from| sent(from, rank)).sum::<u64>();
        let link = |rank: usize| {
            let others = || ranks.clone().filter(move |&other| other != rank);
            let (out, come): (u64, u64) =
                (others().map(|to| sent(rank, to)).sum(), others().map(|from| sent(from, rank)).sum());
            out.max(come)
        };
        let fullest = |f: &dyn Fn(usize) -> u64| ranks.clone().map(f).max().unwrap_or(0) as f64;
        fullest(&computes) * self.compute
            + 4.0 * fullest(&link) * self.travel
            + 2.0 * shadowed.len() as f64 * self.visit
    }
}

/// The `n` experts with the most rows, hottest first; `rows[rank][expert]`. Ties go to the lower expert.
pub fn hottest(rows: &[Vec<u64>], n: usize) -> Vec<usize> {
    let experts = rows.first().map_or(0, Vec::len);
    let mut order: Vec<usize> = (0..experts).collect();
    order.sort_by_key(|&expert| Reverse(rows.iter().map(|rows| rows[expert]).sum::<u64>()));
    order.truncate(n);
    order
}

/// The hottest experts, added one by one as long as the step becomes shorter.
pub fn worthwhile(rows: &[Vec<u64>], table: &ExpertTable, cost: &Cost) -> Vec<usize> {
    let order = hottest(rows, table.experts());
    let mut best = (0, cost.of(rows, table, &[]));
    for n in 1..=order.len() {
        let seconds = cost.of(rows, table, &order[..n]);
        if seconds >= best.1 {
            break;
        }
        best = (n, seconds);
    }
    order[..best.0].to_vec()
}

/// Experts sorted by the rank that holds them, then by number: the order in which their weights arrive.
pub fn by_owner(shadowed: &[usize], table: &ExpertTable) -> Vec<usize> {
    let of_rank = |rank| table.of(rank).iter().copied().filter(|expert| shadowed.contains(expert));
    (0..table.ranks()).flat_map(of_rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Cost = Cost { compute: 1.0, travel: 1.0, visit: 10.0 };

    /// By hand: two ranks with two experts each; expert 2 gets nearly all rows.
    #[test]
    fn a_hot_expert_pays_and_a_cold_one_does_not() {
        let table = ExpertTable::even(4, 2);
        let rows = [vec![1, 1, 40, 1], vec![1, 1, 40, 1]];
        // Rank 1 computes 82 rows, and its link carries 41.
        assert_eq!(COST.of(&rows, &table, &[]), 82.0 + 4.0 * 41.0);
        // Every rank computes its own 40 rows of expert 2, and 4 or 2 others; a link carries at most 2 rows.
        assert_eq!(COST.of(&rows, &table, &[2]), 44.0 + 4.0 * 2.0 + 2.0 * 10.0);
        assert_eq!(worthwhile(&rows, &table, &COST), [2]);
        assert_eq!(worthwhile(&[vec![5; 4], vec![5; 4]], &table, &COST), [0usize; 0]);
    }

    #[test]
    fn the_hottest_come_first_and_travel_by_owner() {
        let rows = [vec![3, 9, 1, 9], vec![3, 0, 1, 0]];
        assert_eq!(hottest(&rows, 3), [1, 3, 0]);
        assert_eq!(by_owner(&[1, 3, 0], &ExpertTable::new(&[1, 1, 0, 0], 2)), [3, 0, 1]);
    }
}
