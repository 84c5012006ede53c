//! The router: one linear score per expert, in f32 whatever the model is stored in.

use guildhall_comm::Error;
use guildhall_tensor::{Device, Dtype, RowIds, Tensor, Var};
use std::sync::Arc;

use super::Config;
use super::gates::{Draw, GateDraws, Perturbation};
use crate::parallel::{Init, Parameters, Stream, Weight};

/// The least standard deviation of a noisy router's noise (Shazeer et al. 2017).
const LEAST_NOISE: f32 = 0.01;

/// Scores tokens for experts.
#[derive(Debug)]
pub struct Router {
    weight: Weight,
    bias: Option<Weight>,
    /// Makes the size of the noise; only a noisy router has one.
    noise: Option<Weight>,
    perturbation: Perturbation,
}

/// A router's scores, `[T, E]` each.
pub struct Scores {
    /// What is chosen by.
    pub logits: Var,
    /// Noisy routers in training: the logits before the noise, and its standard deviation.
    pub noise: Option<(Var, Var)>,
}

impl Scores {
    /// Those of all tokens of the stream.
    ///
    /// # Errors
    /// What the tensor group reports.
    pub fn whole(self, stream: &Stream) -> Result<Scores, Error> {
        let noise = match self.noise {
            Some((clean, sigma)) => Some((stream.to_whole(&clean)?, stream.to_whole(&sigma)?)),
            None => None,
        };
        Ok(Scores { logits: stream.to_whole(&self.logits)?, noise })
    }

    /// The logits without noise.
    pub fn clean(&self) -> &Var {
        self.noise.as_ref().map_or(&self.logits, |(clean, _)| clean)
    }
}

impl Router {
    /// `experts` scores from `d_model` features; the weight is named `<name>.weight`.
    pub fn new(
        device: &Arc<Device>,
        name: &str,
        (experts, d_model): (usize, usize),
        init: Init,
        perturbation: Perturbation,
    ) -> Router {
        let matrix = |part: &str, init| {
            Weight::replicated(device, &format!("{name}.{part}"), &[experts, d_model], Dtype::F32, init)
        };
        let noise = (perturbation == Perturbation::Noise).then(|| matrix("noise.weight", init));
        Router { weight: matrix("weight", init), bias: None, noise, perturbation }
    }

    /// The same with a bias, `<name>.bias`.
    pub fn biased(self, device: &Arc<Device>, name: &str) -> Router {
        let experts = self.weight.parameter.shape()[0];
        let bias = Weight::replicated(device, &format!("{name}.bias"), &[experts], Dtype::F32, Init::Zeros);
        Router { bias: Some(bias), ..self }
    }

    /// The same for a rank that scores some tokens of its tensor group alone, if `partial`.
    pub fn partial(self, partial: bool) -> Router {
        let maybe = |weight: Option<Weight>| weight.map(|weight| weight.partial(partial));
        Router { weight: self.weight.partial(partial), bias: maybe(self.bias), noise: maybe(self.noise), ..self }
    }

    /// Scores of tokens `[T, D]`, which have these numbers within the step.
    pub fn scores(&self, x: &Var, tokens: &RowIds, draws: &GateDraws) -> Scores {
        let x = x.cast(Dtype::F32);
        let linear = |x: &Var, weight: &Weight| x.linear(&x.tape().parameter(&weight.parameter), None);
        let scored = |x: &Var| {
            let on_tape = |weight: &Weight| x.tape().parameter(&weight.parameter);
            x.linear(&on_tape(&self.weight), self.bias.as_ref().map(on_tape).as_ref())
        };
        match (self.perturbation, &self.noise) {
            (Perturbation::Jitter(eps), _) if draws.trains => {
                let stream = draws.of(Draw::Jitter);
                let factors = drawn(&x, tokens, |i| 1.0 - eps + 2.0 * eps * stream.uniform(i));
                Scores { logits: scored(&x.mul_constant(&factors)), noise: None }
            }
            (_, Some(noise)) if draws.trains => {
                let clean = scored(&x);
                let stream = draws.of(Draw::Noise);
                let normal = drawn(&clean, tokens, |i| stream.normal(i));
                let least = clean.tape().constant(Tensor::from_fn(clean.device(), clean.shape(), |_| LEAST_NOISE));
                let sigma = linear(&x, noise).softplus().add(&least);
                Scores { logits: clean.add(&sigma.mul_constant(&normal)), noise: Some((clean, sigma)) }
            }
            _ => Scores { logits: scored(&x), noise: None },
        }
    }
}

impl Config {
    /// What the router does to its scores in training.
    pub fn perturbation(&self) -> Perturbation {
        match self.jitter {
            None => self.gate().perturbation(),
            Some(0.0) => Perturbation::None,
            Some(jitter) => Perturbation::Jitter(jitter),
        }
    }

    /// Whether the gate has noise of its own.
    pub fn has_own_noise(&self) -> bool {
        self.gate().perturbation() == Perturbation::Noise
    }
}

/// A draw for every element of something shaped like `x`, whose rows are these tokens.
pub(super) fn drawn(x: &Var, tokens: &RowIds, draw: impl Fn(u64) -> f32) -> Tensor {
    let width = x.value().cols() as u64;
    let of_token = |token: u64| (token * width..(token + 1) * width).map(&draw);
    Tensor::from_values(x.device(), x.shape(), || tokens.iter().flat_map(of_token).collect())
}

impl Parameters for Router {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.weight);
        self.bias.iter_mut().for_each(&mut *f);
        self.noise.iter_mut().for_each(f);
    }
}
