//! The processes of a run: this one alone, or those that a launcher has started.

use super::{Launched, Process, Refusal};
use crate::parallel;

#[cfg(feature = "mpi")]
use super::mpi;

/// Says why, and ends the process.
pub type GiveUp = fn(&str) -> !;

/// This process in its run, and what it has to leave when the run has ended everywhere.
pub struct Joined {
    pub process: Process,
    #[cfg(feature = "mpi")]
    mpi: Option<mpi::StartedMpi>,
}

impl Joined {
    /// All ranks as threads of this process, or, where a launcher has started several processes, one rank in each.
    /// Collective over the processes.
    ///
    /// # Errors
    /// Another number of ranks than of processes, a program that was built without MPI, a process that cannot be reached.
    ///
    /// `give_up` is called where MPI waits for others longer than `parallel.timeout_s`: that has no other end.
    pub fn of(config: &parallel::Config, give_up: GiveUp) -> Result<Joined, Refusal> {
        match Launched::for_certain()? {
            None => Ok(Joined::alone(config)),
            Some(launched) => {
                agrees(config, &launched)?;
                Joined::launched(config, &launched, give_up)
            }
        }
    }

    /// To be called when all processes have come to the same end, or will; where one may be gone, the launcher ends the others.
    /// `give_up` is called where MPI waits for others longer than `parallel.timeout_s`.
    ///
    /// # Errors
    /// What MPI reports.
    #[cfg(feature = "mpi")]
    pub fn leave(self, give_up: GiveUp) -> Result<(), String> {
        drop(self.process);
        self.mpi.map_or(Ok(()), |started| started.leave(give_up))
    }

    /// # Errors
    /// None without MPI.
    #[cfg(not(feature = "mpi"))]
    pub fn leave(self, _: GiveUp) -> Result<(), String> {
        Ok(())
    }

    #[cfg(feature = "mpi")]
    fn alone(config: &parallel::Config) -> Joined {
        Joined { process: Process::whole(config), mpi: None }
    }

    #[cfg(not(feature = "mpi"))]
    fn alone(config: &parallel::Config) -> Joined {
        Joined { process: Process::whole(config) }
    }

    #[cfg(feature = "mpi")]
    fn launched(config: &parallel::Config, launched: &Launched, give_up: GiveUp) -> Result<Joined, Refusal> {
        let (process, started) = mpi::join(config, launched, give_up)?;
        Ok(Joined { process, mpi: Some(started) })
    }

    #[cfg(not(feature = "mpi"))]
    fn launched(_: &parallel::Config, launched: &Launched, _: GiveUp) -> Result<Joined, Refusal> {
        let Launched { by, size, .. } = launched;
        let text = format!(
            "{by} has started {size} processes of a program that was built without MPI: each would be a run of its own, \
             in the same folder. Build it with --features mpi, or start it once, without {by}"
        );
        Err(Refusal { is_request: true, text })
    }
}

/// A process is a rank.
fn agrees(config: &parallel::Config, Launched { by, size, .. }: &Launched) -> Result<(), Refusal> {
    let ranks = config.ranks;
    if ranks == *size {
        return Ok(());
    }
    let text = format!(
        "parallel.ranks = {ranks}, but {by} has started {size} processes, and each is a rank: start {ranks}, or add --ranks \
         {size}, or set train.elastic = true without --ranks"
    );
    Err(Refusal { is_request: true, text })
}
