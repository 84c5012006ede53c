//! Devices that do nothing before somebody waits for it: what a collective's marks do not order comes out wrong.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use guildhall_comm::wrap::{Carried, Wrapper};
use guildhall_comm::{
    Completed, DeviceBuffer, ElementKind, Error, InFlight, Operation, Payload, Pending, Reduce, Request, bf16,
};

use super::courier::{Couriers, CouriersOf};
use super::{Comm, Element};

/// What memory holds that nobody has written, or whose owner uses it for something else.
const NOTHING: u8 = 0xa5;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All that a device was asked for up to some number of jobs.
pub(super) type Mark = (Arc<LateDevice>, usize);

pub(super) struct Job {
    after: Vec<Mark>,
    run: Box<dyn FnOnce() + Send>,
}

#[derive(Default)]
pub(super) struct LateDevice {
    queue: Mutex<JobQueue>,
    done: Condvar,
}

#[derive(Default)]
struct JobQueue {
    /// `None` once it is done or being done.
    jobs: Vec<Option<Job>>,
    /// So many are done.
    done: usize,
}

impl LateDevice {
    /// All that it has been asked for.
    pub(super) fn asked(self: &Arc<LateDevice>) -> Mark {
        (self.clone(), lock(&self.queue).jobs.len())
    }
}

pub(super) fn ask(device: &Arc<LateDevice>, after: Vec<Mark>, run: impl FnOnce() + Send + 'static) -> Mark {
    lock(&device.queue).jobs.push(Some(Job { after, run: Box::new(run) }));
    device.asked()
}

/// Has the device work, in order; what another thread has it do is waited for.
pub(super) fn work_up_to((device, end): &Mark) {
    for at in 0..*end {
        let mut queue = lock(&device.queue);
        while queue.done < at {
            queue = device.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let Some(Job { after, run }) = queue.jobs[at].take() else { continue };
        drop(queue);
        after.iter().for_each(work_up_to);
        run();
        lock(&device.queue).done += 1;
        device.done.notify_all();
    }
    let queue = lock(&device.queue);
    drop(device.done.wait_while(queue, |queue| queue.done < *end).unwrap_or_else(PoisonError::into_inner));
}

pub(super) struct LateBuffer {
    device: Arc<LateDevice>,
    pub(super) memory: Arc<Mutex<Vec<u8>>>,
    pub(super) mark: Mutex<Mark>,
    /// What its owner's next use comes after.
    waits: Mutex<Vec<Mark>>,
    /// Where the elements came from, and go to.
    pub(super) host: Payload,
}

impl fmt::Debug for LateBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} late bytes", self.host.bytes())
    }
}

/// The bytes that take part.
fn bytes(payload: &Payload) -> Vec<u8> {
    fn of<E: Copy, const N: usize>(elements: &[E], bytes: impl Fn(E) -> [u8; N]) -> Vec<u8> {
        elements.iter().flat_map(|&element| bytes(element)).collect()
    }
    match payload {
        Payload::F32(span) => of(span.as_slice(), f32::to_ne_bytes),
        Payload::F64(span) => of(span.as_slice(), f64::to_ne_bytes),
        Payload::Bf16(span) => of(span.as_slice(), bf16::to_ne_bytes),
        Payload::U32(span) => of(span.as_slice(), u32::to_ne_bytes),
        Payload::U64(span) => of(span.as_slice(), u64::to_ne_bytes),
        Payload::U8(span) => span.as_slice().to_vec(),
        other => panic!("{other:?} on the host"),
    }
}

fn elements<E, const N: usize>(bytes: &[u8], element: impl Fn([u8; N]) -> E) -> Vec<E> {
    bytes.as_chunks().0.iter().map(|chunk| element(*chunk)).collect()
}

/// Writes what takes part.
fn set_bytes(payload: &mut Payload, bytes: &[u8]) {
    match payload {
        Payload::F32(span) => span.as_mut_slice().copy_from_slice(&elements(bytes, f32::from_ne_bytes)),
        Payload::F64(span) => span.as_mut_slice().copy_from_slice(&elements(bytes, f64::from_ne_bytes)),
        Payload::Bf16(span) => span.as_mut_slice().copy_from_slice(&elements(bytes, bf16::from_ne_bytes)),
        Payload::U32(span) => span.as_mut_slice().copy_from_slice(&elements(bytes, u32::from_ne_bytes)),
        Payload::U64(span) => span.as_mut_slice().copy_from_slice(&elements(bytes, u64::from_ne_bytes)),
        Payload::U8(span) => span.as_mut_slice().copy_from_slice(bytes),
        other => panic!("{other:?} on the host"),
    }
}

pub(super) fn reduced(kind: ElementKind, reduce: Reduce, parts: &[Vec<u8>]) -> Vec<u8> {
    fn of<E: Element, const N: usize>(
        (reduce, parts): (Reduce, &[Vec<u8>]),
        element: impl Fn([u8; N]) -> E,
        bytes: impl Fn(E) -> [u8; N],
    ) -> Vec<u8>
    where
        Payload: From<Vec<E>>,
    {
        let parts: Vec<Vec<E>> = parts.iter().map(|part| elements(part, &element)).collect();
        let fold = |index: usize| bytes(E::fold(reduce, parts.iter().map(|part| part[index])));
        (0..parts[0].len()).flat_map(fold).collect()
    }
    let parts = (reduce, parts);
    match kind {
        ElementKind::F32 => of(parts, f32::from_ne_bytes, f32::to_ne_bytes),
        ElementKind::F64 => of(parts, f64::from_ne_bytes, f64::to_ne_bytes),
        ElementKind::Bf16 => of(parts, bf16::from_ne_bytes, bf16::to_ne_bytes),
        ElementKind::U32 => of(parts, u32::from_ne_bytes, u32::to_ne_bytes),
        ElementKind::U64 => of(parts, u64::from_ne_bytes, u64::to_ne_bytes),
        ElementKind::U8 => of(parts, u8::from_ne_bytes, u8::to_ne_bytes),
    }
}

pub(super) fn of(buffer: &dyn DeviceBuffer) -> &LateBuffer {
    (buffer as &dyn Any).downcast_ref().expect("all buffers are late ones")
}

impl LateBuffer {
    fn lend(device: &Arc<LateDevice>, host: Payload) -> Payload {
        let memory = Arc::new(Mutex::new(vec![NOTHING; host.bytes()]));
        let (to, written) = (memory.clone(), bytes(&host));
        let lent = ask(device, Vec::new(), move || *lock(&to) = written);
        let (kind, len) = (host.kind(), host.len());
        let buffer = LateBuffer {
            device: device.clone(),
            memory,
            mark: Mutex::new(lent.clone()),
            waits: Mutex::new(vec![lent]),
            host,
        };
        Payload::Device(kind, len, Box::new(buffer))
    }

    pub(super) fn marked(&self) -> Mark {
        lock(&self.mark).clone()
    }

    /// Its owner uses it: for its elements, and then for something else.
    fn use_up(self) -> Payload {
        let LateBuffer { memory, waits, mut host, .. } = self;
        lock(&waits).iter().for_each(work_up_to);
        let held = std::mem::take(&mut *lock(&memory));
        set_bytes(&mut host, &held);
        *lock(&memory) = vec![NOTHING; held.len()];
        host
    }
}

impl DeviceBuffer for LateBuffer {
    fn copy(&self, first: usize, from: &dyn DeviceBuffer, bytes: Range<usize>) {
        let from = of(from);
        let (after, to, source) = (vec![self.marked(), from.marked()], self.memory.clone(), from.memory.clone());
        ask(&self.device, after, move || {
            let piece = lock(&source)[bytes].to_vec();
            lock(&to)[first..first + piece.len()].copy_from_slice(&piece);
        });
    }

    fn reduce(&self, first: usize, reduce: Reduce, from: &[&dyn DeviceBuffer], bytes: Range<usize>) {
        let from: Vec<&LateBuffer> = from.iter().map(|buffer| of(*buffer)).collect();
        let after = from.iter().map(|buffer| buffer.marked()).chain([self.marked()]).collect();
        let sources: Vec<_> = from.iter().map(|buffer| buffer.memory.clone()).collect();
        let (to, kind) = (self.memory.clone(), self.host.kind());
        ask(&self.device, after, move || {
            let parts: Vec<Vec<u8>> = sources.iter().map(|source| lock(source)[bytes.clone()].to_vec()).collect();
            let whole = reduced(kind, reduce, &parts);
            lock(&to)[first..first + whole.len()].copy_from_slice(&whole);
        });
    }

    fn mark(&self) {
        *lock(&self.mark) = self.device.asked();
    }

    fn wait(&self, other: &dyn DeviceBuffer) {
        let mark = of(other).marked();
        lock(&self.waits).push(mark);
    }

    fn settle(&self) {
        work_up_to(&self.device.asked());
    }
}

/// A communicator whose buffers are in the memory of a late device, if it moves that.
struct OnDevice {
    inner: Comm,
    device: Arc<LateDevice>,
}

/// `inner`, whose ranks compute on late devices.
pub(crate) fn on_devices(inner: Comm) -> Comm {
    Arc::new(OnDevice { inner, device: Arc::default() })
}

/// The ranks of a world whose late devices do not reach each other, and have carriers.
pub(crate) fn on_carried_devices(world: Vec<Comm>) -> Vec<Comm> {
    let mail = Arc::default();
    let carried = |inner: Comm| -> Comm {
        let inner = Carried::around(inner);
        assert!(inner.carry_by(Some(Arc::new(CouriersOf(Couriers::of(&mail))))).expect("nobody waits for the world's"));
        Arc::new(OnDevice { inner, device: Arc::default() })
    };
    world.into_iter().map(carried).collect()
}

impl Wrapper for OnDevice {
    fn inner(&self) -> &Comm {
        &self.inner
    }

    fn around(&self, inner: Comm) -> Comm {
        Arc::new(OnDevice { inner, device: self.device.clone() })
    }

    fn start(&self, request: Request) -> Result<Pending, Error> {
        if !self.inner.moves_devices() {
            return self.inner.start(request);
        }
        let lend = |payload: Payload| match payload.is_on_host() {
            true => LateBuffer::lend(&self.device, payload),
            false => payload,
        };
        let operation = match request.operation {
            Operation::Barrier => Operation::Barrier,
            Operation::Broadcast { root, buf } => Operation::Broadcast { root, buf: lend(buf) },
            Operation::AllReduce { reduce, buf } => Operation::AllReduce { reduce, buf: lend(buf) },
            Operation::AllGather { send, recv, counts } => {
                Operation::AllGather { send: lend(send), recv: lend(recv), counts }
            }
            Operation::ReduceScatter { reduce, send, recv, counts } => {
                Operation::ReduceScatter { reduce, send: lend(send), recv: lend(recv), counts }
            }
            Operation::AllToAll { send, send_counts, recv, recv_counts } => {
                Operation::AllToAll { send: lend(send), send_counts, recv: lend(recv), recv_counts }
            }
        };
        Ok(Pending::in_flight(Box::new(OnItsWay(self.inner.start(Request { operation, ..request })?))))
    }
}

struct OnItsWay(Pending);

impl InFlight for OnItsWay {
    fn wait(self: Box<Self>) -> Result<Completed, Error> {
        let host = |payload: Payload| match payload {
            Payload::Device(.., buffer) => {
                let buffer: Box<dyn Any> = buffer;
                buffer.downcast::<LateBuffer>().expect("a rank gets back what it lent").use_up()
            }
            host => host,
        };
        let Completed { send, recv } = self.0.wait()?;
        // Either is used while nobody has waited for the other.
        if recv.len() % 2 == 0 {
            let recv = host(recv);
            return Ok(Completed { send: send.map(host), recv });
        }
        Ok(Completed { send: send.map(host), recv: host(recv) })
    }
}
