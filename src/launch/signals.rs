//! Signals that ask the program to stop.

use std::io;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

/// Calls `stop`, on a thread of its own, whenever the program is asked to stop: by Ctrl-C, SIGTERM or SIGHUP, or by SIGUSR1,
/// which launchers of MPI and Slurm pass on to their processes without ending them.
///
/// # Errors
/// What the system refuses.
pub fn when_asked_to_stop(stop: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1])?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || signals.forever().for_each(|_| stop()))?;
    Ok(())
}
