//! How the ranks of a control lane over TCP find each other: each calls those below it and is called by those above.
//!
//! ```text
//!   caller ── GREETING, ranks of the world, caller, called ──▶ called
//!          ◀──────────────── WELCOME ─────────────────────────   or the end of the connection
//! ```
//!
//! A machine may have addresses that lead nowhere or to another machine, so a rank is called at each of its addresses until
//! it welcomes its caller at one.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::ControlLane;
use super::sockets::Sockets;

/// What a caller begins with; three numbers of four bytes follow.
const GREETING: [u8; 8] = *b"guildctl";

const GREETING_BYTES: usize = GREETING.len() + 12;

/// Where in a greeting its second number is, that of the caller.
const CALLER_AT: usize = GREETING.len() + 4;

/// What a rank answers a caller that it has waited for.
const WELCOME: [u8; 8] = *b"welcome\n";

/// How long a caller may take to say who it is.
const GREETING_WITHIN: Duration = Duration::from_secs(5);

/// How long an address may be silent before the next one is called, too.
const HEAD_START: Duration = Duration::from_millis(250);

/// Ranks that are called at the same time, for each may have silent addresses.
const CALLS_AT_ONCE: usize = 32;

/// Where the ranks above call.
pub struct Doorway(TcpListener);

impl Doorway {
    /// Listens at `address`, the first of them that can be had; port 0 lets the system choose one.
    ///
    /// # Errors
    /// If none can be had.
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

    /// The same where a rank may be reached at one of several addresses, the likeliest first.
    ///
    /// # Errors
    /// As [`Doorway::pass`].
    pub fn pass_any(
        self,
        rank: usize,
        addresses: &[Vec<SocketAddr>],
        patience: Duration,
    ) -> io::Result<Arc<dyn ControlLane>> {
        let size = addresses.len();
        let passing = Passing { rank, size, deadline: Instant::now() + patience, is_in_vain: AtomicBool::new(false) };
        // Both at once: nobody waits for a welcome until others have been reached.
        let (below, above) = thread::scope(|scope| {
            let below = scope.spawn(|| passing.call_each(&addresses[..rank]));
            let above = passing.accept_each(&self.0, rank + 1..size);
            passing.is_in_vain.fetch_or(above.is_err(), Ordering::Relaxed);
            (below.join().expect("calling does not panic"), above)
        });
        let (above, below) = (above?, below?);
        let missing: Vec<usize> = (rank + 1..size).filter(|&peer| above[peer - rank - 1].is_none()).collect();
        if !missing.is_empty() {
            let detail = format!("rank(s) {missing:?} did not connect to rank {rank} within {patience:?}");
            return Err(io::Error::new(ErrorKind::TimedOut, detail));
        }
        let streams = below.into_iter().map(Some).chain([None]).chain(above);
        Sockets::over(rank, streams.collect(), patience)
    }
}

/// A rank of a world of `size` on its way through its doorway.
struct Passing {
    rank: usize,
    size: usize,
    deadline: Instant,
    /// Some rank cannot be reached, so no other needs to be.
    is_in_vain: AtomicBool,
}

impl Passing {
    /// Accepts `callers` and returns their connections in rank order, none of a rank that has not called by the deadline.
    fn accept_each(&self, door: &TcpListener, callers: Range<usize>) -> io::Result<Vec<Option<TcpStream>>> {
        door.set_nonblocking(true)?;
        let (greet, greetings) = mpsc::channel();
        let mut streams: Vec<Option<TcpStream>> = callers.clone().map(|_| None).collect();
        while streams.iter().any(Option::is_none) && Instant::now() < self.deadline && !self.is_in_vain() {
            match door.accept() {
                Ok((stream, _)) => {
                    let (greet, rank, size) = (greet.clone(), self.rank, self.size);
                    let until = self.deadline.min(Instant::now() + GREETING_WITHIN);
                    // On a thread of its own: a caller that says nothing holds up nobody.
                    thread::Builder::new().spawn(move || {
                        // Whoever does not say that it is a rank of this world is hung up on.
                        if let Ok(caller) = greeted(&stream, (rank, size), until) {
                            greet.send((caller, stream)).unwrap_or_default();
                        }
                    })?;
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(1)),
                    // What became of one caller's connection.
                    ErrorKind::Interrupted
                    | ErrorKind::ConnectionAborted
                    | ErrorKind::ConnectionReset
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
                    | ErrorKind::NetworkDown => {}
                    _ => return Err(error),
                },
            }
            for (caller, stream) in greetings.try_iter() {
                // Nor is a rank welcome that is not awaited, or has called before at another of its addresses.
                let is_awaited = callers.contains(&caller) && streams[caller - callers.start].is_none();
                if is_awaited && (&stream).write_all(&WELCOME).is_ok() {
                    streams[caller - callers.start] = Some(stream);
                }
            }
        }
        Ok(streams)
    }

    /// Connections to the first ranks of the world, which may be at these addresses.
    fn call_each(&self, addresses: &[Vec<SocketAddr>]) -> io::Result<Vec<TcpStream>> {
        let next = AtomicUsize::new(0);
        let call_some = || {
            let mut reached = Vec::new();
            loop {
                let peer = next.fetch_add(1, Ordering::Relaxed);
                let Some(addresses) = addresses.get(peer).filter(|_| !self.is_in_vain()) else { return Ok(reached) };
                let called = self.call(peer, addresses);
                self.is_in_vain.fetch_or(called.is_err(), Ordering::Relaxed);
                reached.push((peer, called?));
            }
        };
        let reached: io::Result<Vec<Vec<(usize, TcpStream)>>> = thread::scope(|scope| {
            let callers = addresses.iter().take(CALLS_AT_ONCE).map(|_| scope.spawn(call_some));
            let callers: Vec<_> = callers.collect();
            callers.into_iter().map(|caller| caller.join().expect("calling does not panic")).collect()
        });
        let mut reached: Vec<(usize, TcpStream)> = reached?.into_iter().flatten().collect();
        reached.sort_by_key(|(peer, _)| *peer);
        Ok(reached.into_iter().map(|(_, stream)| stream).collect())
    }

    /// The connection to rank `peer`, which may be at these addresses.
    fn call(&self, peer: usize, addresses: &[SocketAddr]) -> io::Result<TcpStream> {
        call_any(addresses, greeting(self.size, self.rank, peer), self.deadline).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot open a control lane to rank {peer} at {error}"))
        })
    }

    fn is_in_vain(&self) -> bool {
        self.is_in_vain.load(Ordering::Relaxed)
    }
}

/// What rank `caller` of a world of `size` says to rank `called`.
fn greeting(size: usize, caller: usize, called: usize) -> [u8; GREETING_BYTES] {
    let numbers = [size, caller, called].map(|number| (number as u32).to_le_bytes());
    let mut said = [0; GREETING_BYTES];
    said[..GREETING.len()].copy_from_slice(&GREETING);
    said[GREETING.len()..].copy_from_slice(numbers.as_flattened());
    said
}

/// The rank that calls `rank` of a world of `size`.
fn greeted(stream: &TcpStream, (rank, size): (usize, usize), until: Instant) -> io::Result<usize> {
    stream.set_nonblocking(false)?;
    let mut said = greeting(0, 0, 0);
    read_by(stream, &mut said, until)?;
    let caller = *said[CALLER_AT..].first_chunk().expect("a greeting has three numbers");
    let caller = u32::from_le_bytes(caller) as usize;
    if said == greeting(size, caller, rank) { Ok(caller) } else { Err(ErrorKind::InvalidData.into()) }
}

/// The connection at the first of these addresses to welcome its caller. Each is called when those before it have failed or
/// have been silent for a while.
fn call_any(addresses: &[SocketAddr], greeting: [u8; GREETING_BYTES], deadline: Instant) -> io::Result<TcpStream> {
    let (answer, answers) = mpsc::channel();
    let mut later = addresses.iter().copied();
    let mut failures: Vec<(SocketAddr, io::Error)> = Vec::new();
    while failures.len() < addresses.len() {
        if let Some(address) = later.next() {
            let answer = answer.clone();
            // It ends by the deadline, and nobody waits for it who is welcomed elsewhere.
            thread::Builder::new()
                .spawn(move || answer.send((address, call(&address, &greeting, deadline))).unwrap_or_default())?;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let patience = if later.len() > 0 { HEAD_START.min(left) } else { left + HEAD_START };
        match answers.recv_timeout(patience) {
            Ok((_, Ok(stream))) => return Ok(stream),
            Ok((address, Err(error))) => failures.push((address, error)),
            Err(RecvTimeoutError::Timeout) if later.len() > 0 => {}
            Err(_) => break,
        }
    }
    let kind = failures.last().map_or(ErrorKind::TimedOut, |(_, error)| error.kind());
    let is_silent = |address: &&SocketAddr| failures.iter().all(|(failed, _)| failed != *address);
    let silent = addresses.iter().filter(is_silent).map(|address| format!("{address}: no answer"));
    let told: Vec<String> =
        failures.iter().map(|(address, error)| format!("{address}: {error}")).chain(silent).collect();
    let told = if told.is_empty() { "no address".to_owned() } else { told.join(", nor at ") };
    Err(io::Error::new(kind, told))
}

fn call(address: &SocketAddr, greeting: &[u8], deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(address, left)?;
    stream.write_all(greeting)?;
    let mut welcome = [0; WELCOME.len()];
    read_by(&stream, &mut welcome, deadline).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
            io::Error::new(error.kind(), "it hung up: its process has ended, or another one listens there")
        }
        _ => error,
    })?;
    let is_welcome = welcome == WELCOME;
    if is_welcome { Ok(stream) } else { Err(io::Error::new(ErrorKind::InvalidData, "its answer is no rank's")) }
}

/// Fills `bytes`, however slowly they come, until then.
fn read_by(mut stream: &TcpStream, mut bytes: &mut [u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(ErrorKind::TimedOut, "no answer"));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
