//! Lanes: the ranks of a tensor group see the same tokens, and share among them the work of sending those to experts.
//!
//! ```text
//!                          sends                    sliced experts get their rows by
//!  Every      TED          all routes, every lane   nothing: each lane has received all
//!  Ordinals   DTD          every T-th of an expert  a gather over the slices
//!  Tokens     sequence     those of its own tokens  a gather over the slices
//! ```

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
    pub(super) fn sharing(&self) -> usize {
        if self.share == Share::Ordinals { self.count } else { 1 }
    }

    /// Which of those this rank is.
    pub(super) fn own(&self) -> usize {
        self.index % self.sharing()
    }

    /// How many of an expert's routes lane `lane` sends.
    pub(super) fn of(&self, routes: usize, lane: usize) -> usize {
        let sharing = self.sharing();
        (routes + sharing - 1 - lane) / sharing
    }

    /// Whether rows of other lanes have to come to this one's slices.
    pub fn gathers(&self) -> bool {
        self.sliced && self.share != Share::Every
    }
}
