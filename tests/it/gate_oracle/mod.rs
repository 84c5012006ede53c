//! Every gate against a second implementation, written from docs/gates.md alone: choices, places, weights, losses and
//! gradients, as loops over tokens, in f64 wherever the page does not decide in f32.

mod capacity;
mod cases;
mod choices;
mod layer;
mod layers;
mod losses;
mod whole;

use std::ops::Range;

use guildhall::launch::Rank;
use guildhall::moe::gates::Tokens;
use guildhall::moe::{GateKind, Homes, Overflow, Peers, Routing};

use capacity::Routes;
use choices::{Batch, Choices};

use crate::world::{ONE, Shape, on_mesh, shape};

/// The program's routing of some tokens of a micro-batch.
fn routed(rank: &Rank, batch: &Batch, share: Range<usize>) -> Routes {
    let first = batch.first + share.start as u64;
    let logits = batch.logits[share.clone()].concat();
    let experts = batch.config.experts.largest();
    let tokens = Tokens {
        logits: &logits,
        largest: None,
        experts,
        first,
        ids: &batch.ids[share],
        bias: &batch.bias,
        padding: &[],
        draws: batch.draws,
    };
    let homes = Homes::gather(&(first..first + tokens.len() as u64).into(), &rank.world).expect("ranks that answer");
    let peers = Peers { group: &rank.world, homes: &homes, device: &rank.device };
    let routing = batch.config.widest().selector().route(&[tokens], &peers).expect("a routing");
    assert_eq!(routing.experts, experts);
    let by_token = |routes: &[u32]| by_token(routes, routing.k);
    Routes {
        wanted: by_token(&routing.chosen),
        chosen: by_token(routing.weighed().known()),
        kept: by_token(&routing.expert),
    }
}

fn by_token(experts: &[u32], slots: usize) -> Choices {
    let choice = |&expert: &u32| (expert != Routing::DROPPED).then_some(expert as usize);
    experts.chunks(slots).map(|token| token.iter().map(choice).collect()).collect()
}

/// The shares of some tokens that ranks take in turn: uneven, and the second of three has none.
fn share((turn, ranks): (usize, usize), tokens: usize) -> Range<usize> {
    match (ranks, turn) {
        (1, _) => 0..tokens,
        (_, 0) => 0..tokens / 3,
        (_, 1) => tokens / 3..tokens / 3,
        _ => tokens / 3..tokens,
    }
}

/// Ranks take their turns in order, or the last the first tokens.
fn check_selection(shape: Shape, backwards: bool) {
    let batches = cases::batches();
    let of_rank = |rank: &Rank| -> Vec<Routes> {
        let (place, ranks) = (rank.world.rank(), rank.world.size());
        let turn = if backwards { ranks - 1 - place } else { place };
        batches.iter().map(|batch| routed(rank, batch, share((turn, ranks), batch.logits.len()))).collect()
    };
    let mut parts = on_mesh(shape, |rank, _| of_rank(rank));
    if backwards {
        parts.reverse();
    }
    for (index, batch) in batches.iter().enumerate() {
        let all = |part: fn(&Routes) -> &Choices| parts.iter().flat_map(|rank| part(&rank[index]).clone()).collect();
        let got = Routes { wanted: all(|r| &r.wanted), chosen: all(|r| &r.chosen), kept: all(|r| &r.kept) };
        assert_eq!(got, batch.route(), "case {index} on {shape:?}: {batch:?}");
    }
}

#[test]
fn every_gate_chooses_as_its_definition_says() {
    check_selection(ONE, false);
}

#[test]
fn tokens_of_several_ranks_compete_as_the_definition_says() {
    check_selection(shape(3, 1), false);
}

/// A group is a set of tokens, and not an order of ranks.
#[test]
fn tokens_compete_alike_wherever_they_lie() {
    check_selection(shape(3, 1), true);
}

/// What an overflow policy has done in all cases: routes dropped, routes moved.
fn done(overflow: Overflow) -> (usize, usize) {
    let (mut dropped, mut moved) = (0, 0);
    for batch in cases::batches().iter().filter(|batch| batch.config.overflow == overflow) {
        let Routes { wanted, chosen, kept } = batch.route();
        let each = |choices: &Choices| choices.concat();
        dropped += each(&chosen).iter().zip(each(&kept)).filter(|(chosen, kept)| **chosen != *kept).count();
        moved += each(&wanted).iter().zip(each(&chosen)).filter(|(wanted, chosen)| **wanted != *chosen).count();
    }
    (dropped, moved)
}

/// The cases reach what they are for.
#[test]
fn the_cases_bite() {
    for overflow in crate::gates::OVERFLOWS {
        let (dropped, moved) = done(overflow);
        let moves = matches!(overflow, Overflow::Reroute | Overflow::Node);
        assert!(dropped > 50 && (moved > 50) == moves, "{overflow:?}: {dropped} dropped, {moved} moved");
    }
    let of = |gate: GateKind| cases::batches().into_iter().filter(move |batch| batch.config.gate == gate);
    for &gate in crate::gates::GATES {
        assert!(of(gate).any(|batch| batch.logits.is_empty()), "{}: no case without tokens", gate.name());
        assert!(
            of(gate).any(|b| b.groups().windows(2).any(|g| g[1].len() < g[0].len())),
            "{}: no short group",
            gate.name()
        );
        let alone = of(gate).any(|batch| batch.config.experts.largest() == 1 && !batch.logits.is_empty());
        assert!(alone || gate.only_top_k().is_some_and(|k| k > 1), "{}: no case of one expert", gate.name());
    }
    let differs = |batch: &Batch| {
        let mut plain = batch.clone();
        plain.config.gate = GateKind::Softmax.into();
        plain.route().wanted != batch.route().wanted
    };
    for gate in [GateKind::Swipe, GateKind::Topology, GateKind::Sinkhorn, GateKind::Sigmoid] {
        let differing = of(gate).filter(differs).count();
        assert!(differing >= 6, "{}: {differing} cases differ from plain top k", gate.name());
    }
}
