//! A term of a matrix as two values on a tape, and products with a matrix that may have one.

use guildhall_tensor::{Index, Tape, Tensor, Var};

/// What is added to a matrix `[out, in]`: `b a`, with a `[r, in]` and b `[out, r]`.
#[derive(Clone)]
pub struct LowRank {
    pub a: Var,
    pub b: Var,
}

impl LowRank {
    /// The term of matrices that stand one above the other, of which some have terms; `outputs` are those of each. None if
    /// no matrix has one.
    pub fn stacked(tape: &Tape, parts: Vec<(Option<LowRank>, usize)>) -> Option<LowRank> {
        let mut terms = parts.iter().filter_map(|(term, _)| term.as_ref());
        let (first, is_alone) = (terms.next()?.clone(), terms.next().is_none());
        if is_alone && parts.len() == 1 {
            return Some(first);
        }
        let (dtype, rank_of) = (first.a.dtype(), |term: &LowRank| term.a.shape()[0]);
        let ranks: usize = parts.iter().filter_map(|(term, _)| term.as_ref()).map(rank_of).sum();
        let (mut a, mut b, mut before) = (Vec::new(), Vec::new(), 0);
        for (term, outputs) in parts {
            let Some(term) = term else {
                let none = Tensor::zeros(tape.device(), &[outputs, ranks]).cast(dtype);
                b.push(tape.constant(none));
                continue;
            };
            let rank = rank_of(&term);
            // Outputs of a part see the columns of its own inner width alone.
            let own = Index::Cycle(term.b.value().len(), before as u32..(before + rank) as u32);
            b.push(term.b.scatter_columns(own, ranks).cast(dtype));
            a.push(term.a);
            before += rank;
        }
        let joined = |mut parts: Vec<Var>| if parts.len() == 1 { parts.remove(0) } else { Var::concat_rows(parts) };
        Some(LowRank { a: joined(a), b: joined(b) })
    }

    /// Of those `rows` of the outputs.
    pub fn rows(self, rows: &[u32]) -> LowRank {
        LowRank { b: self.b.gather_rows(rows), ..self }
    }

    /// Of one matrix as a stack of matrices, `[1, r, in]` and `[1, out, r]`.
    pub fn as_stack(self) -> LowRank {
        let stack = |x: Var| {
            let shape = [&[1], x.shape()].concat();
            x.reshape(&shape)
        };
        LowRank { a: stack(self.a), b: stack(self.b) }
    }
}

/// A product's values: the matrix, then the bias if there is one, then a and b if the matrix has a term.
fn parts(values: &[Var]) -> (&Var, Option<&Var>, Option<[&Var; 2]>) {
    match values {
        [w] => (w, None, None),
        [w, bias] => (w, Some(bias), None),
        [w, a, b] => (w, None, Some([a, b])),
        [w, bias, a, b] => (w, Some(bias), Some([a, b])),
        values => panic!("{} values of a product", values.len()),
    }
}

/// `x (W + B A)^T + bias`, x `[T, in]`, of [`LowRank`] the values after W and the bias, of which any may be absent.
///
/// # Panics
/// If there are no values, or more.
pub fn product(x: &Var, values: &[Var]) -> Var {
    let (w, bias, term) = parts(values);
    let y = x.linear(w, bias);
    term.map_or_else(|| y.clone(), |[a, b]| y.add(&x.linear(a, None).linear(b, None)))
}

/// The same of stacks of matrices, each with its own of the rows: `counts[e]` of matrix e, in order.
///
/// # Panics
/// As [`product`].
pub fn grouped_product(x: &Var, values: &[Var], counts: &[usize]) -> Var {
    let (w, bias, term) = parts(values);
    let y = x.grouped_linear(w, bias, counts);
    let of = |[a, b]: [&Var; 2]| x.grouped_linear(a, None, counts).grouped_linear(b, None, counts);
    term.map_or_else(|| y.clone(), |term| y.add(&of(term)))
}
