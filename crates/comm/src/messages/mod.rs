//! Ranks that share no memory: collectives made of messages from one rank to another, whoever carries them.
//!
//! ```text
//!   Request ──▶ moves   which bytes go to whom, in one stage or two     data
//!               round   one operation on its way                        tickets, sums in rank order
//!               engine  all that a rank has under way                   moved on by who waits, or by its thread
//!               post    messages between two ranks                      within the process, or MPI's
//! ```
//!
//! Every element is summed on one rank, in rank order, so that sums have the bits of thread ranks. What is sent is what a
//! ring sends. Messages of one group meet by their order: those of the two stages have a tag each, and second stages begin
//! in the order of their operations.
//!
//! Nothing here compares requests of ranks or tells other ranks of a failure: [`crate::wrap::Agreement::beside`] does, over
//! a control lane. An operation that its peers do not share fails, or never ends, and writes into its own buffers only.

mod engine;
pub(crate) mod moves;
#[cfg(feature = "mpi")]
pub mod mpi;
mod post;
mod round;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::error::{Error, left_in_flight};
use crate::operation::{Completed, Request, Summation};
use crate::pending::{InFlight, Pending};
use crate::validate::validate_on_host;
use crate::{Communicator, OnLongWait};
use engine::MessageEngine;
pub use post::{LocalPost, LocalTicket, PointToPoint, local};

/// The communicator of one rank of a world whose messages `post` carries. Any wait for other ranks fails after `timeout`.
pub fn world<P: PointToPoint>(post: P, timeout: Duration) -> Arc<dyn Communicator> {
    let engine = MessageEngine::new(post, timeout, SystemClock::new());
    let mover = Some(engine.mover());
    of_office(Office { mover, engine })
}

/// [`world`], whose timeout is measured by `clock`, and what moves on its operations while nobody waits for them: no thread
/// does.
pub(crate) fn world_by<P: PointToPoint>(
    clock: Arc<dyn Clock>,
    post: P,
    timeout: Duration,
) -> (Arc<dyn Communicator>, impl Fn() + Send + Sync + use<P>) {
    let engine = MessageEngine::new(post, timeout, clock);
    let moved = Arc::downgrade(&engine);
    (of_office(Office { mover: None, engine }), move || moved.upgrade().iter().for_each(|engine| engine.progress()))
}

fn of_office<P: PointToPoint>(office: Office<P>) -> Arc<dyn Communicator> {
    let (number, rank, size) = office.engine.world();
    let lane = Arc::new(MessageLane { office: Arc::new(office), number, rank, size });
    Arc::new(MessageCommunicator { lane, name: "world".into() })
}

/// An engine and its thread, which end with the last communicator.
struct Office<P: PointToPoint> {
    engine: Arc<MessageEngine<P>>,
    mover: Option<JoinHandle<()>>,
}

impl<P: PointToPoint> Drop for Office<P> {
    fn drop(&mut self) {
        self.engine.close();
        if let Some(mover) = self.mover.take() {
            // It does not panic: what it moves on fails by an error.
            let _ = mover.join();
        }
    }
}

/// One rank's membership in a group.
struct MessageLane<P: PointToPoint> {
    office: Arc<Office<P>>,
    number: u32,
    rank: usize,
    size: usize,
}

impl<P: PointToPoint> Drop for MessageLane<P> {
    /// A rank that leaves operations unfinished would leave its peers waiting.
    fn drop(&mut self) {
        let left = self.office.engine.leave(self.number);
        if left > 0 {
            self.office.engine.abort(&left_in_flight(left as u64));
        }
    }
}

/// A lane and the name it goes by.
struct MessageCommunicator<P: PointToPoint> {
    lane: Arc<MessageLane<P>>,
    name: Arc<str>,
}

impl<P: PointToPoint> MessageCommunicator<P> {
    fn engine(&self) -> &MessageEngine<P> {
        &self.lane.office.engine
    }

    fn begin(&self, request: Request) -> Result<StartedMessages<P>, Error> {
        let world_rank = self.engine().member(self.lane.number, self.rank());
        let checked = validate_on_host(&request, self.rank(), self.size(), world_rank);
        checked.map_err(|error| self.engine().fail(error))?;
        let index = self.engine().start(self.lane.number, request, &self.name)?;
        Ok(StartedMessages { lane: self.lane.clone(), name: self.name.clone(), index, is_awaited: false })
    }

    /// The lane of this rank in the group that `color` and `key` place it in.
    fn split_lane(&self, color: usize, key: usize) -> Result<Arc<MessageLane<P>>, Error> {
        let (size, engine) = (self.size(), self.engine());
        let wish = vec![color as u64, key as u64, u64::from(engine.next_lane())];
        let request = Request::all_gather(wish, vec![0u64; 3 * size], vec![3; size]);
        let (operation, site) = (request.operation.to_string(), request.site);
        let wishes = Box::new(self.begin(request)?).wait()?.recv.into_u64();
        let mut members: Vec<usize> = (0..size).filter(|rank| wishes[3 * rank] == color as u64).collect();
        members.sort_by_key(|rank| wishes[3 * rank + 1]);
        let rank = members.iter().position(|member| *member == self.rank());
        let rank = rank.expect("a rank is among those that chose its colour");
        // A number that is free on all ranks. Groups of other colours have it too, and no two ranks in common.
        let number = wishes.iter().skip(2).step_by(3).max().copied().unwrap_or(0) as u32;
        let size = members.len();
        let members = members.into_iter().map(|member| engine.member(self.lane.number, member)).collect();
        let opened = engine.open_lane(number, members, rank);
        let communicator = self.name.to_string();
        let number =
            opened.map_err(|detail| engine.fail(Error::Transport { communicator, operation, site, detail }))?;
        Ok(Arc::new(MessageLane { office: self.lane.office.clone(), number, rank, size }))
    }
}

impl<P: PointToPoint> Communicator for MessageCommunicator<P> {
    fn rank(&self) -> usize {
        self.lane.rank
    }

    fn size(&self) -> usize {
        self.lane.size
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        Arc::new(MessageCommunicator { lane: self.lane.clone(), name: name.into() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        Ok(Pending::in_flight(Box::new(self.begin(request)?)))
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        let lane = self.split_lane(color, key)?;
        Ok(Arc::new(MessageCommunicator { lane, name: format!("{}/{color}", self.name).into() }))
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        let lane = self.split_lane(0, self.rank())?;
        Ok(Arc::new(MessageCommunicator { lane, name: self.name.clone() }))
    }

    fn sums(&self) -> Summation {
        Summation::Exact
    }

    fn abort(&self, reason: &str) {
        self.engine().abort(reason);
    }

    fn on_long_wait(&self, tell: OnLongWait) {
        self.engine().on_long_wait(tell);
    }
}

/// A started operation: its place on its lane.
struct StartedMessages<P: PointToPoint> {
    lane: Arc<MessageLane<P>>,
    name: Arc<str>,
    index: u64,
    is_awaited: bool,
}

impl<P: PointToPoint> InFlight for StartedMessages<P> {
    fn wait(mut self: Box<Self>) -> Result<Completed, Error> {
        self.is_awaited = true;
        self.lane.office.engine.wait(self.lane.number, self.index, &self.name)
    }
}

impl<P: PointToPoint> Drop for StartedMessages<P> {
    fn drop(&mut self) {
        if !self.is_awaited {
            self.lane.office.engine.abandon(self.lane.number, self.index);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::*;

    const EACH: Duration = Duration::from_millis(20);
    const TIMEOUT: Duration = Duration::from_millis(400);
    const PARTS: usize = 40;

    /// How rank 0's wait for a large message ends of which so many parts come, one after the other, and how long it takes.
    fn awaited(parts: usize) -> (Result<Vec<u64>, Error>, Duration) {
        let (begun, posts) = (Instant::now(), local(2));
        let sender = posts[1].clone();
        let sends = thread::spawn(move || {
            for _ in 0..parts {
                thread::sleep(EACH);
                // By the first lane's first stage.
                sender.bring(0, 0, vec![1; LocalPost::BYTES_MAX]);
            }
        });
        let world = world(posts[0].clone(), TIMEOUT);
        let message =
            world.broadcast(1, vec![0u64; PARTS * LocalPost::BYTES_MAX / 8]).map(|payload| payload.into_u64());
        sends.join().unwrap();
        (message, begun.elapsed())
    }

    /// What takes longer than the timeout and moves on is no standstill; what has begun and moves no more is one.
    #[test]
    fn a_wait_lasts_as_long_as_messages_come() {
        let (message, took) = awaited(PARTS);
        assert!(message.is_ok_and(|words| words.iter().all(|word| *word == u64::MAX / 255)));
        assert!(took > TIMEOUT + TIMEOUT / 2, "{took:?}");
        let (message, took) = awaited(PARTS / 4);
        let Err(Error::Timeout { missing, attendance, .. }) = message else { panic!("{message:?}") };
        assert_eq!((missing, attendance.arrived), (vec![1], vec![0]));
        assert!(took < 3 * TIMEOUT, "{took:?}");
    }

    /// Rank 1 comes to the barrier when it has sent what another lane carries, after more than that on the barrier's own.
    #[test]
    fn what_moves_on_another_lane_is_a_sign_of_life() {
        const BESIDE: u32 = 2;
        let posts = local(2);
        let sender = posts[1].clone();
        let [here, there] = [0, 1].map(|rank: usize| world(posts[rank].clone(), TIMEOUT));
        let before =
            |world: &Arc<dyn Communicator>| world.broadcast(1, vec![0u64; 4 * PARTS * LocalPost::BYTES_MAX / 8]);
        thread::scope(|scope| {
            scope.spawn(move || {
                before(&there).unwrap();
                let _lane = there.duplicate().unwrap();
                for _ in 0..PARTS {
                    thread::sleep(EACH);
                    sender.bring(0, BESIDE, vec![1; LocalPost::BYTES_MAX]);
                }
                there.barrier().unwrap();
            });
            before(&here).unwrap();
            let beside = here.duplicate().unwrap();
            let request = Request::broadcast(1, vec![0u64; PARTS * LocalPost::BYTES_MAX / 8]);
            let (message, begun) = (beside.start(request).unwrap(), Instant::now());
            here.barrier().unwrap();
            assert!(begun.elapsed() > TIMEOUT + TIMEOUT / 2, "{:?}", begun.elapsed());
            let words = message.wait().unwrap().recv.into_u64();
            assert!(words.iter().all(|word| *word == u64::MAX / 255));
        });
    }

    /// A rank says for whom it waits when that takes long, and when it waits no longer.
    #[test]
    fn the_end_of_a_long_wait_is_told() {
        let posts = local(2);
        let [here, there] = [0, 1].map(|rank: usize| world(posts[rank].clone(), TIMEOUT));
        let (told, tells) = mpsc::channel();
        here.on_long_wait(Box::new(move |_, _, missing| told.send(missing.to_vec()).unwrap()));
        thread::scope(|scope| {
            let waits = scope.spawn(|| here.barrier());
            assert_eq!(tells.recv(), Ok(vec![1]));
            there.barrier().unwrap();
            waits.join().unwrap().unwrap();
        });
        assert_eq!(tells.try_recv(), Ok(vec![]));
    }
}
