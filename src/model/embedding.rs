//! Tokens become vectors, to which some families add others for positions, learned or of sines and cosines.
//! The head may share the token table, whose rows are cut over the tensor group.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::Error;
use guildhall_tensor::{Device, Tape, Tensor, Var};

use super::distances::DistanceBiases;
use super::norm::Norm;
use super::{Positions, Role, Sizes};
use crate::parallel::{Mesh, Parameters, Placement, Spread, Stream, Weight};

/// Token table `[V, D]`, of which some rows are here, and, for learned positions, position table `[S, D]`, which all stacks share.
#[derive(Debug)]
pub(super) struct Embedding {
    pub(super) tokens: Weight,
    /// The first token whose row is here.
    first: usize,
    positions: PositionRows,
    norm: Option<Norm>,
    /// What the stacks add to attention's scores for distances, in their order; none in most families.
    distances: Vec<DistanceBiases>,
    /// Of the tokens' vectors: sqrt(D), so that they outweigh what the first block adds (Vaswani et al. 2017).
    scale: Option<f32>,
}

/// What is added to a token's vector for its position.
#[derive(Debug)]
enum PositionRows {
    Nothing,
    /// A row `[S, D]`.
    Learned(Weight),
    /// A row of sines and cosines `[S, D]`. No elements where there are only sizes.
    Waves {
        values: Vec<f32>,
        shape: [usize; 2],
    },
}

impl PositionRows {
    fn new(device: &Arc<Device>, sizes: &Sizes, mesh: &Mesh) -> PositionRows {
        let shape = [sizes.model.longest_row(), sizes.model.d_model];
        match sizes.blueprint().positions {
            Positions::Learned => {
                let tensor = ("model.embed_positions.weight".to_owned(), shape.to_vec());
                let placement = Placement::new(Spread::Replicated, [tensor]).partial(mesh.is_sequence_parallel());
                PositionRows::Learned(Weight::new(device, placement, &shape, sizes.dtype, sizes.init()))
            }
            Positions::Sinusoidal { first } => {
                let values = if device.has_data() { waves(first, shape) } else { Vec::new() };
                PositionRows::Waves { values, shape }
            }
            Positions::Rotary { .. } | Positions::Relative | Positions::RelativeBias { .. } => PositionRows::Nothing,
        }
    }

    /// The table on a tape, if there is one.
    fn table(&self, tape: &Tape) -> Option<Var> {
        match self {
            PositionRows::Nothing => None,
            PositionRows::Learned(table) => Some(tape.parameter(&table.parameter)),
            PositionRows::Waves { values, shape } => {
                Some(tape.constant(Tensor::from_values(tape.device(), shape, || values.clone())))
            }
        }
    }
}

impl Embedding {
    pub(super) fn new(device: &Arc<Device>, sizes: &Sizes, mesh: &Mesh) -> Embedding {
        let (model, blueprint, partial) = (&sizes.model, sizes.blueprint(), mesh.is_sequence_parallel());
        let stacks = blueprint.stacks();
        Embedding {
            tokens: vocabulary_rows(device, "model.embed_tokens.weight", sizes, mesh).looked_up(!model.tie_embeddings),
            first: mesh.slice(0, model.vocab).start,
            positions: PositionRows::new(device, sizes, mesh),
            scale: blueprint.embedding.scaled.then(|| (model.d_model as f32).sqrt()),
            distances: stacks.iter().filter_map(|stack| DistanceBiases::of_stack(device, stack, sizes, mesh)).collect(),
            norm: blueprint.embedding.normed.then(|| Norm::new(device, "model.layernorm_embedding", sizes, partial)),
        }
    }

    /// What a stack adds to attention's scores `[distances, heads]` for keys that are so much farther in their row than
    /// the query, if it adds anything.
    pub(super) fn bias(&self, tape: &Tape, stack: usize, distances: Range<i64>) -> Option<Var> {
        self.distances.get(stack).map(|biases| biases.of(tape, distances))
    }

    /// The vectors `[T, D]` of the stream's tokens that are here. Collective over the tensor group.
    ///
    /// # Errors
    /// What the group reports.
    pub(super) fn forward(&self, tape: &Tape, stream: &Stream) -> Result<Var, Error> {
        let (dtype, rows) = (self.tokens.parameter.dtype(), stream.rows());
        let parts = tape.parameter(&self.tokens.parameter).embed_part(rows.index(&rows.ids), self.first, dtype);
        let (x, positions) = (stream.from_parts(parts)?, rows.index(&rows.positions));
        let x = self.scale.map_or(x.clone(), |scale| x.scale(scale));
        let x = match self.positions.table(tape) {
            Some(table) => x.add(&table.embed(positions.part(stream.tokens()), dtype)),
            None => x,
        };
        Ok(self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x)))
    }
}

/// Vectors of positions as fairseq has them: sines, then cosines, the slowest a turn in 2 pi 10000 positions.
fn waves(first: u32, [positions, width]: [usize; 2]) -> Vec<f32> {
    assert!(width.is_multiple_of(2), "positions have as many sines as cosines");
    let (half, rows) = (width / 2, first as usize..first as usize + positions);
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

impl Embedding {
    pub(super) fn visit_roles(&mut self, f: &mut dyn FnMut(Role, &mut Weight)) {
        f(Role::Embedding, &mut self.tokens);
        if let PositionRows::Learned(table) = &mut self.positions {
            f(Role::Embedding, table);
        }
        self.norm.iter_mut().for_each(|norm| norm.visit(&mut |weight| f(Role::Embedding, weight)));
        self.distances.iter_mut().for_each(|biases| biases.visit(&mut |weight| f(Role::Attention, weight)));
    }
}

impl Parameters for Embedding {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.visit_roles(&mut |_, weight| f(weight));
    }
}
