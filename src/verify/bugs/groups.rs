//! Groups with something wrong.

use std::sync::Arc;

use guildhall_comm::wrap::Wrapper;
use guildhall_comm::{Communicator, Completed, Error, Operation, Pending, Request};

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

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}
