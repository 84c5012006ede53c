//! Kernels as libraries of the host, made by the C++ compiler that is there.
//!
//! A folder of the user's cache, named by a hash of the sources, the compiler and its options, keeps them: a program compiles
//! what no program compiled before it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use libloading::Library;

use super::error::EngineError;
use super::sources::{HEADERS, KernelSource};
use crate::cache::cache_folder;

const COMPILERS: [&str; 3] = ["c++", "g++", "clang++"];

/// Products and sums are not fused unless a kernel says so: the CPU's are not, either.
const OPTIONS: [&str; 8] = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-x", "c++"];

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
    let folder = cache.join(format!("kernels-{:016x}", fingerprint(maker, sources)));
    let failed = |source| EngineError::Folder { path: cache.clone(), source };
    fs::create_dir_all(&cache).map_err(failed)?;
    // Ranks and programs that start together need the same: one makes it, the others wait.
    let lock = File::create(cache.join("lock")).map_err(failed)?;
    lock.lock().map_err(failed)?;
    if !folder.exists() {
        let draft = folder.with_extension("draft");
        write_sources(&draft, sources).map_err(failed)?;
        make(&draft)?;
        fs::rename(&draft, &folder).map_err(failed)?;
    }
    Ok(folder)
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
