//! What a migration costs: the attention of the hosts that get sequences, and the bytes that travel on account of it
//! (Luffy, arXiv:2411.15419, 4.3).

use std::iter::repeat_n;

/// How attention computes on the sequences of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionCost {
    /// Every sequence is padded to the longest of its host, as in the paper.
    Padded,
    /// Each sequence is computed by itself, as here.
    Spans,
}

impl AttentionCost {
    /// The lengths that attention computes on.
    fn computed(self, lengths: &[u64]) -> Vec<u64> {
        match self {
            AttentionCost::Padded => repeat_n(lengths.iter().copied().max().unwrap_or(0), lengths.len()).collect(),
            AttentionCost::Spans => lengths.to_vec(),
        }
    }

    /// Tokens on which attention computes, padding included.
    pub fn tokens(self, lengths: &[u64]) -> u64 {
        self.computed(lengths).iter().sum()
    }

    /// Multiply-adds of one block's attention on sequences of these lengths, forward: `3 L d^2` for queries, keys and
    /// values, `2 L^2 d` for scores and weighted values. The paper leaves out the output projection and the softmax.
    pub fn work(self, lengths: &[u64], width: usize) -> u128 {
        let d = width as u128;
        let of = |length: u64| (u128::from(length), u128::from(length).pow(2));
        self.computed(lengths).into_iter().map(of).map(|(linear, square)| 3 * linear * d * d + 2 * square * d).sum()
    }
}

/// Speeds of a rank, which turn work and bytes into seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MigrationSpeeds {
    /// Floating-point operations a second.
    pub flops: f64,
    /// Bytes a second.
    pub bandwidth: f64,
}

impl MigrationSpeeds {
    /// Seconds of so many multiply-adds in forward. Backward has twice as many, and each is two operations.
    pub fn of_work(&self, multiply_adds: f64) -> f64 {
        6.0 * multiply_adds / self.flops
    }

    pub fn of_bytes(&self, bytes: f64) -> f64 {
        bytes / self.bandwidth
    }
}

/// Bytes that travel, forward and backward, summed over the ranks of a tensor group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPrices {
    /// A result row that goes from the rank that computed it to another one.
    pub row: u64,
    /// A token that changes its host: the weights and places of its routes, and its metadata.
    pub token: u64,
    /// Its rows that are sent by themselves, those of the residual stream.
    pub residual: u64,
    /// If a result carries its residual row: what is sent along.
    pub carried: u64,
    /// For a row that was sent to another rank: where its result goes, if any sequence moves.
    pub way: u64,
    /// A token that is returned to the host that loaded it, at the end of a stack that another follows. At the end of
    /// the last stack the loss is taken where the token is, and this is 0.
    pub home: u64,
}

/// What is known of a sequence, or of several that move together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// The host that has it.
    pub host: usize,
    /// The host that loaded it; `None` if it is not among those that can be reached here.
    pub home: Option<usize>,
    pub tokens: u64,
    /// Its tokens whose residual rows no result can carry.
    pub alone: u64,
    /// Its result rows.
    pub rows: u64,
    /// For each host, those of its result rows that need no message if it goes on there.
    pub near: Vec<u64>,
}

impl RowPrices {
    /// Bytes in flight on account of a sequence that goes on at host `to`: its results, its residual stream if it
    /// moves, and the way home if it is away then. So away from home a sequence stays without paying again, and the
    /// way back is paid once.
    pub fn traffic(&self, of: &Whereabouts, to: usize) -> u64 {
        let moving = self.token * of.tokens + self.residual * of.alone + self.carried * (of.tokens - of.alone);
        let moves = if to == of.host { 0 } else { moving };
        let returns = if of.home == Some(to) { 0 } else { self.home * of.tokens };
        self.row * (of.rows - of.near[to]) + moves + returns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand. The paper's example: a sequence of 11 tokens beside one of 1, or beside two of 6.
    #[test]
    fn attention_is_counted_with_padding_and_without() {
        let work = |kind: AttentionCost, lengths: &[u64]| kind.work(lengths, 2);
        assert_eq!(work(AttentionCost::Spans, &[1, 11]), (3 * 12 * 4) + 2 * (1 + 121) * 2);
        assert_eq!(work(AttentionCost::Padded, &[1, 11]), 2 * (3 * 11 * 4 + 2 * 121 * 2));
        assert_eq!([AttentionCost::Padded, AttentionCost::Spans].map(|kind| kind.tokens(&[6, 11, 6])), [33, 23]);
        assert_eq!(work(AttentionCost::Padded, &[]), 0);
        // Both pad ten places; padding makes quadratic work the dearer the more sequences there are.
        let growth = |lengths: &[u64]| {
            let after = [lengths, &[11]].concat();
            work(AttentionCost::Padded, &after) - work(AttentionCost::Padded, lengths)
        };
        assert_eq!([growth(&[1]), growth(&[6, 6])], [63 * 4 + 482 * 2, 63 * 4 + 582 * 2]);
    }

    /// Four multiply-adds forward and eight backward, of two operations each.
    #[test]
    fn work_and_bytes_take_time() {
        let speeds = MigrationSpeeds { flops: 12.0, bandwidth: 5.0 };
        assert_eq!([speeds.of_work(4.0), speeds.of_bytes(10.0)], [2.0, 2.0]);
    }

    /// A sequence of 4 tokens and 8 rows, of which 6 are computed at host 1.
    #[test]
    fn moving_and_coming_home_are_paid() {
        let prices = RowPrices { row: 10, token: 2, residual: 9, carried: 1, way: 0, home: 9 };
        let of = |host, home| Whereabouts { host, home, tokens: 4, alone: 4, rows: 8, near: vec![1, 6, 1] };
        let traffic = |of: &Whereabouts| [0, 1, 2].map(|to| prices.traffic(of, to));
        assert_eq!(traffic(&of(0, Some(0))), [70, 20 + 44 + 36, 70 + 44 + 36]);
        // Away from home the way back is due wherever it stays.
        assert_eq!(traffic(&of(1, Some(0))), [70 + 44, 20 + 36, 70 + 44 + 36]);
        // To a home that is not here the way is the same from everywhere.
        assert_eq!(traffic(&of(1, None)), [70 + 44 + 36, 20 + 36, 70 + 44 + 36]);
        // Three of the tokens have a result that carries their residual row.
        let carried = Whereabouts { alone: 1, ..of(0, Some(0)) };
        assert_eq!(traffic(&carried), [70, 20 + (8 + 9 + 3) + 36, 70 + (8 + 9 + 3) + 36]);
        // Where the loss is taken at the end of the stack, nothing comes home.
        assert_eq!(RowPrices { home: 0, ..prices }.traffic(&of(1, Some(0)), 1), 20);
    }
}
