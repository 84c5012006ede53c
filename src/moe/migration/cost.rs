//! What a migration costs: the work of the hosts that get sequences, and the bytes that travel on account of it
//! (Luffy, arXiv:2411.15419, 4.3).

use std::collections::BTreeMap;

use guildhall_tensor::Dtype;

use crate::parallel::{Parameters, Piece, Slice, Weight};

/// How many sequences of each length there are.
pub type SequenceLengths = BTreeMap<u64, u64>;

/// How attention computes on the sequences of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionCost {
    /// Every sequence is padded to the longest of its host, as in the paper.
    Padded,
    /// Each sequence is computed by itself, as here.
    Spans,
}

impl AttentionCost {
    /// The lengths on which attention computes, and how many sequences have each.
    fn computed(self, lengths: &SequenceLengths) -> impl Iterator<Item = (u64, u64)> {
        let longest = lengths.last_key_value().map_or(0, |(length, _)| *length);
        let computed = move |length| if self == AttentionCost::Padded { longest } else { length };
        lengths.iter().map(move |(length, sequences)| (computed(*length), *sequences))
    }

    /// Tokens on which attention computes, padding included.
    pub fn tokens(self, lengths: &SequenceLengths) -> u64 {
        self.computed(lengths).map(|(length, sequences)| length * sequences).sum()
    }

    /// Multiply-adds of what follows on sequences of these lengths, forward.
    pub fn work(self, lengths: &SequenceLengths, following: &FollowingWork) -> u128 {
        let of_token =
            |length: u64| u128::from(following.per_token) + u128::from(length) * u128::from(following.per_pair);
        self.computed(lengths).map(|(length, sequences)| u128::from(length * sequences) * of_token(length)).sum()
    }
}

/// What a rank does with its sequences behind a MoE layer, until the results of the next one return or the stack ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FollowingWork {
    /// Multiply-adds a token, forward.
    pub per_token: u64,
    /// Multiply-adds a token and a token that it may attend to, forward.
    pub per_pair: u64,
    /// Whether another MoE layer follows in the stack, to which rows are sent.
    pub exchanges: bool,
}

impl FollowingWork {
    /// One block's attention as the paper counts it: `3 L d^2` for queries, keys and values, `2 L^2 d` for scores and
    /// weighted values. It leaves out the output projection and the softmax.
    pub fn of_attention(width: u64) -> FollowingWork {
        FollowingWork { per_token: 3 * width * width, per_pair: 2 * width, exchanges: false }
    }

    /// With other work besides.
    pub fn after(self, other: &FollowingWork) -> FollowingWork {
        FollowingWork {
            per_token: self.per_token + other.per_token,
            per_pair: self.per_pair + other.per_pair,
            exchanges: self.exchanges || other.exchanges,
        }
    }

    /// With the products of every token with the matrices of a part of the model, of which `lanes` ranks have slices.
    pub fn with_products(self, part: &mut dyn Parameters, lanes: usize) -> FollowingWork {
        let mut per_token = self.per_token;
        part.visit(&mut |weight| per_token += products(weight, lanes));
        FollowingWork { per_token, ..self }
    }
}

/// Multiply-adds of a token with a matrix, on the one of `lanes` ranks that has most of it: slices may differ by a row, and
/// all ranks of a host must come to the same number.
pub fn products(weight: &Weight, lanes: usize) -> u64 {
    let of_piece = |piece: &Piece| {
        let all: usize = piece.shape.iter().product();
        match piece.slice {
            None => all,
            Some(Slice { dim, len, .. }) => all / piece.shape[dim] * len.max(piece.shape[dim].div_ceil(lanes)),
        }
    };
    let elements: usize = weight.placement.pieces.iter().map(of_piece).sum();
    if weight.decays { elements as u64 } else { 0 }
}

/// Speeds of a rank, which turn work and bytes into seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MigrationSpeeds {
    /// Floating-point operations a second.
    pub flops: f64,
    /// Bytes a second in and out of a host.
    pub bandwidth: f64,
    /// Bytes a second of the memory of a host's ranks.
    pub memory: f64,
    /// Seconds that a migration takes whatever moves: its further messages, and copies of all results and tokens.
    pub besides: f64,
}

/// Norms, softmax, activations and sums take about a quarter of the time of the products with which they go.
const BESIDE_PRODUCTS: f64 = 1.25;

impl MigrationSpeeds {
    /// Seconds of so many multiply-adds in forward, and of what goes with them. Backward has twice as many, and each is two
    /// operations.
    pub fn of_work(&self, multiply_adds: f64) -> f64 {
        BESIDE_PRODUCTS * 6.0 * multiply_adds / self.flops
    }

    pub fn of_bytes(&self, bytes: f64) -> f64 {
        bytes / self.bandwidth
    }

    pub fn of_copies(&self, bytes: f64) -> f64 {
        bytes / self.memory
    }

    /// Bytes that travel while so many are copied.
    pub fn bytes_meanwhile(&self, copied: u64) -> u64 {
        (self.of_copies(copied as f64) * self.bandwidth).ceil() as u64
    }
}

/// Bytes of memory that ranks read and write on account of a migration, forward and backward, summed over the ranks of a
/// tensor group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCopies {
    /// For every result row, whatever moves: it is sorted by destination.
    pub result: u64,
    /// For every token, whatever moves: it is sorted into its sequence.
    pub token: u64,
    /// For a token that moves: its residual row is taken apart, rebuilt and added.
    pub moving: u64,
}

impl RowCopies {
    /// With rows of so many elements. The factors count readings and writings of a row by the kernels of a migration, as
    /// the planner counts them, within three tenths: they differ with where norms are and which residual rows results carry.
    /// In bf16 rows are read and written as they are stored, and their gradients are f32: what a moving row is spared
    /// elsewhere is as much as its own copies.
    pub fn of_rows(elements: usize, dtype: Dtype) -> RowCopies {
        let row = (elements * size_of::<f32>()) as u64;
        let [result, token, moving] = match dtype {
            Dtype::Bf16 => [3, 15, 0],
            _ => [5, 16, 8],
        };
        RowCopies { result: result * row, token: token * row, moving: moving * row }
    }

    /// If so many lanes copy every result, and so many every token.
    pub fn times(self, results: u64, tokens: u64) -> RowCopies {
        RowCopies { result: results * self.result, token: tokens * self.token, moving: tokens * self.moving }
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
    pub copies: RowCopies,
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
    /// What travels on account of sequences that move together.
    pub fn unit(&self, sequences: &[&Whereabouts]) -> MigrationUnit {
        let sum = |of: &dyn Fn(&Whereabouts) -> u64| sequences.iter().map(|sequence| of(sequence)).sum::<u64>();
        let moving = |of: &Whereabouts| {
            self.token * of.tokens + self.residual * of.alone + self.carried * (of.tokens - of.alone)
        };
        MigrationUnit {
            host: sequences[0].host,
            home: sequences[0].home,
            lengths: sequences.iter().map(|of| of.tokens).collect(),
            results: (0..sequences[0].near.len()).map(|host| self.row * sum(&|of| of.near[host])).collect(),
            others: self.row * sum(&|of| of.rows - of.near.iter().sum::<u64>()),
            moving: sum(&moving),
            returning: self.home * sum(&|of| of.tokens),
            copied: self.copies.moving * sum(&|of| of.tokens),
        }
    }
}

/// Sequences of one host that move together, and the bytes that travel on account of them, forward and backward.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationUnit {
    /// The host that has them.
    pub host: usize,
    /// The host that loaded them, if it is one of these.
    pub home: Option<usize>,
    /// Tokens of each sequence.
    pub lengths: Vec<u64>,
    /// For each host, their results that are computed there, which need not travel if they go on there.
    pub results: Vec<u64>,
    /// Results that travel wherever they go on.
    pub others: u64,
    /// What travels from the present host if they move.
    pub moving: u64,
    /// What travels home later if they are away from home then.
    pub returning: u64,
    /// Bytes of memory that are copied if they move.
    pub copied: u64,
}

impl MigrationUnit {
    /// Bytes in flight if they go on at host `to`. So away from home they stay without paying again, and the way back is
    /// paid once.
    pub fn traffic(&self, to: usize) -> u64 {
        let elsewhere = self.results.iter().sum::<u64>() - self.results[to];
        let moving = if to == self.host { 0 } else { self.moving };
        elsewhere + self.others + moving + if self.home == Some(to) { 0 } else { self.returning }
    }

    /// Of this the parts whose ends depend on `to`, each with the host that sends it and the one that gets it, where
    /// these are known and not to be had from `results`.
    pub(super) fn ways(&self, to: usize) -> [(Option<usize>, Option<usize>, u64); 3] {
        let results = self.results.iter().sum::<u64>() - self.results[to] + self.others;
        let moving = if to == self.host { 0 } else { self.moving };
        let returning = if self.home == Some(to) { 0 } else { self.returning };
        [(None, Some(to), results), (Some(self.host), Some(to), moving), (Some(to), self.home, returning)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand. The paper's example: a sequence of 11 tokens beside one of 1, or beside two of 6.
    #[test]
    fn attention_is_counted_with_padding_and_without() {
        let attention = FollowingWork::of_attention(2);
        let of = |lengths: &[u64]| {
            let mut of = SequenceLengths::new();
            lengths.iter().for_each(|length| *of.entry(*length).or_default() += 1);
            of
        };
        let work = |kind: AttentionCost, lengths: &[u64]| kind.work(&of(lengths), &attention);
        assert_eq!(work(AttentionCost::Spans, &[1, 11]), (3 * 12 * 4) + 2 * (1 + 121) * 2);
        assert_eq!(work(AttentionCost::Padded, &[1, 11]), 2 * (3 * 11 * 4 + 2 * 121 * 2));
        assert_eq!([AttentionCost::Padded, AttentionCost::Spans].map(|kind| kind.tokens(&of(&[6, 11, 6]))), [33, 23]);
        assert_eq!(work(AttentionCost::Padded, &[]), 0);
        // Both pad ten places; padding makes quadratic work the dearer the more sequences there are.
        let growth = |lengths: &[u64]| {
            let after = [lengths, &[11]].concat();
            work(AttentionCost::Padded, &after) - work(AttentionCost::Padded, lengths)
        };
        assert_eq!([growth(&[1]), growth(&[6, 6])], [63 * 4 + 482 * 2, 63 * 4 + 582 * 2]);
    }

    /// Four multiply-adds forward and eight backward, of two operations each, and a quarter for all else.
    #[test]
    fn work_and_bytes_take_time() {
        let speeds = MigrationSpeeds { flops: 15.0, bandwidth: 5.0, memory: 4.0, besides: 0.0 };
        assert_eq!([speeds.of_work(4.0), speeds.of_bytes(10.0), speeds.of_copies(8.0)], [2.0; 3]);
        assert_eq!([0, 8, 9].map(|copied| speeds.bytes_meanwhile(copied)), [0, 10, 12]);
    }

    /// A sequence of 4 tokens and 8 rows, of which 5 are computed at host 1 and one at none of the hosts.
    #[test]
    fn moving_and_coming_home_are_paid() {
        let prices = RowPrices {
            row: 10,
            token: 2,
            residual: 9,
            carried: 1,
            way: 0,
            home: 9,
            copies: RowCopies { result: 1, token: 2, moving: 3 },
        };
        let of = |host, home| Whereabouts { host, home, tokens: 4, alone: 4, rows: 8, near: vec![1, 5, 1] };
        let traffic = |of: &Whereabouts| [0, 1, 2].map(|to| prices.unit(&[of]).traffic(to));
        assert_eq!(traffic(&of(0, Some(0))), [70, 30 + 44 + 36, 70 + 44 + 36]);
        // Away from home the way back is due wherever it stays.
        assert_eq!(traffic(&of(1, Some(0))), [70 + 44, 30 + 36, 70 + 44 + 36]);
        // To a home that is not here the way is the same from everywhere.
        assert_eq!(traffic(&of(1, None)), [70 + 44 + 36, 30 + 36, 70 + 44 + 36]);
        // Three of the tokens have a result that carries their residual row.
        let carried = Whereabouts { alone: 1, ..of(0, Some(0)) };
        assert_eq!(traffic(&carried), [70, 30 + (8 + 9 + 3) + 36, 70 + (8 + 9 + 3) + 36]);
        // Where the loss is taken at the end of the stack, nothing comes home.
        assert_eq!(RowPrices { home: 0, ..prices }.unit(&[&of(1, Some(0))]).traffic(1), 30);
        // Two sequences together.
        let (first, second) = (of(0, Some(0)), Whereabouts { near: vec![0, 8, 0], ..carried });
        let both = prices.unit(&[&first, &second]);
        assert_eq!((both.traffic(0), both.traffic(1), &both.lengths[..]), (150, 30 + 44 + 20 + 72, &[4, 4][..]));
        assert_eq!(both.copied, 3 * 8);
    }
}
