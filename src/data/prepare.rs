//! Making a prepared corpus, or finding the one made before.
//!
//! A corpus lies in `<cache>/<fingerprint>/`; see `fingerprint` for what makes two corpora the same. The folder
//! is written under another name and renamed when it is complete and on disk, so a folder with the right
//! name is whole. A lock makes a second process wait for the first instead of doing the same work; where the
//! file system has no locks both do it and the first to finish wins.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::chat::{ChatEncoder, ChatTemplate};
use super::config::{ChatLoss, Config, SourceSpec};
use super::corpus::Corpus;
use super::error::Error;
use super::expand::expand;
use super::fingerprint::fingerprint;
use super::folder::{Partial, lock};
use super::manifest::{
    ChatEntry, CorpusManifest, FORMAT, SkippedFiles, SourceEntry, SplitEntry, TOKENIZER, sha256, write_durably,
};
use super::shards::WriterShape;
use super::sources::{self, Listing};
use super::splits::HeldOut;
use super::stages::{LIMITS, Limits, PrepareStage};
use super::survey::{Survey, SurveyLimits, survey};
use super::tasks::{TaskSources, TaskTexts};
use super::tokenize::{TokenizeTask, WrittenSplits};
use super::tokenizer::Tokenizer;

/// Opens the corpus that `config` describes, making it first where it does not exist yet. `vocab` is
/// `model.vocab`.
///
/// # Errors
/// An invalid configuration, unreadable sources, a tokenizer that does not fit, or no room on disk. Nothing
/// half-made is left under the corpus's name.
pub fn prepare(config: &Config, vocab: usize, progress: &dyn Fn(PrepareStage)) -> Result<Corpus, Error> {
    prepare_within(config, vocab, LIMITS, progress)
}

/// Whether the corpus that `config` describes has been made.
///
/// # Errors
/// As of [`prepare`] before any text is read.
pub fn is_prepared(config: &Config, vocab: usize) -> Result<bool, Error> {
    Ok(Preparation::new(config, vocab, LIMITS)?.dir().is_dir())
}

pub(super) fn prepare_within(
    config: &Config,
    vocab: usize,
    limits: Limits,
    progress: &dyn Fn(PrepareStage),
) -> Result<Corpus, Error> {
    let problems = config.problems();
    if !problems.is_empty() {
        return Err(Error::Config(problems));
    }
    let mut job = Preparation::new(config, vocab, limits)?;
    if job.dir().is_dir() {
        return Corpus::open(&job.dir());
    }
    fs::create_dir_all(&job.cache).map_err(Error::io("create the folder", &job.cache))?;
    let waiting = || progress(PrepareStage::Waiting);
    let lock = lock(&job.cache.join(format!(".{}.lock", job.fingerprint)), &waiting)?;
    if !job.dir().is_dir() {
        if lock.is_some() {
            job.remove_partial()?;
        }
        job.make(progress)?;
    }
    Corpus::open(&job.dir())
}

/// Everything decided before any text is read.
struct Preparation<'a> {
    config: &'a Config,
    vocab: usize,
    limits: Limits,
    cache: PathBuf,
    listing: Listing,
    /// In place of the listing, if there are tasks.
    tasks: Option<TaskSources<'a>>,
    /// Absent where one is to be trained.
    tokenizer: Option<Tokenizer>,
    /// What writes conversations, if sources hold them.
    chat: Option<ChatTemplate>,
    fingerprint: String,
}

impl<'a> Preparation<'a> {
    fn new(config: &'a Config, vocab: usize, limits: Limits) -> Result<Self, Error> {
        let cache = expand(&config.cache.to_string_lossy())?;
        let (tokenizer, tokenizer_key) = given_tokenizer(config, vocab)?;
        let tasks = match config.tasks.is_empty() {
            true => None,
            false => Some(TaskSources::list(config, &cache)?),
        };
        let listing = sources::list(&config.sources, &cache)?;
        let chat = config.has_conversations().then(|| ChatTemplate::find(config)).transpose()?;
        let fingerprint = fingerprint(config, limits, tokenizer_key, (&listing, chat.as_ref()), tasks.as_ref())?;
        Ok(Self { config, vocab, limits, cache, listing, tasks, tokenizer, chat, fingerprint })
    }

    fn dir(&self) -> PathBuf {
        self.cache.join(&self.fingerprint)
    }

    fn partial_prefix(&self) -> String {
        format!(".{}.partial-", self.fingerprint)
    }

    /// What an interrupted process left; only safe while holding the lock.
    fn remove_partial(&self) -> Result<(), Error> {
        let entries = fs::read_dir(&self.cache).map_err(Error::io("list", &self.cache))?;
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(&self.partial_prefix()) {
                fs::remove_dir_all(entry.path()).map_err(Error::io("remove", &entry.path()))?;
            }
        }
        Ok(())
    }

    fn make(&mut self, progress: &dyn Fn(PrepareStage)) -> Result<(), Error> {
        if let Some(tasks) = self.tasks.take() {
            return self.make_pairs(&tasks, progress);
        }
        let survey = self.survey(progress)?;
        let tokenizer = self.tokenizer(&survey, progress)?;
        let partial = Partial::create(&self.cache, &self.partial_prefix())?;
        let loss = self.config.chat_loss;
        for (name, bytes) in self.chat.iter().flat_map(|template| template.files()) {
            write_durably(&partial.dir.join(name), bytes)?;
        }
        let files = self.chat.iter().flat_map(|template| template.files());
        let files = files.map(|(name, bytes)| (name.clone(), sha256(bytes))).collect();
        let chat = self.chat.take().map(|template| ChatEncoder::new(template, &tokenizer, loss));
        self.write(&partial.dir, &survey, (&tokenizer, chat.as_ref(), files), progress)?;
        partial.publish(&self.dir())
    }

    /// The same of pairs.
    fn make_pairs(&self, sources: &TaskSources, progress: &dyn Fn(PrepareStage)) -> Result<(), Error> {
        progress(PrepareStage::Surveying { files_done: 0, files: sources.files() });
        let texts = TaskTexts::read(self.config, sources)?;
        let tokenizer = match &self.tokenizer {
            Some(tokenizer) => tokenizer.clone(),
            None => {
                let sample = texts.sample(self.vocab.saturating_mul(self.limits.sample_bytes_per_entry));
                let sample_bytes = sample.iter().map(|text| text.len() as u64).sum();
                progress(PrepareStage::TrainingTokenizer { sample_bytes });
                let end_of_text = self.config.end_of_text.as_deref();
                Tokenizer::train_tagged(&sample, self.vocab, end_of_text, &texts.tagged())?
            }
        };
        texts.check(&tokenizer, Path::new(&self.config.tokenizer))?;
        let partial = Partial::create(&self.cache, &self.partial_prefix())?;
        let json = tokenizer.to_json()?;
        write_durably(&partial.dir.join(TOKENIZER), json.as_bytes())?;
        let shape = self.shape(&tokenizer);
        let ([train, held_out], index) = texts.write(&partial.dir, &tokenizer, shape, progress)?;
        let manifest = CorpusManifest { pairs: Some(index), ..self.manifest((&tokenizer, &json), train, held_out) };
        manifest.write(&partial.dir)?;
        partial.publish(&self.dir())
    }

    fn shape(&self, tokenizer: &Tokenizer) -> WriterShape {
        WriterShape {
            token_bytes: if tokenizer.vocab() <= 1 << 16 { 2 } else { 4 },
            shard_tokens: self.limits.shard_tokens,
            end_of_text: tokenizer.end_of_text(),
            marks_given: self.config.has_conversations() && self.config.chat_loss == ChatLoss::Answers,
        }
    }

    /// Without the sources.
    fn manifest(
        &self,
        (tokenizer, json): (&Tokenizer, &str),
        train: SplitEntry,
        held_out: SplitEntry,
    ) -> CorpusManifest {
        CorpusManifest {
            format: FORMAT,
            fingerprint: self.fingerprint.clone(),
            vocab: tokenizer.vocab(),
            end_of_text: tokenizer.end_of_text(),
            end_of_text_name: tokenizer.end_of_text_name(),
            token_bytes: self.shape(tokenizer).token_bytes,
            shard_tokens: self.limits.shard_tokens,
            tokenizer_sha256: sha256(json.as_bytes()),
            train,
            held_out,
            sources: Vec::new(),
            skipped: SkippedFiles::default(),
            pairs: None,
            chat: None,
        }
    }

    fn survey(&self, progress: &dyn Fn(PrepareStage)) -> Result<Survey, Error> {
        let bounds = SurveyLimits {
            part_bytes: self.limits.part_bytes,
            sample_bytes: if self.tokenizer.is_none() {
                self.vocab.saturating_mul(self.limits.sample_bytes_per_entry)
            } else {
                0
            },
            max_bytes: self.config.max_bytes,
        };
        let files = self.listing.files.len();
        survey(&self.listing, bounds, &|files_done| progress(PrepareStage::Surveying { files_done, files }))
    }

    fn tokenizer(&self, survey: &Survey, progress: &dyn Fn(PrepareStage)) -> Result<Tokenizer, Error> {
        if let Some(tokenizer) = &self.tokenizer {
            return Ok(tokenizer.clone());
        }
        let sample_bytes = survey.sample.iter().map(|text| text.len() as u64).sum();
        progress(PrepareStage::TrainingTokenizer { sample_bytes });
        Tokenizer::train(&survey.sample, self.vocab, self.config.end_of_text.as_deref())
    }

    /// Fills a folder; the manifest comes last.
    fn write(
        &self,
        dir: &Path,
        survey: &Survey,
        (tokenizer, chat, files): (&Tokenizer, Option<&ChatEncoder>, BTreeMap<String, String>),
        progress: &dyn Fn(PrepareStage),
    ) -> Result<(), Error> {
        let json = tokenizer.to_json()?;
        write_durably(&dir.join(TOKENIZER), json.as_bytes())?;
        let shape = self.shape(tokenizer);
        let mut corpus = survey.shape();
        if chat.is_some() {
            // Nobody's half of a conversation is held out.
            corpus.longest_bytes = 0;
        }
        let held_out = match self.config.names_held_out() {
            true => HeldOut::Named,
            false => HeldOut::choose(self.config.held_out, corpus),
        };
        let task = TokenizeTask { survey, tokenizer, chat, held_out, limits: self.limits };
        let WrittenSplits { train, held_out, chat } = task.write(dir, shape, progress)?;
        let manifest = CorpusManifest {
            sources: summary(&self.config.sources, survey),
            skipped: survey.skipped.clone(),
            chat: chat.map(|chat| ChatEntry { files, ..chat }),
            ..self.manifest((tokenizer, &json), train, held_out)
        };
        manifest.write(dir)
    }
}

/// The tokenizer that `data.tokenizer` names, with what the fingerprint must know of it.
fn given_tokenizer(config: &Config, vocab: usize) -> Result<(Option<Tokenizer>, String), Error> {
    if config.trains_tokenizer() {
        return Ok((None, format!("bpe {vocab}")));
    }
    let path = expand(&config.tokenizer)?;
    let json = fs::read(&path).map_err(Error::io("read data.tokenizer", &path))?;
    let tokenizer = Tokenizer::from_json(&json, &path, config.end_of_text.as_deref())?;
    tokenizer.check_fits(&path, vocab)?;
    Ok((Some(tokenizer), format!("json {}", sha256(&json))))
}

fn summary(specs: &[SourceSpec], survey: &Survey) -> Vec<SourceEntry> {
    let entry = |(index, spec): (usize, &SourceSpec)| {
        let of_source = || survey.files.iter().filter(move |file| file.file.source == index);
        SourceEntry {
            source: spec.path().to_owned(),
            files: of_source().count() as u64,
            documents: of_source().map(|file| file.documents).sum(),
            text_bytes: of_source().map(|file| file.bytes).sum(),
        }
    };
    specs.iter().enumerate().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::splits::Split;

    const SMALL: Limits = Limits { part_bytes: 64, chunk_bytes: 256, sample_bytes_per_entry: 16, shard_tokens: 100 };

    fn text(words: usize) -> String {
        (0..words).map(|word| format!("word{} ", word % 17)).collect()
    }

    fn config(folder: &Path, rest: &str) -> Config {
        let text = format!("sources = ['{0}/text']\ncache = '{0}/cache'\n{rest}", folder.display());
        toml::from_str(&text).unwrap()
    }

    fn decoded(corpus: &Corpus, split: Split) -> Vec<String> {
        let reader = corpus.split(split);
        let starts = std::iter::once(0).chain(reader.ends().iter().copied());
        let decode = |(start, &end): (u64, &u64)| {
            let tokens = reader.read(start..end).unwrap();
            let (last, tokens) = tokens.split_last().unwrap();
            assert_eq!(*last, corpus.tokenizer.end_of_text());
            corpus.tokenizer.decode(tokens).unwrap()
        };
        starts.zip(reader.ends()).map(decode).collect()
    }

    #[test]
    fn parts_chunks_and_shards_leave_the_text_whole() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("text")).unwrap();
        let texts: Vec<String> = (0..9).map(|count| text(20 * count + 1)).collect();
        for (index, text) in texts.iter().enumerate() {
            fs::write(folder.path().join(format!("text/{index}.txt")), text).unwrap();
        }
        let config = config(folder.path(), "held_out = 0");
        let corpus = prepare_within(&config, 300, SMALL, &|_| {}).unwrap();
        assert_eq!(decoded(&corpus, Split::Train), texts);
        assert!(corpus.manifest.train.shards.len() > 5, "{:?}", corpus.manifest.train);
        assert!(corpus.manifest.train.shards[..5].iter().all(|shard| shard.tokens == 100));
        let whole = prepare_within(&config, 300, Limits { chunk_bytes: 1 << 20, ..SMALL }, &|_| {}).unwrap();
        assert_eq!(whole.manifest, corpus.manifest, "the chunk is no part of the result");
    }

    /// The pieces a document is tokenised in must not show in its tokens.
    #[test]
    fn parts_do_not_change_the_tokens() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("text")).unwrap();
        fs::write(folder.path().join("text/a.txt"), text(400)).unwrap();
        let config = config(folder.path(), "held_out = 0");
        let corpus = prepare_within(&config, 300, SMALL, &|_| {}).unwrap();
        let reader = corpus.split(Split::Train);
        let tokens = reader.read(0..reader.tokens() - 1).unwrap();
        assert_eq!(tokens, corpus.tokenizer.encode(&text(400)).unwrap());
    }

    #[test]
    fn the_tail_of_a_dominant_document_is_held_out() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("text")).unwrap();
        let long = format!("{}äöü{}", text(150), text(150));
        fs::write(folder.path().join("text/a.txt"), &long).unwrap();
        fs::write(folder.path().join("text/b.txt"), "short").unwrap();
        for held_out in [0.1, 0.3, 0.497, 0.498, 0.499, 0.5] {
            let config = config(folder.path(), &format!("held_out = {held_out}"));
            let corpus = prepare_within(&config, 300, SMALL, &|_| {}).unwrap();
            let (train, tail) = (decoded(&corpus, Split::Train), decoded(&corpus, Split::HeldOut));
            assert_eq!((train.len(), tail.len()), (2, 1));
            assert_eq!(format!("{}{}", train[0], tail[0]), long);
            let wanted = (held_out * (long.len() + 5) as f64).min(long.len() as f64 / 2.0);
            assert!((tail[0].len() as f64 - wanted).abs() <= 3.0, "{} for {wanted}", tail[0].len());
        }
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("text")).unwrap();
        let path = folder.path().join("text/a.txt");
        for after in [text(10), text(300)] {
            fs::write(&path, text(100)).unwrap();
            let config = config(folder.path(), "");
            let result = prepare_within(&config, 300, SMALL, &|progress| {
                if matches!(progress, PrepareStage::TrainingTokenizer { .. }) {
                    fs::write(&path, &after).unwrap();
                }
            });
            assert!(matches!(result, Err(Error::Changed { .. })), "{result:?}");
        }
    }

    #[test]
    fn what_an_interrupted_process_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("text")).unwrap();
        fs::write(folder.path().join("text/a.txt"), text(100)).unwrap();
        let config = config(folder.path(), "");
        let job = Preparation::new(&config, 300, SMALL).unwrap();
        let left = job.cache.join(format!("{}1-0", job.partial_prefix()));
        fs::create_dir_all(&left).unwrap();
        fs::write(left.join("train-00000.tokens"), "half").unwrap();
        prepare_within(&config, 300, SMALL, &|_| {}).unwrap();
        assert!(!left.exists());
    }
}
