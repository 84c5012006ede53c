//! Where two runs routed tokens differently, and whether rounding explains it.
//!
//! A gate is a pure function of scores. So a different choice is rounding if, in the first layer where the two runs
//! chose differently, their scores agree up to the order of sums, and the recipe's own gate, asked on one rank with the
//! scores of this run, chooses what this run chose. Later layers and steps follow from it and are not looked at. The same
//! holds for clusters of tokens that share rows, which are a function of similarities (`clusters`).

use guildhall_comm::solo;
use guildhall_tensor::Device;

use super::clusters::condensed;
use crate::config::Config;
use crate::moe::gates::{GateDraws, Tokens};
use crate::moe::recording::{Decision, DecisionPlace, Seen};
use crate::moe::{Homes, Peers, Routing, Selector};

/// How two runs' routings compare.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    Same,
    /// What was decided differently at the first place where anything was, and by how little.
    Rounding(String),
    Wrong(String),
}

/// Of the norm of a layer's scores: some layers of sums, each off by about 1e-6.
const SCORES_APART: f64 = 1e-5;

/// Compares what was decided; both runs are of the recipe `config`.
pub(super) fn judge(got: &Seen, want: &Seen, config: &Config) -> Verdict {
    if let Some((step, layer, first)) = got.contradicted.first() {
        return Verdict::Wrong(format!(
            "the tokens from {first} on of layer {layer}, step {step}, were routed twice, and differently"
        ));
    }
    let places = layers(want);
    if layers(got) != places {
        return Verdict::Wrong("not the same layers routed tokens".to_owned());
    }
    for (step, layer) in places {
        let verdict = match routed([got, want], (step, layer), config) {
            Verdict::Same => condensed([&got.clusters, &want.clusters], (step, layer), config),
            verdict => verdict,
        };
        if verdict != Verdict::Same {
            return verdict;
        }
    }
    Verdict::Same
}

/// Compares how the tokens of a layer were routed in a step.
fn routed(seen: [&Seen; 2], (step, layer): (u64, u32), config: &Config) -> Verdict {
    let [mine, theirs] = seen.map(|seen| whole(seen, step, layer));
    if mine.routing.chosen == theirs.routing.chosen && mine.routing.expert == theirs.routing.expert {
        return Verdict::Same;
    }
    let tokens = moved(&mine.routing, &theirs.routing);
    let apart = apart(&mine.logits, &theirs.logits);
    let told = format!("{tokens} tokens of layer {layer}, step {step}, were routed differently");
    if !matches!(apart.partial_cmp(&SCORES_APART), Some(std::cmp::Ordering::Less)) {
        return Verdict::Wrong(format!("{told}, by scores that are {apart:.1e} of their norm apart"));
    }
    match decided_so(&mine, step, layer, config) {
        // Nothing was rounded: tokens were settled among others than the reference's.
        true if apart == 0.0 => Verdict::Wrong(format!("{told}, by the same scores")),
        true => Verdict::Rounding(format!("{told}, by scores {apart:.0e} apart")),
        false => Verdict::Wrong(format!("{told}, and not as its gate decides on one rank")),
    }
}

/// Steps and layers, in order.
fn layers(seen: &Seen) -> Vec<(u64, u32)> {
    let mut places: Vec<(u64, u32)> = seen.decisions.keys().map(|&(step, layer, _)| (step, layer)).collect();
    places.dedup();
    places
}

/// All tokens of a layer in a step, in their order.
fn whole(seen: &Seen, step: u64, layer: u32) -> Decision {
    let range: std::ops::RangeInclusive<DecisionPlace> = (step, layer, 0)..=(step, layer, u64::MAX);
    let mut parts = seen.decisions.range(range).map(|(_, decision)| decision.clone());
    let first = parts.next().expect("a layer that routed tokens");
    let mut all = parts.fold(first, |mut all, part| {
        all.logits.extend(part.logits);
        all.ids.extend(part.ids);
        all.padding.extend(part.padding);
        all.routing.chosen.extend(part.routing.chosen);
        all.routing.expert.extend(part.routing.expert);
        all
    });
    // Ranks whose tokens compete know of each other's.
    all.padding.sort_by_key(|padding| padding.start);
    all.padding.dedup();
    all
}

/// Tokens that went elsewhere.
fn moved(a: &Routing, b: &Routing) -> usize {
    let routes = |routing: &Routing| {
        let both = routing.chosen.iter().zip(&routing.expert).map(|(c, e)| (*c, *e)).collect::<Vec<_>>();
        both.chunks(routing.k).map(<[_]>::to_vec).collect::<Vec<_>>()
    };
    let (a, b) = (routes(a), routes(b));
    a.len().abs_diff(b.len()) + a.iter().zip(&b).filter(|(a, b)| a != b).count()
}

/// The norm of the difference, as a share of the norm.
fn apart(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(want).map(|(&g, &w)| f64::from(g) - f64::from(w)));
    error / norm(&mut want.iter().map(|&w| f64::from(w))).max(f64::MIN_POSITIVE)
}

/// Whether the gate of `config`, on one rank, decides so about these scores, micro-batch by micro-batch.
fn decided_so(all: &Decision, step: u64, layer: u32, config: &Config) -> bool {
    let Some(moe) = config.moe.as_ref().and_then(|moe| moe.of_layer(layer as usize)) else { return false };
    let (selector, slots) = (moe.selector(), all.routing.k);
    let rows = config.train.micro_batch.unwrap_or_else(|| config.rows_per_step());
    let tokens = rows * config.model.row_length_of(layer as usize);
    let draws = GateDraws { seed: config.train.seed, step, layer, trains: true };
    let micro_batches = all.logits.chunks(tokens * moe.experts).zip(all.ids.chunks(tokens)).enumerate();
    micro_batches.into_iter().all(|(index, (logits, ids))| {
        let first = index * tokens;
        let shown = Tokens {
            logits,
            largest: None,
            experts: moe.experts,
            first: first as u64,
            ids,
            bias: &all.bias,
            padding: &all.padding,
            draws,
        };
        let routes = first * slots..(first + ids.len()) * slots;
        is(&selector, &shown, &all.routing.chosen[routes.clone()], &all.routing.expert[routes])
    })
}

fn is(selector: &Selector, tokens: &Tokens, chosen: &[u32], expert: &[u32]) -> bool {
    let homes = Homes::alone(tokens.first..tokens.first + tokens.len() as u64);
    let peers = Peers { group: &solo::world(), homes: &homes, device: &Device::new(1) };
    let routing = selector.route(&[*tokens], &peers);
    routing.is_ok_and(|routing| routing.chosen == chosen && routing.expert == expert)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One layer, two experts, three tokens by themselves: the second hangs on rounding.
    fn seen(logits: [f32; 6], chosen: [u32; 3]) -> Seen {
        let mut seen = Seen::default();
        for token in 0..3 {
            let decision = Decision {
                logits: logits[2 * token..2 * token + 2].to_vec(),
                ids: vec![7],
                bias: vec![0.0; 2],
                padding: Vec::new(),
                routing: Routing::new(vec![chosen[token]], 1, 2),
            };
            seen.decisions.insert((1, 0, token as u64), decision);
        }
        seen
    }

    fn config() -> Config {
        let text = "[run]\ndir = \"r\"\n[train]\nsteps = 1\nbatch_tokens = 3\nlr = 1.0\nmicro_batch = 3\n[model]\n\
                    vocab = 300\nd_model = 4\nlayers = 1\nheads = 1\nseq = 1\n[moe]\nexperts = 2\ntop_k = 1\n\
                    [data]\nsources = [\"t\"]\n[parallel]\n[memory]\n[metrics]\n";
        toml::from_str(text).expect("a recipe")
    }

    #[test]
    fn rounding_is_told_from_wrong_choices() {
        let want = seen([1.0, 0.0, 0.5, 0.5, 0.0, 1.0], [0, 0, 1]);
        assert_eq!(judge(&want, &want, &config()), Verdict::Same);
        // The last digit of the second token's scores.
        let rounded = [1.0, 0.0, 0.5, 0.500_000_06, 0.0, 1.0];
        let flipped = judge(&seen(rounded, [0, 1, 1]), &want, &config());
        let told = "1 tokens of layer 0, step 1, were routed differently, by scores";
        assert!(matches!(&flipped, Verdict::Rounding(what) if what.starts_with(told)), "{flipped:?}");
        // The same scores do not choose so, and neither do those of the last token.
        for (scores, chosen) in [([1.0, 0.0, 0.5, 0.5, 0.0, 1.0], [0, 1, 1]), (rounded, [0, 1, 0])] {
            let wrong = judge(&seen(scores, chosen), &want, &config());
            assert!(matches!(&wrong, Verdict::Wrong(why) if why.contains("not as its gate decides")), "{wrong:?}");
        }
        let far = judge(&seen([1.0, 0.0, 0.5, 0.51, 0.0, 1.0], [0, 1, 1]), &want, &config());
        assert!(matches!(&far, Verdict::Wrong(why) if why.contains("apart")), "{far:?}");
        let mut twice = want.clone();
        twice.contradicted.push((1, 0, 2));
        assert!(matches!(judge(&twice, &want, &config()), Verdict::Wrong(why) if why.contains("twice")));
    }
}
