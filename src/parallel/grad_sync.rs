//! Gradients become global: summed over the ranks that hold the same parameter, and measured once.
//!
//! The loss is a sum over tokens divided by the step's global count of valid tokens, so gradients are plain sums; no
//! group size ever divides. Elements are added in rank order whatever travels with them and whenever, so neither
//! buckets nor overlap change a bit.
//!
//! ```text
//!  last backward ── complete(gradient) ─┬─▶ next of its queue complete? start its all-reduce
//!                                       │         ... backward goes on ...
//!  settle() ────── start what is left ──┴─▶ await all in that order, put gradients back
//! ```

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Completed, Error, Reduce, Request};
use guildhall_tensor::ops::SquareSums;
use guildhall_tensor::{Cause, Device, Gradient, Tensor, to_host};

use super::buckets::{Bucket, SyncPlan};
use super::flight::{Flight, buffer, payload, tensor};
use super::{Axis, Bucketing, Mesh, Packing, Parameters, Zero};

/// The sums of one step's gradients over the ranks that hold their parameters.
///
/// A group's buckets are started in the order of its queue alone, however gradients complete: that is what makes all its
/// ranks issue the same collectives in the same order. When one starts among the collectives of other groups is the same
/// too, as long as parameters come in the same order on every rank's tape. A gradient nothing has contributed to takes
/// part with zeros.
///
/// From [`Zero::Gradients`] on a holder receives the sums of its own share alone, after every micro-batch, and adds them
/// up: a whole gradient does not outlive the collective that takes it.
///
/// Sums may leave as they arrive, for whoever keeps the optimizer's state elsewhere: then nothing of a gradient is left
/// here when its bucket is over.
pub struct GradientSync<'a> {
    plan: &'a SyncPlan,
    mesh: &'a Mesh,
    /// By number of the weight.
    gradients: Vec<Gradient>,
    complete: Vec<bool>,
    /// Whether all that is complete has arrived.
    settled: bool,
    /// With shares: the sums so far.
    shares: Vec<Option<Tensor>>,
    lanes: Vec<QueueProgress>,
    /// Takes the sums.
    away: Option<&'a mut dyn FnMut(Sums)>,
    /// How often all that is complete has arrived.
    settled_times: usize,
}

/// What arrived of a bucket, for whoever keeps it.
pub struct Sums {
    pub message: Tensor,
    pub landings: Vec<Landing>,
    /// These are the first of the step, not to be added to what is there.
    pub are_first: bool,
}

/// Elements of a weight, and where in a message they begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Landing {
    /// Its number in visiting order.
    pub weight: usize,
    pub elements: Range<usize>,
    pub at: usize,
}

/// How far a queue has come.
#[derive(Default)]
struct QueueProgress {
    /// Buckets started.
    begun: usize,
    /// The last of them, under way.
    under_way: VecDeque<Flight>,
}

/// Buckets of a queue that are under way at once where memory is what matters.
const UNDER_WAY: usize = 2;

impl<'a> GradientSync<'a> {
    /// For the weights of `model`, of which `plan` was made.
    pub fn new(plan: &'a SyncPlan, model: &mut dyn Parameters, mesh: &'a Mesh) -> GradientSync<'a> {
        let mut gradients = Vec::new();
        model.visit(&mut |weight| gradients.push(weight.parameter.gradient().clone()));
        let (complete, shares) = (vec![false; gradients.len()], gradients.iter().map(|_| None).collect());
        let lanes = plan.queues.iter().map(|_| QueueProgress::default()).collect();
        let (settled, away, settled_times) = (false, None, 0);
        GradientSync { plan, mesh, gradients, complete, settled, shares, lanes, away, settled_times }
    }

    /// The same, whose sums leave for `away`: those that this rank's optimizer works on.
    pub fn leaving_for(self, away: Option<&'a mut dyn FnMut(Sums)>) -> GradientSync<'a> {
        GradientSync { away, ..self }
    }

    /// Whether gradients travel after every micro-batch, not after the last alone.
    pub fn every_micro_batch(&self) -> bool {
        self.mesh.zero() >= Zero::Gradients
    }

    /// Takes note that nothing more will be added to `gradient` before it travels. With overlap, starts the buckets that
    /// are now complete and whose turn it is.
    ///
    /// # Errors
    /// What a group reports; gradients are then lost.
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

    /// Starts what has not been started, and returns when all that travelled has arrived.
    ///
    /// # Errors
    /// What a group reports; gradients are then lost.
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

    /// Settles, if nobody has since, and leaves in every gradient the sum over its group, or this rank's share of it, or
    /// nothing where sums have left.
    ///
    /// # Errors
    /// As [`GradientSync::settle`].
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

    fn start(&self, bucket: &Bucket, holders: Axis) -> Result<Flight, Error> {
        let (packing, group) = (self.packing(bucket, holders), self.mesh.group(holders));
        let gradients = join(&self.members(bucket), &packing);
        let (device, dtype) = (gradients.device().clone(), gradients.dtype());
        let request = if self.every_micro_batch() {
            let arriving = buffer(&device, &[packing.counts[group.rank()]], dtype);
            Request::reduce_scatter(Reduce::Sum, payload(gradients), payload(arriving), packing.counts)
        } else {
            Request::all_reduce(Reduce::Sum, payload(gradients))
        };
        Flight::start(group, &device, travels_as(bucket), request)
    }

    /// Waits for the first bucket of a queue that is under way.
    fn arrive(&mut self, lane: usize) -> Result<(), Error> {
        let QueueProgress { begun, under_way } = &mut self.lanes[lane];
        let index = *begun - under_way.len();
        let done = under_way.pop_front().expect("one is under way").wait()?;
        let queue = &self.plan.queues[lane];
        let bucket = &queue.buckets[index];
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

    /// Hands on what arrived of a bucket, as far as this rank's optimizer works on it.
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

    /// Adds what arrived of a bucket to the shares.
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

/// Sums every gradient over the ranks that hold its parameter, after a backward that told nobody: for loops that do
/// without overlap.
///
/// # Errors
/// What a group reports; gradients are then lost.
pub fn sync_gradients(model: &mut dyn Parameters, mesh: &Mesh) -> Result<(), Error> {
    let plan = SyncPlan::new(model, Bucketing { bytes: usize::MAX, overlap: false });
    GradientSync::new(&plan, model, mesh).finish()
}

/// One gradient travels as what it is; copies of several are for the journey.
fn travels_as(bucket: &Bucket) -> Cause {
    if bucket.weights.len() == 1 { Cause::Gradients } else { Cause::Communication }
}

/// What arrived of a bucket; what was sent goes back to the device for reuse.
fn arrived(bucket: &Bucket, device: &Arc<Device>, done: Completed) -> Tensor {
    let _charge = device.charge(travels_as(bucket));
    done.send.map(|sent| tensor(device, &[sent.len()], sent));
    tensor(device, &[done.recv.len()], done.recv)
}

/// Gradients of one type as one message. One alone travels in its own memory; of several, each gives its memory back when
/// it is copied.
fn join(gradients: &[&Gradient], packing: &Packing) -> Tensor {
    if let [one] = gradients {
        return one.take();
    }
    let device = gradients[0].device();
    let _charge = device.charge(Cause::Communication);
    packing.pack(&device, gradients[0].dtype(), |member| gradients[member].take())
}

/// Puts what [`join`] made, summed, back where it came from.
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

/// Elements of a gradient that are looked at as f32 at once.
const TILE: usize = 1 << 18;

/// What the squares of a share are summed over: as f32 at once, wherever they are, so that the sum has the same bits.
pub fn norm_tiles(share: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = share.end;
    share.step_by(TILE).map(move |first| first..end.min(first + TILE))
}

/// By weight, the sum of the squares of this rank's share of its gradient, in one tensor: whoever reads it waits once.
///
/// # Panics
/// If the model has no weights.
pub fn gradient_squares(model: &mut dyn Parameters, mesh: &Mesh) -> SquareSums {
    let (mut device, mut weights) = (None, 0);
    model.visit(&mut |weight| {
        device.get_or_insert_with(|| weight.parameter.gradient().device());
        weights += 1;
    });
    let device = device.expect("a model has weights");
    let mut squares = {
        let _charge = device.charge(Cause::Other);
        SquareSums::zeros(&device, weights)
    };
    let mut number = 0;
    model.visit(&mut |weight| {
        let gradient = weight.parameter.gradient();
        let share = mesh.share(&weight.placement, gradient.len());
        let add = |tile: Range<usize>| -> Result<(), Infallible> {
            let tile = share.start + tile.start..share.start + tile.end;
            gradient.with_held(tile.clone(), |held, first| squares.add(number, held, first..first + tile.len()));
            Ok(())
        };
        let Ok(()) = device.for_blocks(share.len(), TILE, add);
        number += 1;
    });
    squares
}

/// The 2-norm of the gradient of all parameters, each counted once wherever it lives. The same on every rank, and as
/// every holder of a weight measures its own share, the same bits at every stage of [`Zero`]. Waits once.
///
/// # Errors
/// What the world reports.
pub fn global_gradient_norm(model: &mut dyn Parameters, mesh: &Mesh) -> Result<f64, Error> {
    let squares = gradient_squares(model, mesh);
    let squares = to_host(&[squares.tensor()]).remove(0).into_f64s();
    global_norm(model, mesh, &squares)
}

/// The same of what this rank's shares of every weight's gradient, in visiting order, add up to when squared.
///
/// # Errors
/// What the world reports.
pub fn global_norm(model: &mut dyn Parameters, mesh: &Mesh, squares: &[f64]) -> Result<f64, Error> {
    let (mut sum, mut squares) = ([0.0], squares.iter());
    model.visit(&mut |weight| {
        let holders = mesh.holders(&weight.placement).size();
        let own = squares.next().expect("one of every weight");
        sum[0] += own / (mesh.copies(&weight.placement) / holders) as f64;
    });
    mesh.world.sum_f64(&mut sum)?;
    Ok(sum[0].sqrt())
}
