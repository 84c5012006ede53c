//! Gradient synchronization: sums every gradient over the ranks that hold its parameter, and computes the global norm.
//!
//! The loss is a sum over tokens divided by the step's global count of valid tokens, so gradients are plain sums and
//! are never divided by a group size. Elements are added in rank order, in whatever bucket and at whatever time they
//! travel, so neither bucketing nor overlap changes a bit.
//!
//! ```text
//!  last backward ── complete(gradient) ──┬─▶ is the queue's next bucket complete? start its all-reduce
//!                                        │         ... backward goes on ...
//!  settle() ── start remaining buckets ──┴─▶ wait for all in that order, put gradients back
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Completed, Error, Reduce, Request};
use guildhall_tensor::ops::SquareSums;
use guildhall_tensor::{Cause, Device, Gradient, Tensor, to_host};

use super::buckets::{Bucket, SyncPlan};
use super::flight::{Flight, arriving, give_back, payload, tensor};
use super::touched::{RowsUnderWay, TouchedRows, rows_here};
use super::{Axis, Bucketing, Mesh, Packing, Parameters, Zero};

/// The sums of one step's gradients over the ranks that hold their parameters.
///
/// A group's buckets are started in the order of its queue, in whatever order gradients complete, so all ranks of the
/// group issue the same collectives in the same order. The interleaving with the collectives of other groups is the
/// same on all ranks too, as long as parameters appear in the same order on every rank's tape. A gradient without any
/// contribution takes part with zeros.
///
/// With ZeRO stages 2 and 3 ([`Zero::Gradients`] and above), each holder receives only its own shard of the reduced
/// gradient, after every micro-batch, and accumulates it; the full gradient is freed when its collective completes.
///
/// With optimizer offload, the reduced gradients of a bucket are handed over as soon as they arrive. The device then
/// keeps nothing of a gradient after its bucket has completed.
pub struct GradientSync<'a> {
    plan: &'a SyncPlan,
    mesh: &'a Mesh,
    /// Indexed by the number of the weight, in visiting order of those that are trained.
    gradients: Vec<Gradient>,
    complete: Vec<bool>,
    /// Which rows each table has here that is only looked up.
    tables: Vec<Option<Range<usize>>>,
    /// The rows of such tables that have a gradient, if only they travel.
    touched: Option<TouchedRows>,
    /// Whether every complete gradient has been reduced.
    settled: bool,
    /// With sharded gradients: the sums over the micro-batches so far.
    shares: Vec<Option<Tensor>>,
    lanes: Vec<QueueProgress>,
    /// With offload: receives the reduced gradients.
    away: Option<&'a mut dyn FnMut(Sums)>,
    /// Number of completed calls of `settle` in this step.
    settled_times: usize,
}

/// The reduced gradients of one bucket, for offload.
pub struct Sums {
    pub message: Tensor,
    pub landings: Vec<Landing>,
    /// These are the step's first sums: they replace the stored ones instead of being added.
    pub are_first: bool,
}

/// A range of a weight's elements, and where it begins in a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Landing {
    /// The weight's number in visiting order of those that are trained.
    pub weight: usize,
    pub elements: Range<usize>,
    pub at: usize,
}

/// Progress of one queue.
#[derive(Default)]
struct QueueProgress {
    /// Number of buckets started.
    begun: usize,
    /// The started buckets that are still in flight.
    under_way: VecDeque<StartedBucket>,
}

enum StartedBucket {
    Whole(Flight),
    /// Of a gradient, the rows that are not zeros on every rank.
    Rows(RowsUnderWay),
}

/// Maximum number of buckets per queue in flight when gradients are sharded; this limits memory.
const UNDER_WAY: usize = 2;

impl<'a> GradientSync<'a> {
    /// Synchronizes the weights of `model`; `plan` was made from the same model.
    pub fn new(plan: &'a SyncPlan, model: &mut dyn Parameters, mesh: &'a Mesh) -> GradientSync<'a> {
        let (mut gradients, mut tables) = (Vec::new(), Vec::new());
        model.visit_trained(&mut |weight| {
            gradients.push(weight.parameter.gradient().clone());
            tables.push(weight.looked_up.then(|| rows_here(weight)));
        });
        let (complete, shares) = (vec![false; gradients.len()], gradients.iter().map(|_| None).collect());
        let lanes = plan.queues.iter().map(|_| QueueProgress::default()).collect();
        let (touched, settled, away, settled_times) = (None, false, None, 0);
        GradientSync { plan, mesh, gradients, complete, tables, touched, settled, shares, lanes, away, settled_times }
    }

    /// Hands the reduced gradients that this rank's optimizer updates to `away`, instead of keeping them.
    pub fn leaving_for(self, away: Option<&'a mut dyn FnMut(Sums)>) -> GradientSync<'a> {
        GradientSync { away, ..self }
    }

    /// Whether rows of a gradient could travel without the others: where each rank gets a whole gradient that has a message
    /// of its own.
    pub fn could_send_rows(&self) -> bool {
        let is_whole = !self.every_micro_batch() && self.away.is_none();
        is_whole
            && self
                .plan
                .buckets()
                .any(|(bucket, axis)| self.table(bucket).is_some() && self.mesh.group(axis).size() > 1)
    }

    /// Sends of tables that are looked up the rows that have a gradient on some rank, and no others: with the same sums.
    pub fn sending_rows(self, touched: Option<TouchedRows>) -> GradientSync<'a> {
        GradientSync { touched, ..self }
    }

    /// The rows of the table that is all of a bucket.
    fn table(&self, bucket: &Bucket) -> Option<Range<usize>> {
        if let [number] = bucket.weights[..] { self.tables[number].clone() } else { None }
    }

    /// Whether gradients are reduced after every micro-batch rather than only after the last.
    pub fn every_micro_batch(&self) -> bool {
        self.mesh.zero() >= Zero::Gradients
    }

    /// Marks `gradient` as complete: nothing more is added to it before it is reduced. With overlap, starts the buckets
    /// that are now complete and whose turn it is.
    ///
    /// # Errors
    /// An error of a communicator; the gradients are then lost.
    pub fn complete(&mut self, gradient: &Gradient) -> Result<(), Error> {
        self.settled = false;
        // Backward completes the last weights first.
        if let Some(number) = self.gradients.iter().rposition(|own| own.is(gradient)) {
            self.complete[number] = true;
        }
        if !self.plan.overlap {
            return Ok(());
        }
        self.start_while(|sync, bucket| bucket.weights.iter().all(|&number| sync.complete[number]))
    }

    /// Starts the remaining buckets, and returns when all buckets have been reduced.
    ///
    /// # Errors
    /// An error of a communicator; the gradients are then lost.
    pub fn settle(&mut self) -> Result<(), Error> {
        self.start_while(|_, _| true)?;
        for lane in 0..self.lanes.len() {
            while !self.lanes[lane].under_way.is_empty() {
                self.arrive(lane)?;
            }
            self.lanes[lane].begun = 0;
        }
        self.complete.fill(false);
        self.settled = true;
        self.settled_times += 1;
        Ok(())
    }

    /// Calls `settle` if a gradient was completed after the last call. Afterwards every gradient holds the sum over its
    /// group, or this rank's shard of it with ZeRO 2 and 3, or nothing with offload.
    ///
    /// # Errors
    /// As for [`GradientSync::settle`].
    pub fn finish(mut self) -> Result<(), Error> {
        if !self.settled {
            self.settle()?;
        }
        if self.away.is_some() {
            let gone = |gradient: &Gradient| Tensor::stale(&gradient.device(), &[0], gradient.dtype());
            self.gradients.iter().for_each(|gradient| gradient.put_part(0, gone(gradient)));
            return Ok(());
        }
        if !self.every_micro_batch() {
            return Ok(());
        }
        for (bucket, holders) in self.plan.buckets() {
            let (packing, rank) = (self.packing(bucket, holders), self.mesh.group(holders).rank());
            for (member, &number) in bucket.weights.iter().enumerate() {
                let sum = self.shares[number].take().expect("every micro-batch settles");
                self.gradients[number].put_part(packing.share(member, rank).start, sum);
            }
        }
        Ok(())
    }

    /// Starts each queue's next buckets as long as they are `ready`.
    fn start_while(&mut self, ready: impl Fn(&Self, &Bucket) -> bool) -> Result<(), Error> {
        for (index, queue) in self.plan.queues.iter().enumerate() {
            while let Some(bucket) = queue.buckets.get(self.lanes[index].begun)
                && ready(self, bucket)
            {
                if self.every_micro_batch() && self.lanes[index].under_way.len() == UNDER_WAY {
                    self.arrive(index)?;
                }
                let started = self.start(bucket, queue.holders)?;
                self.lanes[index].under_way.push_back(started);
                self.lanes[index].begun += 1;
            }
        }
        Ok(())
    }

    fn start(&self, bucket: &Bucket, holders: Axis) -> Result<StartedBucket, Error> {
        let group = self.mesh.group(holders);
        if let (Some(table), Some(touched)) = (self.table(bucket), &self.touched) {
            let gradient = self.gradients[bucket.weights[0]].take();
            return Ok(StartedBucket::Rows(RowsUnderWay::start(group, gradient, (table, touched))?));
        }
        let packing = self.packing(bucket, holders);
        let gradients = join(&self.members(bucket), &packing);
        let (device, dtype) = (gradients.device().clone(), gradients.dtype());
        let request = if self.every_micro_batch() {
            let arriving = arriving(group, &device, &[packing.counts[group.rank()]], dtype);
            Request::reduce_scatter(Reduce::Sum, payload(group, gradients), arriving, packing.counts)
        } else {
            Request::all_reduce(Reduce::Sum, payload(group, gradients))
        };
        Ok(StartedBucket::Whole(Flight::start(group, &device, travels_as(bucket), request)?))
    }

    /// Waits for a queue's oldest bucket in flight.
    fn arrive(&mut self, lane: usize) -> Result<(), Error> {
        let QueueProgress { begun, under_way } = &mut self.lanes[lane];
        let index = *begun - under_way.len();
        let started = under_way.pop_front().expect("one is under way");
        let queue = &self.plan.queues[lane];
        let bucket = &queue.buckets[index];
        let done = match started {
            StartedBucket::Whole(flight) => flight.wait()?,
            StartedBucket::Rows(rows) => {
                self.gradients[bucket.weights[0]].put(rows.wait()?);
                return Ok(());
            }
        };
        let (packing, sums) = (self.packing(bucket, queue.holders), arrived(bucket, &self.gradients[0].device(), done));
        if self.away.is_some() {
            self.send_away(bucket, &packing, self.mesh.group(queue.holders), sums);
        } else if self.every_micro_batch() {
            self.add_shares(bucket, &packing, self.mesh.group(queue.holders).rank(), &sums);
        } else {
            part(&self.members(bucket), &packing, sums);
        }
        Ok(())
    }

    /// Hands over the part of a reduced bucket that this rank's optimizer updates.
    fn send_away(&mut self, bucket: &Bucket, packing: &Packing, group: &Arc<dyn Communicator>, message: Tensor) {
        let (zero, rank) = (self.mesh.zero(), group.rank());
        let own = if zero >= Zero::Optimizer { rank..rank + 1 } else { 0..group.size() };
        let mut landings = Vec::new();
        for (member, &weight) in bucket.weights.iter().enumerate() {
            match zero >= Zero::Gradients {
                true => {
                    let (elements, at) = (packing.share(member, rank), packing.within_rank(member, rank).start);
                    landings.push(Landing { weight, elements, at });
                }
                false => {
                    let shares = packing.shares(member, own.clone());
                    landings.extend(shares.map(|(elements, at)| Landing { weight, elements, at }));
                }
            }
        }
        if let Some(away) = &mut self.away {
            away(Sums { message, landings, are_first: self.settled_times == 0 });
        }
    }

    /// Adds a reduced bucket to the accumulated shards.
    fn add_shares(&mut self, bucket: &Bucket, packing: &Packing, rank: usize, sums: &Tensor) {
        let device = sums.device();
        let _charge = device.charge(Cause::Gradients);
        for (member, &number) in bucket.weights.iter().enumerate() {
            let part = packing.within_rank(member, rank);
            match &mut self.shares[number] {
                Some(share) => share.add_part(sums, part),
                none if bucket.weights.len() == 1 => *none = Some(sums.clone()),
                none => {
                    let share = none.insert(Tensor::stale(device, &[part.len()], sums.dtype()));
                    share.copy_part(0, sums, part);
                }
            }
        }
    }

    fn packing(&self, bucket: &Bucket, holders: Axis) -> Packing {
        let lengths: Vec<usize> = bucket.weights.iter().map(|&number| self.gradients[number].len()).collect();
        Packing::new(&lengths, self.mesh.group(holders).size())
    }

    fn members(&self, bucket: &Bucket) -> Vec<&Gradient> {
        bucket.weights.iter().map(|&number| &self.gradients[number]).collect()
    }
}

/// Sums every gradient over the ranks that hold its parameter, after a backward that did not call
/// [`GradientSync::complete`]. For training loops that do not overlap communication with backward.
///
/// # Errors
/// An error of a communicator; the gradients are then lost.
pub fn sync_gradients(model: &mut dyn Parameters, mesh: &Mesh) -> Result<(), Error> {
    let plan = SyncPlan::new(model, Bucketing { bytes: usize::MAX, overlap: false });
    GradientSync::new(&plan, model, mesh).finish()
}

/// A single gradient is sent in its own buffer; a message of several is a temporary, charged to communication.
fn travels_as(bucket: &Bucket) -> Cause {
    if bucket.weights.len() == 1 { Cause::Gradients } else { Cause::Communication }
}

/// The received tensor of a bucket. The send buffer goes back to the device for reuse.
fn arrived(bucket: &Bucket, device: &Arc<Device>, done: Completed) -> Tensor {
    let _charge = device.charge(travels_as(bucket));
    give_back(device, done.send);
    tensor(device, &[done.recv.len()], done.recv)
}

/// Packs gradients of one type into one message. A single gradient is sent in its own buffer; when several are packed,
/// each one's buffer is freed as soon as it has been copied.
fn join(gradients: &[&Gradient], packing: &Packing) -> Tensor {
    if let [one] = gradients {
        return one.take();
    }
    let device = gradients[0].device();
    let _charge = device.charge(Cause::Communication);
    packing.pack(&device, gradients[0].dtype(), |member| gradients[member].take())
}

/// Unpacks a reduced message of [`join`] into its gradients.
fn part(gradients: &[&Gradient], packing: &Packing, sums: Tensor) {
    if let [one] = gradients {
        return one.put(sums.reshape(&one.shape()));
    }
    let device = sums.device();
    let _charge = device.charge(Cause::Gradients);
    for (member, gradient) in gradients.iter().enumerate() {
        let mut whole = Tensor::stale(device, &gradient.shape(), gradient.dtype());
        packing.unpack(&sums, member, &mut whole);
        gradient.put(whole);
    }
}

/// Elements of a gradient whose squares are summed before they are added to those before, and that are converted to f32
/// together.
const TILE: usize = 1 << 18;

/// The blocks over which a shard's squares are summed. Device and host use the same blocks, so the norm has the same
/// bits.
pub fn norm_tiles(share: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = share.end;
    share.step_by(TILE).map(move |first| first..end.min(first + TILE))
}

/// For each trained weight, the sum of the squares of this rank's shard of the gradient. All are in one tensor, so
/// reading them waits for the device once.
///
/// # Panics
/// If the model has no weights that are trained.
pub fn gradient_squares(model: &mut dyn Parameters, mesh: &Mesh) -> SquareSums {
    let (mut device, mut weights) = (None, 0);
    model.visit_trained(&mut |weight| {
        device.get_or_insert_with(|| weight.parameter.gradient().device());
        weights += 1;
    });
    let device = device.expect("a model has weights to train");
    let mut squares = {
        let _charge = device.charge(Cause::Other);
        SquareSums::zeros(&device, weights)
    };
    let mut number = 0;
    model.visit_trained(&mut |weight| {
        let gradient = weight.parameter.gradient();
        let share = mesh.share(&weight.placement, gradient.len());
        let len = share.len();
        // A holder of nothing need not have a gradient.
        if len > 0 {
            gradient.with_held(share, |held, first| squares.add_tiles(number, held, first..first + len, TILE));
        }
        number += 1;
    });
    squares
}

/// The 2-norm of the gradient of all trained parameters, each counted once however many ranks hold it. It is the same on
/// every rank. Each holder squares only its own shard, so the bits are the same at every stage of [`Zero`]. Waits for
/// the device once.
///
/// # Errors
/// An error of the world's communicator.
pub fn global_gradient_norm(model: &mut dyn Parameters, mesh: &Mesh) -> Result<f64, Error> {
    let squares = gradient_squares(model, mesh);
    let squares = to_host(&[squares.tensor()]).remove(0).into_f64s();
    global_norm(model, mesh, &squares)
}

/// [`global_gradient_norm`] from `squares`: for each trained weight, in visiting order, the sum of the squares of this
/// rank's shard of its gradient.
///
/// # Errors
/// An error of the world's communicator.
pub fn global_norm(model: &mut dyn Parameters, mesh: &Mesh, squares: &[f64]) -> Result<f64, Error> {
    let (mut sum, mut squares) = ([0.0], squares.iter());
    model.visit_trained(&mut |weight| {
        let holders = mesh.holders(&weight.placement).size();
        let own = squares.next().expect("one of every weight");
        sum[0] += own / (mesh.copies(&weight.placement) / holders) as f64;
    });
    mesh.world.sum_f64(&mut sum)?;
    Ok(sum[0].sqrt())
}
