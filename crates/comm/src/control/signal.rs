//! What ranks tell each other beside the data.

use crate::operation::Collective;
use crate::site::CallSite;

/// What one rank tells another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Signal {
    /// Rank `rank` has failed, or wants everybody to stop; in the operation asked for at `site`, if one is to blame.
    Failed { rank: usize, reason: String, site: Option<CallSite> },
    /// The sender has come to an operation of a group that it shares with the receiver.
    Arrived(Arrival),
    /// The sender has been waiting in this operation for some time, maybe of a group that the receiver is not in, and these
    /// ranks of the world are missing there.
    Waiting { collective: Collective, site: CallSite, missing: Vec<usize> },
    /// Words for whoever made the receiving rank, from who made the sender: what ranks are told to do, and how they end.
    Told(String),
    /// The sender has nothing more to say.
    Left,
}

/// An operation that a rank has come to, as one peer needs to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// The group, as its members number it.
    pub group: u64,
    /// The operation's place in the order of that group, from 0.
    pub sequence: u64,
    pub collective: Collective,
    /// Equal where the operations of two ranks can meet.
    pub digest: u64,
    /// All-to-all: elements that the sender sends the receiver, and that it expects from it; elsewhere zero.
    pub sent: u64,
    pub expected: u64,
    /// The operation with its kinds and counts, as text.
    pub operation: String,
    /// The line that asked for it.
    pub site: CallSite,
}
