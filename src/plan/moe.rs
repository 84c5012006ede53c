//! A MoE layer, of sizes: router, gate, experts, losses. Written as `src/moe/{layer,experts,beside,balance}.rs` are.

use guildhall_comm::Collective;
use guildhall_tensor::{Cause, Dtype, Part as Segment};

use super::books::{Part, When};
use super::layout::{Load, Task};
use super::model::{Builder, Weight, activated, on};
use super::moves::{Group, Stream};
use super::sketch::Array;
use super::tape::Tape;
use super::var::Var;
use crate::moe::gates::{BalanceKind, Perturbation};
use crate::moe::{Activation, BalanceScope, Config, GateKind, Weighting};
use crate::parallel::Axis;

/// Stacked two-layer networks.
pub(super) struct Networks {
    activation: Activation,
    inner: u64,
    width: u64,
    first: Weight,
    second: Weight,
    biases: Option<[Weight; 2]>,
    /// Adds the second biases, which are whole, once over the slices.
    once: Stream,
}

enum Beside {
    Nothing,
    Shared(Networks),
    /// With the weight and bias of the proportions.
    Residual(Networks, [Weight; 2]),
}

/// The weights of one layer on one rank.
pub(super) struct Moe {
    pub(super) config: Config,
    pub(super) rank: usize,
    router: Weight,
    noise: Option<Weight>,
    pub(super) experts: Networks,
    /// Ranks over which the experts are spread.
    pub(super) degree: usize,
    beside: Beside,
    /// A balancing bias, and the loads of the step before.
    _state: Vec<Array>,
}

/// What the model keeps of a layer until its losses are added up.
pub(super) struct Said {
    pub(super) balance: Var,
    pub(super) z: Var,
}

struct Scores {
    logits: Var,
    noise: Option<(Var, Var)>,
}

impl Scores {
    fn whole(self, stream: &Stream) -> Scores {
        let noise = self.noise.map(|(clean, sigma)| (stream.whole_of(&clean), stream.whole_of(&sigma)));
        Scores { logits: stream.whole_of(&self.logits), noise }
    }
}

impl Networks {
    fn new(builder: &Builder, (count, inner): (u64, u64), slices: Axis, holders: Axis) -> Networks {
        let once = Stream { tokens: 0, group: builder.task.group(slices, builder.rank), split: false };
        let inner = once.group.share(inner);
        let sizes = &builder.task.sizes;
        let (width, activation) = (sizes.model.d_model as u64, sizes.activation());
        let outer = if activation == Activation::SwiGlu { 2 * inner } else { inner };
        let weight = |rows, cols| builder.weight((rows, cols), sizes.dtype, holders);
        let first = weight(count * outer, width);
        let first_bias = activation.has_biases().then(|| weight(count, inner));
        let second = weight(count * width, inner);
        let biases = first_bias.map(|bias| [bias, weight(count, width)]);
        Networks { activation, inner, width, first, second, biases, once }
    }

    /// The weights on a tape, in the order in which the original puts them there.
    fn on(&self, tape: &Tape) -> Vec<Var> {
        let mut all: Vec<Var> = [&self.first, &self.second].into_iter().map(|weight| on(tape, weight)).collect();
        if let Some([first, second]) = &self.biases {
            all.extend([on(tape, first), self.once.once(on(tape, second))]);
        }
        all
    }

    /// What experts with these weights make of rows sorted by expert.
    pub(super) fn apply(&self, weights: &[Var], rows: &Var) -> Var {
        let (activation, inner, width) = (self.activation, self.inner, self.width);
        rows.tape.segment(Segment::Experts, rows, weights, move |rows, weights| match (activation, weights) {
            (Activation::SwiGlu, [first, second]) => rows.grouped_swiglu(first, second, inner),
            (activation, [first, second, first_bias, second_bias]) => {
                let hidden = rows.grouped_linear(first, first_bias, inner);
                let second = [second.clone(), second_bias.clone()];
                rows.tape.segment(Segment::Activation, &hidden, &second, move |hidden, second| {
                    activated(activation, hidden).grouped_linear(&second[0], &second[1], width)
                })
            }
            (activation, weights) => panic!("{} weights for {activation:?}", weights.len()),
        })
    }
}

impl Moe {
    pub(super) fn new(builder: &Builder, index: usize, config: &Config) -> Moe {
        let (task, sizes) = (builder.task, &builder.task.sizes);
        let (d, d_expert, experts) = (sizes.model.d_model as u64, sizes.d_expert(config) as u64, config.experts as u64);
        let common = if task.layout.sequence { Axis::World } else { Axis::Data };
        let router = || builder.weight((experts, d), Dtype::F32, common);
        let first = router();
        let noisy = config.selector().gate.perturbation() == Perturbation::Noise;
        let noise = noisy.then(router);
        let degree = task.degree(index);
        let group = task.group(Axis::Expert(degree), builder.rank);
        let local = task.layout.expert_table(config.experts, degree).of(group.index as usize).len();
        let networks = Networks::new(builder, (local as u64, d_expert), Axis::ExpertTensor, Axis::ExpertData(degree));
        let beside = |inner| Networks::new(builder, (1, inner), Axis::Tensor, Axis::Data);
        let beside = if config.residual {
            let network = beside(d_expert);
            let proportions = [(2, d), (1, 2)].map(|size| builder.weight(size, Dtype::F32, common));
            Beside::Residual(network, proportions)
        } else if config.shared_experts > 0 {
            Beside::Shared(beside(config.shared_experts as u64 * d_expert))
        } else {
            Beside::Nothing
        };
        let state = |is_there: bool, len| is_there.then(|| first.value.f32(1, len));
        let bias = state(config.selector().gate.has_bias(), experts);
        let _state = bias.into_iter().chain(state(config.scope() == BalanceScope::GlobalBatch, experts + 1));
        let _state = _state.collect();
        Moe {
            config: config.clone(),
            rank: builder.rank,
            router: first,
            noise,
            experts: networks,
            degree,
            beside,
            _state,
        }
    }

    /// x `[T, D]` gives `[T, D]`.
    pub(super) fn forward(&self, x: &Var, stream: &Stream, task: &Task, (index, load): (usize, &Load)) -> (Var, Said) {
        let books = x.tape.books().clone();
        books.part.set(Part::Routing);
        let (data, selector) = (task.group(Axis::Data, self.rank), self.config.selector());
        let scores = self.scores(x).whole(stream);
        let _logits = scores.logits.value().to_f32();
        self.exchange_digests(&x.tape, task, data);
        let (weighting, slots) = (selector.gate.weighting(), selector.gate.slots() as u64);
        let probabilities = probabilities(weighting, &scores.logits);
        let weights = weights(weighting, &scores.logits, &probabilities, slots);

        let experts = self.experts.on(&x.tape);
        let routes = |tokens: u64| self.routes(tokens, slots);
        let home = self.through_experts(x, &experts, task, (load, index, routes(x.rows())));
        books.part.set(Part::Routing);
        let own_weights = if stream.split { weights.gather_rows(stream.here()) } else { weights.clone() };
        let combined = home.weighted_sum_rows(&own_weights);
        drop(home);
        books.part.set(Part::FeedForward);
        let y = self.join(x, combined, stream);
        books.part.set(Part::Routing);
        // Losses by sequence are by document; four a row are planned.
        let sequences = 4 * stream.tokens.div_ceil(task.sizes.model.seq as u64);
        let (balance, z) = self.losses(&scores, &probabilities, &weights, (data, sequences));
        (y, Said { balance, z })
    }

    /// Rows that so many tokens become, where nothing is dropped.
    fn routes(&self, tokens: u64, slots: u64) -> u64 {
        match self.config.gate {
            GateKind::ExpertChoice => {
                let factor = self.config.capacity_factor.unwrap_or(1.0);
                ((tokens * self.config.top_k as u64) as f64 * factor).ceil() as u64
            }
            _ => tokens * slots,
        }
    }

    fn scores(&self, x: &Var) -> Scores {
        let x = x.cast(Dtype::F32);
        let linear = |x: &Var, weight: &Weight| x.linear(&on(&x.tape, weight), None);
        match (self.config.selector().gate.perturbation(), &self.noise) {
            (Perturbation::Jitter(_), _) => {
                let factors = x.value().f32_like();
                Scores { logits: linear(&x.mul_constant(&factors), &self.router), noise: None }
            }
            (_, Some(noise)) => {
                let clean = linear(&x, &self.router);
                let normal = clean.value().f32_like();
                let least = clean.tape.constant(clean.value().f32_like());
                let sigma = linear(&x, noise).pointwise().add(&least);
                Scores { logits: clean.add(&sigma.mul_constant(&normal)), noise: Some((clean, sigma)) }
            }
            _ => Scores { logits: linear(&x, &self.router), noise: None },
        }
    }

    /// What ranks that share routing groups tell each other.
    fn exchange_digests(&self, tape: &Tape, task: &Task, data: Group) {
        let (books, place) = (tape.books(), (data.index as usize, data.size as usize));
        let homes = task.homes(data.size);
        let Some(digests) = self.config.selector().exchange(&homes, place, self.config.experts) else { return };
        if tape.is_again() {
            return;
        }
        let sum = |words: &[usize]| words.iter().map(|&words| words as u64).sum::<u64>();
        let (send, receive) = (sum(&digests.send), sum(&digests.receive));
        let travelling = |words| Array::new(books, Cause::Communication, (1, words), Dtype::F32);
        // Nothing is sent to this rank itself.
        books.send(data.axis, Collective::AllToAll, When::Now, 4 * send);
        let (kept, sent, received) = (travelling(receive), travelling(send), travelling(receive));
        drop((sent, received));
        let _group = travelling(digests.largest_group() / 4);
        drop(kept);
    }

    fn join(&self, x: &Var, routed: Var, stream: &Stream) -> Var {
        let of_all = |network: &Networks| match stream.group.size {
            1 => network.apply(&network.on(&x.tape), x),
            _ => {
                let x = stream.parts_of(x);
                stream.sum_of_parts(network.apply(&network.on(&x.tape), &x))
            }
        };
        match &self.beside {
            Beside::Nothing => routed,
            Beside::Shared(network) => routed.add(&of_all(network)),
            Beside::Residual(network, proportions) => {
                let beside = of_all(network);
                let [weight, bias] = proportions.each_ref().map(|weight| on(&x.tape, weight));
                let proportions = x.cast(Dtype::F32).linear(&weight, Some(&bias)).softmax();
                let part = |rows: &Var| rows.weighted_sum_rows(&proportions.select(1));
                part(&routed).add(&part(&beside))
            }
        }
    }

    fn losses(
        &self,
        scores: &Scores,
        probabilities: &Var,
        weights: &Var,
        (data, sequences): (Group, u64),
    ) -> (Var, Var) {
        // Sums of loads are facts that decisions rest on.
        let sum = |numbers: u64| match weights.tape.is_again() {
            true => {}
            false => data.all_reduce(weights.tape.books(), When::Now, numbers * 8),
        };
        let clean = scores.noise.as_ref().map_or(&scores.logits, |(clean, _)| clean);
        let per_row = || clean.value().f32(clean.rows(), 1);
        let z = clean.to_scalar((clean.value().clone(), per_row(), per_row()));
        let gate = self.config.selector().gate;
        let (experts, micro) = (self.config.experts as u64, self.config.scope() == BalanceScope::MicroBatch);
        let balance = self.config.balance();
        if balance != BalanceKind::ImportanceAndLoad {
            if micro && balance != BalanceKind::AllLayers {
                sum(experts);
            }
            return (probabilities.to_scalar(probabilities.value().f32_like()), z);
        }
        let importance = weights.scatter_columns(experts);
        let load = match &scores.noise {
            Some((clean, sigma)) if (gate.slots() as u64) < experts => clean.chance_of_top(sigma, &scores.logits),
            _ => weights.tape.constant(weights.value().f32_like()).scatter_columns(experts),
        };
        let variation = |x: &Var| {
            if micro {
                sum(experts + 1);
            }
            x.to_scalar(x.value().f32(sequences, x.cols()))
        };
        (variation(&importance).add(&variation(&load)), z)
    }
}

fn probabilities(weighting: Weighting, logits: &Var) -> Var {
    match weighting {
        Weighting::Sigmoid { .. } => logits.pointwise().select(logits.cols()),
        _ => logits.softmax(),
    }
}

fn weights(weighting: Weighting, logits: &Var, probabilities: &Var, slots: u64) -> Var {
    match weighting {
        Weighting::Normalised | Weighting::Probability => probabilities.select(slots),
        Weighting::AmongChosen => logits.select(slots),
        Weighting::Sigmoid { .. } => logits.pointwise().select(slots).scaled(),
        Weighting::PlainSigmoid => logits.pointwise().select(slots),
        Weighting::Even => logits.tape.constant(logits.value().f32(logits.rows(), slots)),
    }
}
