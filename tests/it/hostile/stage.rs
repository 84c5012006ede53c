//! A run's folder with everything that can be attacked in it, put back as it was after every attack.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::program::{RUN, Workshop, hexadecimal};

/// A debug build needs a tenth of a second for any of the commands.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of address space: no attack may make the program take more.
const MEMORY_KB: u64 = 8 << 20;
/// The seconds of a run differ from run to run; its recipe is this one.
const RECIPE: &str = "train tiny.toml --set train.schedule=constant --set train.eval_every=0";
/// An expert visits the other rank.
const SHADOWS: &str = "--set parallel.ranks=2 --set parallel.expert=2 --set moe.shadowing=force:1";

pub(super) struct Stage {
    pub(super) shop: Workshop,
    kept: tempfile::TempDir,
    /// Of all runs.
    options: &'static str,
}

/// What is asked of the program, and what its answer is told by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Request {
    /// The text.
    Generate,
    /// The loss.
    Evaluate,
    /// The state two steps later.
    Resume,
    /// The state two steps later.
    Init,
    /// The state after three steps along a recording.
    Replay,
    /// The state after two steps.
    Train,
    /// The tokens.
    Prepare(&'static str),
}

/// How the program ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    /// With exit code 1 or 2 and one message.
    Refused(i32, String),
    /// With 0, and this told of it.
    Done(String),
    /// Otherwise.
    Broken(String),
}

impl Stage {
    pub(super) fn new() -> Stage {
        Stage::of("")
    }

    /// With checkpoints of several files.
    pub(super) fn of_several() -> Stage {
        Stage::of("--set train.checkpoint_file_mib=1 --set model.d_model=64 --set moe.d_expert=256")
    }

    fn of(options: &'static str) -> Stage {
        let shop = Workshop::new();
        shop.succeeds(&format!("{RECIPE} {options} {SHADOWS} --set train.steps=4 --set moe.record=routes"));
        let texts: Vec<String> = (0..40).map(|index| shop.read(&format!("corpus/{index:02}.txt"))).collect();
        super::files::write(&shop, &texts);
        let stage = Stage { shop, kept: tempfile::tempdir().unwrap(), options };
        // Prepared once, so that what is prepared can be attacked.
        stage.ask(Request::Train);
        copy(&stage.shop.path("."), stage.kept.path());
        stage
    }

    pub(super) fn checkpoint(&self) -> PathBuf {
        self.shop.checkpoint(RUN, 4)
    }

    /// The files of the checkpoint, by name.
    pub(super) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.checkpoint()).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The folder of the corpus that the recipe trains on.
    pub(super) fn prepared(&self) -> PathBuf {
        let entries = fs::read_dir(self.shop.path("cache")).unwrap().map(|entry| entry.unwrap().path());
        let mut folders: Vec<PathBuf> = entries.filter(|path| path.join("manifest.json").exists()).collect();
        folders.sort();
        folders.swap_remove(0)
    }

    /// Makes everything as it was.
    pub(super) fn restore(&self) {
        for entry in fs::read_dir(self.shop.path(".")).unwrap() {
            let path = entry.unwrap().path();
            let is_folder = path.symlink_metadata().unwrap().is_dir();
            if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }
        copy(self.kept.path(), &self.shop.path("."));
    }

    /// Asks the program, and sees how it ends.
    pub(super) fn ask(&self, request: Request) -> Answer {
        let (folder, options) = ("runs/tiny/checkpoints/step-000004", self.options);
        let recipe = format!("{RECIPE} {options}");
        let command = match request {
            Request::Generate => format!("generate {folder} --prompt the --tokens 40 --temperature 0"),
            Request::Evaluate => format!("evaluate {folder} --rows 4"),
            Request::Resume => format!("{recipe} {SHADOWS} --set moe.record=routes --set train.steps=6 --resume"),
            Request::Init => format!("{recipe} --set train.steps=2 --set run.dir=out --set train.init={folder}"),
            Request::Replay => {
                format!("{recipe} {SHADOWS} --set train.steps=3 --set run.dir=out --set moe.replay=routes")
            }
            Request::Train => format!("{recipe} --set train.steps=2 --set run.dir=out"),
            Request::Prepare(source) => format!("prepare tiny.toml --set 'data.sources=[\"{source}\"]'"),
        };
        match self.run(&command) {
            Answer::Done(out) => match self.told(request, &out) {
                Some(told) => Answer::Done(told),
                None => Answer::Broken(format!("says it is done, and nothing is there: {out:?}")),
            },
            answer => answer,
        }
    }

    fn run(&self, command: &str) -> Answer {
        let script = format!("ulimit -v {MEMORY_KB}; exec \"$GUILDHALL\" {command}");
        let mut running = self.shop.start_shell(&script);
        let begun = Instant::now();
        while running.is_running() {
            if begun.elapsed() > PATIENCE {
                return Answer::Broken(format!("runs for more than {PATIENCE:?}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let ended = running.wait();
        let errors = ended.err.lines().filter(|line| line.starts_with("error:")).count();
        let noise = ["panicked", "backtrace", "overflowed its stack", "memory allocation"];
        match ended.code {
            _ if noise.iter().any(|word| ended.err.contains(word)) => Answer::Broken(ended.err),
            Some(0) if errors == 0 => Answer::Done(ended.out),
            Some(code @ (1 | 2)) if errors == 1 && ended.out.is_empty() => {
                Answer::Refused(code, ended.err[ended.err.find("error:").unwrap_or(0)..].to_owned())
            }
            code => Answer::Broken(format!("ends with {code:?}: {}{}", ended.out, ended.err)),
        }
    }

    /// What tells one result from another, if it is there.
    fn told(&self, request: Request, out: &str) -> Option<String> {
        let state = |run: &str, step| {
            let entries = fs::read_dir(self.shop.checkpoint(run, step)).ok()?;
            let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
            paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
            paths.sort();
            paths.iter().map(|path| Some(hash(&fs::read(path).ok()?))).collect()
        };
        match request {
            Request::Generate | Request::Evaluate => Some(out.to_owned()),
            Request::Resume => state(RUN, 6),
            Request::Init | Request::Train => state("out", 2),
            Request::Replay => state("out", 3),
            Request::Prepare(_) => {
                let text = fs::read(self.shop.path(out.trim()).join("manifest.json")).ok()?;
                let manifest: Value = serde_json::from_slice(&text).ok()?;
                Some(format!("{} {}", manifest["train"], manifest["held_out"]))
            }
        }
    }
}

pub(super) fn hash(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// Copies what is in a folder with its times, by which prepared text is known.
fn copy(from: &Path, to: &Path) {
    let from = from.join(".");
    assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
}
