//! A bit that flips in one rank's copy of a weight is found by all ranks, and the rank is named.

use std::fs;

use guildhall::parallel::{Axis, Mesh, Parameters, Placement, Spread, Zero};
use guildhall::train::{Divergence, Trainer, divergence};
use guildhall_tensor::{Dtype, Tensor};

use crate::gates::biased;
use crate::memory::{COMPARED, KEPT, flip_in_memory, kept_values};
use crate::program::{RECIPE, RUN, Workshop, wait_until};
use crate::tiny::{Recipe, mixtral, with};
use crate::world::{MESHES, SLICED, Shape, on_mesh, shape};

/// The rank whose memory is faulty.
const FAULTY: usize = 1;

/// Flips the lowest bit of an element of the weight or buffer of this number, on one rank; twice is as if nothing had been.
fn flip(trainer: &mut Trainer, number: usize) -> Option<Placement> {
    let (mut place, mut found) = (0, None);
    let is_faulty = trainer.mesh.world.rank() == FAULTY;
    let mut is_this = |placement: &Placement| {
        place += 1;
        let is_this = place == number + 1;
        if is_this {
            found = Some(placement.clone());
        }
        is_this && is_faulty
    };
    trainer.model.visit(&mut |weight| {
        if is_this(&weight.placement) {
            weight.parameter.stored().with_kept(|kept, _| flip_last(kept));
        }
    });
    trainer.model.visit_buffers(&mut |buffer| {
        if is_this(&buffer.placement) {
            flip_last(&mut buffer.value);
        }
    });
    found
}

fn flip_last(kept: &mut Tensor) {
    match kept.dtype() {
        Dtype::Bf16 => {
            let last = kept.bf16s_mut().last_mut();
            last.into_iter().for_each(|last| *last = half::bf16::from_bits(last.to_bits() ^ 1));
        }
        _ => {
            let last = kept.f32s_mut().last_mut();
            last.into_iter().for_each(|last| *last = f32::from_bits(last.to_bits() ^ 1));
        }
    }
}

/// How many ranks hold what `placement` says.
fn holders(placement: &Placement, mesh: &Mesh) -> usize {
    match placement.spread {
        Spread::Replicated => mesh.world.size(),
        Spread::Tensor => mesh.group(Axis::Data).size(),
        Spread::Expert(degree) | Spread::ExpertTensor(degree) => mesh.group(Axis::ExpertData(degree)).size(),
    }
}

fn check(recipe: &Recipe, shape: Shape, zero: Zero) {
    let found = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, &mesh.clone().with_zero(zero));
        recipe.train(&mut trainer, 1..=2);
        assert_eq!(divergence(&mut trainer.model, mesh).unwrap(), None, "after two steps on {shape:?}");
        let mut found = Vec::new();
        for number in 0.. {
            let Some(placement) = flip(&mut trainer, number) else { break };
            found.push((placement.clone(), holders(&placement, mesh), divergence(&mut trainer.model, mesh).unwrap()));
            flip(&mut trainer, number);
        }
        assert_eq!(divergence(&mut trainer.model, mesh).unwrap(), None, "every bit is back on {shape:?}");
        found
    });
    for (number, (placement, holders, divergence)) in found[FAULTY].iter().enumerate() {
        assert!(found.iter().all(|rank| rank[number].2 == *divergence), "ranks of {shape:?} disagree");
        let name = &placement.pieces[0].name;
        match divergence {
            None => assert!(zero == Zero::ALL[3] || *holders == 1, "{name} on {shape:?}: not found"),
            Some(Divergence { weight, ranks }) => {
                assert_eq!((weight, ranks.iter().map(Vec::len).sum::<usize>()), (name, *holders), "{shape:?}");
                assert!(ranks.contains(&vec![FAULTY]), "{name} on {shape:?}: {ranks:?}");
                assert!(*holders == 2 || ranks[1] == [FAULTY], "{name} on {shape:?}: {ranks:?}");
            }
        }
    }
}

#[test]
fn a_flipped_bit_is_found_wherever_a_weight_has_copies() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut sizes = mixtral();
        sizes.dtype = dtype;
        let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
        let shapes = MESHES.into_iter().chain(SLICED).filter(|shape| shape.ranks > 1);
        shapes.for_each(|shape| check(&recipe, shape, Zero::ALL[1]));
        check(&recipe, shape(4, 2), Zero::ALL[3]);
    }
}

/// A router's bias follows the loads, not gradients, and is as much a part of what is trained.
#[test]
fn a_flipped_bit_is_found_in_a_routers_bias() {
    let sizes = with(mixtral(), |moe| moe.gate = biased(0.05));
    let recipe = Recipe { sizes, rows: 8, micro_batch: 8 };
    let found = on_mesh(shape(4, 2), |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        let mut biases = Vec::new();
        trainer.model.visit_buffers(&mut |buffer| biases.push(buffer.placement.pieces[0].name.clone()));
        biases
    });
    assert!(found[FAULTY].len() >= 2, "each layer has one: {found:?}");
    [shape(4, 2), SLICED[0]].into_iter().for_each(|shape| check(&recipe, shape, Zero::ALL[1]));
}

/// A bit of memory that is changed while the program runs.
#[test]
fn a_run_whose_memory_is_changed_ends_and_says_where() {
    let shop = Workshop::new();
    let values = kept_values(&shop);
    // After every step, or before a checkpoint alone: that of a run that is stopped, and one that is due.
    let before_checkpoints = "--set train.check_replicas_every=1000000";
    let due = format!("{before_checkpoints} --set train.checkpoint_every=500");
    for every in ["", before_checkpoints, &due] {
        let running = shop.start(&format!("train {RECIPE} --ranks 2 {COMPARED} {every}"));
        wait_until("steps", || shop.metrics(RUN).len() > 2);
        let places = flip_in_memory(&running.pid(), &values);
        assert!(places >= 2, "two ranks have {places} copies");
        if every == before_checkpoints {
            running.signal("INT");
        }
        let finished = running.wait();
        let what = format!("the copies of {KEPT} differ, those of rank 0 and rank 1 are not the same");
        finished.failed(1, &["step ", &what]);
        assert!(!shop.path(RUN).join("checkpoints").exists(), "nothing that differs is written");
        fs::remove_dir_all(shop.path(RUN)).unwrap();
    }
}

/// What is compared changes nothing that is trained, and a run alone is told that it compares nothing.
#[test]
fn a_run_compares_its_copies() {
    let shop = Workshop::new();
    let mesh = "--ranks 4 --set parallel.expert=2";
    let checked = shop.train(&format!("{mesh} --set train.check_replicas_every=1"));
    assert!(!checked.err.contains("check_replicas_every"), "{}", checked.err);
    shop.train(&format!("{mesh} --set run.dir=unchecked"));
    assert!(shop.tensors(RUN, 6) == shop.tensors("unchecked", 6));
    assert_eq!(shop.summary(RUN)["traffic"], shop.summary("unchecked")["traffic"]);
    let alone = format!("train {RECIPE} --set train.check_replicas_every=1");
    shop.fails(&alone, 2, &["train.check_replicas_every", "one rank has no other's copies"]);
    let said = Divergence { weight: "w".to_owned(), ranks: vec![vec![0, 2, 3], vec![1]] }.at(7).to_string();
    assert!(said.contains("step 7: the copies of w differ, that of rank 1 is not that of ranks 0, 2, 3"), "{said}");
    // Two of four are no majority.
    let said = Divergence { weight: "w".to_owned(), ranks: vec![vec![0, 1], vec![2], vec![3]] }.at(7).to_string();
    assert!(said.contains("those of ranks 0, 1 and rank 2 and rank 3 are not the same"), "{said}");
    shop.fails(&format!("train {RECIPE} --set train.check_replicas_every=-1"), 2, &["train.check_replicas_every"]);
}
