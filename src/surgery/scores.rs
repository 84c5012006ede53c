//! What experts are kept by: the size of their gate rows, chance, or any other numbers.

use guildhall_tensor::{Draws, Purpose};

use super::graft::within_layer;
use crate::model::Model;
use crate::parallel::Parameters;

/// The gate of a MoE layer.
pub(super) struct GateRows {
    /// Of the layer, as its tensors' names begin.
    pub(super) name: String,
    pub(super) layer: usize,
    values: Vec<f32>,
    experts: usize,
}

impl GateRows {
    pub(super) fn root_mean_square(&self) -> f64 {
        let squares: f64 = self.values.iter().map(|&x| f64::from(x).powi(2)).sum();
        (squares / self.values.len() as f64).sqrt()
    }

    fn norms(&self) -> Vec<f64> {
        let rows = self.values.chunks_exact(self.values.len() / self.experts);
        rows.map(|row| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()).collect()
    }
}

/// The gates of a model, in the order of its layers.
pub(super) fn gates(model: &mut Model) -> Vec<GateRows> {
    let sizes = model.sizes().clone();
    let mut layers = (0..sizes.model.layers).filter(|&layer| sizes.moe_of(layer).is_some());
    let mut gates = Vec::new();
    model.visit(&mut |weight| {
        let piece = &weight.placement.pieces[0];
        if let Some((name, "gate.weight")) = within_layer(&piece.name) {
            let layer = layers.next().expect("a gate is of a MoE layer");
            let values = weight.parameter.value().to_vec();
            gates.push(GateRows { name: name.to_owned(), layer, values, experts: piece.shape[0] });
        }
    });
    gates
}

/// For each MoE layer, the L2 norms of its gate's rows: one for each expert.
pub fn gate_norms(model: &mut Model) -> Vec<Vec<f64>> {
    gates(model).iter().map(GateRows::norms).collect()
}

/// For each of so many MoE layers, a number by chance for each expert.
pub fn drawn(seed: u64, layers: usize, experts: usize) -> Vec<Vec<f64>> {
    let of_layer = |layer: usize| {
        let draws = Draws::new(seed, Purpose::Prune, 0, layer as u32);
        (0..experts as u64).map(|expert| f64::from(draws.uniform(expert))).collect()
    };
    (0..layers).map(of_layer).collect()
}

/// The `keep` with the largest scores, ascending; of equal ones the first.
pub fn largest(scores: &[f64], keep: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(keep);
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_kept_and_of_equal_ones_the_first() {
        assert_eq!(largest(&[1.0, 4.0, 0.0, 4.0, 2.0], 3), [1, 3, 4]);
        assert_eq!(largest(&[2.0, 2.0, 2.0], 2), [0, 1]);
        assert_eq!(largest(&[0.5, 0.1], 2), [0, 1]);
    }

    #[test]
    fn chance_is_of_the_seed_and_the_layer() {
        let all = drawn(7, 3, 64);
        assert_eq!(all, drawn(7, 3, 64));
        assert_ne!(all, drawn(8, 3, 64));
        assert_ne!(all[0], all[1]);
    }
}
