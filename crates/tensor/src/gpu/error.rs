//! Why there is no engine.

use std::io;
use std::path::PathBuf;

/// What an engine lacks.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("kernels are compiled by a C++ compiler, and none of {tried} runs: install one, or choose another backend")]
    NoCompiler { tried: String },
    #[error("{compiler} does not compile the kernels of {module}:\n{log}")]
    Refused { compiler: String, module: String, log: String },
    #[error("compiled kernels are kept in {path}: {source}")]
    Folder { path: PathBuf, source: io::Error },
    #[error("compiled kernels are kept in the user's home, and nobody says where that is: set HOME")]
    Homeless,
    #[error("{path} has no kernels that can be loaded ({reason}): remove its folder, and it is made anew")]
    Unloadable { path: PathBuf, reason: String },
    /// All that are missing, each with what to do.
    #[error("{missing}")]
    NoLibrary { missing: String },
    #[error(
        "NVIDIA's driver is one for CUDA {}.{}, and the libraries are those of CUDA {}.{}: install a newer driver",
        driver.0, driver.1, libraries.0, libraries.1
    )]
    OldDriver { driver: (i32, i32), libraries: (i32, i32) },
    #[error("this machine has {count} GPUs, and the one numbered {number} is wanted")]
    NoDevice { number: usize, count: usize },
    #[error("{name} has compute capability {major}.{minor}; bf16 needs 8.0 or later")]
    TooOld { name: String, major: i32, minor: i32 },
    #[error("CUDA fails at {what}: {reason}")]
    Cuda { what: &'static str, reason: String },
}
