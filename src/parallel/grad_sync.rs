//! Gradients become global: summed over the ranks that hold the same parameter, and measured once.
//!
//! The loss is a sum over tokens divided by the step's global count of valid tokens, so gradients are plain sums; no
//! group size ever divides. Elements are added in rank order whatever travels with them and whenever, so neither
//! buckets nor overlap change a bit.
//!
//! ```text
//!  last backward ── complete(gradient) ─┬─▶ bucket full? start its all-reduce, in the plan's order
//!                                       │         ... backward goes on ...
//!  finish() ────── start what is left ──┴─▶ await all in that order, put gradients back
//! ```

use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Payload, Pending, Reduce, Request};
use guildhall_tensor::ops::sum_of_squares;
use guildhall_tensor::{Cause, Dtype, Gradient, Held, Tensor};

use super::buckets::{Bucket, SyncPlan};
use super::collectives::{payload, tensor};
use super::{Bucketing, Mesh, Parameters, Spread};

/// The sums of one step's gradients over the ranks that hold their parameters.
///
/// Buckets are started in the plan's order alone, however gradients complete: that, and a tape with the same ops on
/// every rank, is what makes all ranks issue the same collectives in the same order. A gradient nothing has contributed
/// to takes part with zeros.
pub struct GradientSync<'a> {
    plan: &'a SyncPlan,
    mesh: &'a Mesh,
    /// By number of the weight.
    gradients: Vec<Gradient>,
    complete: Vec<bool>,
    /// The plan's first buckets, under way.
    started: Vec<(Pending, Held)>,
}

impl<'a> GradientSync<'a> {
    /// For the weights of `model`, of which `plan` was made.
    pub fn new(plan: &'a SyncPlan, model: &mut dyn Parameters, mesh: &'a Mesh) -> GradientSync<'a> {
        let mut gradients = Vec::new();
        model.visit(&mut |weight| gradients.push(weight.parameter.gradient().clone()));
        GradientSync { plan, mesh, complete: vec![false; gradients.len()], gradients, started: Vec::new() }
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
        while self.plan.overlap
            && let Some(bucket) = self.plan.buckets.get(self.started.len())
            && bucket.weights.iter().all(|&number| self.complete[number])
        {
            self.start(bucket)?;
        }
        Ok(())
    }

    /// Starts what has not been started, and returns when every gradient is the sum over its group.
    ///
    /// # Errors
    /// What a group reports; gradients are then lost.
    pub fn finish(mut self) -> Result<(), Error> {
        for bucket in &self.plan.buckets[self.started.len()..] {
            self.start(bucket)?;
        }
        for (bucket, (pending, held)) in self.plan.buckets.iter().zip(std::mem::take(&mut self.started)) {
            let sum = pending.wait()?.recv;
            drop(held);
            part(&self.members(bucket), sum);
        }
        Ok(())
    }

    fn start(&mut self, bucket: &Bucket) -> Result<(), Error> {
        let gradients = join(&self.members(bucket));
        let device = gradients.device().clone();
        let travelling = payload(gradients);
        // It is no tensor now, and counted all the same.
        let held = device.hold(Cause::Gradients, travelling.bytes() as u64);
        let pending = self.group(bucket.spread).start(Request::all_reduce(Reduce::Sum, travelling))?;
        self.started.push((pending, held));
        Ok(())
    }

    fn members(&self, bucket: &Bucket) -> Vec<&Gradient> {
        bucket.weights.iter().map(|&number| &self.gradients[number]).collect()
    }

    /// The ranks whose copies of such a weight are one.
    fn group(&self, spread: Spread) -> &'a Arc<dyn Communicator> {
        match spread {
            Spread::Replicated => &self.mesh.world,
            Spread::Expert => &self.mesh.expert_data,
        }
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
/// What the expert group reports.
pub fn global_gradient_norm(model: &mut dyn Parameters, mesh: &Mesh) -> Result<f64, Error> {
    let (mut replicated, mut experts) = (0.0, [0.0]);
    model.visit(&mut |weight| {
        let squares = weight.parameter.with_gradient(|gradient| sum_of_squares(gradient));
        match weight.placement.spread {
            Spread::Replicated => replicated += squares,
            Spread::Expert => experts[0] += squares,
        }
    });
    mesh.expert.sum_f64(&mut experts)?;
    Ok((replicated + experts[0]).sqrt())
}
