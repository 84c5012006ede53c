//! Kernels as libraries of the host, made by the C++ compiler that is there.
//!
//! A folder of the user's cache, named by a hash of the sources, the compiler and its options, keeps them: a program compiles
//! what no program compiled before it. Who makes one removes those that nobody has used for a month.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime};

use libloading::Library;

use super::error::EngineError;
use super::sources::{HEADERS, KernelSource};
use crate::cache::cache_folder;

const COMPILERS: [&str; 3] = ["c++", "g++", "clang++"];

/// Products and sums are not fused unless a kernel says so: the CPU's are not, either.
const OPTIONS: [&str; 8] = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-x", "c++"];

/// What the names of folders begin with.
const KERNELS: &str = "kernels-";

/// After so long kernels are taken to be those of a version that nobody runs any more.
const UNUSED_MOST: Duration = Duration::from_secs(30 * 24 * 3600);

/// A compiler that runs.
#[derive(Clone, Debug)]
pub struct Compiler {
    command: &'static str,
    /// What it says that it is, in one line.
    pub version: String,
}

/// The C++ compiler that makes the simulated engine's kernels.
///
/// # Errors
/// If there is none.
pub fn find_compiler() -> Result<Compiler, EngineError> {
    let found = COMPILERS.into_iter().find_map(|command| {
        let said = Command::new(command).arg("--version").stderr(Stdio::null()).output().ok()?;
        let version = String::from_utf8_lossy(&said.stdout).lines().next().unwrap_or(command).to_owned();
        said.status.success().then_some(Compiler { command, version })
    });
    found.ok_or_else(|| EngineError::NoCompiler { tried: COMPILERS.join(", ") })
}

/// A library for each source, by module.
pub(super) fn libraries(sources: &[KernelSource]) -> Result<BTreeMap<&'static str, Library>, EngineError> {
    let compiler = find_compiler()?;
    let maker = (compiler.command, &compiler.version, OPTIONS);
    let folder = kept(maker, sources, |folder| compile(&compiler, folder, sources))?;
    sources.iter().map(|source| Ok((source.module, load(&library(&folder, source))?))).collect()
}

/// The folder with what `make` makes of sources, beside which it has them; made if no program has made it before.
pub(super) fn kept(
    maker: impl Hash,
    sources: &[KernelSource],
    make: impl FnOnce(&Path) -> Result<(), EngineError>,
) -> Result<PathBuf, EngineError> {
    let cache = cache_folder().ok_or(EngineError::Homeless)?;
    let folder = cache.join(format!("{KERNELS}{:016x}", fingerprint(maker, sources)));
    let failed = |source| EngineError::Folder { path: cache.clone(), source };
    fs::create_dir_all(&cache).map_err(failed)?;
    // Ranks and programs that start together need the same: one makes it, the others wait.
    let lock = File::create(cache.join("lock")).map_err(failed)?;
    lock.lock().map_err(failed)?;
    let is_new = !folder.exists();
    if is_new {
        let draft = folder.with_extension("draft");
        write_sources(&draft, sources).map_err(failed)?;
        make(&draft)?;
        fs::rename(&draft, &folder).map_err(failed)?;
    }
    note_use(&folder);
    if is_new {
        remove_unused(&cache, SystemTime::now());
    }
    Ok(folder)
}

/// Where this cannot be noted, kernels count as unused since they were made, and are made again some day.
fn note_use(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.set_modified(SystemTime::now()));
}

/// Removes kernels that were last used long before `now`. They are of no use to anybody, so that one that stays does no harm.
fn remove_unused(cache: &Path, now: SystemTime) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let is_of_kernels = entry.file_name().to_string_lossy().starts_with(KERNELS);
        let used = entry.metadata().and_then(|about| about.modified()).unwrap_or(now);
        if is_of_kernels && now.duration_since(used).is_ok_and(|unused| unused > UNUSED_MOST) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn fingerprint(maker: impl Hash, sources: &[KernelSource]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (maker, HEADERS).hash(&mut hasher);
    sources.iter().for_each(|source| (source.module, &source.text).hash(&mut hasher));
    hasher.finish()
}

pub(super) fn write_sources(folder: &Path, sources: &[KernelSource]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    HEADERS.iter().try_for_each(|(name, text)| fs::write(folder.join(name), text))?;
    sources.iter().try_for_each(|source| fs::write(folder.join(format!("{}.cu", source.module)), &source.text))
}

fn library(folder: &Path, source: &KernelSource) -> PathBuf {
    folder.join(format!("{}.so", source.module))
}

/// As many at a time as there are processors.
fn compile(compiler: &Compiler, folder: &Path, sources: &[KernelSource]) -> Result<(), EngineError> {
    let at_once = thread::available_parallelism().map_or(1, usize::from);
    for sources in sources.chunks(at_once) {
        let begin = |source: &KernelSource| -> io::Result<Child> {
            let mut command = Command::new(compiler.command);
            command.args(OPTIONS).arg(format!("{}.cu", source.module)).arg("-o").arg(library(folder, source));
            command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()
        };
        let running: Vec<(&KernelSource, io::Result<Child>)> = sources.iter().map(|one| (one, begin(one))).collect();
        for (source, child) in running {
            let log = match child.and_then(Child::wait_with_output) {
                Ok(done) if done.status.success() => continue,
                Ok(done) => String::from_utf8_lossy(&done.stderr).into_owned(),
                Err(error) => error.to_string(),
            };
            let (compiler, module) = (compiler.command.to_owned(), source.module.to_owned());
            return Err(EngineError::Refused { compiler, module, log });
        }
    }
    Ok(())
}

fn load(path: &Path) -> Result<Library, EngineError> {
    // SAFETY: the library was made from this program's own sources, which run nothing when they are loaded.
    let library = unsafe { Library::new(path) };
    library.map_err(|error| EngineError::Unloadable { path: path.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_nobody_uses_are_removed() {
        let cache = std::env::temp_dir().join(format!("kernels-cache-{}", std::process::id()));
        let now = SystemTime::now();
        for (name, days) in [("kernels-old", 31), ("kernels-used", 29), ("blocking", 400)] {
            fs::create_dir_all(cache.join(name).join("inside")).unwrap();
            let used = now - Duration::from_secs(days * 24 * 3600);
            File::open(cache.join(name)).unwrap().set_modified(used).unwrap();
        }
        remove_unused(&cache, now);
        let left = ["kernels-old", "kernels-used", "blocking"].map(|name| cache.join(name).exists());
        fs::remove_dir_all(cache).unwrap();
        assert_eq!(left, [false, true, true]);
    }
}
