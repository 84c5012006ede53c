//! Gradients become global: summed over the ranks that hold the same parameter, and measured once.
//!
//! The loss is a sum over tokens divided by the step's global count of valid tokens, so gradients are plain sums; no
//! group size ever divides. Elements are added in rank order whatever travels with them and whenever, so neither
//! buckets nor overlap change a bit.
//!
//! ```text
//!  last backward ── complete(gradient) ─┬─▶ next of its queue complete? start its all-reduce
//!                                       │         ... backward goes on ...
//!  finish() ────── start what is left ──┴─▶ await all in that order, put gradients back
//! ```

use guildhall_comm::{Error, Payload, Pending, Reduce, Request};
use guildhall_tensor::ops::sum_of_squares;
use guildhall_tensor::{Cause, Dtype, Gradient, Held, Tensor};

use super::buckets::{Bucket, SyncPlan};
use super::collectives::{payload, tensor};
use super::{Axis, Bucketing, Mesh, Parameters};

/// The sums of one step's gradients over the ranks that hold their parameters.
///
/// A group's buckets are started in the order of its queue alone, however gradients complete: that is what makes all its
/// ranks issue the same collectives in the same order. When one starts among the collectives of other groups is the same
/// too, as long as parameters come in the same order on every rank's tape. A gradient nothing has contributed to takes
/// part with zeros.
pub struct GradientSync<'a> {
    plan: &'a SyncPlan,
    mesh: &'a Mesh,
    /// By number of the weight.
    gradients: Vec<Gradient>,
    complete: Vec<bool>,
    /// By queue: its first buckets, under way.
    started: Vec<Vec<(Pending, Held)>>,
}

impl<'a> GradientSync<'a> {
    /// For the weights of `model`, of which `plan` was made.
    pub fn new(plan: &'a SyncPlan, model: &mut dyn Parameters, mesh: &'a Mesh) -> GradientSync<'a> {
        let mut gradients = Vec::new();
        model.visit(&mut |weight| gradients.push(weight.parameter.gradient().clone()));
        let (complete, started) = (vec![false; gradients.len()], plan.queues.iter().map(|_| Vec::new()).collect());
        GradientSync { plan, mesh, gradients, complete, started }
    }

    /// Takes note that nothing more will be added to `gradient` in this step. With overlap, starts the buckets that are
    /// now complete and whose turn it is.
    ///
    /// # Errors
    /// What a group reports; gradients are then lost.
    pub fn complete(&mut self, gradient: &Gradient) -> Result<(), Error> {
        // Backward completes the last weights first.
        if let Some(number) = self.gradients.iter().rposition(|own| own.is(gradient)) {
            self.complete[number] = true;
        }
        if !self.plan.overlap {
            return Ok(());
        }
        self.start_while(|sync, bucket| bucket.weights.iter().all(|&number| sync.complete[number]))
    }

    /// Starts what has not been started, and returns when every gradient is the sum over its group.
    ///
    /// # Errors
    /// What a group reports; gradients are then lost.
    pub fn finish(mut self) -> Result<(), Error> {
        self.start_while(|_, _| true)?;
        let started = std::mem::take(&mut self.started).into_iter().flatten();
        for (bucket, (pending, held)) in self.plan.queues.iter().flat_map(|queue| &queue.buckets).zip(started) {
            let sum = pending.wait()?.recv;
            drop(held);
            part(&self.members(bucket), sum);
        }
        Ok(())
    }

    /// Starts each queue's next buckets as long as they are `ready`.
    fn start_while(&mut self, ready: impl Fn(&Self, &Bucket) -> bool) -> Result<(), Error> {
        for (index, queue) in self.plan.queues.iter().enumerate() {
            while let Some(bucket) = queue.buckets.get(self.started[index].len())
                && ready(self, bucket)
            {
                let started = self.start(bucket, queue.holders)?;
                self.started[index].push(started);
            }
        }
        Ok(())
    }

    fn start(&self, bucket: &Bucket, holders: Axis) -> Result<(Pending, Held), Error> {
        let gradients = join(&self.members(bucket));
        let device = gradients.device().clone();
        let travelling = payload(gradients);
        // It is no tensor now, and counted all the same.
        let held = device.hold(Cause::Gradients, travelling.bytes() as u64);
        Ok((self.mesh.group(holders).start(Request::all_reduce(Reduce::Sum, travelling))?, held))
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

/// Gradients end to end. One alone travels in its own memory; of several, each gives its memory back when it is copied.
fn join(gradients: &[&Gradient]) -> Tensor {
    if let [one] = gradients {
        return one.take();
    }
    let device = gradients[0].device();
    let _charge = device.charge(Cause::Gradients);
    let length = gradients.iter().map(|gradient| gradient.len()).sum();
    let mut all = Tensor::stale(&device, &[length], Dtype::F32);
    let mut rest = all.f32s_mut();
    for gradient in gradients {
        let (own, after) = rest.split_at_mut(gradient.len());
        own.copy_from_slice(gradient.take().f32s());
        rest = after;
    }
    all
}

/// Puts what [`join`] made, summed, back where it came from.
fn part(gradients: &[&Gradient], sum: Payload) {
    let device = gradients[0].device();
    let _charge = device.charge(Cause::Gradients);
    if let [one] = gradients {
        return one.put(tensor(&device, &one.shape(), sum));
    }
    let all = tensor(&device, &[sum.len()], sum);
    let mut rest = all.f32s();
    for gradient in gradients {
        let (own, after) = rest.split_at(gradient.len());
        gradient.put(Tensor::from_slice(&device, &gradient.shape(), own));
        rest = after;
    }
}

/// The 2-norm of the gradient of all parameters, each counted once wherever it lives. The same on every rank.
///
/// # Errors
/// What the world reports.
pub fn global_gradient_norm(model: &mut dyn Parameters, mesh: &Mesh) -> Result<f64, Error> {
    let mut sum = [0.0];
    model.visit(&mut |weight| {
        let squares = weight.parameter.with_gradient(|gradient| sum_of_squares(gradient));
        sum[0] += squares / mesh.copies(&weight.placement) as f64;
    });
    mesh.world.sum_f64(&mut sum)?;
    Ok(sum[0].sqrt())
}
