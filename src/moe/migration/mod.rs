//! The choice of the hosts at which sequences go on behind a MoE layer (Luffy, arXiv:2411.15419, 4.3).
//!
//! ```text
//!  plan -> how many rows of each sequence are computed where -> all-gather -> policy -> the new host of each sequence
//!          SequenceRows                                                       cost, loads, assign
//! ```
//!
//! There is no controller: every rank gets the same numbers and computes the same assignment.

mod assign;
mod cost;
mod force;
mod loads;
mod offers;
mod policy;

pub use assign::{AssignmentTerms, paying};
pub use cost::{
    AttentionCost, FollowingWork, MigrationSpeeds, MigrationUnit, RowCopies, RowPrices, SequenceLengths, Whereabouts,
    products,
};
pub use force::forced;
pub use policy::{Migrating, MovedSequences, exchanges};

use guildhall_comm::Error;

use super::Plan;
use super::carrying::carrying_row_of_tokens;
use super::plan::RowRun;
use crate::parallel::{HeldSequences, Hosts, Rates, Rows};

/// What is known of the sequences of all hosts when one layer's results are about to return.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceRows {
    /// Tokens of a sequence.
    pub seq: usize,
    /// For each host and each of its sequences.
    pub of: Vec<Vec<Whereabouts>>,
    pub prices: RowPrices,
    /// Ranks of a host.
    pub lanes: usize,
    pub following: FollowingWork,
    /// All-to-alls that there are besides if anything moves.
    pub exchanges: usize,
    /// If the mesh has been measured.
    pub rates: Option<Rates>,
}

/// Where the results of a host's rows are computed.
pub struct ResultPlaces<'a> {
    /// All rows of the tensor group.
    pub plan: &'a Plan,
    /// `ranks[lane][host]`: the rank of the lane's expert group that is that lane of the host.
    pub ranks: &'a [Vec<usize>],
    /// The lane that sends a row of a run for a token.
    pub lane: &'a dyn Fn(&RowRun, usize) -> usize,
    /// This rank's host.
    pub own: usize,
    /// Whether results can carry the residual stream.
    pub carries: bool,
}

impl ResultPlaces<'_> {
    /// For each of the host's sequences of `seq` tokens: the number of its tokens whose residual rows no result carries,
    /// the number of its rows, and for each host of those whose results need no message if the sequence goes on there.
    fn counts(&self, sequences: usize, seq: usize) -> Vec<Vec<u64>> {
        let mut counts = vec![vec![0; 2 + self.ranks[0].len()]; sequences];
        let carriers = if self.carries { carrying_row_of_tokens(self.plan) } else { vec![None; sequences * seq] };
        for (token, _) in carriers.iter().enumerate().filter(|(_, carrier)| carrier.is_none()) {
            counts[token / seq][0] += 1;
        }
        let mut tokens = self.plan.tokens.known().iter();
        for run in &self.plan.runs {
            for &token in tokens.by_ref().take(run.rows) {
                let counts = &mut counts[token as usize / seq];
                let lane = &self.ranks[(self.lane)(run, token as usize)];
                // Rows of shadowed experts are computed where they are.
                let host = run.rank.map_or(Some(self.own), |rank| lane.iter().position(|&other| other == rank));
                counts[1] += 1;
                host.into_iter().for_each(|host| counts[2 + host] += 1);
            }
        }
        counts
    }
}

impl SequenceRows {
    /// All-gathers the sequences of the hosts and where their results are computed. Collective over the hosts' group.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn gather(
        hosts: &Hosts,
        rows: &Rows,
        places: &ResultPlaces,
        (prices, following, exchanges): (RowPrices, FollowingWork, usize),
        rates: Option<Rates>,
    ) -> Result<(HeldSequences, SequenceRows), Error> {
        let counts = places.counts(rows.sequences.len(), rows.seq);
        let own = rows.sequences.iter().zip(&rows.origins).zip(counts);
        let own = own.flat_map(|((&first, &origin), counts)| [vec![first, u64::from(origin)], counts].concat());
        let words = 4 + hosts.ranks.len();
        let all = hosts.gather(own.collect())?;
        let held = all.iter().map(|of_host| of_host.chunks_exact(words).map(|words| words[0]).collect()).collect();
        let of = all.iter().enumerate().map(|(host, of_host)| {
            let of = |words: &[u64]| Whereabouts {
                host,
                home: hosts.origins.iter().position(|&origin| origin as u64 == words[1]),
                tokens: rows.seq as u64,
                alone: words[2],
                rows: words[3],
                near: words[4..].to_vec(),
            };
            of_host.chunks_exact(words).map(of).collect()
        });
        Ok((
            held,
            SequenceRows {
                seq: rows.seq,
                of: of.collect(),
                prices,
                lanes: places.ranks.len(),
                following,
                exchanges,
                rates,
            },
        ))
    }

    /// For each host, the bytes in which the rows that it sent to others say where their results go, if anything moves.
    pub fn ways(&self) -> Vec<u64> {
        let sent = |(host, of): (usize, &Vec<Whereabouts>)| of.iter().map(|of| of.rows - of.near[host]).sum::<u64>();
        self.of.iter().enumerate().map(|of_host| self.prices.way * sent(of_host)).collect()
    }

    /// The speeds of a host. All of its ranks send, get and copy at once.
    pub fn speeds(&self, rates: Rates) -> MigrationSpeeds {
        let (lanes, messages) = (self.lanes as f64, rates.latency * self.exchanges as f64);
        let memory = rates.memory * lanes;
        MigrationSpeeds {
            flops: rates.flops,
            bandwidth: rates.bandwidth * lanes,
            memory,
            besides: messages + self.copied() / memory,
        }
    }

    /// Rows and tokens of all sequences.
    fn totals(&self) -> [u64; 2] {
        let all = self.of.iter().flatten();
        all.fold([0, 0], |[rows, tokens], of| [rows + of.rows, tokens + of.tokens])
    }

    /// Bytes of memory that a host copies if anything moves, whatever it is: the mean over hosts.
    pub fn copied(&self) -> f64 {
        let ([rows, tokens], RowCopies { result, token, .. }) = (self.totals(), self.prices.copies);
        (result * rows + token * tokens) as f64 / self.of.len() as f64
    }

    /// Bytes that a token's host sends and gets in the next layer, forward and backward, if a token has as many rows there
    /// as here and they go to all hosts alike; 0 if there is none.
    pub fn exchanged(&self) -> u64 {
        let ([rows, tokens], hosts) = (self.totals(), self.of.len() as u64);
        let travelling = u128::from(rows) * u128::from(hosts - 1);
        let bytes = 2 * u128::from(self.prices.row) * travelling / u128::from((hosts * tokens).max(1));
        if self.following.exchanges { bytes as u64 } else { 0 }
    }

    /// What of the sequences of host `own` moves, if sequence i of host h goes to host `to[h][i]`.
    pub fn moved(&self, own: usize, to: &[Vec<usize>]) -> MovedSequences {
        let mut moved = MovedSequences::default();
        for (of, &to) in self.of[own].iter().zip(&to[own]).filter(|(_, to)| **to != own) {
            moved.sequences += 1;
            moved.tokens += of.tokens;
            moved.residual_rows += of.alone;
            moved.results_if_stayed += of.rows - of.near[own];
            moved.results += of.rows - of.near[to];
        }
        moved
    }
}
