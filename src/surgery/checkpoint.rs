//! What surgery reads and writes: a checkpoint with its recipe and tokenizer.

use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::Error;
use crate::checkpoint::{self, Extra, OpenCheckpoint, TrainingProgress};
use crate::config::{self, Config, Loaded, Problems};
use crate::model::{Model, count};
use crate::moe;
use crate::parallel::Mesh;
use crate::train::sizes;

const TOKENIZER: &str = "tokenizer.json";
const RECIPE: &str = "config.toml";

/// A checkpoint that becomes another model, or a part of one.
#[derive(Debug)]
pub struct SourceModel {
    pub source: OpenCheckpoint,
    pub config: Config,
    /// What of the recipe has no effect.
    notices: Vec<String>,
    pub(super) tokenizer: Vec<u8>,
}

impl SourceModel {
    /// Opens a checkpoint, and reads its recipe with `overrides`, for so many `ranks` instead of its own.
    ///
    /// # Errors
    /// A folder that is no checkpoint or is damaged; all that is wrong with the recipe.
    pub fn open(folder: &Path, overrides: &[String], ranks: Option<usize>) -> Result<SourceModel, Error> {
        let source = checkpoint::open(folder)?;
        let loaded = config::load_kept(&source.file(RECIPE)?, overrides, ranks);
        let Loaded { config, notices } =
            loaded.map_err(|problems| Error::Recipe { folder: folder.to_owned(), problems })?;
        if config.lora.is_some() {
            return Err(Error::Adapters { folder: folder.to_owned() });
        }
        let path = source.file(TOKENIZER)?;
        let tokenizer = std::fs::read(&path).map_err(|source| Error::Tokenizer { path, source })?;
        Ok(SourceModel { source, config, notices, tokenizer })
    }

    /// Its recipe as `load` makes another model's of it, with the notices that are new.
    pub(super) fn recipe(&self, load: impl FnOnce(&Path) -> Result<Loaded, Problems>) -> Result<Loaded, Error> {
        let folder = self.source.folder.clone();
        let mut loaded = load(&self.source.file(RECIPE)?).map_err(|problems| Error::Config { folder, problems })?;
        // The weights are in the checkpoint now.
        loaded.config.train.init = None;
        loaded.notices.retain(|notice| !self.notices.contains(notice));
        Ok(loaded)
    }

    /// The section of its experts.
    pub(super) fn moe(&self) -> Result<&moe::Config, Error> {
        let dense = || Error::Dense { folder: self.source.folder.clone() };
        self.config.moe.as_ref().ok_or_else(dense)
    }

    /// The model with its weights. Collective.
    ///
    /// # Errors
    /// Tensors that do not fit the recipe.
    pub(super) fn model(&self, device: &Arc<Device>, mesh: &Mesh) -> Result<Model, Error> {
        let sizes = sizes(&self.config);
        self.source.check_size(count(&sizes).total)?;
        let mut model = Model::new(device, &sizes, mesh);
        checkpoint::check_fit(&self.source, &mut model, mesh)?;
        checkpoint::load_model(&self.source, &mut model)?;
        Ok(model)
    }

    /// Writes what it has become, at step 0 and without an optimizer's state, as `folder`, which must not exist.
    /// Collective.
    ///
    /// # Errors
    /// A folder that exists or cannot be written.
    pub(super) fn export(&self, folder: &Path, model: &mut Model, config: &Config, mesh: &Mesh) -> Result<(), Error> {
        let extra = Extra {
            progress: TrainingProgress { step: 0, tokens: 0, seconds: 0.0, loss_trend: None },
            data_fingerprint: self.source.manifest.data_fingerprint.clone(),
            files: vec![
                (RECIPE.to_owned(), config.to_toml().into_bytes()),
                (TOKENIZER.to_owned(), self.tokenizer.clone()),
            ],
        };
        Ok(checkpoint::export(folder, config.train.checkpoint_file_bytes(), model, mesh, extra)?)
    }
}
