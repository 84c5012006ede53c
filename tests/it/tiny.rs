//! Models small enough to train on many meshes in a test, batches for them, and their tensors by global name.

use std::collections::BTreeMap;
use std::ops::Range;

use guildhall::data::{Batch, BatchPlan, Error, IGNORE, Row, Source, StepBatches};
use guildhall::launch::Rank;
use guildhall::model::{self, Family, Sizes};
use guildhall::moe::gates::{GateChoice, SigmoidKeys};
use guildhall::moe::{self, GateKind, Layers};
use guildhall::optim::{self, Access, Decay, Hyper, LearningRate, Settings, StateTile};
use guildhall::parallel::{Bucketing, Mesh, Parameters, Piece, Weight};
use guildhall::train::{RowSums, StepReport, Trainer};
use guildhall_tensor::{Draws, Dtype, Purpose, Tensor};

/// The default.
pub(crate) const BUCKETING: Bucketing = Bucketing { bytes: 2 << 20, overlap: true };

/// The epsilon is far above the rounding of a gradient that is zero in truth (key biases): Adam would divide noise by
/// noise, and what is compared here is meshes.
pub(crate) const HYPER: Hyper = Hyper { beta1: 0.9, beta2: 0.95, eps: 1e-4, weight_decay: 0.1 };

/// A model of each family that is built, with its name.
pub(crate) fn families() -> [(&'static str, Sizes); 12] {
    [
        ("mixtral", mixtral()),
        ("qwen3", qwen3()),
        ("olmoe", olmoe()),
        ("qwen2", qwen2()),
        ("gpt_oss", gpt_oss()),
        ("deepseek", deepseek()),
        ("gpt2", gpt2()),
        ("bert", bert()),
        ("transformer_xl", transformer_xl()),
        ("nllb", nllb()),
        ("m2m", m2m()),
        ("switch", switch()),
    ]
}

/// Two layers of Mixtral's kind, both MoE.
pub(crate) fn mixtral() -> Sizes {
    let moe = moe::Config { experts: 4.into(), top_k: 2, d_expert: Some(12), layers: Layers::All, ..balanced() };
    Sizes {
        model: model(Family::Mixtral),
        moe: Some(moe),
        lora: None,
        dtype: Dtype::F32,
        gradients: Dtype::F32,
        seed: 5,
        frozen: Vec::new(),
    }
}

/// The same of Qwen3's kind: wider heads, whose queries and keys are normed.
pub(crate) fn qwen3() -> Sizes {
    let sizes = mixtral();
    Sizes { model: model::Config { family: Family::Qwen3Moe, ..sizes.model }, seed: 10, ..sizes }
}

/// The same of OLMoE's kind: queries and keys of all heads normed together.
pub(crate) fn olmoe() -> Sizes {
    let sizes = mixtral();
    Sizes { model: model::Config { family: Family::Olmoe, kv_heads: None, ..sizes.model }, seed: 12, ..sizes }
}

/// The same of Qwen2's kind: biases of queries, keys and values, a shared expert behind a sigmoid.
pub(crate) fn qwen2() -> Sizes {
    let sizes = with(mixtral(), |moe| moe.shared_experts = 1);
    Sizes { model: model::Config { family: Family::Qwen2Moe, ..sizes.model }, seed: 13, ..sizes }
}

/// The same of GPT-OSS's kind: sinks, a window in the first layer, stretched positions, clamped gates.
pub(crate) fn gpt_oss() -> Sizes {
    let sizes = mixtral();
    let (head_dim, window, rope_factor, rope_pretrained) = (Some(6), Some(3), Some(4.0), Some(8));
    let model = model::Config { family: Family::GptOss, head_dim, window, rope_factor, rope_pretrained, ..sizes.model };
    Sizes { model, seed: 14, ..sizes }
}

/// Of DeepSeek's kind: keys and values from a narrow vector, the first layer dense, experts in groups and one beside them.
pub(crate) fn deepseek() -> Sizes {
    let keys = SigmoidKeys { groups: 2, top_groups: 1, route_scale: 1.5, bias_rate: 0.01, ..SigmoidKeys::default() };
    let sizes = with(mixtral(), |moe| {
        (moe.shared_experts, moe.gate, moe.layers) = (1, GateChoice::Sigmoid(keys), Layers::List(vec![1]));
    });
    let (query_rank, kv_rank) = (Some(6), Some(5));
    let (content_dim, rotary_dim, value_dim) = (Some(3), Some(4), Some(5));
    let (rope_factor, rope_pretrained) = (Some(4.0), Some(64));
    let model = model::Config { family: Family::DeepseekV3, kv_heads: None, query_rank, kv_rank, ..sizes.model };
    let model = model::Config { content_dim, rotary_dim, value_dim, rope_factor, rope_pretrained, ..model };
    Sizes { model, seed: 22, ..sizes }
}

/// The same with all experts in one group.
pub(crate) fn ungrouped((name, mut sizes): (&'static str, Sizes)) -> (&'static str, Sizes) {
    if let Some(moe::Config { gate: GateChoice::Sigmoid(keys), .. }) = &mut sizes.moe {
        (keys.groups, keys.top_groups) = (1, 1);
    }
    (name, sizes)
}

/// NLLB's two stacks of Switch's kind: biases of distances, no other biases, a token visits one expert.
pub(crate) fn switch() -> Sizes {
    let sizes = with(nllb(), |moe| (moe.top_k, moe.gate, moe.jitter) = (1, GateKind::Switch.into(), Some(0.0)));
    let model = model::Config { family: Family::Switch, head_dim: Some(4), ..sizes.model };
    Sizes { model, seed: 15, ..sizes }
}

/// Two layers of GPT-2's kind, the second MoE, the head tied.
pub(crate) fn gpt2() -> Sizes {
    let moe = moe::Config { experts: 4.into(), top_k: 3, d_expert: Some(20), layers: Layers::Every(2), ..balanced() };
    let model = model::Config { tie_embeddings: true, kv_heads: None, ..model(Family::Gpt2) };
    Sizes { model, moe: Some(moe), lora: None, dtype: Dtype::F32, gradients: Dtype::F32, seed: 6, frozen: Vec::new() }
}

/// Two layers of BERT's kind, both MoE, the head tied.
pub(crate) fn bert() -> Sizes {
    let moe = moe::Config { experts: 4.into(), top_k: 2, d_expert: Some(20), layers: Layers::All, ..balanced() };
    let model = model::Config { tie_embeddings: true, kv_heads: None, ..model(Family::Bert) };
    Sizes { model, moe: Some(moe), lora: None, dtype: Dtype::F32, gradients: Dtype::F32, seed: 7, frozen: Vec::new() }
}

/// Two layers of Transformer-XL's kind, both MoE: segments of two tokens that remember three, so more than one before.
pub(crate) fn transformer_xl() -> Sizes {
    let moe = moe::Config { experts: 4.into(), top_k: 2, d_expert: Some(20), layers: Layers::All, ..balanced() };
    let (segment, memory) = (Some(2), Some(3));
    let model = model::Config { segment, memory, kv_heads: None, ..model(Family::TransformerXl) };
    Sizes { model, moe: Some(moe), lora: None, dtype: Dtype::F32, gradients: Dtype::F32, seed: 8, frozen: Vec::new() }
}

/// An encoder and a decoder of two layers of NLLB's kind, the second of each MoE, the head tied.
pub(crate) fn nllb() -> Sizes {
    let moe = moe::Config { experts: 4.into(), top_k: 2, d_expert: Some(20), layers: Layers::Every(2), ..balanced() };
    let model = model::Config { layers: 4, tie_embeddings: true, kv_heads: None, ..model(Family::NllbMoe) };
    Sizes { model, moe: Some(moe), lora: None, dtype: Dtype::F32, gradients: Dtype::F32, seed: 9, frozen: Vec::new() }
}

/// The same with other experts.
pub(crate) fn with(mut sizes: Sizes, change: impl FnOnce(&mut moe::Config)) -> Sizes {
    change(sizes.moe.as_mut().expect("a MoE section"));
    sizes
}

/// The same with a deep encoder and a shallow decoder, whose rows are shorter: experts are in the encoder's second layer
/// and in the only one of the decoder.
pub(crate) fn m2m() -> Sizes {
    let sizes = nllb();
    let (encoder_layers, decoder_layers, source_seq) = (Some(3), Some(1), Some(12));
    let model = model::Config { family: Family::M2m, encoder_layers, decoder_layers, source_seq, ..sizes.model };
    Sizes { model, seed: 11, ..sizes }
}

fn balanced() -> moe::Config {
    let none = Layers::List(Vec::new());
    moe::Config { layers: none, balance_weight: 0.02, z_weight: 0.001, ..moe::Config::of(1, 1) }
}

fn model(family: Family) -> model::Config {
    model::Config {
        family,
        vocab: 31,
        d_model: 16,
        layers: 2,
        encoder_layers: None,
        decoder_layers: None,
        heads: 4,
        kv_heads: Some(2),
        head_dim: None,
        query_rank: None,
        kv_rank: None,
        content_dim: None,
        rotary_dim: None,
        value_dim: None,
        window: None,
        rope_factor: None,
        rope_pretrained: None,
        d_ff: Some(24),
        seq: 8,
        source_seq: None,
        segment: None,
        memory: None,
        dropout: 0.0,
        rope_theta: 10_000.0,
        norm_eps: 1e-5,
        tie_embeddings: false,
        // Large enough that every layer matters.
        init_std: 0.3,
    }
}

/// What a tiny run trains on, and how often.
#[derive(Clone)]
pub(crate) struct Recipe {
    pub(crate) sizes: Sizes,
    /// Rows of a step over all ranks.
    pub(crate) rows: usize,
    pub(crate) micro_batch: usize,
}

impl Recipe {
    pub(crate) fn trainer(&self, rank: &Rank, mesh: &Mesh) -> Trainer {
        self.trainer_with(rank, mesh, HYPER.into()).expect("state stays on the device")
    }

    pub(crate) fn trainer_with(&self, rank: &Rank, mesh: &Mesh, settings: Settings) -> Result<Trainer, optim::Error> {
        let rate = LearningRate { peak: 1e-2, decay: Decay::Linear, warmup_steps: 2, steps: 10, end: 0.1 };
        let mut trainer = Trainer::new(&rank.device, mesh.clone(), &self.sizes, settings, rate, 1.0, BUCKETING)?;
        // As in runs of tasks, and in plans.
        if self.sizes.blueprint().reads_a_source() {
            trainer.rows = RowSums::of_steps(self.rows);
        }
        Ok(trainer)
    }

    /// One rank's part of a step, of rows that depend on the step and the place in it alone.
    pub(crate) fn batches(&self, mesh: &Mesh, step: u64) -> StepBatches {
        let (rank, ranks) = (mesh.data.rank(), mesh.data.size());
        let plan = BatchPlan { seed: 0, rows_per_step: self.rows, micro_batch: self.micro_batch, rank, ranks };
        let micro = |index| {
            let rows = |seq: usize, of: fn(&Recipe, u64, usize) -> Row| {
                let batch = share(plan.share(index), seq, |place| of(self, step, place));
                Batch { micro_batch: index as u32, ..batch }
            };
            match self.sizes.model.row_lengths()[..] {
                [source, seq] => rows(seq, Recipe::row).reading(rows(source, Recipe::source_row)),
                _ => rows(self.sizes.model.seq, Recipe::row),
            }
        };
        StepBatches { step, micro: (0..plan.micro_batches()).map(micro).collect() }
    }

    /// Random tokens in documents of five tokens on average. To predict: the next, or in an encoder one in four that
    /// token 0 stands for.
    fn row(&self, step: u64, place: usize) -> Row {
        let (seq, vocab) = (self.sizes.model.seq as u64, self.sizes.model.vocab as u32);
        let draws = Draws::new(17, Purpose::Test, step, place as u32);
        let token = |i: u64| draws.bits(i) % vocab;
        let begins = |i: u64| i > 0 && draws.bits(1000 + i).is_multiple_of(5);
        let mut row = Row::default();
        let (mut segment, mut position) = (0, 0);
        for i in 0..seq {
            if begins(i) {
                (segment, position) = (segment + 1, 0);
            }
            let (token, target) = match self.sizes.model.is_causal() {
                true => (token(i), if begins(i + 1) { IGNORE } else { token(i + 1) }),
                false if draws.bits(2000 + i).is_multiple_of(4) => (0, token(i)),
                false => (token(i), IGNORE),
            };
            row.tokens.push(token);
            row.targets.push(target);
            row.segments.push(segment);
            row.positions.push(position);
            position += 1;
        }
        row
    }

    /// What the row is a translation of, text by text. Some texts of one have none in the other.
    fn source_row(&self, step: u64, place: usize) -> Row {
        let (seq, vocab) = (self.sizes.model.row_lengths()[0] as u64, self.sizes.model.vocab as u32);
        let draws = Draws::new(18, Purpose::Test, step, place as u32);
        let mut row = Row::default();
        let (mut segment, mut position) = (0, 0);
        for i in 0..seq {
            if i > 0 && draws.bits(1000 + i).is_multiple_of(4) {
                (segment, position) = (segment + 1, 0);
            }
            row.tokens.push(draws.bits(i) % vocab);
            row.targets.push(IGNORE);
            row.segments.push(segment);
            row.positions.push(position);
            position += 1;
        }
        row
    }

    /// Trains for some steps of a run, counted from 1.
    pub(crate) fn train(&self, trainer: &mut Trainer, steps: std::ops::RangeInclusive<u64>) -> Vec<StepReport> {
        let mesh = trainer.mesh.clone();
        steps.map(|step| trainer.step(&self.batches(&mesh, step), step).unwrap()).collect()
    }
}

/// The rows at `places` of a step as a batch.
pub(crate) fn share(places: Range<usize>, seq: usize, row: impl Fn(usize) -> Row) -> Batch {
    let mut batch = Batch::empty(seq, places.start as u64);
    places.for_each(|place| batch.push(&row(place)));
    batch
}

/// Random documents, one a row.
pub(crate) struct Documents;

impl Source for Documents {
    fn len(&self) -> usize {
        7
    }

    fn seq(&self) -> usize {
        8
    }

    fn get(&self, index: usize, _: u64) -> Result<Row, Error> {
        let draws = Draws::new(4, Purpose::Test, 0, index as u32);
        Ok(Row::of_document(&(0..8).map(|i| draws.bits(i) % 31).collect::<Vec<u32>>()))
    }

    fn fingerprint(&self) -> String {
        String::new()
    }
}

/// Tensors, or parts of a model, by global name.
pub(crate) type Tensors = BTreeMap<String, Vec<f32>>;

/// Stands for elements that other ranks hold: a NaN that no arithmetic makes.
const ELSEWHERE: f32 = f32::from_bits(0x7fc5_1ce5);

fn is_elsewhere(x: f32) -> bool {
    x.to_bits() == ELSEWHERE.to_bits()
}

/// The pieces of this rank's weights, of what `read` finds, if anything, for a weight and its number.
pub(crate) fn pieces(model: &mut dyn Parameters, mut read: impl FnMut(&Weight, usize) -> Option<Tensor>) -> Tensors {
    let (mut tensors, mut number) = (Tensors::new(), 0);
    model.visit(&mut |weight| {
        if let Some(all) = read(weight, number) {
            let all = all.to_vec();
            let part = |piece: &Piece| {
                let mut tensor = vec![ELSEWHERE; piece.shape.iter().product()];
                for run in piece.runs() {
                    tensor[run.global..run.global + run.len].copy_from_slice(&all[run.local..run.local + run.len]);
                }
                tensor
            };
            tensors.extend(weight.placement.pieces.iter().map(|piece| (piece.name.clone(), part(piece))));
        }
        number += 1;
    });
    tensors
}

pub(crate) fn weights(model: &mut dyn Parameters) -> Tensors {
    pieces(model, |weight, _| {
        let shape = weight.parameter.shape();
        weight.parameter.stored().with_kept(|kept, first| {
            let mut all = Tensor::from_fn(kept.device(), &shape, |_| ELSEWHERE);
            all.store_f32s(first, &kept.to_vec());
            Some(all)
        })
    })
}

/// Weights under their names, moments and masters under theirs with a prefix: as files name them.
pub(crate) fn state(trainer: &mut Trainer) -> Tensors {
    let Trainer { model, optimizer, .. } = trainer;
    let mut all = weights(model);
    let kept = |weight: &mut Weight, tile: StateTile| {
        let range = tile.elements.clone();
        for (prefix, number) in ["m/", "v/", "master/"].iter().zip(0..tile.strips.count) {
            let strip = tile.read(number);
            for piece in &weight.placement.pieces {
                let tensor = all.entry(format!("{prefix}{}", piece.name));
                let tensor = tensor.or_insert_with(|| vec![ELSEWHERE; piece.shape.iter().product()]);
                for run in piece.runs_within(&range) {
                    let part = &strip[run.local - range.start..][..run.len];
                    tensor[run.global..run.global + run.len].copy_from_slice(part);
                }
            }
        }
        Ok::<_, optim::Error>(())
    };
    optimizer.visit(model, Access::Read, kept).unwrap();
    all
}

/// Of all that is trained.
pub(crate) fn gradients(model: &mut dyn Parameters) -> Tensors {
    pieces(model, |weight, _| {
        let trained = !weight.parameter.is_frozen();
        trained.then(|| weight.parameter.with_gradient(|gradient| gradient.to_owned_copy()))
    })
}

/// This rank's shares of the gradients of all that is trained.
pub(crate) fn gradient_shares(model: &mut dyn Parameters, mesh: &Mesh) -> Tensors {
    pieces(model, |weight, _| {
        if weight.parameter.is_frozen() {
            return None;
        }
        let gradient = weight.parameter.gradient();
        let share = mesh.share(&weight.placement, gradient.len());
        let mut all = Tensor::from_fn(&gradient.device(), &gradient.shape(), |_| ELSEWHERE);
        gradient.with_part(share.clone(), |part| all.store_f32s(share.start, part));
        Some(all)
    })
}

/// Gives every weight of an f32 model, or what is kept of it here, the values under its pieces' names.
pub(crate) fn set(model: &mut dyn Parameters, values: &Tensors) {
    model.visit(&mut |weight| {
        for piece in &weight.placement.pieces {
            let values = values.get(&piece.name).unwrap_or_else(|| panic!("no values for {}", piece.name));
            weight.parameter.stored().with_kept(|kept, first| {
                let here = first..first + kept.len();
                for run in piece.runs_within(&here) {
                    let part = &mut kept.f32s_mut()[run.local - first..][..run.len];
                    part.copy_from_slice(&values[run.global..run.global + run.len]);
                }
            });
        }
    });
}

/// Gives what a model remembers the values under their names, where there are such.
pub(crate) fn set_state(model: &mut dyn Parameters, values: &Tensors) {
    model.visit_buffers(&mut |buffer| {
        for values in buffer.placement.pieces.iter().filter_map(|piece| values.get(&piece.name)) {
            buffer.value = Tensor::from_slice(buffer.value.device(), &[values.len()], values);
        }
    });
}

/// All ranks' tensors together; those on several ranks must be the same, bit for bit.
#[track_caller]
pub(crate) fn union(parts: impl IntoIterator<Item = Tensors>) -> Tensors {
    let mut all = Tensors::new();
    for (name, values) in parts.into_iter().flatten() {
        let whole = all.entry(name.clone()).or_insert_with(|| values.clone());
        for (x, value) in whole.iter_mut().zip(values) {
            match (is_elsewhere(*x), is_elsewhere(value)) {
                (true, _) => *x = value,
                (false, true) => {}
                (false, false) => assert_eq!(x.to_bits(), value.to_bits(), "the copies of {name} differ"),
            }
        }
    }
    for (name, values) in &all {
        assert!(!values.iter().any(|&x| is_elsewhere(x)), "nobody holds all of {name}");
    }
    all
}

pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// How far `got` may be from `want`, both as vectors.
#[derive(Clone, Copy)]
pub(crate) struct Tolerance {
    /// Of the norm of `want`.
    pub(crate) relative: f64,
    /// Of each element, root mean square.
    pub(crate) floor: f64,
}

#[track_caller]
pub(crate) fn near(what: &str, got: &[f32], want: &[f32], tolerance: Tolerance) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let size = norm(&mut want.iter().map(|&w| f64::from(w)));
    let error = norm(&mut got.iter().zip(want).map(|(&g, &w)| f64::from(g) - f64::from(w)));
    let allowed = tolerance.relative * size + tolerance.floor * (want.len() as f64).sqrt();
    assert!(error <= allowed, "{what}: {error:.2e} away from a norm of {size:.3e}, allowed {allowed:.2e}");
}

/// Every tensor against the one of its name.
#[track_caller]
pub(crate) fn all_near(what: &str, got: &Tensors, want: &Tensors, tolerance: Tolerance) {
    assert!(got.keys().eq(want.keys()), "{what}: {:?} instead of {:?}", got.keys(), want.keys());
    for (name, want) in want {
        near(&format!("{what}, {name}"), &got[name], want, tolerance);
    }
}
