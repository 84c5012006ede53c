//! What a step costs one rank, added up while it is walked: bytes alive by cause, messages, arithmetic.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use guildhall_comm::Collective;
use guildhall_tensor::Cause;

use crate::parallel::Axis;

const CAUSES: usize = Cause::ALL.len();

/// Bytes by cause, in the order of [`Cause::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes(pub [u64; CAUSES]);

impl Bytes {
    pub fn of(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }

    /// The cause that most is for.
    pub fn largest(&self) -> Cause {
        let most = Cause::ALL.iter().max_by_key(|&&cause| self.of(cause));
        *most.expect("there are causes")
    }

    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, &bytes| sum.saturating_add(bytes))
    }
}

/// When a message leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum When {
    /// The rank waits for it.
    Now,
    /// While backward goes on.
    Behind,
    /// While the part of the model before the one that needs it computes.
    Ahead,
}

/// Calls and bytes sent to others, by `crates/comm/src/wrap/bytes.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub calls: u64,
    pub bytes: u64,
}

/// Messages of one kind in one group.
pub type Messages = BTreeMap<(Axis, Collective, When), Traffic>;

/// Which part of a step work belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Forward,
    /// Forward done again on the way back.
    Again,
    Backward,
    Update,
}

/// Which part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Embedding,
    Attention,
    FeedForward,
    /// Router, gate, the sorting and the weighing of rows.
    Routing,
    Experts,
    Head,
    Optimizer,
}

impl Part {
    pub fn name(self) -> &'static str {
        match self {
            Part::Embedding => "embedding",
            Part::Attention => "attention",
            Part::FeedForward => "feed-forward",
            Part::Routing => "routing",
            Part::Experts => "experts",
            Part::Head => "head",
            Part::Optimizer => "optimizer",
        }
    }
}

/// Arithmetic of matrix products, the bytes these read and write, and those of everything else.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    pub flops: f64,
    pub product_bytes: f64,
    pub other_bytes: f64,
}

/// The accounts of one rank's step.
#[derive(Debug)]
pub(super) struct Books {
    live: Cell<[u64; CAUSES]>,
    at_peak: Cell<[u64; CAUSES]>,
    peaks: Cell<[u64; CAUSES]>,
    messages: RefCell<Messages>,
    work: RefCell<BTreeMap<(Phase, Part), Work>>,
    pub(super) phase: Cell<Phase>,
    pub(super) part: Cell<Part>,
    /// How often what is walked once happens.
    pub(super) times: Cell<u64>,
}

impl Books {
    pub(super) fn new() -> Rc<Books> {
        Rc::new(Books {
            live: Cell::default(),
            at_peak: Cell::default(),
            peaks: Cell::default(),
            messages: RefCell::default(),
            work: RefCell::default(),
            phase: Cell::new(Phase::Forward),
            part: Cell::new(Part::Embedding),
            times: Cell::new(1),
        })
    }

    pub(super) fn add(&self, cause: Cause, bytes: u64) {
        let mut live = self.live.get();
        // More than 64 bits hold is more than any machine has.
        live[cause as usize] = live[cause as usize].saturating_add(bytes);
        self.live.set(live);
        let mut peaks = self.peaks.get();
        peaks[cause as usize] = peaks[cause as usize].max(live[cause as usize]);
        self.peaks.set(peaks);
        if Bytes(live).total() > self.at_peak().total() {
            self.at_peak.set(live);
        }
    }

    pub(super) fn remove(&self, cause: Cause, bytes: u64) {
        let mut live = self.live.get();
        live[cause as usize] = live[cause as usize].saturating_sub(bytes);
        self.live.set(live);
    }

    /// What was alive when the most was.
    pub(super) fn at_peak(&self) -> Bytes {
        Bytes(self.at_peak.get())
    }

    /// The most of each cause, at whatever time.
    pub(super) fn peaks(&self) -> Bytes {
        Bytes(self.peaks.get())
    }

    pub(super) fn send(&self, axis: Axis, collective: Collective, when: When, bytes: u64) {
        let (mut messages, times) = (self.messages.borrow_mut(), self.times.get());
        let sum = messages.entry((axis, collective, when)).or_default();
        sum.calls += times;
        sum.bytes += bytes * times;
    }

    pub(super) fn messages(&self) -> Messages {
        self.messages.borrow().clone()
    }

    /// A product of `rows` by `inner` by `outer`, its operands and result in f32.
    pub(super) fn product(&self, rows: u64, inner: u64, outer: u64) {
        let (m, k, n) = (rows as f64, inner as f64, outer as f64);
        let flops = 2.0 * m * k * n;
        self.work(Work { flops, product_bytes: 4.0 * (m * k + k * n + m * n), other_bytes: 0.0 });
    }

    /// Memory read and written besides products.
    pub(super) fn pass(&self, bytes: u64) {
        self.work(Work { other_bytes: bytes as f64, ..Work::default() });
    }

    pub(super) fn work(&self, work: Work) {
        let (mut all, times) = (self.work.borrow_mut(), self.times.get() as f64);
        let sum = all.entry((self.phase.get(), self.part.get())).or_default();
        sum.flops += work.flops * times;
        sum.product_bytes += work.product_bytes * times;
        sum.other_bytes += work.other_bytes * times;
    }

    pub(super) fn all_work(&self) -> BTreeMap<(Phase, Part), Work> {
        self.work.borrow().clone()
    }
}
