//! A rank's share of the machine: its threads, its engine, and memory that is counted and reused ([`crate::pool`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::account::{Account, Cause, Charge};
use crate::books::{Books, Phase};
use crate::cpu::gemm::Blocking;
use crate::gpu::{EngineError, Gpu, SimulatedLimits};
use crate::kernel_times::{KernelTime, KernelTimes};
use crate::pool::Free;
use crate::standby::Standby;
use crate::team::Team;

/// So many parts for each thread leave something to do for threads that come later.
const GUEST_RUNS: usize = 4;

/// Threads and memory of one rank. Cheap to share; every tensor holds one.
#[derive(Debug)]
pub struct Device {
    threads: usize,
    /// There once some work has been shared.
    team: OnceLock<Team>,
    /// What does parts of its work while other ranks wait.
    standby: Option<Arc<Standby>>,
    blocking: Blocking,
    engine: Engine,
    is_wide: bool,
    account: Account,
    multiply_adds: AtomicU64,
    crossings: AtomicU64,
    free: Mutex<Free>,
    scope: Mutex<Arc<str>>,
    /// There once somebody has asked.
    times: OnceLock<KernelTimes>,
}

/// What runs kernels.
#[derive(Debug)]
pub(crate) enum Engine {
    /// This processor, on host memory.
    Host,
    /// Something that has memory of its own.
    Accelerator(Gpu),
    /// Nothing runs: what a kernel would have done is noted.
    Sizes(Books),
}

impl Device {
    /// A device whose kernels use up to `threads` threads, one of which is the calling one.
    pub fn new(threads: usize) -> Arc<Device> {
        Device::blocked(threads, Blocking::default())
    }

    /// The same, whose products are divided as its processor does best.
    pub fn blocked(threads: usize, blocking: Blocking) -> Arc<Device> {
        Device::beside(threads, blocking, None)
    }

    /// The same of one rank of several in a process: while others wait, their threads do parts of its work.
    pub fn beside(threads: usize, blocking: Blocking, standby: Option<Arc<Standby>>) -> Arc<Device> {
        assert!(threads > 0, "a device needs at least one thread");
        Device::made(threads, (blocking, standby), Engine::Host, false)
    }

    /// A device whose tensors have sizes and no elements: everything that runs on it allocates, charges and counts as it
    /// would on the host with as many threads, and computes nothing.
    pub fn sizes(threads: usize) -> Arc<Device> {
        Device::sizes_of(threads, false)
    }

    /// The same where an accelerator would allocate, charge and count, if it `is_wide`.
    pub fn sizes_of(threads: usize, is_wide: bool) -> Arc<Device> {
        Device::made(threads, <_>::default(), Engine::Sizes(Books::default()), is_wide)
    }

    /// A device whose kernels are those of accelerators, compiled for the host and run there in memory that is not the
    /// host's; every result is compared with that of the CPU's kernel. Products use up to `threads` threads.
    ///
    /// # Errors
    /// If kernels cannot be compiled here.
    pub fn simulated(threads: usize) -> Result<Arc<Device>, EngineError> {
        Device::simulated_with(threads, SimulatedLimits::default())
    }

    /// The same, of which there is an end.
    ///
    /// # Errors
    /// As [`Device::simulated`].
    pub fn simulated_with(threads: usize, limits: SimulatedLimits) -> Result<Arc<Device>, EngineError> {
        Ok(Device::accelerated(threads, Gpu::simulated(threads, limits)?))
    }

    /// NVIDIA's GPU of this number. With `checks` every result is compared with that of the CPU's kernel, which uses up to
    /// `threads` threads.
    ///
    /// # Errors
    /// If a library is missing, there is no such GPU, or it is too old.
    pub fn cuda(number: usize, threads: usize, checks: bool) -> Result<Arc<Device>, EngineError> {
        Ok(Device::accelerated(threads, Gpu::cuda(number, threads, checks)?))
    }

    pub(crate) fn accelerated(threads: usize, gpu: Gpu) -> Arc<Device> {
        Device::made(threads, <_>::default(), Engine::Accelerator(gpu), true)
    }

    fn made(
        threads: usize,
        (blocking, standby): (Blocking, Option<Arc<Standby>>),
        engine: Engine,
        is_wide: bool,
    ) -> Arc<Device> {
        let (multiply_adds, crossings) = (AtomicU64::new(0), AtomicU64::new(0));
        let (account, free, scope) = (Account::new(), Mutex::default(), Mutex::new("".into()));
        let (times, team) = (OnceLock::new(), OnceLock::new());
        Arc::new(Device {
            threads,
            team,
            standby,
            blocking,
            engine,
            is_wide,
            account,
            multiply_adds,
            crossings,
            free,
            scope,
            times,
        })
    }

    /// What does parts of its work while other ranks of its process wait.
    pub fn standby(&self) -> Option<&Arc<Standby>> {
        self.standby.as_ref()
    }

    /// How products are divided.
    pub fn blocking(&self) -> &Blocking {
        &self.blocking
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Whether tensors have elements here.
    pub fn has_data(&self) -> bool {
        !matches!(self.engine, Engine::Sizes(_))
    }

    /// What kernels would have done so far, where nothing runs.
    pub fn books(&self) -> Option<&Books> {
        match &self.engine {
            Engine::Host | Engine::Accelerator(_) => None,
            Engine::Sizes(books) => Some(books),
        }
    }

    /// Whether tensors are in memory that is not the host's.
    pub fn has_own_memory(&self) -> bool {
        matches!(self.engine, Engine::Accelerator(_))
    }

    /// Whether it takes much at once to keep it busy: an accelerator, or sizes that stand for one.
    pub(crate) fn is_wide(&self) -> bool {
        self.is_wide
    }

    /// Whether a kernel of one takes tensors of the other.
    pub(crate) fn share_memory(one: &Arc<Device>, other: &Arc<Device>) -> bool {
        Arc::ptr_eq(one, other) || !one.has_own_memory() && !other.has_own_memory()
    }

    /// Names the part of the model that the following kernels belong to.
    pub(crate) fn set_scope(&self, scope: &Rc<str>) {
        *self.scope.lock().unwrap_or_else(PoisonError::into_inner) = (**scope).into();
        if let Engine::Sizes(books) = &self.engine {
            books.set_scope(scope);
        }
    }

    /// The part of the model whose kernels ran last.
    pub fn scope(&self) -> Arc<str> {
        self.scope.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How long each kernel has taken since the call before; nothing at the first, from which on they are timed.
    pub fn take_kernel_times(&self) -> BTreeMap<&'static str, KernelTime> {
        self.times.get_or_init(KernelTimes::default).take()
    }

    /// Waits until kernels are done, which run on where the caller does not wait for them: for whoever measures times.
    pub fn wait(&self) {
        if let Engine::Accelerator(gpu) = &self.engine {
            gpu.synchronize();
        }
    }

    /// Of each kernel of a simulated accelerator that has been launched, the launch whose blocks had the most to do: bytes of
    /// the largest operand, and how many blocks had anything to do.
    pub fn block_shares(&self) -> BTreeMap<&'static str, [u64; 2]> {
        match &self.engine {
            Engine::Accelerator(gpu) => gpu.shares(),
            Engine::Host | Engine::Sizes(_) => BTreeMap::new(),
        }
    }

    /// Runs a kernel, or what the host does between kernels and a measurement should tell by a name of its own.
    pub fn timed<R>(&self, kernel: &'static str, run: impl FnOnce() -> R) -> R {
        let Some(times) = self.kernel_times() else { return run() };
        let begun = Instant::now();
        let result = run();
        self.wait();
        times.add(kernel, begun);
        result
    }

    /// Where they are kept, if somebody has asked for them.
    pub(crate) fn kernel_times(&self) -> Option<&KernelTimes> {
        self.times.get()
    }

    /// How often somebody has waited for elements to come to the host ([`crate::to_host`]).
    pub fn crossings(&self) -> u64 {
        self.crossings.load(Ordering::Relaxed)
    }

    pub(crate) fn count_crossing(&self) {
        self.crossings.fetch_add(1, Ordering::Relaxed);
    }

    /// Threads a kernel may use.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// What lives here and why.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Multiply-adds of all matrix products so far, attention's aside.
    pub fn multiply_adds(&self) -> u64 {
        self.multiply_adds.load(Ordering::Relaxed)
    }

    /// Counts a product of two matrices with `rows`, `inner` and `cols`.
    pub(crate) fn count_product(&self, rows: usize, inner: usize, cols: usize) {
        let dims = [rows, inner, cols].map(|n| n as u64);
        self.multiply_adds.fetch_add(dims.iter().product(), Ordering::Relaxed);
        if let Engine::Sizes(books) = &self.engine {
            books.add_product(dims);
        }
    }

    /// Counts `multiply_adds` of attention, where nothing runs.
    pub(crate) fn count_attended(&self, multiply_adds: f64) {
        if let Engine::Sizes(books) = &self.engine {
            books.add_attended(multiply_adds as u64);
        }
    }

    /// Calls `f` with every `len` of `all` elements. Where there are only sizes, those between the first and the last are
    /// alike: one stands for them.
    ///
    /// # Errors
    /// The first of `f`.
    pub fn for_blocks<E>(
        &self,
        all: usize,
        len: usize,
        mut f: impl FnMut(Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut starts, block) = ((0..all).step_by(len), |first: usize| first..all.min(first + len));
        let (Engine::Sizes(books), 4..) = (&self.engine, starts.len()) else {
            return starts.try_for_each(|first| f(block(first)));
        };
        let (times, middle) = (books.times(), starts.len() as u64 - 2);
        f(block(0))?;
        books.set_times(times * middle);
        let done = f(block(len));
        books.set_times(times);
        done?;
        f(block((middle as usize + 1) * len))
    }

    /// What follows stands for so many like it, where somebody keeps books.
    pub fn stand_for(&self, times: u64) {
        if let Engine::Sizes(books) = &self.engine {
            books.set_times(times);
        }
    }

    /// What follows belongs to `phase`, where somebody keeps books. What it belonged to.
    pub(crate) fn set_phase(&self, phase: Phase) -> Phase {
        let Engine::Sizes(books) = &self.engine else { return phase };
        let before = books.phase();
        books.set_phase(phase);
        before
    }

    /// Until the guard is dropped, new tensors are charged to `cause`.
    pub fn charge(&self, cause: Cause) -> Charge<'_> {
        self.account.charge(cause)
    }

    /// Counts `bytes` for `cause` until the guard is dropped: for memory that [`crate::Tensor::into_window`] handed out.
    pub fn hold(self: &Arc<Device>, cause: Cause, bytes: u64) -> Held {
        Held::new(self.clone(), cause, bytes)
    }

    pub(crate) fn free(&self) -> MutexGuard<'_, Free> {
        // A panic while holding the lock leaves only fewer or more free buffers, never a broken list.
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Splits `0..n` into one range per thread (fewer if a range would get under `least`) and runs them in parallel.
    /// The split depends on nothing but `n`, `least` and the number of threads, so sums per range are reproducible.
    pub fn for_ranges(&self, n: usize, least: usize, f: impl Fn(Range<usize>) + Sync) {
        let parts = self.threads.min(n / least.max(1)).max(1);
        if parts == 1 {
            return f(0..n);
        }
        self.share((0..parts).map(|part| n * part / parts..n * (part + 1) / parts), f);
    }

    /// Parts of work that does not depend on how it is divided: more than threads where threads of other ranks may come.
    pub(crate) fn runs(&self) -> usize {
        if self.standby.is_some() { GUEST_RUNS * self.threads } else { self.threads }
    }

    /// Calls `f` with each part, on those of the device's threads that are free, and returns when all have returned.
    pub(crate) fn share<P>(&self, parts: P, f: impl Fn(P::Item) + Sync)
    where
        P: IntoIterator<Item: Send, IntoIter: Send>,
    {
        self.team.get_or_init(|| Team::beside(self.threads, self.standby.clone())).share(parts, f);
    }
}

/// Bytes that are a tensor's no more and still held, as by a collective under way. Counted until dropped.
#[derive(Debug)]
pub struct Held {
    device: Arc<Device>,
    cause: Cause,
    bytes: u64,
}

impl Held {
    pub(crate) fn new(device: Arc<Device>, cause: Cause, bytes: u64) -> Held {
        device.account().add(cause, bytes);
        Held { device, cause, bytes }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.device.account().remove(self.cause, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inside what stands for others, too, and whatever comes after.
    #[test]
    fn blocks_of_sizes_are_noted_as_often_as_there_are() {
        for (all, len) in [(0, 3), (1, 3), (9, 3), (10, 3), (12, 3), (100, 7)] {
            let device = Device::sizes(1);
            let books = device.books().unwrap();
            device.stand_for(5);
            let (mut seen, mut total) = (Vec::new(), 0);
            let done: Result<(), ()> = device.for_blocks(all, len, |block| {
                books.launch("block", block.len());
                total += block.len() as u64 * books.times();
                seen.push(block);
                Ok(())
            });
            done.unwrap();
            assert_eq!((books.times(), total), (5, 5 * all as u64), "{all} by {len}: {seen:?}");
            let blocks = books.launches().values().map(|found| [found.count, found.bytes]).next().unwrap_or_default();
            assert_eq!(blocks, [5 * all.div_ceil(len) as u64, 5 * all as u64], "{all} by {len}");
            assert_eq!(device.for_blocks(all, len, |_| Err(())).is_err(), all > 0);
            assert_eq!(books.times(), 5, "{all} by {len}, after an error");
        }
    }
}
