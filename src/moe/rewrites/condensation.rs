//! Condensation: routes of one cluster share the row of their representative; the other rows are not sent (Luffy,
//! arXiv:2411.15419, 4.4).

use guildhall_tensor::Indices;

use crate::moe::plan::{Plan, RowRun};
use crate::moe::{Clusters, CondenseGradient};

/// Keeps the rows of representatives, to which the routes of their clusters then point.
pub fn condense(plan: Plan, clusters: &Clusters, gradient: CondenseGradient) -> Plan {
    let plan = match clusters {
        Clusters::Known(of) => share_rows(plan, of),
        Clusters::Counted(rows) => count_rows(plan, rows),
    };
    Plan { spreads: gradient == CondenseGradient::Spread, ..plan }
}

fn share_rows(plan: Plan, of: &[u32]) -> Plan {
    let (tokens, places) = (plan.tokens.known(), plan.places.known());
    let mut kept = vec![false; tokens.len()];
    let row_of = |route: usize| match places[route] {
        u32::MAX => None,
        _ => Some(places[of[route] as usize] as usize),
    };
    let shared: Vec<Option<usize>> = (0..places.len()).map(row_of).collect();
    shared.iter().flatten().for_each(|&row| kept[row] = true);
    let before: Vec<u32> =
        kept.iter().scan(0, |next, &kept| Some(std::mem::replace(next, *next + u32::from(kept)))).collect();
    let mut first = 0;
    let left = |run: &RowRun| {
        let rows = kept[first..first + run.rows].iter().filter(|&&kept| kept).count();
        first += run.rows;
        RowRun { rows, ..*run }
    };
    let runs = plan.runs.iter().map(left).filter(|run| run.rows > 0).collect();
    let places = shared.into_iter().map(|row| row.map_or(u32::MAX, |row| before[row])).collect();
    let tokens = tokens.iter().zip(&kept).filter(|(_, kept)| **kept).map(|(&token, _)| token).collect();
    Plan { runs, tokens: Indices::Known(tokens), places: Indices::Known(places), ..plan }
}

/// The same where only the number of rows left for each expert is known.
fn count_rows(plan: Plan, rows: &[usize]) -> Plan {
    let left = |run: &RowRun| RowRun { rows: rows[run.expert].min(run.rows), ..*run };
    let runs: Vec<RowRun> = plan.runs.iter().map(left).filter(|run| run.rows > 0).collect();
    let tokens = Indices::Counted(runs.iter().map(|run| run.rows).sum());
    Plan { runs, tokens, ..plan }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::Routing;
    use crate::parallel::ExpertTable;

    /// Six tokens, one route each. Token 3 represents 0 and 5; token 1 was dropped; 2 and 4 are alone.
    #[test]
    fn members_point_to_the_row_of_their_representative() {
        let mut routing = Routing::new(vec![1, 1, 0, 1, 0, 1], 1, 2);
        routing.expert[1] = Routing::DROPPED;
        let plan = Plan::new(&routing, ExpertTable::even(2, 1), 0);
        let clusters = Clusters::Known(vec![3, 1, 2, 3, 4, 3]);
        assert_eq!(clusters.rows(&routing), [2, 1]);
        let plan = condense(plan, &clusters, CondenseGradient::Spread);
        assert_eq!(plan.tokens, Indices::Known(vec![2, 4, 3]));
        assert_eq!(plan.places, Indices::Known(vec![2, u32::MAX, 0, 2, 1, 2]));
        assert_eq!((plan.rows_per_expert(), plan.spreads), (vec![2, 1], true));
    }
}
