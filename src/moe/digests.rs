//! What ranks that share a routing group tell each other of their tokens: the least that the decision needs.

use std::sync::Arc;

use guildhall_comm::{Communicator, ElementKind, Error, Payload, Request};
use guildhall_tensor::{Cause, Device, Held};

use super::capacity::Claims;
use super::homes::{Homes, RoutingGroup, TokenRun};
use super::routing::OwnTokens;
use crate::parallel::Flight;

/// What a rank learns of tokens that lie on others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digest {
    /// How many routes of each slot ask for each expert: enough where places go by position.
    Counts,
    /// Which experts each token asks for. Keys that are drawn follow from them.
    Choices,
    /// With the logit of each.
    Keys,
    /// All scores, and what the tokens ask for if they can say so by themselves.
    Scores,
}

/// A digest of some routes and experts; `claims` where scores come with choices.
#[derive(Clone, Copy, Debug)]
pub struct DigestFormat {
    pub digest: Digest,
    pub slots: usize,
    pub experts: usize,
    pub claims: bool,
}

impl DigestFormat {
    /// Words of a token; counts are of a run.
    fn of_token(&self) -> usize {
        match self.digest {
            Digest::Counts => 0,
            Digest::Choices => self.slots,
            Digest::Keys => 2 * self.slots,
            Digest::Scores => self.experts + if self.claims { 2 * self.slots } else { 0 },
        }
    }

    fn of_run(&self, run: &TokenRun) -> usize {
        match self.digest {
            Digest::Counts => self.slots * self.experts,
            _ => run.len() * self.of_token(),
        }
    }

    /// Bytes of all digests of a group.
    pub fn bytes_of(&self, group: &RoutingGroup) -> u64 {
        group.runs.iter().map(|run| self.of_run(run) as u64 * 4).sum()
    }

    /// The digest of some tokens, array after array.
    pub fn encode(&self, logits: &[f32], claims: &Claims) -> Vec<u32> {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        match self.digest {
            Digest::Counts => claims.counts(self.experts),
            Digest::Choices => claims.kept.clone(),
            Digest::Keys => [&claims.kept[..], &bits(&claims.keys)].concat(),
            Digest::Scores => [&bits(logits)[..], &claims.chosen, &claims.kept].concat(),
        }
    }

    /// Adds what `words` say of some tokens: their logits, and what they claim.
    pub fn decode(&self, words: &[u32], logits: &mut Vec<f32>, claims: &mut Claims) {
        let floats = |words: &[u32]| words.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>();
        let routes = words.len() / self.of_token().max(1) * self.slots;
        match self.digest {
            Digest::Counts => panic!("counts are of no single token"),
            Digest::Choices | Digest::Keys => {
                let (kept, keys) = words.split_at(routes);
                claims.chosen.extend(kept);
                claims.kept.extend(kept);
                claims.keys.extend(floats(keys));
            }
            Digest::Scores => {
                let routes = if self.claims { routes } else { 0 };
                let (scores, both) = words.split_at(words.len() - 2 * routes);
                let (chosen, kept) = both.split_at(routes);
                logits.extend(floats(scores));
                claims.chosen.extend(chosen);
                claims.kept.extend(kept);
            }
        }
    }
}

/// The exchange of digests between the ranks of shared routing groups, before it happens.
#[derive(Clone, Debug)]
pub struct Digests {
    format: DigestFormat,
    rank: usize,
    /// Shared groups that this rank has a part in.
    groups: Vec<RoutingGroup>,
    /// Words to and from each rank.
    pub send: Vec<usize>,
    pub receive: Vec<usize>,
}

impl Digests {
    /// Of rank `rank` of `ranks`, with routing groups of `size` tokens.
    pub fn new(format: DigestFormat, homes: &Homes, size: Option<usize>, rank: usize, ranks: usize) -> Digests {
        let groups: Vec<RoutingGroup> = homes.groups_of(rank, size).filter(RoutingGroup::is_shared).collect();
        let (mut send, mut receive) = (vec![0; ranks], vec![0; ranks]);
        for group in &groups {
            let own: usize = group.on(rank).map(|run| format.of_run(run)).sum();
            let mut peers: Vec<usize> = group.runs.iter().map(|run| run.rank).filter(|&peer| peer != rank).collect();
            peers.sort_unstable();
            peers.dedup();
            peers.into_iter().for_each(|peer| send[peer] += own);
            group.runs.iter().filter(|run| run.rank != rank).for_each(|run| receive[run.rank] += format.of_run(run));
        }
        Digests { format, rank, groups, send, receive }
    }

    /// Bytes of the digests of the largest group.
    fn largest_group(&self) -> u64 {
        self.groups.iter().map(|group| self.format.bytes_of(group)).max().unwrap_or(0)
    }

    /// The exchange of digests of which nothing is known. Collective.
    ///
    /// # Errors
    /// What the ranks' group reports.
    pub fn rehearse(self, ranks: &Arc<dyn Communicator>, device: &Arc<Device>) -> Result<(), Error> {
        let [send, receive]: [usize; 2] = [&self.send, &self.receive].map(|words| words.iter().sum());
        let (send, receive) = (Payload::Opaque(ElementKind::U32, send), Payload::Opaque(ElementKind::U32, receive));
        let _held = self.exchange((send, receive), ranks, device)?;
        let _group = device.hold(Cause::Communication, self.largest_group());
        Ok(())
    }

    /// Sends words, and returns what came for them, counted as this rank's until it is dropped. Collective.
    fn exchange(
        &self,
        (send, receive): (Payload, Payload),
        ranks: &Arc<dyn Communicator>,
        device: &Arc<Device>,
    ) -> Result<(Payload, Held), Error> {
        let held = device.hold(Cause::Communication, receive.bytes() as u64);
        let request = Request::all_to_all(send, self.send.clone(), receive, self.receive.clone());
        Ok((Flight::start(ranks, device, Cause::Communication, request)?.wait()?.recv, held))
    }

    /// Tells the others of this rank's tokens, and learns of theirs. Collective.
    ///
    /// # Errors
    /// What the ranks' group reports.
    pub fn gather(
        self,
        own: &OwnTokens,
        ranks: &Arc<dyn Communicator>,
        device: &Arc<Device>,
    ) -> Result<Gathered, Error> {
        let digest = |run: &TokenRun| own.digest(&run.ids, &self.format);
        let own: Vec<Vec<u32>> =
            self.groups.iter().map(|group| group.on(self.rank).flat_map(digest).collect()).collect();
        let to = |peer: usize| {
            let with = self.groups.iter().zip(&own).filter(move |(group, _)| group.tokens_on(peer) > 0);
            with.flat_map(|(_, words)| words)
        };
        let send: Vec<u32> = (0..self.send.len()).filter(|&peer| peer != self.rank).flat_map(to).copied().collect();
        let received = vec![0u32; self.receive.iter().sum()];
        let (words, held) = self.exchange((send.into(), received.into()), ranks, device)?;
        let words = words.into_u32();
        let starts = self.receive.iter().scan(0, |start, count| Some(std::mem::replace(start, *start + count)));
        Ok(Gathered { next: starts.collect(), words, format: self.format, _held: held })
    }
}

/// What other ranks have told, read group by group in order.
pub struct Gathered {
    words: Vec<u32>,
    /// Where the next words of each rank begin.
    next: Vec<usize>,
    format: DigestFormat,
    _held: Held,
}

impl Gathered {
    pub fn format(&self) -> &DigestFormat {
        &self.format
    }

    /// The digest of the next run of another rank.
    pub fn of(&mut self, run: &TokenRun) -> &[u32] {
        let start = self.next[run.rank];
        self.next[run.rank] += self.format.of_run(run);
        &self.words[start..self.next[run.rank]]
    }
}
