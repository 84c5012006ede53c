//! The best layout: meshes, ZeRO's stages, what runs again, state elsewhere, micro-batches; walked and timed. What cannot
//! be better than something that fits is not walked. Of a deep model's layouts costs are estimated from shorter models; those
//! that come first are walked whole.

use guildhall_tensor::Cause;
use rayon::prelude::*;

use super::books::Bytes;
use super::devices::Machine;
use super::layout::{Layout, Load, RecomputePolicy, Task};
use super::settings::settings;
use super::step::{StepCost, estimate, step};
use super::time::seconds;
use crate::memory::{Offload, RecomputedOp};
use crate::moe::{self, Shadowing};
use crate::parallel::{MeshShape, Order, PerLayer};

/// One layout and what comes of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub layout: Layout,
    pub micro_batch: usize,
    /// What of a recipe is to be set for it, as `--set` takes it.
    pub set: Vec<String>,
    /// Per rank, when the most is alive.
    pub bytes: Bytes,
    pub seconds: f64,
    pub fits: bool,
    /// Bytes that the ranks of a node keep on its host, if they are more than it has.
    pub beyond_host: Option<u64>,
    /// Whether every layer was walked.
    pub exact: bool,
}

impl Candidate {
    /// What takes most, or what a host has no room for.
    pub fn largest(&self) -> (&'static str, u64) {
        let cause = self.bytes.largest();
        self.beyond_host.map_or((cause.name(), self.bytes.of(cause)), |bytes| ("host memory", bytes))
    }
}

/// Layouts, of those that fit and of those that do not, that are walked layer by layer whatever was estimated.
const WINNERS: usize = 5;
/// Elements of a tile where state is elsewhere and the recipe names none.
const TILE: u64 = 1 << 20;

/// Layouts of a task's ranks that fit, the fastest first, of equals the one with the fewest settings; then those that do
/// not, the smallest first. Of layouts that differ in nothing but the micro-batch the largest that fits is among them,
/// and what makes others of the kind smaller and slower is tried only where it does not fit with the whole step's rows.
pub fn search(task: &Task, machine: &Machine, load: &Load) -> Vec<Candidate> {
    let kinds: Vec<Layout> = meshes(task).into_iter().flat_map(|mesh| kinds(task, mesh)).collect();
    let search = LayoutSearch { task, machine, load };
    let mut found: Vec<Candidate> = kinds.into_par_iter().flat_map_iter(|layout| search.of_kind(&layout)).collect();
    loop {
        found.sort_by(|a, b| {
            let rank = |c: &Candidate| if c.fits { c.seconds } else { c.bytes.total() as f64 };
            b.fits.cmp(&a.fits).then(rank(a).total_cmp(&rank(b))).then(a.set.len().cmp(&b.set.len()))
        });
        let fitting = found.iter().filter(|candidate| candidate.fits).count();
        let winners = (0..fitting).take(WINNERS).chain((fitting..found.len()).take(WINNERS));
        let open: Vec<usize> = winners.filter(|&place| !found[place].exact).collect();
        if open.is_empty() {
            return found;
        }
        let walked: Vec<Candidate> = open.par_iter().map(|&place| search.exactly(&found[place])).collect();
        open.into_iter().zip(walked).for_each(|(place, candidate)| found[place] = candidate);
    }
}

/// Meshes that the model can be cut for, of whatever order.
fn meshes(task: &Task) -> Vec<MeshShape> {
    let (sizes, layout) = (&task.sizes, &task.layout);
    let experts = sizes.moe.as_ref().map_or(1, |moe| moe.shared_divisor());
    let divides = |tensor: usize| sizes.model.uneven_over(tensor, sizes.moe.as_ref()).is_empty();
    let allows = |mesh: &MeshShape| match &sizes.moe {
        None => mesh.expert_tensor == mesh.tensor,
        // A table is of ranks of a group as large as it is.
        Some(moe) => (layout.owners.is_none() || mesh.expert == layout.mesh.expert) && moe.schedules(mesh.expert),
    };
    // A table need not share out experts evenly.
    let shared = if layout.owners.is_some() { 0 } else { experts };
    let all = layout.mesh.nearest(shared).into_iter();
    all.filter(|mesh| divides(mesh.tensor) && allows(mesh) && !orders(task, *mesh).is_empty()).collect()
}

/// The orders that a mesh may have: they differ in links alone, so that one walk serves both.
fn orders(task: &Task, mesh: MeshShape) -> Vec<MeshShape> {
    let alone = mesh.expert == 1 || mesh.expert_data() == 1;
    let orders = if alone { vec![task.layout.mesh.order] } else { vec![Order::ExpertData, Order::DataExpert] };
    let shadows = task.sizes.moe.as_ref().is_some_and(|moe| moe.shadowing() != Shadowing::Off);
    let meshes = orders.into_iter().map(|order| MeshShape { order, ..mesh });
    meshes.filter(|mesh| !shadows || mesh.peers_meet_the_same()).collect()
}

/// Layouts on a mesh that differ in what is shared and how tokens lie.
fn kinds(task: &Task, mesh: MeshShape) -> Vec<Layout> {
    let own = &task.layout;
    // Tokens that are compared lie on one rank.
    let compares = task.sizes.moe.as_ref().is_some_and(moe::Config::condenses);
    let sequences = match mesh.tensor {
        1 => vec![own.sequence],
        _ if compares => vec![false],
        _ => vec![false, true],
    };
    let shared = task.sizes.moe.is_some() && mesh.expert_data() > 1;
    let stages = if shared || mesh.ranks >= 2 * mesh.tensor { 0..=3 } else { 0..=0 };
    let drop_duplicates = own.drop_duplicates || mesh.tensor > 1;
    let of = |sequence| {
        let degrees = PerLayer::Same(mesh.expert);
        let layout = Layout { mesh, degrees, sequence, drop_duplicates, ..own.clone() };
        stages.clone().map(move |zero| Layout { zero, ..layout.clone() })
    };
    sequences.into_iter().flat_map(of).collect()
}

/// Ways to trade time for memory, each slower than those before it with the same state. State goes to the host's memory
/// or, where that is the device's own, to files.
fn trades(task: &Task, kind: &Layout, machine: &Machine) -> Vec<Layout> {
    let operations = match &task.layout.recompute {
        RecomputePolicy::Operations(operations) => operations.clone(),
        RecomputePolicy::Nothing | RecomputePolicy::Blocks { .. } => RecomputedOp::ALL.to_vec(),
    };
    let mut again =
        vec![RecomputePolicy::Nothing, RecomputePolicy::Operations(operations), RecomputePolicy::Blocks { keep: true }];
    if kind.mesh.ranks > 1 {
        again.push(RecomputePolicy::Blocks { keep: false });
    }
    let of = |(offload, copies_state)| {
        let tile = if offload == Offload::None { kind.tile } else { kind.tile.or(Some(TILE)) };
        let layout = Layout { offload, tile, copies_state, ..kind.clone() };
        again.clone().into_iter().map(move |recompute| Layout { recompute, ..layout.clone() })
    };
    let away = if machine.host_memory.is_none() { Offload::File } else { Offload::Host };
    // A step takes as long without a copy of the state; only checkpoints take longer.
    let copies = if kind.copies_state { &[true, false][..] } else { &[false] };
    let kept =
        [Offload::None, away].into_iter().flat_map(|offload| copies.iter().map(move |&copies| (offload, copies)));
    kept.flat_map(of).collect()
}

struct LayoutSearch<'a> {
    task: &'a Task,
    machine: &'a Machine,
    load: &'a Load,
}

impl LayoutSearch<'_> {
    /// The trades of one kind of layout, until one fits with all rows at once.
    fn of_kind(&self, kind: &Layout) -> Vec<Candidate> {
        let mut found: Vec<Candidate> = Vec::new();
        let mut hopeless = None;
        for layout in trades(self.task, kind, self.machine) {
            let kept = (layout.offload, layout.copies_state);
            if hopeless == Some(kept) {
                continue;
            }
            let fastest = found.iter().filter(|c| c.fits).map(|c| c.seconds).fold(f64::INFINITY, f64::min);
            let tried = self.micro_batches(&layout, fastest);
            let all_at_once = |c: &Candidate| c.fits && c.micro_batch == self.task.rows_per_step;
            let ends = tried.iter().any(all_at_once);
            if tried.iter().any(|candidate| self.is_hopeless(candidate)) {
                hopeless = Some(kept);
            }
            found.extend(tried);
            if ends {
                break;
            }
        }
        found
    }

    /// Whether what is always there is too much: it is no smaller if something runs again, or fewer rows at a time.
    fn is_hopeless(&self, candidate: &Candidate) -> bool {
        let always = [Cause::Parameters, Cause::Optimizer, Cause::Checkpoint].map(|cause| candidate.bytes.of(cause));
        candidate.beyond_host.is_some() || always.into_iter().fold(0, u64::saturating_add) > self.machine.usable()
    }

    /// The largest micro-batch that fits, which is the fastest, and those that were tried to find it; none is looked for
    /// if all rows at once would take no less than the `fastest` of its kind that fits.
    fn micro_batches(&self, layout: &Layout, fastest: f64) -> Vec<Candidate> {
        let (rows, mesh) = (self.task.rows_per_step, &layout.mesh);
        // A micro-batch that leaves ranks without rows wastes them.
        let all = (1..=rows).filter(|&n| rows.is_multiple_of(n) && (n >= mesh.ranks / mesh.tensor || n == rows));
        let mut open: Vec<usize> = all.collect();
        let (mut tried, mut walks) = (Vec::new(), 0);
        // All at once if possible; else whether any fits; else halving what is left.
        let mut next = open.len() - 1;
        while let Some(&micro_batch) = open.get(next) {
            let candidates = self.candidates(layout, micro_batch);
            let fits = candidates.iter().any(|candidate| candidate.fits);
            // One that fits may be slower only for being small.
            let vain = candidates.iter().all(|c| !c.fits && c.seconds >= fastest || self.is_hopeless(c));
            tried.extend(candidates);
            walks += 1;
            if vain {
                break;
            }
            open = if fits { open.split_off(next + 1) } else { open[..next].to_vec() };
            next = if walks == 1 { 0 } else { open.len() / 2 };
        }
        tried
    }

    /// Whether what a layout costs fits, and what is beyond the host of a node, if something is.
    fn judge(&self, layout: &Layout, cost: &StepCost) -> (bool, Option<u64>) {
        let beyond = !self.machine.host_holds(layout, cost);
        (self.machine.holds(layout, cost), beyond.then(|| self.machine.of_host(layout, cost)))
    }

    /// The same with every layer walked.
    fn exactly(&self, candidate: &Candidate) -> Candidate {
        let Candidate { layout, micro_batch, .. } = candidate.clone();
        let task = Task { layout, micro_batch, ..self.task.clone() };
        let cost = step(&task, task.fullest(), self.load);
        let ((fits, beyond_host), seconds) =
            (self.judge(&task.layout, &cost), seconds(&task, &cost, self.machine).total());
        Candidate { bytes: cost.at_peak, seconds, fits, beyond_host, exact: true, ..candidate.clone() }
    }

    fn candidates(&self, layout: &Layout, micro_batch: usize) -> Vec<Candidate> {
        let task = Task { layout: layout.clone(), micro_batch, ..self.task.clone() };
        let (cost, exact) = (estimate(&task, task.fullest(), self.load), task.shortened().is_none());
        let (bytes, (fits, beyond_host)) = (cost.at_peak, self.judge(layout, &cost));
        let timed = |mesh| {
            let task = Task { layout: Layout { mesh, ..layout.clone() }, ..task.clone() };
            let (set, seconds) = (settings(self.task, &task), seconds(&task, &cost, self.machine).total());
            Candidate { layout: task.layout, micro_batch, set, bytes, seconds, fits, beyond_host, exact }
        };
        let mut candidates: Vec<Candidate> = orders(self.task, layout.mesh).into_iter().map(timed).collect();
        candidates.sort_by_key(|candidate| candidate.set.len());
        // Another order that changes nothing is no other layout.
        candidates.dedup_by(|other, first| !fits || other.seconds == first.seconds);
        candidates
    }
}
