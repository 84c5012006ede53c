//! Groups with something wrong: wrappers of communicators.

use std::sync::Arc;

use guildhall_comm::{Communicator, Completed, Error, Operation, Pending, Request};

/// A group whose member stays away from exchanges that it has nothing to send in.
pub(super) struct Absent(pub(super) Arc<dyn Communicator>);

impl Communicator for Absent {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        Arc::new(Absent(self.0.named(name)))
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        match request.operation {
            Operation::AllToAll { send, recv, ref send_counts, .. } if send_counts.iter().all(|&count| count == 0) => {
                Ok(Pending::finished(Ok(Completed { send: Some(send), recv })))
            }
            _ => self.0.start(request),
        }
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        Ok(Arc::new(Absent(self.0.split(color, key)?)))
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        Ok(Arc::new(Absent(self.0.duplicate()?)))
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

/// A group in which this rank takes its place in another group for its place in this one.
pub(super) struct Misplaced {
    group: Arc<dyn Communicator>,
    rank: usize,
}

impl Misplaced {
    pub(super) fn new(group: Arc<dyn Communicator>, elsewhere: usize) -> Misplaced {
        let rank = elsewhere % group.size();
        Misplaced { group, rank }
    }
}

impl Communicator for Misplaced {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn name(&self) -> &str {
        self.group.name()
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        Arc::new(Misplaced { group: self.group.named(name), rank: self.rank })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        self.group.start(request)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, Error> {
        self.group.split(color, key)
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        Ok(Arc::new(Misplaced { group: self.group.duplicate()?, rank: self.rank }))
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}
