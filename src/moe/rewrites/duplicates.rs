//! Duplicates: the ranks of a tensor group see the same tokens. As lanes they deal the rows among them, so that none
//! travels twice.
//!
//! ```text
//!                          sends                    sliced experts get their rows by
//!  Every      TED          all routes, every lane   nothing: each lane has received all
//!  Ordinals   DTD          every T-th of an expert  a gather over the slices
//!  Tokens     sequence     those of its own tokens  a gather over the slices
//! ```
//!
//! Dropping duplicates is DeepSpeed-TED's (spec 3.5), without slots: of an expert's routes in the order of their tokens,
//! lane t sends numbers t, t + T, t + 2 T, ... Sorted again they are what one lane would have sent, so no bit changes.

use guildhall_tensor::Indices;

use crate::moe::plan::{Plan, RowRun, StridedRows, UndealtRows};

/// Which routes of a tensor group's tokens each of its ranks sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// All of them, so that each of several lanes sends the same.
    Every,
    /// Those whose number within their expert is the lane's, modulo the number of lanes.
    Ordinals,
    /// Those of the lane's own tokens: the routing a plan is made of has no others.
    Tokens,
}

/// A rank's place among the lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    pub index: usize,
    pub count: usize,
    pub share: Share,
    /// Whether each lane has a slice of its experts; otherwise it has whole ones.
    pub sliced: bool,
}

impl Lanes {
    pub const ALONE: Lanes = Lanes { index: 0, count: 1, share: Share::Every, sliced: false };

    /// Lanes whose rows together are those of the tensor group.
    pub(in crate::moe) fn sharing(&self) -> usize {
        if self.share == Share::Ordinals { self.count } else { 1 }
    }

    /// Which of those this rank is.
    pub(in crate::moe) fn own(&self) -> usize {
        self.index % self.sharing()
    }

    /// How many of an expert's routes lane `lane` sends.
    pub(in crate::moe) fn of(&self, routes: usize, lane: usize) -> usize {
        let sharing = self.sharing();
        (routes + sharing - 1 - lane) / sharing
    }

    /// Whether rows of other lanes have to come to this one's slices.
    pub fn gathers(&self) -> bool {
        self.sliced && self.share != Share::Every
    }
}

/// The plan of one lane of several that deal its rows among them. Lane after lane, rows keep their order.
pub fn deal(mut plan: Plan, lanes: Lanes) -> Plan {
    plan.lanes = lanes;
    let count = lanes.sharing();
    if count == 1 {
        return plan;
    }
    let of_lane = |lane: usize| {
        let portion = move |StridedRows { run, first, .. }: StridedRows| {
            let run = RowRun { lane, rows: lanes.of(run.rows, lane), ..run };
            StridedRows { run, first: first + lane, every: count }
        };
        plan.portions().into_iter().map(portion).filter(|portion| portion.run.rows > 0)
    };
    let portions = (0..count).flat_map(of_lane).collect();
    let rows = plan.tokens.len();
    let places = match plan.tokens {
        Indices::Counted(_) => Indices::Counted(rows),
        _ => Indices::Known((0..rows as u32).collect()),
    };
    plan.undealt = Some(UndealtRows { tokens: plan.tokens.clone(), places });
    plan.of_portions(portions)
}
