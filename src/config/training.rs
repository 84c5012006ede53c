//! The `[train]` and `[run]` sections of a recipe: steps, batch, optimizer, and what is written when.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::model::Role;

/// Storage type of parameters and activations, or of gradients; arithmetic is f32 either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageType {
    F32,
    /// 16 bits. Of parameters, there are f32 masters and moments.
    Bf16,
}

/// Shape of the learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedule {
    Constant,
    Linear,
    Cosine,
    InverseSqrt,
}

/// What of the model is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainedPart {
    /// Everything that `train.freeze` does not name.
    All,
    /// The experts that routers choose among.
    Experts,
    /// The adapters of `[lora]`.
    Lora,
}

/// How long and how to train.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    pub steps: u64,
    #[serde(default)]
    pub seed: u64,
    /// A checkpoint whose weights a new run begins with; absent means initial values by the seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<PathBuf>,
    /// What is trained; absent means adapters if there are any, else everything.
    #[serde(default)]
    pub only: Option<TrainedPart>,
    /// Parts of the model that keep the weights with which training begins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<Role>,
    /// Tokens of one optimizer step over all ranks; a multiple of `model.seq`.
    pub batch_tokens: usize,
    /// Rows of one micro-batch over all ranks; absent means the whole step at once.
    #[serde(default)]
    pub micro_batch: Option<usize>,
    pub lr: f64,
    #[serde(default = "default_schedule")]
    pub schedule: LrSchedule,
    /// Steps of linear warm-up.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Learning rate at the end of `cosine` and `linear`, as a fraction of `lr`.
    #[serde(default = "default_lr_end")]
    pub lr_end: f64,
    #[serde(default = "default_weight_decay")]
    pub weight_decay: f64,
    #[serde(default = "default_beta1")]
    pub beta1: f64,
    #[serde(default = "default_beta2")]
    pub beta2: f64,
    #[serde(default = "default_eps")]
    pub eps: f64,
    /// Largest global gradient norm; 0 means no clipping.
    #[serde(default = "default_clip")]
    pub clip: f64,
    /// Steps between checkpoints; 0 means only at the end.
    #[serde(default)]
    pub checkpoint_every: u64,
    /// Most MiB of a file of a checkpoint's tensors; 0 means one file.
    #[serde(default)]
    pub checkpoint_file_mib: u64,
    /// Training goes on while a checkpoint is written, of a copy of the state.
    #[serde(default)]
    pub checkpoint_async: bool,
    /// Seconds after which a disk that has not answered one operation of a checkpoint's is not waited for any longer.
    #[serde(default = "default_checkpoint_timeout_s")]
    pub checkpoint_timeout_s: u64,
    /// Checkpoints kept, newest first; 0 means all.
    #[serde(default = "default_keep")]
    pub keep: usize,
    /// Steps between comparisons of the weights of which several ranks have copies; 0 means never. They are compared before
    /// each checkpoint too.
    #[serde(default)]
    pub check_replicas_every: u64,
    /// Under a launcher, train with as many ranks as there are processes, whatever the recipe says.
    #[serde(default)]
    pub elastic: bool,
    /// Steps between evaluations on the held-out split; 0 means never.
    #[serde(default)]
    pub eval_every: u64,
    /// Rows of the held-out split used by one evaluation; 0 means all.
    #[serde(default = "default_eval_rows")]
    pub eval_rows: usize,
    #[serde(default = "default_dtype")]
    pub dtype: StorageType,
    /// Storage of the gradients of bf16 parameters; those of f32 parameters are f32.
    #[serde(default = "default_dtype")]
    pub gradient_dtype: StorageType,
}

impl Training {
    /// Most bytes of a file of a checkpoint's tensors.
    pub fn checkpoint_file_bytes(&self) -> u64 {
        if self.checkpoint_file_mib == 0 { u64::MAX } else { self.checkpoint_file_mib << 20 }
    }

    /// Whether steps come after a checkpoint, so that it could be written beside them.
    pub fn writes_beside_steps(&self) -> bool {
        self.checkpoint_every > 0 && self.checkpoint_every < self.steps
    }

    /// Whether checkpoints are written of a copy of the state.
    pub fn copies_state(&self) -> bool {
        self.checkpoint_async && self.writes_beside_steps()
    }
}

/// Where a run leaves its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The run's folder; absent in a recipe means `runs/<recipe's name>`.
    pub dir: PathBuf,
}

fn default_schedule() -> LrSchedule {
    LrSchedule::Cosine
}

fn default_lr_end() -> f64 {
    0.1
}

fn default_weight_decay() -> f64 {
    0.1
}

fn default_beta1() -> f64 {
    0.9
}

fn default_beta2() -> f64 {
    0.95
}

fn default_eps() -> f64 {
    1e-8
}

fn default_clip() -> f64 {
    1.0
}

fn default_checkpoint_timeout_s() -> u64 {
    1800
}

fn default_keep() -> usize {
    3
}

fn default_eval_rows() -> usize {
    64
}

fn default_dtype() -> StorageType {
    StorageType::F32
}
