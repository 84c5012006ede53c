//! Which kernels are launched on an accelerator with which types, where they take f32 or bf16: each with both, operand by
//! operand. What they write is compared with the CPU's on the way.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::*;
use crate::ops::{AttentionShape, AttentionSpans, causal_keys};
use crate::parameter::Parameter;
use crate::tape::{Part, Recompute, Tape, Var};

thread_local! {
    /// What this thread has launched: the kernel, the place among its operands that are f32 or bf16, the type there.
    static LAUNCHED: RefCell<BTreeSet<(&'static str, usize, &'static str)>> = RefCell::default();
}

/// Called before each launch on an accelerator with the kinds and types of operands.
pub(in crate::kernels) fn note(kernel: &'static str, operands: &[(&str, Dtype)]) {
    let either = operands.iter().filter(|(kind, _)| *kind == "any").enumerate();
    let name = |dtype| if dtype == Dtype::Bf16 { "bf16" } else { "f32" };
    LAUNCHED
        .with_borrow_mut(|launched| launched.extend(either.map(|(place, (_, dtype))| (kernel, place, name(*dtype)))));
}

const TOKENS: usize = 24;
const D: usize = 16;
const HEADS: AttentionShape = AttentionShape { heads: 2, kv_heads: 2, head_dim: 8 };

/// What the tests of single kernels leave out: rows of a table, products, attention and experts, forward and backward.
fn step(device: &Arc<Device>, dtype: Dtype, recompute: &Recompute) {
    let shapes: [&[usize]; 10] =
        [&[32, D], &[3 * D, D], &[3 * D], &[3, D, D], &[3, D], &[3, 2 * D, D], &[3, D, D], &[D, D], &[D, D], &[D, D]];
    let parameter = |(stream, shape): (usize, &&[usize])| {
        let parameter = Parameter::new("w", drawn(device, shape, stream as u64).cast(dtype));
        parameter.gradient().store_as(dtype);
        parameter
    };
    let all: Vec<Parameter> = shapes.iter().enumerate().map(parameter).collect();
    // A second time gradients are added to what is there.
    for _ in 0..2 {
        let tape = Tape::new(device).recomputing(recompute);
        let w: Vec<Var> = all.iter().map(|parameter| tape.parameter(parameter)).collect();
        let ids: Vec<u32> = (0..TOKENS as u32).collect();
        let x = w[0].embed(&ids, dtype);
        let spans = AttentionSpans::new(device, TOKENS, &causal_keys(&[0; TOKENS], TOKENS), None);
        let fused = x.linear(&w[1], Some(&w[2])).attention(HEADS, &spans);
        let [q, k, v] = [7, 8, 9].map(|i| x.linear(&w[i], None));
        let rows = fused.add(&q.attention_to([&k, &v], HEADS, &spans));
        let experts = [3, 4, 5, 6].map(|i| w[i].clone());
        let y = tape.segment(Part::Experts, &rows, &experts, |rows, w| {
            let counts = [10, 0, 14];
            rows.grouped_swiglu(&w[2], &w[3], &counts).grouped_linear(&w[0], Some(&w[1]), &counts)
        });
        tape.backward(&y.cast(Dtype::F32).dot_constant(drawn(device, &[TOKENS, D], 20)));
    }
}

/// Of weights, by a gradient beside the state and by one that is a strip of it; and what is added to part of a gradient.
fn update(device: &Arc<Device>, dtype: Dtype) {
    let rule = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, gradient_scale: 1.0 };
    let own = if dtype == Dtype::F32 { 2 } else { 3 };
    let (mut weights, gradient) = (drawn(device, &[WIDTH], 0).cast(dtype), drawn(device, &[WIDTH], 1));
    weights.add_to_part(3, &gradient, 0..WIDTH - 3);
    for count in [own, own + 1] {
        let mut state = Tensor::filled(device, &[count * WIDTH], 0.25);
        let strips = Strips { first: 0, stride: WIDTH, count, len: WIDTH };
        match count == own {
            true => rule.update((&mut weights, 0), (&gradient, 0), (&mut state, strips)),
            false => rule.update_by_strip((&mut weights, 0), (&mut state, strips)),
        }
    }
}

#[test]
fn every_kernel_is_launched_in_each_type_that_it_takes() {
    let tests: [fn(); 9] = [
        activations,
        gated_products,
        sums_of_either_type,
        norms,
        columns_of_matrices,
        columns_are_summed_while_they_are_converted,
        rows_by_index,
        rows_that_carry_others,
        attention_with_relative_positions,
    ];
    tests.into_iter().for_each(|test| test());
    let device = Device::simulated(2).expect("a C++ compiler");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for parts in [vec![], vec![Part::Experts]] {
            step(&device, dtype, &Recompute::of(parts, false));
        }
        update(&device, dtype);
    }
    let launched = LAUNCHED.take();
    let either = TABLE.iter().flat_map(|TableLine { name, outputs, inputs, .. }| {
        let either = outputs.iter().chain(*inputs).filter(|kind| **kind == "any").count();
        (0..either).flat_map(|place| ["f32", "bf16"].map(|dtype| (*name, place, dtype)))
    });
    let missing: Vec<_> = either.filter(|launch| !launched.contains(launch)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
