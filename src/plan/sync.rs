//! Gradients become sums over their groups, and weights whole again, of sizes: as `src/parallel/{grad_sync,zero}.rs` have
//! it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use guildhall_tensor::{Cause, Dtype};

use super::books::{Books, When};
use super::layout::{Offload, Task};
use super::model::Weight;
use super::moves::Group;
use super::sketch::{Array, Gradient};
use crate::parallel::{Axis, Bucket, SyncPlan};

/// The sums of one step's gradients.
pub(super) struct Sync {
    books: Rc<Books>,
    task: Task,
    rank: usize,
    weights: Vec<Weight>,
    plan: SyncPlan,
    complete: RefCell<Vec<bool>>,
    lanes: RefCell<Vec<Lane>>,
    /// With shares: the sums so far.
    shares: RefCell<Vec<Option<Array>>>,
    /// With state elsewhere: the sums that are on their way there.
    leaving: RefCell<Option<Array>>,
}

/// How far a queue has come.
#[derive(Default)]
struct Lane {
    begun: usize,
    /// What travels and, if that is something else, what arrives.
    under_way: VecDeque<(Array, Option<Array>)>,
}

/// Buckets of a queue under way at once where memory is what matters.
const UNDER_WAY: usize = 2;

impl Sync {
    pub(super) fn new(books: &Rc<Books>, task: &Task, rank: usize, weights: &[Weight]) -> Sync {
        let size = |weight: &Weight| {
            let (dtype, len) = (weight.gradient.dtype(), weight.gradient.len() as usize);
            (weight.holders, dtype, len * dtype.bytes())
        };
        let sizes: Vec<_> = weights.iter().map(size).collect();
        let plan = SyncPlan::of(&sizes, task.layout.bucketing);
        Sync {
            books: books.clone(),
            task: task.clone(),
            rank,
            weights: weights.to_vec(),
            complete: RefCell::new(vec![false; weights.len()]),
            lanes: RefCell::new(plan.queues.iter().map(|_| Lane::default()).collect()),
            shares: RefCell::new(weights.iter().map(|_| None).collect()),
            leaving: RefCell::default(),
            plan,
        }
    }

    pub(super) fn every_micro_batch(&self) -> bool {
        self.task.layout.zero >= 2
    }

    pub(super) fn complete(&self, gradient: &Gradient) {
        if let Some(number) = self.weights.iter().rposition(|weight| weight.gradient.is(gradient)) {
            self.complete.borrow_mut()[number] = true;
        }
        if self.plan.overlap {
            let complete = self.complete.borrow();
            self.start_while(When::Behind, |bucket| bucket.weights.iter().all(|&number| complete[number]));
        }
    }

    pub(super) fn settle(&self) {
        self.start_while(When::Now, |_| true);
        for (index, lane) in self.lanes.borrow_mut().iter_mut().enumerate() {
            while !lane.under_way.is_empty() {
                self.arrive(index, lane);
            }
            lane.begun = 0;
        }
        self.complete.borrow_mut().fill(false);
    }

    /// Leaves every share where the optimizer looks for it.
    pub(super) fn finish(&self) {
        drop(self.leaving.replace(None));
        for (weight, share) in self.weights.iter().zip(self.shares.borrow_mut().iter_mut()) {
            if let Some(share) = share.take() {
                drop(weight.gradient.replace(Some(share)));
            }
        }
    }

    fn start_while(&self, when: When, ready: impl Fn(&Bucket) -> bool) {
        for (index, queue) in self.plan.queues.iter().enumerate() {
            let lane = &mut self.lanes.borrow_mut()[index];
            while let Some(bucket) = queue.buckets.get(lane.begun).filter(|bucket| ready(bucket)) {
                if self.every_micro_batch() && lane.under_way.len() == UNDER_WAY {
                    self.arrive(index, lane);
                }
                lane.under_way.push_back(self.start(bucket, queue.holders, when));
                lane.begun += 1;
            }
        }
    }

    fn members<'a>(&'a self, bucket: &'a Bucket) -> impl Iterator<Item = &'a Gradient> {
        bucket.weights.iter().map(|&number| &self.weights[number].gradient)
    }

    fn group(&self, holders: Axis) -> Group {
        self.task.group(holders, self.rank)
    }

    /// One gradient travels in its own memory; several are copied, each giving its memory back.
    fn start(&self, bucket: &Bucket, holders: Axis, when: When) -> (Array, Option<Array>) {
        self.members(bucket).for_each(Gradient::contribute);
        let travelling = match bucket.weights.len() {
            1 => {
                self.members(bucket).next().and_then(|gradient| gradient.replace(None)).expect("it was contributed to")
            }
            _ => {
                let all = self.gradients(self.members(bucket).map(Gradient::len).sum(), bucket);
                self.members(bucket).for_each(|gradient| drop(gradient.replace(None)));
                all
            }
        };
        let group = self.group(holders);
        if !self.every_micro_batch() {
            group.all_reduce(&self.books, when, travelling.bytes());
            return (travelling, None);
        }
        let arriving = self.gradients(self.members(bucket).map(|gradient| group.share(gradient.len())).sum(), bucket);
        group.reduce_scatter(&self.books, when, (travelling.bytes(), arriving.bytes()));
        (travelling, Some(arriving))
    }

    /// Memory for gradients of a bucket's type.
    fn gradients(&self, len: u64, bucket: &Bucket) -> Array {
        let dtype = bucket.weights.first().map_or(Dtype::F32, |&number| self.weights[number].gradient.dtype());
        Array::new(&self.books, Cause::Gradients, (1, len), dtype)
    }

    fn arrive(&self, index: usize, lane: &mut Lane) {
        let queue = &self.plan.queues[index];
        let bucket = &queue.buckets[lane.begun - lane.under_way.len()];
        let Some((travelled, arrived)) = lane.under_way.pop_front() else { return };
        if self.task.layout.offload != Offload::Nowhere {
            drop(self.leaving.replace(Some(arrived.unwrap_or(travelled))));
            return;
        }
        let Some(sums) = arrived else {
            match bucket.weights.len() {
                1 => self.members(bucket).for_each(|gradient| drop(gradient.replace(Some(travelled.clone())))),
                _ => self.members(bucket).for_each(Gradient::contribute),
            }
            return;
        };
        drop(travelled);
        let (group, mut shares) = (self.group(queue.holders), self.shares.borrow_mut());
        for &number in &bucket.weights {
            let len = group.share(self.weights[number].gradient.len());
            match &mut shares[number] {
                Some(_) => {}
                none if bucket.weights.len() == 1 => *none = Some(sums.clone()),
                none => *none = Some(self.gradients(len, bucket)),
            }
        }
    }

    /// Weights whose shares were updated apart are told to all their holders, bucket after bucket.
    pub(super) fn gather_weights(&self) {
        if !matches!(self.task.layout.zero, 1 | 2) {
            return;
        }
        let mut before = None;
        for (bucket, holders) in self.plan.buckets() {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                let of = bucket.weights.iter().map(|&number| &self.weights[number].value);
                let lengths: Vec<u64> = of.filter(|value| value.dtype == dtype).map(Array::len).collect();
                if lengths.is_empty() {
                    continue;
                }
                let group = self.group(holders);
                let array = |len| Array::new(&self.books, Cause::Parameters, (1, len), dtype);
                let own = array(lengths.iter().map(|&len| group.share(len)).sum());
                group.all_gather(&self.books, own.bytes());
                // One weight is filled where it is.
                let all = (lengths.len() > 1).then(|| array(lengths.iter().sum()));
                before = Some((own, all));
            }
        }
        drop(before);
    }
}
