//! Finding where a number stopped being finite: the step is run again on tapes that look at every value.

use guildhall_tensor::Tape;

use super::error::Error;
use super::step::Trainer;
use crate::data::StepBatches;
use crate::model::Context;
use crate::parallel::Parameters;

/// The error that says where. Collective: every rank calls it with the same step.
pub(super) fn non_finite(trainer: &mut Trainer, batches: &StepBatches, context: &Context, what: &'static str) -> Error {
    // Summed gradients hold every rank's numbers; only its own say whether it began on this one.
    trainer.model.visit(&mut |weight| weight.parameter.clear_gradient());
    match search(trainer, batches, context) {
        Err(error) => error,
        Ok((own, ranks)) => {
            let (step, rank) = (context.facts.step, trainer.mesh.world.rank());
            match (own, ranks) {
                (Some((micro, place)), _) => Error::NonFinite { step, what, rank, micro, place },
                (None, 0) => Error::Overflow { step, what },
                (None, _) => Error::NonFiniteElsewhere { step },
            }
        }
    }
}

type FirstNonFinite = Option<(usize, String)>;

/// What this rank found, and on how many ranks anything was.
fn search(trainer: &Trainer, batches: &StepBatches, context: &Context) -> Result<(FirstNonFinite, u64), Error> {
    let mut found = None;
    for (micro, batch) in batches.micro.iter().enumerate() {
        let tape = Tape::checking(&trainer.device).recomputing(&trainer.recompute);
        let forward = trainer.model.forward(&tape, batch, context)?;
        tape.try_backward(&forward.loss).map_err(Error::Backward)?;
        if let (None, Some(place)) = (&found, tape.non_finite()) {
            let direction = if place.in_backward { "in the gradient of" } else { "in" };
            found = Some((micro, format!("{}, {direction} op {}", place.scope, place.op)));
        }
    }
    let ranks = trainer.mesh.world.all_gather_u64(&[u64::from(found.is_some())])?.iter().sum();
    Ok((found, ranks))
}
