//! Global tensors, put together from the pieces of all ranks, and how far two of them are apart.

use std::collections::BTreeMap;

use crate::parallel::Piece;

/// Tensors by global name.
pub(super) type Tensors = BTreeMap<String, Global>;

/// A global tensor and who gave which elements of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Global {
    pub(super) values: Vec<f32>,
    /// By element, the first rank that gave it.
    givers: Vec<Option<u16>>,
}

/// How far a tensor is from the one it should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Distance {
    /// 2-norm of the difference.
    pub(super) error: f64,
    /// 2-norm of what it should be.
    pub(super) size: f64,
    /// Whose elements are the farthest off.
    pub(super) rank: usize,
    pub(super) same_bits: bool,
}

/// What a rank holds of a local weight.
pub(super) struct LocalPart<'a> {
    pub(super) rank: usize,
    pub(super) elements: &'a [f32],
    /// The number of the first.
    pub(super) first: usize,
}

impl Global {
    /// Adds what a rank holds of a piece. Says which rank has given another copy of some, if one has.
    pub(super) fn put(&mut self, piece: &Piece, own: &LocalPart) -> Option<usize> {
        let &LocalPart { rank, elements, first } = own;
        let length = piece.shape.iter().product();
        self.values.resize(length, 0.0);
        self.givers.resize(length, None);
        let mut other = None;
        for run in piece.runs_within(&(first..first + elements.len())) {
            let places = self.values[run.global..].iter_mut().zip(&mut self.givers[run.global..]);
            for ((value, giver), &given) in places.zip(&elements[run.local - first..][..run.len]) {
                match *giver {
                    None => (*value, *giver) = (given, Some(rank as u16)),
                    Some(earlier) if value.to_bits() != given.to_bits() => other = Some(usize::from(earlier)),
                    Some(_) => {}
                }
            }
        }
        other
    }

    /// Whether every element has been given.
    pub(super) fn is_whole(&self) -> bool {
        self.givers.iter().all(Option::is_some)
    }

    /// Against what it should be, which is as long.
    pub(super) fn distance(&self, want: &Global) -> Distance {
        let square = |x: f64| x * x;
        let size = want.values.iter().map(|&w| square(f64::from(w))).sum::<f64>().sqrt();
        let mut of_ranks: BTreeMap<u16, f64> = BTreeMap::new();
        for ((&got, &want), giver) in self.values.iter().zip(&want.values).zip(&self.givers) {
            *of_ranks.entry(giver.unwrap_or(0)).or_default() += square(f64::from(got) - f64::from(want));
        }
        let error = of_ranks.values().sum::<f64>().sqrt();
        // In a total order NaN is farther than anything.
        let worst = of_ranks.iter().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
        let rank = worst.map_or(0, |(rank, _)| usize::from(*rank));
        Distance { error, size, rank, same_bits: same_bits(&self.values, &want.values) }
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

    fn part(rank: usize, elements: &[f32]) -> LocalPart<'_> {
        LocalPart { rank, elements, first: 7 }
    }

    #[test]
    fn slices_make_a_tensor_and_the_rank_that_is_off_is_named() {
        let slices = [(0, 1), (1, 2)].map(|(start, len)| Slice { dim: 1, start, len });
        let mut got = Global::default();
        assert_eq!(got.put(&piece(Some(slices[1])), &part(4, &[2.0, 3.0, 5.0, 6.0])), None);
        assert!(!got.is_whole());
        assert_eq!(got.put(&piece(Some(slices[0])), &part(2, &[1.0, 4.0])), None);
        assert!(got.is_whole());
        assert_eq!(got.put(&piece(Some(slices[0])), &part(3, &[1.0, 4.0])), None, "the same copy");
        assert_eq!(got.put(&piece(Some(slices[0])), &part(3, &[1.0, 4.5])), Some(2), "another copy than rank 2's");

        let mut want = Global::default();
        want.put(&piece(None), &part(0, &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0]));
        let distance = got.distance(&want);
        assert_eq!((distance.error, distance.rank, distance.same_bits), (4.0, 4, false));
        assert!((distance.size - 155f64.sqrt()).abs() < 1e-12);
        assert!(want.distance(&want.clone()).same_bits);
    }

    #[test]
    fn what_is_no_number_is_far_off() {
        let [mut got, mut want] = [Global::default(), Global::default()];
        got.put(&piece(None), &part(0, &[f32::NAN; 6]));
        want.put(&piece(None), &part(0, &[1.0; 6]));
        assert!(got.distance(&want).error.is_nan());
    }
}
