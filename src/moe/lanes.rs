//! Lanes: the ranks of a tensor group. They see the same tokens and divide the work of dispatching them to the experts.
//!
//! ```text
//!                          sends                             sliced experts get their rows by
//!  Every      TED          all routes, on every lane         nothing: each lane has received all
//!  Ordinals   DTD          every S-th route of each expert   an all-gather over the slices
//!  Tokens     sequence     the routes of its own tokens      an all-gather over the slices
//! ```
//!
//! S is the number of lanes, the size of the tensor group.

/// How the routes of a tensor group's tokens are divided among its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Every lane sends all routes, so all lanes send the same rows.
    Every,
    /// The routes whose index among the routes of their expert is congruent to the lane's index modulo the number of
    /// lanes.
    Ordinals,
    /// The routes of the lane's own tokens (sequence parallelism). The plan is then made from a routing that contains
    /// only these tokens.
    Tokens,
}

/// A rank's index among the lanes, and how they divide the routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    pub index: usize,
    pub count: usize,
    pub share: Share,
    /// Whether each lane has slices of its experts; otherwise it has whole experts.
    pub sliced: bool,
}

impl Lanes {
    pub const ALONE: Lanes = Lanes { index: 0, count: 1, share: Share::Every, sliced: false };

    /// Rank `index` of a tensor group of `count`, whose experts are `sliced` over the group or whole. Their routes are
    /// divided among the lanes if duplicates are dropped or if experts are whole.
    pub fn new(index: usize, count: usize, sliced: bool, drop_duplicates: bool) -> Lanes {
        // Otherwise a whole expert would be trained on every copy of a token.
        let share = if count > 1 && (drop_duplicates || !sliced) { Share::Ordinals } else { Share::Every };
        Lanes { index, count, share, sliced }
    }

    /// The number of lanes among which the routes of an expert are divided ([`Share::Ordinals`]), otherwise 1.
    pub fn sharing(&self) -> usize {
        if self.share == Share::Ordinals { self.count } else { 1 }
    }

    /// This rank's index among the lanes counted by [`Lanes::sharing`].
    pub fn own(&self) -> usize {
        self.index % self.sharing()
    }

    /// Of an expert's `routes` routes, the number that lane `lane` sends.
    pub fn of(&self, routes: usize, lane: usize) -> usize {
        let sharing = self.sharing();
        (routes + sharing - 1 - lane) / sharing
    }

    /// Whether this lane's expert slices need an all-gather of the rows that the other lanes received.
    pub fn gathers(&self) -> bool {
        self.sliced && self.share != Share::Every
    }
}
