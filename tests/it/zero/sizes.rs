//! An optimizer on a device that knows sizes alone counts what the host's counts: by cause, at its peaks and at the end.

use std::fs;
use std::sync::Arc;

use guildhall::model::{Model, Sizes};
use guildhall::optim::{OffloadTarget, Optimizer, Settings};
use guildhall::parallel::{GradientSync, Mesh, Parameters, Sums, SyncPlan, gather_weights};
use guildhall_comm::sizes;
use guildhall_tensor::{Account, Cause, Device, Dtype, to_host};

use super::{Keeping, ways};
use crate::tiny::{BUCKETING, HYPER, mixtral};
use crate::world::{ONE, on_mesh, shape};

/// Bytes by cause, live and at the peak, and the peak of all.
type Bytes = (Vec<[u64; 2]>, u64);

/// What a rank's device and its host count over an optimizer's life, and what was moved between them.
#[derive(Debug, PartialEq)]
struct Counted {
    made: Bytes,
    stepped: Bytes,
    host: Option<Bytes>,
    moved: Option<u64>,
}

fn bytes(account: &Account) -> Bytes {
    let by_cause = Cause::ALL.map(|cause| [account.live(cause), account.peak(cause)]);
    (by_cause.to_vec(), account.peak_total())
}

/// An optimizer is made and takes two steps of two micro-batches.
fn counted(device: &Arc<Device>, mesh: &Mesh, sizes: &Sizes, keeping: &Keeping) -> Counted {
    let mesh = &mesh.clone().with_zero(keeping.zero);
    let mut model = Model::new(device, sizes, mesh);
    let settings = Settings { hyper: HYPER, tile: keeping.tile, offload: keeping.offload.clone() };
    let mut optimizer = Optimizer::new(device, &mut model, mesh, settings).unwrap();
    let (plan, made) = (SyncPlan::new(&mut model, BUCKETING), bytes(device.account()));
    for step in 1..=2 {
        summed_gradients(&mut model, &mut optimizer, (&plan, mesh));
        let squares = optimizer.gradient_squares(&mut model, mesh).unwrap();
        to_host(&[squares.tensor()]);
        optimizer.step(&mut model, step, 1e-3, 1.0).unwrap();
        gather_weights(&mut model, &plan, mesh).unwrap();
    }
    let moved = optimizer.moved().map(|moved| moved.bytes);
    Counted { made, stepped: bytes(device.account()), host: optimizer.host().map(bytes), moved }
}

fn summed_gradients(model: &mut Model, optimizer: &mut Optimizer, (plan, mesh): (&SyncPlan, &Mesh)) {
    let takes_sums = optimizer.takes_sums();
    let mut keep = |sums| optimizer.keep(sums);
    let away: Option<&mut dyn FnMut(Sums)> = if takes_sums { Some(&mut keep) } else { None };
    let mut sync = GradientSync::new(plan, model, mesh).leaving_for(away);
    for is_last in [false, true] {
        let travels = is_last || sync.every_micro_batch();
        model.visit(&mut |weight| {
            weight.parameter.with_gradient(|gradient| gradient.fill(0.5));
            if travels {
                sync.complete(weight.parameter.gradient()).unwrap();
            }
        });
        if travels {
            sync.settle().unwrap();
        }
    }
    sync.finish().unwrap();
}

#[test]
fn an_optimizer_of_sizes_counts_what_the_hosts_does() {
    let (folder, none) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let absent = none.path().join("state");
    for (dtype, gradients) in [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)] {
        let model = Sizes { dtype, gradients, ..mixtral() };
        for mesh_shape in [ONE, shape(2, 1), shape(4, 2)] {
            for (keeping, there) in ways(folder.path()).iter().zip(ways(&absent)) {
                let want = on_mesh(mesh_shape, |_, mesh| counted(&Device::new(1), mesh, &model, keeping));
                for (rank, want) in want.iter().enumerate() {
                    let what = format!("{dtype:?}, {gradients:?}, {mesh_shape:?}, rank {rank}, {keeping:?}");
                    let peaks = Cause::ALL.iter().zip(&want.stepped.0);
                    let of = |cause| peaks.clone().find(|(of, _)| **of == cause).map_or(0, |(_, bytes)| bytes[1]);
                    assert!(of(Cause::Optimizer) > 0 && of(Cause::Gradients) > 0, "{what}: {want:?}");
                    assert_eq!(want.host.is_some(), keeping.offload == OffloadTarget::Host, "{what}");
                    let device = Device::sizes(1);
                    let world = sizes::world(rank, mesh_shape.ranks, Arc::new(|_, _| ()), Arc::new(|_, _| None));
                    let mesh = Mesh::of(world, mesh_shape).unwrap();
                    assert_eq!(counted(&device, &mesh, &model, &there), *want, "{what}");
                    let launches = device.books().expect("sizes").launches();
                    assert!(launches.keys().any(|(_, kernel)| kernel.starts_with("adamw")), "{what}: {launches:?}");
                }
            }
        }
    }
    assert!(!absent.exists() && fs::read_dir(none.path()).unwrap().count() == 0, "sizes need no folder");
}
