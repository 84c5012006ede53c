//! One rank of a world that is not there: for walking a step without data.
//!
//! Opaque payloads come back as they are. Of numbers in host memory, what other ranks would have given is answered by
//! whoever made the world; where it does not, all ranks are taken to be like this one. That does for sums of equal
//! parts. It does not for counts of rows: the owner of a hot expert has no mirror image. Where nobody can answer, all
//! ranks walk at once ([`among`]) and tell each other.

use std::sync::{Arc, OnceLock};

use crate::Communicator;
use crate::error::Error;
use crate::operation::{Completed, Operation, Reduce, Request, Summation};
use crate::payload::{Payload, Span, copy};
use crate::pending::Pending;
use crate::validate::validate;
use crate::wrap::relay::RelayRoute;
use crate::wrap::{NodeWay, Wired, Wrapper};

/// A group as one of its ranks sees it.
#[derive(Clone, Copy, Debug)]
pub struct GroupView<'a> {
    pub name: &'a str,
    pub rank: usize,
    pub size: usize,
}

/// Gives the result of an operation of host numbers, where it is not that of equal ranks.
pub type Answers = Arc<dyn Fn(GroupView, &Operation) -> Option<Payload> + Send + Sync>;

/// What a rank sends to the others of its group, as [`crate::wrap::Trace`] counts it.
pub fn sent(group: GroupView, operation: &Operation) -> Wired {
    let others = (0..group.size).filter(|&other| other != group.rank);
    crate::wrap::bytes::sent(operation, group.rank, group.size, others)
}

/// Sees every operation that begins on a group.
pub type Watch = Arc<dyn Fn(GroupView, &Operation) + Send + Sync>;

/// Rank `rank` of `size`.
///
/// # Panics
/// If there is no such rank.
pub fn world(rank: usize, size: usize, watch: Watch, answers: Answers) -> Arc<dyn Communicator> {
    assert!(rank < size, "rank {rank} of {size}");
    let absent = AbsentOthers { watch, answers, aborted: OnceLock::new() };
    Arc::new(SizesCommunicator { rank, size, name: "world".into(), relays: None, absent: Arc::new(absent) })
}

/// A rank of a world in which all ranks walk a step without data: numbers in host memory travel among them over `inner`,
/// opaque payloads come back as they are.
pub fn among(inner: Arc<dyn Communicator>, watch: Watch) -> Arc<dyn Communicator> {
    Arc::new(WalkingRank { inner, watch })
}

struct WalkingRank {
    inner: Arc<dyn Communicator>,
    watch: Watch,
}

impl Wrapper for WalkingRank {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        among(inner, self.watch.clone())
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let (rank, size) = (self.inner.rank(), self.inner.size());
        (self.watch)(GroupView { name: self.inner.name(), rank, size }, &request.operation);
        if !request.operation.is_opaque() {
            return self.inner.start(request);
        }
        validate(&request, rank, size, rank).inspect_err(|error| self.inner.abort(&error.to_string()))?;
        Ok(Pending::finished(Ok(request.operation.into_completed())))
    }
}

struct SizesCommunicator {
    rank: usize,
    size: usize,
    name: String,
    /// How all-to-alls go by nodes, if they do, and what groups of ranks on one node are called.
    relays: Option<(Arc<RelayRoute>, String)>,
    absent: Arc<AbsentOthers>,
}

/// What stands for the other ranks; shared with everything split from a world.
struct AbsentOthers {
    watch: Watch,
    answers: Answers,
    /// Why the world was aborted, if it was.
    aborted: OnceLock<String>,
}

impl SizesCommunicator {
    fn under(&self, name: String, rank: usize, size: usize) -> Arc<dyn Communicator> {
        Arc::new(SizesCommunicator { rank, size, name, relays: None, absent: self.absent.clone() })
    }

    fn check_alive(&self) -> Result<(), Error> {
        let reason = self.absent.aborted.get().cloned();
        reason.map_or(Ok(()), |reason| Err(Error::aborted(self.rank, reason)))
    }

    fn view(&self) -> GroupView<'_> {
        GroupView { name: &self.name, rank: self.rank, size: self.size }
    }

    /// Shows what an operation comes to.
    fn show(&self, operation: &Operation) {
        let (watch, view) = (&self.absent.watch, self.view());
        match (&self.relays, operation) {
            (Some((route, name)), Operation::AllToAll { send, send_counts, recv_counts, .. }) => {
                let mates = route.mates();
                let place = mates.iter().position(|&mate| mate == self.rank).expect("a rank is on its own node");
                let within = GroupView { name, rank: place, size: mates.len() };
                for (is_within, leg) in route.mirrored(send.kind(), send_counts, recv_counts) {
                    watch(if is_within { within } else { view }, &leg);
                }
            }
            _ => watch(view, operation),
        }
    }

    fn perform(&self, mut operation: Operation) -> Completed {
        self.show(&operation);
        let answer = (self.absent.answers)(self.view(), &operation);
        mirror(&mut operation, self.rank, self.size);
        let mut done = operation.into_completed();
        if let Some(answer) = answer {
            copy(&answer, &mut done.recv);
        }
        done
    }
}

impl Communicator for SizesCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        let (relays, absent) = (self.relays.clone(), self.absent.clone());
        Arc::new(SizesCommunicator { name: name.to_owned(), relays, absent, ..*self })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        self.check_alive()?;
        validate(&request, self.rank, self.size, self.rank).inspect_err(|error| self.abort(&error.to_string()))?;
        Ok(Pending::finished(Ok(self.perform(request.operation))))
    }

    /// All ranks are taken to choose what this one does.
    fn split(&self, color: usize, _key: usize) -> Result<Arc<dyn Communicator>, Error> {
        self.check_alive()?;
        Ok(self.under(format!("{}/{color}", self.name), self.rank, self.size))
    }

    fn group(&self, members: &[usize]) -> Result<Arc<dyn Communicator>, Error> {
        self.check_alive()?;
        let place = members.iter().position(|&member| member == self.rank).expect("a rank is in its own group");
        Ok(self.under(format!("{}/{}", self.name, members[0]), place, members.len()))
    }

    /// What travels is shown as it would go; the others of a node are taken to send and receive what this rank does.
    fn by_nodes(&self, nodes: &[usize], way: NodeWay, name: &str) -> Result<Arc<dyn Communicator>, Error> {
        self.check_alive()?;
        let route = || (Arc::new(RelayRoute::new(way, nodes, self.rank)), name.to_owned());
        let relays = (way != NodeWay::Direct).then(route);
        Ok(Arc::new(SizesCommunicator { relays, name: self.name.clone(), absent: self.absent.clone(), ..*self }))
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        self.check_alive()?;
        Ok(self.named(&self.name))
    }

    fn sums(&self) -> Summation {
        Summation::Exact
    }

    fn abort(&self, reason: &str) {
        // Only the first reason is kept.
        let _ = self.absent.aborted.set(reason.to_owned());
    }
}

/// What comes of it if all ranks give what this one does.
fn mirror(operation: &mut Operation, rank: usize, size: usize) {
    use Payload::{F32, F64, U32, U64};
    match operation {
        Operation::Barrier | Operation::Broadcast { .. } => {}
        Operation::AllReduce { reduce: Reduce::Sum, buf } => match buf {
            F32(span) => span.as_mut_slice().iter_mut().for_each(|x| *x *= size as f32),
            F64(span) => span.as_mut_slice().iter_mut().for_each(|x| *x *= size as f64),
            U32(span) => span.as_mut_slice().iter_mut().for_each(|x| *x = x.wrapping_mul(size as u32)),
            U64(span) => span.as_mut_slice().iter_mut().for_each(|x| *x = x.wrapping_mul(size as u64)),
            Payload::Bf16(_) | Payload::U8(_) | Payload::Opaque(..) | Payload::Device(..) => {}
        },
        Operation::AllReduce { .. } => {}
        Operation::AllGather { send, recv, .. } => match (send, recv) {
            (F32(send), F32(recv)) => repeat(send, recv),
            (F64(send), F64(recv)) => repeat(send, recv),
            (U32(send), U32(recv)) => repeat(send, recv),
            (U64(send), U64(recv)) => repeat(send, recv),
            (Payload::Bf16(send), Payload::Bf16(recv)) => repeat(send, recv),
            (Payload::U8(send), Payload::U8(recv)) => repeat(send, recv),
            _ => {}
        },
        // Every rank sends here what this one sends to itself.
        Operation::AllToAll { send: U64(send), send_counts, recv: U64(recv), .. } => {
            let first: usize = send_counts[..rank].iter().sum();
            let own =
                Span { data: send.as_slice()[first..first + send_counts[rank]].to_vec(), range: 0..send_counts[rank] };
            repeat(&own, recv);
        }
        Operation::ReduceScatter { .. } | Operation::AllToAll { .. } => {}
    }
}

/// Fills `to` with `from`, again and again.
fn repeat<T: Copy>(from: &Span<T>, to: &mut Span<T>) {
    let from = from.as_slice();
    if !from.is_empty() {
        to.as_mut_slice().iter_mut().zip(from.iter().cycle()).for_each(|(to, from)| *to = *from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::ElementKind;

    fn seen_by_nobody() -> Watch {
        Arc::new(|_, _| ())
    }

    #[test]
    fn others_are_like_this_rank() {
        let world = world(2, 4, seen_by_nobody(), Arc::new(|_, _| None));
        let group = world.group(&[1, 2]).unwrap();
        assert_eq!((world.rank(), world.size(), group.rank(), group.size()), (2, 4, 1, 2));
        assert_eq!(group.all_gather_u64(&[5, 6]).unwrap(), [5, 6, 5, 6]);
        assert_eq!(world.all_to_all_u64(&[1, 2, 3, 4]).unwrap(), [3; 4]);
        let mut sum = [1.5];
        world.sum_f64(&mut sum).unwrap();
        assert_eq!(sum, [6.0]);
        let largest = world.all_reduce(Reduce::Max, vec![7u64]).unwrap().into_u64();
        assert_eq!(largest, [7]);
    }

    #[test]
    fn answers_go_before_mirrors() {
        let counts = |group: GroupView, operation: &Operation| {
            let asked = group.name == "expert" && matches!(operation, Operation::AllToAll { .. });
            asked.then(|| Payload::from(vec![10u64, 20]))
        };
        let world = world(0, 2, seen_by_nobody(), Arc::new(counts));
        assert_eq!(world.named("expert").all_to_all_u64(&[1, 2]).unwrap(), [10, 20]);
        assert_eq!(world.all_to_all_u64(&[1, 2]).unwrap(), [1, 1]);
    }

    #[test]
    fn numbers_travel_among_ranks_that_walk_at_once() {
        let options = crate::threads::Options { timeout: std::time::Duration::from_secs(60) };
        let seen = crate::threads::run(2, options, |inner| {
            let calls = Arc::new(std::sync::Mutex::new(Vec::new()));
            let counted = calls.clone();
            let watch = move |group: GroupView, operation: &Operation| {
                counted.lock().unwrap().push((group.name.to_owned(), sent(group, operation).bytes));
            };
            let group = among(inner, Arc::new(watch)).group(&[0, 1])?.named("pair");
            let own = group.rank() as u64;
            let told = group.all_to_all_u64(&[10 + own, 20 + own])?;
            let opaque = || Payload::Opaque(ElementKind::F32, 6);
            let done = group.all_to_all(opaque(), vec![2, 4], opaque(), vec![3, 3])?;
            assert!(matches!(done.recv, Payload::Opaque(ElementKind::F32, 6)));
            Ok::<_, Error>((told, calls.lock().unwrap().clone()))
        });
        let [first, second] = <[_; 2]>::try_from(seen).ok().unwrap().map(Result::unwrap);
        let calls = |opaque: u64| vec![("pair".to_owned(), 8), ("pair".to_owned(), opaque)];
        assert_eq!((first, second), ((vec![10, 11], calls(16)), (vec![20, 21], calls(8))));
    }

    /// Rank 2 of four on two nodes sends 1, 2, 3, 4 elements and receives 3 from each; rank 3 is taken to do so, too.
    #[test]
    fn what_goes_round_by_nodes_is_seen_leg_by_leg() {
        let legs = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = legs.clone();
        let watch = move |group: GroupView, operation: &Operation| {
            seen.lock().unwrap().push((group.name.to_owned(), group.size, sent(group, operation).bytes));
        };
        let world = world(2, 4, Arc::new(watch), Arc::new(|_, _| None)).named("all");
        let by_nodes = world.by_nodes(&[0, 0, 1, 1], NodeWay::TwoD, "node").unwrap();
        let opaque = |len| Payload::Opaque(ElementKind::F32, len);
        by_nodes.all_to_all(opaque(10), vec![1, 2, 3, 4], opaque(12), vec![3; 4]).unwrap();
        // Counts of four ranks each way; 1 and 2 to the other node; to rank 3 its own 4, and the 3 that came for it.
        let told = |name: &str, size, bytes| (name.to_owned(), size, bytes);
        let expected = [told("node", 2, 8 * 8), told("all", 4, 3 * 4), told("node", 2, (4 + 3) * 4)];
        assert_eq!(*legs.lock().unwrap(), expected);
    }

    #[test]
    fn opaque_elements_are_sizes() {
        let world = world(1, 3, seen_by_nobody(), Arc::new(|_, _| None));
        let (send, recv) = (Payload::Opaque(ElementKind::F32, 4), Payload::Opaque(ElementKind::F32, 12));
        let done = world.all_gather(send, recv, vec![4; 3]).unwrap();
        assert_eq!((done.recv.len(), done.recv.bytes()), (12, 48));
        assert!(
            world
                .all_gather(Payload::Opaque(ElementKind::F32, 3), Payload::Opaque(ElementKind::F32, 12), vec![4; 3])
                .is_err()
        );
        assert!(world.barrier().is_err(), "a mistake ends the world");
    }
}
