//! `guildhall evaluate`: a checkpoint's loss on the held-out split.

use super::prepare::{found, prepare, rows};
use super::trained::Trained;
use super::{CommandFailure, print};
use crate::cli::EvaluateArgs;
use crate::data::Split;
use crate::train::{Error, held_out_loss};

pub(super) fn run(arguments: EvaluateArgs) -> Result<(), CommandFailure> {
    if arguments.rows == Some(0) {
        return Err(CommandFailure::Request(anyhow::anyhow!("--rows 0: there is no loss without text; use 1 or more")));
    }
    let trained = Trained::open(&arguments.checkpoint, &arguments.overrides.set, arguments.ranks)?;
    let config = &trained.config;
    let leads = trained.process.leads();
    let corpus = trained.process.agree(|| if leads { prepare(config) } else { found(config) })?;
    if corpus.split(Split::Train).content() != trained.source.manifest.data_fingerprint
        && arguments.overrides.set.is_empty()
        && leads
    {
        super::say("note: the recipe's sources have changed since training; this is their held-out part as it is now");
    }
    let held_out = rows(&corpus, Split::HeldOut, config)?;
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
