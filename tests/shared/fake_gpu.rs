//! A machine with GPUs that are not there: libraries that stand for the driver, NVRTC, cuBLAS and NCCL (`tests/fake_cuda/`).

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::{env, fs};

use guildhall_tensor::{Device, find_compiler};
use sha2::{Digest, Sha256};

use crate::program::{Workshop, hexadecimal};

/// What stands for each library, by the name that NVIDIA gives it.
pub(crate) const LIBRARIES: [(&str, &str); 5] = [
    ("libcuda.so.1", "driver.cpp"),
    ("libnvrtc.so.13", "nvrtc.cpp"),
    ("libcublas.so.13", "cublas.cpp"),
    ("libcublasLt.so.13", "cublaslt.cpp"),
    ("libnccl.so.2", "nccl.cpp"),
];

const COMPILERS: [&str; 3] = ["c++", "g++", "clang++"];

fn runs(compiler: &&str) -> bool {
    Command::new(compiler).arg("--version").output().is_ok_and(|said| said.status.success())
}

/// The folder with all of them.
pub(crate) static FAKE: LazyLock<PathBuf> = LazyLock::new(make_libraries);

/// Compiled anew where their sources are others.
fn make_libraries() -> PathBuf {
    // With the kernels, which the compiler's substitute finds where the simulated device keeps them.
    Device::simulated(1).unwrap_or_else(|error| panic!("{error}"));
    let compiler = find_compiler().unwrap_or_else(|error| panic!("{error}"));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_cuda");
    let mut hasher = Sha256::new_with_prefix(&compiler.version);
    let files = LIBRARIES.iter().map(|(_, source)| *source).chain(["fake_cuda.h", "fake_blas.h"]);
    files.for_each(|file| hasher.update(fs::read(sources.join(file)).unwrap()));
    let name = format!("fake_cuda-{}", &hexadecimal(&hasher.finalize())[..16]);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        return folder;
    }
    // Another program may be making them, too.
    let draft = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (library, source) in LIBRARIES {
        let options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"];
        let mut command = Command::new(COMPILERS.into_iter().find(runs).expect("one of them compiled the kernels"));
        command.args(options).arg("-Wl,-z,nodelete").arg(sources.join(source)).arg("-ldl");
        let made = command.arg("-o").arg(draft.path().join(library)).output().unwrap();
        assert!(made.status.success(), "{source}: {}", String::from_utf8_lossy(&made.stderr));
    }
    let _ = fs::rename(draft.path(), &folder);
    folder
}

/// What is set on such a machine.
pub(crate) fn machine(shop: &Workshop, libraries: &Path, settings: &[(&str, &str)]) -> Vec<(String, OsString)> {
    let kept = env::home_dir().unwrap().join(".cache/guildhall");
    let settings = settings.iter().map(|(name, value)| (format!("FAKE_CUDA_{name}"), OsString::from(value)));
    // What is kept for this GPU is of use to nobody else.
    let home = [("HOME".to_owned(), home(shop, &kept).into()), ("FAKE_CUDA_KERNELS".to_owned(), kept.into())];
    settings.chain(home).chain([("LD_LIBRARY_PATH".to_owned(), libraries.into())]).collect()
}

/// The same, for a shell.
pub(crate) fn exported(shop: &Workshop, settings: &[(&str, &str)]) -> String {
    let set = machine(shop, &FAKE, settings).into_iter();
    set.map(|(name, value)| format!("export {name}='{}'; ", value.display())).collect()
}

/// A home with the kernels of the simulated device, so that nobody makes them again.
fn home(shop: &Workshop, kept: &Path) -> PathBuf {
    let (home, cache) = (shop.path("home"), shop.path("home/.cache/guildhall"));
    if !cache.exists() {
        fs::create_dir_all(&cache).unwrap();
        let folders = fs::read_dir(kept).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        folders.for_each(|folder| symlink(&folder, cache.join(folder.file_name().unwrap())).unwrap());
    }
    home
}
