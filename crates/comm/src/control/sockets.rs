//! A control lane over TCP, for ranks that may be processes: one connection between every two ranks, over which each
//! signal travels as four bytes of length and the bytes of `wire`.
//!
//! Every rank first opens a [`super::Doorway`], and when all know all addresses, passes through it. One thread of a rank then
//! reads what comes from all others. A peer whose connection ends before it has said that it leaves, or that sends what is
//! no signal, is received as [`Signal::Failed`].
//!
//! The lane trusts its network: whoever reaches the address and says that it is a rank is taken for it.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use polling::{Event, Events, PollMode, Poller};

use super::inbox::Inbox;
use super::wire::FRAME_BYTES_MAX;
use super::{ControlLane, OnFailure, Received, Signal};
use crate::bell::Bell;

/// The longest that a signal waits for a peer that does not read before the peer is given up.
const SEND_WITHIN: Duration = Duration::from_secs(60);

/// How long a read may wait on a connection that was reported ready and is not.
const READ_WITHIN: Duration = Duration::from_millis(1);

/// Most that is read at once.
const READ_BYTES: usize = 1 << 16;

pub(super) struct Sockets {
    rank: usize,
    inbox: Arc<Inbox>,
    /// By rank; none to itself.
    peers: Vec<Option<Mutex<Arc<TcpStream>>>>,
    /// To the thread that calls who listens for failures.
    calls: Sender<SharedCall>,
}

type SharedCall = Arc<dyn Fn() + Send + Sync>;

impl Sockets {
    /// The lane of `rank` over connections to all others. A peer that reads nothing for `patience` while it is sent to, or for
    /// [`SEND_WITHIN`], is given up.
    pub(super) fn over(
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        patience: Duration,
    ) -> io::Result<Arc<dyn ControlLane>> {
        let (inbox, mut reader) = (Inbox::new(), Reader { poller: Poller::new()?, open: BTreeMap::new() });
        let streams: Vec<Option<Arc<TcpStream>>> = streams.into_iter().map(|stream| stream.map(Arc::new)).collect();
        for (peer, stream) in streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(patience.clamp(Duration::from_millis(1), SEND_WITHIN)))?;
            stream.set_read_timeout(Some(READ_WITHIN))?;
            reader.add(Incoming { peer, stream: stream.clone(), unread: Vec::new() })?;
        }
        let of_reader = inbox.clone();
        // It ends with the connections, when both ends of each have left.
        let named = || thread::Builder::new().name(format!("control {rank}"));
        named().spawn(move || reader.listen(&of_reader))?;
        // Not on the thread that reads: who hears of a failure tells others, and one of them may not read.
        let (calls, called) = mpsc::channel::<SharedCall>();
        named().spawn(move || called.iter().for_each(|call| call()))?;
        let peers = streams.into_iter().map(|stream| stream.map(Mutex::new)).collect();
        Ok(Arc::new(Sockets { rank, inbox, peers, calls }))
    }
}

impl ControlLane for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn send(&self, to: usize, signal: &Signal) {
        let Some(peer) = &self.peers[to] else { return self.inbox.post(to, signal.clone()) };
        let bytes = signal.encode();
        let frame = [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat();
        let stream = peer.lock().unwrap_or_else(PoisonError::into_inner);
        if (&**stream).write_all(&frame).is_err() {
            // The rest of a frame cut short would be misread. The reading thread says that the peer is gone; where the
            // connection has ended already, there is nothing to shut.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn receive(&self) -> Option<Received> {
        self.inbox.take()
    }

    fn bell(&self) -> &Arc<Bell> {
        self.inbox.bell()
    }

    fn on_failure(&self, call: OnFailure) {
        let (call, calls): (SharedCall, _) = (Arc::from(call), self.calls.clone());
        // When the thread has ended, so has the lane.
        self.inbox.on_failure(Box::new(move || calls.send(call.clone()).unwrap_or_default()));
    }
}

impl Drop for Sockets {
    /// Only the way out is shut: closing both would discard at the peer what it has not read yet.
    fn drop(&mut self) {
        (self as &dyn ControlLane).send_all(&Signal::Left);
        for peer in self.peers.iter().flatten() {
            // A connection that has ended already needs no end.
            let _ = peer.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Write);
        }
    }
}

/// One connection, as its reader knows it.
struct Incoming {
    peer: usize,
    stream: Arc<TcpStream>,
    /// The beginning of a frame whose rest has not come.
    unread: Vec<u8>,
}

/// Reads all connections of a lane. What it waits for costs the same however many they are.
struct Reader {
    poller: Poller,
    /// By peer.
    open: BTreeMap<usize, Incoming>,
}

impl Reader {
    fn add(&mut self, incoming: Incoming) -> io::Result<()> {
        // SAFETY: the connection stays open until `close` has taken it back, or both are dropped.
        unsafe {
            self.poller.add_with_mode(&incoming.stream, Event::readable(incoming.peer), PollMode::Level)?;
        }
        self.open.insert(incoming.peer, incoming);
        Ok(())
    }

    fn close(&mut self, peer: usize) {
        let Some(incoming) = self.open.remove(&peer) else { return };
        // What has been added can be taken back.
        self.poller.delete(&incoming.stream).unwrap_or_default();
    }

    /// Posts what the peers send, until each has left or is lost.
    fn listen(mut self, inbox: &Inbox) {
        let (mut ready, mut bytes) = (Events::new(), vec![0; READ_BYTES]);
        while !self.open.is_empty() {
            ready.clear();
            match self.poller.wait(&mut ready, None) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    for incoming in self.open.values() {
                        incoming.lose(format!("its control connection cannot be watched: {error}"), inbox);
                    }
                    return;
                }
            }
            for event in ready.iter() {
                let incoming = self.open.get_mut(&event.key);
                if incoming.is_some_and(|incoming| !incoming.receive(&mut bytes, inbox)) {
                    self.close(event.key);
                }
            }
        }
    }
}

impl Incoming {
    /// Posts what has come, for which it waits [`READ_WITHIN`] at most; whether more may come.
    fn receive(&mut self, bytes: &mut [u8], inbox: &Inbox) -> bool {
        match (&*self.stream).read(bytes) {
            Ok(0) => {
                let why = "its control connection closed without a word; its process has ended";
                return self.lose(why.to_owned(), inbox);
            }
            Ok(count) => self.unread.extend_from_slice(&bytes[..count]),
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
            {
                return true;
            }
            Err(error) => return self.lose(format!("its control connection broke: {error}"), inbox),
        }
        let mut read = 0;
        let stays = loop {
            match first_signal(&self.unread[read..]) {
                Ok(None) => break true,
                Ok(Some((signal, len))) => {
                    read += len;
                    let is_last = signal == Signal::Left;
                    inbox.post(self.peer, signal);
                    if is_last {
                        break false;
                    }
                }
                Err(reason) => break self.lose(reason, inbox),
            }
        };
        self.unread.drain(..read);
        stays
    }

    /// Posts that no more will come, and says so.
    fn lose(&self, reason: String, inbox: &Inbox) -> bool {
        inbox.post(self.peer, Signal::Failed { rank: self.peer, reason, site: None });
        false
    }
}

/// The signal that `bytes` begin with and the length of its frame, if it is whole.
fn first_signal(bytes: &[u8]) -> Result<Option<(Signal, usize)>, String> {
    let Some((len, rest)) = bytes.split_first_chunk() else { return Ok(None) };
    let len = u32::from_le_bytes(*len) as usize;
    if len > FRAME_BYTES_MAX {
        return Err(format!("it sent a control signal of {len} bytes, at most {FRAME_BYTES_MAX} are allowed"));
    }
    let Some(frame) = rest.get(..len) else { return Ok(None) };
    let signal = Signal::decode(frame).map_err(|error| format!("it sent bytes that are no control signal: {error}"))?;
    Ok(Some((signal, size_of::<u32>() + len)))
}
