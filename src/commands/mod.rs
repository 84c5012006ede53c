//! The commands, one file each. Exit codes: 0 done, 1 the run failed, 2 the request was wrong.

mod audit;
mod bench;
mod blocking;
mod ceilings;
mod convert;
mod decoding;
mod devices;
mod elastic;
mod evaluate;
mod first_and_last;
mod fit;
mod forecast;
mod found_chats;
mod found_pairs;
mod generate;
mod kept_scores;
mod machine;
mod nodes;
mod plan;
mod plan_figures;
mod plan_recorded;
mod prepare;
mod report;
mod restarts;
mod scoring;
mod simulate;
mod surgery;
mod take_part;
pub mod train;
mod trained;
mod translate;
mod verify;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};

use crate::cli::{Cli, Command};
use crate::launch::{Joined, Launched, Process, Refusal};
use crate::metrics::say;

/// Why a command ended without doing what was asked.
#[derive(Debug)]
pub enum CommandFailure {
    /// The request was wrong: nothing was begun.
    Request(anyhow::Error),
    /// The run failed.
    Run(anyhow::Error),
    /// In a way that the user has been told of already; with this exit code.
    Told(u8),
}

impl From<Refusal> for CommandFailure {
    fn from(Refusal { is_request, text }: Refusal) -> CommandFailure {
        if is_request {
            CommandFailure::Request(anyhow::anyhow!(text))
        } else {
            CommandFailure::Run(anyhow::anyhow!(text))
        }
    }
}

impl Process {
    /// [`Process::in_turn`] for what commands do.
    fn agree<T>(&self, f: impl FnOnce() -> Result<T, CommandFailure>) -> Result<T, CommandFailure> {
        Ok(self.in_turn(|| f().map_err(CommandFailure::refusal))?)
    }
}

impl Joined {
    /// Leaves the other processes when this one has `ended` so, unless they may be gone.
    fn end(self, ended: Result<(), CommandFailure>) -> Result<(), CommandFailure> {
        match ended {
            Ok(()) => self.leave(give_up).map_err(|error| CommandFailure::run(anyhow::anyhow!(error))),
            Err(CommandFailure::Run(_)) => ended,
            Err(refused) => {
                // Said before the others are waited for: one that still prepares text may come to this end in hours.
                let code = refused.tell();
                // What matters is said, whether they come or not.
                let _ = self.leave(|_| process::exit(CommandFailure::REFUSED.into()));
                Err(CommandFailure::Told(code))
            }
        }
    }
}

impl CommandFailure {
    fn request(error: impl Into<anyhow::Error>) -> CommandFailure {
        CommandFailure::Request(error.into())
    }

    fn run(error: impl Into<anyhow::Error>) -> CommandFailure {
        CommandFailure::Run(error.into())
    }

    /// As other processes hear of it.
    fn refusal(self) -> Refusal {
        match self {
            CommandFailure::Request(error) => Refusal { is_request: true, text: chain(&error) },
            CommandFailure::Run(error) => Refusal { is_request: false, text: chain(&error) },
            CommandFailure::Told(code) => {
                Refusal { is_request: code == CommandFailure::REFUSED, text: "see above".to_owned() }
            }
        }
    }

    /// The exit code of a wrong request.
    const REFUSED: u8 = 2;

    /// Tells the user, and returns the exit code.
    fn tell(self) -> u8 {
        let (code, error) = match self {
            CommandFailure::Told(code) => return code,
            CommandFailure::Run(error) => (1, error),
            CommandFailure::Request(error) => (CommandFailure::REFUSED, error),
        };
        let text = cut(&chain(&error));
        match Launched::here().filter(|launched| launched.rank > 0) {
            None => say(&format!("error: {text}")),
            // Most fail alike: the first tells all of it.
            Some(Launched { rank, .. }) => {
                let begins: Vec<&str> = text.lines().map(str::trim).take(2).collect();
                say(&format!("rank {rank}: error: {}", begins.join("; ").replace(":;", ":")));
            }
        }
        code
    }
}

/// Runs the command and prints what went wrong, if anything did.
pub fn run(cli: Cli) -> ExitCode {
    let result = match (cli.command.contradiction(), &cli.command) {
        (Some(wrong), _) => Err(CommandFailure::Request(anyhow::anyhow!(wrong))),
        (None, Command::Train(_) | Command::TakePart(_)) => Ok(()),
        _ => stands_alone(),
    };
    let result = result.and_then(|()| match cli.command {
        Command::Train(arguments) => train::run(arguments),
        Command::Plan(arguments) => plan::run(arguments),
        Command::Prepare(arguments) => prepare::run(arguments),
        Command::Evaluate(arguments) => evaluate::run(arguments),
        Command::Generate(arguments) => generate::run(arguments),
        Command::Translate(arguments) => translate::run(arguments),
        Command::Surgery(arguments) => surgery::run(arguments),
        Command::Convert(arguments) => convert::run(&arguments),
        Command::Audit(arguments) => audit::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Verify(arguments) => verify::run(arguments),
        Command::TakePart(arguments) => take_part::run(&arguments),
        Command::Simulate(arguments) => simulate::run(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::Devices => devices::run(),
    });
    result.map_or_else(|failure| ExitCode::from(failure.tell()), |()| ExitCode::SUCCESS)
}

/// Bytes of a line of an error that are told, and how many of them are its last.
const LINE_TOLD: usize = 2000;
const LINE_END: usize = 500;

/// The same without the middle of lines that nobody reads: those of a file may be as long as the file.
fn cut(text: &str) -> String {
    let short = |line: &str| {
        if line.len() <= LINE_TOLD {
            return line.to_owned();
        }
        let (first, last) =
            (line.floor_char_boundary(LINE_TOLD - LINE_END), line.ceil_char_boundary(line.len() - LINE_END));
        format!("{} [{} bytes left out] {}", &line[..first], last - first, &line[last..])
    };
    text.split('\n').map(short).collect::<Vec<_>>().join("\n")
}

/// Ends a process that waits for what may never come.
pub fn give_up(why: &str) -> ! {
    let who = Launched::here().filter(|launched| launched.rank > 0);
    say(&format!("{}error: {why}", who.map_or_else(String::new, |Launched { rank, .. }| format!("rank {rank}: "))));
    process::exit(1)
}

/// Commands but for training run in one process.
fn stands_alone() -> Result<(), CommandFailure> {
    let Some(Launched { by, size, .. }) = Launched::for_certain()? else { return Ok(()) };
    let refused =
        format!("{by} has started {size} processes, but only train runs in more than one: start it without {by}");
    Err(CommandFailure::Request(anyhow::anyhow!(refused)))
}

/// An error and its causes on one line each, without saying the same twice.
fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(&format!("\n  because: {cause}"));
        }
    }
    text
}

/// What starts this program again from here: the name it was found by, or the path it was started with, which is shorter
/// below the working folder.
fn program() -> String {
    let Some(started) = std::env::args_os().next().map(PathBuf::from) else { return "guildhall".to_owned() };
    let here = std::env::current_dir().ok();
    let below = here.and_then(|here| started.strip_prefix(here).ok().map(Path::to_owned));
    let path = match below {
        Some(path) if path.components().count() == 1 => Path::new(".").join(path),
        Some(path) => path,
        None => started,
    };
    word(path.display())
}

/// A word of a command that is proposed to the user, quoted if a shell would read it otherwise.
fn word(text: impl std::fmt::Display) -> String {
    let text = text.to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:=@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// The command's result on stdout. A reader that has seen enough, such as `head`, is no failure.
fn print(text: &str) -> Result<(), CommandFailure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(CommandFailure::Run(anyhow::anyhow!("could not write the result to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// `24.1 kB`, `48 B`.
fn bytes(count: u64) -> String {
    let text = short(count);
    if text.contains(' ') { format!("{text}B") } else { format!("{text} B") }
}

/// `24.1 s`, `7.26 ms`.
fn duration(seconds: f64) -> String {
    let (value, unit) = [(1.0, "s"), (1e3, "ms"), (1e6, "us")]
        .into_iter()
        .map(|(factor, unit)| (seconds * factor, unit))
        .find(|(value, _)| *value >= 0.9995)
        .unwrap_or((seconds * 1e6, "us"));
    format!("{} {unit}", three(value))
}

/// Three digits and a prefix: `24.1 k`, `7.26 G`.
fn short(count: u64) -> String {
    let (mut value, mut prefixes) = (count as f64, ["", " k", " M", " G", " T", " P", " E"].iter());
    let mut prefix = prefixes.next();
    while value >= 999.5
        && let Some(next) = prefixes.next()
    {
        (value, prefix) = (value / 1000.0, Some(next));
    }
    match prefix {
        Some(&"") | None => format!("{value:.0}"),
        Some(prefix) => format!("{}{prefix}", three(value)),
    }
}

/// `24.1`, `7.26`.
fn three(value: f64) -> String {
    let decimals = match value {
        99.95.. => 0,
        9.995.. => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_three_digits_and_a_unit() {
        assert_eq!(
            [0, 48, 999, 1000, 24_060, 7_256_000_000].map(bytes),
            ["0 B", "48 B", "999 B", "1.00 kB", "24.1 kB", "7.26 GB"]
        );
        let seconds = [0.0, 4e-7, 0.000_999_6, 0.007_256, 0.9996, 24.06, 4000.0];
        assert_eq!(seconds.map(duration), ["0.00 us", "0.40 us", "1.00 ms", "7.26 ms", "1.00 s", "24.1 s", "4000 s"]);
    }
}
