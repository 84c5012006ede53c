//! The best layout: every possible mesh and micro-batch of a recipe, walked and timed; those that do not fit, and why.

use guildhall_tensor::Cause;
use rayon::prelude::*;

use super::books::Bytes;
use super::devices::Machine;
use super::layout::{Layout, Load, Task};
use super::step::step;
use super::time::seconds;
use crate::parallel::{Degrees, MeshShape, Order};

/// One layout and what comes of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub mesh: MeshShape,
    pub micro_batch: usize,
    /// Per rank, when the most is alive.
    pub bytes: Bytes,
    pub seconds: f64,
    pub fits: bool,
}

impl Candidate {
    /// What takes most.
    pub fn largest(&self) -> Cause {
        let most = Cause::ALL.iter().max_by_key(|&&cause| self.bytes.of(cause));
        *most.expect("there are causes")
    }
}

/// All layouts of a task's ranks: those that fit, the fastest first, then the others, the smallest first.
pub fn search(task: &Task, machine: &Machine, load: &Load) -> Vec<Candidate> {
    let meshes = meshes(task);
    let rows = task.rows_per_step;
    let micro: Vec<usize> = (1..=rows).filter(|n| rows.is_multiple_of(*n)).collect();
    let pairs: Vec<(MeshShape, usize)> =
        meshes.iter().flat_map(|&mesh| micro.iter().map(move |&micro| (mesh, micro))).collect();
    let alone: Vec<_> = pairs
        .into_par_iter()
        // A micro-batch that leaves ranks without rows wastes them.
        .filter(|(mesh, micro)| *micro >= mesh.ranks / mesh.tensor || *micro == rows)
        .flat_map_iter(|(mesh, micro)| candidates(task, (mesh, micro), machine, load))
        .collect();
    let mut found = alone;
    found.sort_by(|a, b| {
        let rank = |c: &Candidate| if c.fits { c.seconds } else { c.bytes.total() as f64 };
        b.fits.cmp(&a.fits).then(rank(a).total_cmp(&rank(b)))
    });
    found
}

/// Meshes that the model can be cut for.
fn meshes(task: &Task) -> Vec<MeshShape> {
    let (sizes, experts) = (&task.sizes, task.sizes.moe.as_ref().map_or(1, |moe| moe.experts));
    let divides = |tensor: usize| sizes.model.heads.is_multiple_of(tensor) && sizes.kv_heads().is_multiple_of(tensor);
    let all = task.layout.mesh.nearest(experts).into_iter();
    all.filter(|mesh| divides(mesh.tensor) && (sizes.moe.is_some() || mesh.expert_tensor == mesh.tensor)).collect()
}

/// One walk serves both orders: they differ in links alone.
fn candidates(
    task: &Task,
    (mesh, micro_batch): (MeshShape, usize),
    machine: &Machine,
    load: &Load,
) -> impl Iterator<Item = Candidate> + use<> {
    let degrees = Degrees::Same(mesh.expert);
    let layout = Layout { mesh, degrees, drop_duplicates: true, owners: None, ..task.layout.clone() };
    let task = Task { layout, micro_batch, ..task.clone() };
    let cost = step(&task, task.fullest(), load);
    let one_kind = mesh.expert == 1 || mesh.expert_data() == 1;
    let orders = if one_kind { vec![Order::ExpertData] } else { vec![Order::ExpertData, Order::DataExpert] };
    let (machine, bytes) = (machine.clone(), cost.at_peak);
    orders.into_iter().map(move |order| {
        let mesh = MeshShape { order, ..mesh };
        let task = Task { layout: Layout { mesh, ..task.layout.clone() }, ..task.clone() };
        let seconds = seconds(&task, &cost, &machine).total();
        Candidate { mesh, micro_batch, bytes, seconds, fits: bytes.total() <= machine.usable() }
    })
}
