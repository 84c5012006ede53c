//! A run in a process of its own, started again when it fails.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

use super::when_asked_to_stop;

/// The hidden option by which a process knows the one that started it.
const STARTED_BY: &str = "--started-by";
/// The exit code of a run that failed, which may end otherwise another time; that of a wrong request will not.
const FAILED: i32 = 1;

/// How a run ended after the last of its restarts.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code, about which it has said what there is to say.
    Code(u8),
    /// In another way.
    Killed { signal: i32 },
}

/// Runs this program with these arguments in a process of its own, and again with `--resume` up to `restarts` times when
/// it fails or is killed. `tell` is told why. A signal that asks this process to end is passed on, and nothing is
/// started after it.
///
/// # Errors
/// A process that cannot be started.
pub fn supervise(arguments: &[OsString], restarts: usize, tell: impl Fn(&str)) -> io::Result<Ended> {
    let ward = Arc::new(Ward::default());
    let signalled = ward.clone();
    when_asked_to_stop(move || signalled.stop())?;
    let mut arguments = arguments.to_vec();
    arguments.extend([STARTED_BY.into(), std::process::id().to_string().into()]);
    for restart in 1.. {
        let status = ward.run(&arguments)?;
        let ended = Ended::of(status);
        let may_differ = !matches!(ended, Ended::Code(code) if i32::from(code) != FAILED);
        if !may_differ || restart > restarts || ward.is_stopping.load(Ordering::Relaxed) {
            return Ok(ended);
        }
        tell(&format!("restart {restart} of {restarts}: the run {ended}; it goes on from its newest checkpoint"));
        if !arguments.iter().any(|argument| argument == "--resume") {
            arguments.push("--resume".into());
        }
    }
    unreachable!("there are finitely many restarts")
}

/// Ends this process like Ctrl-C when the one that started it has ended, however that was.
///
/// # Errors
/// One that has ended already, or a system that cannot tell.
pub fn end_with(parent: i32) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    match getppid() == Pid::from_raw(parent) {
        true => Ok(()),
        false => Err(io::Error::other("the process that started it has ended")),
    }
}

/// The process that is looked after, if there is one just now.
#[derive(Default)]
struct Ward {
    child: Mutex<Option<Pid>>,
    is_stopping: AtomicBool,
}

impl Ward {
    fn run(&self, arguments: &[OsString]) -> io::Result<ExitStatus> {
        let mut child: Child = {
            // Within the lock, so that no signal comes between the start and the note of it.
            let mut running = self.child.lock().unwrap_or_else(PoisonError::into_inner);
            let name = env::args_os().next().unwrap_or_else(|| "guildhall".into());
            // It names the program in what it says, as the user has typed it.
            let child = Command::new(env::current_exe()?).arg0(name).args(arguments).spawn()?;
            *running = Pid::from_raw(child.id().cast_signed());
            child
        };
        if self.is_stopping.load(Ordering::Relaxed) {
            self.pass_on();
        }
        let status = child.wait();
        *self.child.lock().unwrap_or_else(PoisonError::into_inner) = None;
        status
    }

    fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.pass_on();
    }

    fn pass_on(&self) {
        if let Some(child) = *self.child.lock().unwrap_or_else(PoisonError::into_inner) {
            // One that has just ended needs no signal.
            let _ = kill_process(child, Signal::TERM);
        }
    }
}

impl Ended {
    fn of(status: ExitStatus) -> Ended {
        match (status.code(), status.signal()) {
            (Some(code), _) => Ended::Code(u8::try_from(code).unwrap_or(u8::MAX)),
            (None, signal) => Ended::Killed { signal: signal.unwrap_or_default() },
        }
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Code(code) => write!(f, "ended with exit code {code}"),
            Ended::Killed { signal } => write!(f, "was killed by signal {signal}"),
        }
    }
}
