//! Scores of held-out texts that a checkpoint of tasks writes: what `evaluate` says of them is what comes of the files of
//! lines that it writes, and these are what `translate` writes.

use std::collections::BTreeMap;
use std::fs;

use guildhall::score::{Bleu, BleuOptions, Chrf, ChrfOptions};
use serde_json::Value;

use crate::program::Workshop;
use crate::task_recipes::{LATEST, RUN, shop};

fn rows(out: &str) -> Vec<Value> {
    let figures: Value = serde_json::from_str(out).unwrap();
    figures["tasks"].as_array().unwrap().clone()
}

fn lines(shop: &Workshop, row: &Value, what: &str) -> Vec<String> {
    let [task, from, to] = ["task", "from", "to"].map(|field| row[field].as_str().unwrap().replace(':', "_"));
    shop.read(&format!("out/{task}.{from}-{to}.{what}")).lines().map(str::to_owned).collect()
}

/// The losses of languages are those of the directions that write them, weighted by tokens.
fn check_languages(out: &str) {
    let figures: Value = serde_json::from_str(out).unwrap();
    let mut wanted: BTreeMap<[String; 2], Vec<[f64; 2]>> = BTreeMap::new();
    for row in rows(out) {
        let key = ["task", "to"].map(|field| row[field].as_str().unwrap().to_owned());
        wanted.entry(key).or_default().push(["loss", "tokens"].map(|field| row[field].as_f64().unwrap_or(0.0)));
    }
    wanted.retain(|_, parts| parts.len() > 1);
    let told = figures["languages"].as_array().unwrap();
    assert_eq!(told.len(), wanted.len(), "{told:?}");
    for (row, ([task, to], parts)) in told.iter().zip(wanted) {
        let tokens: f64 = parts.iter().map(|[_, tokens]| tokens).sum();
        let loss = parts.iter().map(|[loss, tokens]| loss * tokens).sum::<f64>() / tokens;
        assert_eq!((&row["task"], &row["from"], &row["to"]), (&task.into(), &"*".into(), &to.into()));
        assert!(row["tokens"] == tokens as u64 && (row["loss"].as_f64().unwrap() - loss).abs() < 1e-12, "{row}");
    }
}

#[test]
fn scores_are_those_of_the_lines() {
    let shop = shop();
    shop.succeeds("train tasks.toml");
    shop.write("file", "");
    let refused = format!("evaluate {LATEST} --chrf --outputs file");
    shop.fails(&refused, 2, &["--outputs file", "exists", "name a folder that can be written"]);
    let scored = shop.succeeds(&format!("evaluate {LATEST} --bleu --chrf --sentences 7 --outputs out")).out;
    let kept = format!("{RUN}/scores.json");
    assert_eq!(shop.read(&kept), scored, "a report finds them in the run's folder");
    fs::remove_file(shop.path(&kept)).unwrap();
    let (rows, plain) = (rows(&scored), rows(&shop.succeeds(&format!("evaluate {LATEST}")).out));
    assert!(!shop.path(&kept).exists(), "losses alone are no scores");
    assert_eq!(rows.len(), plain.len());
    check_languages(&scored);
    let mut seen = [0; 3];
    for (row, plain) in rows.iter().zip(&plain) {
        assert_eq!([&row["loss"], &row["tokens"], &row["to"]], [&plain["loss"], &plain["tokens"], &plain["to"]]);
        let kind = ["translation", "denoising", "tone"].iter().position(|task| row["task"] == *task).unwrap();
        seen[kind] += 1;
        if kind == 1 {
            assert!(["sentences", "bleu", "chrf", "accuracy"].iter().all(|field| row.get(field).is_none()), "{row}");
            continue;
        }
        let [source, written, wanted] = ["src", "hyp", "ref"].map(|what| lines(&shop, row, what));
        assert_eq!((source.len(), written.len(), wanted.len()), (7, 7, 7), "{row}");
        assert!(source.iter().chain(&wanted).all(|line| !line.is_empty() && !line.contains("__")), "{row}");
        let right = written.iter().zip(&wanted).filter(|(written, wanted)| written == wanted).count() as f64 / 7.0;
        let references: Vec<Vec<&String>> = wanted.iter().map(|line| vec![line]).collect();
        if kind == 2 {
            assert_eq!(row["accuracy"], right);
            assert!(row.get("bleu").is_none(), "{row}");
            assert!(wanted.iter().all(|line| ["grave", "light"].contains(&line.as_str())), "{wanted:?}");
            continue;
        }
        let bleu = Bleu::new(BleuOptions::default()).corpus(&written, &references).unwrap().score;
        let chrf = Chrf::new(ChrfOptions::default()).corpus(&written, &references).unwrap().score;
        assert_eq!([&row["bleu"], &row["chrf"], &row["exact"]], [bleu, chrf, right].map(Value::from).each_ref());
        assert!(row["bleu_signature"].as_str().unwrap().contains("tok:13a"), "{row}");
        // What is scored is what one would get line by line.
        let [from, to] = ["from", "to"].map(|field| row[field].as_str().unwrap());
        let direction = format!("--from {from} --to {to} --beams 1");
        fs::write(shop.path("lines.txt"), source.join("\n")).unwrap();
        let translated = shop.succeeds(&format!("translate {LATEST} {direction} lines.txt")).out;
        assert_eq!(translated.lines().collect::<Vec<_>>(), written, "{direction}");
    }
    assert!(seen.iter().all(|&parts| parts > 0), "{seen:?}");
    let again = shop.succeeds(&format!("evaluate {LATEST} --bleu --chrf --sentences 7")).out;
    assert_eq!(again, scored, "the same in every run");
    let only = self::rows(&shop.succeeds(&format!("evaluate {LATEST} --chrf --sentences 2")).out);
    assert!(only.iter().all(|row| row.get("bleu").is_none()) && only[0]["sentences"] == 2, "{}", only[0]);
}

#[test]
fn scores_that_cannot_be_are_refused() {
    let shop = shop();
    let refused = |arguments: &str, words: &[&str]| shop.fails(&format!("evaluate {arguments}"), 2, words);
    for option in ["--sentences 5", "--beams 2", "--outputs out"] {
        refused(&format!("{LATEST} {option}"), &[option.split(' ').next().unwrap(), "--bleu or --chrf"]);
    }
    refused(&format!("{LATEST} --bleu --sentences 0"), &["--sentences 0"]);
    refused(&format!("{LATEST} --bleu --beams 0"), &["--beams 0"]);
    shop.train("--set train.steps=1 --set run.dir=one");
    refused("one/checkpoints/latest --bleu", &["--bleu and --chrf", "no [[data.tasks]]"]);
}

/// References in lower case are no texts of the corpus: whoever compares scores should know.
#[test]
fn a_tokenizer_that_rewrites_texts_is_told() {
    let shop = shop();
    shop.succeeds("train tasks.toml --set train.steps=1");
    let note = "the tokenizer rewrites texts";
    assert!(!shop.succeeds(&format!("evaluate {LATEST} --chrf --sentences 1")).err.contains(note));
    let mut tokenizer: Value = serde_json::from_str(&shop.read(&format!("{LATEST}/tokenizer.json"))).unwrap();
    tokenizer["normalizer"] = serde_json::json!({ "type": "Lowercase" });
    shop.write("low.json", &tokenizer.to_string());
    let set = "--set data.tokenizer=low.json --set run.dir=low";
    shop.succeeds(&format!("train tasks.toml --set train.steps=1 {set}"));
    assert!(shop.succeeds("evaluate low/checkpoints/latest --chrf --sentences 1").err.contains(note));
}

#[test]
fn scores_of_a_run_are_drawn_and_go_with_it() {
    let shop = shop();
    shop.succeeds("train tasks.toml --set train.steps=2 --set train.checkpoint_every=0");
    let page = || shop.read(&format!("{RUN}/report.html"));
    assert!(page().contains("<h2>Tasks</h2>") && !page().contains("<h2>Scores"));
    let told = shop.succeeds(&format!("evaluate {LATEST} --chrf --sentences 2")).err;
    assert!(told.contains("scores.json") && told.contains("guildhall report"), "{told}");
    shop.succeeds(&format!("report {RUN}"));
    assert!(page().contains("<h2>Scores") && page().contains("chrF, translation"), "{}", page().len());
    // A checkpoint somewhere else has no run to keep them in.
    let other = shop.path("elsewhere");
    fs::create_dir(&other).unwrap();
    for file in fs::read_dir(shop.path(LATEST)).unwrap().flatten() {
        fs::copy(file.path(), other.join(file.file_name())).unwrap();
    }
    assert!(!shop.succeeds("evaluate elsewhere --chrf --sentences 2").err.contains("scores.json"));
    // A new run in the folder is none of which these scores are.
    shop.succeeds("train tasks.toml --set train.steps=1");
    assert!(!shop.path(&format!("{RUN}/scores.json")).exists() && !page().contains("<h2>Scores"));
}
