//! Global tensors, put together from the pieces of all ranks, and how far two of them are apart.

use std::collections::BTreeMap;

use crate::parallel::Piece;

/// Tensors by global name.
pub(super) type Tensors = BTreeMap<String, Global>;

/// A global tensor and who gave which part of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Global {
    pub(super) values: Vec<f32>,
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    rank: usize,
    /// With an offset of 0.
    piece: Piece,
}

/// How far a tensor is from the one it should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Distance {
    /// 2-norm of the difference.
    pub(super) error: f64,
    /// 2-norm of what it should be.
    pub(super) size: f64,
    /// Whose part is the farthest off.
    pub(super) rank: usize,
    pub(super) same_bits: bool,
}

impl Global {
    /// Adds a rank's part. Says which rank has given another copy of it, if one has.
    pub(super) fn put(&mut self, rank: usize, piece: &Piece, local: &[f32]) -> Option<usize> {
        let own = Piece { offset: 0, ..piece.clone() };
        let length = piece.shape.iter().product();
        let earlier = self.parts.iter().find(|part| part.piece.slice == own.slice).map(|part| part.rank);
        if earlier.is_none() {
            self.values.resize(length, 0.0);
            self.parts.push(Part { rank, piece: own.clone() });
        }
        let mut same = true;
        for run in own.runs() {
            let part = &local[run.local..run.local + run.len];
            let place = &mut self.values[run.global..run.global + run.len];
            match earlier {
                None => place.copy_from_slice(part),
                Some(_) => same &= same_bits(place, part),
            }
        }
        earlier.filter(|_| !same)
    }

    /// Whether the parts make the whole.
    pub(super) fn is_whole(&self) -> bool {
        let mut given = vec![false; self.values.len()];
        for run in self.parts.iter().flat_map(|part| part.piece.runs()) {
            given[run.global..run.global + run.len].fill(true);
        }
        given.iter().all(|&given| given)
    }

    /// Against what it should be, which is as long.
    pub(super) fn distance(&self, want: &Global) -> Distance {
        let square = |x: f64| x * x;
        let size = want.values.iter().map(|&w| square(f64::from(w))).sum::<f64>().sqrt();
        let (mut error, mut worst) = (0.0, (-1.0, 0));
        for part in &self.parts {
            let mut own = 0.0;
            for run in part.piece.runs() {
                let range = run.global..run.global + run.len;
                let pairs = self.values[range.clone()].iter().zip(&want.values[range]);
                own += pairs.map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum::<f64>();
            }
            error += own;
            // NaN is farther than anything.
            if own > worst.0 || own.is_nan() {
                worst = (own, part.rank);
            }
        }
        Distance { error: error.sqrt(), size, rank: worst.1, same_bits: same_bits(&self.values, &want.values) }
    }
}

/// The 2-norm of all of them together, and how many elements they have.
pub(super) fn size(tensors: &Tensors) -> (f64, usize) {
    let all = || tensors.values().flat_map(|tensor| &tensor.values);
    (all().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt(), all().count())
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::Slice;

    fn piece(slice: Option<Slice>) -> Piece {
        Piece { name: "w".into(), shape: vec![2, 3], slice, offset: 7 }
    }

    #[test]
    fn slices_make_a_tensor_and_the_rank_that_is_off_is_named() {
        let slices = [(0, 1), (1, 2)].map(|(start, len)| Slice { dim: 1, start, len });
        let mut got = Global::default();
        assert_eq!(got.put(4, &piece(Some(slices[1])), &[2.0, 3.0, 5.0, 6.0]), None);
        assert!(!got.is_whole());
        assert_eq!(got.put(2, &piece(Some(slices[0])), &[1.0, 4.0]), None);
        assert!(got.is_whole());
        assert_eq!(got.put(3, &piece(Some(slices[0])), &[1.0, 4.0]), None, "the same copy");
        assert_eq!(got.put(3, &piece(Some(slices[0])), &[1.0, 4.5]), Some(2), "another copy than rank 2's");

        let mut want = Global::default();
        want.put(0, &piece(None), &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0]);
        let distance = got.distance(&want);
        assert_eq!((distance.error, distance.rank, distance.same_bits), (4.0, 4, false));
        assert!((distance.size - 155f64.sqrt()).abs() < 1e-12);
        assert!(want.distance(&want.clone()).same_bits);
    }

    #[test]
    fn what_is_no_number_is_far_off() {
        let [mut got, mut want] = [Global::default(), Global::default()];
        got.put(0, &piece(None), &[f32::NAN; 6]);
        want.put(0, &piece(None), &[1.0; 6]);
        assert!(got.distance(&want).error.is_nan());
    }
}
