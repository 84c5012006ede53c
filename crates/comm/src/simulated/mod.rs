//! A world in which one rank runs at a time, and a seed chooses which: order, delays, deaths and standstills of a whole run
//! are drawn, and the same seed draws the same ones.
//!
//! ```text
//!   turns   who runs next, what is under way, what time it is      by a seed
//!   post    data: messages as `crate::messages` wants them          under way for a drawn time
//!   lane    control lanes: signals                                  likewise
//!   clock   the time of the world, for timeouts                     goes on when somebody waits
//! ```
//!
//! What runs is what runs between machines: the collectives of [`crate::messages`], agreed on by
//! [`crate::wrap::Agreement`]. Each rank has a thread, which keeps its turn until it starts an operation or waits; so a
//! schedule costs no real waiting, however long the timeouts, and what a rank computes in its turn may use threads of its
//! own. Whoever reads another clock than the world's, or talks to another rank by other means, breaks the determinism.

mod clock;
mod lane;
mod post;
mod stepping;
mod turns;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::control::ControlLane;
use crate::digest::mix;
use crate::messages;
use crate::wrap::{Agreement, Patience};
use crate::{Clock, Communicator};
use clock::SimulatedClock;
use lane::simulated_lanes;
use post::simulated_posts;
use stepping::Stepping;
pub use turns::Stuck;
use turns::{Gone, Turns};

/// What happens in a simulated world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorldScript {
    /// Which order and which delays are drawn.
    pub seed: u64,
    /// What happens to a rank, if anything does.
    pub mishap: Option<Mishap>,
    /// What is wrong with the transport, to see that it is noticed.
    pub flaw: Option<TransportFlaw>,
}

impl WorldScript {
    /// An order that `seed` draws, in which nothing happens.
    pub fn undisturbed(seed: u64) -> WorldScript {
        WorldScript { seed, mishap: None, flaw: None }
    }

    /// An order that `seed` draws, and with two seeds of three a mishap: a death, or a standstill for `still`. `turns` are
    /// those of the ranks of such a world; some mishaps come too late to happen.
    ///
    /// # Panics
    /// Without ranks.
    pub fn drawn(seed: u64, turns: &[u64], still: Duration) -> WorldScript {
        let [rank, at_turn] = [1, 2].map(|draw| mix(mix(seed) ^ draw));
        let rank = rank as usize % turns.len();
        let at_turn = at_turn % (turns[rank] * 21 / 20 + 1);
        let kind = [None, Some(MishapKind::Death), Some(MishapKind::Standstill(still))][(seed % 3) as usize];
        WorldScript { mishap: kind.map(|kind| Mishap { rank, at_turn, kind }), ..WorldScript::undisturbed(seed) }
    }
}

/// What happens to one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mishap {
    pub rank: usize,
    /// The turn of that rank in which it happens, counted from 0. Nothing happens if it has fewer.
    pub at_turn: u64,
    pub kind: MishapKind,
}

/// Of what kind a mishap is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MishapKind {
    /// The rank is gone, as after a `kill -9`: its connections close, and what it has sent arrives or not.
    Death,
    /// The rank does nothing for so long, as after a `SIGSTOP`; its connections stay.
    Standstill(Duration),
}

/// A bug of a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportFlaw {
    /// A message may overtake another of the same sender, receiver and tag.
    Overtaking,
    /// Now and then a message is lost.
    Loss,
}

/// One rank's part of a simulated world.
pub struct SimulatedRank {
    /// Agreed on, as between processes.
    pub world: Arc<dyn Communicator>,
    /// Between all ranks, and used for nothing else.
    pub lane: Arc<dyn ControlLane>,
    pub clock: Arc<dyn Clock>,
}

/// How a simulated world ended.
#[derive(Debug)]
pub struct SimulatedEnd<T> {
    /// By rank: what it came to; none if it died.
    pub ends: Vec<Option<T>>,
    /// By rank.
    pub turns: Vec<u64>,
    /// Whether the script's mishap came in time to happen.
    pub had_mishap: bool,
    /// What time it was.
    pub time: Duration,
}

/// Runs `f` on every rank of a world of `size` in the order that `script` draws. Any wait for other ranks fails after
/// `timeout` of the world's time.
///
/// # Errors
/// Ranks that wait for ever.
///
/// # Panics
/// If `size` is zero, a thread cannot be started, or `f` panics.
pub fn run<T: Send>(
    size: usize,
    timeout: Duration,
    script: WorldScript,
    f: impl Fn(SimulatedRank) -> T + Sync,
) -> Result<SimulatedEnd<T>, Stuck> {
    let turns = Turns::new(size, script);
    let lanes = [0, 1].map(|number| simulated_lanes(&turns, number));
    let [agreement, words] = lanes.map(Vec::into_iter);
    let members = simulated_posts(&turns).into_iter().zip(agreement.zip(words));
    let (turns, f) = (&turns, &f);
    let ends: Vec<Result<T, Gone>> = thread::scope(|scope| {
        let start = |(rank, (post, (agreement, words)))| {
            let play = move || {
                let clock: Arc<dyn Clock> = Arc::new(SimulatedClock { rank, turns: turns.clone() });
                let (world, mover) = messages::world_by(clock.clone(), post, timeout);
                let world = Agreement::beside(world, agreement, Patience { timeout, clock: clock.clone() });
                let world: Arc<dyn Communicator> = Arc::new(Stepping { inner: world, rank, turns: turns.clone() });
                turns.enter(rank, Box::new(mover));
                let end = catch_unwind(AssertUnwindSafe(|| f(SimulatedRank { world, lane: words, clock })));
                turns.leave(rank);
                end.map_err(|panic| *panic.downcast::<Gone>().unwrap_or_else(|panic| resume_unwind(panic)))
            };
            let thread = thread::Builder::new().name(format!("simulated rank {rank}"));
            thread.spawn_scoped(scope, play).unwrap_or_else(|error| panic!("cannot start a thread: {error}"))
        };
        let ranks: Vec<_> = members.enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    turns.stuck().map_or(Ok(()), Err)?;
    let lived = |(rank, end): (usize, Result<T, Gone>)| end.ok().filter(|_| !turns.is_dead(rank));
    Ok(SimulatedEnd {
        ends: ends.into_iter().enumerate().map(lived).collect(),
        turns: turns.counts(),
        had_mishap: turns.had_mishap(),
        time: turns.now(),
    })
}
