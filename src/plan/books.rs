//! What a step costs one rank: bytes alive by cause, messages, arithmetic.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use guildhall_comm::Collective;
use guildhall_tensor::{Account, Cause, Phase};

use crate::parallel::Axis;

const CAUSES: usize = Cause::ALL.len();

/// Bytes by cause, in the order of [`Cause::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes(pub [u64; CAUSES]);

impl Bytes {
    /// What was alive when the most was.
    pub(super) fn at_peak(account: &Account) -> Bytes {
        Bytes(Cause::ALL.map(|cause| account.at_peak(cause)))
    }

    /// The most of each cause, at whatever time.
    pub(super) fn peaks(account: &Account) -> Bytes {
        Bytes(Cause::ALL.map(|cause| account.peak(cause)))
    }

    pub fn of(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }

    /// The cause that most is for.
    pub fn largest(&self) -> Cause {
        let most = Cause::ALL.iter().max_by_key(|&&cause| self.of(cause));
        *most.expect("there are causes")
    }

    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }

    /// With so many more for one cause.
    pub(super) fn and(mut self, cause: Cause, bytes: u64) -> Bytes {
        self.0[cause as usize] += bytes;
        self
    }

    /// Of each cause what `f` makes of both.
    pub(super) fn with(self, other: Bytes, f: impl Fn(u64, u64) -> u64) -> Bytes {
        Bytes(std::array::from_fn(|cause| f(self.0[cause], other.0[cause])))
    }
}

/// When a message leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum When {
    /// The rank waits for it.
    Now,
    /// While backward goes on.
    Behind,
    /// While the part of the model before the one that needs it computes.
    Ahead,
}

/// Calls, and messages and bytes sent to others, by `crates/comm/src/wrap/bytes.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlannedTraffic {
    pub calls: u64,
    pub messages: u64,
    pub bytes: u64,
}

impl AddAssign for PlannedTraffic {
    fn add_assign(&mut self, other: PlannedTraffic) {
        self.calls += other.calls;
        self.messages += other.messages;
        self.bytes += other.bytes;
    }
}

/// Messages of one kind in one group.
pub type Messages = BTreeMap<(Axis, Collective, When), PlannedTraffic>;

/// The bytes of all messages of a kind, whenever they leave.
pub fn traffic(messages: &Messages) -> BTreeMap<(Axis, Collective), PlannedTraffic> {
    let mut sums = BTreeMap::<_, PlannedTraffic>::new();
    for ((axis, collective, _), traffic) in messages {
        *sums.entry((*axis, *collective)).or_default() += *traffic;
    }
    sums
}

/// Which part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelPart {
    Embedding,
    Attention,
    FeedForward,
    /// Router, gate, and the weighing of rows.
    Routing,
    /// With the sorting of rows.
    Experts,
    /// With the last norm.
    Head,
    Optimizer,
}

impl ModelPart {
    /// What a scope of the model belongs to.
    pub(super) fn of(scope: &str, phase: Phase) -> ModelPart {
        match scope.rsplit(' ').next() {
            _ if phase == Phase::Update => ModelPart::Optimizer,
            Some("attention") => ModelPart::Attention,
            Some("feed-forward") => ModelPart::FeedForward,
            Some("routing" | "losses") => ModelPart::Routing,
            Some("experts") => ModelPart::Experts,
            Some("head" | "norm") => ModelPart::Head,
            _ => ModelPart::Embedding,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            ModelPart::Embedding => "embedding",
            ModelPart::Attention => "attention",
            ModelPart::FeedForward => "feed-forward",
            ModelPart::Routing => "routing",
            ModelPart::Experts => "experts",
            ModelPart::Head => "head",
            ModelPart::Optimizer => "optimizer",
        }
    }
}
