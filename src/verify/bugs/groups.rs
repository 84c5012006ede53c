//! Groups with something wrong.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::wrap::Wrapper;
use guildhall_comm::{Communicator, Completed, Error, InFlight, Operation, Payload, Pending, Request, Summation};

/// A group whose member stays away from exchanges that it has nothing to send in.
pub(super) struct Absent(pub(super) Arc<dyn Communicator>);

impl Wrapper for Absent {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.0
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Absent(inner))
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        match request.operation {
            Operation::AllToAll { send, recv, ref send_counts, .. } if send_counts.iter().all(|&count| count == 0) => {
                Ok(Pending::finished(Ok(Completed { send: Some(send), recv })))
            }
            _ => self.0.start(request),
        }
    }
}

/// A group in which a part of what comes from other members is lost, and a member finds there what it sent away itself:
/// in the exchanges that some files ask for.
#[derive(Clone)]
pub(super) struct LeftBehind {
    pub(super) group: Arc<dyn Communicator>,
    pub(super) asked_in: &'static [&'static str],
    /// Elements of what belongs together.
    pub(super) item: usize,
    /// Those of them that stay.
    pub(super) part: Range<usize>,
}

impl Wrapper for LeftBehind {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.group
    }

    fn around(&self, group: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(LeftBehind { group, ..self.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        let own = match &request.operation {
            Operation::AllToAll { recv_counts, .. } if self.is_asked_in(&request) => {
                let (before, rest) = recv_counts.split_at(self.group.rank());
                let first = before.iter().sum();
                first..first + rest[0]
            }
            _ => return self.group.start(request),
        };
        let pending = self.group.start(request)?;
        Ok(Pending::in_flight(Box::new(Leaving { pending, own, behind: self.clone() })))
    }
}

/// An exchange of a [`LeftBehind`].
struct Leaving {
    pending: Pending,
    /// What comes from the member itself.
    own: Range<usize>,
    behind: LeftBehind,
}

impl InFlight for Leaving {
    fn wait(self: Box<Self>) -> Result<Completed, Error> {
        let Leaving { pending, own, behind } = *self;
        let mut done = pending.wait()?;
        match (&done.send, &mut done.recv) {
            (Some(Payload::U32(sent)), Payload::U32(come)) => behind.mix(sent.as_slice(), come.as_mut_slice(), &own),
            (Some(Payload::F32(sent)), Payload::F32(come)) => behind.mix(sent.as_slice(), come.as_mut_slice(), &own),
            (Some(Payload::Bf16(sent)), Payload::Bf16(come)) => behind.mix(sent.as_slice(), come.as_mut_slice(), &own),
            _ => {}
        }
        Ok(done)
    }
}

impl LeftBehind {
    fn is_asked_in(&self, request: &Request) -> bool {
        self.asked_in.iter().any(|file| request.site.file().ends_with(file))
    }

    /// The parts of what has come are those of what was sent, as often as it takes; nothing, if nothing was.
    fn mix<T: Copy + Default>(&self, sent: &[T], come: &mut [T], own: &Range<usize>) {
        for (number, item) in come.chunks_exact_mut(self.item).enumerate() {
            let first = number * self.item;
            if !own.contains(&first) {
                let before = first % sent.len().max(1);
                item.iter_mut()
                    .enumerate()
                    .filter(|(place, _)| self.part.contains(place))
                    .for_each(|(place, element)| *element = sent.get(before + place).copied().unwrap_or_default());
            }
        }
    }
}

/// A group whose member takes its place in another group for its place in this one.
pub(super) struct Misplaced {
    pub(super) group: Arc<dyn Communicator>,
    pub(super) elsewhere: usize,
}

impl Communicator for Misplaced {
    fn rank(&self) -> usize {
        self.elsewhere % self.size()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn name(&self) -> &str {
        self.group.name()
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        Arc::new(Misplaced { group: self.group.named(name), elsewhere: self.elsewhere })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        self.group.start(request)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        self.group.split(color, key)
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        Ok(Arc::new(Misplaced { group: self.group.duplicate()?, elsewhere: self.elsewhere }))
    }

    fn sums(&self) -> Summation {
        self.group.sums()
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}
