//! Ranks of this process whose threads work for other ranks while they sleep.

use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::{Clock, Sleeper, SystemClock};
use guildhall_tensor::Standby;

use crate::parallel::{self, Backend};

/// The clock by which ranks of a process wait for each other, and what has their threads meanwhile: nothing where there is one
/// rank, where accelerators compute, or where the recipe says so.
pub(super) fn standing_by(config: &parallel::Config, threads: usize) -> (Arc<dyn Clock>, Option<Arc<Standby>>) {
    if !config.standby || config.ranks == 1 || config.backend != Backend::Cpu {
        return (SystemClock::new(), None);
    }
    let standby = Standby::new(config.ranks, threads);
    (Arc::new(StandbyClock { clock: SystemClock::new(), standby: standby.clone() }), Some(standby))
}

/// The time of the machine, by which ranks sleep, or for a while a thread in a rank's stead.
struct StandbyClock {
    clock: Arc<SystemClock>,
    standby: Arc<Standby>,
}

impl Clock for StandbyClock {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn wait_until<'a>(&self, deadline: Duration, sleeper: Sleeper<'a>) -> Sleeper<'a> {
        self.standby.while_waiting(|| self.clock.wait_until(deadline, sleeper))
    }

    fn linger(&self, looks: u32, deadline: Duration) {
        self.clock.linger(looks, deadline);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use guildhall_tensor::{Tape, Tensor};

    use super::*;
    use crate::launch::{self, Rank, first_cause};

    /// Experts' rows are computed by one rank, while the other waits at a barrier. Says whether the other's threads helped.
    fn is_helped(config: &parallel::Config) -> Vec<bool> {
        let ranks = launch::run(config, |rank: Rank| -> Result<bool, guildhall_comm::Error> {
            let visits = || rank.device.standby().map_or(0, |standby| standby.visits());
            if rank.world.rank() == 0 {
                let (tape, begun) = (Tape::new(&rank.device), Instant::now());
                let zeros = |shape: &[usize]| tape.constant(Tensor::zeros(&rank.device, shape));
                let (x, w) = (zeros(&[4096, 64]), zeros(&[2, 64, 64]));
                while visits() == 0 && begun.elapsed() < Duration::from_secs(60) {
                    x.grouped_linear(&w, None, &[3000, 1096]);
                }
            }
            rank.world.barrier()?;
            Ok(visits() > 0)
        });
        first_cause(ranks, |_| false).unwrap_or_else(|failure| panic!("{failure}"))
    }

    #[test]
    fn ranks_that_wait_at_a_barrier_help_others() {
        let config = parallel::Config { threads: Some(1), ..parallel::Config::of(2, 1) };
        assert_eq!(is_helped(&config), [true, true]);
        let apart = parallel::Config { standby: false, ..config };
        let ranks = launch::run(&apart, |rank: Rank| Ok::<_, String>(rank.device.standby().is_some()));
        assert!(ranks.into_iter().all(|has| matches!(has, Ok(false))));
    }
}
