//! BLEU and chrF against the numbers and texts of sacrebleu (`oracle/scores.py`).

use guildhall::score::{Bleu, BleuOptions, Chrf, ChrfCounts, ChrfOptions, Error, Smoothing};
use serde_json::Value;

/// Both sides add and multiply in the same order; what is left is the last bit of a library's logarithm.
const TOLERANCE: f64 = 1e-9;

struct Corpus {
    hypotheses: Vec<String>,
    references: Vec<Vec<String>>,
    golden: Value,
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|line| line.as_str().unwrap().to_owned()).collect()
}

fn corpora() -> Vec<Corpus> {
    let path = format!("{}/oracle/golden/scores.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("the golden numbers are part of the repository");
    let golden: Vec<Value> = serde_json::from_str(&text).unwrap();
    let corpus = |golden: Value| Corpus {
        hypotheses: strings(&golden["hypotheses"]),
        references: golden["references"].as_array().unwrap().iter().map(strings).collect(),
        golden,
    };
    golden.into_iter().map(corpus).collect()
}

fn flag(options: &Value, name: &str) -> bool {
    options[name].as_bool().unwrap_or(false)
}

fn number(options: &Value, name: &str, default: u64) -> u64 {
    options[name].as_u64().unwrap_or(default)
}

fn bleu_options(options: &Value) -> BleuOptions {
    let value = options["smooth_value"].as_f64();
    let smoothing = match options["smooth_method"].as_str().unwrap_or("exp") {
        "none" => Smoothing::None,
        "floor" => Smoothing::Floor(value.unwrap_or(0.1)),
        "add-k" => Smoothing::AddK(value.unwrap_or(1.0)),
        "exp" => Smoothing::Exp,
        other => panic!("{other}"),
    };
    BleuOptions {
        tokenize: options["tokenize"].as_str().unwrap_or("13a").parse().unwrap(),
        lowercase: flag(options, "lowercase"),
        smoothing,
        effective_order: flag(options, "effective_order"),
    }
}

fn chrf_options(options: &Value) -> ChrfOptions {
    ChrfOptions {
        characters: number(options, "char_order", 6) as usize,
        words: number(options, "word_order", 0) as usize,
        beta: number(options, "beta", 2) as u32,
        lowercase: flag(options, "lowercase"),
        whitespace: flag(options, "whitespace"),
        epsilon: flag(options, "eps_smoothing"),
    }
}

#[track_caller]
fn near(found: f64, golden: &Value, case: &str) {
    let expected = golden.as_f64().unwrap();
    assert!((found - expected).abs() <= TOLERANCE, "{found} for {expected}: {case}");
}

#[test]
fn bleu_is_that_of_sacrebleu_to_the_last_digit() {
    let mut scored = 0;
    for Corpus { hypotheses, references, golden } in corpora() {
        for case in golden["bleu"].as_array().unwrap() {
            let bleu = Bleu::new(bleu_options(&case["options"]));
            let score = bleu.corpus(&hypotheses, &references).unwrap();
            let said = format!("{case}\n{hypotheses:?}\n{references:?}");
            near(score.score, &case["score"], &said);
            near(score.brevity_penalty, &case["bp"], &said);
            for (precision, expected) in score.precisions.iter().zip(case["precisions"].as_array().unwrap()) {
                near(*precision, expected, &said);
            }
            let lengths = [score.counts.hypothesis, score.counts.reference];
            assert_eq!(serde_json::json!(lengths), case["totals"], "{said}");
            for (digits, text) in case["texts"].as_object().unwrap() {
                let digits = digits.parse().unwrap();
                let line = format!("BLEU|{} = {}", bleu.signature(&references), score.describe(digits));
                assert_eq!(line, text.as_str().unwrap(), "{said}");
            }
            scored += 1;
        }
    }
    assert!(scored > 800, "{scored} scores");
}

#[test]
fn chrf_is_that_of_sacrebleu_to_the_last_digit() {
    let mut scored = 0;
    for Corpus { hypotheses, references, golden } in corpora() {
        for case in golden["chrf"].as_array().unwrap() {
            let chrf = Chrf::new(chrf_options(&case["options"]));
            let score = chrf.corpus(&hypotheses, &references).unwrap();
            let said = format!("{case}\n{hypotheses:?}\n{references:?}");
            near(score.score, &case["score"], &said);
            for (digits, text) in case["texts"].as_object().unwrap() {
                let digits = digits.parse().unwrap();
                let line = format!("{}|{} = {}", chrf.name(), chrf.signature(&references), score.describe(digits));
                assert_eq!(line, text.as_str().unwrap(), "{said}");
            }
            scored += 1;
        }
    }
    assert!(scored > 800, "{scored} scores");
}

/// Parts of a corpus may be counted apart.
#[test]
fn counts_of_segments_add_up() {
    let bleu = Bleu::new(BleuOptions::default());
    let chrf = Chrf::new(ChrfOptions::plus_plus());
    for Corpus { hypotheses, references, .. } in corpora() {
        let segments = || hypotheses.iter().zip(&references).rev();
        let mut counts = guildhall::score::BleuCounts::default();
        segments().for_each(|(hypothesis, references)| counts += bleu.segment(hypothesis, references));
        assert_eq!(bleu.score(counts), bleu.corpus(&hypotheses, &references).unwrap());
        let mut counts = ChrfCounts::default();
        segments().for_each(|(hypothesis, references)| counts += chrf.segment(hypothesis, references));
        assert_eq!(chrf.score(&counts), chrf.corpus(&hypotheses, &references).unwrap());
    }
}

#[test]
fn a_corpus_without_a_score_is_an_error() {
    let bleu = Bleu::new(BleuOptions::default());
    let chrf = Chrf::new(ChrfOptions::default());
    let error = bleu.corpus(&["a", "b"], &[vec!["a"]]).unwrap_err();
    assert_eq!(error, Error::Lengths { hypotheses: 2, references: 1 });
    assert_eq!(chrf.corpus(&["a", "b"], &[vec!["a"], vec![]]).unwrap_err(), Error::NoReference { segment: 2 });
    assert_eq!(bleu.corpus::<&str, &str>(&[], &[]).unwrap_err(), Error::Nothing);
}
