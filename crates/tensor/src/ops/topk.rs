//! The k largest of each row, as integers: no gradient passes through a choice.

use crate::tensor::Tensor;

/// The chosen columns of every row, best first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopK {
    /// `[rows, k]`.
    pub index: Vec<u32>,
    pub k: usize,
}

/// The k largest elements of each row of `scores`, ties going to the lower column, so that no mesh and no
/// vectorisation can decide one. A NaN counts as smaller than every number.
#[track_caller]
pub fn top_k(scores: &Tensor, k: usize) -> TopK {
    let (width, scores) = (scores.cols(), scores.to_f32());
    assert!(k >= 1 && k <= width, "top {k} of {width}");
    let mut index = Vec::with_capacity(scores.rows() * k);
    for row in scores.f32s().chunks_exact(width) {
        let start = index.len();
        for _ in 0..k {
            let best = best_of(row, &index[start..]);
            index.push(best);
        }
    }
    TopK { index, k }
}

fn best_of(row: &[f32], taken: &[u32]) -> u32 {
    let mut best: Option<(usize, f32)> = None;
    for (i, &x) in row.iter().enumerate() {
        let x = if x.is_nan() { f32::NEG_INFINITY } else { x };
        if !taken.contains(&(i as u32)) && best.is_none_or(|(_, top)| x > top) {
            best = Some((i, x));
        }
    }
    best.expect("k is at most the width").0 as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    #[test]
    fn ties_go_to_the_lower_column_and_nan_last() {
        let device = Device::new(1);
        let scores = Tensor::from_slice(&device, &[3, 4], &[1., 2., 2., 0., f32::NAN, 0., 0., -1., 5., 5., 5., 5.]);
        assert_eq!(top_k(&scores, 3).index, [1, 2, 0, 1, 2, 3, 0, 1, 2]);
    }
}
