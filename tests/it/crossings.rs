//! How often a training step waits for the device: once, for all that the host looks at.

use guildhall::model::Sizes;
use guildhall::optim::{Offload, Settings};
use guildhall::parallel::Zero;
use guildhall_tensor::Dtype;

use crate::tiny::{HYPER, Recipe, bert, gpt2, mixtral, transformer_xl};
use crate::world::{ONE, on_mesh, shape, sliced};

/// However many micro-batches and weights there are, and wherever state and sums are.
#[test]
fn a_dense_step_waits_once() {
    let folder = tempfile::tempdir().unwrap();
    let places = [Offload::None, Offload::Host, Offload::File(folder.path().to_owned())];
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
