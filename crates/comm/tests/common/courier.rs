//! What carries late devices' memory between ranks: queues within the process, one for each pair of a group.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use guildhall_comm::{Communicator, DeviceBuffer, DeviceCarrier, DeviceCarriers, DeviceParcel, Reduce};

use super::late::{LateDevice, Mark, ask, lock, of, reduced, work_up_to};

/// How long a device takes to begin.
const LATE: Duration = Duration::from_micros(50);

/// What ranks of one process have sent each other and nobody has received: by group, sender and receiver.
#[derive(Default)]
pub(super) struct CourierMail {
    sent: Mutex<HashMap<(u64, usize, usize), VecDeque<Vec<u8>>>>,
    news: Condvar,
    next_group: AtomicU64,
}

/// One rank's carriers.
pub(super) struct Couriers {
    mail: Arc<CourierMail>,
    has_ended: Mutex<bool>,
    has_opened: Mutex<bool>,
}

impl Couriers {
    pub(super) fn of(mail: &Arc<CourierMail>) -> Arc<Couriers> {
        Arc::new(Couriers { mail: mail.clone(), has_ended: Mutex::default(), has_opened: Mutex::default() })
    }
}

/// Of one group: does what it is asked for in a queue of its own, by itself and late.
struct Courier {
    couriers: Arc<Couriers>,
    lane: Arc<LateDevice>,
    /// To the thread that has it work.
    asked: Sender<Mark>,
    group: u64,
    rank: usize,
    size: usize,
}

/// [`Couriers`], as carriers outlive them.
pub(super) struct CouriersOf(pub(super) Arc<Couriers>);

impl DeviceCarriers for CouriersOf {
    fn open(&self, group: &Arc<dyn Communicator>) -> Result<Arc<dyn DeviceCarrier>, String> {
        let CouriersOf(couriers) = self;
        // The world's is opened before there are ranks.
        let number = if std::mem::replace(&mut *lock(&couriers.has_opened), true) {
            let drawn = couriers.mail.next_group.fetch_add(1, Relaxed) + 1;
            group.all_gather_u64(&[drawn]).map_err(|error| error.to_string())?[0]
        } else {
            0
        };
        let (rank, size) = (group.rank(), group.size());
        let (asked, is_asked) = channel();
        spawn(move || {
            for mark in is_asked {
                sleep(LATE);
                work_up_to(&mark);
            }
        });
        let (couriers, lane) = (couriers.clone(), Arc::default());
        Ok(Arc::new(Courier { couriers, lane, asked, group: number, rank, size }))
    }

    fn end(&self, _: &str) {
        *lock(&self.0.has_ended) = true;
        let _sent = lock(&self.0.mail.sent);
        self.0.mail.news.notify_all();
    }
}

impl Courier {
    fn check(&self) -> Result<(), String> {
        if *lock(&self.couriers.has_ended) { Err("couriers carry nothing any more".to_owned()) } else { Ok(()) }
    }

    fn send(&self, parcels: &[DeviceParcel]) {
        for DeviceParcel { peer, buffer, bytes } in parcels {
            let (from, bytes) = (of(*buffer), bytes.clone());
            let (mail, route) = (self.couriers.mail.clone(), (self.group, self.rank, *peer));
            let memory = from.memory.clone();
            ask(&self.lane, vec![from.marked()], move || {
                let message = lock(&memory)[bytes].to_vec();
                lock(&mail.sent).entry(route).or_default().push_back(message);
                mail.news.notify_all();
            });
        }
    }

    /// The next message of a peer; nothing of use after the end, and where the two do not agree.
    fn receiving(&self, peer: usize, len: usize) -> impl FnOnce() -> Vec<u8> + Send + 'static {
        let (couriers, route) = (self.couriers.clone(), (self.group, peer, self.rank));
        move || {
            let mut sent = lock(&couriers.mail.sent);
            loop {
                if let Some(mut message) = sent.get_mut(&route).and_then(VecDeque::pop_front) {
                    message.resize(len, 0);
                    return message;
                }
                if *lock(&couriers.has_ended) {
                    return vec![0; len];
                }
                sent = couriers.mail.news.wait(sent).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// What has been asked for is begun; these buffers are used after it.
    fn begin(&self, buffers: &[&dyn DeviceBuffer]) {
        let mark = self.lane.asked();
        buffers.iter().for_each(|buffer| *lock(&of(*buffer).mark) = mark.clone());
        // A thread that has ended has met with a panic, which is told.
        let _ = self.asked.send(mark);
    }
}

impl DeviceCarrier for Courier {
    fn copy(&self, (to, first): (&dyn DeviceBuffer, usize), from: &dyn DeviceBuffer, bytes: Range<usize>) {
        let (target, source) = (of(to), of(from));
        let (written, read) = (target.memory.clone(), source.memory.clone());
        ask(&self.lane, vec![target.marked(), source.marked()], move || {
            let piece = lock(&read)[bytes].to_vec();
            lock(&written)[first..first + piece.len()].copy_from_slice(&piece);
        });
        self.begin(&[to, from]);
    }

    fn exchange(&self, sent: &[DeviceParcel], received: &[DeviceParcel]) -> Result<(), String> {
        self.check()?;
        self.send(sent);
        for DeviceParcel { peer, buffer, bytes } in received {
            let (to, bytes) = (of(*buffer), bytes.clone());
            let (memory, receive) = (to.memory.clone(), self.receiving(*peer, bytes.len()));
            ask(&self.lane, vec![to.marked()], move || {
                let message = receive();
                lock(&memory)[bytes].copy_from_slice(&message);
            });
        }
        let buffers: Vec<&dyn DeviceBuffer> = sent.iter().chain(received).map(|parcel| parcel.buffer).collect();
        self.begin(&buffers);
        Ok(())
    }

    fn reduce(
        &self,
        reduce: Reduce,
        sent: &[DeviceParcel],
        (own, bytes): (&dyn DeviceBuffer, Range<usize>),
        (to, first): (&dyn DeviceBuffer, usize),
    ) -> Result<(), String> {
        self.check()?;
        self.send(sent);
        let (len, rank) = (bytes.len(), self.rank);
        // Nobody sends what has no bytes.
        let receive: Vec<_> = (0..self.size).map(|peer| (peer != rank).then(|| self.receiving(peer, len))).collect();
        let (source, target) = (of(own), of(to));
        let (kind, read, written) = (target.host.kind(), source.memory.clone(), target.memory.clone());
        if len > 0 {
            ask(&self.lane, vec![source.marked(), target.marked()], move || {
                let own = lock(&read)[bytes].to_vec();
                let parts = receive.into_iter().map(|receive| receive.map_or_else(|| own.clone(), |receive| receive()));
                let whole = reduced(kind, reduce, &parts.collect::<Vec<_>>());
                lock(&written)[first..first + whole.len()].copy_from_slice(&whole);
            });
        }
        let buffers: Vec<&dyn DeviceBuffer> = sent.iter().map(|parcel| parcel.buffer).chain([own, to]).collect();
        self.begin(&buffers);
        Ok(())
    }
}
