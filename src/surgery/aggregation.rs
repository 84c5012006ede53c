//! Checkpoints with experts become one with the experts of all.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use guildhall_tensor::Device;

use super::{Error, GateFactors, SourceModel, aggregate};
use crate::config::{self, Loaded};
use crate::model::Model;
use crate::moe::{self, GateKind};
use crate::parallel::{Mesh, PerLayer};

/// Checkpoints and what they are to become.
#[derive(Debug)]
pub struct Aggregation {
    /// Two or more.
    pub models: Vec<SourceModel>,
    /// The new checkpoint's configuration: the first one's with the experts of all.
    pub loaded: Loaded,
}

impl Aggregation {
    /// Opens checkpoints, with `overrides` for the recipes of all and of the new model.
    ///
    /// # Errors
    /// A folder that is no checkpoint, is damaged, or is of a dense model; all that makes them different models; all that
    /// is wrong with the new configuration.
    pub fn open(folders: &[PathBuf], overrides: &[String]) -> Result<Aggregation, Error> {
        let opened = folders.iter().map(|folder| SourceModel::open(folder, overrides, None));
        let models = opened.collect::<Result<Vec<SourceModel>, Error>>()?;
        let sections = models.iter().map(SourceModel::moe).collect::<Result<Vec<&moe::Config>, Error>>()?;
        let counts: Vec<PerLayer> = sections.iter().map(|moe| moe.experts.clone()).collect();
        let (first, others) = models.split_first().expect("a checkpoint");
        let differences: Vec<String> = others.iter().flat_map(|other| differences(first, other)).collect();
        if !differences.is_empty() {
            return Err(Error::Unlike { first: first.source.folder.clone(), differences });
        }
        let flag = counts.iter().map(PerLayer::to_string).collect::<Vec<_>>().join(" + ");
        let all = counts.into_iter().reduce(|sum, own| sum.with(&own, |a, b| a + b)).expect("a checkpoint");
        let experts = (&all, &*format!("{flag} experts"));
        let loaded = first.recipe(|recipe| config::load_with_experts(recipe, overrides, experts, None))?;
        Ok(Aggregation { models, loaded })
    }

    /// Writes the new checkpoint, at step 0 and without an optimizer's state, as `folder`, which must not exist, and
    /// returns what made the gates of equal size. For one rank.
    ///
    /// # Errors
    /// Tensors that do not fit the configurations; a folder that exists or cannot be written.
    pub fn write(&self, device: &Arc<Device>, mesh: &Mesh, folder: &Path) -> Result<Vec<GateFactors>, Error> {
        let loaded = self.models.iter().map(|model| model.model(device, mesh));
        let mut models = loaded.collect::<Result<Vec<Model>, Error>>()?;
        let config = &self.loaded.config;
        let moe = config.moe.as_ref().expect("all models have experts");
        let (mut model, factors) = aggregate(device, &mut models, moe, mesh);
        self.models[0].export(folder, &mut model, config, mesh)?;
        Ok(factors)
    }
}

/// What makes two checkpoints different models, a line each.
fn differences(first: &SourceModel, other: &SourceModel) -> Vec<String> {
    let name = other.source.folder.display();
    let keys = config::unlike(&other.config, &first.config).into_iter();
    let mut lines: Vec<String> = keys.map(|[key, is, was]| format!("{key} is {is} in {name}, {was} there")).collect();
    if let (Some(moe), Some(was)) = (&other.config.moe, &first.config.moe)
        && moe.gate.kind() == GateKind::Hash
        && moe.experts != was.experts
    {
        let counts = format!("moe.experts is {} in {name}, {} there", moe.experts, was.experts);
        lines.push(format!("{counts}, by which moe.gate = \"hash\" sends tokens"));
    }
    if other.tokenizer != first.tokenizer {
        lines.push(format!("tokenizer.json of {name} is another: the same number means another token"));
    }
    lines
}
