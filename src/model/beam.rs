//! Beam search: the most probable texts, of which several are continued at every step.

use std::cmp::Ordering;

/// How many texts a search keeps, what they score, and when they end.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamOptions {
    /// Texts that are continued at every step; 1 takes the most probable token every time.
    pub beams: usize,
    /// A text of n tokens, its end among them, scores its log-probability divided by n to this power.
    pub length_penalty: f64,
    /// Tokens of a text at most, its end among them.
    pub max_tokens: usize,
    /// The token that ends a text.
    pub end: u32,
}

/// A text that a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// Without the end.
    pub tokens: Vec<u32>,
    /// Of the tokens and the end, given what was read.
    pub log_probability: f64,
    pub score: f64,
    /// Whether it came to its end, and was not cut off.
    pub is_ended: bool,
}

/// A text that goes on.
#[derive(Clone, Default)]
struct Beginning {
    tokens: Vec<u32>,
    log_probability: f64,
}

/// One more token of a text that goes on.
#[derive(Clone, Copy)]
struct Continuation {
    beam: usize,
    token: u32,
    log_probability: f64,
}

impl Continuation {
    /// The more probable comes first; of equals the lower token, then the better text.
    fn order(&self, other: &Continuation) -> Ordering {
        let by_chance = other.log_probability.total_cmp(&self.log_probability);
        by_chance.then(self.token.cmp(&other.token)).then(self.beam.cmp(&other.beam))
    }
}

/// The best texts that begin behind `first`, which is not part of them; the best comes first, at most `beams` of them.
/// `next` gives the logits behind each of these tokens, of which number i continues text `parents[i]` of the call before:
/// those of a token that may not be written are minus infinity, and NaN counts as that. A text ends with a token among the
/// `beams` most probable continuations of all; the search stops once `beams` texts have ended.
///
/// # Errors
/// What `next` gives.
pub fn search<E>(
    options: &BeamOptions,
    first: u32,
    next: &mut dyn FnMut(&[u32], &[usize]) -> Result<Vec<Vec<f32>>, E>,
) -> Result<Vec<Hypothesis>, E> {
    let (mut live, mut ended) = (vec![Beginning::default()], Vec::new());
    let (mut last, mut parents) = (vec![first], vec![0]);
    for _ in 0..options.max_tokens {
        let logits = next(&last, &parents)?;
        let chosen = choose(options, &live, &logits);
        let text = |continuation: &Continuation| {
            let mut tokens = live[continuation.beam].tokens.clone();
            tokens.push(continuation.token);
            Beginning { tokens, log_probability: continuation.log_probability }
        };
        let (ends, goes_on): (Vec<Continuation>, Vec<Continuation>) =
            chosen.into_iter().partition(|continuation| continuation.token == options.end);
        ended.extend(ends.iter().map(|end| hypothesis(options, text(end))));
        live = goes_on.iter().map(text).collect();
        if ended.len() >= options.beams || live.is_empty() {
            live.clear();
            break;
        }
        last = goes_on.iter().map(|continuation| continuation.token).collect();
        parents = goes_on.iter().map(|continuation| continuation.beam).collect();
    }
    ended.extend(live.into_iter().map(|text| hypothesis(options, text)));
    // Equals stay in the order in which they were found.
    ended.sort_by(|a, b| b.score.total_cmp(&a.score));
    ended.truncate(options.beams);
    Ok(ended)
}

/// The ends among the most probable continuations, and the most probable of the others, in order.
fn choose(options: &BeamOptions, live: &[Beginning], logits: &[Vec<f32>]) -> Vec<Continuation> {
    let mut all: Vec<Continuation> = Vec::new();
    for ((beam, text), logits) in live.iter().enumerate().zip(logits) {
        all.extend(best(options.beams + 1, beam, text, logits));
    }
    all.sort_by(Continuation::order);
    let (mut going_on, mut chosen) = (0, Vec::new());
    for (rank, continuation) in all.into_iter().enumerate() {
        let ends = continuation.token == options.end;
        if going_on < options.beams && (!ends || rank < options.beams) {
            going_on += usize::from(!ends);
            chosen.push(continuation);
        }
    }
    chosen
}

/// The most probable continuations of one text: one more than are continued of all, as one may be the end.
fn best(count: usize, beam: usize, text: &Beginning, logits: &[f32]) -> Vec<Continuation> {
    let open = |logit: &f32| logit.is_finite();
    let top = logits.iter().copied().filter(open).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().filter(|logit| open(logit)).map(|&logit| f64::from(logit - top).exp()).sum();
    let normalizer = f64::from(top) + sum.ln();
    let of_token = |(token, &logit): (usize, &f32)| {
        let log_probability = text.log_probability + f64::from(logit) - normalizer;
        Continuation { beam, token: token as u32, log_probability }
    };
    let mut all: Vec<Continuation> = logits.iter().enumerate().filter(|(_, logit)| open(logit)).map(of_token).collect();
    if all.len() > count {
        all.select_nth_unstable_by(count - 1, Continuation::order);
        all.truncate(count);
    }
    all
}

fn hypothesis(options: &BeamOptions, Beginning { mut tokens, log_probability }: Beginning) -> Hypothesis {
    // A text that may have no token has none, and is certain.
    let score = log_probability / (tokens.len().max(1) as f64).powf(options.length_penalty);
    let is_ended = tokens.last() == Some(&options.end);
    if is_ended {
        tokens.pop();
    }
    Hypothesis { tokens, log_probability, score, is_ended }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use guildhall_tensor::{Draws, Purpose};

    use super::*;

    const VOCAB: usize = 4;
    const LONGEST: usize = 4;
    const FIRST: u32 = 9;

    /// Logits that depend on all tokens before, one step of 1/8 apart so that some tie.
    fn logits(seed: u64, before: &[u32]) -> Vec<f32> {
        let place = before.iter().fold(1, |place, &token| place * 7 + token);
        let draws = Draws::new(seed, Purpose::Test, 0, place);
        (0..VOCAB as u64).map(|token| (draws.bits(token) % 24) as f32 / 8.0).collect()
    }

    fn found(seed: u64, options: &BeamOptions) -> Vec<Hypothesis> {
        let mut texts: Vec<Vec<u32>> = vec![Vec::new()];
        let mut next = |tokens: &[u32], parents: &[usize]| {
            let behind = |(&token, &parent): (&u32, &usize)| [&texts[parent][..], &[token]].concat();
            texts = tokens.iter().zip(parents).map(behind).collect();
            Ok::<_, Infallible>(texts.iter().map(|text| logits(seed, text)).collect())
        };
        let Ok(found) = search(options, FIRST, &mut next);
        found
    }

    /// The chance of each text of at most `LONGEST` tokens, ended or cut off.
    fn all_texts(seed: u64, end: u32) -> BTreeMap<Vec<u32>, f64> {
        let (mut done, mut open) = (BTreeMap::new(), vec![(Vec::new(), 0.0)]);
        while let Some((text, chance)) = open.pop() {
            if text.len() == LONGEST || text.last() == Some(&end) {
                done.insert(text, chance);
                continue;
            }
            let scores = logits(seed, &[&[FIRST], &text[..]].concat());
            let sum: f64 = scores.iter().map(|&score| f64::from(score).exp()).sum();
            for (token, &score) in scores.iter().enumerate() {
                let chance: f64 = chance + (f64::from(score).exp() / sum).ln();
                open.push(([&text[..], &[token as u32]].concat(), chance));
            }
        }
        done
    }

    fn whole(hypothesis: &Hypothesis, end: u32) -> Vec<u32> {
        hypothesis.tokens.iter().copied().chain(hypothesis.is_ended.then_some(end)).collect()
    }

    /// With as many beams as there are texts nothing is lost: all texts, by score.
    #[test]
    fn enough_beams_find_all_texts() {
        for (seed, length_penalty) in (0..6).flat_map(|seed| [(seed, 0.0), (seed, 1.0), (seed, 2.5), (seed, -1.0)]) {
            let options = BeamOptions { beams: 256, length_penalty, max_tokens: LONGEST, end: 2 };
            let (found, all) = (found(seed, &options), all_texts(seed, 2));
            assert_eq!(found.len(), all.len());
            for hypothesis in &found {
                let text = whole(hypothesis, 2);
                let chance = all[&text];
                // Sums of four logarithms in f64.
                assert!((hypothesis.log_probability - chance).abs() < 1e-12, "{hypothesis:?} instead of {chance}");
                let score = hypothesis.log_probability / (text.len() as f64).powf(length_penalty);
                assert_eq!(hypothesis.score, score);
            }
            assert!(found.windows(2).all(|pair| pair[0].score >= pair[1].score));
        }
    }

    /// Few beams against a list of all continuations that is sorted whole, step by step.
    #[test]
    fn few_beams_find_what_a_sorted_list_gives() {
        for (seed, beams) in (0..40).flat_map(|seed| [1, 2, 3].map(|beams| (seed, beams))) {
            let options = BeamOptions { beams, length_penalty: 1.0, max_tokens: LONGEST, end: 0 };
            let (mut live, mut ended) = (vec![(Vec::<u32>::new(), 0.0f64)], Vec::new());
            for _ in 0..LONGEST {
                let mut all = Vec::new();
                for (place, (text, chance)) in live.iter().enumerate() {
                    let scores = logits(seed, &[&[FIRST], &text[..]].concat());
                    let top = scores.iter().copied().fold(f32::MIN, f32::max);
                    let sum: f64 = scores.iter().map(|&score| f64::from(score - top).exp()).sum();
                    for (token, &score) in scores.iter().enumerate() {
                        let chance = chance + f64::from(score) - (f64::from(top) + sum.ln());
                        all.push((-chance, token as u32, place, [&text[..], &[token as u32]].concat()));
                    }
                }
                all.sort_by(|a, b| a.partial_cmp(b).expect("numbers"));
                let is_end = |text: &Vec<u32>| text.last() == Some(&0);
                let ends = all.iter().take(beams).filter(|(.., text)| is_end(text));
                let before =
                    all.iter().filter(|(.., text)| !is_end(text)).nth(beams - 1).expect("other tokens").3.clone();
                let until = all.iter().position(|(.., text)| *text == before).expect("it is there");
                ended.extend(ends.filter(|end| all.iter().position(|c| c == *end) < Some(until)).cloned());
                let others = all.iter().filter(|(.., text)| !is_end(text)).take(beams);
                live = others.map(|(chance, .., text)| (text.clone(), -chance)).collect();
                if ended.len() >= beams {
                    live.clear();
                    break;
                }
            }
            let texts = ended.into_iter().map(|(chance, .., text)| (text, -chance)).chain(live);
            let mut want: Vec<(Vec<u32>, f64)> =
                texts.map(|(text, chance)| (text.clone(), chance / text.len() as f64)).collect();
            want.sort_by(|a, b| b.1.total_cmp(&a.1));
            want.truncate(beams);
            let got: Vec<_> = found(seed, &options).iter().map(|h| (whole(h, 0), h.score)).collect();
            assert_eq!(got, want, "{beams} beams, seed {seed}");
        }
    }

    /// Nothing is asked of the model, and the empty text is certain.
    #[test]
    fn no_tokens_are_an_empty_text() {
        let options = BeamOptions { beams: 2, length_penalty: 1.0, max_tokens: 0, end: 0 };
        let mut next = |_: &[u32], _: &[usize]| Err("asked");
        let empty = Hypothesis { tokens: Vec::new(), log_probability: 0.0, score: 0.0, is_ended: false };
        assert_eq!(search(&options, FIRST, &mut next), Ok(vec![empty]));
    }

    #[test]
    fn tokens_without_a_number_are_not_written() {
        let options = BeamOptions { beams: 3, length_penalty: 1.0, max_tokens: 3, end: 0 };
        let mut next = |tokens: &[u32], _: &[usize]| {
            Ok::<_, Infallible>(vec![vec![1.0, f32::NAN, f32::NEG_INFINITY, 0.5]; tokens.len()])
        };
        let Ok(found) = search(&options, FIRST, &mut next);
        assert!(!found.is_empty() && found.iter().all(|text| text.tokens.iter().all(|&token| token == 3)), "{found:?}");
        let mut nothing = |tokens: &[u32], _: &[usize]| Ok::<_, Infallible>(vec![vec![f32::NAN; 4]; tokens.len()]);
        let Ok(found) = search(&options, FIRST, &mut nothing);
        assert_eq!(found, []);
    }
}
