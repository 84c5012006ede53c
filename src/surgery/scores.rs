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
    pub(super) experts: usize,
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
    let mut layers = sizes.moe_layers().map(|(layer, _)| layer);
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

/// For each MoE layer, of which each has so many `experts`, a number by chance for each of them.
pub fn drawn(seed: u64, experts: &[usize]) -> Vec<Vec<f64>> {
    let of_layer = |(layer, &experts): (usize, &usize)| {
        let draws = Draws::new(seed, Purpose::Prune, 0, layer as u32);
        (0..experts as u64).map(|expert| f64::from(draws.uniform(expert))).collect()
    };
    experts.iter().enumerate().map(of_layer).collect()
}

/// Each as a share of its layer's sum: what makes counts of different layers comparable.
pub fn shares_of_layers(scores: &[Vec<f64>]) -> Vec<Vec<f64>> {
    scores.iter().map(|scores| over(scores, scores.iter().sum())).collect()
}

/// Each as a multiple of its layer's mean: what makes sizes of different layers comparable.
pub fn multiples_of_means(scores: &[Vec<f64>]) -> Vec<Vec<f64>> {
    scores.iter().map(|scores| over(scores, scores.iter().sum::<f64>() / scores.len() as f64)).collect()
}

/// Of a layer without any, none has more than another.
fn over(scores: &[f64], whole: f64) -> Vec<f64> {
    scores.iter().map(|score| if whole > 0.0 { score / whole } else { 0.0 }).collect()
}

/// The `keep` with the largest scores, ascending; of equal ones the first.
pub fn largest(scores: &[f64], keep: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(keep);
    order.sort_unstable();
    order
}

/// Of the experts of all layers so many with the largest scores, by layer and ascending, with at least `least` of each
/// layer; of equal ones the first of the first layer.
pub fn largest_of_all(scores: &[Vec<f64>], all: usize, least: usize) -> Vec<Vec<usize>> {
    let mut kept: Vec<Vec<usize>> = scores.iter().map(|scores| largest(scores, least)).collect();
    let others = |(layer, scores): (usize, &Vec<f64>)| {
        let stay = kept[layer].clone();
        (0..scores.len()).filter(move |expert| !stay.contains(expert)).map(move |expert| (layer, expert))
    };
    let mut others: Vec<(usize, usize)> = scores.iter().enumerate().flat_map(others).collect();
    others.sort_by(|&(a, i), &(b, j)| scores[b][j].total_cmp(&scores[a][i]));
    let missing = all.saturating_sub(kept.iter().map(Vec::len).sum());
    others.into_iter().take(missing).for_each(|(layer, expert)| kept[layer].push(expert));
    kept.iter_mut().for_each(|experts| experts.sort_unstable());
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One after the other the expert with the least score goes, of equal ones the last, unless its layer has no more
    /// than it must.
    fn one_by_one(scores: &[Vec<f64>], all: usize, least: usize) -> Vec<Vec<usize>> {
        let mut kept: Vec<Vec<usize>> = scores.iter().map(|scores| (0..scores.len()).collect()).collect();
        while kept.iter().map(Vec::len).sum::<usize>() > all {
            let mut worst: Option<(f64, usize, usize)> = None;
            for (layer, experts) in kept.iter().enumerate().filter(|(_, experts)| experts.len() > least) {
                for &expert in experts {
                    let score = scores[layer][expert];
                    if worst.is_none_or(|(least, ..)| score <= least) {
                        worst = Some((score, layer, expert));
                    }
                }
            }
            let (_, layer, expert) = worst.expect("a layer with more than it must have");
            kept[layer].retain(|&other| other != expert);
        }
        kept
    }

    #[test]
    fn of_all_layers_the_largest_are_kept() {
        let given = [vec![0.4, 0.1, 0.5], vec![0.9, 0.2], vec![0.0, 0.0, 0.0, 1.0]];
        assert_eq!(largest_of_all(&given, 5, 1), [vec![0, 2], vec![0, 1], vec![3]].map(Vec::from));
        for seed in 0..200 {
            let draws = drawn(seed, &[1 + seed as usize % 5, 4, 2 + seed as usize % 7]);
            // Few values, so that many are equal.
            let scores: Vec<Vec<f64>> =
                draws.iter().map(|layer| layer.iter().map(|x| (x * 4.0).floor()).collect()).collect();
            let there: usize = scores.iter().map(Vec::len).sum();
            let least = scores.iter().map(Vec::len).min().unwrap_or(0);
            for all in 3 * least..=there {
                let kept = largest_of_all(&scores, all, least);
                assert_eq!(kept, one_by_one(&scores, all, least), "{all} of {scores:?}, at least {least}");
            }
        }
    }

    #[test]
    fn scores_of_layers_are_made_comparable() {
        let scores = [vec![1.0, 3.0], vec![0.0, 0.0], vec![10.0, 10.0, 20.0]];
        let shares = [vec![0.25, 0.75], vec![0.0, 0.0], vec![0.25, 0.25, 0.5]];
        assert_eq!(shares_of_layers(&scores), shares);
        assert_eq!(multiples_of_means(&scores), [vec![0.5, 1.5], vec![0.0, 0.0], vec![0.75, 0.75, 1.5]]);
    }

    #[test]
    fn the_largest_are_kept_and_of_equal_ones_the_first() {
        assert_eq!(largest(&[1.0, 4.0, 0.0, 4.0, 2.0], 3), [1, 3, 4]);
        assert_eq!(largest(&[2.0, 2.0, 2.0], 2), [0, 1]);
        assert_eq!(largest(&[0.5, 0.1], 2), [0, 1]);
    }

    #[test]
    fn chance_is_of_the_seed_and_the_layer() {
        let all = drawn(7, &[64; 3]);
        assert_eq!(all, drawn(7, &[64; 3]));
        assert_ne!(all, drawn(8, &[64; 3]));
        assert_ne!(all[0], all[1]);
    }
}
