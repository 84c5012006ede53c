//! A dense checkpoint becomes one with experts.

use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::{Error, SourceModel, moefy};
use crate::config::{self, Config};
use crate::model::Sizes;
use crate::parallel::Mesh;
use crate::train::sizes;

/// A dense checkpoint and what it is to become.
#[derive(Debug)]
pub struct Moefy {
    pub dense: SourceModel,
    /// The new checkpoint's: the old one's with a `[moe]` section.
    pub config: Config,
}

impl Moefy {
    /// Opens a checkpoint and puts `moe` (`moe.<key>=<value>` each) over its configuration.
    ///
    /// # Errors
    /// A folder that is no checkpoint, is damaged, or has experts; all that is wrong with the new configuration.
    pub fn open(folder: &Path, moe: &[String]) -> Result<Moefy, Error> {
        let dense = SourceModel::open(folder, &[], None)?;
        if let Some(moe) = &dense.config.moe {
            return Err(Error::AlreadyMoe { experts: moe.experts.clone() });
        }
        let config = dense.recipe(|recipe| config::load_kept(recipe, moe, None))?.config;
        Ok(Moefy { dense, config })
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
        let mut dense = self.dense.model(device, mesh)?;
        let moe = self.config.moe.as_ref().expect("the section was put there");
        let mut model = moefy(device, &mut dense, moe, seed, mesh)?;
        self.dense.export(folder, &mut model, &self.config, mesh)
    }
}
