//! A checkpoint becomes one with fewer experts.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::{Error, SourceModel, gate_norms, largest, largest_of_all, prune};
use crate::config::{self, Config, Loaded};
use crate::moe::{self, GateKind};
use crate::parallel::{Mesh, PerLayer};

/// A checkpoint of which some experts are to stay.
#[derive(Debug)]
pub struct Pruning {
    pub source: SourceModel,
    pub wanted: ExpertsToKeep,
    overrides: Vec<String>,
    ranks: Option<usize>,
}

/// How many experts are to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsToKeep {
    /// Of a layer, or on average over layers.
    pub experts: usize,
    /// Whether it is the average: layers then keep different numbers.
    pub is_global: bool,
}

impl fmt::Display for ExpertsToKeep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--keep {}{}", self.experts, if self.is_global { " --global" } else { "" })
    }
}

impl Pruning {
    /// Opens a checkpoint of which so many experts are to stay, with `overrides` for its recipe and the new one, both for
    /// so many `ranks` instead of their own.
    ///
    /// # Errors
    /// A folder that is no checkpoint, is damaged, or is of a dense model; a number of experts that cannot be.
    pub fn open(
        folder: &Path,
        overrides: &[String],
        ranks: Option<usize>,
        wanted: ExpertsToKeep,
    ) -> Result<Pruning, Error> {
        let source = SourceModel::open(folder, overrides, ranks)?;
        let (moe, ExpertsToKeep { experts: keep, is_global }) = (source.moe()?, wanted);
        let (top_k, experts) = (moe.top_k, moe.experts.clone());
        let layers = moe.of_layers(source.config.model.layers);
        let all: usize = layers.iter().map(|(_, moe)| moe.experts).sum();
        let most = if is_global { all / layers.len() } else { experts.smallest() };
        if !(top_k..=most).contains(&keep) {
            return Err(Error::Keep { keep, top_k, experts, most, is_global });
        }
        if moe.gate.kind() == GateKind::Hash && keep * layers.len() != all {
            return Err(Error::Hashed);
        }
        Ok(Pruning { source, wanted, overrides: overrides.to_vec(), ranks })
    }

    /// The new checkpoint's configuration, of a model with so many experts.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub fn recipe(&self, experts: &PerLayer) -> Result<Loaded, Error> {
        let experts = (experts, &*self.wanted.to_string());
        self.source.recipe(|recipe| config::load_with_experts(recipe, &self.overrides, experts, self.ranks))
    }

    /// The experts that stay in each layer, by a score for each of each layer: those with the largest.
    pub fn kept(&self, scores: &[Vec<f64>]) -> Vec<Vec<usize>> {
        let ExpertsToKeep { experts, is_global } = self.wanted;
        match is_global {
            true => largest_of_all(scores, experts * scores.len(), self.before().top_k),
            false => scores.iter().map(|scores| largest(scores, experts)).collect(),
        }
    }

    /// The section of the experts there were.
    pub fn before(&self) -> &moe::Config {
        self.source.config.moe.as_ref().expect("a model with experts")
    }

    /// For each MoE layer, the norms of its gate's rows. For one rank.
    ///
    /// # Errors
    /// Tensors that do not fit the configuration.
    pub fn gate_norms(&self, device: &Arc<Device>, mesh: &Mesh) -> Result<Vec<Vec<f64>>, Error> {
        Ok(gate_norms(&mut self.source.model(device, mesh)?))
    }

    /// Writes the new checkpoint with its configuration, at step 0 and without an optimizer's state, as `folder`, which must
    /// not exist. For one rank.
    ///
    /// # Errors
    /// Tensors that do not fit the configuration; a folder that exists or cannot be written.
    pub fn write(
        &self,
        device: &Arc<Device>,
        mesh: &Mesh,
        (kept, config): (&[Vec<usize>], &Config),
        folder: &Path,
    ) -> Result<(), Error> {
        let mut model = prune(device, &mut self.source.model(device, mesh)?, kept, mesh);
        self.source.export(folder, &mut model, config, mesh)
    }
}
