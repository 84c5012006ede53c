//! Routings: who goes where, decided by each token or among the tokens of a routing group.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::Communicator;
use guildhall_tensor::{Cause, Device, Indices};
use serde::{Deserialize, Serialize};

use super::capacity::Claims;
use super::digests::{Digest, DigestFormat, Digests, Gathered};
use super::gates::{Gate, Scope, Tokens};
use super::homes::{Homes, RoutingGroup};
use super::{Capacity, Error, Overflow};

/// Who goes where: route `t * k + j` is token t's j-th choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Routing {
    /// The expert of every route, or [`Routing::DROPPED`].
    pub expert: Vec<u32>,
    /// What the gate said, before anything was moved or dropped: what loads count.
    pub chosen: Vec<u32>,
    /// Choices per token.
    pub k: usize,
    /// Experts there are.
    pub experts: usize,
    /// What is known where nobody knows the routes.
    pub counted: Option<CountedRoutes>,
}

/// Numbers of routes, which is what a step on sizes goes by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountedRoutes {
    pub tokens: usize,
    /// Routes to each expert.
    pub rows: Vec<usize>,
}

impl CountedRoutes {
    /// As many as some of the tokens have on average.
    fn of_tokens(&self, tokens: Range<usize>) -> CountedRoutes {
        let until = |rows: usize, token: usize| rows * token / self.tokens.max(1);
        let part = |&rows: &usize| until(rows, tokens.end) - until(rows, tokens.start);
        CountedRoutes { rows: self.rows.iter().map(part).collect(), tokens: tokens.len() }
    }
}

impl Routing {
    /// A route that is not sent.
    pub const DROPPED: u32 = u32::MAX;

    /// A routing that drops nothing but what was not chosen.
    pub fn new(chosen: Vec<u32>, k: usize, experts: usize) -> Routing {
        Routing { expert: chosen.clone(), chosen, k, experts, counted: None }
    }

    /// One of which only numbers are known.
    pub fn counted(routes: CountedRoutes, k: usize) -> Routing {
        let experts = routes.rows.len();
        Routing { counted: Some(routes), ..Routing::new(Vec::new(), k, experts) }
    }

    /// All of several, one behind the other.
    ///
    /// # Panics
    /// Of none.
    pub fn join(parts: Vec<Routing>) -> Routing {
        let join = |mut all: Routing, part: Routing| {
            all.expert.extend(part.expert);
            all.chosen.extend(part.chosen);
            all
        };
        parts.into_iter().reduce(join).expect("a part")
    }

    /// That of some of the tokens.
    pub fn of_tokens(&self, tokens: Range<usize>) -> Routing {
        if let Some(counted) = &self.counted {
            return Routing::counted(counted.of_tokens(tokens), self.k);
        }
        let part = |routes: &[u32]| routes[tokens.start * self.k..tokens.end * self.k].to_vec();
        Routing { expert: part(&self.expert), chosen: part(&self.chosen), counted: None, ..*self }
    }

    /// What every route chose.
    pub fn choices(&self) -> Indices {
        let known = || Indices::Known(self.chosen.clone());
        self.counted.as_ref().map_or_else(known, |counted| Indices::Counted(counted.tokens * self.k))
    }

    /// Where every route goes, or for one that is dropped would have gone: what weights are computed from.
    pub fn weighed(&self) -> Indices {
        if let Some(counted) = &self.counted {
            return Indices::Counted(counted.tokens * self.k);
        }
        let routes = self.expert.iter().zip(&self.chosen);
        Indices::Known(routes.map(|(&sent, &chosen)| if sent == Routing::DROPPED { chosen } else { sent }).collect())
    }

    /// Routes that chose each expert, wherever they went.
    pub fn load(&self) -> Vec<u64> {
        if let Some(counted) = &self.counted {
            return counted.rows.iter().map(|&rows| rows as u64).collect();
        }
        let mut load = vec![0; self.experts];
        for &expert in self.chosen.iter().filter(|&&expert| expert != Routing::DROPPED) {
            load[expert as usize] += 1;
        }
        load
    }

    /// Routes that are sent to each expert.
    pub fn rows(&self) -> Vec<usize> {
        if let Some(counted) = &self.counted {
            return counted.rows.clone();
        }
        let mut rows = vec![0; self.experts];
        for &expert in self.expert.iter().filter(|&&expert| expert != Routing::DROPPED) {
            rows[expert as usize] += 1;
        }
        rows
    }

    /// Tokens that were routed.
    pub fn tokens(&self) -> usize {
        self.counted.as_ref().map_or(self.expert.len() / self.k.max(1), |counted| counted.tokens)
    }
}

/// A gate and what limits it: all that decides a routing besides the scores.
#[derive(Clone, Debug)]
pub struct Selector {
    pub gate: Arc<dyn Gate>,
    /// Nothing is dropped without one.
    pub capacity: Option<Capacity>,
    /// Tokens of a routing group; without it, those of the global micro-batch.
    pub group_tokens: Option<usize>,
}

/// The ranks that share a micro-batch.
#[derive(Clone, Copy)]
pub struct Peers<'a> {
    pub group: &'a Arc<dyn Communicator>,
    /// Which tokens each of them has; not asked for where tokens do not compete.
    pub homes: &'a Homes,
    /// Counts what travels between them.
    pub device: &'a Arc<Device>,
}

impl Selector {
    /// The same without a limit on what experts take.
    pub fn unlimited(&self) -> Selector {
        Selector { capacity: None, ..self.clone() }
    }

    /// Whether who is in a micro-batch with a token may change where it goes; rows are of `seq` tokens.
    pub fn asks_the_micro_batch(&self, seq: usize) -> bool {
        // Groups that end with rows are the same in all micro-batches.
        self.group_tokens.is_none_or(|tokens| !seq.is_multiple_of(tokens)) && self.competes()
    }

    /// Whether all that it reads of the logits is where each token's largest are: places may be given out by position or by
    /// draws.
    pub fn goes_by_largest(&self) -> bool {
        let is_told_without_logits = matches!(self.digest(), Digest::Counts | Digest::Choices);
        self.gate.goes_by_largest() && self.gate.scope() == Scope::Token && is_told_without_logits
    }

    /// Whether the tokens of a routing group compete for anything.
    pub fn competes(&self) -> bool {
        self.capacity.is_some() || self.gate.scope() != Scope::Token
    }

    /// The least that decides about a group which other ranks have a part in.
    fn digest(&self) -> Digest {
        match (self.gate.scope(), self.capacity.map(|capacity| capacity.overflow)) {
            (Scope::Scores, _) | (_, Some(Overflow::Reroute | Overflow::Node)) => Digest::Scores,
            // What a gate has moved has a logit that its choices do not tell.
            (Scope::Choices, Some(Overflow::Probability)) => Digest::Scores,
            (Scope::Choices, _) | (_, Some(Overflow::Random)) => Digest::Choices,
            (Scope::Token, Some(Overflow::Probability)) => Digest::Keys,
            (Scope::Token, Some(Overflow::Position) | None) => Digest::Counts,
        }
    }

    /// Whether tokens choose before they know of each other.
    fn proposes(&self) -> bool {
        match self.gate.scope() {
            Scope::Token => true,
            Scope::Choices => self.digest() != Digest::Scores,
            Scope::Scores => false,
        }
    }

    /// The exchange with the ranks that share routing groups with this one; none if no group lies on several ranks, about
    /// which all ranks agree.
    fn exchange(&self, peers: &Peers, experts: usize) -> Option<Digests> {
        let claims = self.gate.scope() == Scope::Token;
        let format = DigestFormat { digest: self.digest(), slots: self.gate.slots(), experts, claims };
        let shared = self.competes() && peers.homes.shares_groups(self.group_tokens);
        let (rank, ranks) = (peers.group.rank(), peers.group.size());
        shared.then(|| Digests::new(format, peers.homes, self.group_tokens, rank, ranks))
    }

    /// The routing of this rank's tokens, which are runs of consecutive ones, ascending. Collective over the peers if a
    /// routing group lies on several of them.
    ///
    /// # Errors
    /// What the peers' group reports; a gate that gives no routing.
    pub fn route(&self, runs: &[Tokens], peers: &Peers) -> Result<Routing, Error> {
        self.check_padding(&runs[0])?;
        let (slots, experts) = (self.gate.slots(), runs[0].experts);
        let propose = |tokens| if self.proposes() { self.propose(tokens) } else { Ok(Claims::default()) };
        let claims = runs.iter().map(propose).collect::<Result<Vec<_>, _>>()?;
        if !self.competes() {
            let Claims { chosen, kept, .. } = Claims::join(claims.into_iter());
            return Ok(Routing { expert: kept, ..Routing::new(chosen, slots, experts) });
        }
        let (own, rank) = (OwnTokens { runs, claims: &claims }, peers.group.rank());
        let digests = self.exchange(peers, experts);
        let mut told = digests.map(|digests| digests.gather(&own, peers.group, peers.device)).transpose()?;
        let mut routing = Routing::new(Vec::new(), slots, experts);
        for group in peers.homes.groups_of(rank, self.group_tokens) {
            let settled = match told.as_mut().filter(|_| group.is_shared()) {
                Some(told) => self.settle_shared(&own, &group, rank, told, peers.device)?,
                None => {
                    let (tokens, claims) = own.of(&group.numbers_on(rank));
                    self.settle(&tokens, claims)?
                }
            };
            routing.chosen.extend(settled.chosen);
            routing.expert.extend(settled.kept);
        }
        Ok(routing)
    }

    /// What [`Selector::route`] costs besides arithmetic: the exchange with the peers, of tokens of which nothing is known.
    ///
    /// # Errors
    /// What the peers' group reports.
    pub fn rehearse(&self, experts: usize, peers: &Peers) -> Result<(), Error> {
        let Some(digests) = self.exchange(peers, experts) else { return Ok(()) };
        Ok(digests.rehearse(peers.group, peers.device)?)
    }

    /// What tokens claim by themselves.
    fn propose(&self, tokens: &Tokens) -> Result<Claims, Error> {
        let chosen = self.gate.choose(tokens);
        self.check(&chosen, tokens, tokens.len())?;
        let mut claims = Claims { slots: self.gate.slots(), kept: chosen.clone(), chosen, keys: Vec::new() };
        let thins = self.gate.scope() != Scope::Choices;
        if thins {
            self.gate.thin(&mut claims.kept, tokens);
        }
        if !tokens.padding.is_empty() {
            claims.leave_out(|t| !tokens.is_present(t));
        }
        if thins {
            self.read_keys(&mut claims, tokens);
        }
        Ok(claims)
    }

    /// A user may have written the gate.
    fn check(&self, chosen: &[u32], tokens: &Tokens, count: usize) -> Result<(), Error> {
        let problem = problem(chosen, count, tokens.experts, self.gate.slots());
        let wrong = |problem| Error::Gate { layer: tokens.draws.layer, gate: format!("{:?}", self.gate), problem };
        problem.map_or(Ok(()), |problem| Err(wrong(problem)))
    }

    /// A gate that compares tokens would count padding among them.
    fn check_padding(&self, tokens: &Tokens) -> Result<(), Error> {
        if tokens.padding.is_empty() || self.gate.skips_padding() {
            return Ok(());
        }
        Err(Error::Padding { layer: tokens.draws.layer, gate: format!("{:?}", self.gate) })
    }

    /// Of routes that are kept, the logits, where places go by them.
    fn read_keys(&self, claims: &mut Claims, tokens: &Tokens) {
        if self.capacity.is_none_or(|capacity| capacity.overflow != Overflow::Probability) {
            return;
        }
        let key = |(route, &expert): (usize, &u32)| match expert {
            Routing::DROPPED => f32::NEG_INFINITY,
            expert => tokens.row(route / claims.slots)[expert as usize],
        };
        claims.keys = claims.kept.iter().enumerate().map(key).collect();
    }

    /// What becomes of a whole routing group, of which all is known that the digest tells.
    fn settle(&self, group: &Tokens, claims: Claims) -> Result<Claims, Error> {
        let mut claims = if self.proposes() { claims } else { self.propose(group)? };
        if self.gate.scope() == Scope::Choices {
            self.gate.arrange(&mut claims.chosen, group);
            self.check(&claims.chosen, group, claims.tokens())?;
            claims.kept.clone_from(&claims.chosen);
            self.read_keys(&mut claims, group);
        }
        if let Some(capacity) = self.capacity {
            let present = group.present(group.first..group.first + claims.tokens() as u64);
            let factor = capacity.factor_at(group.draws.trains);
            capacity.limit(group, self.gate.capacity(factor, present, group.experts), &mut claims);
        }
        Ok(claims)
    }

    /// What becomes of this rank's tokens in a group of several ranks.
    fn settle_shared(
        &self,
        own: &OwnTokens,
        group: &RoutingGroup,
        rank: usize,
        told: &mut Gathered,
        device: &Arc<Device>,
    ) -> Result<Claims, Error> {
        let format = *told.format();
        let _held = device.hold(Cause::Communication, format.bytes_of(group));
        let mut digests = Vec::new();
        for run in &group.runs {
            digests.push(match run.rank == rank {
                true => own.digest(&run.ids, &format),
                false => told.of(run).to_vec(),
            });
        }
        let tokens = own.runs[0];
        if let (Digest::Counts, Some(capacity)) = (format.digest, self.capacity) {
            let factor = capacity.factor_at(tokens.draws.trains);
            let limit = self.gate.capacity(factor, tokens.present(group.numbers()), tokens.experts);
            let before = |place: usize| before(&digests, place, format.slots, format.experts);
            let runs = group.runs.iter().enumerate().filter(|(_, run)| run.rank == rank);
            return Ok(Claims::join(runs.map(|(place, run)| own.of(&run.ids).1.behind(before(place), limit))));
        }
        let (mut logits, mut claims) = (Vec::new(), Claims { slots: format.slots, ..Claims::default() });
        digests.iter().for_each(|words| format.decode(words, &mut logits, &mut claims));
        // Of others it is not known where their largest are, and need not be.
        let whole = Tokens { logits: &logits, largest: None, first: group.first(), ids: &[], ..tokens };
        let settled = self.settle(&whole, claims)?;
        let mut start = 0;
        let mine = group.runs.iter().filter_map(|run| {
            start += run.len();
            (run.rank == rank).then(|| settled.of_tokens(start - run.len()..start))
        });
        let mut mine = Claims::join(mine);
        if self.gate.scope() == Scope::Token {
            // A digest need not say what was given up.
            mine.chosen = group.on(rank).flat_map(|run| own.of(&run.ids).1.chosen).collect();
        }
        Ok(mine)
    }
}

/// This rank's tokens, by runs of consecutive ones, and what they claim by themselves.
pub struct OwnTokens<'a> {
    pub runs: &'a [Tokens<'a>],
    /// Of each run.
    pub claims: &'a [Claims],
}

impl<'a> OwnTokens<'a> {
    /// Some consecutive ones, as a part of a routing group.
    fn of(&self, numbers: &Range<u64>) -> (Tokens<'a>, Claims) {
        let holds = |run: &Tokens| run.numbers().start <= numbers.start && numbers.end <= run.numbers().end;
        let place = self.runs.iter().position(holds).expect("tokens of this rank");
        let (run, claims) = (&self.runs[place], &self.claims[place]);
        let here = (numbers.start - run.first) as usize..(numbers.end - run.first) as usize;
        // What does not propose has no claims yet.
        let claims = if claims.kept.is_empty() { claims.clone() } else { claims.of_tokens(here.clone()) };
        (run.part(here), claims)
    }

    /// The digest of some consecutive ones.
    pub(super) fn digest(&self, numbers: &Range<u64>, format: &DigestFormat) -> Vec<u32> {
        let (tokens, claims) = self.of(numbers);
        format.encode(tokens.logits, &claims)
    }
}

/// Routes by slot and expert that come before those of the same slot in run `place`: earlier slots of all runs, and the
/// same slot of earlier runs.
fn before(counts: &[Vec<u32>], place: usize, slots: usize, experts: usize) -> Vec<u32> {
    let mut before = vec![0; slots * experts];
    for expert in 0..experts {
        let mut earlier_slots = 0;
        for slot in (0..slots).map(|slot| slot * experts + expert) {
            let of = |runs: &[Vec<u32>]| runs.iter().map(|counts| counts[slot]).sum::<u32>();
            before[slot] = earlier_slots + of(&counts[..place]);
            earlier_slots += of(counts);
        }
    }
    before
}

fn problem(chosen: &[u32], tokens: usize, experts: usize, slots: usize) -> Option<String> {
    if chosen.len() != tokens * slots {
        return Some(format!("gave {} choices for {tokens} tokens of {slots} each", chosen.len()));
    }
    // The last token that chose each expert.
    let mut last = vec![usize::MAX; experts];
    for (t, routes) in chosen.chunks_exact(slots.max(1)).enumerate() {
        for &expert in routes.iter().filter(|&&expert| expert != Routing::DROPPED) {
            let what = match last.get_mut(expert as usize).map(|last| std::mem::replace(last, t)) {
                Some(before) if before != t => continue,
                Some(_) => "it has already",
                None => "does not exist",
            };
            return Some(format!("chose expert {expert} of {experts} for token {t}, which {what}"));
        }
    }
    None
}
