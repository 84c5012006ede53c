//! None of it changes a bit, on any mesh, and a checkpoint of any is one of all.

use std::fs;

use guildhall::model::Sizes;
use guildhall::optim::OffloadTarget;
use guildhall::parallel::{Order, Zero};
use guildhall_tensor::{Dtype, Part, Recompute};

use super::{Cut, contents, keeping, read, trained, ways, write};
use crate::parity::{compare, run, run_with_mesh};
use crate::tiny::{Recipe, bert, gpt2, mixtral, nllb, transformer_xl};
use crate::world::{ONE, Shape, on_mesh, shape, sliced, whole_experts};

/// Every way on every mesh, each with two or three of the models.
#[test]
fn neither_stages_nor_tiles_nor_places_change_a_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (mut dropping, half) = (gpt2(), Sizes { dtype: Dtype::Bf16, ..mixtral() });
    dropping.model.dropout = 0.2;
    let models = [(mixtral(), 6), (half, 6), (dropping, 3), (bert(), 6), (nllb(), 3)];
    for (number, (sizes, rows)) in models.into_iter().enumerate() {
        let recipe = Recipe { sizes, rows, micro_batch: rows };
        for (first, shape) in [shape(2, 1), shape(2, 2), shape(3, 1), shape(4, 2)].into_iter().enumerate() {
            let want = trained(&recipe, shape, &keeping(Zero::Off));
            for keeping in ways(folder.path()).into_iter().skip((number + first) % 2).step_by(2) {
                let got = trained(&recipe, shape, &keeping);
                assert_eq!(got.0, want.0, "{shape:?}, {keeping:?}");
                assert!(got.1 == want.1, "{:?} on {shape:?}, {keeping:?}: other state", recipe.sizes.model.family);
            }
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "files have no names");
}

fn blocks(keep_communication: bool) -> Recompute {
    Recompute::of(vec![Part::Block], keep_communication)
}

/// Models in slices, with slices of experts and whole ones, in both orders, tokens split or not, what runs twice beside it.
fn cuts() -> [(Sizes, Cut); 9] {
    let twice = |parts: &[Part]| Recompute::of(parts.to_vec(), true);
    let (nothing, operations) = (twice(&[]), twice(&[Part::Attention, Part::Activation, Part::Experts]));
    let half = |sizes: Sizes| Sizes { dtype: Dtype::Bf16, ..sizes };
    let mut dropping = gpt2();
    dropping.model.dropout = 0.2;
    let turned = Shape { order: Order::DataExpert, ..sliced(8, 2, 2) };
    let cut = |shape, sequence, recompute| Cut { shape, sequence, recompute };
    [
        (mixtral(), cut(sliced(4, 2, 2), false, nothing.clone())),
        (half(mixtral()), cut(sliced(4, 2, 1), true, blocks(true))),
        (dropping, cut(whole_experts(4, 2, 2), true, operations.clone())),
        (half(bert()), cut(whole_experts(8, 2, 2), false, blocks(false))),
        (mixtral(), cut(turned, true, blocks(true))),
        (half(gpt2()), cut(sliced(8, 4, 1), false, operations)),
        (half(mixtral()), cut(whole_experts(4, 2, 4), true, nothing)),
        (transformer_xl(), cut(sliced(8, 2, 2), true, blocks(true))),
        (nllb(), cut(sliced(4, 2, 2), true, blocks(true))),
    ]
}

/// Every cut at every stage, each with two of the tiles and places, so that together they meet all. What runs twice is
/// compared with what does not.
#[test]
fn shares_of_slices_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (sizes, cut)) in cuts().into_iter().enumerate() {
        let recipe = Recipe { sizes, rows: 5, micro_batch: 5 };
        let once = Cut { recompute: Cut::from(cut.shape).recompute, ..cut.clone() };
        let want = trained(&recipe, once, &keeping(Zero::Off));
        for keeping in ways(folder.path()).into_iter().skip(number % 3).step_by(3) {
            let got = trained(&recipe, cut.clone(), &keeping);
            let what = format!("{:?} on {cut:?}, {keeping:?}", recipe.sizes.model.family);
            assert_eq!(got.0, want.0, "{what}");
            let differing: Vec<&String> = want.1.keys().filter(|name| got.1.get(*name) != want.1.get(*name)).collect();
            assert!(differing.is_empty() && got.1.len() == want.1.len(), "{what}: other {differing:?}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "files have no names");
}

/// The columns of experts need not divide: then the ranks of a group hold rows of different lengths, whose shares and tiles
/// begin elsewhere, and the files are those that are written where nothing is cut.
#[test]
fn uneven_slices_are_whole_in_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut sizes = Sizes { dtype: Dtype::Bf16, ..mixtral() };
    sizes.moe.as_mut().expect("experts").d_expert = Some(13);
    let recipe = Recipe { sizes, rows: 4, micro_batch: 4 };
    for (number, shape) in [sliced(2, 2, 1), sliced(4, 4, 1), sliced(4, 2, 1)].into_iter().enumerate() {
        let shares = if shape.ranks == shape.tensor { 6 } else { usize::MAX };
        for keeping in ways(folder.path()).into_iter().take(shares).skip(number).step_by(3) {
            let (run, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let written = on_mesh(shape, |rank, mesh| {
                let mut trainer = keeping.trainer(&recipe, rank, mesh);
                recipe.train(&mut trainer, 1..=2);
                write(run.path(), &mut trainer, 2)
            });
            let one = on_mesh(ONE, |rank, mesh| {
                let mut trainer = recipe.trainer(rank, mesh);
                read(&written[0], &mut trainer);
                write(again.path(), &mut trainer, 2)
            });
            assert!(contents(&one[0]) == contents(&written[0]), "{shape:?}, {keeping:?}");
        }
    }
}

/// Where gradients are shares, those of every micro-batch are summed over ranks before they are summed over micro-batches.
#[test]
fn micro_batches_change_the_order_of_sums_and_nothing_else() {
    let recipe = Recipe { sizes: mixtral(), rows: 6, micro_batch: 2 };
    let whole = Recipe { micro_batch: 6, ..recipe.clone() };
    let want = run(&whole, ONE);
    for shape in [shape(2, 1), shape(2, 2), shape(4, 2), sliced(4, 2, 1), whole_experts(4, 2, 2)] {
        let of = |zero| trained(&recipe, shape, &keeping(zero));
        assert!(of(Zero::Optimizer) == of(Zero::Off), "{shape:?}");
        assert!(of(Zero::Parameters) == of(Zero::Gradients), "{shape:?}");
        for zero in Zero::ALL {
            let got = run_with_mesh(&recipe, shape, |mesh| mesh.with_zero(zero));
            compare(&format!("{zero:?} on {shape:?}"), &got, &want);
        }
    }
}

/// Sums that leave for the host after every micro-batch, or after the last, are added up there to the same bits, whatever
/// they are stored in. Each way with two of the models on every mesh.
#[test]
fn sums_elsewhere_are_the_sums_that_stay() {
    let folder = tempfile::tempdir().unwrap();
    let half = |gradients| Sizes { dtype: Dtype::Bf16, gradients, ..mixtral() };
    let elsewhere = || ways(folder.path()).into_iter().filter(|keeping| keeping.offload != OffloadTarget::None);
    let models = [mixtral(), half(Dtype::F32), half(Dtype::Bf16), bert()];
    for (number, sizes) in models.into_iter().enumerate() {
        let recipe = Recipe { sizes, rows: 6, micro_batch: 2 };
        for (first, shape) in [ONE, shape(2, 1), shape(4, 2), sliced(4, 2, 1)].into_iter().enumerate() {
            for keeping in elsewhere().skip((number + first) % 2).step_by(2) {
                let here = super::Keeping { offload: OffloadTarget::None, ..keeping.clone() };
                let [got, want] = [&keeping, &here].map(|keeping| trained(&recipe, shape, keeping));
                assert!(got == want, "{:?} on {shape:?}, {keeping:?}", recipe.sizes.model.family);
            }
        }
    }
}

/// The same of weights that are more than what is converted or added up at a time.
#[test]
fn large_sums_elsewhere_are_the_sums_that_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mut sizes = Sizes { dtype: Dtype::Bf16, ..mixtral() };
    // 4 experts of 16 x 1100: more than 2^16 elements in one weight, on each of two ranks a share of more than 2^15.
    (sizes.model.layers, sizes.moe.as_mut().expect("experts").d_expert) = (1, Some(1100));
    let recipe = Recipe { sizes, rows: 4, micro_batch: 2 };
    for shape in [ONE, shape(2, 1)] {
        for zero in [Zero::Off, Zero::Gradients] {
            let want = trained(&recipe, shape, &keeping(zero));
            for offload in [OffloadTarget::Host, OffloadTarget::File(folder.path().to_owned())] {
                let got = trained(&recipe, shape, &super::Keeping { offload: offload.clone(), ..keeping(zero) });
                assert!(got == want, "{shape:?}, {zero:?}, {offload:?}");
            }
        }
    }
}

/// Trained by one, continued by another.
#[test]
fn any_way_continues_what_any_way_began() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Recipe { sizes: Sizes { dtype: Dtype::Bf16, ..mixtral() }, rows: 6, micro_batch: 6 };
    let run = tempfile::tempdir().unwrap();
    let begun = on_mesh(shape(2, 2), |rank, mesh| {
        let mut trainer = keeping(Zero::Gradients).trainer(&recipe, rank, mesh);
        recipe.train(&mut trainer, 1..=2);
        write(run.path(), &mut trainer, 2)
    });
    for shape in [ONE, shape(2, 1), shape(4, 2), sliced(4, 2, 1)] {
        let mut want = None;
        for keeping in ways(folder.path()) {
            let other = tempfile::tempdir().unwrap();
            let ranks = on_mesh(shape, |rank, mesh| {
                let mut trainer = keeping.trainer(&recipe, rank, mesh);
                read(&begun[0], &mut trainer);
                let same = contents(&write(other.path(), &mut trainer, 2)) == contents(&begun[0]);
                let reports = recipe.train(&mut trainer, 3..=4);
                (same, reports, write(other.path(), &mut trainer, 4))
            });
            assert!(ranks.iter().all(|rank| rank.0), "{shape:?}, {keeping:?}: reading and writing changed something");
            let got = (ranks[0].1.clone(), contents(&ranks[0].2));
            assert!(*want.get_or_insert(got.clone()) == got, "{shape:?}, {keeping:?}");
        }
    }
}
