//! Sequence migration: one tensor group sends whole sequences, with the metadata of their tokens, to another (Luffy,
//! arXiv:2411.15419, 4.3; a GPU in the paper corresponds to a tensor group here).
//!
//! A *host* is a tensor group that can hold sequences. All send and receive counts are computed with integer arithmetic
//! from a table that every rank has: the list of the sequences on each host.
//!
//! Rows are moved in two steps. First, [`Migration::carry`] sends them to the rank with the same index in the
//! destination tensor group. Under sequence parallelism that rank may not be the one that owns the tokens there, so
//! [`Migration::settle`] redistributes them within the destination tensor group.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error};
use guildhall_tensor::{Indices, Var};

use super::collectives::{RowCounts, all_to_all_rows};
use super::{Rows, Stream, gather_numbers};

/// The tensor groups (hosts) among which sequences can migrate, from the point of view of one rank.
#[derive(Clone)]
pub struct Hosts {
    /// Communicator that contains this rank and its counterparts (same tensor rank) on all hosts; it may contain other
    /// ranks too.
    pub group: Arc<dyn Communicator>,
    /// `ranks[h]`: the rank, within `group`, of this rank's counterpart on host h. Ascending.
    pub ranks: Vec<usize>,
    /// Index of this rank's host in `ranks`.
    pub own: usize,
    /// For each host, its number among those that load sequences ([`Rows::origins`]).
    pub origins: Vec<usize>,
}

/// For each host, its sequences in ascending order, each identified by the number of its first token within the step.
pub type HeldSequences = Vec<Vec<u64>>;

/// The exchange tables of one migration of a stream's sequences between hosts.
pub struct Migration {
    hosts: Hosts,
    /// Indices of this rank's tokens, sorted by destination host. At the destination, rows are ordered by source host,
    /// and keep their order within one host.
    send: Indices,
    counts: RowCounts,
    /// Permutation that sorts the received rows by token number.
    sorted: Indices,
    /// Under sequence parallelism: the send and receive counts of the second step, within the tensor group, and the
    /// permutation that sorts the rows received there by token number.
    shares: Option<(RowCounts, Indices)>,
    /// For each token that this rank had before the migration, its destination rank in the hosts' group.
    destinations: Vec<u32>,
    /// `to[host][i]`: the destination host of sequence i of that host.
    to: Vec<Vec<usize>>,
    /// The stream on this rank after the migration.
    stream: Stream,
}

/// The inputs from which the send and receive counts are computed.
struct Table<'a> {
    seq: usize,
    held: &'a HeldSequences,
    /// `to[host][i]`: the destination host of sequence i of that host.
    to: &'a [Vec<usize>],
    /// Number of lanes, the ranks of a tensor group among which its tokens are split; 1 if every rank has all tokens.
    lanes: usize,
}

impl Hosts {
    /// Gathers the list of sequences held by each host. Collective over the group.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn held(&self, rows: &Rows) -> Result<HeldSequences, Error> {
        self.gather(rows.sequences.clone())
    }

    /// All-gathers `own` over the group; returns the contribution of each host, in host order. Collective over the
    /// group.
    ///
    /// # Errors
    /// Any error of the group's communicator.
    pub fn gather(&self, own: Vec<u64>) -> Result<Vec<Vec<u64>>, Error> {
        let mut all = gather_numbers(own, &self.group)?;
        Ok(self.ranks.iter().map(|&rank| std::mem::take(&mut all[rank])).collect())
    }

    /// Converts counts per host to counts per rank of the group; ranks that belong to no host get 0.
    fn by_rank(&self, by_host: &[usize]) -> Vec<usize> {
        let mut by_rank = vec![0; self.group.size()];
        self.ranks.iter().zip(by_host).for_each(|(&rank, &count)| by_rank[rank] = count);
        by_rank
    }
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SequencePart {
    /// Index of the sequence in its host's list.
    sequence: usize,
    /// The tokens' numbers within the step.
    tokens: Range<u64>,
}

impl Table<'_> {
    /// The tokens that lane `lane` has on a host with these sequences, in order.
    fn share(&self, sequences: &[u64], lane: usize) -> Vec<SequencePart> {
        let (lane, all) = (if self.lanes == 1 { 0 } else { lane }, sequences.len() * self.seq);
        let share = all * lane / self.lanes..all * (lane + 1) / self.lanes;
        let run = |sequence: usize| {
            let place = sequence * self.seq;
            let number = |end: usize| sequences[sequence] + (end.clamp(place, place + self.seq) - place) as u64;
            SequencePart { sequence, tokens: number(share.start)..number(share.end) }
        };
        let touched = if share.is_empty() { 0..0 } else { share.start / self.seq..share.end.div_ceil(self.seq) };
        touched.map(run).collect()
    }

    /// The tokens of lane `lane` on host `host`, each run with its destination host.
    fn leaving(&self, host: usize, lane: usize) -> Vec<(Range<u64>, usize)> {
        let run = |SequencePart { sequence, tokens }: SequencePart| (tokens, self.to[host][sequence]);
        self.share(&self.held[host], lane).into_iter().map(run).collect()
    }

    /// The tokens that lane `lane` of host `host` receives, grouped by source host.
    fn arriving(&self, host: usize, lane: usize) -> Vec<Vec<Range<u64>>> {
        let from = |other: usize| {
            self.leaving(other, lane).into_iter().filter(|(_, to)| *to == host).map(|(tokens, _)| tokens).collect()
        };
        (0..self.held.len()).map(from).collect()
    }

    /// The sequences of a host after the migration, in ascending order.
    fn settled(&self, host: usize) -> Vec<u64> {
        let all = self.held.iter().flatten().zip(self.to.iter().flatten());
        let mut settled: Vec<u64> = all.filter(|(_, to)| **to == host).map(|(first, _)| *first).collect();
        settled.sort_unstable();
        settled
    }

    /// The second-step exchange, within the tensor group of host `host`, by which lane `lane` receives its tokens: send
    /// and receive counts, and the numbers of the received tokens, by source lane.
    fn redistributed(&self, host: usize, lane: usize) -> (RowCounts, Vec<u64>) {
        let settled = self.settled(host);
        let owned = |lane: usize| self.share(&settled, lane).into_iter().map(|run| run.tokens).collect::<Vec<_>>();
        let arrived = |lane: usize| {
            let mut runs = self.arriving(host, lane).concat();
            runs.sort_unstable_by_key(|tokens| tokens.start);
            runs
        };
        let (own, mine) = (arrived(lane), owned(lane));
        let come: Vec<Vec<Range<u64>>> = (0..self.lanes).map(|from| overlap(&arrived(from), &mine)).collect();
        let send = (0..self.lanes).map(|to| tokens(&overlap(&own, &owned(to)))).collect();
        let receive = come.iter().map(|runs| tokens(runs)).collect();
        (RowCounts { send, receive }, come.into_iter().flatten().flatten().collect())
    }
}

/// Number of tokens in some runs.
fn tokens(runs: &[Range<u64>]) -> usize {
    runs.iter().map(|run| (run.end - run.start) as usize).sum()
}

/// The tokens that two lists of runs have in common. Both lists ascend.
fn overlap(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut i, mut j, mut common) = (0, 0, Vec::new());
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let both = x.start.max(y.start)..x.end.min(y.end);
        if !both.is_empty() {
            common.push(both);
        }
        if x.end <= y.end { i += 1 } else { j += 1 }
    }
    common
}

impl Migration {
    /// Computes the exchange tables for the migration of sequence `held[h][i]` of every host h to host `to[h][i]`, and
    /// sends the sequences' metadata to their destinations. Collective over the hosts' group.
    ///
    /// # Errors
    /// Any error of the hosts' communicator.
    pub fn new(stream: &Stream, hosts: Hosts, held: &HeldSequences, to: &[Vec<usize>]) -> Result<Migration, Error> {
        let (rows, tensor) = (stream.rows(), stream.group());
        let lanes = if stream.is_split() { tensor.size() } else { 1 };
        let table = Table { seq: rows.seq, held, to, lanes };
        let (own, lane) = (hosts.own, tensor.rank());
        let leaving = table.leaving(own, lane);
        let to_host: Vec<usize> =
            leaving.iter().flat_map(|(run, to)| std::iter::repeat_n(*to, (run.end - run.start) as usize)).collect();
        let mut sent = vec![0; hosts.ranks.len()];
        to_host.iter().for_each(|&host| sent[host] += 1);
        let arriving = table.arriving(own, lane);
        let received: Vec<usize> = arriving.iter().map(|runs| tokens(runs)).collect();
        let counts = RowCounts { send: hosts.by_rank(&sent), receive: hosts.by_rank(&received) };
        let shares = stream.is_split().then(|| {
            let (counts, come) = table.redistributed(own, lane);
            (counts, Indices::sorting(&come))
        });
        let (send, settled) = (Indices::sorting(&to_host), table.settled(own));
        let arrived: Vec<u64> = arriving.into_iter().flatten().flatten().collect();
        let new_rows = hand_over(rows, &hosts, held, to, &settled)?;
        let destinations = to_host.iter().map(|&host| hosts.ranks[host] as u32).collect();
        let (sorted, stream, to) = (Indices::sorting(&arrived), stream.with_rows(new_rows), to.to_vec());
        Ok(Migration { send, counts, sorted, shares, destinations, to, stream, hosts })
    }

    /// The same migration for another stream (the encoder's output), whose i-th sequence belongs to the i-th sequence
    /// of this one. Collective over the hosts' group.
    ///
    /// # Errors
    /// Any error of the hosts' communicator.
    pub fn of_text(&self, stream: &Stream) -> Result<Migration, Error> {
        Migration::new(stream, self.hosts.clone(), &self.hosts.held(stream.rows())?, &self.to)
    }

    /// The migration that returns every sequence to the host that loaded it from the data set. Collective over the
    /// hosts' group.
    ///
    /// # Errors
    /// Any error of the hosts' communicator.
    pub fn home(stream: &Stream, hosts: Hosts) -> Result<Migration, Error> {
        let rows = stream.rows();
        let origins = hosts.gather(rows.origins.iter().map(|&origin| u64::from(origin)).collect())?;
        let to: Vec<Vec<usize>> =
            origins.into_iter().map(|of_host| of_host.into_iter().map(|origin| origin as usize).collect()).collect();
        let held = hosts.held(rows)?;
        Migration::new(stream, hosts, &held, &to)
    }

    /// The stream on this rank after the migration.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// For each token that this rank had before the migration, the rank of the hosts' group to which
    /// [`Migration::carry`] sends it.
    pub fn destinations(&self) -> &[u32] {
        &self.destinations
    }

    /// The numbers of tokens that `carry` sends to and receives from each rank of the hosts' group.
    pub fn counts(&self) -> &RowCounts {
        &self.counts
    }

    /// The permutation that `carry` applies: this rank's tokens sorted by destination host.
    pub fn order(&self) -> &Indices {
        &self.send
    }

    pub fn group(&self) -> &Arc<dyn Communicator> {
        &self.hosts.group
    }

    /// Sends the rows `x` `[T, D]` of this rank's tokens to the ranks with the same index in the destination tensor
    /// groups. The received rows are ordered by source host, and keep their order within one host.
    ///
    /// # Errors
    /// Any error of the hosts' communicator, in this call or later in backward.
    #[track_caller]
    pub fn carry(&self, x: &Var) -> Result<Var, Error> {
        all_to_all_rows(x.gather_rows(&self.send), &self.counts, &self.hosts.group)
    }

    /// Redistributes the rows returned by `carry` within the tensor group, and sorts them into the order of the new
    /// stream.
    ///
    /// # Errors
    /// Any error of the tensor group's communicator, in this call or later in backward.
    pub fn settle(&self, carried: Var) -> Result<Var, Error> {
        let sorted = carried.gather_rows(&self.sorted);
        let Some((counts, by_number)) = &self.shares else { return Ok(sorted) };
        Ok(all_to_all_rows(sorted, counts, self.stream.group())?.gather_rows(by_number))
    }

    /// Moves the rows of this rank's tokens to their position in the new stream: `carry`, then `settle`.
    ///
    /// # Errors
    /// As [`Migration::carry`] and [`Migration::settle`].
    #[track_caller]
    pub fn apply(&self, x: &Var) -> Result<Var, Error> {
        self.settle(self.carry(x)?)
    }
}

/// Exchanges the metadata of the sequences; returns the row table of this host's sequences after the migration.
/// Collective over the hosts' group.
fn hand_over(
    rows: &Rows,
    hosts: &Hosts,
    held: &HeldSequences,
    to: &[Vec<usize>],
    settled: &[u64],
) -> Result<Rows, Error> {
    let (own, words) = (hosts.own, rows.words_per_sequence());
    let mut places: Vec<usize> = (0..held[own].len()).collect();
    places.sort_by_key(|&place| to[own][place]);
    let send: Vec<u32> = places.iter().flat_map(|&place| rows.words_of(place)).collect();
    let moving = |from: usize, host: usize| to[from].iter().filter(|to| **to == host).count() * words;
    let of_hosts = |count: &dyn Fn(usize) -> usize| (0..hosts.ranks.len()).map(count).collect::<Vec<_>>();
    let sent = hosts.by_rank(&of_hosts(&|host| moving(own, host)));
    let receive = hosts.by_rank(&of_hosts(&|host| moving(host, own)));
    let buffer = vec![0u32; receive.iter().sum()];
    let words_come = hosts.group.all_to_all(send, sent, buffer, receive)?.recv.into_u32();
    let mut sequences: Vec<&[u32]> = words_come.chunks_exact(words).collect();
    sequences.sort_by_key(|words| Rows::first_of(words));
    let rows = rows.of_words(&sequences);
    assert_eq!(rows.sequences, settled, "the sequences that come here");
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two hosts with two lanes each; sequences have 4 tokens. Host 0 has sequences 0 and 8, host 1 has sequence 4.
    /// Sequence 0 migrates to host 1, sequence 4 to host 0; sequence 8 stays.
    #[test]
    fn tokens_arrive_where_their_share_belongs() {
        let (held, to) = (vec![vec![0, 8], vec![4]], vec![vec![1, 0], vec![0]]);
        let table = Table { seq: 4, held: &held, to: &to, lanes: 2 };
        assert_eq!(table.leaving(0, 1), [(8..12, 0)]);
        assert_eq!(table.leaving(1, 0), [(4..6, 0)]);
        // Lane 0 of host 0 sends sequence 0 away. In the first step it receives only the first half of sequence 4.
        let bounds = |lane: usize| {
            let of_host = |runs: &Vec<Range<u64>>| runs.iter().map(|run| [run.start, run.end]).collect::<Vec<_>>();
            table.arriving(0, lane).iter().map(of_host).collect::<Vec<_>>()
        };
        assert_eq!(bounds(0), [vec![], vec![[4, 6]]]);
        assert_eq!(bounds(1), [vec![[8, 12]], vec![[6, 8]]]);
        assert_eq!((table.settled(0), table.settled(1)), (vec![4, 8], vec![0]));
        // Afterwards lane 0 of host 0 has sequence 4: lane 1 gives it the second half.
        let counts =
            |send: [usize; 2], receive: [usize; 2]| RowCounts { send: send.to_vec(), receive: receive.to_vec() };
        assert_eq!(table.redistributed(0, 0), (counts([2, 0], [2, 2]), vec![4, 5, 6, 7]));
        assert_eq!(table.redistributed(0, 1), (counts([2, 4], [0, 4]), vec![8, 9, 10, 11]));
    }

    /// Three lanes share ten tokens of two sequences: lane 1 has the end of the first and the beginning of the second.
    #[test]
    fn shares_cut_sequences() {
        let (held, to) = (vec![vec![10, 40]], vec![vec![0, 0]]);
        let table = Table { seq: 5, held: &held, to: &to, lanes: 3 };
        let share = |lane| table.leaving(0, lane).into_iter().map(|(tokens, _)| tokens).collect::<Vec<_>>();
        assert_eq!([share(0), share(1), share(2)].concat(), [10..13, 13..15, 40..41, 41..45]);
        assert_eq!(overlap(&[1..4, 6..9], &[0..2, 3..7, 8..8]), [1..2, 3..4, 6..7]);
    }
}
