//! Several sources as one: which component a row is from is arithmetic on its place, so that the proportions hold in every
//! block of rows, and neither resuming nor the mesh changes them.
//!
//! A block of [`BLOCK`] rows has a fixed number of each component's, in an order that the seed and the block's number
//! shuffle. Each component is gone through in passes with orders of its own, whatever the others do.

use std::sync::Arc;

use crate::data::error::Error;
use crate::data::manifest::sha256;
use crate::data::shuffle::{Permutation, mix};
use crate::data::source::{Row, Source};

/// Rows after which the proportions are exact.
pub const BLOCK: usize = 1 << 12;

/// A source and its part of a mixture.
#[derive(Clone)]
pub struct Component {
    pub rows: Arc<dyn Source>,
    /// Of all rows, in proportion to those of the others.
    pub share: f64,
}

/// Rows of several sources.
pub struct Mixture {
    components: Vec<Component>,
    /// Before each component and behind the last, the rows of a block.
    bounds: Vec<usize>,
    seed: u64,
}

impl Mixture {
    /// `seed` orders the blocks and the components' rows.
    ///
    /// # Errors
    /// No component, more than a block has rows, a component without rows, shares that are no positive numbers, or rows of
    /// different lengths.
    pub fn new(components: Vec<Component>, seed: u64) -> Result<Mixture, Error> {
        let problem = |problem: String| Err(Error::BadPlan(problem));
        let Some(first) = components.first() else { return problem("a mixture of nothing has no rows".to_owned()) };
        if components.len() > BLOCK {
            return problem(format!("a mixture of {} sources: {BLOCK} at most", components.len()));
        }
        let lengths = |component: &Component| (component.rows.seq(), component.rows.source_seq());
        for (index, component) in components.iter().enumerate() {
            if component.rows.is_empty() || !component.share.is_finite() || component.share <= 0.0 {
                let (rows, share) = (component.rows.len(), component.share);
                return problem(format!("source {index} of a mixture has {rows} rows and the share {share}"));
            }
            if lengths(component) != lengths(first) {
                return problem(format!("source {index} of a mixture has rows of another length than source 0"));
            }
        }
        let shares: Vec<f64> = components.iter().map(|component| component.share).collect();
        let mut bounds = vec![0];
        bounds.extend(quotas(&shares, BLOCK).into_iter().scan(0, |sum, quota| {
            *sum += quota;
            Some(*sum)
        }));
        Ok(Mixture { components, bounds, seed })
    }

    /// Of a block, the rows of each component.
    pub fn quotas(&self) -> Vec<usize> {
        self.bounds.windows(2).map(|bounds| bounds[1] - bounds[0]).collect()
    }

    /// The component at a place of a block, and the slot there: those of a component are consecutive.
    fn slot(&self, index: usize, block: u64) -> (usize, usize) {
        let slot = Permutation::new(BLOCK as u64, self.seed, block).get(index as u64) as usize;
        (self.bounds.partition_point(|bound| *bound <= slot) - 1, slot)
    }
}

/// Whole numbers in proportion to `shares` that add up to `all`, each at least 1: by largest remainders.
fn quotas(shares: &[f64], all: usize) -> Vec<usize> {
    let sum: f64 = shares.iter().sum();
    let exact: Vec<f64> = shares.iter().map(|share| share / sum * all as f64).collect();
    let mut quotas: Vec<usize> = exact.iter().map(|exact| (*exact as usize).max(1)).collect();
    let lacks = |quotas: &[usize], i: usize| exact[i] - quotas[i] as f64;
    loop {
        let given: usize = quotas.iter().sum();
        let order = (0..shares.len()).filter(|&i| given < all || quotas[i] > 1);
        let by_lack = |a: &usize, b: &usize| lacks(&quotas, *a).total_cmp(&lacks(&quotas, *b)).then(b.cmp(a));
        match given.cmp(&all) {
            std::cmp::Ordering::Equal => return quotas,
            std::cmp::Ordering::Less => {
                let most = order.max_by(by_lack).expect("a share");
                quotas[most] += 1;
            }
            std::cmp::Ordering::Greater => {
                let least = order.min_by(by_lack).expect("more rows than shares");
                quotas[least] -= 1;
            }
        }
    }
}

impl Source for Mixture {
    fn len(&self) -> usize {
        BLOCK
    }

    fn seq(&self) -> usize {
        self.components[0].rows.seq()
    }

    fn source_seq(&self) -> Option<usize> {
        self.components[0].rows.source_seq()
    }

    /// The place within a block, and the block.
    fn place(&self, _seed: u64, index: u128) -> (usize, u64) {
        ((index % BLOCK as u128) as usize, (index / BLOCK as u128) as u64)
    }

    fn component(&self, index: usize, block: u64) -> u32 {
        self.slot(index, block).0 as u32
    }

    fn get(&self, index: usize, block: u64) -> Result<Row, Error> {
        if index >= BLOCK {
            return Err(Error::RowOutOfRange { index, len: BLOCK });
        }
        let (number, slot) = self.slot(index, block);
        let (rows, within) = (&self.components[number].rows, self.bounds[number]..self.bounds[number + 1]);
        let nth = u128::from(block) * within.len() as u128 + (slot - within.start) as u128;
        let (row, pass) = rows.place(mix(self.seed ^ mix(number as u64)), nth);
        Ok(Row { component: number as u32, ..rows.get(row, pass)? })
    }

    fn fingerprint(&self) -> String {
        let of = |component: &Component| component.rows.fingerprint();
        let parts: Vec<String> = self.components.iter().map(of).collect();
        sha256(format!("mixture {} {:?} {}", self.seed, self.bounds, parts.join(" ")).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_follow_the_shares() {
        assert_eq!(quotas(&[1.0, 1.0, 2.0], 8), [2, 2, 4]);
        assert_eq!(quotas(&[1.0, 1.0, 1.0], 8), [3, 3, 2]);
        // However small its share, each has a row.
        assert_eq!(quotas(&[1e-9, 1.0, 1e-9], 8), [1, 6, 1]);
        assert_eq!(quotas(&[1.0; 8], 8), [1; 8]);
        assert_eq!(quotas(&[0.5], 8), [8]);
    }
}
