//! Expert output masking (NLLB Team 2022, as fairseq has it): in training the result of each of a token's routes is skipped
//! with some probability, and the others are not enlarged for it; elsewhere all results are made smaller by what is skipped
//! on average.

use guildhall_tensor::{RowIds, Var};

use super::gates::GateDraws;
use super::router::drawn;

/// The weights by which results are summed, from the gate's, `[T, K]`, of tokens with these numbers within the step; a
/// share `rate` of them is 0 in training.
pub(super) fn masked(weights: &Var, rate: f32, tokens: &RowIds, draws: &GateDraws) -> Var {
    match rate {
        0.0 => weights.clone(),
        _ if draws.trains => {
            let stream = draws.output_mask();
            let keeps = |route| f32::from(u8::from(stream.uniform(route) >= rate));
            weights.mul_constant(&drawn(weights, tokens, keeps))
        }
        _ => weights.scale(1.0 - rate),
    }
}
