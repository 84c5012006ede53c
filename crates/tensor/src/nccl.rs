//! Tensors carried by NCCL from one rank's GPU to another's, where ranks share no memory or are to use it all the same.
//!
//! NCCL carries bytes and adds nothing up: parts of a sum are brought together and added in rank order by the kernel that all
//! collectives use, so that sums have the bits of every other engine. All groups of a rank take the stream of collectives, one
//! after the other: kernels of two communicators that wait for other ranks must not keep each other off a GPU.
//!
//! What is under way waits on the GPU for other ranks, and a rank that has ended never comes. So a thread looks at all groups
//! of a rank: it finds what NCCL reports and what takes too long, and ends them, also when the world ends. Whoever waits for
//! the GPU then fails ([`DeviceFailure`]).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::device::{Device, Engine};
use crate::gpu::nccl::{NcclCommunicator, NcclId, NcclMessage, find_nccl};
use crate::gpu::{Cuda, DeviceFailure, EngineError, Event, Gpu};
use crate::lent::{LentTensor, PIECE, Reduction};

/// How often groups are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long after the world's end groups end: other ranks are told first, since a message that is cut off may look whole to
/// who receives it.
const TOLD_WITHIN: Duration = Duration::from_millis(100);
/// How long NCCL may take to be done with a group whose messages are over.
const LEFT_WITHIN: Duration = Duration::from_secs(10);

/// Bytes of a tensor for a rank of the group, or from it; not empty.
#[derive(Debug)]
pub struct LentParcel<'a> {
    pub peer: usize,
    pub tensor: &'a LentTensor,
    pub bytes: Range<usize>,
}

/// All groups of one rank.
#[derive(Debug)]
pub struct NcclRank {
    watch: Arc<NcclWatch>,
    watcher: Option<JoinHandle<()>>,
}

/// What the thread looks at.
struct NcclWatch {
    device: Arc<Device>,
    groups: Mutex<WatchedGroups>,
    news: Condvar,
    timeout: Duration,
    ended: OnceLock<String>,
    /// Is told why this rank has ended its groups.
    tell: Box<dyn Fn(&str) + Send + Sync>,
}

impl std::fmt::Debug for NcclWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclWatch({:?})", self.ended)
    }
}

#[derive(Default)]
struct WatchedGroups {
    groups: Vec<Arc<NcclState>>,
    is_closing: bool,
}

/// What is under way in a group.
#[derive(Debug)]
struct NcclState {
    communicator: NcclCommunicator,
    under_way: Mutex<VecDeque<NcclExchange>>,
}

/// Messages on their way.
#[derive(Debug)]
struct NcclExchange {
    begin: Event,
    end: Event,
    /// When the GPU was seen to have come to them.
    since: Option<Instant>,
}

/// This rank's membership in a group.
#[derive(Debug)]
pub struct NcclGroup {
    ranks: Arc<NcclRank>,
    /// None of one rank, who sends nothing.
    state: Option<Arc<NcclState>>,
    /// All ranks have joined, and leave it together.
    is_connected: bool,
    rank: usize,
    size: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gpu(device: &Device) -> &Gpu {
    let Engine::Accelerator(gpu) = device.engine() else { unreachable!("checked where the rank's were made") };
    gpu
}

fn cuda(device: &Device) -> &Cuda {
    gpu(device).engine().cuda().expect("checked where the rank's were made")
}

impl NcclRank {
    /// For a rank on `device`, which waits no longer than `timeout` for others, and has `tell` called when it ends its groups.
    ///
    /// # Errors
    /// If NCCL is not there, or not for such a device.
    pub fn new(
        device: &Arc<Device>,
        timeout: Duration,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Arc<NcclRank>, EngineError> {
        if !matches!(device.engine(), Engine::Accelerator(gpu) if gpu.engine().cuda().is_some()) {
            return Err(EngineError::NoLibrary { missing: "NCCL is of NVIDIA's GPUs".to_owned() });
        }
        find_nccl()?;
        let watch = Arc::new(NcclWatch {
            device: device.clone(),
            groups: Mutex::default(),
            news: Condvar::new(),
            timeout,
            ended: OnceLock::new(),
            tell: Box::new(tell),
        });
        let watched = watch.clone();
        let thread = thread::Builder::new().name("NCCL's groups".to_owned()).spawn(move || watched.look_on());
        let watcher = Some(thread.unwrap_or_else(|error| panic!("cannot start a thread: {error}")));
        Ok(Arc::new(NcclRank { watch, watcher }))
    }

    /// Joins the group that goes by `id`, when all its ranks do. Ranks join groups in one order.
    ///
    /// # Errors
    /// Why it is not joined: NCCL's reason, or the end that came before.
    pub fn join(self: &Arc<NcclRank>, id: NcclId, rank: usize, size: usize) -> Result<NcclGroup, String> {
        let mut group = NcclGroup { ranks: self.clone(), state: None, is_connected: false, rank, size };
        if size > 1 {
            let communicator = NcclCommunicator::join(cuda(&self.watch.device), id, rank, size)?;
            let state = Arc::new(NcclState { communicator, under_way: Mutex::default() });
            lock(&self.watch.groups).groups.push(state.clone());
            group.state = Some(state);
            group.ready()?;
            group.connect()?;
        }
        group.is_connected = true;
        Ok(group)
    }

    /// Ends all groups, soon: then nothing on the GPU waits for other ranks any more. Does not wait for it.
    pub fn end(&self, reason: &str) {
        self.watch.end(DeviceFailure::Ended { reason: reason.to_owned() }, reason);
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        lock(&self.watch.groups).is_closing = true;
        self.watch.news.notify_all();
        // The last to let go may be the thread itself, which has told of an end.
        let watcher = self.watcher.take().filter(|watcher| watcher.thread().id() != thread::current().id());
        if let Some(watcher) = watcher {
            // It does not panic.
            let _ = watcher.join();
        }
    }
}

impl NcclWatch {
    fn look_on(&self) {
        cuda(&self.device).bind();
        loop {
            let mut held = lock(&self.groups);
            if !held.is_closing && (self.ended.get().is_none() || held.groups.is_empty()) {
                (held, _) = self.news.wait_timeout(held, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner);
            }
            let (groups, is_closing) = (held.groups.clone(), held.is_closing);
            drop(held);
            if is_closing || self.ended.get().is_some() {
                if !is_closing && !groups.is_empty() {
                    thread::sleep(TOLD_WITHIN);
                }
                NcclCommunicator::abort_all(groups.iter().map(|group| &group.communicator));
                lock(&self.groups).groups.retain(|group| !groups.iter().any(|ended| Arc::ptr_eq(group, ended)));
                if is_closing {
                    return;
                }
            } else if let Some((reason, is_remote)) = groups.iter().find_map(|group| group.trouble(self.timeout)) {
                let what = "an exchange with other ranks".to_owned();
                let told = format!("its device fails at {what}: {reason}");
                let failure = match is_remote {
                    true => DeviceFailure::Ended { reason },
                    false => DeviceFailure::Broken { what, reason },
                };
                self.end(failure, &told);
                (self.tell)(&told);
            }
        }
    }

    fn end(&self, failure: DeviceFailure, reason: &str) {
        // Before any group ends: whoever then gets what has not come knows. The first failure stays.
        cuda(&self.device).end_exchange(failure);
        if self.ended.set(reason.to_owned()).is_ok() {
            self.news.notify_all();
        }
    }

    fn check(&self) -> Result<(), String> {
        self.ended.get().map_or(Ok(()), |reason| Err(reason.clone()))
    }

    /// Why a call has failed: by the end, if that has come.
    fn cause(&self, reason: String) -> String {
        self.ended.get().cloned().unwrap_or(reason)
    }
}

impl NcclState {
    /// What has gone wrong, and whether another rank is the cause.
    fn trouble(&self, timeout: Duration) -> Option<(String, bool)> {
        let mut under_way = lock(&self.under_way);
        while under_way.front().is_some_and(|exchange| exchange.end.is_over()) {
            under_way.pop_front();
        }
        if let Some(exchange) = under_way.front_mut().filter(|exchange| exchange.begin.is_over()) {
            let waited = exchange.since.get_or_insert_with(Instant::now).elapsed();
            // Ranks that have not agreed on it yet find out first, and who is missing.
            if waited > 2 * timeout {
                let seconds = waited.as_secs_f64();
                let told = "others have neither sent nor taken what they were to";
                return Some((format!("{told} for {seconds:.1} s, twice parallel.timeout_s"), false));
            }
        }
        drop(under_way);
        self.communicator.failure()
    }
}

impl NcclGroup {
    fn device(&self) -> &Arc<Device> {
        &self.ranks.watch.device
    }

    /// All ranks of the group but this one.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let rank = self.rank;
        (0..self.size).filter(move |peer| *peer != rank)
    }

    /// Waits until NCCL has begun what it was asked for.
    fn ready(&self) -> Result<(), String> {
        let (Some(state), watch) = (&self.state, &self.ranks.watch) else { return Ok(()) };
        let since = Instant::now();
        loop {
            watch.check()?;
            if state.communicator.is_ready().map_err(|reason| watch.cause(reason))? {
                return Ok(());
            }
            if since.elapsed() > watch.timeout {
                let seconds = watch.timeout.as_secs_f64();
                return Err(format!("NCCL has not begun within {seconds:.1} s (parallel.timeout_s)"));
            }
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Sends every rank a byte: what NCCL needs for two ranks' first messages it makes while both are here, so that later calls
    /// wait for nobody.
    fn connect(&self) -> Result<(), String> {
        let bytes = gpu(self.device()).with_workspace(self.device(), 2 * self.size, |bytes| bytes.address());
        let [sent, received] = [0, self.size].map(|first| {
            let message = |peer| NcclMessage { peer, address: bytes + (first + peer) as u64, bytes: 1 };
            self.peers().map(message).collect::<Vec<_>>()
        });
        self.begin(&sent, &received)
    }

    /// Copies `bytes` of `from` to `to` from `first` on.
    pub fn copy(&self, to: &LentTensor, first: usize, from: &LentTensor, bytes: Range<usize>) {
        to.copy(first, from, bytes);
        [to, from].into_iter().for_each(LentTensor::mark);
    }

    /// Sends and receives, in whatever order.
    ///
    /// # Errors
    /// NCCL's reason, or the end that came before.
    pub fn exchange(&self, sent: &[LentParcel], received: &[LentParcel]) -> Result<(), String> {
        let tensors = || sent.iter().chain(received).map(|parcel| parcel.tensor);
        tensors().for_each(LentTensor::await_mark);
        let [sent, received] = [sent, received].map(|parcels| parcels.iter().map(message).collect::<Vec<_>>());
        self.begin(&sent, &received)?;
        tensors().for_each(LentTensor::mark);
        Ok(())
    }

    /// Sends these parcels, receives as many bytes as `own` has from every peer, and writes the reduction of all in rank order
    /// to `to` from an offset on.
    ///
    /// # Errors
    /// As [`NcclGroup::exchange`].
    pub fn reduce(
        &self,
        reduction: Reduction,
        sent: &[LentParcel],
        (own, bytes): (&LentTensor, Range<usize>),
        (to, first): (&LentTensor, usize),
    ) -> Result<(), String> {
        let tensors = || sent.iter().map(|parcel| parcel.tensor).chain([own, to]);
        tensors().for_each(LentTensor::await_mark);
        // All ranks cut all parts at the same places.
        let longest = sent.iter().map(|parcel| parcel.bytes.len()).chain([bytes.len()]).max().unwrap_or(0);
        let piece =
            |of: &Range<usize>, start: usize| of.end.min(of.start + start)..of.end.min(of.start + start + PIECE);
        for start in (0..longest).step_by(PIECE) {
            let parcels = sent.iter().map(|parcel| LentParcel { bytes: piece(&parcel.bytes, start), ..*parcel });
            let sent: Vec<LentParcel> = parcels.filter(|parcel| !parcel.bytes.is_empty()).collect();
            self.reduce_piece(reduction, &sent, (own, piece(&bytes, start)), (to, first + start))?;
        }
        tensors().for_each(LentTensor::mark);
        Ok(())
    }

    fn reduce_piece(
        &self,
        reduction: Reduction,
        sent: &[LentParcel],
        (own, bytes): (&LentTensor, Range<usize>),
        (to, first): (&LentTensor, usize),
    ) -> Result<(), String> {
        let each = bytes.len();
        let sent: Vec<NcclMessage> = sent.iter().map(message).collect();
        if each == 0 {
            return self.begin(&sent, &[]);
        }
        to.with_parts(self.size, each, |parts| {
            own.copy_to((parts, self.rank * each), bytes);
            let part = |peer| NcclMessage { peer, address: parts.address() + (peer * each) as u64, bytes: each };
            self.begin(&sent, &self.peers().map(part).collect::<Vec<_>>())?;
            to.reduce_parts(first, reduction, (parts, self.size, each));
            Ok(())
        })
    }

    fn begin(&self, sent: &[NcclMessage], received: &[NcclMessage]) -> Result<(), String> {
        let watch = &self.ranks.watch;
        watch.check()?;
        let (Some(state), cuda) = (&self.state, cuda(self.device())) else { return Ok(()) };
        if sent.is_empty() && received.is_empty() {
            return Ok(());
        }
        let begin = cuda.exchange_point();
        // SAFETY: whoever lends tensors leaves them where they are until their marks; the rest is the workspace of the stream.
        let begun = unsafe { state.communicator.exchange(cuda, sent, received) };
        begun.map_err(|reason| watch.cause(reason))?;
        self.ready()?;
        lock(&state.under_way).push_back(NcclExchange { begin, end: cuda.exchange_point(), since: None });
        Ok(())
    }

    /// Leaves the group, when its messages are over.
    fn leave(&self, state: &NcclState) -> Result<(), String> {
        cuda(self.device()).finish_exchange();
        let since = Instant::now();
        let mut has_left = state.communicator.has_left(true)?;
        while !has_left && since.elapsed() < LEFT_WITHIN {
            self.ranks.watch.check()?;
            thread::sleep(Duration::from_millis(1));
            has_left = state.communicator.has_left(false)?;
        }
        if has_left { Ok(()) } else { Err("NCCL is not done with the group".to_owned()) }
    }
}

fn message(parcel: &LentParcel) -> NcclMessage {
    let LentParcel { peer, tensor, bytes } = parcel;
    NcclMessage { peer: *peer, address: tensor.address_of(bytes), bytes: bytes.len() }
}

impl Drop for NcclGroup {
    /// What is not left so the rank's thread ends, with all other groups: at the world's end, or when the last is dropped.
    fn drop(&mut self) {
        let Some(state) = self.state.take() else { return };
        let is_well = self.is_connected && self.ranks.watch.check().is_ok() && !thread::panicking();
        if is_well && self.leave(&state).is_ok() {
            lock(&self.ranks.watch.groups).groups.retain(|group| !Arc::ptr_eq(group, &state));
        }
    }
}
