//! The losses of a step's rows, which runs of tasks add up by part: the step's loss, each row once, wherever its last
//! layers ran.

use std::sync::Arc;

use guildhall::moe::migration::Migrating;
use guildhall::moe::{MigrationPolicy, Routings};
use guildhall::parallel::{Mesh, Migrate, Zero};

use crate::tiny::{Recipe, m2m, nllb};
use crate::world::{MESHES, ONE, SLICED, Shape, on_mesh};

/// By place the losses of the rows of two steps, over all data groups' ranks of one lane, and what moved.
fn losses(recipe: &Recipe, shape: Shape, migrate: Migrate, change: impl Fn(Mesh) -> Mesh + Sync) -> (Vec<f64>, u64) {
    let ranks = on_mesh(shape, |rank, mesh| {
        let mesh = change(mesh.clone());
        let mut trainer = recipe.trainer(rank, &mesh);
        let policy = Migrating::new(migrate, (None, 0.25), 2);
        let migration = policy.map(|policy| Arc::new(policy) as Arc<dyn MigrationPolicy>);
        trainer.routings = Arc::new(Routings { migration, ..Routings::NONE });
        let steps = recipe.train(&mut trainer, 1..=2);
        let last = &steps[1];
        let moved = last.migrated.iter().map(|layer| layer.sequences).sum();
        (mesh.tensor.rank(), trainer.rows.last().collect::<Vec<_>>(), last.loss * last.valid_tokens as f64, moved)
    });
    let (_, _, all, moved) = ranks[0];
    let mut of_lanes = vec![vec![0.0; recipe.rows]; shape.tensor];
    for (lane, rows, ..) in ranks {
        for (place, loss) in rows {
            assert_eq!(of_lanes[lane][place], 0.0, "{shape:?}: row {place} is of one rank of a data group");
            of_lanes[lane][place] = loss;
        }
    }
    for rows in &of_lanes {
        assert_eq!(rows, &of_lanes[0], "{shape:?}: all ranks of a tensor group find the same");
        // Two f32 sums of some hundred terms.
        let sum: f64 = rows.iter().sum();
        assert!((sum / all - 1.0).abs() < 1e-6, "{shape:?}: {sum} of rows, {all} of the step");
    }
    (of_lanes.remove(0), moved)
}

#[test]
fn losses_of_rows_do_not_depend_on_the_mesh() {
    for sizes in [nllb(), m2m()] {
        let recipe = |micro_batch| Recipe { sizes: sizes.clone(), rows: 8, micro_batch };
        let (want, _) = losses(&recipe(8), ONE, Migrate::Off, |mesh| mesh);
        assert!(want.iter().all(|&loss| loss > 0.0), "{want:?}");
        let check = |what: &str, got: Vec<f64>| {
            // One update with sums in another order, at a high rate, lies before these losses.
            let far = got.iter().zip(&want).map(|(got, want)| (got / want - 1.0).abs()).fold(0.0, f64::max);
            assert!(far < 1e-3, "{what}: {got:?} for {want:?}");
        };
        for (shape, micro_batch) in MESHES.into_iter().chain(SLICED).zip([8, 3].into_iter().cycle()) {
            let (got, _) = losses(&recipe(micro_batch), shape, Migrate::Off, |mesh| mesh);
            check(&format!("{shape:?}, {micro_batch} rows at once"), got);
            let split = |mesh: Mesh| mesh.with_sequence(shape.tensor > 1).with_zero(Zero::Parameters);
            check(&format!("{shape:?}, split"), losses(&recipe(micro_batch), shape, Migrate::Off, split).0);
            let (got, moved) = losses(&recipe(8), shape, Migrate::Force, |mesh| mesh);
            check(&format!("{shape:?}, {moved} sequences moved"), got);
            assert_eq!(moved > 0, shape.expert > 1, "{shape:?}");
        }
    }
}

/// Nobody asks for those of a model that learns no tasks.
#[test]
fn rows_are_told_where_they_are_asked_for() {
    let recipe = Recipe { sizes: crate::tiny::mixtral(), rows: 2, micro_batch: 2 };
    let told = on_mesh(ONE, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        recipe.train(&mut trainer, 1..=1);
        trainer.rows.last().count()
    });
    assert_eq!(told, [0]);
}
