//! Transformer-XL's attention (Dai et al. 2019): a row is read in segments, and a token sees the earlier tokens of its
//! segment and the memory before it, through which no gradient flows. Scores depend on what tokens are and on how far
//! apart they are; a token does not know where it stands.

use std::sync::Arc;

use guildhall_tensor::ops::{Relative, Stretches, reach, relative_attend_cached, sinusoids};
use guildhall_tensor::{Device, Part, Tape, Tensor, Var};

use super::Sizes;
use super::cache::Cache;
use super::linear::{Cut, Linear, LinearShape, product};
use crate::moe::Error;
use crate::parallel::{Mesh, Parameters, Placement, Spread, Stream, Weight};

/// Projections of one layer, without biases, and the two biases of its scores; this rank's heads.
#[derive(Debug)]
pub(super) struct RelativeAttention {
    queries: Linear,
    keys_values: Linear,
    distances: Linear,
    out: Linear,
    /// u, `[heads here, head_dim]`.
    content_bias: Weight,
    /// v, `[heads here, head_dim]`.
    position_bias: Weight,
    /// R, `[reach, D]`: sines and cosines of the distances there can be. Empty where there are only sizes.
    waves: Vec<f32>,
    reach: usize,
}

impl RelativeAttention {
    pub(super) fn new(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> RelativeAttention {
        let (d, heads) = (sizes.model.d_model, sizes.model.heads);
        let linear = |parts: &[&str], cut, init| {
            let outputs: Vec<_> = parts.iter().map(|part| (format!("{name}.{part}_proj"), d)).collect();
            Linear::new(device, LinearShape { outputs: &outputs, inputs: d, cut }, sizes, (init, false))
        };
        let bias = |part: &str| {
            let slice = mesh.slice(0, heads);
            let tensor = (format!("{name}.{part}"), vec![heads, d / heads], Some(slice));
            let placement = Placement::sliced(Spread::Tensor, [tensor]);
            Weight::new(device, placement, &[slice.len, d / heads], sizes.dtype, sizes.init())
        };
        let (segment, memory) = sizes.segment_and_memory();
        let distances = reach(sizes.model.seq, segment, memory);
        RelativeAttention {
            queries: linear(&["q"], Cut::Outputs(mesh), sizes.init()),
            keys_values: linear(&["k", "v"], Cut::Outputs(mesh), sizes.init()),
            distances: linear(&["r"], Cut::Outputs(mesh), sizes.init()),
            out: linear(&["o"], Cut::Inputs(mesh), sizes.residual_init()),
            content_bias: bias("r_w_bias"),
            position_bias: bias("r_r_bias"),
            waves: if device.has_data() { sinusoids(distances, d) } else { Vec::new() },
            reach: distances,
        }
    }

    /// x `[T, D]` gives `[T, D]`, both in the stream. Collective over the tensor group.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn forward(&self, x: &Var, stretches: &Arc<Stretches>, stream: &Stream) -> Result<Var, Error> {
        let x = &stream.to_parts(x)?;
        let distances = self.project(x, stretches.reach());
        let [own, remembered] = self.keys_values.forward_twice(x);
        let [u, v] = self.biases(x.tape());
        let out = self.out.parts(x, stream);
        let inputs: Vec<Var> = [own, remembered, distances, u, v].into_iter().chain(out).collect();
        let stretches = stretches.clone();
        let parts = x.tape().segment(Part::Attention, &self.queries.forward(x), &inputs, move |queries, inputs| {
            let [own, remembered, distances, u, v, out @ ..] = inputs else { panic!("{} inputs", inputs.len()) };
            let relative = Relative { distances, content_bias: u, position_bias: v };
            product(&queries.relative_attention([own, remembered], relative, &stretches), out)
        });
        Ok(stream.from_parts(parts)?)
    }

    /// The same for tokens that follow those in `cache`; `stretches` are of all of them.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn forward_cached(
        &self,
        x: &Var,
        stretches: &Stretches,
        stream: &Stream,
        cache: &mut Cache,
    ) -> Result<Var, Error> {
        let x = &stream.to_parts(x)?;
        let distances = cache.distances.get_or_insert_with(|| self.project(x, self.reach).value().clone());
        let distances = x.tape().constant(distances.clone());
        let (queries, keys_values) = (self.queries.forward(x), self.keys_values.forward(x));
        let [u, v] = self.biases(x.tape());
        let relative = Relative { distances: &distances, content_bias: &u, position_bias: &v };
        let attended =
            relative_attend_cached(queries.value(), keys_values.value(), relative, stretches, &mut cache.keys_values);
        Ok(self.out.forward_parts(&x.tape().constant(attended), stream)?)
    }

    /// `W_r R` of the first distances, on x's tape and in its storage.
    fn project(&self, x: &Var, distances: usize) -> Var {
        let d = x.value().cols();
        let waves = Tensor::from_values(x.device(), &[distances, d], || self.waves[..distances * d].to_vec());
        self.distances.forward(&x.tape().constant(waves.cast(x.dtype())))
    }

    /// u and v.
    fn biases(&self, tape: &Tape) -> [Var; 2] {
        [&self.content_bias, &self.position_bias].map(|bias| tape.parameter(&bias.parameter))
    }
}

impl Parameters for RelativeAttention {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        for linear in [&mut self.queries, &mut self.keys_values, &mut self.distances, &mut self.out] {
            linear.visit(f);
        }
        f(&mut self.content_bias);
        f(&mut self.position_bias);
    }
}
