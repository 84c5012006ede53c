//! The same from checkpoint to checkpoint.

use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::{Error, moefy};
use crate::checkpoint::{self, Extra, OpenCheckpoint, TrainingProgress};
use crate::config::{self, Config};
use crate::model::{Model, Sizes, count};
use crate::parallel::Mesh;
use crate::train::sizes;

const TOKENIZER: &str = "tokenizer.json";

/// A dense checkpoint and what it is to become.
#[derive(Debug)]
pub struct Moefy {
    pub source: OpenCheckpoint,
    /// The new checkpoint's: the old one's with a `[moe]` section.
    pub config: Config,
    dense: Sizes,
    tokenizer: Vec<u8>,
}

impl Moefy {
    /// Opens a checkpoint and puts `moe` (`moe.<key>=<value>` each) over its configuration.
    ///
    /// # Errors
    /// A folder that is no checkpoint, is damaged, or has experts; all that is wrong with the new configuration.
    pub fn open(folder: &Path, moe: &[String]) -> Result<Moefy, Error> {
        let source = checkpoint::open(folder)?;
        let load = |overrides: &[String]| {
            let loaded = config::load_kept(&source.file("config.toml")?, overrides, None);
            loaded.map_err(|problems| Error::Config { folder: folder.to_owned(), problems })
        };
        let dense = sizes(&load(&[])?.config);
        if let Some(moe) = &dense.moe {
            return Err(Error::AlreadyMoe { experts: moe.experts });
        }
        let mut config = load(moe)?.config;
        // The weights are in the checkpoint now.
        config.train.init = None;
        let path = source.file(TOKENIZER)?;
        let tokenizer = std::fs::read(&path).map_err(|source| Error::Tokenizer { path, source })?;
        Ok(Moefy { source, config, dense, tokenizer })
    }

    /// What the new model is built from; `seed` draws what is new.
    pub fn sizes(&self, seed: u64) -> Sizes {
        Sizes { seed, ..sizes(&self.config) }
    }

    /// Writes the new checkpoint, at step 0 and without an optimizer's state, as `folder`, which must not exist.
    /// Collective.
    ///
    /// # Errors
    /// Tensors that do not fit the configuration; a folder that exists or cannot be written.
    pub fn write(&self, device: &Arc<Device>, mesh: &Mesh, seed: u64, folder: &Path) -> Result<(), Error> {
        self.source.check_size(count(&self.dense).total)?;
        let mut dense = Model::new(device, &self.dense, mesh);
        checkpoint::check_fit(&self.source, &mut dense, None, mesh)?;
        checkpoint::load_model(&self.source, &mut dense)?;
        let moe = self.config.moe.as_ref().expect("the section was put there");
        let mut model = moefy(device, &mut dense, moe, seed, mesh)?;
        let extra = Extra {
            progress: TrainingProgress { step: 0, tokens: 0, seconds: 0.0, loss_trend: None },
            data_fingerprint: self.source.manifest.data_fingerprint.clone(),
            files: vec![
                ("config.toml".to_owned(), self.config.to_toml().into_bytes()),
                (TOKENIZER.to_owned(), self.tokenizer.clone()),
            ],
        };
        Ok(checkpoint::export(folder, &mut model, mesh, &extra)?)
    }
}
