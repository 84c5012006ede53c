//! Opening what `moe.record` and `moe.replay` name.

use std::path::Path;

use super::job::{Job, Start};
use crate::config::Config;
use crate::moe::recording::{Error, Recording, Shape};
use crate::moe::{self, Routings};

/// The recordings a run follows and writes; `data` names the text it trains on. Called once, before the ranks begin:
/// they share the files.
///
/// # Errors
/// A recording that cannot be followed or continued, or a file that cannot be written.
pub fn routings(job: &Job, data: &str) -> Result<Routings, Error> {
    let Some(moe) = &job.config.moe else { return Ok(Routings::NONE) };
    let (shape, done) = (recorded_shape(&job.config, moe, data), job.steps_done());
    let open = |path: &Path| Recording::open(path, shape.clone(), done + 1..=job.config.train.steps);
    let replay = moe.replay.as_deref().map(open).transpose()?;
    let write = |path: &Path| {
        if moe.replay.as_deref().is_some_and(|other| is_same(path, other)) {
            return Err(Error::Same(path.to_owned()));
        }
        match job.start {
            Start::Fresh | Start::Weights(_) => Recording::create(path, shape.clone(), 1),
            Start::From(_) => Recording::resume(path, shape.clone(), done),
        }
    };
    let record = moe.record.as_deref().map(write).transpose()?;
    Ok(Routings { replay, record, ..Routings::NONE })
}

/// What recordings of such runs have in common; `data` names the text.
pub fn recorded_shape(config: &Config, moe: &moe::Config, data: &str) -> Shape {
    let layers = (0..config.model.layers).filter(|&layer| moe.layers.contains(layer)).map(|layer| layer as u32);
    Shape {
        experts: moe.experts,
        slots: moe.slots(),
        seq: config.model.seq,
        rows: config.rows_per_step(),
        layers: layers.collect(),
        seed: config.train.seed,
        data: Shape::fingerprint(data),
    }
}

/// Whether both are one file, by whatever names.
fn is_same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
