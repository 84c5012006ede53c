//! A device that knows sizes alone counts what the host counts: memory by cause, at its peaks and at the end, and the
//! multiply-adds of products. Every op takes part, forward and backward, in f32 and bf16, also where segments run twice.

use std::sync::Arc;

use guildhall_tensor::ops::{
    AttentionShape, AttentionSpans, CachedTerms, KvCache, NOWHERE, NormMoments, Relative, RowGroup, ScoreTerms,
    SquareSums, Stretches, attend_cached, causal_keys, cross_keys, reach, rotary_tables,
};
use guildhall_tensor::{
    Cause, Device, Draws, Dtype, Kept, Parameter, Part, Purpose, Recompute, RowIds, SimulatedLimits, Tape, Tensor, Var,
};

const TOKENS: usize = 24;
const D: usize = 16;
const EXPERTS: usize = 4;
const K: usize = 2;
const HEADS: AttentionShape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 4 };

/// Parameters by what they are for.
struct Weights {
    device: Arc<Device>,
    tokens: usize,
    all: Vec<Parameter>,
}

impl Weights {
    fn new(device: &Arc<Device>, dtype: Dtype, tokens: usize) -> Weights {
        let shapes: [&[usize]; 14] = [
            &[tokens.max(32), D],
            &[D],
            &[D],
            &[HEADS.width(), D],
            &[D, D],
            &[EXPERTS, D],
            &[EXPERTS, 2 * D, D],
            &[EXPERTS, D, D],
            &[EXPERTS, D],
            &[2 * D, D],
            &[6, D],
            &[4, 4],
            &[tokens.max(32)],
            &[D, D],
        ];
        let parameter = |(i, shape): (usize, &&[usize])| {
            let draws = Draws::new(3, Purpose::Test, 0, i as u32);
            let value = Tensor::from_fn(device, shape, |j| 0.3 * draws.normal(j as u64));
            let router = i == 5;
            Parameter::new(format!("w{i}"), if router { value } else { value.cast(dtype) })
        };
        Weights { device: device.clone(), tokens, all: shapes.iter().enumerate().map(parameter).collect() }
    }

    fn on(&self, tape: &Tape, which: usize) -> Var {
        tape.parameter(&self.all[which])
    }

    fn attention(&self, tape: &Tape, x: &Var) -> Var {
        let tokens = self.tokens;
        let segments: Vec<u32> = (0..tokens).map(|t| (t / 8) as u32).collect();
        let positions: Vec<u32> = (0..tokens).map(|t| (t % 8) as u32).collect();
        let rotary = rotary_tables(&self.device, &positions, HEADS.head_dim, 1e4);
        let spans = AttentionSpans::new(&self.device, tokens / 2, &causal_keys(&segments, tokens / 2), Some(rotary));
        let x = x.rms_norm(&self.on(tape, 1), 1e-5);
        let qkv = x.rms_norm_of(&self.on(tape, 2), &x.square_sums(), 2 * D, 1e-5).linear(&self.on(tape, 3), None);
        let out = self.on(tape, 4);
        tape.segment(Part::Attention, &qkv, &[out], move |qkv, out| qkv.attention(HEADS, &spans).linear(&out[0], None))
    }

    fn relative(&self, tape: &Tape, x: &Var) -> Var {
        let tokens = self.tokens;
        let stretches = Arc::new(Stretches::new(&self.device, &vec![0; tokens], tokens / 2, 4, 2));
        let kv = x.linear_twice(&self.on(tape, 9));
        let [u, v] = [self.on(tape, 11), self.on(tape, 11)];
        let distances = self.on(tape, 10);
        assert_eq!(distances.rows(), reach(tokens / 2, 4, 2));
        let relative = Relative { distances: &distances, content_bias: &u, position_bias: &v };
        x.relative_attention([&kv[0], &kv[1]], relative, &stretches)
    }

    /// From a token's features to a number a head.
    fn projection(&self) -> Tensor {
        Tensor::filled(&self.device, &[HEADS.heads, D], 0.1)
    }

    /// Of the tokens to themselves, each row reading the other's like.
    fn cross(&self, x: &Var) -> Var {
        let tokens = self.tokens;
        let segments = vec![0; tokens];
        let keys = cross_keys((&segments, tokens / 2), (&segments, tokens / 2));
        let spans = AttentionSpans::new(&self.device, tokens / 2, &keys, None).across(tokens / 2);
        let shape = AttentionShape { kv_heads: HEADS.heads, ..HEADS };
        let keys = x.columns(0..12).reshape(&[tokens * HEADS.heads, 3]).beside(&x.columns(3..4));
        let keys = keys.reshape(&[tokens, D]);
        let plain = x.attention_to([&keys, &x.relu()], shape, &spans);
        let bias =
            x.cast(Dtype::F32).gather_rows(0..tokens as u32 - 1).linear(&x.tape().constant(self.projection()), None);
        let sinks = bias.gather_rows(0..1).reshape(&[HEADS.heads]);
        let terms = ScoreTerms { scale: Some(0.7), bias: Some(bias), sinks: Some(sinks) };
        plain.add(&x.attention_with([&x.scale(0.5), &x.relu()], shape, &spans, &terms))
    }

    /// A layer of experts, its losses added to one scalar.
    fn experts(&self, tape: &Tape, x: &Var) -> (Var, Var) {
        let tokens = self.tokens;
        let logits = x.cast(Dtype::F32).linear(&self.on(tape, 5), None);
        let chosen: Vec<u32> = (0..tokens * K).map(|i| if i == 5 { NOWHERE } else { (i % EXPERTS) as u32 }).collect();
        let probabilities = logits.softmax();
        let weights = probabilities.select_normalised(&chosen, K).add(&logits.select_softmax(&chosen, K));
        let weights = weights.add(&logits.sigmoid().select(&chosen, K).scale(0.5));
        let mut order: Vec<u32> = (0..(tokens * K) as u32).filter(|&i| i != 5).collect();
        order.sort_by_key(|&i| i as usize % EXPERTS);
        let mut places = vec![NOWHERE; tokens * K];
        order.iter().enumerate().for_each(|(place, &route)| places[route as usize] = place as u32);
        let mut counts = [0; EXPERTS];
        order.iter().for_each(|&route| counts[route as usize % EXPERTS] += 1);
        let sources: Vec<u32> = order.iter().map(|route| route / K as u32).collect();
        let inputs = [self.on(tape, 6), self.on(tape, 7), self.on(tape, 8)];
        let rows = tape.segment(Part::Experts, &x.gather_rows(&sources), &inputs, move |rows, w| {
            rows.grouped_swiglu(&w[0], &w[1], &counts).grouped_linear(&w[1], Some(&w[2]), &counts)
        });
        let (numbers, carried) = (weights.gather_rows(&[2, 0]).select(&[0, 1], 1), x.gather_rows(&[1, 4]));
        let back: Vec<u32> = (0..order.len() as u32).rev().collect();
        let rows = rows.carry_rows(&back, &[3, 1], &numbers, &carried);
        let y = rows.weighted_sum_rows(&weights, &places);
        let sigma = logits.softplus().add(&tape.constant(Tensor::filled(&self.device, logits.shape(), 0.1)));
        let noisy = logits.add(&sigma.mul_constant(&Tensor::filled(&self.device, logits.shape(), 0.3)));
        let groups = [RowGroup { rows: (0..9).collect(), elsewhere: Vec::new(), weight: 0.1, share: 1.0 }];
        let variation = logits.chance_of_top(&sigma, &noisy, K).squared_variation(&groups);
        let importance = weights.scatter_columns(&chosen, EXPERTS).squared_variation(&groups);
        let even = probabilities.dot_constant(Tensor::filled(&self.device, logits.shape(), 0.01));
        let z = logits.weighted_square_log_sum_exp(Tensor::filled(&self.device, &[tokens], 0.01));
        (y, variation.add(&importance).add(&even).add(&z))
    }

    fn loss(&self, tape: &Tape, dtype: Dtype) -> Var {
        let tokens = self.tokens;
        let ids: Vec<u32> = (0..tokens as u32).collect();
        let mut x = self.on(tape, 0).embed(&ids, dtype).dropout(
            0.1,
            Draws::new(1, Purpose::Test, 0, 90),
            RowIds::from(0..tokens as u64),
        );
        x = x.add(&self.attention(tape, &x)).add(&self.relative(tape, &x)).add(&self.cross(&x));
        let (y, losses) = self.experts(tape, &x);
        x = x.add(&y).layer_norm(&self.on(tape, 1), &self.on(tape, 2), 1e-5);
        let moments = x.row_moments(NormMoments::Centred, 1e-5);
        x = x.denormalise(&moments, &self.on(tape, 1), Some(&self.on(tape, 2)));
        let dense = x.linear(&self.on(tape, 13), Some(&self.on(tape, 2))).gelu().relu();
        let doubled = Var::concat_rows(vec![dense.clone(), dense]).reshape(&[tokens, 2 * D]);
        let doubled = doubled.swiglu().add(&doubled.clamped_swiglu(1.0));
        let index: Vec<u32> = (0..tokens as u32).rev().collect();
        let x = x.add(&doubled).scatter_add_rows(&index, tokens);
        let targets: Vec<u32> = (0..tokens as u32).map(|t| if t == 3 { NOWHERE } else { t }).collect();
        x.linear_cross_entropy(&self.on(tape, 0), Some(&self.on(tape, 12)), &targets, 0.1).add(&losses)
    }
}

/// What two steps leave in the books: live and peak bytes by cause, the peak of all, multiply-adds.
fn books(device: &Arc<Device>, dtype: Dtype, parts: &[Part]) -> (Vec<[u64; 2]>, u64, u64) {
    let weights = Weights::new(device, dtype, TOKENS);
    let recompute = Recompute { parts: parts.to_vec(), keeps: vec![Kept::Decision] };
    for _ in 0..2 {
        let tape = Tape::new(device).recomputing(&recompute);
        tape.set_scope("step");
        let loss = weights.loss(&tape, dtype);
        tape.backward(&loss);
    }
    let account = device.account();
    let by_cause = Cause::ALL.map(|cause| [account.live(cause), account.peak(cause)]).to_vec();
    (by_cause, account.peak_total(), device.multiply_adds())
}

#[test]
fn sizes_are_counted_as_the_host_counts() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for parts in [vec![], vec![Part::Attention, Part::Experts]] {
            let host = books(&Device::new(2), dtype, &parts);
            assert!(host.1 > 10_000 && host.2 > 100_000, "something is counted: {host:?}");
            let sizes = Device::sizes(2);
            assert_eq!(books(&sizes, dtype, &parts), host, "{dtype:?}, {parts:?}");
            assert_eq!(sizes.crossings(), 0, "a step waits for nothing");
            let noted: u64 = sizes.books().expect("sizes").multiply_adds().values().sum();
            assert_eq!(noted, host.2, "products by part of the model add up");
            let launches = sizes.books().expect("sizes").launches();
            let moves =
                |kernel: &str| launches.iter().filter(|(key, _)| key.1 == kernel).any(|(_, noted)| noted.bytes > 0);
            let idle: Vec<_> = launches.keys().map(|key| key.1).filter(|kernel| !moves(kernel)).collect();
            assert!(idle.is_empty(), "kernels that move nothing: {idle:?}");
        }
    }
}

/// A head whose logits an accelerator computes in two blocks, 4096 rows and the rest, and a processor in many.
#[test]
fn a_heads_blocks_are_counted_as_an_accelerator_takes_them() {
    const ROWS: usize = 5000;
    let most = |device: &Arc<Device>| {
        let [x, w] = [ROWS, 64].map(|rows| Parameter::new("p", Tensor::filled(device, &[rows, D], 0.1)));
        let tape = Tape::new(device);
        let loss = tape.parameter(&x).linear_cross_entropy(&tape.parameter(&w), None, &[7; ROWS], 0.1);
        tape.backward(&loss);
        let account = device.account();
        (Cause::ALL.map(|cause| account.peak(cause)), account.peak_total())
    };
    let accelerator = most(&Device::simulated(2).expect("a C++ compiler"));
    assert_eq!(most(&Device::sizes_of(2, true)), accelerator);
    let processor = most(&Device::sizes_of(2, false));
    assert_eq!(processor, most(&Device::new(2)));
    let [more, less] = [accelerator.0, processor.0].map(|peaks| peaks.into_iter().max());
    assert!(more >= less.map(|less| less + (4096 - 256) * 64 * 4), "{accelerator:?} {processor:?}");
}

/// Bytes of a kernel's largest operand that are worth a block of their own.
const BYTES_OF_BLOCK: u64 = 1 << 14;

/// Kernels that leave a large operand to few blocks, and why.
const FEW_BLOCKS: [(&str, &str); 6] = [
    (
        "block_squares",
        "has sixteen lanes for 2^14 elements, whose sums have the processor's order, and a warp for two such",
    ),
    ("carry_back_weights", "reads few rows of a large operand"),
    ("gather", "reads few rows of a large operand"),
    (
        "grouped_bias_gradient",
        "has a block for 32 columns of an expert, of which models have hundreds and this test four",
    ),
    ("squared_variation", "is one block's: the loss of noisy gates, of a number for each token and expert"),
    ("squared_variation_back", "is one block's, likewise: a row may be of several groups"),
];

/// What one block does alone takes a device as long as if it had no others, however right the result is.
#[test]
fn no_kernel_leaves_much_to_few_blocks() {
    const BLOCKS: u32 = 64;
    const TOKENS: usize = 1024;
    let limits = SimulatedLimits { blocks: BLOCKS, ..SimulatedLimits::default() };
    let device = Device::simulated_with(2, limits).expect("a C++ compiler");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let weights = Weights::new(&device, dtype, TOKENS);
        let tape = Tape::new(&device);
        let loss = weights.loss(&tape, dtype);
        tape.backward(&loss);
    }
    let tape = Tape::new(&device);
    let x = tape.leaf(Tensor::filled(&device, &[TOKENS, D], 0.5));
    let groups = [RowGroup { rows: (0..TOKENS as u32).collect(), elsewhere: Vec::new(), weight: 0.1, share: 1.0 }];
    let even = x.dot_constant(Tensor::filled(&device, &[TOKENS, D], 0.1));
    tape.backward(&x.squared_variation(&groups).add(&even));
    let x = Tensor::filled(&device, &[1 << 20], 0.5);
    SquareSums::zeros(&device, 1).add(0, &x, 0..x.len());
    let shares = device.block_shares();
    let judged = shares.values().filter(|[bytes, _]| *bytes >= 2 * BYTES_OF_BLOCK).count();
    let is_few = |[bytes, busy]: &[u64; 2]| *busy < (bytes / BYTES_OF_BLOCK).min(BLOCKS.into());
    let few: Vec<_> = shares.iter().filter(|(_, share)| is_few(share)).map(|(kernel, _)| *kernel).collect();
    assert_eq!(few, FEW_BLOCKS.map(|(kernel, _)| kernel), "bytes and busy blocks: {shares:?}");
    assert!(judged > 50, "{judged} kernels had much to do");
}

/// Kernels are noted under the part of the model that asked for them, going back too.
#[test]
fn launches_are_noted_by_part_of_the_model() {
    let device = Device::sizes(1);
    let weight = Parameter::new("w", Tensor::zeros(&device, &[8, 4]));
    let tape = Tape::new(&device);
    tape.set_scope("first");
    let x = tape.parameter(&weight).scale(2.0);
    tape.set_scope("second");
    let loss = x.dot_constant(Tensor::filled(&device, &[8, 4], 1.0));
    tape.backward(&loss);
    let launches = device.books().expect("sizes").launches();
    let of = |scope: &str, kernel| launches.get(&(scope.to_owned(), kernel)).map(|found| [found.count, found.bytes]);
    // Forward and backward each read 32 numbers and write 32.
    assert_eq!(of("first", "scale"), Some([2, 2 * 2 * 32 * 4]));
    assert_eq!(of("second", "dot"), Some([1, (2 * 32 + 1) * 4]));
    assert_eq!(of("second", "scale_by"), Some([1, (2 * 32 + 1) * 4]));
}

#[test]
fn a_cache_has_a_size() {
    let device = Device::sizes(1);
    let mut cache = KvCache::default();
    for tokens in [3, 1, 1] {
        let spans = AttentionSpans::new(&device, tokens, &[], None);
        let qkv = Tensor::zeros(&device, &[tokens, HEADS.width()]);
        assert_eq!(attend_cached(&qkv, HEADS, &spans, &CachedTerms::default(), &mut cache).shape(), [tokens, 16]);
    }
    assert_eq!(cache.len(), 5);
}

/// Elements that are not there are missed loudly, and zeros only where somebody crosses over.
#[test]
fn elements_are_had_by_crossing_over_alone() {
    let device = Device::sizes(1);
    let tensor = Tensor::filled(&device, &[3], 7.0);
    assert_eq!((tensor.to_vec(), device.crossings()), (vec![0.0; 3], 1));
    let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| tensor.f32s().len()));
    assert!(looked.is_err(), "there are no elements to look at");
    let host = Device::new(1);
    let tensors = [1.0, 2.0].map(|value| Tensor::filled(&host, &[2], value));
    let both = guildhall_tensor::to_host(&[&tensors[0], &tensors[1]]);
    assert_eq!((both.len(), host.crossings()), (2, 1), "two tensors come in one crossing");
}
