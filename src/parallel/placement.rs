//! Where a parameter lives: one fact that drives its initial values, its gradient's sum, the global norm, and its
//! place in a checkpoint.

use guildhall_tensor::{Draws, Purpose};

/// How the copies of a parameter are spread over the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// The same on every rank.
    Replicated,
    /// Different on the ranks of an expert group, the same on those of an expert-data group.
    Expert,
}

/// A global tensor, and where it starts in the local parameter. A local parameter is its pieces, end to end: the
/// fused projection is `q`, `k`, `v`; a stack of experts is one piece an expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Name in checkpoints, on every mesh the same.
    pub name: String,
    pub shape: Vec<usize>,
    /// First element in the local parameter.
    pub offset: usize,
}

impl Piece {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The piece's own stream of initial draws: by name and element, so that no mesh changes a value.
    pub fn draws(&self, seed: u64) -> Draws {
        Draws::new(seed, Purpose::Init, fnv1a(&self.name), 0)
    }
}

/// What a local parameter is made of and who else has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub pieces: Vec<Piece>,
    pub spread: Spread,
}

impl Placement {
    /// Pieces laid end to end.
    pub fn new(spread: Spread, tensors: impl IntoIterator<Item = (String, Vec<usize>)>) -> Placement {
        let mut offset = 0;
        let place = |(name, shape): (String, Vec<usize>)| {
            let piece = Piece { name, shape, offset };
            offset += piece.len();
            piece
        };
        Placement { pieces: tensors.into_iter().map(place).collect(), spread }
    }
}

/// A 64-bit hash that will not change between releases (Fowler, Noll, Vo): initial values depend on it.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_end_to_end() {
        let placement = Placement::new(Spread::Replicated, [("a".into(), vec![2, 3]), ("b".into(), vec![4])]);
        assert_eq!(placement.pieces[1], Piece { name: "b".into(), shape: vec![4], offset: 6 });
    }

    #[test]
    fn fnv1a_gives_its_published_answers() {
        assert_eq!(fnv1a(""), 0xcbf29ce484222325);
        assert_eq!(fnv1a("foobar"), 0x85944171f73967e8);
    }
}
