//! Ops on parts of a table: all parts together against the loop over the whole, for any cut, empty parts too.

use std::convert::Infallible;
use std::ops::Range;

use guildhall_tensor::ops::{Classes, NOWHERE, join_statistics, stretch_sums};
use guildhall_tensor::{Dtype, Tape, Tensor, Var};

use super::harness::{check, check_bf16, on_devices, random, rounding, tensor};
use super::integers;
use super::reference as r;
use guildhall_tensor::gradcheck::Operand;

/// Cuts of 37 rows: alone, even, uneven, and with parts that have none at either end and amid.
const CUTS: [&[usize]; 5] = [&[37], &[18, 19], &[1, 30, 6], &[0, 37], &[0, 0, 20, 0, 17, 0]];

fn ranges(cut: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |len: &usize| {
        end += len;
        end - len..end
    };
    cut.iter().map(range).collect()
}

/// A matrix and a vector of as many rows, cut.
fn parts(cut: &[usize], width: usize) -> Vec<Operand> {
    let (w, b) = (random(&[37, width], 2), random(&[37], 3));
    let of = |rows: Range<usize>| {
        let weight = w.values[rows.start * width..rows.end * width].to_vec();
        let bias = b.values[rows.clone()].to_vec();
        let rows = rows.len();
        [Operand { shape: vec![rows, width], values: weight }, Operand { shape: vec![rows], values: bias }]
    };
    ranges(cut).into_iter().flat_map(of).collect()
}

/// The losses that the parts of a head find, each on its own, with statistics joined as a group would.
fn losses(x: &Var, parts: &[Var], targets: &[u32], scale: f32) -> Vec<Var> {
    let mut first = 0;
    let classes = parts.chunks(2).map(|part| {
        first += part[0].shape()[0];
        Classes { first: first - part[0].shape()[0], all: 37 }
    });
    let classes: Vec<Classes> = classes.collect();
    let loss = |[x, weight, bias]: [&Var; 3], part: usize, join: &mut dyn FnMut(&Tensor) -> Tensor| {
        let head = (weight, Some(bias));
        let join = |own: &Tensor| Ok::<_, Infallible>(join(own));
        x.sliced_linear_cross_entropy(head, classes[part], (targets.into(), scale), join).unwrap().0
    };
    let own = |part: usize| {
        let mut found = Vec::new();
        let tape = Tape::inference(x.device());
        let [x, weight, bias] = [x, &parts[2 * part], &parts[2 * part + 1]].map(|v| tape.constant(v.value().clone()));
        loss([&x, &weight, &bias], part, &mut |own| {
            found.push(own.clone());
            own.clone()
        });
        found
    };
    let own: Vec<Vec<Tensor>> = (0..classes.len()).map(own).collect();
    let join = |block: usize| {
        let parts: Vec<f32> = own.iter().flat_map(|part| part[block].to_vec()).collect();
        join_statistics(&Tensor::from_slice(x.device(), &[own.len(), parts.len() / own.len() / 3, 3], &parts))
    };
    let joined: Vec<Tensor> = (0..own[0].len()).map(join).collect();
    let of_part = |part: usize| {
        let mut rest = joined.iter();
        loss([x, &parts[2 * part], &parts[2 * part + 1]], part, &mut |_| rest.next().expect("a block").clone())
    };
    (0..classes.len()).map(of_part).collect()
}

/// One loss, whose gradients are those of all parts.
fn whole_loss(x: &Var, parts: &[Var], targets: &[u32], scale: f32) -> Var {
    let mut losses = losses(x, parts, targets, scale).into_iter();
    let first = losses.next().expect("a part");
    losses.fold(first, |sum, loss| {
        let value = x.tape().constant(loss.value().clone());
        sum.add(&loss).add(&value.scale(-1.0))
    })
}

#[test]
fn a_cut_head_has_the_loss_of_the_whole() {
    // 300 rows are more than one block, and 4200 are on an accelerator.
    for (tokens, width) in [(6, 5), (300, 6), (4200, 2)] {
        let mut targets = integers(tokens, 37, 1);
        targets.iter_mut().step_by(4).for_each(|t| *t = NOWHERE);
        let scale = 1.0 / tokens as f32;
        for cut in CUTS {
            let operands: Vec<Operand> = [random(&[tokens, width], 1)].into_iter().chain(parts(cut, width)).collect();
            let op = |v: &[Var]| whole_loss(&v[0], &v[1..], &targets, scale);
            let oracle = |v: &[Vec<f64>]| {
                let all = |which: usize| v[1..].iter().skip(which).step_by(2).flatten().copied().collect::<Vec<f64>>();
                vec![r::linear_cross_entropy(&v[0], (&all(0), Some(&all(1))), &targets, width, scale)]
            };
            check(&operands, rounding(tokens.max(37)), op, oracle);
            check_bf16(&operands, op, oracle);
        }
    }
}

/// Beside the loss is that of each target, and 0 of those that do not count; stretches of them are added up.
#[test]
fn a_cut_head_tells_the_loss_of_each_target() {
    let (tokens, width) = (300, 6);
    let (x, mut targets) = (random(&[tokens, width], 1), integers(tokens, 37, 1));
    targets.iter_mut().step_by(4).for_each(|t| *t = NOWHERE);
    let (w, b) = (random(&[37, width], 2), random(&[37], 3));
    on_devices(|device| {
        let tape = Tape::inference(device);
        let [x, w, b] = [&x, &w, &b].map(|operand| tape.constant(tensor(device, operand)));
        let alone = |own: &Tensor| Ok::<_, Infallible>(own.clone());
        let classes = Classes { first: 0, all: 37 };
        let Ok((loss, each)) =
            x.sliced_linear_cross_entropy((&w, Some(&b)), classes, (targets.as_slice().into(), 0.5), alone);
        let values = each.to_vec();
        for (t, &target) in targets.iter().enumerate() {
            let row = |v: &Var| v.value().to_vec().into_iter().map(f64::from).collect::<Vec<f64>>();
            let (x, w, b) = (row(&x)[t * width..][..width].to_vec(), row(&w), row(&b));
            let want = match target {
                NOWHERE => 0.0,
                _ => r::linear_cross_entropy(&x, (&w, Some(&b)), &[target], width, 1.0),
            };
            assert!((f64::from(values[t]) - want).abs() < 1e-5, "{t}: {} for {want}", values[t]);
        }
        let sums = stretch_sums(&each, 12).to_vec();
        for (sum, stretch) in sums.iter().zip(values.chunks(25)) {
            assert_eq!(*sum, stretch.iter().map(|&loss| f64::from(loss)).sum::<f64>() as f32);
        }
        let all: f32 = sums.iter().sum();
        assert!((0.5 * all / loss.value().scalar() - 1.0).abs() < 1e-6, "{all} for {}", loss.value().scalar());
        assert_eq!(stretch_sums(&Tensor::zeros(device, &[0]), 0).len(), 0);
    });
}

/// Ranks compare losses bit by bit.
#[test]
fn all_parts_of_a_head_find_the_same_loss() {
    let (x, targets) = (random(&[300, 6], 1), integers(300, 37, 1));
    on_devices(|device| {
        let tape = Tape::inference(device);
        let loss = |cut: &[usize]| {
            let parts: Vec<Var> = parts(cut, 6).iter().map(|part| tape.constant(tensor(device, part))).collect();
            let losses = losses(&tape.constant(tensor(device, &x)), &parts, &targets, 1.0 / 300.0);
            let losses: Vec<f32> = losses.iter().map(|loss| loss.value().scalar()).collect();
            assert!(losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()), "{cut:?}: {losses:?}");
            losses[0]
        };
        // One part with classes is the whole, whoever joins it.
        assert_eq!(loss(&[0, 37]), loss(&[37]));
        CUTS.iter().for_each(|cut| assert!((loss(cut) - loss(&[37])).abs() < 1e-5));
    });
}

/// Logits far apart, and all in one part: the others' exponentials vanish.
#[test]
fn parts_far_below_the_top_weigh_nothing() {
    let (high, low, joined) = ([500.0, 1.5, 0.0], [-500.0, 3.0, -500.0], [500.0, 1.5, -500.0]);
    on_devices(|device| {
        for parts in [[high, low], [low, high]] {
            let parts = Tensor::from_slice(device, &[2, 1, 3], &parts.concat());
            assert_eq!(join_statistics(&parts).to_vec(), joined);
        }
    });
}

#[test]
fn parts_of_a_table_give_rows_or_zeros() {
    let (ids, width) = (integers(70, 37, 4), 3);
    let table = random(&[37, width], 1);
    for range in CUTS.into_iter().flat_map(ranges) {
        let values = table.values[range.start * width..range.end * width].to_vec();
        let part = Operand { shape: vec![range.len(), width], values };
        let op = |dtype| {
            let (ids, first) = (&ids, range.start);
            move |v: &[Var]| v[0].embed_part(ids, first, dtype)
        };
        let oracle = |v: &[Vec<f64>]| {
            let row = |&id: &u32| match range.contains(&(id as usize)) {
                true => v[0][(id as usize - range.start) * width..][..width].to_vec(),
                false => vec![0.0; width],
            };
            ids.iter().flat_map(row).collect()
        };
        check(std::slice::from_ref(&part), rounding(70), op(Dtype::F32), oracle);
        check_bf16(&[part], op(Dtype::Bf16), oracle);
    }
    on_devices(|device| {
        let tape = Tape::inference(device);
        let nothing = tape.constant(Tensor::zeros(device, &[0, width])).embed_part(&[], 5, Dtype::F32);
        assert_eq!(nothing.shape(), [0, width]);
    });
}

/// A table of zeros but for some rows comes back from these, and other rows that it had become zeros.
#[test]
fn a_part_of_a_table_is_what_its_rows_make_it() {
    let (first, rows, width) = (10, 300, 5);
    let ids: Vec<u32> = [10, 12, 100, 309].to_vec();
    on_devices(|device| {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let full = tensor(device, &random(&[rows, width], 1)).cast(dtype);
            let some = full.rows_by_id(&ids, first);
            let expected: Vec<f32> = ids
                .iter()
                .flat_map(|&id| full.rows_of(id as usize - first..id as usize - first + 1).to_vec())
                .collect();
            assert_eq!((some.shape(), some.dtype(), some.to_vec()), (&[ids.len(), width][..], dtype, expected));
            let mut made = tensor(device, &random(&[rows, width], 2)).cast(dtype);
            made.set_rows_by_id(&some, &ids, first);
            for row in 0..rows {
                let got = made.rows_of(row..row + 1).to_vec();
                let expected = if ids.contains(&((row + first) as u32)) {
                    full.rows_of(row..row + 1).to_vec()
                } else {
                    vec![0.0; width]
                };
                assert_eq!(got, expected, "row {row}, {dtype:?}");
            }
            made.set_rows_by_id(&full.rows_by_id(&[], first), &[], first);
            assert!(made.to_vec().iter().all(|&x| x == 0.0));
        }
    });
}
