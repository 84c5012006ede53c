//! The state of one weight that is kept on a rank, and where its tiles and its gradient's parts lie.

use std::ops::Range;

use guildhall_tensor::Dtype;

/// What a walk does to the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// All of it anew, whatever it was.
    Write,
    /// An update. Where state is elsewhere, the gradient comes with it, as one strip more.
    Change,
}

/// The state of one weight that is kept on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Elements of the local weight.
    pub range: Range<usize>,
    /// Two, or with a master three.
    pub strips: usize,
    /// How the gradient is stored.
    pub gradient: Dtype,
}

impl Shard {
    /// Elements of all strips.
    pub(super) fn len(&self) -> usize {
        self.range.len() * self.strips
    }
}

/// Where a tile is stored.
#[derive(Clone, Debug)]
pub(super) struct Address {
    /// Offset of the shard: the number of elements of all shards before it.
    pub(super) base: usize,
    /// Elements of each of the shard's strips; a strip is m, v or the master weights.
    pub(super) strip: usize,
    pub(super) strips: usize,
    /// Offset of the weight's gradient shard among the shards of all gradients.
    pub(super) gradient: usize,
    /// Whether the tile has the gradient as an additional strip.
    pub(super) has_gradient: bool,
    /// The tile's elements within each strip.
    pub(super) range: Range<usize>,
    /// Number of identical tiles that this one represents in a plan, itself included.
    pub(super) alike: u64,
}

impl Address {
    pub(super) fn new(shards: &[Shard], weight: usize, range: Range<usize>, alike: u64, access: Access) -> Address {
        let (before, shard) = (&shards[..weight], &shards[weight]);
        let (strip, strips) = (shard.range.len(), shard.strips);
        let (base, gradient) =
            (before.iter().map(Shard::len).sum(), before.iter().map(|shard| shard.range.len()).sum());
        Address { base, strip, strips, gradient, has_gradient: access == Access::Change, range, alike }
    }

    /// Number of elements read into staging memory.
    pub(super) fn len(&self) -> usize {
        self.written() + if self.has_gradient { self.range.len() } else { 0 }
    }

    /// Number of elements written back.
    pub(super) fn written(&self) -> usize {
        self.range.len() * self.strips
    }
}

/// Elements of a weight's gradient that are contiguous in a message.
#[derive(Clone, Debug)]
pub(super) struct GradientPart {
    /// The first, among those of all gradients.
    pub(super) to: usize,
    /// In the message.
    pub(super) from: Range<usize>,
}
