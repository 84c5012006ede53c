//! What the ranks of a run saw, put together while they run.

use std::sync::{Mutex, PoisonError};

use super::tensors::{LocalPart, Tensors};
use crate::moe::recording::Seen;
use crate::parallel::{Mesh, Parameters, Placement};
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
    /// What should have been the same on several ranks and was not, or was nowhere.
    pub(super) disagreements: Vec<String>,
}

/// A run in the making, shared by its ranks.
#[derive(Default)]
pub(super) struct Collector {
    run: Mutex<RunResult>,
}

/// Which of a run's tensors.
#[derive(Clone, Copy)]
enum Shelf {
    /// By step, from 0.
    Gradients(usize),
    Weights,
    Buffers,
}

impl Collector {
    /// Takes a rank's report of a step, counted from 0.
    pub(super) fn report(&self, rank: usize, step: usize, report: StepReport) {
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        match run.reports.get(step).map(|other| *other == report) {
            None => run.reports.push(report),
            Some(true) => {}
            Some(false) => {
                let (one, other) = (report.gradient_norm, run.reports[step].gradient_norm);
                let told = format!("rank {rank} reports another step {} (norm {one:e}, not {other:e})", step + 1);
                run.disagreements.push(told);
            }
        }
    }

    /// Takes a rank's share of the gradients of a step, counted from 0.
    pub(super) fn gradients(&self, mesh: &Mesh, step: usize, model: &mut dyn Parameters) {
        let rank = mesh.world.rank();
        model.visit(&mut |weight| {
            let held = weight.parameter.gradient().held();
            let gradient = weight.parameter.gradient().with_part(held.clone(), <[f32]>::to_vec);
            let own = LocalPart { rank, elements: &gradient, first: held.start };
            self.put(Shelf::Gradients(step), &weight.placement, own);
        });
    }

    /// Takes a rank's share of what is left at the end.
    pub(super) fn state(&self, rank: usize, model: &mut dyn Parameters) {
        model.visit(&mut |weight| {
            let (kept, first) = weight.parameter.stored().with_kept(|kept, first| (kept.to_vec(), first));
            self.put(Shelf::Weights, &weight.placement, LocalPart { rank, elements: &kept, first });
        });
        model.visit_buffers(&mut |buffer| {
            let own = LocalPart { rank, elements: &buffer.value.to_vec(), first: 0 };
            self.put(Shelf::Buffers, &buffer.placement, own);
        });
    }

    fn put(&self, shelf: Shelf, placement: &Placement, own: LocalPart) {
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        let run = &mut *run;
        let (tensors, what) = match shelf {
            Shelf::Gradients(step) => {
                run.gradients.resize_with(run.gradients.len().max(step + 1), Tensors::new);
                (&mut run.gradients[step], format!("gradients of step {}", step + 1))
            }
            Shelf::Weights => (&mut run.weights, "weights".to_owned()),
            Shelf::Buffers => (&mut run.buffers, "buffers".to_owned()),
        };
        for piece in &placement.pieces {
            let tensor = tensors.entry(piece.name.clone()).or_default();
            if let Some(other) = tensor.put(piece, &own) {
                let told = format!("{what}: the copies of {} on ranks {other} and {} differ", piece.name, own.rank);
                run.disagreements.push(told);
            }
        }
    }

    /// The whole, once all ranks are done.
    pub(super) fn finish(self) -> RunResult {
        let mut run = self.run.into_inner().unwrap_or_else(PoisonError::into_inner);
        let all = run.gradients.iter().chain([&run.weights, &run.buffers]).flatten();
        let torn = all.filter(|(_, tensor)| !tensor.is_whole());
        let told: Vec<String> = torn.map(|(name, _)| format!("no rank holds some part of {name}")).collect();
        run.disagreements.extend(told);
        run
    }
}
