//! Decoding with two stacks: with caches or at once, beside others or alone, whatever the capacity.

use std::sync::Arc;

use guildhall::data::{Batch, IGNORE, Row};
use guildhall::model::{BeamOptions, Caches, Context, Model, Sizes, Translator};
use guildhall::moe::{GateKind, Layers};
use guildhall::parallel::Mesh;
use guildhall_tensor::{Device, Dtype, Tape};

use crate::parity::REORDERED;
use crate::tiny::{Tolerance, m2m, near, nllb, share, switch};
use crate::world::{ONE, on_mesh, shape, sliced};

const VOCAB: usize = 31;
const SOURCE: [u32; 7] = [3, 1, 4, 1, 5, 9, 2];
const FIRST: u32 = 30;
const END: u32 = 6;

fn document(tokens: &[u32]) -> Batch {
    let row = Row { targets: vec![IGNORE; tokens.len()], ..Row::of_document(tokens) };
    share(0..1, tokens.len(), |_| row.clone())
}

/// Logits `[T, V]` behind every token of a text, at once and without caches.
fn at_once(model: &Model, device: &Arc<Device>, mesh: &Mesh, text: &[u32]) -> Vec<f32> {
    let batch = document(text).reading(document(&SOURCE));
    model.logits(&Tape::inference(device), &batch, &Context::of_inference(mesh, 1)).unwrap().to_vec()
}

/// Three versions side by side, of which the third goes on from what the first was after three tokens.
#[test]
fn versions_with_caches_are_texts_at_once() {
    let meshes = [(ONE, false), (shape(2, 2), false), (sliced(2, 2, 1), false), (sliced(4, 2, 2), false)];
    for (sizes, (shape, sequence)) in [m2m(), nllb(), switch()]
        .into_iter()
        .flat_map(|sizes| meshes.into_iter().chain([(sliced(2, 2, 1), true)]).map(move |mesh| (sizes.clone(), mesh)))
    {
        on_mesh(shape, |rank, mesh| {
            let mesh = &mesh.clone().with_sequence(sequence);
            let model = Model::new(&rank.device, &sizes, mesh);
            let translator = Translator::new(&model, &rank.device, mesh);
            let encoded = translator.encode(&SOURCE).unwrap();
            let texts = [[FIRST, 7, 8, 9, 10, 11], [FIRST, 12, 13, 14, 15, 16], [FIRST, 7, 8, 17, 18, 19]];
            let want = texts.map(|text| at_once(&model, &rank.device, mesh, &text));
            let mut caches: Vec<Caches> = (0..2).map(|_| translator.caches()).collect();
            for place in 0..6 {
                if place == 3 {
                    caches.push(caches[0].clone());
                }
                let tokens: Vec<u32> = texts.iter().take(caches.len()).map(|text| text[place]).collect();
                let got = translator.next_logits(&tokens, &encoded, &mut caches).unwrap().to_vec();
                for (version, got) in got.chunks_exact(VOCAB).enumerate() {
                    let want = &want[version][place * VOCAB..(place + 1) * VOCAB];
                    near(&format!("version {version} behind token {place} on {shape:?}"), got, want, REORDERED);
                }
            }
        });
    }
}

fn limited(factor: Option<f64>) -> Sizes {
    let mut sizes = m2m();
    sizes.moe.as_mut().expect("experts").capacity_factor = factor;
    sizes
}

/// What a model writes: tokens and scores, the best text first.
fn written(sizes: &Sizes, options: &BeamOptions) -> Vec<(Vec<u32>, f64, bool)> {
    let of_rank = on_mesh(ONE, |rank, mesh| {
        let model = Model::new(&rank.device, sizes, mesh);
        let mut writable = vec![true; VOCAB];
        writable[3] = false;
        let found = Translator::new(&model, &rank.device, mesh).translate(&SOURCE, FIRST, options, &writable).unwrap();
        found.into_iter().map(|text| (text.tokens, text.score, text.is_ended)).collect::<Vec<_>>()
    });
    of_rank.into_iter().next().expect("a rank")
}

/// Scores are those of the texts read at once, and one beam takes the best token each time.
#[test]
fn texts_have_the_chances_that_the_model_gives_them() {
    for beams in [1, 3, 5] {
        let options = BeamOptions { beams, length_penalty: 1.0, max_tokens: 6, end: END };
        let found = written(&m2m(), &options);
        assert!(!found.is_empty() && found.len() <= beams);
        on_mesh(ONE, |rank, mesh| {
            let model = Model::new(&rank.device, &m2m(), mesh);
            for (tokens, score, is_ended) in &found {
                let whole: Vec<u32> = tokens.iter().copied().chain(is_ended.then_some(END)).collect();
                assert!(whole.len() <= 6 && !whole.contains(&3), "{whole:?}");
                let read = [&[FIRST], &whole[..whole.len() - 1]].concat();
                let logits = at_once(&model, &rank.device, mesh, &read);
                let mut chance = 0.0;
                for (behind, &token) in logits.chunks_exact(VOCAB).zip(&whole) {
                    let may = |place: &usize| *place != 3;
                    let sum: f64 = (0..VOCAB).filter(may).map(|place| f64::from(behind[place]).exp()).sum();
                    chance += (f64::from(behind[token as usize]).exp() / sum).ln();
                    if beams == 1 {
                        let best = (0..VOCAB).filter(may).max_by(|&a, &b| behind[a].total_cmp(&behind[b]));
                        assert_eq!(best, Some(token as usize), "{whole:?}");
                    }
                }
                // Logits of some units, each off by about 1e-6.
                assert!((chance / whole.len() as f64 - score).abs() < 1e-5, "{whole:?}: {score} instead of {chance}");
            }
        });
    }
}

/// Eight significant bits (2^-9 a rounding), and some ten roundings one after another in a few layers.
const BF16: Tolerance = Tolerance { relative: 0.03, floor: 0.0 };

/// The caches hold what attention makes of all tokens at once, each value rounded to eight bits in either order.
#[test]
fn versions_with_caches_are_texts_at_once_in_bf16() {
    for sizes in [m2m(), nllb()] {
        let sizes = Sizes { dtype: Dtype::Bf16, ..sizes };
        on_mesh(ONE, |rank, mesh| {
            let model = Model::new(&rank.device, &sizes, mesh);
            let translator = Translator::new(&model, &rank.device, mesh);
            let encoded = translator.encode(&SOURCE).unwrap();
            let texts = [[FIRST, 7, 8, 9], [FIRST, 12, 13, 14]];
            let mut caches = [(); 2].map(|()| translator.caches());
            for place in 0..4 {
                let got = translator.next_logits(&texts.map(|text| text[place]), &encoded, &mut caches).unwrap();
                for (got, text) in got.f32s().chunks_exact(VOCAB).zip(texts) {
                    let want = &at_once(&model, &rank.device, mesh, &text)[place * VOCAB..(place + 1) * VOCAB];
                    near(&format!("behind token {place}"), got, want, BF16);
                }
            }
        });
    }
}

/// Experts that choose among the tokens of a text choose alike on every rank, which all have the same text.
#[test]
fn experts_choose_among_the_tokens_of_one_text() {
    let mut sizes = m2m();
    let moe = sizes.moe.as_mut().expect("experts");
    // Half of seven tokens is three and a half: of the text twice, some expert would take a token of one copy only.
    (moe.gate, moe.layers) = (GateKind::ExpertChoice.into(), Layers::List(vec![1]));
    let logits = |shape| {
        on_mesh(shape, |rank, mesh| {
            let model = Model::new(&rank.device, &sizes, mesh);
            let translator = Translator::new(&model, &rank.device, mesh);
            let encoded = translator.encode(&SOURCE).unwrap();
            translator.next_logits(&[FIRST], &encoded, &mut [translator.caches()]).unwrap().to_vec()
        })
    };
    let want = logits(ONE).remove(0);
    for shape in [shape(2, 1), shape(2, 2), sliced(4, 2, 2)] {
        for got in logits(shape) {
            near(&format!("on {shape:?}"), &got, &want, REORDERED);
        }
    }
}

/// No place is missing, however few a recipe has.
#[test]
fn texts_do_not_depend_on_the_capacity() {
    let options = BeamOptions { beams: 4, length_penalty: 1.0, max_tokens: 5, end: END };
    let want = written(&limited(None), &options);
    assert_eq!(written(&limited(Some(0.1)), &options), want);
    // Read at once in the limits of evaluation, the same text has other logits.
    let logits = |factor| {
        on_mesh(ONE, |rank, mesh| {
            let model = Model::new(&rank.device, &limited(factor), mesh);
            at_once(&model, &rank.device, mesh, &[FIRST, 7, 8])
        })
    };
    assert_ne!(logits(Some(0.1)), logits(None));
}

/// A text is cut off at the longest row that the decoder has.
#[test]
fn texts_end_with_the_row() {
    let options = BeamOptions { beams: 2, length_penalty: 0.0, max_tokens: 1000, end: VOCAB as u32 };
    let found = written(&m2m(), &options);
    assert!(found.iter().all(|(tokens, _, is_ended)| tokens.len() == 8 && !is_ended), "{found:?}");
}
