//! A checkpoint becomes one with fewer experts.

use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::{Error, SourceModel, gate_norms, prune};
use crate::config::{self, Loaded};
use crate::moe::{self, GateKind};
use crate::parallel::Mesh;

/// A checkpoint and what it is to become.
#[derive(Debug)]
pub struct Pruning {
    pub source: SourceModel,
    /// The new checkpoint's configuration.
    pub loaded: Loaded,
}

impl Pruning {
    /// Opens a checkpoint of which `keep` experts a layer are to stay, with `overrides` for its recipe and the new one.
    ///
    /// # Errors
    /// A folder that is no checkpoint, is damaged, or is of a dense model; a number of experts that cannot be; all that
    /// is wrong with the new configuration.
    pub fn open(folder: &Path, overrides: &[String], keep: usize) -> Result<Pruning, Error> {
        let source = SourceModel::open(folder, overrides)?;
        let moe = source.moe()?;
        let (top_k, experts) = (moe.top_k, moe.experts);
        if !(top_k..=experts).contains(&keep) {
            return Err(Error::Keep { keep, top_k, experts });
        }
        if moe.gate.kind() == GateKind::Hash && keep != experts {
            return Err(Error::Hashed);
        }
        let flag = format!("--keep {keep}");
        let loaded = source.recipe(|recipe| config::load_with_experts(recipe, overrides, (keep, &flag)))?;
        Ok(Pruning { source, loaded })
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

    /// Writes the new checkpoint, at step 0 and without an optimizer's state, as `folder`, which must not exist. For one
    /// rank.
    ///
    /// # Errors
    /// Tensors that do not fit the configuration; a folder that exists or cannot be written.
    pub fn write(&self, device: &Arc<Device>, mesh: &Mesh, kept: &[Vec<usize>], folder: &Path) -> Result<(), Error> {
        let mut model = prune(device, &mut self.source.model(device, mesh)?, kept, mesh);
        self.source.export(folder, &mut model, &self.loaded.config, mesh)
    }
}
