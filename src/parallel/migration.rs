//! Sequences that change ranks: a whole tensor group hands them to another, and all that is known of their tokens goes
//! with them (Luffy, arXiv:2411.15419, 4.3; there a GPU is what a tensor group is here).
//!
//! Who sends what is integer arithmetic on a table that every rank has: the sequences of every host. Rows of tokens go in
//! two hops. [`Migration::carry`] moves them to the rank with the same place in the other tensor group. With a split stream
//! that need not be the one whose share they belong to, so [`Migration::settle`] deals them to the ranks of that group.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Error, Request};
use guildhall_tensor::{Indices, Var};

use super::collectives::{RowCounts, all_to_all_rows};
use super::{Rows, Stream};

/// Tensor groups that can hand each other sequences, as one of their ranks sees them.
#[derive(Clone)]
pub struct Hosts {
    /// Has this rank and those with its place in the other tensor groups, maybe more.
    pub group: Arc<dyn Communicator>,
    /// Of each host, the rank in the group; ascending.
    pub ranks: Vec<usize>,
    /// Which of them is this one.
    pub own: usize,
}

/// The sequences of hosts: the numbers of their first tokens, ascending, by host.
pub type HeldSequences = Vec<Vec<u64>>;

/// Sequences of a stream on their way to other hosts.
pub struct Migration {
    hosts: Hosts,
    /// This rank's tokens by where they go; they arrive by host, then as they were.
    send: Indices,
    counts: RowCounts,
    /// What has arrived, by number.
    sorted: Indices,
    /// With a split stream, rows to and from each rank of the tensor group, and what has come from them, by number.
    shares: Option<(RowCounts, Indices)>,
    /// Of each token that was here, the rank of the group to which it goes.
    destinations: Vec<u32>,
    /// By host and sequence, the host to which it goes.
    to: Vec<Vec<usize>>,
    /// The tokens that are here afterwards.
    stream: Stream,
}

/// All that decides who sends what.
struct Table<'a> {
    seq: usize,
    held: &'a HeldSequences,
    /// The host to which each sequence goes.
    to: &'a [Vec<usize>],
    /// Ranks of a tensor group among which tokens are split; 1 where each has all.
    lanes: usize,
}

impl Hosts {
    /// The sequences that each has. Collective over the group.
    ///
    /// # Errors
    /// What the group reports.
    pub fn held(&self, rows: &Rows) -> Result<HeldSequences, Error> {
        self.gather(&rows.sequences)
    }

    /// What each says, by host. Collective over the group.
    ///
    /// # Errors
    /// What the group reports.
    pub fn gather(&self, own: &[u64]) -> Result<Vec<Vec<u64>>, Error> {
        let counts = self.group.all_gather_u64(&[own.len() as u64])?;
        let counts: Vec<usize> = counts.into_iter().map(|n| n as usize).collect();
        let receive = vec![0u64; counts.iter().sum()];
        let request = Request::all_gather(own.to_vec(), receive, counts.clone());
        let all = self.group.start(request)?.wait()?.recv.into_u64();
        let of_rank = |&rank: &usize| {
            let first: usize = counts[..rank].iter().sum();
            all[first..first + counts[rank]].to_vec()
        };
        Ok(self.ranks.iter().map(of_rank).collect())
    }

    /// Counts by rank of the group of what is counted by host.
    fn by_rank(&self, by_host: &[usize]) -> Vec<usize> {
        let mut by_rank = vec![0; self.group.size()];
        self.ranks.iter().zip(by_host).for_each(|(&rank, &count)| by_rank[rank] = count);
        by_rank
    }
}

impl Table<'_> {
    /// The tokens of lane `lane` of a host that has so many.
    fn share(&self, tokens: usize, lane: usize) -> Range<usize> {
        let lane = if self.lanes == 1 { 0 } else { lane };
        tokens * lane / self.lanes..tokens * (lane + 1) / self.lanes
    }

    /// Of lane `lane` of host `host`, the number of every token and the host to which it goes.
    fn tokens(&self, host: usize, lane: usize) -> Vec<(u64, usize)> {
        let all = self.held[host].len() * self.seq;
        let token = |place: usize| {
            let (sequence, within) = (place / self.seq, place % self.seq);
            (self.held[host][sequence] + within as u64, self.to[host][sequence])
        };
        self.share(all, lane).map(token).collect()
    }

    /// The numbers of the tokens that come to lane `lane` of host `host`, by host that they come from.
    fn arriving(&self, host: usize, lane: usize) -> Vec<Vec<u64>> {
        let from = |other: usize| {
            self.tokens(other, lane).into_iter().filter(|(_, to)| *to == host).map(|(number, _)| number).collect()
        };
        (0..self.held.len()).map(from).collect()
    }

    /// The sequences that a host has afterwards.
    fn settled(&self, host: usize) -> Vec<u64> {
        let all = self.held.iter().flatten().zip(self.to.iter().flatten());
        let mut settled: Vec<u64> = all.filter(|(_, to)| **to == host).map(|(first, _)| *first).collect();
        settled.sort_unstable();
        settled
    }

    /// The lanes of a host to which tokens with these numbers belong afterwards; the numbers ascend.
    fn lanes_of(&self, numbers: &[u64], settled: &[u64]) -> Vec<usize> {
        let ends: Vec<usize> = (0..self.lanes).map(|lane| self.share(settled.len() * self.seq, lane).end).collect();
        let lane = |&number: &u64| {
            let sequence = settled.partition_point(|&first| first <= number) - 1;
            let place = sequence * self.seq + (number - settled[sequence]) as usize;
            ends.partition_point(|&end| end <= place)
        };
        numbers.iter().map(lane).collect()
    }
}

impl Migration {
    /// Sends what is known of the stream's sequences to where they go: sequence i of host h, as `held` lists them, to host
    /// `to[h][i]`. Collective over the hosts' group.
    ///
    /// # Errors
    /// What the group reports.
    pub fn new(stream: &Stream, hosts: Hosts, held: &HeldSequences, to: &[Vec<usize>]) -> Result<Migration, Error> {
        let (rows, tensor) = (stream.rows(), stream.group());
        let lanes = if stream.is_split() { tensor.size() } else { 1 };
        let table = Table { seq: rows.seq, held, to, lanes };
        let (own, lane) = (hosts.own, tensor.rank());
        let leaving: Vec<usize> = table.tokens(own, lane).into_iter().map(|(_, to)| to).collect();
        let send = by_key(&leaving);
        let sent = |host: usize| leaving.iter().filter(|to| **to == host).count();
        let arriving = table.arriving(own, lane);
        let counts = RowCounts {
            send: hosts.by_rank(&(0..hosts.ranks.len()).map(sent).collect::<Vec<_>>()),
            receive: hosts.by_rank(&arriving.iter().map(Vec::len).collect::<Vec<_>>()),
        };
        let settled = table.settled(own);
        let arrived = arriving.concat();
        let shares = stream.is_split().then(|| {
            let sorted = |lane: usize| {
                let mut numbers = table.arriving(own, lane).concat();
                numbers.sort_unstable();
                let lanes_of = table.lanes_of(&numbers, &settled);
                (numbers, lanes_of)
            };
            let of_lanes: Vec<_> = (0..lanes).map(sorted).collect();
            let count = |(_, of): &(Vec<u64>, Vec<usize>), lane: usize| of.iter().filter(|to| **to == lane).count();
            let send = (0..lanes).map(|to| count(&of_lanes[lane], to)).collect();
            let receive = of_lanes.iter().map(|from| count(from, lane)).collect();
            let come = of_lanes.iter().flat_map(|(numbers, of)| numbers.iter().zip(of).filter(|(_, to)| **to == lane));
            let come: Vec<u64> = come.map(|(number, _)| *number).collect();
            (RowCounts { send, receive }, by_key(&come))
        });
        let new_rows = hand_over(rows, &hosts, held, to, &settled)?;
        let destinations = leaving.iter().map(|&host| hosts.ranks[host] as u32).collect();
        let (sorted, stream, to) = (by_key(&arrived), stream.with_rows(new_rows), to.to_vec());
        Ok(Migration { send, counts, sorted, shares, destinations, to, stream, hosts })
    }

    /// The same way for another text, of which sequence i belongs to sequence i here. Collective over the hosts' group.
    ///
    /// # Errors
    /// What the group reports.
    pub fn of_text(&self, stream: &Stream) -> Result<Migration, Error> {
        Migration::new(stream, self.hosts.clone(), &self.hosts.held(stream.rows())?, &self.to)
    }

    /// The way of all sequences to the hosts that have read them. Collective over the hosts' group.
    ///
    /// # Errors
    /// What the group reports.
    pub fn home(stream: &Stream, hosts: Hosts) -> Result<Migration, Error> {
        let rows = stream.rows();
        let origins = hosts.gather(&rows.origins.iter().map(|&origin| u64::from(origin)).collect::<Vec<_>>())?;
        let to: Vec<Vec<usize>> =
            origins.into_iter().map(|of_host| of_host.into_iter().map(|origin| origin as usize).collect()).collect();
        let held = hosts.held(rows)?;
        Migration::new(stream, hosts, &held, &to)
    }

    /// The tokens that are here afterwards.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Of each token that was here, the rank of the hosts' group to which it is carried.
    pub fn destinations(&self) -> &[u32] {
        &self.destinations
    }

    /// Rows of tokens to and from each rank of the hosts' group.
    pub fn counts(&self) -> &RowCounts {
        &self.counts
    }

    /// The tokens that were here, in the order in which they are carried.
    pub fn order(&self) -> &Indices {
        &self.send
    }

    pub fn group(&self) -> &Arc<dyn Communicator> {
        &self.hosts.group
    }

    /// Rows of the tokens that were here, `[T, D]`, at the ranks that have these tokens' place in the tensor groups to
    /// which they go: by host that they come from, then as they were.
    ///
    /// # Errors
    /// What the hosts' group reports, here and from the tape.
    pub fn carry(&self, x: &Var) -> Result<Var, Error> {
        all_to_all_rows(x.gather_rows(&self.send), &self.counts, &self.hosts.group)
    }

    /// Rows that have been carried, as the stream has them afterwards.
    ///
    /// # Errors
    /// What the tensor group reports, here and from the tape.
    pub fn settle(&self, carried: Var) -> Result<Var, Error> {
        let sorted = carried.gather_rows(&self.sorted);
        let Some((counts, by_number)) = &self.shares else { return Ok(sorted) };
        Ok(all_to_all_rows(sorted, counts, self.stream.group())?.gather_rows(by_number))
    }

    /// Rows of the tokens that were here, as the stream has them afterwards.
    ///
    /// # Errors
    /// As [`Migration::carry`] and [`Migration::settle`].
    pub fn apply(&self, x: &Var) -> Result<Var, Error> {
        self.settle(self.carry(x)?)
    }
}

/// The places of keys in ascending order; equal ones as they are.
fn by_key<K: Ord>(keys: &[K]) -> Indices {
    let mut order: Vec<u32> = (0..keys.len() as u32).collect();
    order.sort_by_key(|&place| &keys[place as usize]);
    Indices::Known(order)
}

/// The row table of the sequences that come here. Collective over the hosts' group.
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
    let request = Request::all_to_all(send, sent, buffer, receive);
    let words_come = hosts.group.start(request)?.wait()?.recv.into_u32();
    let mut sequences: Vec<&[u32]> = words_come.chunks_exact(words).collect();
    sequences.sort_by_key(|words| Rows::first_of(words));
    let rows = rows.of_words(&sequences);
    assert_eq!(rows.sequences, settled, "the sequences that come here");
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two hosts of two lanes: 0 has sequences 0 and 8, of 4 tokens, and 1 has 4; sequence 0 goes to 1, 4 to 0.
    #[test]
    fn tokens_arrive_where_their_share_belongs() {
        let (held, to) = (vec![vec![0, 8], vec![4]], vec![vec![1, 0], vec![0]]);
        let table = Table { seq: 4, held: &held, to: &to, lanes: 2 };
        assert_eq!(table.tokens(0, 1), [(8, 0), (9, 0), (10, 0), (11, 0)]);
        assert_eq!(table.tokens(1, 0), [(4, 0), (5, 0)]);
        // Lane 0 of host 0 had sequence 0; what it has of what comes is the first half of sequence 4.
        assert_eq!(
            (table.arriving(0, 0), table.arriving(0, 1)),
            (vec![vec![], vec![4, 5]], vec![vec![8, 9, 10, 11], vec![6, 7]])
        );
        assert_eq!((table.settled(0), table.settled(1)), (vec![4, 8], vec![0]));
        assert_eq!(table.lanes_of(&[6, 7, 8, 9, 10, 11], &[4, 8]), [0, 0, 1, 1, 1, 1]);
    }
}
