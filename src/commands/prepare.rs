//! `guildhall prepare`: text becomes token shards.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::{Failure, print, say};
use crate::cli::Prepare;
use crate::config::{self, Config};
use crate::data::{self, Corpus, Progress, Split};

pub(super) fn run(arguments: Prepare) -> Result<(), Failure> {
    let loaded = config::load(&arguments.recipe, &arguments.overrides.set, None).map_err(Failure::request)?;
    loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    let corpus = prepare(&loaded.config)?;
    print(&format!("{}\n", corpus.dir.display()))
}

/// The recipe's corpus, prepared if it was not.
pub(super) fn prepare(config: &Config) -> Result<Corpus, Failure> {
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
    .map_err(Failure::request)?;
    let verb = if said.get().0.is_some() { "prepared" } else { "found" };
    let tokens = |split| corpus.split(split).tokens();
    say(&format!(
        "data     {verb} in {:.1} s: {} training tokens, {} held out, vocabulary {}",
        started.elapsed().as_secs_f64(),
        tokens(Split::Train),
        tokens(Split::HeldOut),
        corpus.vocab(),
    ));
    Ok(corpus)
}

fn describe(progress: &Progress) -> String {
    let share = |done: u64, all: u64| match 100 * done / all.max(1) {
        0 => String::new(),
        percent => format!(": {percent}%"),
    };
    match *progress {
        Progress::Waiting => "data     another process prepares the same corpus: waiting".to_owned(),
        Progress::Surveying { files_done, files } => {
            format!("data     reading {files} file(s){}", share(files_done as u64, files as u64))
        }
        Progress::TrainingTokenizer { sample_bytes } => {
            format!("data     training a tokenizer on {:.2} MB of text", sample_bytes as f64 / 1e6)
        }
        Progress::Tokenizing { bytes_done, bytes } => {
            format!("data     tokenizing {:.2} MB{}", bytes as f64 / 1e6, share(bytes_done, bytes))
        }
    }
}
