//! `guildhall evaluate`: a checkpoint's loss on the held-out split.

use std::sync::Arc;

use super::prepare::{found, prepare, rows};
use super::trained::Trained;
use super::{CommandFailure, print};
use crate::cli::EvaluateArgs;
use crate::data::{Source, Split};
use crate::train::{Error, held_out_loss};

pub(super) fn run(arguments: EvaluateArgs) -> Result<(), CommandFailure> {
    if arguments.rows == Some(0) {
        return Err(CommandFailure::Request(anyhow::anyhow!("--rows 0: there is no loss without text; use 1 or more")));
    }
    let trained = Trained::open(&arguments.checkpoint, &arguments.overrides.set, arguments.ranks)?;
    let (config, leads) = (&trained.config, trained.process.leads());
    let held_out = held_out(&trained, !arguments.overrides.set.is_empty())?;
    let count = arguments.rows.unwrap_or(held_out.len()).min(held_out.len());
    let micro = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
    let loss =
        trained.run(|model, mesh, rank| held_out_loss(model, &rank.device, mesh, held_out.as_ref(), (count, micro)))?;
    if !loss.is_finite() {
        return Err(CommandFailure::run(Error::Loss));
    }
    let figures = serde_json::json!({
        "step": trained.source.manifest.progress.step,
        "eval_loss": loss,
        "perplexity": loss.exp(),
        "rows": count,
    });
    if leads { print(&format!("{figures}\n")) } else { Ok(()) }
}

/// The held-out rows of a checkpoint's recipe. If nothing of it is overridden, sources that have changed are announced.
pub(super) fn held_out(trained: &Trained, is_overridden: bool) -> Result<Arc<dyn Source>, CommandFailure> {
    let (config, leads) = (&trained.config, trained.process.leads());
    let corpus = trained.process.agree(|| if leads { prepare(config) } else { found(config) })?;
    let has_changed = corpus.split(Split::Train).content() != trained.source.manifest.data_fingerprint;
    if has_changed && !is_overridden && leads {
        super::say("note: the recipe's sources have changed since training; this is their held-out part as it is now");
    }
    rows(&corpus, Split::HeldOut, config)
}
