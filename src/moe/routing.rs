//! Routings: who goes where, decided by each token or among the tokens of a routing group.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::{Communicator, Request};

use super::gates::{Gate, GateDraws, Scope, Tokens};
use super::{Capacity, Error};

/// Who goes where: route `t * k + j` is token t's j-th choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing {
    /// The expert of every route, or [`Routing::DROPPED`].
    pub expert: Vec<u32>,
    /// What the gate said, before anything was moved or dropped: what loads count.
    pub chosen: Vec<u32>,
    /// Choices per token.
    pub k: usize,
    /// Experts there are.
    pub experts: usize,
}

impl Routing {
    /// A route that is not sent.
    pub const DROPPED: u32 = u32::MAX;

    /// A routing that drops nothing but what was not chosen.
    pub fn new(chosen: Vec<u32>, k: usize, experts: usize) -> Routing {
        Routing { expert: chosen.clone(), chosen, k, experts }
    }

    /// That of some of the tokens.
    pub fn of_tokens(&self, tokens: Range<usize>) -> Routing {
        let part = |routes: &[u32]| routes[tokens.start * self.k..tokens.end * self.k].to_vec();
        Routing { expert: part(&self.expert), chosen: part(&self.chosen), ..*self }
    }

    /// Where every route goes, or for one that is dropped would have gone: what weights are computed from.
    pub fn weighed(&self) -> Vec<u32> {
        let routes = self.expert.iter().zip(&self.chosen);
        routes.map(|(&sent, &chosen)| if sent == Routing::DROPPED { chosen } else { sent }).collect()
    }

    /// Routes that chose each expert, wherever they went.
    pub fn load(&self) -> Vec<u64> {
        let mut load = vec![0; self.experts];
        for &expert in self.chosen.iter().filter(|&&expert| expert != Routing::DROPPED) {
            load[expert as usize] += 1;
        }
        load
    }

    /// Routes that are sent to each expert.
    pub fn rows(&self) -> Vec<usize> {
        let mut rows = vec![0; self.experts];
        for &expert in self.expert.iter().filter(|&&expert| expert != Routing::DROPPED) {
            rows[expert as usize] += 1;
        }
        rows
    }

    /// Tokens that were routed.
    pub fn tokens(&self) -> usize {
        self.expert.len() / self.k.max(1)
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

impl Selector {
    /// Whether who is in a micro-batch with a token may change where it goes; rows are of `seq` tokens.
    pub fn asks_the_micro_batch(&self, seq: usize) -> bool {
        // Groups that end with rows are the same in all micro-batches.
        self.group_tokens.is_none_or(|tokens| !seq.is_multiple_of(tokens))
            && (self.capacity.is_some() || self.gate.scope() == Scope::Group)
    }

    /// The routing of this rank's tokens. Collective over `world`, which shares the micro-batch in rank order, if tokens
    /// compete.
    ///
    /// # Errors
    /// What the world reports; a gate that gives no routing.
    pub fn route(&self, tokens: &Tokens, world: &Arc<dyn Communicator>) -> Result<Routing, Error> {
        let (slots, experts) = (self.gate.slots(), tokens.experts);
        let by_token = self.gate.scope() == Scope::Token;
        let (mut chosen, mut kept) = if by_token { self.choose(tokens)? } else { Default::default() };
        if !by_token || self.capacity.is_some() {
            let gathered = Gathered::new(tokens, (&chosen, &kept), world)?;
            let mut of_mine = (Vec::new(), Vec::new());
            for group in gathered.groups(self.group_tokens) {
                let (group_chosen, group_kept) = self.settle(&gathered, &group, by_token.then_some(slots))?;
                let mine = gathered.mine_of(&group);
                of_mine.0.extend_from_slice(&group_chosen[mine.start * slots..mine.end * slots]);
                of_mine.1.extend_from_slice(&group_kept[mine.start * slots..mine.end * slots]);
            }
            (chosen, kept) = of_mine;
        }
        Ok(Routing { expert: kept, chosen, k: slots, experts })
    }

    /// What the gate says, checked: a user may have written it.
    fn choose(&self, tokens: &Tokens) -> Result<(Vec<u32>, Vec<u32>), Error> {
        let chosen = self.gate.choose(tokens);
        if let Some(problem) = problem(&chosen, tokens, self.gate.slots()) {
            let gate = format!("{:?}", self.gate);
            return Err(Error::Gate { layer: tokens.draws.layer, gate, problem });
        }
        let mut kept = chosen.clone();
        self.gate.thin(&mut kept, tokens);
        Ok((chosen, kept))
    }

    /// The choices of one routing group: those the tokens have made (`slots` each), or the gate's; then capacity.
    fn settle(
        &self,
        gathered: &Gathered,
        group: &Range<usize>,
        slots: Option<usize>,
    ) -> Result<(Vec<u32>, Vec<u32>), Error> {
        let tokens = gathered.tokens(group);
        let (chosen, mut kept) = match slots {
            Some(slots) => {
                let routes = group.start * slots..group.end * slots;
                (gathered.chosen[routes.clone()].to_vec(), gathered.kept[routes].to_vec())
            }
            None => self.choose(&tokens)?,
        };
        if let Some(capacity) = self.capacity {
            let limit = self.gate.capacity(capacity.factor, tokens.len(), tokens.experts);
            capacity.limit(&tokens, limit, &chosen, &mut kept);
        }
        Ok((chosen, kept))
    }
}

fn problem(chosen: &[u32], tokens: &Tokens, slots: usize) -> Option<String> {
    if chosen.len() != tokens.len() * slots {
        return Some(format!("gave {} choices for {} tokens of {slots} each", chosen.len(), tokens.len()));
    }
    chosen.chunks_exact(slots.max(1)).enumerate().find_map(|(t, routes)| {
        let made = |j: usize| routes[j] != Routing::DROPPED;
        let bad = (0..slots)
            .find(|&j| made(j) && (routes[j] as usize >= tokens.experts || routes[..j].contains(&routes[j])))?;
        let what = if routes[bad] as usize >= tokens.experts { "does not exist" } else { "it has already" };
        Some(format!("chose expert {} of {} for token {t}, which {what}", routes[bad], tokens.experts))
    })
}

/// The tokens of all ranks of a micro-batch, and what they chose.
struct Gathered {
    logits: Vec<f32>,
    chosen: Vec<u32>,
    kept: Vec<u32>,
    bias: Vec<f32>,
    experts: usize,
    /// This rank's tokens among all.
    mine: Range<usize>,
    /// The first of all tokens, as [`Tokens::first`].
    first: u64,
    draws: GateDraws,
}

impl Gathered {
    fn new(
        tokens: &Tokens,
        (chosen, kept): (&[u32], &[u32]),
        world: &Arc<dyn Communicator>,
    ) -> Result<Gathered, Error> {
        let counts = world.all_gather_u64(&[tokens.len() as u64])?;
        let before: u64 = counts[..world.rank()].iter().sum();
        let all: u64 = counts.iter().sum();
        // A rank without tokens does not know where the micro-batch begins.
        let starts = world.all_gather_u64(&[tokens.first.wrapping_sub(before)])?;
        let first = counts.iter().zip(&starts).find(|(count, _)| **count > 0).map_or(0, |(_, start)| *start);
        let slots = chosen.len() / tokens.len().max(1);
        let slots = world.all_gather_u64(&[slots as u64])?.into_iter().max().unwrap_or(0) as usize;
        let per_rank = |width: usize| counts.iter().map(|&n| n as usize * width).collect::<Vec<_>>();
        let received = vec![0.0f32; all as usize * tokens.experts];
        let request = Request::all_gather(tokens.logits.to_vec(), received, per_rank(tokens.experts));
        let logits = world.start(request)?.wait()?.recv.into_f32();
        let gather = |routes: &[u32]| -> Result<Vec<u32>, Error> {
            let request = Request::all_gather(routes.to_vec(), vec![0u32; all as usize * slots], per_rank(slots));
            Ok(world.start(request)?.wait()?.recv.into_u32())
        };
        let (chosen, kept) = (gather(chosen)?, gather(kept)?);
        let mine = before as usize..before as usize + tokens.len();
        let (experts, bias, draws) = (tokens.experts, tokens.bias.to_vec(), tokens.draws);
        Ok(Gathered { logits, chosen, kept, bias, experts, mine, first, draws })
    }

    /// The routing groups that hold some of this rank's tokens.
    fn groups(&self, size: Option<usize>) -> impl Iterator<Item = Range<usize>> {
        let all = self.logits.len() / self.experts;
        let size = size.unwrap_or(all).max(1);
        let mine = self.mine.clone();
        let groups = mine.start / size..if mine.is_empty() { mine.start / size } else { (mine.end - 1) / size + 1 };
        groups.map(move |group| group * size..all.min((group + 1) * size))
    }

    /// This rank's tokens within a group.
    fn mine_of(&self, group: &Range<usize>) -> Range<usize> {
        self.mine.start.max(group.start) - group.start..self.mine.end.min(group.end) - group.start
    }

    fn tokens(&self, group: &Range<usize>) -> Tokens<'_> {
        Tokens {
            logits: &self.logits[group.start * self.experts..group.end * self.experts],
            experts: self.experts,
            first: self.first + group.start as u64,
            ids: &[],
            bias: &self.bias,
            draws: self.draws,
        }
    }
}
