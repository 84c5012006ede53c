//! `guildhall evaluate`: a checkpoint's loss on the held-out split.

use super::prepare::{found, held_out_parts, prepare};
use super::trained::Trained;
use super::{CommandFailure, kept_scores, print, say, scoring};
use crate::cli::EvaluateArgs;
use crate::config::Config;
use crate::data::{Corpus, Split, Tokenizer, expand, is_prepared};
use crate::metrics::by_language;
use crate::train::{Error, HeldOutLosses, held_out_losses};

pub(super) fn run(arguments: EvaluateArgs) -> Result<(), CommandFailure> {
    if arguments.rows == Some(0) {
        return Err(CommandFailure::Request(anyhow::anyhow!("--rows 0: there is no loss without text; use 1 or more")));
    }
    scoring::check(&arguments)?;
    let trained =
        Trained::open(&arguments.checkpoint, &arguments.backend.with(&arguments.overrides.set), arguments.ranks)?;
    scoring::check_tasks(&arguments, &trained)?;
    scoring::outputs_folder(&arguments, &trained)?;
    let (config, leads) = (&trained.config, trained.process.leads());
    let corpus = corpus(&trained, !arguments.overrides.set.is_empty())?;
    let held_out = held_out_parts(&corpus, config, &say)?;
    let count = arguments.rows.unwrap_or(usize::MAX);
    let micro = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
    let HeldOutLosses { loss, rows, tasks } =
        trained.run(|model, mesh, rank| held_out_losses(model, &rank.device, mesh, &held_out, (count, micro)))?;
    if !loss.is_finite() {
        return Err(CommandFailure::run(Error::Loss));
    }
    let mut figures = serde_json::json!({
        "step": trained.source.manifest.progress.step,
        "eval_loss": loss,
        "perplexity": loss.exp(),
        "rows": rows,
    });
    if !tasks.is_empty() {
        let languages = by_language(&tasks);
        figures["tasks"] = serde_json::to_value(tasks).map_err(CommandFailure::run)?;
        figures["languages"] = serde_json::to_value(languages).map_err(CommandFailure::run)?;
    }
    if scoring::is_asked(&arguments) && leads {
        let scores = scoring::scores(&arguments, &corpus)?;
        for (row, scores) in figures["tasks"].as_array_mut().into_iter().flatten().zip(scores) {
            row.as_object_mut().expect("a record").extend(scores);
        }
    }
    if !leads {
        return Ok(());
    }
    print(&format!("{figures}\n"))?;
    if scoring::is_asked(&arguments) {
        kept_scores::keep(&trained.source.folder, &figures);
    }
    Ok(())
}

/// The corpus of a checkpoint's recipe, in the tokens of the checkpoint's tokenizer. If nothing of it is overridden, sources
/// that have changed are announced.
pub(super) fn corpus(trained: &Trained, is_overridden: bool) -> Result<Corpus, CommandFailure> {
    let leads = trained.process.leads();
    let corpus = trained.process.agree(|| tokenized(trained, leads))?;
    let has_changed = corpus.split(Split::Train).content() != trained.source.manifest.data_fingerprint;
    if has_changed && !is_overridden && leads {
        say("note: the recipe's sources have changed since training; this is their held-out part as it is now");
    }
    Ok(corpus)
}

/// The text as this process finds it: as it was prepared for training, if that gives the tokens of the model. A tokenizer is not
/// trained to find out.
fn tokenized(trained: &Trained, leads: bool) -> Result<Corpus, CommandFailure> {
    let by = |config: &Config| if leads { prepare(config) } else { found(config) };
    let (own, data) = (trained.own_tokenizer()?, &trained.config.data);
    let is_there = match data.trains_tokenizer() {
        true => is_prepared(data, trained.config.model.vocab).map_err(CommandFailure::request)?,
        false => expand(&data.tokenizer).is_ok_and(|path| path.exists()),
    };
    if !is_there {
        return by(&own);
    }
    let corpus = by(&trained.config)?;
    let json = |tokenizer: &Tokenizer| tokenizer.to_json().map_err(CommandFailure::request);
    if json(&corpus.tokenizer)? == json(&trained.tokenizer)? {
        return Ok(corpus);
    }
    if leads {
        say(
            "note: this text makes another tokenizer, whose tokens mean nothing to the model: it is read by the checkpoint's own",
        );
    }
    by(&own)
}
