//! What carries messages from one rank to another, and one that does so within a process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Point-to-point messages between the ranks of a world. Those of one rank to another with one tag arrive in the order in
/// which they were sent, and meet the receptions of that tag in the order in which these were started. Nothing here waits.
///
/// Errors are texts, without a place: whoever calls knows the operation and its line.
pub trait PointToPoint: Send + 'static {
    /// A message under way.
    type Ticket: Send;

    /// Bytes of the longest message. What is longer travels in parts, a few at a time, between which messages of other
    /// operations pass.
    const BYTES_MAX: usize;

    /// This rank's place in the world.
    fn rank(&self) -> usize;

    /// Ranks of the world.
    fn size(&self) -> usize;

    /// The largest tag.
    fn tag_max(&self) -> u32;

    /// Starts to send `len` bytes to rank `to`.
    ///
    /// # Errors
    /// Why it cannot; so for what follows.
    ///
    /// # Safety
    /// The bytes are valid and nobody writes them until the ticket is done, or for ever if it never is.
    unsafe fn send(&mut self, to: usize, tag: u32, bytes: *const u8, len: usize) -> Result<Self::Ticket, String>;

    /// Starts to receive `len` bytes from rank `from`.
    ///
    /// # Safety
    /// The bytes are valid and nobody else reads or writes them until the ticket is done, or for ever if it never is.
    unsafe fn receive(&mut self, from: usize, tag: u32, bytes: *mut u8, len: usize) -> Result<Self::Ticket, String>;

    /// Whether the message has left, or come; not to be asked again after it has. A message of another length than is
    /// received is an error.
    fn is_done(&mut self, ticket: &mut Self::Ticket) -> Result<bool, String>;
}

/// The posts of a world within this process, in rank order.
pub fn local(size: usize) -> Vec<LocalPost> {
    let routes = Arc::new(Mutex::default());
    (0..size).map(|rank| LocalPost { rank, size, routes: Arc::clone(&routes) }).collect()
}

/// One rank's post of [`local`].
#[derive(Clone, Debug)]
pub struct LocalPost {
    rank: usize,
    size: usize,
    routes: Arc<Mutex<LocalRoutes>>,
}

/// By sender, receiver and tag.
type LocalRoutes = HashMap<(usize, usize, u32), Route>;

#[derive(Debug, Default)]
struct Route {
    /// Messages that nobody has received yet.
    sent: VecDeque<Vec<u8>>,
    /// How many were received.
    received: u64,
    /// How many receptions were started.
    awaited: u64,
}

/// A message of [`LocalPost`].
#[derive(Debug)]
pub enum LocalTicket {
    /// It was copied when it was sent.
    Sent,
    /// The reception with this number of its route, and where its bytes go.
    Awaited { route: (usize, usize, u32), number: u64, bytes: *mut u8, len: usize },
}

// SAFETY: who starts a reception hands the memory over to whoever has the ticket.
unsafe impl Send for LocalTicket {}

impl LocalPost {
    /// Brings a message that was sent to another rank.
    pub(crate) fn bring(&self, to: usize, tag: u32, message: Vec<u8>) {
        self.routes().entry((self.rank, to, tag)).or_default().sent.push_back(message);
    }

    fn routes(&self) -> MutexGuard<'_, LocalRoutes> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PointToPoint for LocalPost {
    type Ticket = LocalTicket;

    /// Few, so that laws also hold for messages in several parts.
    const BYTES_MAX: usize = 4099;

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn tag_max(&self) -> u32 {
        u32::MAX
    }

    unsafe fn send(&mut self, to: usize, tag: u32, bytes: *const u8, len: usize) -> Result<LocalTicket, String> {
        // SAFETY: the caller vouches for the bytes.
        let message = unsafe { std::slice::from_raw_parts(bytes, len) }.to_vec();
        self.bring(to, tag, message);
        Ok(LocalTicket::Sent)
    }

    unsafe fn receive(&mut self, from: usize, tag: u32, bytes: *mut u8, len: usize) -> Result<LocalTicket, String> {
        let key = (from, self.rank, tag);
        let mut routes = self.routes();
        let route = routes.entry(key).or_default();
        route.awaited += 1;
        Ok(LocalTicket::Awaited { route: key, number: route.awaited - 1, bytes, len })
    }

    fn is_done(&mut self, ticket: &mut LocalTicket) -> Result<bool, String> {
        let &mut LocalTicket::Awaited { route: key, number, bytes, len } = ticket else { return Ok(true) };
        let mut routes = self.routes();
        let route = routes.entry(key).or_default();
        if route.received != number {
            return Ok(false);
        }
        let Some(message) = route.sent.pop_front() else { return Ok(false) };
        route.received += 1;
        if message.len() != len {
            return Err(format!("rank {} sent {} bytes where {len} are received", key.0, message.len()));
        }
        // SAFETY: who started the reception vouches for the memory, until now.
        unsafe { bytes.copy_from_nonoverlapping(message.as_ptr(), len) };
        Ok(true)
    }
}
