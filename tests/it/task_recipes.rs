//! Recipes of tasks, from parallel files to metrics: what is gathered, mixed, learned and told, and what is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use guildhall::config;
use guildhall::data::pairs::MessageKeys;
use guildhall::data::tasks::{BLOCK, LanguageEntry, PartLabel, TaskPart, mixture, parts};
use guildhall::data::{self, Corpus, Source, Split};
use serde_json::Value;

use crate::program::Workshop;

const SIDES: &str = r#"
[train]
steps = 6
batch_tokens = 512
lr = 1e-2
schedule = "constant"
eval_every = 3
eval_rows = 0
checkpoint_every = 2

[model]
family = "m2m"
vocab = 330
d_model = 16
encoder_layers = 2
decoder_layers = 2
heads = 2
seq = 32
source_seq = 48

[moe]
experts = 4
top_k = 2
d_expert = 32
layers = { every = 2 }
balance_scope = "micro_batch"

[data]
held_out = 0.2
cache = "cache"
temperature = 2.0

[[data.tasks]]
kind = "translation"
sources = ["pairs"]
directions = ["en-*", "de-en"]

[[data.tasks]]
kind = "denoising"
weight = 0.5
noise = { mask = 0.3, span = 2.0, drop = 0.1 }

[[data.tasks]]
kind = "classification"
name = "tone"
weight = 0.25
sources = [{ path = "tones.tsv", from = "en" }]
"#;

pub(crate) const RUN: &str = "runs/tasks";
pub(crate) const LATEST: &str = "runs/tasks/checkpoints/latest";

/// Sentences of English, German and French side by side, of which several have the same translation, and half as many of
/// Finnish; and tones of English texts.
pub(crate) fn shop() -> Workshop {
    let shop = Workshop::new();
    shop.write("tasks.toml", SIDES);
    let (things, deeds) =
        (["dog", "cat", "bird", "child", "king", "tree"], ["sleeps", "runs", "sings", "waits", "falls"]);
    let places = ["here", "there", "at home", "outside", "below", "near the well", "today"];
    let mut sides: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (number, place) in places.iter().enumerate() {
        for (thing, deed) in things.iter().flat_map(|thing| deeds.iter().map(move |deed| (thing, deed))) {
            let english = format!("the {thing} {deed} {place}.");
            sides.entry("de").or_default().push(format!("das {thing}lein {deed}t {}.", ["hier", "dort"][number % 2]));
            sides.entry("fr").or_default().push(format!("le {thing}eau {deed}e ({place})."));
            sides.entry("en").or_default().push(english);
        }
    }
    for (language, lines) in &sides {
        shop.write(&format!("pairs/house.{language}"), &(lines.join("\n") + "\n"));
    }
    let tones =
        sides["en"].iter().map(|text| format!("{text}\t{}\n", if text.contains("king") { "grave" } else { "light" }));
    shop.write("tones.tsv", &tones.collect::<String>());
    shop
}

pub(crate) fn load(shop: &Workshop, set: &[&str]) -> config::Config {
    let set: Vec<String> = set.iter().map(|set| (*set).to_owned()).collect();
    let mut config = config::load(&shop.path("tasks.toml"), &set, None).unwrap().config;
    // The library is not in the shop's folder.
    let path = |path: &str| shop.path(path).display().to_string();
    config.data.cache = shop.path("cache");
    for source in config.data.tasks.iter_mut().flat_map(|task| &mut task.sources) {
        source.path = path(&source.path);
    }
    config
}

pub(crate) fn prepared(config: &config::Config) -> Corpus {
    data::prepare(&config.data, config.model.vocab, &|_| ()).unwrap()
}

fn of_split(corpus: &Corpus, config: &config::Config, split: Split) -> Vec<TaskPart> {
    parts(corpus, &config.data, split, [48, 32], 3).unwrap()
}

fn named(label: &PartLabel) -> String {
    format!("{} {}-{}", label.task, label.from, label.to)
}

/// The texts of a language that a split has, as their documents.
fn documents(corpus: &Corpus, split: Split) -> BTreeSet<(String, String)> {
    let reader = corpus.split(split);
    let starts: Vec<u64> = [0].into_iter().chain(reader.ends().iter().copied()).collect();
    let text = |document: u64| {
        let at = starts[document as usize]..starts[document as usize + 1] - 1;
        corpus.tokenizer.decode(&reader.read(at).unwrap()).unwrap()
    };
    let index = corpus.manifest.pairs.as_ref().unwrap();
    let of = |entry: &LanguageEntry| {
        let range = if split == Split::Train { entry.train.clone() } else { entry.held_out.clone() };
        range.map(|document| (entry.language.clone(), text(document))).collect::<Vec<_>>()
    };
    index.languages.iter().flat_map(of).collect()
}

#[test]
fn a_corpus_of_tasks_has_their_parts_and_no_leaks() {
    let shop = shop();
    let config = load(&shop, &[]);
    let corpus = prepared(&config);
    let names: Vec<String> = of_split(&corpus, &config, Split::Train).iter().map(|part| named(&part.label)).collect();
    let wanted = [
        "translation de-en",
        "translation en-de",
        "translation en-fr",
        "denoising de-de",
        "denoising en-en",
        "denoising fr-fr",
        "tone en-classification:tone",
    ];
    assert_eq!(names.iter().map(String::as_str).collect::<BTreeSet<_>>(), wanted.into());
    let tags = ["classification:tone", "de", "en", "fr"];
    assert_eq!(corpus.tokenizer.tags(), tags);
    assert!(tags.iter().all(|tag| corpus.tokenizer.tag(tag).is_some()) && corpus.tokenizer.tag("fi").is_none());
    // Nothing of a held-out text is read or written in training, by any task; labels are no texts.
    let keys = MessageKeys::default();
    let of = |split| {
        let all = documents(&corpus, split).into_iter().filter(|(language, _)| !language.contains(':'));
        all.map(|(language, text)| (language, keys.key(&text))).collect::<BTreeSet<_>>()
    };
    let (train, held_out) = (of(Split::Train), of(Split::HeldOut));
    assert!(train.is_disjoint(&held_out), "{:?}", train.intersection(&held_out).next());
    assert!(!held_out.is_empty() && corpus.manifest.pairs.as_ref().unwrap().leaks > 0, "a case of leaks");
    // All that is left of 210 messages, and of the same German for several of them.
    assert_eq!(
        train.iter().filter(|(language, _)| language == "en").count()
            + held_out.iter().filter(|(language, _)| language == "en").count(),
        210
    );
    let label = documents(&corpus, Split::Train).into_iter().filter(|(language, _)| language == "classification:tone");
    assert_eq!(label.map(|(_, text)| text).collect::<BTreeSet<_>>(), ["grave", "light"].map(str::to_owned).into());
}

#[test]
fn tasks_are_mixed_by_weight_and_their_parts_by_temperature() {
    let shop = shop();
    // Fewer pairs of French than of German.
    let french = shop.read("pairs/house.fr").lines().take(60).map(|line| format!("{line}\n")).collect::<String>();
    let english = shop.read("pairs/house.en").lines().take(60).map(|line| format!("{line}\n")).collect::<String>();
    fs::remove_file(shop.path("pairs/house.fr")).unwrap();
    shop.write("few/house.fr", &french);
    shop.write("few/house.en", &english);
    for temperature in ["1.0", "3.0"] {
        let mut config = load(&shop, &[&format!("data.temperature={temperature}")]);
        config.data.tasks[0]
            .sources
            .push(data::pairs::PairSpec { path: shop.path("few").display().to_string(), ..Default::default() });
        let corpus = prepared(&config);
        let parts = of_split(&corpus, &config, Split::Train);
        let mixture = mixture(&parts, &config.data, 7).unwrap();
        let mut rows: BTreeMap<String, usize> = BTreeMap::new();
        for place in 0..BLOCK as u128 {
            let (index, pass) = mixture.place(0, place);
            let part = mixture.get(index, pass).unwrap().component as usize;
            *rows.entry(named(&parts[part].label)).or_default() += 1;
        }
        let task =
            |name: &str| rows.iter().filter(|(part, _)| part.starts_with(name)).map(|(_, n)| *n as f64).sum::<f64>();
        // By weight, each part rounded to a row of a block.
        for (name, share) in [("translation", 1.0 / 1.75), ("denoising", 0.5 / 1.75), ("tone", 0.25 / 1.75)] {
            assert!((task(name) - share * BLOCK as f64).abs() <= 3.0, "{name}: {rows:?}");
        }
        let pairs = |name: &str| parts.iter().find(|part| named(&part.label) == name).unwrap().rows.pairs() as f64;
        let (many, few) = ("translation en-de", "translation en-fr");
        let ratio = (pairs(many) / pairs(few)).powf(1.0 / temperature.parse::<f64>().unwrap());
        let found = rows[many] as f64 / rows[few] as f64;
        assert!((found / ratio - 1.0).abs() < 0.01 && pairs(many) > 1.5 * pairs(few), "{temperature}: {found} {ratio}");
    }
}

#[test]
fn weights_and_noise_need_no_other_corpus_but_all_else_does() {
    let shop = shop();
    let folder = |set: &[&str]| prepared(&load(&shop, set)).dir;
    let plain = folder(&[]);
    let mut other = load(&shop, &[]);
    other.data.tasks[1].weight = 3.0;
    other.data.tasks[1].noise = None;
    assert_eq!(prepared(&other).dir, plain);
    let mut others =
        vec![folder(&["data.held_out=0.3"]), folder(&["data.temperature=4.0"]), folder(&["model.vocab=340"])];
    let changes: [fn(&mut data::TaskTable); 3] =
        [|task| task.max_chars = 30, |task| task.directions = Some(vec!["en-de".into()]), |task| task.min_pairs = 2];
    for change in changes {
        let mut config = load(&shop, &[]);
        change(&mut config.data.tasks[0]);
        others.push(prepared(&config).dir);
    }
    shop.write("pairs/house.fr", &shop.read("pairs/house.fr").replace("chateau", "chatteau"));
    fs::remove_file(shop.path("tones.tsv")).unwrap();
    shop.write("tones.tsv", "the dog sleeps.\tlight\nthe king falls.\tgrave\nthe cat runs.\tlight\n");
    others.push(folder(&[]));
    assert!(!others.contains(&plain), "{others:?}");
    assert_eq!(others.iter().collect::<BTreeSet<_>>().len(), others.len());
}

#[test]
fn a_damaged_table_of_pairs_is_refused() {
    let shop = shop();
    let config = load(&shop, &[]);
    let corpus = prepared(&config);
    let table = corpus.dir.join("train.pairs");
    let whole = fs::read(&table).unwrap();
    let error = |bytes: Option<&[u8]>| {
        match bytes {
            Some(bytes) => fs::write(&table, bytes).unwrap(),
            None => fs::remove_file(&table).unwrap(),
        }
        parts(&corpus, &config.data, Split::Train, [48, 32], 3).unwrap_err().to_string()
    };
    let mut flipped = whole.clone();
    flipped[5] ^= 1;
    for (bytes, says) in [(Some(&flipped[..]), "SHA-256"), (Some(&whole[..8]), "SHA-256"), (None, "missing")] {
        let error = error(bytes);
        assert!(error.contains("train.pairs") && error.contains(says), "{error}");
    }
}

/// What a run told of its tasks, step by step.
fn told(shop: &Workshop, run: &str) -> Vec<[Value; 2]> {
    shop.metrics(run).into_iter().map(|line| [line["tasks"].clone(), line["eval_tasks"].clone()]).collect()
}

fn sum(tasks: &Value, of: impl Fn(&Value) -> f64) -> f64 {
    tasks.as_array().unwrap().iter().map(of).sum()
}

fn tokens(task: &Value) -> f64 {
    task["tokens"].as_f64().unwrap()
}

/// By hand: all rows and valid tokens are told of some part, and the held-out loss is that of the parts that translate.
#[test]
fn what_is_told_of_parts_adds_up() {
    let shop = shop();
    shop.succeeds("train tasks.toml");
    let lines = shop.metrics(RUN);
    let config = load(&shop, &[]);
    let corpus = prepared(&config);
    let train = of_split(&corpus, &config, Split::Train);
    let mixture = mixture(&train, &config.data, config.train.seed).unwrap();
    let mut place = 0;
    for line in &lines {
        // A step's loss is one sum of f32, and so is that of each row: neither is off by more than its terms' rounding.
        let all = sum(&line["tasks"], tokens);
        let mean = sum(&line["tasks"], |part| tokens(part) * part["loss"].as_f64().unwrap()) / all;
        assert!((mean / line["loss"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{mean} in {line}");
        let mut wanted: BTreeMap<String, [u64; 2]> = BTreeMap::new();
        for _ in 0..config.rows_per_step() {
            let (index, pass) = mixture.place(config.train.seed, place);
            let row = mixture.get(index, pass).unwrap();
            let valid = row.targets.iter().filter(|target| **target != data::IGNORE).count() as u64;
            let [rows, tokens] = wanted.entry(named(&train[row.component as usize].label)).or_default();
            (*rows, *tokens) = (*rows + 1, *tokens + valid);
            place += 1;
        }
        let number = |task: &Value, field: &str| task[field].as_u64().unwrap();
        let name = |task: &Value| ["task", "from", "to"].map(|field| task[field].as_str().unwrap().to_owned());
        let found = line["tasks"].as_array().unwrap().iter().map(|task| {
            let [task_name, from, to] = name(task);
            (format!("{task_name} {from}-{to}"), [number(task, "rows"), number(task, "tokens")])
        });
        assert_eq!(found.collect::<BTreeMap<_, _>>(), wanted);
    }
    for line in lines.iter().filter(|line| line["eval_loss"].is_number()) {
        let parts = &line["eval_tasks"];
        assert_eq!(parts.as_array().unwrap().len(), 7, "every part is told: {parts}");
        let translates = |part: &Value| f64::from(u8::from(part["task"] == "translation"));
        let loss = |part: &Value| part["loss"].as_f64().unwrap_or(0.0);
        let all = sum(parts, |part| translates(part) * tokens(part));
        let mean = sum(parts, |part| translates(part) * tokens(part) * loss(part)) / all;
        assert!((mean - line["eval_loss"].as_f64().unwrap()).abs() < 1e-9, "{mean} in {line}");
    }
    let last = lines.last().unwrap();
    assert_eq!(shop.summary(RUN)["eval_tasks"], last["eval_tasks"]);
    assert!(last["loss"].as_f64() < lines[0]["loss"].as_f64());
    // A plan's rows are full; real ones end with padding, which is not routed.
    let summary = shop.summary(RUN);
    let [peak, planned] =
        ["/peak_bytes/total", "/predicted_peak_bytes"].map(|at| summary.pointer(at).unwrap().as_f64().unwrap());
    assert!(peak <= planned && peak > 0.8 * planned, "{peak} of {planned}");
    // Evaluating the checkpoint tells the same.
    let evaluated: Value = serde_json::from_str(&shop.succeeds(&format!("evaluate {LATEST}")).out).unwrap();
    assert_eq!([&evaluated["tasks"], &evaluated["eval_loss"]], [&last["eval_tasks"], &last["eval_loss"]]);
}

#[test]
fn runs_of_tasks_resume_and_do_not_depend_on_the_mesh() {
    let shop = shop();
    shop.succeeds("train tasks.toml");
    shop.succeeds("train tasks.toml --set run.dir=halves --set train.steps=4");
    shop.succeeds("train tasks.toml --set run.dir=halves --resume");
    assert_eq!(told(&shop, "halves"), told(&shop, RUN));
    for field in ["loss", "eval_loss", "grad_norm", "tokens"] {
        assert_eq!(shop.series("halves", field), shop.series(RUN, field), "{field}");
    }
    let whole = told(&shop, RUN);
    let meshes = [
        "--ranks 2 --set parallel.expert=2",
        "--ranks 4 --set parallel.expert=2 --set parallel.tensor=2",
        "--ranks 4 --set parallel.expert=4 --set parallel.zero=2 --set train.micro_batch=4",
    ];
    for (number, mesh) in meshes.into_iter().enumerate() {
        let run = format!("mesh{number}");
        shop.succeeds(&format!("train tasks.toml {mesh} --set run.dir={run}"));
        for (line, own) in told(&shop, &run).iter().zip(&whole) {
            for (part, own) in line[0].as_array().unwrap().iter().zip(own[0].as_array().unwrap()) {
                let exact = |part: &Value| ["task", "from", "to", "rows", "tokens"].map(|field| part[field].clone());
                assert_eq!(exact(part), exact(own), "{mesh}");
                let [loss, own] = [part, own].map(|part| part["loss"].as_f64().unwrap());
                // As of all parts, below, of which one is a share.
                assert!((loss - own).abs() < 3e-3, "{mesh}: {loss} for {own}");
            }
            assert_eq!(line[0].as_array().unwrap().len(), own[0].as_array().unwrap().len(), "{mesh}");
        }
        let close = |field: &str, of: f64| {
            for (a, b) in shop.series(&run, field).iter().zip(shop.series(RUN, field)) {
                let Some(b) = b.as_f64() else { continue };
                // Six steps of f32 with another order of sums, at a high rate.
                assert!((a.as_f64().unwrap() - b).abs() < of, "{mesh}, {field}: {a} for {b}");
            }
        };
        close("loss", 1e-3);
        close("eval_loss", 1e-3);
    }
}
