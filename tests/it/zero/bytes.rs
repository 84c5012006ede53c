//! What each stage saves: exactly what the formulas say, by cause, on every mesh.

use guildhall::model::{Context, Sizes};
use guildhall::moe::StepFacts;
use guildhall::optim::OffloadTarget;
use guildhall::parallel::{GradientSync, Parameters, Zero};
use guildhall::train::Trainer;
use guildhall_tensor::{Cause, Dtype, Tape};

use super::{Cut, Keeping, keeping};
use crate::tiny::{Recipe, mixtral};
use crate::world::{ONE, Shape, on_mesh, shape, sliced, whole_experts};

/// Elements of a whole model: of what tensor ranks cut, of norms, of routers, of experts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Elements {
    pub(super) cut: u64,
    pub(super) norms: u64,
    pub(super) routers: u64,
    pub(super) experts: u64,
}

impl Elements {
    /// Of a model without biases that is on one rank as a whole.
    pub(super) fn of(model: &mut dyn Parameters) -> Elements {
        let mut all = Elements::default();
        model.visit(&mut |weight| {
            let (name, len) = (weight.parameter.name().to_owned(), weight.parameter.len() as u64);
            match weight.parameter.shape().len() {
                _ if name.ends_with("gate.weight") => all.routers += len,
                _ if name.contains("experts") => all.experts += len,
                1 => all.norms += len,
                _ => all.cut += len,
            }
        });
        all
    }
}

/// Bytes that a rank holds of weights, gradients after their sum, and optimizer state.
///
/// DeepSpeed's formulas: of N elements held by D ranks at stage z, weights take w N (z = 3: / D), gradients g N (z >= 2:
/// / D), state 8 N or, where w is 2, with masters 12 N (z >= 1: / D). T slices hold N / T each of what is cut; experts
/// have N / P_e, over the slices of experts, and other holders. Routers are f32 in any case. Where tokens are split, norms
/// and routers are summed over, and shared among, tensor ranks too.
pub(super) fn formula(all: Elements, (shape, sequence): (Shape, bool), [w, g]: [u64; 2], zero: Zero) -> [u64; 3] {
    let (ranks, tensor) = (shape.ranks as u64, shape.tensor as u64);
    let experts = all.experts / (shape.expert * shape.expert_tensor) as u64;
    let holders = ranks / tensor;
    let of_whole = if sequence { ranks } else { holders };
    let of_experts = shape.expert_data() as u64;
    let bytes = |each: u64, of_router: u64, shares: bool| {
        let by = |holders: u64| if shares { holders } else { 1 };
        each * all.cut / tensor / by(holders)
            + (each * all.norms + of_router * all.routers) / by(of_whole)
            + each * experts / by(of_experts)
    };
    let state = if w == 2 { 12 } else { 8 };
    [
        bytes(w, 4, zero >= Zero::Parameters),
        bytes(g, 4, zero >= Zero::Gradients),
        bytes(state, 8, zero >= Zero::Optimizer),
    ]
}

#[test]
fn bytes_are_those_of_the_formulas() {
    let split = |shape| Cut { sequence: true, ..Cut::from(shape) };
    let whole = [shape(2, 1), shape(4, 1), shape(4, 2), shape(4, 4)].map(Cut::from);
    let cut = [sliced(4, 2, 1), sliced(4, 2, 2), sliced(8, 2, 2), whole_experts(8, 2, 2)];
    let cuts: Vec<Cut> = whole.into_iter().chain(cut.map(Cut::from)).chain(cut.map(split)).collect();
    for (dtype, gradients, bytes) in
        [(Dtype::F32, Dtype::F32, [4, 4]), (Dtype::Bf16, Dtype::F32, [2, 4]), (Dtype::Bf16, Dtype::Bf16, [2, 2])]
    {
        let mut sizes = Sizes { dtype, gradients, ..mixtral() };
        // Lengths that all of these divide.
        (sizes.model.vocab, sizes.moe.as_mut().expect("experts").d_expert) = (32, Some(16));
        let recipe = Recipe { sizes, rows: 4, micro_batch: 4 };
        let all = on_mesh(ONE, |rank, mesh| Elements::of(&mut recipe.trainer(rank, mesh).model))[0];
        for (cut, zero) in cuts.iter().flat_map(|cut| Zero::ALL.map(|zero| (cut, zero))) {
            let want = formula(all, (cut.shape, cut.sequence), bytes, zero);
            on_mesh(cut.shape, |rank, mesh| {
                let mut trainer = keeping(zero).trainer(&recipe, rank, &mesh.clone().with_sequence(cut.sequence));
                recipe.train(&mut trainer, 1..=1);
                let live = |cause| rank.device.account().live(cause);
                assert_eq!(live(Cause::Gradients), 0, "{cut:?}, {zero:?}: forgotten gradients");
                synced(&recipe, &mut trainer);
                let got = [Cause::Parameters, Cause::Gradients, Cause::Optimizer].map(live);
                assert_eq!(got, want, "{dtype:?}, {gradients:?}, {cut:?}, {zero:?}: weights, gradients, state");
            });
        }
    }
}

/// Leaves the synced gradients of a step in the model.
fn synced(recipe: &Recipe, trainer: &mut Trainer) {
    let (mesh, batches) = (trainer.mesh.clone(), recipe.batches(&trainer.mesh, 1));
    let context = Context::of_training(&mesh, StepFacts::of_training(0, 1), 24);
    let mut sync = GradientSync::new(&trainer.sync, &mut trainer.model, &mesh);
    let tape = Tape::new(&trainer.device);
    let forward = trainer.model.forward(&tape, &batches.micro[0], &context).unwrap();
    tape.try_backward_telling(&forward.loss, &mut |gradient| Ok(sync.complete(gradient)?)).unwrap();
    sync.settle().unwrap();
    sync.finish().unwrap();
}

/// Away from the device, three tiles are there while an update runs: that and no more, whatever the model's size.
#[test]
fn tiles_bound_what_an_update_takes() {
    let peak = |width: usize, tile: Option<usize>| {
        let mut sizes = mixtral();
        sizes.moe.as_mut().expect("experts").d_expert = Some(width);
        let recipe = Recipe { sizes, rows: 2, micro_batch: 2 };
        let ranks = on_mesh(ONE, |rank, mesh| {
            let away = Keeping { zero: Zero::Off, tile, offload: OffloadTarget::Host };
            let mut trainer = away.trainer(&recipe, rank, mesh);
            recipe.train(&mut trainer, 1..=1);
            let mut elements = 0;
            trainer.model.visit(&mut |weight| elements += weight.parameter.len() as u64);
            let host = trainer.optimizer.host().expect("state is on the host");
            assert_eq!((host.live_total(), host.peak_total()), (12 * elements, 12 * elements));
            assert_eq!(rank.device.account().live(Cause::Optimizer), 0);
            rank.device.account().peak(Cause::Optimizer)
        });
        ranks[0]
    };
    for width in [12, 24, 48] {
        assert_eq!(peak(width, Some(100)), 3 * 100 * 12);
        // The largest weight: the first matrices of four experts.
        assert_eq!(peak(width, None), 3 * (4 * 2 * 16 * width as u64) * 12);
    }
}
