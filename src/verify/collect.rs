//! What the ranks of a run saw, and the whole that it makes.

use guildhall_comm::{Communicator, Summation};
use serde::{Deserialize, Serialize};

use super::tensors::{LocalPart, Tensors};
use crate::moe::recording::Seen;
use crate::parallel::{Parameters, Piece, Placement};
use crate::train::StepReport;

/// What a run did and left, over all ranks.
#[derive(Default)]
pub(super) struct RunResult {
    pub(super) reports: Vec<StepReport>,
    /// By step, summed over micro-batches and ranks, before clipping.
    pub(super) gradients: Vec<Tensors>,
    /// Of the optimizer.
    pub(super) eps: f64,
    pub(super) clip: f64,
    /// At the end.
    pub(super) weights: Tensors,
    /// State that is not learned by gradients, at the end.
    pub(super) buffers: Tensors,
    pub(super) decisions: Seen,
    /// Whether the engine of every rank promises the bits of sums.
    pub(super) sums_are_exact: bool,
    /// What should have been the same on several ranks and was not, or was nowhere.
    pub(super) disagreements: Vec<String>,
}

/// What one rank of a run did and left.
#[derive(Serialize, Deserialize)]
pub(super) struct RankResult {
    pub(super) rank: usize,
    sums_are_exact: bool,
    reports: Vec<StepReport>,
    held: Vec<ParameterPart>,
}

/// What a rank holds of a local parameter.
#[derive(Serialize, Deserialize)]
struct ParameterPart {
    shelf: Shelf,
    pieces: Vec<Piece>,
    /// The number of the first element.
    first: usize,
    elements: Vec<f32>,
}

/// Which of a run's tensors.
#[derive(Clone, Copy, Serialize, Deserialize)]
enum Shelf {
    /// By step, from 0.
    Gradients(usize),
    Weights,
    Buffers,
}

impl RankResult {
    /// Of a rank of this world.
    pub(super) fn of(world: &dyn Communicator) -> RankResult {
        let sums_are_exact = world.sums() == Summation::Exact;
        RankResult { rank: world.rank(), sums_are_exact, reports: Vec::new(), held: Vec::new() }
    }

    /// Takes the report of the next step.
    pub(super) fn report(&mut self, report: StepReport) {
        self.reports.push(report);
    }

    /// Takes the rank's share of the gradients of a step, counted from 0.
    pub(super) fn gradients(&mut self, step: usize, model: &mut dyn Parameters) {
        model.visit_trained(&mut |weight| {
            let held = weight.parameter.gradient().held();
            let gradient = weight.parameter.gradient().with_part(held.clone(), <[f32]>::to_vec);
            self.hold(Shelf::Gradients(step), &weight.placement, gradient, held.start);
        });
    }

    /// Takes the rank's share of what is left at the end.
    pub(super) fn state(&mut self, model: &mut dyn Parameters) {
        model.visit(&mut |weight| {
            let (kept, first) = weight.parameter.stored().with_kept(|kept, first| (kept.to_vec(), first));
            self.hold(Shelf::Weights, &weight.placement, kept, first);
        });
        model.visit_buffers(&mut |buffer| self.hold(Shelf::Buffers, &buffer.placement, buffer.value.to_vec(), 0));
    }

    fn hold(&mut self, shelf: Shelf, placement: &Placement, elements: Vec<f32>, first: usize) {
        self.held.push(ParameterPart { shelf, pieces: placement.pieces.clone(), first, elements });
    }
}

impl RunResult {
    /// The whole, of what all ranks have, in rank order.
    pub(super) fn of(ranks: Vec<RankResult>) -> RunResult {
        let sums_are_exact = ranks.iter().all(|rank| rank.sums_are_exact);
        let mut run = RunResult { sums_are_exact, ..RunResult::default() };
        for RankResult { rank, reports, held, .. } in ranks {
            reports.into_iter().enumerate().for_each(|(step, report)| run.report(rank, step, report));
            held.iter().for_each(|held| run.put(rank, held));
        }
        let all = run.gradients.iter().chain([&run.weights, &run.buffers]).flatten();
        let torn = all.filter(|(_, tensor)| !tensor.is_whole());
        let told: Vec<String> = torn.map(|(name, _)| format!("no rank holds some part of {name}")).collect();
        run.disagreements.extend(told);
        run
    }

    fn report(&mut self, rank: usize, step: usize, report: StepReport) {
        match self.reports.get(step).map(|other| *other == report) {
            None => self.reports.push(report),
            Some(true) => {}
            Some(false) => {
                let (one, other) = (report.gradient_norm, self.reports[step].gradient_norm);
                let told = format!("rank {rank} reports another step {} (norm {one:e}, not {other:e})", step + 1);
                self.disagreements.push(told);
            }
        }
    }

    fn put(&mut self, rank: usize, held: &ParameterPart) {
        let (tensors, what) = match held.shelf {
            Shelf::Gradients(step) => {
                self.gradients.resize_with(self.gradients.len().max(step + 1), Tensors::new);
                (&mut self.gradients[step], format!("gradients of step {}", step + 1))
            }
            Shelf::Weights => (&mut self.weights, "weights".to_owned()),
            Shelf::Buffers => (&mut self.buffers, "buffers".to_owned()),
        };
        let own = LocalPart { rank, elements: &held.elements, first: held.first };
        for piece in &held.pieces {
            let tensor = tensors.entry(piece.name.clone()).or_default();
            if let Some(other) = tensor.put(piece, &own) {
                let told = format!("{what}: the copies of {} on ranks {other} and {rank} differ", piece.name);
                self.disagreements.push(told);
            }
        }
    }
}
