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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::ControlLane;
use super::sockets::Sockets;

/// What a caller begins with; three numbers of four bytes follow.
const GREETING: [u8; 8] = *b"guildctl";

const GREETING_BYTES: usize = GREETING.len() + 12;

/// What a rank answers one whom it has waited for.
const WELCOME: [u8; 8] = *b"welcome\n";

/// How long a caller may take to say who it is.
const GREETING_WITHIN: Duration = Duration::from_secs(5);

/// How long an address may be silent before the next one is called, too.
const HEAD_START: Duration = Duration::from_millis(250);

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
        let deadline = Instant::now() + patience;
        let size = addresses.len();
        let cannot_call = AtomicBool::new(false);
        // Both at once: nobody waits for a welcome until others have been reached.
        let (below, above) = thread::scope(|scope| {
            let below = scope.spawn(|| {
                let below = call_each(&addresses[..rank], (rank, size), deadline);
                cannot_call.store(below.is_err(), Ordering::Relaxed);
                below
            });
            let above = self.accept_each(rank + 1..size, (rank, size), deadline, &cannot_call);
            (below.join().expect("calling does not panic"), above)
        });
        let (below, above) = (below?, above?);
        let missing: Vec<usize> = (rank + 1..size).filter(|&peer| above[peer - rank - 1].is_none()).collect();
        if !missing.is_empty() {
            let detail = format!("rank(s) {missing:?} did not connect to rank {rank} within {patience:?}");
            return Err(io::Error::new(ErrorKind::TimedOut, detail));
        }
        let streams = below.into_iter().map(Some).chain([None]).chain(above);
        Sockets::over(rank, streams.collect(), patience)
    }

    /// The connections of `callers` to this rank of a world of so many; none of who has not called by `deadline`.
    fn accept_each(
        &self,
        callers: Range<usize>,
        (rank, size): (usize, usize),
        deadline: Instant,
        is_in_vain: &AtomicBool,
    ) -> io::Result<Vec<Option<TcpStream>>> {
        self.0.set_nonblocking(true)?;
        let mut streams: Vec<Option<TcpStream>> = callers.clone().map(|_| None).collect();
        while streams.iter().any(Option::is_none) && !is_in_vain.load(Ordering::Relaxed) {
            let stream = match self.0.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                Err(_) if Instant::now() >= deadline => break,
                Err(_) => {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
            };
            // Whoever does not say that it is an awaited rank is not one, and is hung up on.
            let Ok(caller) = greeted(&stream, rank, size) else { continue };
            let is_awaited = callers.contains(&caller) && streams[caller - callers.start].is_none();
            if is_awaited && (&stream).write_all(&WELCOME).is_ok() {
                streams[caller - callers.start] = Some(stream);
            }
        }
        Ok(streams)
    }
}

/// The rank that calls this one of a world of `size`.
fn greeted(mut stream: &TcpStream, rank: usize, size: usize) -> io::Result<usize> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(GREETING_WITHIN))?;
    let mut said = [0; GREETING_BYTES];
    stream.read_exact(&mut said)?;
    stream.set_read_timeout(None)?;
    let (greeting, numbers) = said.split_at(GREETING.len());
    let numbers: Vec<usize> =
        numbers.as_chunks().0.iter().map(|bytes: &[u8; 4]| u32::from_le_bytes(*bytes) as usize).collect();
    let is_ours = greeting == GREETING && numbers[0] == size && numbers[2] == rank;
    if is_ours { Ok(numbers[1]) } else { Err(ErrorKind::InvalidData.into()) }
}

/// Connections of `rank` to the first ranks, which may be at these addresses.
fn call_each(
    addresses: &[Vec<SocketAddr>],
    (rank, size): (usize, usize),
    deadline: Instant,
) -> io::Result<Vec<TcpStream>> {
    let call = |(peer, addresses): (usize, &Vec<SocketAddr>)| {
        let numbers = [size, rank, peer].map(|number| (number as u32).to_le_bytes());
        let greeting = [&GREETING[..], numbers.as_flattened()].concat();
        let because = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot open a control lane to rank {peer} at {error}"))
        };
        call_any(addresses, &greeting, deadline).map_err(because)
    };
    addresses.iter().enumerate().map(call).collect()
}

/// The connection at the first of these addresses to welcome its caller. Each is called when those before it have failed or
/// have been silent for a while.
fn call_any(addresses: &[SocketAddr], greeting: &[u8], deadline: Instant) -> io::Result<TcpStream> {
    let (answer, answers) = mpsc::channel();
    let mut later = addresses.iter().copied();
    let mut failures: Vec<(SocketAddr, io::Error)> = Vec::new();
    while failures.len() < addresses.len() {
        if let Some(address) = later.next() {
            let (answer, greeting) = (answer.clone(), greeting.to_vec());
            // Whoever is welcomed elsewhere does not wait for it.
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
    let silent = |address: &&SocketAddr| failures.iter().all(|(failed, _)| failed != *address);
    let silent = addresses.iter().filter(silent).map(|address| format!("{address}: no answer"));
    let told = failures.iter().map(|(address, error)| format!("{address}: {error}")).chain(silent);
    let told: Vec<String> = told.collect();
    let told = if told.is_empty() { "no address".to_owned() } else { told.join(", nor at ") };
    Err(io::Error::new(kind, told))
}

fn call(address: &SocketAddr, greeting: &[u8], deadline: Instant) -> io::Result<TcpStream> {
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(address, left())?;
    stream.write_all(greeting)?;
    stream.set_read_timeout(Some(left()))?;
    let mut welcome = [0; WELCOME.len()];
    stream.read_exact(&mut welcome).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => io::Error::new(ErrorKind::TimedOut, "no answer"),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
            io::Error::new(ErrorKind::ConnectionRefused, "it waits for no such rank")
        }
        _ => error,
    })?;
    stream.set_read_timeout(None)?;
    let is_welcome = welcome == WELCOME;
    if is_welcome { Ok(stream) } else { Err(io::Error::new(ErrorKind::InvalidData, "its answer is no rank's")) }
}
