//! Gradients become global: summed over the ranks that hold the same parameter, and measured once.
//!
//! The loss is a sum over tokens divided by the step's global count of valid tokens, so gradients are plain sums; no
//! group size ever divides.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Reduce, Request};
use guildhall_tensor::Cause;
use guildhall_tensor::ops::sum_of_squares;

use super::collectives::{payload, tensor};
use super::{Mesh, Parameters, Spread, Weight};

/// Sums every gradient over the ranks that hold its parameter. All sums are under way before the first is awaited.
///
/// # Errors
/// What a group reports; gradients are then lost.
pub fn sync_gradients(model: &mut dyn Parameters, mesh: &Mesh) -> Result<(), Error> {
    let mut started = Vec::new();
    let mut failure = None;
    model.visit(&mut |weight| {
        if failure.is_none() {
            match start(weight, mesh) {
                Ok(pending) => started.push(pending),
                Err(error) => failure = Some(error),
            }
        }
    });
    if let Some(error) = failure {
        return Err(error);
    }
    let sums = started.into_iter().map(|pending| Ok(pending.wait()?.recv)).collect::<Result<Vec<_>, Error>>()?;
    let mut sums = sums.into_iter();
    model.visit(&mut |weight| {
        let value = weight.parameter.value();
        let sum = sums.next().expect("one sum a weight");
        let _charge = value.device().charge(Cause::Gradients);
        let gradient = tensor(value.device(), value.shape(), sum);
        weight.parameter.put_gradient(gradient);
    });
    Ok(())
}

#[track_caller]
fn start(weight: &Weight, mesh: &Mesh) -> Result<guildhall_comm::Pending, Error> {
    let gradient = payload(weight.parameter.take_gradient());
    group_of(weight, mesh).start(Request::all_reduce(Reduce::Sum, gradient))
}

/// The ranks whose copies of this weight are one.
fn group_of<'a>(weight: &Weight, mesh: &'a Mesh) -> &'a Arc<dyn Communicator> {
    match weight.placement.spread {
        Spread::Replicated => &mesh.world,
        Spread::Expert => &mesh.expert_data,
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
