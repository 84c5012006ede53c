//! Making a prepared corpus, or finding the one made before.
//!
//! A corpus lies in `<cache>/<fingerprint>/`. The fingerprint covers everything that could change its tokens:
//! this program's format, the `[data]` section, the vocabulary, the contents of a given tokenizer, and for
//! every file its path, size and time of change. Contents are not hashed for it, so that a second run starts
//! at once even with a hundred thousand files; a file changed without changing size or time goes unnoticed.
//!
//! The folder is written under another name and renamed when it is complete and on disk, so a folder with
//! the right name is whole. A lock makes a second process wait for the first instead of doing the same work;
//! where the file system has no locks both do it and the first to finish wins.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::config::{Config, SourceSpec};
use super::corpus::Corpus;
use super::error::Error;
use super::manifest::{FORMAT, Manifest, SourceEntry, TOKENIZER, sha256, write_durably};
use super::shards::WriterShape;
use super::sources::{self, Listing, expand};
use super::splits::HeldOut;
use super::survey::{Bounds, Survey, survey};
use super::tokenize::{Task, Written};
use super::tokenizer::Tokenizer;

/// What is being done, for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Another process prepares the same corpus.
    Waiting,
    /// Reading every file once.
    Surveying { files_done: usize, files: usize },
    /// Training a tokenizer on a sample of this size.
    TrainingTokenizer { sample_bytes: u64 },
    /// Turning text into tokens.
    Tokenizing { bytes_done: u64, bytes: u64 },
}

/// The sizes of pieces in which work is done; they bound memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Longest stretch of text tokenised at once.
    pub(super) part_bytes: usize,
    /// Text tokenised between two writes, by all threads together.
    pub(super) chunk_bytes: usize,
    /// Text a tokenizer is trained on.
    pub(super) sample_bytes: usize,
    pub(super) shard_tokens: u64,
}

const LIMITS: Limits =
    Limits { part_bytes: 1 << 18, chunk_bytes: 1 << 24, sample_bytes: 1 << 23, shard_tokens: 1 << 26 };

/// Opens the corpus that `config` describes, making it first where it does not exist yet. `vocab` is
/// `model.vocab`.
///
/// # Errors
/// An invalid configuration, unreadable sources, a tokenizer that does not fit, or no room on disk. Nothing
/// half-made is left under the corpus's name.
pub fn prepare(config: &Config, vocab: usize, progress: &dyn Fn(Progress)) -> Result<Corpus, Error> {
    prepare_within(config, vocab, LIMITS, progress)
}

pub(super) fn prepare_within(
    config: &Config,
    vocab: usize,
    limits: Limits,
    progress: &dyn Fn(Progress),
) -> Result<Corpus, Error> {
    let problems = config.problems();
    if !problems.is_empty() {
        return Err(Error::Config(problems));
    }
    let job = Job::new(config, vocab, limits)?;
    if job.dir().is_dir() {
        return Corpus::open(&job.dir());
    }
    fs::create_dir_all(&job.cache).map_err(Error::io("create the folder", &job.cache))?;
    let lock = lock(&job.cache.join(format!(".{}.lock", job.fingerprint)), progress)?;
    if !job.dir().is_dir() {
        if lock.is_some() {
            job.remove_partial()?;
        }
        job.make(progress)?;
    }
    Corpus::open(&job.dir())
}

/// Waits until no other process holds the lock; `None` where the file system has no locks.
fn lock(path: &Path, progress: &dyn Fn(Progress)) -> Result<Option<File>, Error> {
    let file = File::create(path).map_err(Error::io("create", path))?;
    let locked = match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            progress(Progress::Waiting);
            file.lock()
        }
        Err(TryLockError::Error(error)) => Err(error),
    };
    Ok(locked.is_ok().then_some(file))
}

/// Everything decided before any text is read.
struct Job<'a> {
    config: &'a Config,
    vocab: usize,
    limits: Limits,
    cache: PathBuf,
    listing: Listing,
    /// Absent where one is to be trained.
    tokenizer: Option<Tokenizer>,
    fingerprint: String,
}

impl<'a> Job<'a> {
    fn new(config: &'a Config, vocab: usize, limits: Limits) -> Result<Self, Error> {
        let cache = expand(&config.cache.to_string_lossy())?;
        let (tokenizer, tokenizer_key) = given_tokenizer(config, vocab)?;
        let listing = sources::list(&config.sources, &cache)?;
        let fingerprint = fingerprint(config, limits, tokenizer_key, &listing)?;
        Ok(Self { config, vocab, limits, cache, listing, tokenizer, fingerprint })
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

    fn make(&self, progress: &dyn Fn(Progress)) -> Result<(), Error> {
        let survey = self.survey(progress)?;
        let tokenizer = self.tokenizer(&survey, progress)?;
        let partial = Partial::create(&self.cache, &self.partial_prefix())?;
        self.write(&partial.dir, &survey, &tokenizer, progress)?;
        partial.publish(&self.dir())
    }

    fn survey(&self, progress: &dyn Fn(Progress)) -> Result<Survey, Error> {
        let bounds = Bounds {
            part_bytes: self.limits.part_bytes,
            sample_bytes: if self.tokenizer.is_none() { self.limits.sample_bytes } else { 0 },
            max_bytes: self.config.max_bytes,
        };
        let files = self.listing.files.len();
        survey(&self.listing, bounds, &|files_done| progress(Progress::Surveying { files_done, files }))
    }

    fn tokenizer(&self, survey: &Survey, progress: &dyn Fn(Progress)) -> Result<Tokenizer, Error> {
        if let Some(tokenizer) = &self.tokenizer {
            return Ok(tokenizer.clone());
        }
        let sample_bytes = survey.sample.iter().map(|text| text.len() as u64).sum();
        progress(Progress::TrainingTokenizer { sample_bytes });
        Tokenizer::train(&survey.sample, self.vocab, self.config.end_of_text.as_deref())
    }

    /// Fills a folder; the manifest comes last.
    fn write(
        &self,
        dir: &Path,
        survey: &Survey,
        tokenizer: &Tokenizer,
        progress: &dyn Fn(Progress),
    ) -> Result<(), Error> {
        let json = tokenizer.to_json()?;
        write_durably(&dir.join(TOKENIZER), json.as_bytes())?;
        let shape = WriterShape {
            token_bytes: if tokenizer.vocab() <= 1 << 16 { 2 } else { 4 },
            shard_tokens: self.limits.shard_tokens,
            end_of_text: tokenizer.end_of_text(),
        };
        let held_out = HeldOut::choose(self.config.held_out, survey.shape());
        let task = Task { survey, tokenizer, held_out, limits: self.limits };
        let Written { train, held_out } = task.write(dir, shape, progress)?;
        let manifest = Manifest {
            format: FORMAT,
            fingerprint: self.fingerprint.clone(),
            vocab: tokenizer.vocab(),
            end_of_text: tokenizer.end_of_text(),
            end_of_text_name: tokenizer.end_of_text_name(),
            token_bytes: shape.token_bytes,
            shard_tokens: shape.shard_tokens,
            tokenizer_sha256: sha256(json.as_bytes()),
            train,
            held_out,
            sources: summary(&self.config.sources, survey),
            skipped: survey.skipped.clone(),
        };
        manifest.write(dir)
    }
}

/// The tokenizer that `data.tokenizer` names, with what the fingerprint must know of it.
fn given_tokenizer(config: &Config, vocab: usize) -> Result<(Option<Tokenizer>, String), Error> {
    if config.tokenizer == "bpe" {
        return Ok((None, format!("bpe {vocab}")));
    }
    let path = expand(&config.tokenizer)?;
    let json = fs::read(&path).map_err(Error::io("read data.tokenizer", &path))?;
    let tokenizer = Tokenizer::from_json(&json, &path, config.end_of_text.as_deref())?;
    tokenizer.check_fits(&path, vocab)?;
    Ok((Some(tokenizer), format!("json {}", sha256(&json))))
}

/// Everything that could change the tokens. The vocabulary is part of a trained tokenizer's key only: a
/// given one makes the same tokens for every model they fit.
#[derive(Serialize)]
struct Key<'a> {
    format: u32,
    limits: [u64; 3],
    tokenizer: String,
    end_of_text: &'a Option<String>,
    held_out: f64,
    max_bytes: Option<u64>,
    files: Vec<FileKey<'a>>,
}

#[derive(Serialize)]
struct FileKey<'a> {
    path: String,
    relative: &'a str,
    source: usize,
    field: Option<&'a str>,
    named: bool,
    bytes: u64,
    modified_ns: u128,
}

fn fingerprint(config: &Config, limits: Limits, tokenizer: String, listing: &Listing) -> Result<String, Error> {
    let files = listing.files.iter().map(|file| FileKey {
        path: file.path.to_string_lossy().into_owned(),
        relative: &file.relative,
        source: file.source,
        field: file.field_used(),
        named: file.named,
        bytes: file.bytes,
        modified_ns: file.modified_ns,
    });
    let key = Key {
        format: FORMAT,
        limits: [limits.part_bytes as u64, limits.sample_bytes as u64, limits.shard_tokens],
        tokenizer,
        end_of_text: &config.end_of_text,
        held_out: config.held_out,
        max_bytes: config.max_bytes,
        files: files.collect(),
    };
    let json = serde_json::to_vec(&key).map_err(|error| Error::Config(vec![error.to_string()]))?;
    // Half of the hash is beyond any accident and keeps paths readable.
    Ok(sha256(&json)[..32].to_owned())
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

/// A folder being filled, removed again unless it is published.
struct Partial {
    dir: PathBuf,
}

impl Partial {
    fn create(cache: &Path, prefix: &str) -> Result<Self, Error> {
        let mut attempt = 0u64;
        loop {
            let dir = cache.join(format!("{prefix}{}-{attempt}", std::process::id()));
            match fs::create_dir(&dir) {
                Ok(()) => return Ok(Self { dir }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => attempt += 1,
                Err(error) => return Err(Error::io("create the folder", &dir)(error)),
            }
        }
    }

    /// Gives the folder its name. Losing a race against a process that made the same is success.
    fn publish(self, dir: &Path) -> Result<(), Error> {
        sync_folder(&self.dir)?;
        match fs::rename(&self.dir, dir) {
            Err(_) if dir.is_dir() => Ok(()),
            Err(error) => Err(Error::io("give the prepared folder its name", dir)(error)),
            Ok(()) => sync_folder(dir.parent().unwrap_or(dir)),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After publishing there is nothing to remove; failing to clean up must not hide the first error.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A rename is only durable once the folder it happened in is.
fn sync_folder(path: &Path) -> Result<(), Error> {
    let folder = File::open(path).map_err(Error::io("open", path))?;
    folder.sync_all().map_err(Error::io("write", path))
}
