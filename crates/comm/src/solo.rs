//! A world of one: every collective at once, by itself.

use std::sync::{Arc, OnceLock};

use crate::Communicator;
use crate::error::{Error, Party};
use crate::operation::{Completed, Operation, Request, Summation};
use crate::payload::{Payload, copy};
use crate::pending::Pending;
use crate::validate::validate_in_memory;

/// The communicator of the only rank.
pub fn world() -> Arc<dyn Communicator> {
    Arc::new(Solo { name: "world".into(), aborted: Arc::default() })
}

struct Solo {
    name: String,
    /// Why the world was aborted, if it was; shared with everything split from it.
    aborted: Arc<OnceLock<String>>,
}

impl Solo {
    fn under(&self, name: String) -> Arc<dyn Communicator> {
        Arc::new(Solo { name, aborted: self.aborted.clone() })
    }

    fn check_alive(&self) -> Result<(), Error> {
        let reason = self.aborted.get().cloned();
        reason.map_or(Ok(()), |reason| Err(Error::aborted(0, reason)))
    }

    /// The rank is its own peer in an all-to-all, so it can contradict itself.
    fn check_peer_counts(&self, request: &Request) -> Result<(), Error> {
        let Operation::AllToAll { send_counts, recv_counts, .. } = &request.operation else {
            return Ok(());
        };
        if send_counts == recv_counts {
            return Ok(());
        }
        let party = Party { rank: 0, operation: request.operation.to_string(), site: request.site.into() };
        Err(Error::PeerCounts {
            communicator: self.name.clone(),
            receiver: Box::new(party.clone()),
            sender: Box::new(party),
            expected: recv_counts[0],
            sent: send_counts[0],
        })
    }
}

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn named(&self, name: &str) -> Arc<dyn Communicator> {
        self.under(name.to_string())
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        self.check_alive()?;
        let checked = validate_in_memory(&request, 0, 1, 0).and_then(|()| self.check_peer_counts(&request));
        checked.inspect_err(|error| self.abort(&error.to_string()))?;
        Ok(Pending::finished(Ok(perform(request.operation))))
    }

    fn split(&self, color: usize, _key: usize) -> Result<Arc<dyn Communicator>, Error> {
        self.check_alive()?;
        Ok(self.under(format!("{}/{color}", self.name)))
    }

    fn duplicate(&self) -> Result<Arc<dyn Communicator>, Error> {
        self.check_alive()?;
        Ok(self.under(self.name.clone()))
    }

    fn moves_devices(&self) -> bool {
        true
    }

    fn sums(&self) -> Summation {
        Summation::Exact
    }

    fn abort(&self, reason: &str) {
        // Only the first reason is kept.
        let _ = self.aborted.set(reason.to_string());
    }
}

fn perform(mut operation: Operation) -> Completed {
    use Operation::{AllGather, AllToAll, ReduceScatter};
    if let AllGather { send, recv, .. } | ReduceScatter { send, recv, .. } | AllToAll { send, recv, .. } =
        &mut operation
    {
        copy(send, recv);
        if let (Payload::Device(.., send), Payload::Device(.., recv)) = (send, recv) {
            recv.mark();
            recv.wait(&**recv);
            send.wait(&**recv);
        }
    }
    operation.into_completed()
}
