//! Layouts whose ranks are processes. The search writes what they are to do into its folder, has a launcher start them, and
//! reads what each has seen.
//!
//! ```text
//!  search ── layout.toml, order ──► launcher ──► process of rank r: take_part ──► part-r ──► search
//! ```

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bugs::find;
use super::collect::RankResult;
use super::error::Error;
use super::options::Between;
use super::run::{RoutedBy, Routes, Runner, Twist, checkpoints, seen};
use crate::config::Config;
use crate::data::Source;
use crate::launch::Process;
use crate::moe::recording::Seen;

const LAYOUT_FILE: &str = "layout.toml";
const ORDER_FILE: &str = "order";

/// Lines that are kept of what the processes of a failed run have said.
const TOLD_LINES: usize = 6;

/// What processes are to do with a layout.
#[derive(Serialize, Deserialize)]
pub(super) struct LayoutOrder {
    /// What names the search's data.
    content: String,
    steps: u64,
    between: Between,
    routed: RoutedBy,
    twist: NamedTwist,
}

/// A [`Twist`] that travels.
#[derive(Serialize, Deserialize)]
enum NamedTwist {
    Nothing,
    Bug(String),
    Dither(u64, Option<String>),
}

impl LayoutOrder {
    pub(super) fn of(routes: &Routes, between: Between, routed: RoutedBy, twist: Twist) -> LayoutOrder {
        let twist = match twist {
            Twist::Nothing => NamedTwist::Nothing,
            Twist::Bug(bug) => NamedTwist::Bug(bug.name.to_owned()),
            Twist::Dither(number, bug) => NamedTwist::Dither(number, bug.map(|bug| bug.name.to_owned())),
        };
        LayoutOrder { content: routes.content.to_owned(), steps: routes.steps, between, routed, twist }
    }

    fn twist(&self) -> Twist<'static> {
        let named = |name: &str| find(name).expect("both are the same program");
        match &self.twist {
            NamedTwist::Nothing => Twist::Nothing,
            NamedTwist::Bug(name) => Twist::Bug(named(name)),
            NamedTwist::Dither(number, name) => Twist::Dither(*number, name.as_deref().map(named)),
        }
    }
}

/// Words that start a number of processes, which stands in them as `{ranks}`.
pub(super) struct Launcher<'a>(pub(super) &'a [String]);

impl Launcher<'_> {
    /// Has the ranks of `config` follow `order` as processes, and reads in rank order what they have seen. A failure of a rank
    /// is a result, in its words.
    ///
    /// # Errors
    /// A launcher that is not there, a folder that cannot be used.
    pub(super) fn run(
        &self,
        folder: &Path,
        config: &Config,
        order: &LayoutOrder,
    ) -> Result<Result<(Vec<RankResult>, Seen), String>, Error> {
        let failed = |source| Error::Folder { path: folder.to_owned(), source };
        fs::write(folder.join(LAYOUT_FILE), config.to_toml()).map_err(failed)?;
        write(&folder.join(ORDER_FILE), order).map_err(failed)?;
        let ranks = config.parallel.ranks;
        let parts: Vec<PathBuf> = (0..ranks).map(|rank| part(folder, rank)).collect();
        parts.iter().filter(|part| part.exists()).try_for_each(fs::remove_file).map_err(failed)?;
        let words: Vec<String> = self.0.iter().map(|word| word.replace("{ranks}", &ranks.to_string())).collect();
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(program).arg("take-part").arg(folder);
        // Ctrl-C is for the search, which ends behind this layout.
        command.stdin(Stdio::null()).process_group(0);
        let ended = command.output().map_err(|source| Error::Launcher { words: words.join(" "), source })?;
        if !ended.status.success() {
            let told = String::from_utf8_lossy(&ended.stderr);
            let errors: Vec<&str> = told.lines().filter(|line| line.contains("error: ")).take(TOLD_LINES).collect();
            let last = || told.lines().rev().take(TOLD_LINES).collect::<Vec<_>>().into_iter().rev().collect();
            let told: Vec<&str> = if errors.is_empty() { last() } else { errors };
            return Ok(Err(format!("{}, {}: {}", words.join(" "), ended.status, told.join("; "))));
        }
        if let Some(rank) = parts.iter().position(|part| !part.exists()) {
            return Ok(Err(format!("{} has ended, and rank {rank} has left nothing", words.join(" "))));
        }
        let mut all = (Vec::new(), Seen::default());
        for part in parts {
            let (rank, seen): (RankResult, Seen) = read(&part).map_err(failed)?;
            all.0.push(rank);
            all.1.absorb(seen);
        }
        Ok(Ok(all))
    }
}

/// The layout that processes are to run.
pub fn layout_file(folder: &Path) -> PathBuf {
    folder.join(LAYOUT_FILE)
}

/// This process's part in a layout of a search in `folder`. Collective over the processes.
///
/// # Errors
/// What ended the run, here or elsewhere; a file that cannot be read or written.
pub fn take_part(
    process: &Process,
    folder: &Path,
    config: &Config,
    (data, content): (Arc<dyn Source>, &str),
) -> Result<(), TakingPart> {
    let order: LayoutOrder = read(&folder.join(ORDER_FILE))?;
    if order.content != content {
        return Err(TakingPart::OtherData);
    }
    let routes = Routes { folder, content, steps: order.steps };
    let runner = Runner { data, steps: order.steps, folder: checkpoints(folder), routes, launcher: None };
    let routings = runner.routings(config, order.routed)?;
    let how = (order.between, order.twist());
    let ranks = process.run(&config.parallel, |rank| runner.rank(rank, config, &routings, how));
    let mut ranks = ranks.map_err(|failure| TakingPart::Run(failure.to_string()))?;
    let rank = ranks.pop().expect("a process is a rank");
    Ok(write(&part(folder, rank.rank), &(rank, seen(&routings)))?)
}

/// Why a process did not come to the end of its part.
#[derive(Debug, thiserror::Error)]
pub enum TakingPart {
    #[error("{0}")]
    Run(String),
    #[error("the recipe's texts are others than when the search began: leave them as they are while it runs")]
    OtherData,
    #[error(transparent)]
    Search(#[from] Error),
    #[error("could not use the search's folder: {0}")]
    Folder(#[from] io::Error),
}

fn part(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("part-{rank}"))
}

fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    ciborium::into_writer(value, &mut file).map_err(io::Error::other)?;
    file.flush()
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    ciborium::from_reader(BufReader::new(File::open(path)?)).map_err(io::Error::other)
}
