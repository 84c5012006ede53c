//! Auxiliary losses that keep experts busy and logits small.
//!
//! Both are sums over tokens that count, divided by the step's global number of them: like the main loss, they do not
//! depend on the mesh, on packing or on padding. The balance loss compares loads within a scope, by default each
//! sequence (a document's part of a row), never within whatever a rank happens to hold.

use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::ops::RowGroup;
use guildhall_tensor::{Device, Indices, Kept, Tape, Tensor, Var};

use super::gates::BalanceKind;
use super::router::Scores;
use super::{BalanceScope, Routing};

/// Which tokens count, which sequence each belongs to, and how much one token weighs.
#[derive(Clone, Debug)]
pub struct Importance {
    /// Runs of tokens of one sequence, in order: the first token of each, and the end.
    starts: Vec<usize>,
    /// Whether a token counts.
    counts: Vec<bool>,
    /// 1 / (tokens that count in the whole step).
    per_token: f32,
    tokens: usize,
    /// Runs, where only their number is known.
    counted: Option<usize>,
}

impl Importance {
    /// `segments` and `counts` have one entry a token; rows are `seq` long.
    pub fn new(segments: &[u32], seq: usize, counts: Vec<bool>, per_token: f32) -> Importance {
        assert_eq!(segments.len(), counts.len(), "one segment and one flag a token");
        let begins = |t: usize| t.is_multiple_of(seq) || segments[t] != segments[t - 1];
        let mut starts: Vec<usize> = (0..segments.len()).filter(|&t| begins(t)).collect();
        starts.push(segments.len());
        Importance { starts, counts, per_token, tokens: segments.len(), counted: None }
    }

    /// Of so many tokens in so many sequences on a device that knows sizes alone.
    pub fn counted(tokens: usize, sequences: usize) -> Importance {
        Importance { starts: Vec::new(), counts: Vec::new(), per_token: 0.0, tokens, counted: Some(sequences) }
    }

    fn sequences(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// The weight of every token in a loss that is a mean over tokens.
    fn weights(&self, device: &Arc<Device>) -> Tensor {
        Tensor::from_fn(device, &[self.tokens], |t| if self.counts[t] { self.per_token } else { 0.0 })
    }
}

/// The auxiliary losses of one layer, unweighted, on the tape.
pub struct BalanceLoss {
    /// Of [`BalanceKind::AllLayers`] the mean probabilities `[1, E]`, for [`BalanceLoss::of_all_layers`]; otherwise a
    /// scalar. Product losses: 1 when routes are spread evenly, up to E when all go to one expert.
    pub balance: Var,
    /// Mean square of the logits' log-sum-exp.
    pub z: Var,
}

/// What the losses of one layer are made of.
pub struct LossInputs<'a> {
    pub scores: &'a Scores,
    /// `[T, E]`, rows that sum to 1.
    pub probabilities: &'a Var,
    /// `[T, slots]`, of the chosen.
    pub weights: &'a Var,
    pub routing: &'a Routing,
    pub importance: &'a Importance,
    pub kind: BalanceKind,
    pub scope: BalanceScope,
    /// Routes of each expert in the step before; empty before the first.
    pub previous_load: &'a [f32],
}

impl BalanceLoss {
    /// Product losses: `balance = sum_t sum_e (E f_e / N) p_te` over tokens that count, f the share of routes within the
    /// scope (Fedus et al. 2021, eq. 4); the gradient passes through p alone. Noisy gates have importance and load instead.
    /// `z = sum_t lse(logits_t)^2 / N` of the logits without noise (Zoph et al. 2022). Collective over `world` for the
    /// micro-batch's scope.
    ///
    /// # Errors
    /// What the world reports.
    pub fn new(inputs: &LossInputs, world: &Arc<dyn Communicator>) -> Result<BalanceLoss, Error> {
        let device = inputs.probabilities.device();
        let z = inputs.scores.clean().weighted_square_log_sum_exp(inputs.importance.weights(device));
        let balance = match inputs.kind {
            BalanceKind::ImportanceAndLoad => importance_and_load(inputs, world)?,
            BalanceKind::AllLayers => inputs.mean_probabilities(),
            BalanceKind::AllChoices | BalanceKind::FirstChoices => {
                inputs.probabilities.dot_constant(inputs.coefficients(world)?)
            }
        };
        Ok(BalanceLoss { balance, z })
    }
}

impl BalanceLoss {
    /// The loss of a micro-batch over its MoE layers: `E sum_e F_e P_e` with `F_e` the routes to expert e by token, `P_e` its
    /// mean probability, both over the tokens of all layers together. `loads` are this rank's, by layer. Collective over
    /// `world`.
    ///
    /// # Errors
    /// What the world reports.
    pub fn of_all_layers(
        means: &[Var],
        loads: &[&[u64]],
        top_k: usize,
        world: &Arc<dyn Communicator>,
    ) -> Result<Var, Error> {
        let experts = means[0].value().cols();
        let mut routes: Vec<f64> = (0..experts).map(|e| loads.iter().map(|load| load[e]).sum::<u64>() as f64).collect();
        world.sum_f64(&mut routes)?;
        let factor = (experts * top_k) as f64 / (routes.iter().sum::<f64>().max(1.0) * means.len() as f64);
        let line: Vec<f32> = routes.iter().map(|n| (factor * n) as f32).collect();
        let part = |mean: &Var| mean.dot_constant(Tensor::from_slice(mean.device(), mean.shape(), &line));
        let parts = means.iter().map(part).reduce(|sum, part| sum.add(&part));
        Ok(parts.expect("a layer"))
    }
}

impl LossInputs<'_> {
    /// `[1, E]`: of this rank's tokens that count, divided by all that do in the step.
    fn mean_probabilities(&self) -> Var {
        let (tokens, experts) = (self.probabilities.value().rows(), self.routing.experts);
        if tokens == 0 {
            return self.probabilities.tape().constant(Tensor::zeros(self.probabilities.device(), &[1, experts]));
        }
        let weights = self.importance.weights(self.probabilities.device()).reshape(&[1, tokens]);
        self.probabilities.weighted_sum_rows(&self.probabilities.tape().constant(weights), 0..tokens as u32)
    }

    /// What multiplies each token's probability of each expert: `E f_e / N`, zero for tokens that do not count. `[T, E]`.
    fn coefficients(&self, world: &Arc<dyn Communicator>) -> Result<Tensor, Error> {
        let within_sequences = || balance_lines(self.routing, self.importance, self.kind).of_tokens(self.probabilities);
        let load = match self.scope {
            BalanceScope::Sequence => return Ok(within_sequences()),
            BalanceScope::GlobalBatch if self.previous_load.is_empty() => return Ok(within_sequences()),
            BalanceScope::GlobalBatch => self.previous_load.iter().map(|&n| f64::from(n)).collect(),
            BalanceScope::MicroBatch => {
                let tokens = (0..self.importance.counts.len()).filter(|&t| self.importance.counts[t]);
                let load: Vec<f64> = load_of(self.routing, tokens, self.kind).into_iter().map(f64::from).collect();
                sum_over(world, load, self.probabilities.tape())?
            }
        };
        let (experts, all) = (self.routing.experts as f64, load.iter().sum::<f64>().max(1.0));
        let line = load.iter().map(|n| (experts * n / all) as f32 * self.importance.per_token);
        let lines = line.chain(vec![0.0; self.routing.experts]).collect();
        let known = || self.importance.counts.iter().map(|&counts| u32::from(!counts)).collect();
        let token = match self.importance.counted {
            Some(_) => Indices::Counted(self.importance.tokens),
            None => Indices::Known(known()),
        };
        Ok(BalanceLines { lines, token }.of_tokens(self.probabilities))
    }

    /// The rows of x `[T, E]` that are summed before their variation is taken.
    fn row_groups(&self, x: &Var, world: &Arc<dyn Communicator>) -> Result<Vec<RowGroup>, Error> {
        let Importance { counts, per_token, counted, .. } = self.importance;
        let counting =
            |tokens: std::ops::Range<usize>| tokens.filter(|&t| counts[t]).map(|t| t as u32).collect::<Vec<u32>>();
        let whole = |rows: Vec<u32>| {
            let weight = rows.len() as f32 * per_token;
            RowGroup { rows, elsewhere: Vec::new(), weight, share: 1.0 }
        };
        match self.scope {
            BalanceScope::Sequence if counted.is_some() => return Ok(vec![whole(Vec::new()); counted.unwrap_or(0)]),
            BalanceScope::Sequence => return Ok(self.importance.sequences().map(counting).map(whole).collect()),
            BalanceScope::MicroBatch => {}
            BalanceScope::GlobalBatch => panic!("the loads of the step before have no importance"),
        }
        let (rows, value, experts) = (counting(0..counts.len()), x.value().to_vec(), self.routing.experts);
        let mut own = vec![0.0; experts + 1];
        for &row in &rows {
            let line = &value[row as usize * experts..][..experts];
            own.iter_mut().zip(line).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        own[experts] = rows.len() as f64;
        let all = sum_over(world, own.clone(), x.tape())?;
        let elsewhere = (0..experts).map(|e| all[e] - own[e]).collect();
        let (weight, share) = (all[experts] as f32 * per_token, own[experts] / all[experts].max(1.0));
        Ok(vec![RowGroup { rows, elsewhere, weight, share }])
    }
}

/// Loads and importances are facts that decisions rest on: a layer that runs again does not ask for them again.
fn sum_over(world: &Arc<dyn Communicator>, own: Vec<f64>, tape: &Tape) -> Result<Vec<f64>, Error> {
    tape.keep(Kept::Decision, || {
        let mut all = own;
        world.sum_f64(&mut all)?;
        Ok(all)
    })
}

/// `CV^2(importance) + CV^2(load)` (Shazeer et al. 2017) within each sequence or the micro-batch, weighted by its share
/// of the tokens that count.
fn importance_and_load(inputs: &LossInputs, world: &Arc<dyn Communicator>) -> Result<Var, Error> {
    let routing = inputs.routing;
    let importance = inputs.weights.scatter_columns(&routing.weighed(), routing.experts);
    let load = match &inputs.scores.noise {
        Some((clean, sigma)) if routing.k < routing.experts => {
            clean.chance_of_top(sigma, &inputs.scores.logits, routing.k)
        }
        _ => {
            let ones = Tensor::from_fn(inputs.weights.device(), inputs.weights.shape(), |_| 1.0);
            inputs.weights.tape().constant(ones).scatter_columns(&routing.choices(), routing.experts)
        }
    };
    let variation = |x: &Var| Ok::<_, Error>(x.squared_variation(&inputs.row_groups(x, world)?));
    Ok(variation(&importance)?.add(&variation(&load)?))
}

/// Routes of some tokens to each expert, before any was dropped.
fn load_of(routing: &Routing, tokens: impl IntoIterator<Item = usize>, kind: BalanceKind) -> Vec<f32> {
    let (k, mut load) = (routing.k, vec![0.0f32; routing.experts]);
    let counted = if kind == BalanceKind::FirstChoices { 1 } else { k };
    for &route in tokens.into_iter().flat_map(|t| &routing.chosen[t * k..t * k + counted]) {
        if route != Routing::DROPPED {
            load[route as usize] += 1.0;
        }
    }
    load
}

/// Coefficients that many tokens have in common.
struct BalanceLines {
    /// `[lines, E]`.
    lines: Vec<f32>,
    /// Each token's line.
    token: Indices,
}

impl BalanceLines {
    /// A line for each token, in the shape of the probabilities `[T, E]`.
    fn of_tokens(self, probabilities: &Var) -> Tensor {
        let experts = probabilities.cols();
        let shape = [self.lines.len() / experts, experts];
        Tensor::from_slice(probabilities.device(), &shape, &self.lines).gathered_rows(&self.token)
    }
}

/// The coefficients of every sequence by itself, and zeros for tokens that do not count.
fn balance_lines(routing: &Routing, importance: &Importance, kind: BalanceKind) -> BalanceLines {
    let experts = routing.experts;
    if let Some(sequences) = importance.counted {
        return BalanceLines {
            lines: vec![0.0; (sequences + 1) * experts],
            token: Indices::Counted(importance.tokens),
        };
    }
    let (mut lines, mut token) = (vec![0.0; experts], vec![0; importance.counts.len()]);
    for sequence in importance.sequences() {
        let tokens: Vec<usize> = sequence.filter(|&t| importance.counts[t]).collect();
        let load = load_of(routing, tokens.iter().copied(), kind);
        let factor = experts as f32 * importance.per_token / load.iter().sum::<f32>().max(1.0);
        let line = (lines.len() / experts) as u32;
        lines.extend(load.iter().map(|load| factor * load));
        tokens.into_iter().for_each(|t| token[t] = line);
    }
    BalanceLines { lines, token: Indices::Known(token) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_loads_give_equal_coefficients_and_padding_none() {
        let routing = Routing::new(vec![0, 1, 0, 1, 1, 1], 1, 2);
        let importance = Importance::new(&[0, 0, 0, 0, 1, 1], 6, vec![true, true, true, true, true, false], 0.2);
        let BalanceLines { lines, token } = balance_lines(&routing, &importance, BalanceKind::AllChoices);
        let got: Vec<f32> = token.known().iter().flat_map(|&line| &lines[line as usize * 2..][..2]).copied().collect();
        assert_eq!(got, [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.0, 0.4, 0.0, 0.0]);
    }
}
