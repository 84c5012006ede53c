//! Tokens become vectors; with learned positions, positions do too. With relative ones, the vectors are longer instead.
//! The head may share the token table, whose rows are cut over the tensor group.

use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Index, Tape, Tensor, Var};

use super::norm::Norm;
use super::{Config, Positions, Sizes};
use crate::parallel::{Mesh, Parameters, Placement, Spread, Stream, Weight};

/// Token table `[V, D]`, of which some rows are here, and, for learned positions, position table `[S, D]`.
#[derive(Debug)]
pub(super) struct Embedding {
    pub(super) tokens: Weight,
    /// The first token whose row is here.
    first: usize,
    positions: Option<Weight>,
    /// Sines and cosines `[S, D]` instead of a table that is trained. Empty where there are only sizes.
    waves: Option<Vec<f32>>,
    /// Of positions.
    table_shape: [usize; 2],
    norm: Option<Norm>,
    /// Of the tokens' vectors: sqrt(D), so that they outweigh what the first block adds (Vaswani et al. 2017).
    scale: Option<f32>,
}

impl Embedding {
    pub(super) fn new(device: &Arc<Device>, sizes: &Sizes, mesh: &Mesh) -> Embedding {
        let (model, partial) = (&sizes.model, mesh.is_sequence_parallel());
        let blueprint = sizes.blueprint();
        let positions = || {
            let shape = [model.seq, model.d_model];
            let tensor = ("model.embed_positions.weight".to_owned(), shape.to_vec());
            let placement = Placement::new(Spread::Replicated, [tensor]).partial(partial);
            Weight::new(device, placement, &shape, sizes.dtype, sizes.init())
        };
        Embedding {
            tokens: vocabulary_rows(device, "model.embed_tokens.weight", sizes, mesh),
            first: mesh.slice(0, model.vocab).start,
            positions: blueprint.has_position_table().then(positions),
            waves: match blueprint.positions {
                Positions::Sinusoidal { first } if device.has_data() => Some(waves(first, model)),
                Positions::Sinusoidal { .. } => Some(Vec::new()),
                _ => None,
            },
            table_shape: [model.seq, model.d_model],
            scale: blueprint.embedding.scaled.then(|| (model.d_model as f32).sqrt()),
            norm: blueprint.embedding.normed.then(|| Norm::new(device, "model.layernorm_embedding", sizes, partial)),
        }
    }

    /// Of constants, a row a position.
    fn table(&self, tape: &Tape, waves: &[f32]) -> Var {
        let shape = self.table_shape;
        tape.constant(Tensor::from_values(tape.device(), &shape, || waves.to_vec()))
    }

    /// T tokens and their positions give the vectors `[T', D]` of those that are here. Collective over the tensor group.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn forward(
        &self,
        tape: &Tape,
        (tokens, positions): (Index, Index),
        stream: &Stream,
    ) -> Result<Var, Error> {
        let dtype = self.tokens.parameter.dtype();
        let rows = tape.parameter(&self.tokens.parameter).embed_part(tokens, self.first, dtype);
        let x = stream.from_parts(rows)?;
        let x = self.scale.map_or(x.clone(), |scale| x.scale(scale));
        let x = match &self.positions {
            Some(table) => x.add(&tape.parameter(&table.parameter).embed(positions.part(stream.tokens()), dtype)),
            None => x,
        };
        let x = match &self.waves {
            Some(waves) => x.add(&self.table(tape, waves).embed(positions.part(stream.tokens()), dtype)),
            None => x,
        };
        Ok(self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x)))
    }
}

/// Vectors of positions as fairseq has them: sines, then cosines, the slowest a turn in 2 pi 10000 positions.
fn waves(first: u32, model: &Config) -> Vec<f32> {
    let (half, rows) = (model.d_model / 2, first as usize..first as usize + model.seq);
    let speed = |i: usize| 10_000f64.powf(-(i as f64) / (half - 1).max(1) as f64);
    let row = |position: usize| {
        let angles: Vec<f64> = (0..half).map(|i| position as f64 * speed(i)).collect();
        let both = angles.iter().map(|angle| angle.sin()).chain(angles.iter().map(|angle| angle.cos()));
        both.map(|x| x as f32).collect::<Vec<f32>>()
    };
    rows.flat_map(row).collect()
}

/// A matrix with a row for every entry of the vocabulary, `[V, D]`; this rank's rows.
pub(super) fn vocabulary_rows(device: &Arc<Device>, name: &str, sizes: &Sizes, mesh: &Mesh) -> Weight {
    let (vocab, d) = (sizes.model.vocab, sizes.model.d_model);
    let slice = mesh.slice(0, vocab);
    let placement = Placement::sliced(Spread::Tensor, [(name.to_owned(), vec![vocab, d], Some(slice))]);
    Weight::new(device, placement, &[slice.len, d], sizes.dtype, sizes.init())
}

impl Parameters for Embedding {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        f(&mut self.tokens);
        self.positions.iter_mut().for_each(&mut *f);
        self.norm.iter_mut().for_each(|norm| norm.visit(f));
    }
}
