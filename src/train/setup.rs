//! What a rank trains with, from the recipe: its place in the mesh, the model, the optimizer, its batches.

use std::sync::Arc;

use guildhall_comm::Error as CommError;
use guildhall_comm::wrap::NodeWay;

use super::error::Error;
use super::job::init_weights;
use super::replacing::Replacing;
use super::row_losses::RowSums;
use super::step::Trainer;
use crate::checkpoint::{self, TensorKind};
use crate::config::{Config, LrSchedule, StorageType, Training};
use crate::data::{self, BatchPlan, Loader, Source};
use crate::launch::{self, Rank};
use crate::lora;
use crate::memory;
use crate::model::{Model, Sizes, count};
use crate::moe::Shadowing;
use crate::optim::{Decay, Hyper, LearningRate, OffloadTarget, Settings};
use crate::parallel::{AllToAll, Mesh, Migrate, Parameters, Zero};

/// Bytes that each of so many ranks of this machine may take of the memory it computes in; `None` where nobody knows.
pub fn rank_memory(config: &Config, neighbours: usize) -> Option<u64> {
    let of_the_machine = || memory::available_bytes().map(|free| free / neighbours as u64);
    launch::memory_apart(config.parallel.backend, neighbours).or_else(of_the_machine)
}

/// Everything that fixes the model of a run.
pub fn sizes(config: &Config) -> Sizes {
    let stored = |dtype| match dtype {
        StorageType::F32 => guildhall_tensor::Dtype::F32,
        StorageType::Bf16 => guildhall_tensor::Dtype::Bf16,
    };
    let (dtype, gradients) = (stored(config.train.dtype), stored(config.train.gradient_dtype));
    Sizes {
        model: config.model.clone(),
        moe: config.moe.clone(),
        lora: config.lora.clone(),
        dtype,
        gradients,
        seed: config.train.seed,
        frozen: config.frozen(),
    }
}

fn learning_rate(train: &Training) -> LearningRate {
    let decay = match train.schedule {
        LrSchedule::Constant => Decay::Constant,
        LrSchedule::Linear => Decay::Linear,
        LrSchedule::Cosine => Decay::Cosine,
        LrSchedule::InverseSqrt => Decay::InverseSqrt,
    };
    LearningRate { peak: train.lr, decay, warmup_steps: train.warmup_steps, steps: train.steps, end: train.lr_end }
}

fn offload(memory: &memory::Config) -> OffloadTarget {
    match memory.offload {
        memory::Offload::None => OffloadTarget::None,
        memory::Offload::Host => OffloadTarget::Host,
        memory::Offload::File => OffloadTarget::File(memory.offload_dir.clone().expect("derived from run.dir")),
    }
}

/// The mesh of `config` as this rank sees it; what measures it is not counted as traffic. Collective.
///
/// # Errors
/// What the split into groups reports.
pub fn mesh(rank: &Rank, config: &Config) -> Result<Mesh, CommError> {
    let (parallel, zero) = (&config.parallel, Zero::ALL[config.parallel.zero]);
    let mesh = Mesh::of_degrees(rank.world.clone(), parallel.shape(), parallel.expert.clone())?;
    let mut mesh = mesh.with_sequence(parallel.sequence).with_zero(zero).with_exchange(parallel.exchange);
    if let Some(owners) = &config.parallel.expert_table {
        mesh = mesh.with_owners(owners);
    }
    let mut mesh = mesh.on_nodes(rank.nodes.clone());
    mesh = match parallel.all_to_all {
        AllToAll::Direct => mesh,
        AllToAll::TwoLevel => mesh.with_way(NodeWay::TwoLevel)?,
        AllToAll::TwoD => mesh.with_way(NodeWay::TwoD)?,
        AllToAll::Auto => rank.ledger.uncounted(|| mesh.with_fastest_ways(|degree| row_bytes(config, degree)))?,
    };
    let shadows = config.moe.as_ref().is_some_and(|moe| moe.shadowing() == Shadowing::Auto);
    if shadows || config.moe.is_some() && parallel.migrate == Migrate::Auto {
        mesh = rank.ledger.uncounted(|| mesh.measured(&rank.device, sizes(config).dtype))?;
    }
    Ok(mesh)
}

/// Bytes of rows that a rank sends each other of an expert group of `degree`, if all have alike.
fn row_bytes(config: &Config, degree: usize) -> usize {
    let Some(moe) = &config.moe else { return 0 };
    let micro_batch = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
    let tokens = micro_batch * config.model.seq / config.parallel.ranks.max(1);
    tokens * moe.top_k * config.model.d_model * sizes(config).dtype.bytes() / degree.max(1)
}

/// The model of a checkpoint on this rank's place of the mesh, with its weights and nothing that only training needs.
/// Collective.
///
/// # Errors
/// What the split into groups reports; a checkpoint that cannot be read or is of another model.
pub fn trained(rank: &Rank, config: &Config, source: &checkpoint::OpenCheckpoint) -> Result<(Model, Mesh), Error> {
    let (mesh, sizes) = (mesh(rank, config)?, sizes(config));
    source.check_size(count(&sizes).total)?;
    let mut model = Model::new(&rank.device, &sizes, &mesh);
    checkpoint::check_fit(source, &mut model, &mesh)?;
    rank.at_own_pace(|| checkpoint::load_model(source, &mut model))?;
    Ok((model, mesh))
}

/// Gives a new trainer the weights that `train.init` names, if it names any. Collective.
///
/// # Errors
/// Weights that cannot be read or are of another model.
pub fn begin(rank: &Rank, trainer: &mut Trainer, config: &Config) -> Result<(), Error> {
    let Some(init) = &config.train.init else { return Ok(()) };
    begin_with(rank, &init_weights(init, config.train.dtype)?.0, trainer)
}

/// Gives a new trainer the weights of a checkpoint. Adapters begin as they do in any run where the checkpoint has none.
/// Collective.
///
/// # Errors
/// A checkpoint that cannot be read or is of another model.
pub(super) fn begin_with(rank: &Rank, source: &checkpoint::OpenCheckpoint, trainer: &mut Trainer) -> Result<(), Error> {
    let Trainer { model, optimizer, mesh, .. } = trainer;
    let files = source.files(TensorKind::Model)?;
    let has_adapters = files.list().keys().any(|name| lora::is_factor(name));
    let mut without = lora::Unadapted(model);
    let fitting: &mut dyn Parameters = if has_adapters { without.0 } else { &mut without };
    checkpoint::check_fit(source, fitting, mesh)?;
    rank.at_own_pace(|| checkpoint::load_model(source, fitting))?;
    Ok(optimizer.restart(model)?)
}

/// A trainer for `config` on this rank, with initial values. Collective.
///
/// # Errors
/// What the split into groups reports; optimizer state that is to be kept elsewhere and cannot.
pub fn trainer(rank: &Rank, config: &Config) -> Result<Trainer, Error> {
    trainer_on(mesh(rank, config)?, rank, config)
}

/// A trainer for `config` in the groups of `mesh`, with initial values. Collective.
///
/// # Errors
/// Optimizer state that is to be kept elsewhere and cannot.
pub fn trainer_on(mesh: Mesh, rank: &Rank, config: &Config) -> Result<Trainer, Error> {
    let train = &config.train;
    let hyper = Hyper { beta1: train.beta1, beta2: train.beta2, eps: train.eps, weight_decay: train.weight_decay };
    let (rate, bucketing) = (learning_rate(train), config.parallel.bucketing());
    let settings = Settings { hyper, tile: config.memory.tile, offload: offload(&config.memory) };
    let mut trainer = Trainer::new(&rank.device, mesh, &sizes(config), settings, rate, train.clip, bucketing)?;
    trainer.recompute = config.memory.segments();
    trainer.replacing = Replacing::of(config);
    if !config.data.tasks.is_empty() {
        trainer.rows = RowSums::of_steps(config.rows_per_step());
    }
    Ok(trainer)
}

/// This rank's batches of a run that has taken `done` steps.
///
/// # Errors
/// A source without rows.
pub fn loader(config: &Config, mesh: &Mesh, rows: Arc<dyn Source>, done: u64) -> Result<Loader, data::Error> {
    Loader::new(rows, batch_plan(config, mesh), done)
}

/// How the rows of a step are shared out, as this rank sees it.
pub(super) fn batch_plan(config: &Config, mesh: &Mesh) -> BatchPlan {
    BatchPlan {
        seed: config.train.seed,
        rows_per_step: config.rows_per_step(),
        micro_batch: config.train.micro_batch.unwrap_or_else(|| config.rows_per_step()),
        rank: mesh.data.rank(),
        ranks: mesh.data.size(),
    }
}
