//! Where a tensor lies within a larger one of another layout: fused, stacked, transposed or interleaved. Pure arithmetic.
//!
//! ```text
//!  a stack [experts, ...] of blocks; a block is, if transposed, [columns, rows], else [rows, columns];
//!  its rows are those of several parts, one after the other, or in turn
//!
//!  q of 3 parts:     q q k k v v        w1 of 2 parts in turn:     w1 w3 w1 w3
//! ```

use std::ops::Range;

/// A part of a larger tensor. The default is the whole of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorCut {
    /// The number of its block, and how many there are, where blocks are stacked along a first dimension.
    pub stack: Option<[usize; 2]>,
    /// Whether the larger tensor has a matrix' columns as rows.
    pub transposed: bool,
    /// The number of its part of the rows, and how many equal parts there are.
    pub part: [usize; 2],
    /// Whether rows of the parts come in turn.
    pub in_turn: bool,
}

impl Default for TensorCut {
    fn default() -> TensorCut {
        TensorCut { stack: None, transposed: false, part: [0, 1], in_turn: false }
    }
}

impl TensorCut {
    /// The shape of the larger tensor, of which one of shape `own` is this part.
    pub fn whole(&self, own: &[usize]) -> Vec<usize> {
        let mut shape = own.to_vec();
        if let Some(rows) = shape.first_mut() {
            *rows = rows.saturating_mul(self.part[1]);
        }
        if self.transposed {
            shape.reverse();
        }
        self.stack.iter().for_each(|[_, all]| shape.insert(0, *all));
        shape
    }

    /// The shape of this part of a larger tensor, if it can be cut so.
    pub fn own(&self, whole: &[usize]) -> Option<Vec<usize>> {
        let mut shape = match self.stack {
            Some([_, all]) => whole.strip_prefix(&[all])?.to_vec(),
            None => whole.to_vec(),
        };
        if self.transposed {
            shape.reverse();
        }
        let parts = self.part[1];
        if parts > 1 {
            let rows = shape.first_mut().filter(|rows| rows.is_multiple_of(parts))?;
            *rows /= parts;
        }
        Some(shape)
    }

    /// Whether its elements are neighbours in the larger tensor, in their order.
    pub fn is_contiguous(&self) -> bool {
        !self.transposed && (!self.in_turn || self.part[1] == 1)
    }

    /// The elements of the larger tensor among which all of its own are, of a part of shape `own`.
    pub fn span(&self, own: &[usize]) -> Range<usize> {
        let len: usize = own.iter().product();
        let block = len * self.part[1];
        let first = self.stack.map_or(0, |[number, _]| number * block);
        match self.is_contiguous() {
            true => first + self.part[0] * len..first + (self.part[0] + 1) * len,
            false => first..first + block,
        }
    }

    /// Its elements, of `size` bytes each, from those of its span.
    pub fn gather(&self, span: Vec<u8>, own: &[usize], size: usize) -> Vec<u8> {
        if self.is_contiguous() {
            return span;
        }
        let mut out = Vec::with_capacity(span.len() / self.part[1]);
        self.each(own, |at| out.extend_from_slice(&span[at * size..][..size]));
        out
    }

    /// Puts its elements where they belong in the larger tensor.
    pub fn scatter(&self, elements: &[u8], own: &[usize], size: usize, whole: &mut [u8]) {
        let span = self.span(own);
        let span = &mut whole[span.start * size..span.end * size];
        if self.is_contiguous() {
            span.copy_from_slice(elements);
            return;
        }
        let mut rest = elements.chunks_exact(size);
        self.each(own, |at| span[at * size..][..size].copy_from_slice(rest.next().expect("as many as its shape says")));
    }

    /// For each of its elements, in order, the place in its span.
    fn each(&self, own: &[usize], mut f: impl FnMut(usize)) {
        let (rows, columns) = (own.first().copied().unwrap_or(1), own.iter().skip(1).product::<usize>());
        let ([part, parts], all) = (self.part, rows * self.part[1]);
        for row in 0..rows {
            let row = if self.in_turn { row * parts + part } else { part * rows + row };
            (0..columns)
                .for_each(|column| f(if self.transposed { column * all + row } else { row * columns + column }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every() -> Vec<TensorCut> {
        let mut cuts = Vec::new();
        for stack in [None, Some([0, 3]), Some([2, 3])] {
            for transposed in [false, true] {
                for part in [[0, 1], [0, 2], [1, 2], [2, 3]] {
                    cuts.extend([false, true].map(|in_turn| TensorCut { stack, transposed, part, in_turn }));
                }
            }
        }
        cuts
    }

    /// By the definition, an element at a time.
    fn place(cut: &TensorCut, [rows, columns]: [usize; 2], row: usize, column: usize) -> usize {
        let [part, parts] = cut.part;
        let row = if cut.in_turn { row * parts + part } else { part * rows + row };
        let block = cut.stack.map_or(0, |[number, _]| number) * rows * parts * columns;
        block + if cut.transposed { column * rows * parts + row } else { row * columns + column }
    }

    #[test]
    fn parts_are_where_the_definition_says_and_go_back_there() {
        let own = [4, 5];
        for cut in every() {
            let shape = cut.whole(&own);
            assert_eq!(cut.own(&shape).as_deref(), Some(&own[..]), "{cut:?}");
            let whole: Vec<u8> = (0..shape.iter().product::<usize>() as u16).flat_map(u16::to_le_bytes).collect();
            let span = cut.span(&own);
            let part = cut.gather(whole[span.start * 2..span.end * 2].to_vec(), &own, 2);
            let places = (0..own[0]).flat_map(|row| (0..own[1]).map(move |column| (row, column)));
            let want: Vec<u8> =
                places.flat_map(|(row, column)| (place(&cut, own, row, column) as u16).to_le_bytes()).collect();
            assert_eq!(part, want, "{cut:?}");
            let mut back = vec![0xff; whole.len()];
            cut.scatter(&part, &own, 2, &mut back);
            let kept = back.as_chunks::<2>().0.iter().zip(whole.as_chunks::<2>().0);
            assert_eq!(kept.filter(|(back, was)| back == was).count(), 20, "{cut:?}");
        }
    }

    #[test]
    fn what_cannot_be_cut_so_is_none() {
        let cut = TensorCut { part: [0, 3], ..TensorCut::default() };
        assert_eq!(cut.own(&[7, 2]), None);
        assert_eq!(cut.own(&[9, 2]), Some(vec![3, 2]));
        assert_eq!(TensorCut { stack: Some([0, 2]), ..cut }.own(&[3, 9, 2]), None);
        assert_eq!(TensorCut { transposed: true, ..cut }.own(&[2, 9]), Some(vec![3, 2]));
    }
}
