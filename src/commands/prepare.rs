//! `guildhall prepare`: text becomes token shards.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::found_chats;
use super::found_pairs::{told, too_long};
use super::{CommandFailure, print, say};
use crate::cli::PrepareArgs;
use crate::config::{self, Config};
use crate::data::tasks::{self, PartLabel, TaskPart};
use crate::data::{self, Corpus, Masked, PrepareStage, Source, Split, TaskKind, Tokenizer};
use crate::train::HeldOutPart;

pub(super) fn run(arguments: PrepareArgs) -> Result<(), CommandFailure> {
    let loaded = config::load(&arguments.recipe, &arguments.overrides.set, None).map_err(CommandFailure::request)?;
    loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    let corpus = prepare(&loaded.config)?;
    print(&format!("{}\n", corpus.dir.display()))
}

/// The recipe's corpus, prepared if it was not.
pub(super) fn prepare(config: &Config) -> Result<Corpus, CommandFailure> {
    check_mask(config)?;
    let started = Instant::now();
    let said = Cell::new((None, Instant::now()));
    let corpus = data::prepare(&config.data, config.model.vocab, &|progress| {
        let (kind, at) = said.get();
        let now = std::mem::discriminant(&progress);
        if kind != Some(now) || at.elapsed() > Duration::from_secs(5) {
            said.set((Some(now), Instant::now()));
            say(&describe(&progress));
        }
    })
    .map_err(CommandFailure::request)?;
    let verb = if said.get().0.is_some() { "prepared" } else { "found" };
    let tokens = |split| corpus.split(split).tokens();
    say(&format!(
        "data     {verb} in {:.1} s: {} training tokens, {} held out, vocabulary {}",
        started.elapsed().as_secs_f64(),
        tokens(Split::Train),
        tokens(Split::HeldOut),
        corpus.vocab(),
    ));
    if let Some(pairs) = &corpus.manifest.pairs {
        told(pairs).iter().for_each(|line| say(line));
    }
    found_chats::told(&corpus.manifest).iter().for_each(|line| say(line));
    Ok(corpus)
}

/// The recipe's corpus, which another process of the run has prepared. Where that one keeps its cache elsewhere, it is
/// prepared here, too.
pub(super) fn found(config: &Config) -> Result<Corpus, CommandFailure> {
    data::prepare(&config.data, config.model.vocab, &|_| ()).map_err(CommandFailure::request)
}

/// A given tokenizer that cannot serve is refused before all text is turned into its tokens.
fn check_mask(config: &Config) -> Result<(), CommandFailure> {
    if config.model.is_causal() || !config.data.tasks.is_empty() || config.data.trains_tokenizer() {
        return Ok(());
    }
    let path = data::expand(&config.data.tokenizer).map_err(CommandFailure::request)?;
    let tokenizer = Tokenizer::open(&path, config.data.end_of_text.as_deref()).map_err(CommandFailure::request)?;
    tokenizer.mask().map(|_| ()).map_err(CommandFailure::request)
}

/// Held-out text is masked alike in every run, so that its losses compare.
const HELD_OUT_SEED: u64 = 0;

/// The rows of a split, at least one, with the targets that the recipe's family is trained to predict.
/// `tell` hears of conversations that are longer than a row.
fn rows(
    corpus: &Corpus,
    split: Split,
    config: &Config,
    tell: &dyn Fn(&str),
) -> Result<Arc<dyn Source>, CommandFailure> {
    if corpus.manifest.chat.is_some() {
        let rows = corpus.conversations(split, config.model.seq, 1).map_err(CommandFailure::request)?;
        found_chats::longer(&rows, split).iter().for_each(|line| tell(line));
        return Ok(Arc::new(rows));
    }
    let rows = corpus.rows_at_least(split, config.model.seq, 1).map_err(CommandFailure::request)?;
    let Some(rate) = config.data.mask_rate.filter(|_| !config.model.is_causal()) else {
        return Ok(Arc::new(rows));
    };
    let seed = match split {
        Split::Train => config.train.seed,
        Split::HeldOut => HELD_OUT_SEED,
    };
    Ok(Arc::new(Masked::new(rows, &corpus.tokenizer, rate, seed).map_err(CommandFailure::request)?))
}

/// The parts of a split of a corpus of tasks. `tell` hears of pairs that no row has room for.
fn task_parts(
    corpus: &Corpus,
    split: Split,
    config: &Config,
    seed: u64,
    tell: &dyn Fn(&str),
) -> Result<Vec<TaskPart>, CommandFailure> {
    let (seq, source_seq) = (config.model.seq, config.model.source_seq);
    let lengths = [source_seq.unwrap_or(seq), seq];
    let parts = tasks::parts(corpus, &config.data, split, lengths, seed).map_err(CommandFailure::request)?;
    too_long(&parts, split, lengths).iter().for_each(|line| tell(line));
    Ok(parts)
}

/// The rows to train on, and what their components are; these are none without tasks. `tell` hears what was left out.
pub(super) fn training_rows(
    corpus: &Corpus,
    config: &Config,
    tell: &dyn Fn(&str),
) -> Result<(Arc<dyn Source>, Vec<PartLabel>), CommandFailure> {
    if config.data.tasks.is_empty() {
        return Ok((rows(corpus, Split::Train, config, tell)?, Vec::new()));
    }
    let mut parts = task_parts(corpus, Split::Train, config, config.train.seed, tell)?;
    let mixture = tasks::mixture(&parts, &config.data, config.train.seed).map_err(CommandFailure::request)?;
    parts.retain(|part| !part.rows.is_empty());
    Ok((Arc::new(mixture), parts.into_iter().map(|part| part.label).collect()))
}

/// The parts of the held-out split of a recipe with tasks.
pub(super) fn held_out_tasks(
    corpus: &Corpus,
    config: &Config,
    tell: &dyn Fn(&str),
) -> Result<Vec<TaskPart>, CommandFailure> {
    task_parts(corpus, Split::HeldOut, config, HELD_OUT_SEED, tell)
}

/// What is held out, in parts if there are tasks. Parts without rows are among them, but at least one has some.
pub(super) fn held_out_parts(
    corpus: &Corpus,
    config: &Config,
    tell: &dyn Fn(&str),
) -> Result<Vec<HeldOutPart>, CommandFailure> {
    if config.data.tasks.is_empty() {
        let rows = rows(corpus, Split::HeldOut, config, tell)?;
        return Ok(vec![HeldOutPart { label: None, counts: true, rows }]);
    }
    let parts = held_out_tasks(corpus, config, tell)?;
    if parts.iter().all(|part| part.rows.is_empty()) {
        return Err(CommandFailure::request(data::Error::NothingHeldOut));
    }
    // What a model makes of translation compares with that of one that learned nothing else.
    let translates = |part: &TaskPart| part.kind == TaskKind::Translation && !part.rows.is_empty();
    let any = parts.iter().any(translates);
    let part =
        |part: TaskPart| HeldOutPart { counts: !any || translates(&part), label: Some(part.label), rows: part.rows };
    Ok(parts.into_iter().map(part).collect())
}

fn describe(progress: &PrepareStage) -> String {
    let share = |done: u64, all: u64| match 100 * done / all.max(1) {
        0 => String::new(),
        percent => format!(": {percent}%"),
    };
    match *progress {
        PrepareStage::Waiting => "data     another process prepares the same corpus: waiting".to_owned(),
        PrepareStage::Surveying { files_done, files } => {
            format!("data     reading {files} file(s){}", share(files_done as u64, files as u64))
        }
        PrepareStage::TrainingTokenizer { sample_bytes } => {
            format!("data     training a tokenizer on {:.2} MB of text", sample_bytes as f64 / 1e6)
        }
        PrepareStage::Tokenizing { bytes_done, bytes } => {
            format!("data     tokenizing {:.2} MB{}", bytes as f64 / 1e6, share(bytes_done, bytes))
        }
    }
}
