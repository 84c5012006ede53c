//! In which layouts a bug can show: a bug in the sum over two ranks is none on one.

use guildhall_tensor::Part;

use super::super::layouts::NamedLayout;
use super::super::options::Between;
use crate::config::StorageType;
use crate::moe::Shadowing;
use crate::parallel::{Axis, MeshShape, Migrate};

/// What a layout needs for a bug to make a difference.
pub(crate) struct Shows {
    /// Of a search without such a layout: "no layout of it ...".
    pub(crate) lacks: &'static str,
    /// The option that makes one.
    pub(crate) option: &'static str,
    pub(crate) is_in: fn(&NamedLayout) -> bool,
    /// What else makes one.
    pub(crate) more: &'static str,
    /// Whether the layout's own gates have to be asked.
    pub(crate) of_choices: bool,
}

const fn shows(lacks: &'static str, option: &'static str, is_in: fn(&NamedLayout) -> bool) -> Shows {
    Shows { lacks, option, is_in, more: "more --ranks", of_choices: false }
}

pub(super) static ANYWHERE: Shows = shows("is possible", "mesh", |_| true);
pub(super) static RANKS: Shows = shows("has two ranks", "mesh", |layout| layout.config.parallel.ranks > 1);
pub(super) static SLICES: Shows =
    shows("has a tensor group of two ranks", "mesh", |layout| layout.config.parallel.tensor > 1);
pub(super) static SHARED_EXPERTS: Shows = shows("has two ranks that hold the same experts", "mesh", |layout| {
    layout.config.parallel.shape().expert_data() > 1
});
pub(super) static OTHER_PLACES: Shows =
    shows("shares experts among ranks that have other places in the data group", "zero", |layout| {
        layout.config.parallel.zero > 0 && has_other_places(&layout.config.parallel.shape())
    });
pub(super) static MICRO_BATCHES: Shows =
    shows("has two micro-batches a step", "micro_batch", |layout| layout.micro_batches() > 1);
/// Fewer sums in eight bits are lost among the model's other roundings. Ranks of a data group have a part of the rows each;
/// and where micro-batches may not be varied, samples of the rounding have the same.
pub(super) static MANY_SUMS: Shows = Shows {
    more: "64 rows a step for each rank (train.batch_tokens, --ranks 1)",
    ..shows("adds up 64 micro-batches on a rank in half the bits", "micro_batch", |layout| {
        let each = layout.micro_batches() / layout.config.parallel.shape().degree(Axis::Data);
        layout.config.train.dtype == StorageType::Bf16 && each >= 64 && layout.may_be_cut()
    })
};
pub(super) static IDLE_RANKS: Shows =
    shows("spreads experts over ranks of which one may have nothing to send", "micro_batch", |layout| {
        let (config, shape) = (&layout.config, layout.config.parallel.shape());
        let rows = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
        // Experts that visit take away the need to send.
        let visits = config.moe.as_ref().is_some_and(|moe| moe.shadowing() != Shadowing::Off);
        shape.expert > 1 && (rows < shape.degree(Axis::Data) || visits)
    });
/// Where clusters are followed, nobody asks who represents whom.
pub(super) static CLUSTERS: Shows = Shows { of_choices: true, ..SHARED_ROWS };
pub(super) static SHARED_ROWS: Shows = Shows {
    more: "a recipe with moe.condense",
    ..shows("lets tokens share rows", "condense", |layout| {
        let moe = layout.config.moe.as_ref();
        moe.and_then(|moe| moe.condensation()).is_some_and(|condensation| condensation.threshold.is_reachable())
    })
};
pub(super) static MOVES: Shows = shows("moves sequences between ranks", "migrate", |layout| {
    layout.config.parallel.migrate != Migrate::Off && layout.config.sequences_stay().is_none()
});
pub(super) static BLOCKS_AGAIN: Shows =
    shows("runs blocks twice", "recompute", |layout| layout.config.memory.segments().parts.contains(&Part::Block));
pub(super) static EVALUATION: Shows =
    shows("evaluates between steps", "between_steps", |layout| layout.between == Between::Evaluation);
pub(super) static CHECKPOINT: Shows = shows("reads a checkpoint between steps", "between_steps", |layout| {
    matches!(layout.between, Between::Checkpoint | Between::Copy)
});

pub(super) static CHOICES_ON_RANKS: Shows = Shows { of_choices: true, ..RANKS };
pub(super) static CHOICES_AGAIN: Shows = Shows { of_choices: true, ..BLOCKS_AGAIN };

/// Whether some rank's place among those that hold the same experts is not its place in the data group.
fn has_other_places(shape: &MeshShape) -> bool {
    let (data, experts) = (Axis::Data, Axis::ExpertData(shape.expert));
    let holders = shape.degree(experts);
    (0..shape.ranks).any(|rank| shape.place(data, rank).index % holders != shape.place(experts, rank).index)
}
