//! The ranks of this process among those of a run.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use guildhall_comm::control::{ControlLane, Received, Signal, mailbox};
use guildhall_comm::threads::{self, Options};
use guildhall_comm::{Clock, Communicator, DeviceTrouble, Failure, SystemClock};
use guildhall_tensor::{Blocking, DeviceFailure, Standby, on_device};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::backend::ComputeMeans;
use super::carriers::{DevicePath, between_processes, told, within_a_process};
use super::ending::{Ending, verdict};
use super::heard::{Heard, PULSE};
use super::node::{RankPlace, places_on};
use super::standby::standing_by;
use super::standstill::{DiskPatience, ThreadWatch};
use super::{GiveUp, Rank, Refusal, RunFailure, Tellable, rank_of, share_of_cores};
use crate::parallel::{self, Nodes};

/// So often in a timeout a process says that it lives, while others wait for it.
const PULSES: u32 = 4;

/// So long at most others are waited for once a rank is known to have failed: they have been told.
const LAST_WORDS: Duration = Duration::from_secs(30);

/// One rank of this process: the data of its world, and a lane to all ranks that is used for nothing else.
pub struct Member {
    pub world: Arc<dyn Communicator>,
    pub lane: Arc<dyn ControlLane>,
}

/// The ranks of a run that are in this process; one process may have all. It serves one run: a failure ends its world.
pub struct Process {
    /// In rank order.
    members: Vec<Member>,
    heard: Mutex<Heard>,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    pub(super) disks: DiskPatience,
    /// Ranks on this machine, of all processes.
    neighbours: usize,
    /// Those of them that may run on exactly the cores of this process.
    sharing: usize,
    /// Of all ranks.
    nodes: Nodes,
    /// Of each rank, among those with which it shares GPUs.
    places: Vec<usize>,
    runs_alone: bool,
    blocking: Blocking,
    /// What has the threads of ranks that wait.
    standby: Option<Arc<Standby>>,
    /// Of what is in GPUs' memory, from rank to rank.
    path: DevicePath,
}

impl Process {
    /// All ranks of `config`, as threads of this process.
    pub fn whole(config: &parallel::Config) -> Process {
        let timeout = Duration::from_secs(config.timeout_s);
        let path = within_a_process(config).unwrap_or(DevicePath::Own);
        let (clock, standby) = standing_by(config, share_of_cores(config, config.ranks));
        let worlds = threads::world_by(clock, config.ranks, Options { timeout });
        let members = path
            .of_threads(worlds, timeout)
            .into_iter()
            .zip(mailbox::lanes(config.ranks))
            .map(|(world, lane)| Member { world, lane });
        Process { path, standby, ..Process::of_members(members.collect(), config) }
    }

    /// Some ranks of a world, of which other processes have the others. Collective over the processes.
    ///
    /// # Errors
    /// A process that ends before it is there.
    ///
    /// # Panics
    /// Without a member.
    pub fn of(members: Vec<Member>, config: &parallel::Config) -> Result<Process, Refusal> {
        Process::of_members(members, config).met(config)
    }

    /// [`Process::of`], whose timeout is measured by `clock`, and whose rank runs alone.
    pub(super) fn simulated(
        clock: Arc<dyn Clock>,
        member: Member,
        config: &parallel::Config,
    ) -> Result<Process, Refusal> {
        Process { clock, runs_alone: true, ..Process::of_members(vec![member], config) }.met(config)
    }

    /// When it has met the others.
    fn met(self, config: &parallel::Config) -> Result<Process, Refusal> {
        let mut process = self;
        let here = RankPlace::here(told(config));
        let places: Vec<RankPlace> = process.of_all(&here.told())?.values().map(|told| RankPlace::of(told)).collect();
        process.settle(&here, &places);
        process.places = places_on(&places.iter().map(|place| place.node.as_str()).collect::<Vec<_>>());
        let carriers = process.places.iter().zip(&places).map(|(place, told)| (*place, told.carriers.as_str()));
        let path = between_processes(config, &carriers.collect::<Vec<_>>());
        process.path = path.map_err(|text| Refusal { is_request: true, text })?;
        if config.node_link.is_none() {
            process.nodes = Nodes::named(places.into_iter().map(|place| place.node));
        }
        Ok(process)
    }

    /// Who shares this machine, and who its cores, of ranks in these places.
    fn settle(&mut self, here: &RankPlace, places: &[RankPlace]) {
        let is_near = |place: &&RankPlace| place.machine == here.machine;
        self.neighbours = places.iter().filter(is_near).count();
        self.sharing = places.iter().filter(is_near).filter(|place| place.cores == here.cores).count();
    }

    fn of_members(mut members: Vec<Member>, config: &parallel::Config) -> Process {
        assert!(!members.is_empty(), "a process of a run has a rank");
        members.sort_by_key(|member| member.world.rank());
        let ranks = members[0].world.size();
        Process {
            neighbours: members.len(),
            sharing: members.len(),
            // A recipe that says what messages between nodes cost says who is on which.
            nodes: match config.node_link {
                Some(link) => Nodes::of_consecutive(ranks, link.ranks_per_node),
                None => Nodes::one(ranks),
            },
            members,
            heard: Mutex::default(),
            clock: SystemClock::new(),
            timeout: Duration::from_secs(config.timeout_s),
            disks: DiskPatience::ENDLESS,
            runs_alone: false,
            blocking: Blocking::default(),
            standby: None,
            path: DevicePath::Own,
            places: (0..ranks).collect(),
        }
    }

    /// Says how ranks that run from now on divide products.
    pub fn divide(&mut self, blocking: Blocking) {
        self.blocking = blocking;
    }

    /// Says how long a disk may take for one operation: longer, and the rank that waits for it is given up. Where no other
    /// process would go on without it, `give_up` is called.
    pub fn wait_for_disks(&mut self, timeout: Duration, give_up: GiveUp) {
        self.disks = DiskPatience { timeout, give_up: self.others().is_empty().then_some(give_up) };
    }

    /// Whether rank 0 is here: who leads speaks to the user, and is the first in a run's folder.
    pub fn leads(&self) -> bool {
        self.members[0].world.rank() == 0
    }

    /// A configuration that says how many compute threads each rank of this process has.
    pub fn with_threads(&self, config: &parallel::Config) -> parallel::Config {
        parallel::Config { threads: Some(share_of_cores(config, self.sharing)), ..config.clone() }
    }

    /// Ranks on this machine, which share its memory.
    pub fn neighbours(&self) -> usize {
        self.neighbours
    }

    /// How what is in GPUs' memory goes from rank to rank.
    pub fn path(&self) -> &DevicePath {
        &self.path
    }

    /// Which ranks are on one node: as the recipe says, or as the processes have found.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Calls `f` in the process that leads, then in all others, and returns when all have; what it was refused anywhere is
    /// refused everywhere. For what a run does outside of its ranks: folders, files, prepared text. Collective over the
    /// processes.
    ///
    /// # Errors
    /// The refusal of `f`, here or in another process; a process that ended meanwhile.
    pub fn in_turn<T>(&self, f: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
        let done = |rank| {
            let refused = Refusal::from_words(&self.hear(rank)?);
            refused.map_err(|refusal| Refusal { text: format!("rank {rank}: {}", refusal.text), ..refusal })
        };
        if !self.leads() {
            done(0)?;
        }
        let result = self.with_a_pulse(f);
        self.tell_all(&Refusal::words(result.as_ref().map(drop)));
        let value = result?;
        self.others().into_iter().filter(|rank| *rank != 0).try_for_each(done)?;
        Ok(value)
    }

    /// What `f` comes to in the process that leads, in all of them. Collective over the processes.
    ///
    /// # Errors
    /// As [`Process::in_turn`].
    pub fn as_leader(&self, f: impl FnOnce() -> Result<String, Refusal>) -> Result<String, Refusal> {
        let found = self.in_turn(|| if self.leads() { f() } else { Ok(String::new()) })?;
        if !self.leads() {
            return self.hear(0);
        }
        self.tell_all(&found);
        Ok(found)
    }

    /// Calls `f`, which may take hours where it prepares a corpus, and meanwhile tells the others that this process lives, or
    /// that it waits for a disk that does not answer.
    fn with_a_pulse<T>(&self, f: impl FnOnce() -> T) -> T {
        if self.runs_alone {
            return f();
        }
        thread::scope(|scope| {
            let (done, is_done) = mpsc::channel::<()>();
            let mut caller = ThreadWatch::of_this_thread(self.disks);
            scope.spawn(move || {
                let often = self.disks.timeout.min(self.timeout) / PULSES;
                while is_done.recv_timeout(often) == Err(RecvTimeoutError::Timeout) {
                    match caller.stands_still() {
                        None => self.tell_all(PULSE),
                        Some(reason) => return self.give_up(reason),
                    }
                }
            });
            let result = f();
            drop(done);
            result
        })
    }

    /// What each rank's process has told. Collective over the processes.
    ///
    /// # Errors
    /// A process that ended meanwhile.
    pub(super) fn of_all(&self, words: &str) -> Result<BTreeMap<usize, String>, Refusal> {
        self.tell_all(words);
        let own = self.members.iter().map(|member| Ok((member.world.rank(), words.to_owned())));
        let others = self.others().into_iter().map(|rank| Ok((rank, self.hear(rank)?)));
        own.chain(others).collect()
    }

    /// Runs `f` on the ranks of this process and returns their results in rank order when all ranks of the run have ended.
    /// Collective over the processes.
    ///
    /// # Errors
    /// The failure that began it, on whatever rank.
    pub fn run<T: Send, E: Tellable>(
        &self,
        config: &parallel::Config,
        f: impl Fn(Rank) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, RunFailure<E::Kind>> {
        let results = self.each(config, f);
        let mut endings = BTreeMap::new();
        for (member, result) in self.members.iter().zip(&results) {
            let ending: Ending<E::Kind> = Ending::of(result);
            self.tell(member, &ending.words());
            endings.insert(member.world.rank(), ending);
        }
        self.hear_endings(&mut endings);
        match verdict(endings.into_iter().collect()) {
            Some(verdict) => Err(verdict),
            None => Ok(results.into_iter().flatten().collect()),
        }
    }

    /// Waits for the ranks of other processes to say how they ended.
    fn hear_endings<K: Serialize + DeserializeOwned>(&self, endings: &mut BTreeMap<usize, Ending<K>>) {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let (lane, since, mut left) = (&self.members[0].lane, self.clock.now(), self.others());
        // Another may still be in its last collective, wait there for the timeout, and then tell for whom.
        let (mut until, mut has_failed) = (since.saturating_add(2 * self.timeout), false);
        loop {
            left.retain(|&rank| match heard.of(rank) {
                Some(said) => {
                    let ending = said.map_or_else(Ending::Lost, |words| Ending::from_words(&words));
                    endings.insert(rank, ending);
                    false
                }
                None => true,
            });
            if !has_failed && endings.values().any(|ending| !matches!(ending, Ending::Done)) {
                has_failed = true;
                until = until.min(self.clock.now().saturating_add(self.timeout.min(LAST_WORDS)));
            }
            if left.is_empty() {
                break;
            }
            let Some(received) = lane.receive_by(&*self.clock, until) else { break };
            heard.learn(received, lane, self.clock.now());
        }
        let silent = |rank| (rank, Ending::Silent(format!("rank {rank} did not say in time how it ended")));
        endings.extend(left.into_iter().map(silent));
    }

    /// [`Process::run`] without a word to other processes.
    pub fn each<T: Send, E: Display + Send>(
        &self,
        config: &parallel::Config,
        f: impl Fn(Rank) -> Result<T, E> + Sync,
    ) -> Vec<Result<T, Failure<E>>> {
        let threads = share_of_cores(config, self.sharing);
        let first = self.members[0].world.rank();
        threads::run_on(self.members.iter().map(|member| member.world.clone()).collect(), |world| {
            let is_first_here = world.rank() == first;
            let work = || {
                let facts = (is_first_here, self.runs_alone, self.disks);
                let place = self.places[world.rank()];
                let means = ComputeMeans { threads, blocking: self.blocking, standby: self.standby.clone() };
                let rank = rank_of(world.clone(), config, (&self.nodes, place), means, facts);
                self.path.begin(&world, &rank.device, self.timeout).unwrap_or_else(|failure| failure.raise());
                let result = f(rank.clone());
                if result.is_ok() {
                    self.path.end(&world);
                }
                result
            };
            // What `f` has not made its own error of is met with before it.
            on_device(work).unwrap_or_else(|failure: DeviceFailure| {
                let is_consequence = matches!(failure, DeviceFailure::Ended { .. });
                resume_unwind(Box::new(DeviceTrouble { reason: failure.to_string(), is_consequence }))
            })
        })
    }

    /// The ranks that are not here.
    fn others(&self) -> Vec<usize> {
        let is_here = |rank: &usize| self.members.iter().any(|member| member.world.rank() == *rank);
        (0..self.members[0].world.size()).filter(|rank| !is_here(rank)).collect()
    }

    fn tell_all(&self, words: &str) {
        self.members.iter().for_each(|member| self.tell(member, words));
    }

    /// Says something in a member's name to the ranks of other processes.
    fn tell(&self, member: &Member, words: &str) {
        let signal = Signal::Told(words.to_owned());
        self.others().into_iter().for_each(|rank| member.lane.send(rank, &signal));
    }

    /// Tells the others that this process cannot go on; without others it ends.
    fn give_up(&self, reason: String) {
        if let Some(give_up) = self.disks.give_up {
            give_up(&reason);
        }
        let Member { world, lane } = &self.members[0];
        lane.send_all(&Signal::Failed { rank: world.rank(), reason, site: None });
    }

    /// The next that `rank` says before the first step, or why nothing will come of it: the failure of any process, or a
    /// silence of the timeout, of which the others are told.
    fn hear(&self, rank: usize) -> Result<String, Refusal> {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let (lane, since) = (&self.members[0].lane, self.clock.now());
        let lost = |text| Refusal { is_request: false, text };
        loop {
            if let Some(said) = heard.of(rank) {
                return said.map_err(lost);
            }
            if let Some(why) = heard.cause() {
                return Err(lost(why.clone()));
            }
            let last = heard.last.get(&rank).map_or(since, |last| since.max(*last));
            match lane.receive_by(&*self.clock, last.saturating_add(self.timeout)) {
                Some(received) => heard.learn(received, lane, self.clock.now()),
                None => {
                    let reason = format!(
                        "its process has said nothing for {} s (parallel.timeout_s) before the first step: it stands \
                         still, or its machine cannot be reached",
                        self.timeout.as_secs()
                    );
                    let signal = Signal::Failed { rank, reason, site: None };
                    heard.learn(Received { from: lane.rank(), signal }, lane, self.clock.now());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use guildhall_tensor::ProductBlocks;

    use super::*;

    #[test]
    fn ranks_divide_products_as_their_process_was_told() {
        let (config, built_in) =
            (parallel::Config { threads: Some(1), ..parallel::Config::of(2, 1) }, Blocking::default());
        let other =
            Blocking { f32: ProductBlocks { packed_kib: built_in.f32.packed_kib + 1, ..built_in.f32 }, ..built_in };
        let mut process = Process::whole(&config);
        process.divide(other);
        let found = process.each(&config, |rank| Ok::<_, String>(*rank.device.blocking()));
        assert!(found.into_iter().all(|found| matches!(found, Ok(blocking) if blocking == other)));
    }

    /// Of eight ranks on two machines: who shares memory, and who cores.
    #[test]
    fn cores_are_shared_by_those_who_may_run_on_the_same() {
        let place = |machine: &str, cores: &str| {
            RankPlace::of(
                &RankPlace {
                    machine: machine.into(),
                    node: machine.into(),
                    cores: cores.into(),
                    carriers: String::new(),
                }
                .told(),
            )
        };
        let mut process = Process::whole(&parallel::Config::of(1, 1));
        let mut shares = |here: usize, places: &[RankPlace]| {
            process.settle(&places[here], places);
            (process.neighbours, process.sharing)
        };
        // Not bound; bound to a socket each two; bound to a core each.
        let free = vec![place("a", "0-7"); 4];
        let sockets: Vec<RankPlace> = ["0-3", "0-3", "4-7", "4-7"].map(|cores| place("b", cores)).into();
        let bound: Vec<RankPlace> = ["0", "1", "2", "3"].map(|cores| place("b", cores)).into();
        assert_eq!(shares(0, &[free.clone(), sockets.clone()].concat()), (4, 4));
        assert_eq!(shares(5, &[free.clone(), sockets].concat()), (4, 2));
        assert_eq!(shares(5, &[free, bound].concat()), (4, 1));
    }
}
