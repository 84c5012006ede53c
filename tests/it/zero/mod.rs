//! ZeRO, tiles and offload: that none changes a bit, that each saves exactly what it promises, that a checkpoint of any is
//! one of all, and what becomes of state that cannot be kept.

mod bytes;
mod equal;
mod places;
mod sizes;
mod tables;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use guildhall::checkpoint::{Destination, Extra, TrainingProgress, load_model, load_optimizer, open, save};
use guildhall::launch::Rank;
use guildhall::optim::{OffloadTarget, Settings};
use guildhall::parallel::{Mesh, Zero};
use guildhall::train::{StepReport, Trainer};
use guildhall_tensor::Recompute;

use crate::tiny::{HYPER, Recipe};
use crate::world::{Shape, on_mesh};

const STEPS: u64 = 3;

/// How a run keeps what belongs to its weights.
#[derive(Clone, Debug)]
pub(crate) struct Keeping {
    pub(crate) zero: Zero,
    pub(crate) tile: Option<usize>,
    pub(crate) offload: OffloadTarget,
}

pub(crate) fn keeping(zero: Zero) -> Keeping {
    Keeping { zero, tile: None, offload: OffloadTarget::None }
}

impl Keeping {
    pub(crate) fn trainer(&self, recipe: &Recipe, rank: &Rank, mesh: &Mesh) -> Trainer {
        let settings = Settings { hyper: HYPER, tile: self.tile, offload: self.offload.clone() };
        recipe.trainer_with(rank, &mesh.clone().with_zero(self.zero), settings).unwrap()
    }
}

/// How a model is cut, and what of it runs twice.
#[derive(Clone, Debug)]
struct Cut {
    shape: Shape,
    sequence: bool,
    recompute: Recompute,
}

impl From<Shape> for Cut {
    /// Tokens whole, nothing twice.
    fn from(shape: Shape) -> Cut {
        Cut { shape, sequence: false, recompute: Recompute::of(Vec::new(), true) }
    }
}

pub(crate) type Files = BTreeMap<String, Vec<u8>>;

fn extra(step: u64) -> Extra {
    let progress = TrainingProgress { step, tokens: 40 * step, seconds: 1.5, loss_trend: None };
    Extra { progress, data_fingerprint: "rows".to_owned(), files: Vec::new() }
}

fn write(run: &Path, trainer: &mut Trainer, step: u64) -> PathBuf {
    let Trainer { model, optimizer, mesh, .. } = trainer;
    save(Destination::of(run), model, optimizer, mesh, extra(step)).unwrap()
}

fn read(folder: &Path, trainer: &mut Trainer) {
    let source = open(folder).unwrap();
    load_model(&source, &mut trainer.model).unwrap();
    load_optimizer(&source, &mut trainer.model, &mut trainer.optimizer).unwrap();
}

pub(crate) fn contents(folder: &Path) -> Files {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    files.map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap())).collect()
}

/// What a run reports, and the files of all its weights and state after it.
fn trained(recipe: &Recipe, cut: impl Into<Cut>, keeping: &Keeping) -> (Vec<StepReport>, Files) {
    let (run, cut) = (tempfile::tempdir().unwrap(), cut.into());
    let ranks = on_mesh(cut.shape, |rank, mesh| {
        let mut trainer = keeping.trainer(recipe, rank, &mesh.clone().with_sequence(cut.sequence));
        trainer.recompute = cut.recompute.clone();
        let reports = recipe.train(&mut trainer, 1..=STEPS);
        (reports, write(run.path(), &mut trainer, STEPS))
    });
    assert!(ranks.iter().all(|rank| rank.0 == ranks[0].0), "{cut:?}, {keeping:?}: ranks report differently");
    (ranks[0].0.clone(), contents(&ranks[0].1))
}

/// Every stage on the device, and places and tiles in turn.
pub(crate) fn ways(folder: &Path) -> Vec<Keeping> {
    let file = OffloadTarget::File(folder.to_owned());
    let places = [
        (None, OffloadTarget::None),
        (Some(7), OffloadTarget::None),
        (Some(64), OffloadTarget::Host),
        (None, OffloadTarget::Host),
        (Some(50), file.clone()),
        (None, file),
    ];
    let of = |zero| places.iter().map(move |(tile, offload)| Keeping { zero, tile: *tile, offload: offload.clone() });
    Zero::ALL.into_iter().flat_map(of).collect()
}
