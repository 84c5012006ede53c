//! A MoE layer as loops over tokens in f64, and its gradients by central differences: no tape, no plan, no ranks.

use std::collections::BTreeMap;

use guildhall::moe::Activation;

/// Numbers by name: `x`, `gate.weight`, `experts.<e>.<part>`, and of a residual layer `mlp.0.<part>` and
/// `coefficient.{weight,bias}`. A network is of the kind that its parts' names say.
pub(crate) type Numbers = BTreeMap<String, Vec<f64>>;

/// What the loops need to know besides numbers.
pub(crate) struct MoeLoops {
    pub(crate) d_model: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    /// Of networks with biases.
    pub(crate) activation: Activation,
    /// The sequence of every token, any numbers.
    pub(crate) sequence: Vec<u32>,
    /// Whether a token counts in the losses.
    pub(crate) counts: Vec<bool>,
    /// Whether the result of a route is not skipped.
    pub(crate) kept: Vec<bool>,
}

pub(crate) struct MoeOutput {
    pub(crate) y: Vec<f64>,
    pub(crate) balance: f64,
    pub(crate) z: f64,
}

/// Routing must not hang on rounding: scores are equal or this far apart.
const GAP: f64 = 1e-4;
/// Errors of central differences of this step, curvature and rounding alike, are below 1e-9 of the values here.
const STEP: f64 = 1e-5;

/// By places: nothing here is inlined, and most of the loops' time is spent in this one.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut sum = 0.0;
    for at in 0..a.len() {
        sum += a[at] * b[at];
    }
    sum
}

fn log_sum_exp(x: &[f64]) -> f64 {
    x.iter().map(|x| x.exp()).sum::<f64>().ln()
}

impl MoeLoops {
    fn tokens(&self) -> usize {
        self.sequence.len()
    }

    fn x<'a>(&self, numbers: &'a Numbers, token: usize) -> &'a [f64] {
        &numbers["x"][token * self.d_model..(token + 1) * self.d_model]
    }

    fn logits(&self, numbers: &Numbers, token: usize) -> Vec<f64> {
        numbers["gate.weight"].chunks(self.d_model).map(|row| dot(row, self.x(numbers, token))).collect()
    }

    /// The experts of every token: the best scores, of equal ones the lower number first.
    pub(crate) fn routing(&self, numbers: &Numbers) -> Vec<Vec<usize>> {
        let best = |token| {
            let scores = self.logits(numbers, token);
            let mut order: Vec<usize> = (0..self.experts).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
            let gaps = order.windows(2).map(|pair| scores[pair[0]] - scores[pair[1]]);
            assert!(
                gaps.into_iter().all(|gap| gap == 0.0 || gap > GAP),
                "token {token}: scores {scores:?} are too close"
            );
            order.truncate(self.top_k);
            order
        };
        (0..self.tokens()).map(best).collect()
    }

    pub(crate) fn load(&self, routing: &[Vec<usize>]) -> Vec<u64> {
        let mut load = vec![0; self.experts];
        routing.iter().flatten().for_each(|&expert| load[expert] += 1);
        load
    }

    /// The layer with its choices given, so that it can be differentiated.
    pub(crate) fn forward(&self, numbers: &Numbers, routing: &[Vec<usize>]) -> MoeOutput {
        let logits: Vec<Vec<f64>> = (0..self.tokens()).map(|token| self.logits(numbers, token)).collect();
        let mut y = Vec::new();
        for (token, chosen) in routing.iter().enumerate() {
            let weights: Vec<f64> = chosen.iter().map(|&expert| logits[token][expert].exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sum = vec![0.0; self.d_model];
            let kept = &self.kept[token * self.top_k..][..self.top_k];
            for ((&expert, weight), _) in chosen.iter().zip(weights).zip(kept).filter(|(_, kept)| **kept) {
                let out = network(self.activation, numbers, &format!("experts.{expert}"), self.x(numbers, token));
                sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight / total * out);
            }
            y.extend(self.beside(numbers, token, sum));
        }
        MoeOutput { y, balance: self.balance(&logits, routing), z: self.z(&logits) }
    }

    /// Of a residual layer, `c_0 routed + c_1 mlp(x)` with c a softmax of two scores; of another, what was routed.
    fn beside(&self, numbers: &Numbers, token: usize, routed: Vec<f64>) -> Vec<f64> {
        let Some(weight) = numbers.get("coefficient.weight") else { return routed };
        let (x, bias) = (self.x(numbers, token), &numbers["coefficient.bias"]);
        let score = |which: usize| dot(&weight[which * self.d_model..][..self.d_model], x) + bias[which];
        let share = 1.0 / (1.0 + (score(1) - score(0)).exp());
        let all = network(self.activation, numbers, "mlp.0", x);
        routed.iter().zip(all).map(|(routed, all)| share * routed + (1.0 - share) * all).collect()
    }

    fn valid(&self) -> f64 {
        self.counts.iter().filter(|&&counts| counts).count().max(1) as f64
    }

    /// `sum_s n_s / N * E * sum_e f_se P_se` over the sequences' counting tokens.
    fn balance(&self, logits: &[Vec<f64>], routing: &[Vec<usize>]) -> f64 {
        let mut sequences = BTreeMap::<u32, Vec<usize>>::new();
        for token in (0..self.tokens()).filter(|&token| self.counts[token]) {
            sequences.entry(self.sequence[token]).or_default().push(token);
        }
        let of_sequence = |tokens: &Vec<usize>| {
            let n = tokens.len() as f64;
            let of_expert = |expert: usize| {
                let routes = tokens.iter().filter(|&&token| routing[token].contains(&expert)).count() as f64;
                let probability = |&token: &usize| (logits[token][expert] - log_sum_exp(&logits[token])).exp();
                routes / (n * self.top_k as f64) * tokens.iter().map(probability).sum::<f64>() / n
            };
            n / self.valid() * self.experts as f64 * (0..self.experts).map(of_expert).sum::<f64>()
        };
        sequences.values().map(of_sequence).sum()
    }

    fn z(&self, logits: &[Vec<f64>]) -> f64 {
        let counting = logits.iter().zip(&self.counts).filter(|(_, counts)| **counts);
        counting.map(|(logits, _)| log_sum_exp(logits).powi(2)).sum::<f64>() / self.valid()
    }

    /// The slope of `objective` along every number, with choices given.
    pub(crate) fn gradients(
        &self,
        numbers: &Numbers,
        routing: &[Vec<usize>],
        objective: impl Fn(&MoeOutput) -> f64,
    ) -> Numbers {
        let mut moved = numbers.clone();
        let mut slope = |name: &String, i: usize| {
            let value = numbers[name][i];
            let mut at = |value| {
                moved.get_mut(name).expect("a copy of numbers")[i] = value;
                objective(&self.forward(&moved, routing))
            };
            let slope = (at(value + STEP) - at(value - STEP)) / (2.0 * STEP);
            at(value);
            slope
        };
        let all =
            |(name, values): (&String, &Vec<f64>)| (name.clone(), (0..values.len()).map(|i| slope(name, i)).collect());
        numbers.iter().map(all).collect()
    }
}

/// An expert, or the network beside them, whatever its width: SwiGLU without biases, or ReLU or GELU with.
pub(crate) fn network(activation: Activation, numbers: &Numbers, name: &str, x: &[f64]) -> Vec<f64> {
    let of = |part: &str| &numbers[&format!("{name}.{part}")];
    let times = |part: &str, x: &[f64]| of(part).chunks(x.len()).map(|row| dot(row, x)).collect::<Vec<_>>();
    let plus = |y: Vec<f64>, part: &str| y.iter().zip(of(part)).map(|(y, b)| y + b).collect::<Vec<_>>();
    if numbers.contains_key(&format!("{name}.w1.weight")) {
        let (gate, up) = (times("w1.weight", x), times("w3.weight", x));
        let hidden: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        times("w2.weight", &hidden)
    } else {
        let activation = if activation == Activation::Relu { relu } else { gelu };
        let hidden = plus(times("fc_in.weight", x), "fc_in.bias");
        let hidden: Vec<f64> = hidden.into_iter().map(activation).collect();
        plus(times("fc_out.weight", &hidden), "fc_out.bias")
    }
}

fn relu(x: f64) -> f64 {
    x.max(0.0)
}

/// In its tanh form, as GPT-2's.
fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}
