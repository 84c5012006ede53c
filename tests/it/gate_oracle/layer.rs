//! A whole layer in f64, small networks as experts included, and its slopes by central differences with the choices
//! held fixed.

use guildhall::moe::gates::Draw;
use guildhall::moe::{Activation, GateKind};

use super::capacity::Routes;
use super::choices::Batch;
use super::losses::{self, Counting, Matrix, Scores};
use crate::reference::{Numbers, network};

/// Half the width of the jitter of the gate `switch`.
const EPS: f64 = 0.1;
const LEAST_NOISE: f64 = 0.01;
/// Curvature and rounding of central differences of this step are together below 1e-8 of the values here.
const STEP: f64 = 1e-5;

pub(super) struct Layer {
    /// Its scores are the layer's own: see [`Layer::batch`].
    pub(super) unscored: Batch,
    pub(super) counting: Counting,
    pub(super) activation: Activation,
    pub(super) d_model: usize,
}

pub(super) struct Output {
    pub(super) y: Vec<f64>,
    pub(super) balance: f64,
    pub(super) z: f64,
}

impl Layer {
    fn x<'a>(&self, numbers: &'a Numbers) -> std::slice::Chunks<'a, f64> {
        numbers["x"].chunks(self.d_model)
    }

    pub(super) fn scores(&self, numbers: &Numbers) -> Scores {
        let Batch { config, draws, first, .. } = &self.unscored;
        let linear = |x: &[f64], weight: &str| -> Vec<f64> {
            let product = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
            numbers[weight].chunks(self.d_model).map(product).collect()
        };
        let (jitter, noise) = (draws.of(Draw::Jitter), draws.of(Draw::Noise));
        let index = |t: usize, width: usize, at: usize| (first + t as u64) * width as u64 + at as u64;
        let clean: Matrix = match config.gate.kind() {
            GateKind::Switch if draws.trains => {
                let factor = |t, d| 1.0 - EPS + 2.0 * EPS * f64::from(jitter.uniform(index(t, self.d_model, d)));
                let seen = |(t, x): (usize, &[f64])| x.iter().enumerate().map(|(d, x)| x * factor(t, d)).collect();
                let seen: Matrix = self.x(numbers).enumerate().map(seen).collect();
                seen.iter().map(|x| linear(x, "gate.weight")).collect()
            }
            _ => self.x(numbers).map(|x| linear(x, "gate.weight")).collect(),
        };
        if config.gate != GateKind::Noisy || !draws.trains {
            return Scores { logits: clean.clone(), clean, sigma: None };
        }
        let size = |x: &f64| x.exp().ln_1p() + LEAST_NOISE;
        let sigma: Matrix =
            self.x(numbers).map(|x| linear(x, "gate.noise.weight").iter().map(size).collect()).collect();
        let noisy = |t: usize, e: usize| {
            clean[t][e] + f64::from(noise.normal(index(t, config.experts.largest(), e))) * sigma[t][e]
        };
        let logits = (0..clean.len()).map(|t| (0..config.experts.largest()).map(|e| noisy(t, e)).collect()).collect();
        Scores { clean, logits, sigma: Some(sigma) }
    }

    /// What the gate decides by.
    pub(super) fn batch(&self, numbers: &Numbers) -> Batch {
        let narrow = |row: &Vec<f64>| row.iter().map(|&l| l as f32).collect();
        Batch { logits: self.scores(numbers).logits.iter().map(narrow).collect(), ..self.unscored.clone() }
    }

    pub(super) fn forward(&self, numbers: &Numbers, routes: &Routes) -> Output {
        let (config, scores) = (&self.unscored.config, self.scores(numbers));
        let mut y = Vec::new();
        for (t, x) in self.x(numbers).enumerate() {
            let weights = losses::weights(config, &scores.logits[t], &routes.chosen[t]);
            let mut sum = vec![0.0; self.d_model];
            for (e, weight) in routes.kept[t].iter().zip(weights) {
                let Some(e) = *e else { continue };
                let out = network(self.activation, numbers, &format!("experts.{e}"), x);
                sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
            }
            y.extend(sum);
        }
        let balance = losses::balance(config, &scores, routes, &self.counting);
        Output { y, balance, z: losses::z(&scores, &self.counting) }
    }

    /// The slopes of `objective` along every number of one name.
    pub(super) fn slopes(
        &self,
        numbers: &Numbers,
        routes: &Routes,
        name: &str,
        objective: impl Fn(&Output) -> f64,
    ) -> Vec<f64> {
        let mut moved = numbers.clone();
        let mut slope = |i: usize| {
            let value = numbers[name][i];
            let mut at = |value| {
                moved.get_mut(name).expect("a copy of numbers")[i] = value;
                objective(&self.forward(&moved, routes))
            };
            let slope = (at(value + STEP) - at(value - STEP)) / (2.0 * STEP);
            at(value);
            slope
        };
        (0..numbers[name].len()).map(&mut slope).collect()
    }
}
