//! Which way all-to-alls of an expert group go from node to node, measured.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use guildhall_comm::wrap::NodeWay;
use guildhall_comm::{Communicator, Error, Reduce};

use super::{Axis, Mesh};

/// What an expert group of a degree goes by, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredWays {
    /// The name of the group.
    pub group: String,
    pub chosen: NodeWay,
    /// Seconds of a layer's exchanges by each of [`NodeWay::ALL`], of the slowest rank.
    pub seconds: [f64; NodeWay::ALL.len()],
}

impl fmt::Display for MeasuredWays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told = |way: NodeWay| format!("{} {:.3} ms", way.name(), self.seconds[way as usize] * 1e3);
        let [direct, two_level, two_d] = NodeWay::ALL.map(told);
        let MeasuredWays { group, chosen, .. } = self;
        write!(f, "ways     {group}: {} from node to node; a layer takes {direct}, {two_level}, {two_d}", chosen.name())
    }
}

/// Times that a layer's exchanges are timed; the shortest counts.
const ROUNDS: usize = 5;
/// Exchanges of rows in a layer, forward and backward; counts are exchanged once.
const ROW_EXCHANGES: usize = 4;
/// Most elements of 4 bytes that a rank sends to each other while that is timed.
const ELEMENTS_MAX: usize = 1 << 18;
/// A way has to take this much less than that of every rank to every other.
const GAIN: f64 = 0.95;

impl Mesh {
    /// The same with the fastest way for each degree of experts, whose ranks send each other about `row_bytes(degree)` bytes
    /// of rows in an exchange. Collective.
    ///
    /// # Errors
    /// What the groups report.
    pub fn with_fastest_ways(self, row_bytes: impl Fn(usize) -> usize) -> Result<Mesh, Error> {
        self.for_each_degree(|mut mesh| {
            if !mesh.has_ways() {
                return Ok(mesh);
            }
            let degree = mesh.shape().expert;
            let elements = (row_bytes(degree) / size_of::<f32>()).clamp(1, ELEMENTS_MAX);
            let groups = NodeWay::ALL.map(|way| mesh.expert_by(way));
            let mut seconds = Vec::new();
            for group in groups {
                seconds.push(exchanges(&group?, elements)?);
            }
            let slowest = mesh.world.all_reduce(Reduce::Max, seconds)?.into_f64();
            let seconds: [f64; NodeWay::ALL.len()] = slowest.try_into().expect("one for each way");
            let chosen = fastest(seconds);
            let group = mesh.degrees().name(Axis::Expert(degree));
            mesh.note_way(MeasuredWays { group, chosen, seconds });
            mesh.of_way(chosen)
        })
    }
}

/// Of the seconds of each of [`NodeWay::ALL`]: what saves little is not worth a way round.
fn fastest(seconds: [f64; NodeWay::ALL.len()]) -> NodeWay {
    let cost = |way: NodeWay| seconds[way as usize] * if way == NodeWay::Direct { GAIN } else { 1.0 };
    NodeWay::ALL.into_iter().min_by(|a, b| cost(*a).total_cmp(&cost(*b))).expect("there are ways")
}

/// Seconds of a layer's exchanges.
fn exchanges(group: &Arc<dyn Communicator>, elements: usize) -> Result<f64, Error> {
    let (size, all) = (group.size(), elements * group.size());
    let counts = vec![elements; size];
    let mut shortest = f64::INFINITY;
    // The first makes connections.
    for round in 0..=ROUNDS {
        group.barrier()?;
        let begun = Instant::now();
        group.all_to_all_u64(&vec![1; size])?;
        for _ in 0..ROW_EXCHANGES {
            group.all_to_all(vec![1.0f32; all], counts.clone(), vec![0.0f32; all], counts.clone())?;
        }
        if round > 0 {
            shortest = shortest.min(begun.elapsed().as_secs_f64());
        }
    }
    Ok(shortest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_round_has_to_pay() {
        assert_eq!(fastest([1.0, 0.96, 0.97]), NodeWay::Direct);
        assert_eq!(fastest([1.0, 0.9, 0.8]), NodeWay::TwoD);
        assert_eq!(fastest([1.0, 0.8, 0.9]), NodeWay::TwoLevel);
        assert_eq!(fastest([0.0; 3]), NodeWay::Direct);
    }
}
