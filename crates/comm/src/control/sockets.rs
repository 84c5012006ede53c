//! A control lane over TCP, for ranks that may be processes: one connection between every two ranks, over which each
//! signal travels as four bytes of length and the bytes of `wire`.
//!
//! Every rank first opens a [`Doorway`], and when all know all addresses, passes through it: it connects to the ranks
//! below it and is connected to by those above. One thread a peer then reads what comes. A peer whose connection ends
//! before it has said that it leaves, or that sends what is no signal, is received as [`Signal::Failed`].
//!
//! The lane trusts its network: whoever reaches the address and says that it is a rank is taken for it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::inbox::Inbox;
use super::wire::FRAME_BYTES_MAX;
use super::{ControlLane, OnFailure, Received, Signal};
use crate::bell::Bell;

/// What a connection begins with, before the number of ranks and the rank that calls, in four bytes each.
const GREETING: [u8; 8] = *b"guildctl";

/// How long a caller may take to say who it is.
const GREETING_WITHIN: Duration = Duration::from_secs(5);

/// The longest that a peer may leave its connection unread before it is given up. Peers have a thread that only reads.
const SEND_WITHIN: Duration = Duration::from_secs(60);

/// Where the ranks above call.
pub struct Doorway(TcpListener);

impl Doorway {
    /// Listens at `address`; port 0 lets the system choose one.
    ///
    /// # Errors
    /// If the address cannot be had.
    pub fn open(address: impl ToSocketAddrs) -> io::Result<Self> {
        TcpListener::bind(address).map(Doorway)
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// The lane of rank `rank`, when all ranks are connected; `addresses` are those of all of them, in rank order.
    ///
    /// # Errors
    /// If a rank cannot be reached, or has not called within `patience`.
    pub fn pass(self, rank: usize, addresses: &[SocketAddr], patience: Duration) -> io::Result<Arc<dyn ControlLane>> {
        let one_each: Vec<Vec<SocketAddr>> = addresses.iter().map(|address| vec![*address]).collect();
        self.pass_any(rank, &one_each, patience)
    }

    /// The same where a rank may be reached at one of several addresses, which are tried in order.
    ///
    /// # Errors
    /// As [`Doorway::pass`].
    pub fn pass_any(
        self,
        rank: usize,
        addresses: &[Vec<SocketAddr>],
        patience: Duration,
    ) -> io::Result<Arc<dyn ControlLane>> {
        let deadline = Instant::now() + patience;
        let mut streams: Vec<Option<TcpStream>> = addresses.iter().map(|_| None).collect();
        for (peer, addresses) in addresses[..rank].iter().enumerate() {
            let called = call_any(addresses, rank, streams.len(), deadline);
            let at = || addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(" or ");
            streams[peer] = Some(called.map_err(|error| because(error, format!("rank {peer} at {}", at())))?);
        }
        self.0.set_nonblocking(true)?;
        while streams[rank + 1..].iter().any(Option::is_none) {
            let Some(stream) = self.accept(deadline)? else {
                let missing: Vec<usize> = (rank + 1..streams.len()).filter(|&peer| streams[peer].is_none()).collect();
                let detail = format!("rank(s) {missing:?} did not connect to rank {rank} within {patience:?}");
                return Err(io::Error::new(ErrorKind::TimedOut, detail));
            };
            // Whoever does not say that it is an awaited rank is not one, and is hung up on.
            let greeted = greeted(&stream, streams.len());
            if let Some(peer) = greeted.ok().filter(|&peer| peer > rank && streams[peer].is_none()) {
                streams[peer] = Some(stream);
            }
        }
        Sockets::over(rank, streams, patience.clamp(Duration::from_millis(1), SEND_WITHIN))
    }

    /// The next caller, if one calls in time.
    fn accept(&self, deadline: Instant) -> io::Result<Option<TcpStream>> {
        loop {
            match self.0.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(Some(stream));
                }
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                Err(_) if Instant::now() >= deadline => return Ok(None),
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

fn because(error: io::Error, what: String) -> io::Error {
    io::Error::new(error.kind(), format!("cannot open a control lane to {what}: {error}"))
}

/// The first that answers; each but the last has a part of the time.
fn call_any(addresses: &[SocketAddr], rank: usize, size: usize, deadline: Instant) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(ErrorKind::AddrNotAvailable, "it has no address");
    for (tried, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match call(address, rank, size, left / (addresses.len() - tried) as u32) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

fn call(address: &SocketAddr, rank: usize, size: usize, patience: Duration) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(address, patience)?;
    let numbers = [size, rank].map(|number| (number as u32).to_le_bytes());
    stream.write_all(&[&GREETING[..], numbers.as_flattened()].concat())?;
    Ok(stream)
}

/// The rank that calls from a world of `size`.
fn greeted(mut stream: &TcpStream, size: usize) -> io::Result<usize> {
    stream.set_read_timeout(Some(GREETING_WITHIN))?;
    let mut greeting = [0; 16];
    stream.read_exact(&mut greeting)?;
    stream.set_read_timeout(None)?;
    let number = |at: usize| greeting[at..at + 4].iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte));
    let is_ours = greeting[..8] == GREETING && number(8) == size && number(12) < size;
    if is_ours { Ok(number(12)) } else { Err(ErrorKind::InvalidData.into()) }
}

struct Sockets {
    rank: usize,
    inbox: Arc<Inbox>,
    /// By rank; none to itself.
    peers: Vec<Option<Mutex<TcpStream>>>,
}

impl Sockets {
    fn over(rank: usize, streams: Vec<Option<TcpStream>>, unread: Duration) -> io::Result<Arc<dyn ControlLane>> {
        let inbox = Inbox::new();
        for (peer, stream) in streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(unread))?;
            let (stream, inbox) = (stream.try_clone()?, inbox.clone());
            // It ends with the connection, when both ends have left.
            let reader = thread::Builder::new().name(format!("control {rank} from {peer}"));
            reader.spawn(move || listen(peer, stream, &inbox))?;
        }
        let peers = streams.into_iter().map(|stream| stream.map(Mutex::new)).collect();
        Ok(Arc::new(Sockets { rank, inbox, peers }))
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
        let mut stream = peer.lock().unwrap_or_else(PoisonError::into_inner);
        if stream.write_all(&frame).is_err() {
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
        self.inbox.on_failure(call);
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

/// Posts what `peer` sends, until it leaves or is lost.
fn listen(peer: usize, mut stream: TcpStream, inbox: &Inbox) {
    loop {
        let (signal, is_last) = match read_signal(&mut stream) {
            Ok(Signal::Left) => (Signal::Left, true),
            Ok(signal) => (signal, false),
            Err(reason) => (Signal::Failed { rank: peer, reason, site: None }, true),
        };
        inbox.post(peer, signal);
        if is_last {
            return;
        }
    }
}

/// The next signal, or why there will be none.
fn read_signal(stream: &mut TcpStream) -> Result<Signal, String> {
    let lost = |error: io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => "its control connection closed without a word; its process has ended".to_owned(),
        _ => format!("its control connection broke: {error}"),
    };
    let mut len = [0; 4];
    stream.read_exact(&mut len).map_err(lost)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > FRAME_BYTES_MAX {
        return Err(format!("it sent a control signal of {len} bytes, at most {FRAME_BYTES_MAX} are allowed"));
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).map_err(lost)?;
    Signal::decode(&bytes).map_err(|error| format!("it sent bytes that are no control signal: {error}"))
}
