//! How products are divided on this processor: measured once, by the first run that is long enough, and kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use guildhall_tensor::{Blocking, ProductBlocks, cache_folder, instruction_sets};
use serde::{Deserialize, Serialize};

use super::CommandFailure;
use super::devices::processor_kind;
use crate::launch::Process;
use crate::metrics::write_atomically;
use crate::parallel::Backend;

/// Floating-point operations of a rank from which on measuring is worth it: at least forty times those of a thread that measures.
const WORTH_FLOP: f64 = 5e12;

/// How products are divided, and where that is from.
pub(super) struct FoundBlocking {
    pub(super) blocking: Blocking,
    origin: BlockingOrigin,
}

enum BlockingOrigin {
    /// As the program was built: nothing is kept, and this run is too short to measure, or another process does.
    Untold,
    Kept(PathBuf),
    Measured {
        seconds: f64,
        kept: Result<PathBuf, String>,
    },
}

/// The kernels that were measured: those of other versions, or of a build for tests, have other speeds.
const KERNELS: &str =
    if cfg!(debug_assertions) { concat!(env!("CARGO_PKG_VERSION"), " debug") } else { env!("CARGO_PKG_VERSION") };

/// What was measured, and by how many threads at once.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MeasuredProcessor {
    kernels: String,
    /// Of the kernels, which change between versions, too: what was measured of others is measured anew.
    sources: String,
    processor: String,
    instruction_sets: Vec<String>,
    threads: usize,
}

impl MeasuredProcessor {
    /// The one that the program runs on.
    fn here(threads: usize) -> MeasuredProcessor {
        let instruction_sets = instruction_sets().into_iter().map(str::to_owned).collect();
        let sources = format!("{:016x}", Blocking::kernels_fingerprint());
        MeasuredProcessor {
            kernels: KERNELS.to_owned(),
            sources,
            processor: processor_kind(),
            instruction_sets,
            threads,
        }
    }

    /// A name for each, since homes may be shared by machines of several kinds.
    fn file_name(&self) -> String {
        let MeasuredProcessor { kernels, sources: _, processor, instruction_sets, threads } = self;
        let words = format!("{kernels} {processor} {} x{threads}", instruction_sets.join(" ")).to_ascii_lowercase();
        let words: Vec<&str> =
            words.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
        format!("blocking-{}.json", words.join("-"))
    }
}

/// What a file holds.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptBlocking {
    measured: MeasuredProcessor,
    blocking: Blocking,
}

/// Whether this process may measure.
#[derive(Clone, Copy)]
pub(super) enum Measuring {
    /// If it is worth it for ranks that do so many operations each.
    IfWorth { flop: f64 },
    /// No: others do.
    Never,
}

/// Has the ranks of a process, which do `flop` operations each, divide products as is known to be best. The process that
/// leads measures, if it is worth it; the others, which would disturb it, then find what it has kept, if they share its home.
/// A run that says nothing to a user looks for no files of the user either. Collective over the processes.
pub(super) fn divide_products(
    process: &mut Process,
    backend: Backend,
    flop: f64,
    is_quiet: bool,
) -> Result<Option<FoundBlocking>, CommandFailure> {
    if is_quiet {
        return Ok(None);
    }
    let measuring = if process.leads() { Measuring::IfWorth { flop } } else { Measuring::Never };
    let found = process.agree(|| Ok(here(backend, measuring)))?;
    process.divide(found.as_ref().map(|found| found.blocking).unwrap_or_default());
    Ok(found)
}

/// What is known of this processor, for ranks that are not worth a measurement; as built if nothing is.
pub(super) fn known(backend: Backend) -> Blocking {
    here(backend, Measuring::Never).map(|found| found.blocking).unwrap_or_default()
}

/// What is known of this processor, or worth measuring. Nothing where something else computes, or nothing can be chosen.
pub(super) fn here(backend: Backend, measuring: Measuring) -> Option<FoundBlocking> {
    if backend != Backend::Cpu || !Blocking::is_a_choice() {
        return None;
    }
    // All cores that this process may use are at work, as in a step.
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let measure = || Blocking::measured(threads);
    let is_worth_it = matches!(measuring, Measuring::IfWorth { flop } if flop >= WORTH_FLOP);
    Some(found(cache_folder().as_deref(), MeasuredProcessor::here(threads), is_worth_it, measure))
}

fn found(
    folder: Option<&Path>,
    own: MeasuredProcessor,
    is_worth_it: bool,
    measure: impl FnOnce() -> Blocking,
) -> FoundBlocking {
    let path = folder.map(|folder| folder.join(own.file_name()));
    if let Some((path, kept)) = path.as_ref().and_then(|path| Some((path, read(path, &own)?))) {
        return FoundBlocking { blocking: kept, origin: BlockingOrigin::Kept(path.clone()) };
    }
    if !is_worth_it {
        return FoundBlocking { blocking: Blocking::default(), origin: BlockingOrigin::Untold };
    }
    let begun = Instant::now();
    let blocking = measure();
    let seconds = begun.elapsed().as_secs_f64();
    let kept = match path {
        Some(path) => write(&path, &KeptBlocking { measured: own, blocking }).map(|()| path),
        None => Err("this user has no home folder".to_owned()),
    };
    FoundBlocking { blocking, origin: BlockingOrigin::Measured { seconds, kept } }
}

/// What a file of this processor says; nothing if it is damaged or from a program that chose among other sizes.
fn read(path: &Path, own: &MeasuredProcessor) -> Option<Blocking> {
    let KeptBlocking { measured, blocking } = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    (measured == *own && blocking.is_sound()).then_some(blocking)
}

fn write(path: &Path, kept: &KeptBlocking) -> Result<(), String> {
    let text = serde_json::to_string_pretty(kept).map_err(|error| error.to_string())?;
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    write_atomically(path, format!("{text}\n").as_bytes()).map_err(|error| error.to_string())
}

impl FoundBlocking {
    /// A line for the user.
    pub(super) fn told(&self) -> String {
        let sizes = |ProductBlocks { packed_kib, in_place_kib }: ProductBlocks| match in_place_kib {
            Some(in_place_kib) => format!("{in_place_kib} KiB, {packed_kib} KiB where rows are packed"),
            None => format!("{packed_kib} KiB"),
        };
        let origin = match &self.origin {
            BlockingOrigin::Untold => "as built: a run this short measures nothing".to_owned(),
            BlockingOrigin::Kept(path) => format!("measured on this processor, {}", short(path)),
            BlockingOrigin::Measured { seconds, kept: Ok(path) } => {
                format!("measured in {seconds:.1} s, kept in {}", short(path))
            }
            BlockingOrigin::Measured { seconds, kept: Err(why) } => {
                format!("measured in {seconds:.1} s, not kept: {why}")
            }
        };
        format!("f32 in blocks of {}; bf16 of {} ({origin})", sizes(self.blocking.f32), sizes(self.blocking.bf16))
    }
}

/// The file as a shell understands it.
fn short(path: &Path) -> String {
    let of_home = std::env::home_dir().and_then(|home| Some(path.strip_prefix(home).ok()?.to_owned()));
    of_home.map_or_else(|| path.display().to_string(), |rest| format!("~/{}", rest.display()))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Sizes that are sound, and not those that are built in, if this processor has a choice.
    fn other() -> Option<Blocking> {
        let sizes = [256, 512, 1024].map(|packed_kib| Blocking {
            f32: ProductBlocks { packed_kib, ..Blocking::default().f32 },
            ..Blocking::default()
        });
        sizes.into_iter().find(|sizes| sizes.is_sound() && *sizes != Blocking::default())
    }

    #[test]
    fn a_processor_is_measured_once() {
        let (folder, Some(other)) = (tempfile::tempdir().unwrap(), other()) else { return };
        let (folder, measured) = (folder.path().join("cache"), Cell::new(0));
        let find = |is_worth_it| {
            found(Some(&folder), MeasuredProcessor::here(2), is_worth_it, || {
                measured.set(measured.get() + 1);
                other
            })
        };
        let short = find(false);
        assert_eq!((short.blocking, measured.get()), (Blocking::default(), 0));
        assert!(short.told().contains("as built"), "{}", short.told());
        let first = find(true);
        assert_eq!((first.blocking, measured.get()), (other, 1));
        assert!(first.told().contains("kept in"), "{}", first.told());
        for is_worth_it in [false, true] {
            let kept = find(is_worth_it);
            assert_eq!((kept.blocking, measured.get()), (other, 1));
            assert!(kept.told().contains("measured on this processor"), "{}", kept.told());
        }
        let (others, built_in) = (MeasuredProcessor::here(3), Blocking::default());
        assert_eq!(found(Some(&folder), others, false, || other).blocking, built_in, "of other threads");
        // What is damaged, of another processor or other kernels, or out of all proportion is measured anew.
        let path = fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let damages = [
            text[..text.len() / 2].to_owned(),
            text.replace("\"processor\": \"", "\"processor\": \"another "),
            text.replace("\"sources\": \"", "\"sources\": \"0"),
            text.replace(&format!("\"packed_kib\": {}", other.f32.packed_kib), "\"packed_kib\": 123456789"),
        ];
        for (count, damaged) in damages.into_iter().enumerate() {
            assert_ne!(damaged, text);
            fs::write(&path, damaged).unwrap();
            assert_eq!((find(true).blocking, measured.get()), (other, count + 2));
        }
    }

    #[test]
    fn what_cannot_be_kept_is_used_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (file, Some(other)) = (folder.path().join("file"), other()) else { return };
        fs::write(&file, "").unwrap();
        for (folder, why) in [(Some(file.as_path()), "file"), (None, "no home folder")] {
            let found = found(folder, MeasuredProcessor::here(2), true, || other);
            assert_eq!(found.blocking, other);
            assert!(found.told().contains("not kept: ") && found.told().contains(why), "{}", found.told());
        }
    }
}
