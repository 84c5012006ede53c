//! What one call of attention with relative positions works on: sizes, operands, and one head of them.

use std::ops::Range;

use super::gemm::{InnerProducts, Into, View};
use super::stored::{StoredNumber, StoredRef, as_numbers};

/// Queries and keys of a block.
pub(super) const BLOCK: usize = 64;

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RelativeAttentionSizes {
    pub(crate) seq: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    /// Distances there are: 0 to `reach - 1`.
    pub(crate) reach: usize,
}

/// Sizes, masks and operands: queries `[T, H d]`, keys and values `[T, 2 H d]`, distances `[reach, H d]`, u and v
/// `[H, d]`.
pub(super) struct RelativeAttentionCall<'a> {
    pub(super) shape: RelativeAttentionSizes,
    pub(super) queries: StoredRef<'a>,
    pub(super) keys_values: StoredRef<'a>,
    pub(super) distances: StoredRef<'a>,
    pub(super) content_bias: &'a [f32],
    pub(super) position_bias: &'a [f32],
    /// For every token, the first position of its row that it may attend to; the last is itself.
    pub(super) first_key: &'a [u32],
    /// For every token, the first position of its own stretch.
    pub(super) own_key: &'a [u32],
}

/// Vectors of distances that no pair of tokens has lie before and behind the others, so that a block at the edge of
/// what is visible reads zeros: up to two blocks of distances too far, one of distances below 0.
pub(super) const TOO_FAR: usize = 2 * BLOCK;

impl RelativeAttentionSizes {
    pub(super) fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Where the padded vectors begin that queries from `i` and keys from `j` need: that of the last query's distance
    /// to the first key.
    pub(super) fn farthest(&self, (i, queries): (usize, usize), j: usize) -> usize {
        TOO_FAR + self.reach - (i + queries - j)
    }
}

/// One head of one batch row, every matrix `[seq, d]` but the distances.
pub(super) struct HeadOperands<'a> {
    pub(super) products: &'a InnerProducts<'a>,
    pub(super) shape: RelativeAttentionSizes,
    pub(super) row: usize,
    pub(super) head: usize,
    /// q + u and q + v.
    pub(super) content: Vec<f32>,
    pub(super) position: Vec<f32>,
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
    /// Padded, by falling distance: element `TOO_FAR + reach - 1 - distance`.
    pub(super) distances: Vec<f32>,
    pub(super) first_key: &'a [u32],
    pub(super) own_key: &'a [u32],
}

impl<'a> HeadOperands<'a> {
    #[inline(always)]
    pub(super) fn load(
        from: &RelativeAttentionCall<'a>,
        products: &'a InnerProducts<'a>,
        row: usize,
        head: usize,
    ) -> HeadOperands<'a> {
        let shape = from.shape;
        let (d, seq, width) = (shape.head_dim, shape.seq, shape.width());
        let tokens = row * seq..(row + 1) * seq;
        let biased = |bias: &[f32]| {
            let mut q = columns(from.queries, width, tokens.clone(), head * d..(head + 1) * d);
            q.chunks_exact_mut(d).for_each(|q| q.iter_mut().zip(&bias[head * d..]).for_each(|(q, b)| *q += b));
            q
        };
        let near_first = columns(from.distances, width, 0..shape.reach, head * d..(head + 1) * d);
        let mut distances = vec![0.0; (TOO_FAR + shape.reach + BLOCK) * d];
        let there = &mut distances[TOO_FAR * d..][..shape.reach * d];
        there.chunks_exact_mut(d).rev().zip(near_first.chunks_exact(d)).for_each(|(to, from)| to.copy_from_slice(from));
        let part = |first: usize| columns(from.keys_values, 2 * width, tokens.clone(), first..first + d);
        HeadOperands {
            products,
            shape,
            row,
            head,
            content: biased(from.content_bias),
            position: biased(from.position_bias),
            keys: part(head * d),
            values: part(width + head * d),
            distances,
            first_key: &from.first_key[tokens.clone()],
            own_key: &from.own_key[tokens.clone()],
        }
    }

    /// The starts of the key blocks that any of these queries sees.
    pub(super) fn key_blocks(&self, i: usize, queries: usize) -> impl Iterator<Item = usize> + use<> {
        // First keys do not decrease along a row.
        let first = self.first_key[i] as usize / BLOCK * BLOCK;
        (first..i + queries).step_by(BLOCK)
    }

    /// Which keys of block `j` the query sees, as a range within the block, and where in it its own stretch begins.
    #[inline(always)]
    pub(super) fn visible(&self, query: usize, j: usize, keys: usize) -> (usize, usize, usize) {
        let to = (query + 1).saturating_sub(j).min(keys);
        let within = |key: u32| (key as usize).saturating_sub(j).min(to);
        (within(self.first_key[query]), within(self.own_key[query]), to)
    }

    #[inline(always)]
    pub(super) fn scores(
        &self,
        scores: &mut [f32],
        diagonals: &mut [f32],
        (i, queries): (usize, usize),
        (j, keys): (usize, usize),
    ) {
        let d = self.shape.head_dim;
        let how = Into { alpha: self.shape.scale(), accumulate: false };
        let far = lines(&self.distances, self.shape.farthest((i, queries), j), queries + keys - 1, d);
        self.products.multiply(
            scores,
            BLOCK,
            lines(&self.content, i, queries, d),
            lines(&self.keys, j, keys, d).t(),
            how,
        );
        self.products.multiply(diagonals, 2 * BLOCK, lines(&self.position, i, queries, d), far.t(), how);
        for r in 0..queries {
            let diagonal = &diagonals[r * 2 * BLOCK + queries - 1 - r..][..keys];
            scores[r * BLOCK..][..keys].iter_mut().zip(diagonal).for_each(|(s, d)| *s += d);
        }
    }
}

/// Rows of a matrix `[.., d]`.
#[inline(always)]
pub(super) fn lines(x: &[f32], first: usize, rows: usize, d: usize) -> View<'_> {
    View::new(&x[first * d..], rows, d, d)
}

/// Some columns of some rows, as a matrix of their own.
#[inline(always)]
fn columns(x: StoredRef, width: usize, rows: Range<usize>, columns: Range<usize>) -> Vec<f32> {
    as_numbers!(StoredRef(x) => {
        rows.flat_map(|row| x[row * width..][columns.clone()].iter().map(|x| x.wide())).collect()
    })
}
