//! Tensors carried by NCCL from one rank's GPU to another's, where ranks share no memory or are to use it all the same.
//!
//! A group has a stream of its own. NCCL carries bytes and adds nothing up: parts of a sum are brought together and added in
//! rank order by the kernel that all collectives use, so that sums have the bits of every other engine.
//!
//! What is under way waits on the GPU for other ranks, and a rank that has ended never comes. So a thread looks at all groups
//! of a rank: it ends them when NCCL reports a failure or nothing comes for too long. Whoever waits for the GPU then learns
//! of the end ([`DeviceFailure::Ended`]).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::device::{Device, Engine};
use crate::gpu::nccl::{NcclCommunicator, NcclId, NcclMessage, find_nccl};
use crate::gpu::{Cuda, DeviceStream, EngineError, Event, Gpu, on_device};
use crate::lent::{LentTensor, PIECE, Reduction};

/// How often groups are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a group may take to be left by all its ranks, which leave it about together.
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
    device: Arc<Device>,
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
    /// The end of each operation, and when it was begun.
    under_way: Mutex<VecDeque<(Event, Instant)>>,
}

/// This rank's membership in a group, and the stream for what the group does.
#[derive(Debug)]
pub struct NcclGroup {
    device: Arc<Device>,
    watch: Arc<NcclWatch>,
    /// None of one rank, who sends nothing.
    state: Option<Arc<NcclState>>,
    /// All ranks have joined, and leave it together.
    is_connected: bool,
    stream: DeviceStream,
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

/// Whether NCCL can carry tensors of this device.
///
/// # Errors
/// What is missing, and where to get it.
fn nccl_for(device: &Device) -> Result<(), EngineError> {
    let is_cuda = matches!(device.engine(), Engine::Accelerator(gpu) if gpu.engine().cuda().is_some());
    if is_cuda { find_nccl() } else { Err(EngineError::NoLibrary { missing: "NCCL is of NVIDIA's GPUs".to_owned() }) }
}

impl NcclRank {
    /// For a rank on `device`, which waits no longer than `timeout` for others, and has `tell` called when it ends its groups.
    ///
    /// # Errors
    /// As [`nccl_for`].
    pub fn new(
        device: &Arc<Device>,
        timeout: Duration,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<NcclRank, EngineError> {
        nccl_for(device)?;
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
        Ok(NcclRank { device: device.clone(), watch, watcher })
    }

    /// Joins the group that goes by `id`; collective over its ranks, and so that of two groups all have joined the same first.
    ///
    /// # Errors
    /// Why it is not joined: NCCL's reason, or the end that came before.
    pub fn join(&self, id: NcclId, rank: usize, size: usize) -> Result<NcclGroup, String> {
        let (device, watch, cuda) = (self.device.clone(), self.watch.clone(), cuda(&self.device));
        let stream = cuda.new_lane();
        let state = match size {
            1 => None,
            _ => {
                let communicator = NcclCommunicator::join(cuda, id, rank, size)?;
                let state = Arc::new(NcclState { communicator, under_way: Mutex::default() });
                lock(&watch.groups).groups.push(state.clone());
                Some(state)
            }
        };
        let mut group = NcclGroup { device, watch, state, is_connected: false, stream, rank, size };
        group.ready()?;
        group.connect()?;
        group.is_connected = true;
        Ok(group)
    }

    /// Ends all groups: nothing on the GPU waits for other ranks any more.
    pub fn end(&self, reason: &str) {
        self.watch.end(reason);
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        lock(&self.watch.groups).is_closing = true;
        self.watch.news.notify_all();
        if let Some(watcher) = self.watcher.take() {
            // It does not panic.
            let _ = watcher.join();
        }
    }
}

impl NcclWatch {
    fn look_on(&self) {
        cuda(&self.device).bind();
        let mut held = lock(&self.groups);
        while !held.is_closing && self.ended.get().is_none() {
            (held, _) = self.news.wait_timeout(held, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner);
            let groups = held.groups.clone();
            drop(held);
            if let Some(reason) = groups.iter().find_map(|group| group.trouble(self.timeout)) {
                self.end(&reason);
                (self.tell)(&reason);
            }
            held = lock(&self.groups);
        }
    }

    fn end(&self, reason: &str) {
        let reason = self.ended.get_or_init(|| reason.to_owned());
        // First, so that whoever then gets what has not come knows.
        cuda(&self.device).end_exchange(reason);
        let groups = lock(&self.groups).groups.clone();
        groups.iter().for_each(|group| group.communicator.abort());
    }

    fn check(&self) -> Result<(), String> {
        self.ended.get().map_or(Ok(()), |reason| Err(reason.clone()))
    }
}

impl NcclState {
    /// What has gone wrong.
    fn trouble(&self, timeout: Duration) -> Option<String> {
        let mut under_way = lock(&self.under_way);
        while under_way.front().is_some_and(|(end, _)| end.is_over()) {
            under_way.pop_front();
        }
        let waited = under_way.front().map(|(_, begun)| begun.elapsed()).unwrap_or_default();
        if waited > timeout {
            let seconds = waited.as_secs_f64();
            return Some(format!("its GPU has waited for {seconds:.1} s for what other ranks were to send or to take"));
        }
        drop(under_way);
        self.communicator.is_ready().err()
    }
}

impl NcclGroup {
    /// Waits until NCCL has begun what it was asked for.
    fn ready(&self) -> Result<(), String> {
        let Some(state) = &self.state else { return Ok(()) };
        let since = Instant::now();
        loop {
            self.watch.check()?;
            if state.communicator.is_ready().map_err(|reason| self.watch.ended.get().cloned().unwrap_or(reason))? {
                return Ok(());
            }
            if since.elapsed() > self.watch.timeout {
                return Err(format!("NCCL has not begun within {:.1} s", self.watch.timeout.as_secs_f64()));
            }
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Sends every rank a byte: what NCCL needs for two ranks' first messages it makes while both are here, so that later calls
    /// wait for nobody.
    fn connect(&self) -> Result<(), String> {
        let Some(state) = &self.state else { return Ok(()) };
        gpu(&self.device).with_workspace(&self.device, self.stream, 2 * self.size, |bytes| {
            let peers = (0..self.size).filter(|peer| *peer != self.rank);
            let [sent, received] = [0, self.size].map(|first| {
                let message = |peer| NcclMessage { peer, address: bytes.address() + (first + peer) as u64, bytes: 1 };
                peers.clone().map(message).collect::<Vec<_>>()
            });
            // SAFETY: the workspace is the stream's alone.
            unsafe { state.communicator.exchange((cuda(&self.device), self.stream), &sent, &received) }
        })?;
        self.ready()
    }

    /// Copies `bytes` of `from` to `to` from `first` on.
    pub fn copy(&self, to: &LentTensor, first: usize, from: &LentTensor, bytes: Range<usize>) {
        to.copy_on(self.stream, first, from, bytes);
        [to, from].into_iter().for_each(|tensor| tensor.mark_on(self.stream));
    }

    /// Sends and receives, in whatever order.
    ///
    /// # Errors
    /// NCCL's reason, or the end that came before.
    pub fn exchange(&self, sent: &[LentParcel], received: &[LentParcel]) -> Result<(), String> {
        let tensors = || sent.iter().chain(received).map(|parcel| parcel.tensor);
        tensors().for_each(|tensor| tensor.after_mark(self.stream));
        let [sent, received] = [sent, received].map(|parcels| parcels.iter().map(message).collect::<Vec<_>>());
        self.begin(&sent, &received)?;
        tensors().for_each(|tensor| tensor.mark_on(self.stream));
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
        tensors().for_each(|tensor| tensor.after_mark(self.stream));
        // All ranks cut all parts at the same places.
        let longest = sent.iter().map(|parcel| parcel.bytes.len()).chain([bytes.len()]).max().unwrap_or(0);
        let piece =
            |of: &Range<usize>, start: usize| of.end.min(of.start + start)..of.end.min(of.start + start + PIECE);
        for start in (0..longest).step_by(PIECE) {
            let sent: Vec<LentParcel> = sent
                .iter()
                .map(|parcel| LentParcel { bytes: piece(&parcel.bytes, start), ..*parcel })
                .filter(|parcel| !parcel.bytes.is_empty())
                .collect();
            self.reduce_piece(reduction, &sent, (own, piece(&bytes, start)), (to, first + start))?;
        }
        tensors().for_each(|tensor| tensor.mark_on(self.stream));
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
        to.with_parts(self.stream, (self.size, each), |parts| {
            own.copy_to(self.stream, (parts, self.rank * each), bytes);
            let peers = (0..self.size).filter(|peer| *peer != self.rank);
            let address = |peer: usize| parts.address() + (peer * each) as u64;
            let received: Vec<_> =
                peers.map(|peer| NcclMessage { peer, address: address(peer), bytes: each }).collect();
            self.begin(&sent, &received)?;
            to.reduce_parts(self.stream, first, reduction, (parts, self.size, each));
            Ok(())
        })
    }

    fn begin(&self, sent: &[NcclMessage], received: &[NcclMessage]) -> Result<(), String> {
        self.watch.check()?;
        let Some(state) = &self.state else { return Ok(()) };
        if sent.is_empty() && received.is_empty() {
            return Ok(());
        }
        // SAFETY: whoever lends tensors leaves them where they are until their marks.
        let begun = unsafe { state.communicator.exchange((cuda(&self.device), self.stream), sent, received) };
        begun.map_err(|reason| self.watch.ended.get().cloned().unwrap_or(reason))?;
        self.ready()?;
        let end = cuda(&self.device).record_end(self.stream);
        lock(&state.under_way).push_back((end, Instant::now()));
        Ok(())
    }
}

fn message(parcel: &LentParcel) -> NcclMessage {
    let LentParcel { peer, tensor, bytes } = parcel;
    NcclMessage { peer: *peer, address: tensor.address_of(bytes), bytes: bytes.len() }
}

impl Drop for NcclGroup {
    /// Ranks leave a group together, or the rank's groups have been ended.
    fn drop(&mut self) {
        let Some(state) = self.state.take() else { return };
        let since = Instant::now();
        let leave = || {
            cuda(&self.device).finish(self.stream);
            gpu(&self.device).drop_workspace(&self.device, self.stream);
            let mut has_left = state.communicator.has_left(true)?;
            while !has_left && since.elapsed() < LEFT_WITHIN && self.watch.ended.get().is_none() {
                thread::sleep(Duration::from_millis(1));
                has_left = state.communicator.has_left(false)?;
            }
            Ok::<_, String>(())
        };
        // Of what failed nobody is left to be told.
        let is_well = self.is_connected && self.watch.check().is_ok() && !thread::panicking();
        let _ = is_well.then(|| on_device(leave));
        state.communicator.abort();
        lock(&self.watch.groups).groups.retain(|group| !Arc::ptr_eq(group, &state));
    }
}
