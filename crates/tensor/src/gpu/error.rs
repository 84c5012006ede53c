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
}
