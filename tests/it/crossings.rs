//! How often a training step waits for the device: once for all that the host looks at, and once for what a MoE layer
//! decides by.

use guildhall::model::Sizes;
use guildhall::moe::{BalanceScope, GateKind};
use guildhall::optim::{OffloadTarget, Settings};
use guildhall::parallel::Zero;
use guildhall_tensor::{Dtype, Kept, Part, Recompute};

use crate::tiny::{HYPER, Recipe, bert, gpt2, mixtral, transformer_xl};
use crate::world::{ONE, on_mesh, shape, sliced};

/// However many micro-batches and weights there are, and wherever state and sums are.
#[test]
fn a_dense_step_waits_once() {
    let folder = tempfile::tempdir().unwrap();
    let places = [OffloadTarget::None, OffloadTarget::Host, OffloadTarget::File(folder.path().to_owned())];
    for (sizes, dtype) in
        [mixtral(), gpt2(), bert(), transformer_xl()].into_iter().zip([Dtype::F32, Dtype::Bf16].repeat(2))
    {
        let recipe = Recipe { sizes: Sizes { moe: None, dtype, gradients: dtype, ..sizes }, rows: 6, micro_batch: 2 };
        for shape in [ONE, shape(2, 1), sliced(2, 2, 1)] {
            for (offload, zero) in places.iter().zip([Zero::Parameters, Zero::Off, Zero::Optimizer]) {
                let settings = Settings { hyper: HYPER, tile: Some(50), offload: offload.clone() };
                let what = format!("{:?} {dtype:?} on {shape:?}, {offload:?}, {zero:?}", recipe.sizes.model.family);
                on_mesh(shape, |rank, mesh| {
                    let mesh = mesh.clone().with_zero(zero);
                    let mut trainer = recipe.trainer_with(rank, &mesh, settings.clone()).unwrap();
                    for step in 1..=3 {
                        let before = rank.device.crossings();
                        assert!(recipe.train(&mut trainer, step..=step)[0].gradient_norm > 0.0, "{what}");
                        assert_eq!(rank.device.crossings() - before, 1, "{what}, step {step}");
                    }
                });
            }
        }
    }
}

/// A layer that runs again in backward decides once, too.
#[test]
fn a_moe_layer_waits_once_a_micro_batch() {
    let blocks = Recompute { parts: vec![Part::Block], keeps: vec![Kept::Decision] };
    for (sizes, gate) in [
        (mixtral(), GateKind::Softmax),
        (mixtral(), GateKind::Sigmoid),
        (gpt2(), GateKind::Gshard),
        (bert(), GateKind::ExpertChoice),
        (transformer_xl(), GateKind::Noisy),
    ] {
        let mut sizes = sizes;
        // The loads of the step before are asked for together with the logits.
        let scope = (gate == GateKind::Sigmoid).then_some(BalanceScope::GlobalBatch);
        sizes.moe.iter_mut().for_each(|moe| (moe.gate, moe.balance_scope) = (gate.into(), scope));
        let layers = (0..sizes.model.layers).filter(|&layer| sizes.moe_of(layer).is_some()).count() as u64;
        let recipe = Recipe { sizes, rows: 6, micro_batch: 2 };
        for (shape, recompute) in
            [(ONE, Recompute::default()), (shape(2, 2), blocks.clone()), (sliced(4, 2, 2), blocks.clone())]
        {
            on_mesh(shape, |rank, mesh| {
                let mut trainer = recipe.trainer(rank, mesh);
                trainer.recompute = recompute.clone();
                for step in 1..=2 {
                    let before = rank.device.crossings();
                    recipe.train(&mut trainer, step..=step);
                    assert_eq!(rank.device.crossings() - before, 1 + 3 * layers, "{gate:?} on {shape:?}, step {step}");
                }
            });
        }
    }
}
