//! Another sample of the same rounding: weights that begin where a neighbouring rounding would have put them.

use guildhall_tensor::Dtype;
use half::bf16;

use crate::parallel::Parameters;
use crate::train::{Error, Trainer};

/// One weight in twelve moves: a rounding to the nearest is off by a twelfth of a unit in the last place, squared and on
/// average, and so is such a move. What follows is rounded elsewhere from there on.
const ONE_IN: u32 = 12;

/// Moves some of the weights that are stored in half the bits to a neighbour, by draws that `number` names.
pub(super) fn dither(trainer: &mut Trainer, number: u64) -> Result<(), Error> {
    trainer.model.visit(&mut |weight| {
        if weight.parameter.dtype() != Dtype::Bf16 {
            return;
        }
        // Initial values are drawn by the recipe's seed: no seed of a recipe is as large.
        let draws = weight.placement.pieces[0].draws(u64::MAX - number);
        weight.parameter.stored().with_kept(|kept, _| {
            let moved =
                kept.to_vec().into_iter().zip(0..).map(|(x, i)| moved(bf16::from_f32(x), draws.bits(i)).to_f32());
            kept.store_f32s(0, &moved.collect::<Vec<f32>>());
        });
    });
    Ok(trainer.optimizer.restart(&mut trainer.model)?)
}

/// A neighbour, for one in [`ONE_IN`] draws. What is zero stays so: its neighbours are no rounding away.
fn moved(value: bf16, draw: u32) -> bf16 {
    match (draw % (2 * ONE_IN), value == bf16::ZERO) {
        (0, false) => bf16::from_bits(value.to_bits() + 1),
        (1, false) => bf16::from_bits(value.to_bits() - 1),
        _ => value,
    }
}
