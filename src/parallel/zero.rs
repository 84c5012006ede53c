//! ZeRO (Rajbhandari et al. 2020): what belongs to a weight, cut into shares, one on each of the ranks that hold the
//! weight; and weights made whole again from their shares.
//!
//! The holders of a weight are the ranks that sum its gradient ([`super::Placement::holders`]): all data ranks, or for
//! an expert those of its expert-data group. A share is a range of the local weight's elements, whatever their meaning.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Request};
use guildhall_tensor::{Cause, Dtype, Tensor, Value};

use super::flight::{Flight, give_back, payload, tensor};
use super::{Mesh, Packing, Parameters, SyncPlan, Zero};

/// After an update of shares: makes weights whole again where all ranks keep the whole; frozen ones have stayed so. A
/// bucket is on its way while the one before it is put in place. Collective.
///
/// # Errors
/// What a group reports.
pub fn gather_weights(model: &mut dyn Parameters, plan: &SyncPlan, mesh: &Mesh) -> Result<(), Error> {
    if !matches!(mesh.zero(), Zero::Optimizer | Zero::Gradients) {
        return Ok(());
    }
    let mut values = Vec::new();
    model.visit_trained(&mut |weight| values.push(weight.parameter.stored().clone()));
    let mut before: Option<Gathering> = None;
    for (bucket, holders) in plan.buckets() {
        let members = bucket.weights.iter().map(|&number| values[number].clone());
        for members in by_dtype(members.collect()) {
            let next = Gathering::start(members, mesh.group(holders))?;
            before.replace(next).map_or(Ok(()), Gathering::finish)?;
        }
    }
    before.map_or(Ok(()), Gathering::finish)
}

/// Values that can travel in one message.
pub(super) fn by_dtype(values: Vec<Value>) -> impl Iterator<Item = Vec<Value>> {
    let of = move |dtype| values.iter().filter(|value| value.dtype() == dtype).cloned().collect::<Vec<_>>();
    [Dtype::F32, Dtype::Bf16].into_iter().map(of).filter(|values| !values.is_empty())
}

/// Values on their way to being whole again.
#[must_use = "peers count on this collective: finish it"]
pub struct Gathering {
    values: Vec<Value>,
    packing: Packing,
    flight: Flight,
}

impl Gathering {
    /// Starts to make `values`, of one type and of the same holders, whole from the shares of all ranks of `holders`.
    /// Collective.
    ///
    /// # Errors
    /// What the group reports.
    pub fn start(values: Vec<Value>, holders: &Arc<dyn Communicator>) -> Result<Gathering, Error> {
        let (device, dtype) = (values[0].device(), values[0].dtype());
        let lengths: Vec<usize> = values.iter().map(Value::len).collect();
        let (packing, rank) = (Packing::new(&lengths, holders.size()), holders.rank());
        let _charge = device.charge(Cause::Parameters);
        let mut own = Tensor::stale(&device, &[packing.counts[rank]], dtype);
        for (member, value) in values.iter().enumerate() {
            let (share, to) = (packing.share(member, rank), packing.within_rank(member, rank));
            value.with_kept(|kept, first| own.copy_part(to.start, kept, share.start - first..share.end - first));
        }
        // One that is whole already is filled where it is.
        let all = match &values[..] {
            [one] if !one.is_parted() => one.take(),
            _ => Tensor::stale(&device, &[packing.len()], dtype),
        };
        let request = Request::all_gather(payload(holders, own), payload(holders, all), packing.counts.clone());
        let flight = Flight::start(holders, &device, Cause::Parameters, request)?;
        Ok(Gathering { values, packing, flight })
    }

    /// Waits, and puts the whole values where they belong.
    ///
    /// # Errors
    /// What the group reports.
    pub fn finish(self) -> Result<(), Error> {
        let Gathering { values, packing, flight } = self;
        let (device, done) = (values[0].device(), flight.wait()?);
        let _charge = device.charge(Cause::Parameters);
        give_back(&device, done.send);
        if let [one] = &values[..] {
            one.put(tensor(&device, &one.shape(), done.recv));
            return Ok(());
        }
        let all = tensor(&device, &[packing.len()], done.recv);
        for (member, value) in values.iter().enumerate() {
            let mut whole = match value.is_parted() {
                true => Tensor::stale(&device, &value.shape(), value.dtype()),
                false => value.take(),
            };
            packing.unpack(&all, member, &mut whole);
            value.put(whole);
        }
        Ok(())
    }
}
