//! Which rows of the residual stream a result carries to the new host of its sequence, and which are sent by themselves.

use std::sync::Arc;

use guildhall::metrics::MigratedSequences;
use guildhall::model::Sizes;
use guildhall::moe::migration::Migrating;
use guildhall::moe::{Condense, MigrationPolicy, Routings};
use guildhall::parallel::{Migrate, Parameters};
use guildhall::train::{StepReport, Trainer};
use guildhall_tensor::Dtype;

use crate::parity::REORDERED;
use crate::tiny::{Recipe, bert, gpt2, mixtral, near};
use crate::world::{Shape, on_mesh, shape, sliced};

/// One step of a migration by this policy, of a model that `prepare` has changed.
fn step(sizes: &Sizes, shape: Shape, migrate: Migrate, prepare: impl Fn(&mut Trainer) + Sync) -> StepReport {
    let recipe = Recipe { sizes: sizes.clone(), rows: 8, micro_batch: 8 };
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        let policy = Migrating::new(migrate, (None, 0.25), 1);
        let migration = policy.map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>);
        trainer.routings = Arc::new(Routings { migration, ..Routings::NONE });
        prepare(&mut trainer);
        trainer.step(&recipe.batches(mesh, 1), 1).unwrap()
    });
    ranks.into_iter().next().expect("a rank")
}

/// With forced migration, what moved; the losses are those of a step without.
#[track_caller]
fn moved(what: &str, sizes: &Sizes, shape: Shape, prepare: impl Fn(&mut Trainer) + Sync) -> Vec<MigratedSequences> {
    let [plain, forced] = [Migrate::Off, Migrate::Force].map(|migrate| step(sizes, shape, migrate, &prepare));
    let numbers = |report: &StepReport| [report.loss as f32, report.gradient_norm as f32];
    near(&format!("{what}, loss and gradient norm"), &numbers(&forced), &numbers(&plain), REORDERED);
    assert!(forced.migrated.iter().all(|layer| layer.tokens > 0), "{what}: nothing moved");
    forced.migrated
}

/// Sets one element of a vector.
fn set(trainer: &mut Trainer, name: &str, value: f32) {
    let mut found = 0;
    trainer.model.visit(&mut |weight| {
        if weight.parameter.name() == name {
            let mut values = weight.parameter.value().to_vec();
            values[3] = value;
            let tensor = guildhall_tensor::Tensor::from_values(
                &weight.parameter.value().device().clone(),
                &[values.len()],
                || values,
            );
            *weight.parameter.value_mut() = tensor;
            found += 1;
        }
    });
    assert_eq!(found, 1, "{name}");
}

/// A norm that has lost a column, or nearly, cannot be undone.
#[test]
fn rows_that_cannot_be_rebuilt_are_sent() {
    let norm = "model.layers.1.post_attention_layernorm";
    for (what, sizes, vector, value) in [
        ("a weight of 0", mixtral(), "weight", 0.0),
        ("a small weight", gpt2(), "weight", 0.01),
        ("a large bias", gpt2(), "bias", 40.0),
    ] {
        for shape in [shape(2, 2), sliced(4, 2, 2)] {
            let layers = moved(what, &sizes, shape, |trainer| set(trainer, &format!("{norm}.{vector}"), value));
            for layer in layers {
                let alone = if layer.layer == 1 { layer.tokens } else { 0 };
                assert_eq!(layer.residual_rows, alone, "{what}: {layer:?}");
            }
        }
    }
}

/// What is stored in bf16 is rebuilt with another rounding; where no norm is in between, it is the row itself.
#[test]
fn rows_of_bf16_are_carried_as_they_are() {
    for (what, sizes, carries) in [("norms before", gpt2(), false), ("norms after", bert(), true)] {
        let half = Sizes { dtype: Dtype::Bf16, ..sizes };
        let forced = step(&half, shape(2, 2), Migrate::Force, |_| ());
        for layer in &forced.migrated {
            assert!(layer.tokens > 0, "{what}");
            assert_eq!(layer.residual_rows, if carries { 0 } else { layer.tokens }, "{what}");
        }
    }
}

/// A shared result is another token's, too.
#[test]
fn results_that_tokens_share_carry_nothing() {
    let mut sizes = mixtral();
    let moe = sizes.moe.as_mut().expect("experts");
    (moe.condense, moe.condense_threshold) = (Condense::Static, 0.5);
    for shape in [shape(2, 2), shape(4, 4), sliced(4, 2, 2)] {
        let layers = moved("condensed", &sizes, shape, |_| ());
        let some = |layer: &MigratedSequences| layer.residual_rows > 0 && layer.residual_rows < layer.tokens;
        assert!(layers.iter().all(some), "{shape:?}: {layers:?}");
    }
}
