//! Data sets as Hugging Face's hub lays them out: the splits and configurations are those that its own library finds
//! (oracle/hub.py), only the wanted column is read, and links of a cache lead to the files.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use guildhall::data::{Corpus, Error, Split, prepare};
use serde_json::Value;

use crate::program::Workshop;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/golden/hub").join(name)
}

/// A copy of a layout with what else lies in such folders.
fn copied(shop: &Workshop, layout: &str) -> PathBuf {
    let folder = shop.path(layout);
    copy(&golden(layout), &folder);
    shop.write(&format!("{layout}/.gitattributes"), "*.parquet filter=lfs\n");
    shop.write(&format!("{layout}/.cache/huggingface/download/train.metadata"), "0123\n");
    folder
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy(&path, &to),
            false => assert!(fs::copy(&path, &to).is_ok()),
        }
    }
}

/// The corpus of a source, given as it stands in a recipe.
fn corpus(shop: &Workshop, source: &str, rest: &str) -> Result<Corpus, Error> {
    let text = format!("sources = [{source}]\ncache = {:?}\n{rest}", shop.path("cache"));
    prepare(&toml::from_str(&text).unwrap(), 300, &|_| {})
}

fn texts(corpus: &Corpus, split: Split) -> BTreeSet<String> {
    let reader = corpus.split(split);
    let documents = (0..reader.ends().len() as u64).map(|document| reader.document(document));
    let decode = |tokens: Vec<u32>| corpus.tokenizer.decode(&tokens[..tokens.len() - 1]).unwrap();
    documents.map(|range| decode(reader.read(range).unwrap())).collect()
}

fn refused(result: Result<Corpus, Error>, words: &[&str]) {
    let message = result.expect_err("it is refused").to_string();
    words.iter().for_each(|word| assert!(message.contains(word), "no {word:?} in: {message}"));
}

/// Each split of each configuration, trained on with another one held out.
#[test]
fn splits_and_configurations_are_those_of_the_hubs_library() {
    let told: Value = serde_json::from_slice(&fs::read(golden("hub.json")).unwrap()).unwrap();
    let set = |value: &Value| -> BTreeSet<String> {
        value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let shop = Workshop::new();
    for (layout, configs) in told.as_object().unwrap() {
        let folder = copied(&shop, layout);
        for (config, splits) in configs.as_object().unwrap() {
            let named = if config == "default" { String::new() } else { format!(", config = '{config}'") };
            let splits = splits.as_object().unwrap();
            for (split, expected) in splits {
                let what = format!("{layout} {config} {split}");
                let source = format!("{{ path = {folder:?}, split = '{split}'{named} }}");
                let corpus = corpus(&shop, &source, "held_out = 0").unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(texts(&corpus, Split::Train), set(expected), "{what}");
                assert_eq!(corpus.manifest.skipped.binary, 0, "{what}");
            }
            for (held_out, other) in splits.iter().filter(|(name, _)| *name != "train") {
                let source = format!("{{ path = {folder:?}, held_out = '{held_out}'{named} }}");
                let corpus = corpus(&shop, &source, "").unwrap();
                assert_eq!(texts(&corpus, Split::Train), set(&splits["train"]), "{layout} {config}");
                assert_eq!(texts(&corpus, Split::HeldOut), set(other), "{layout} {config} {held_out}");
            }
        }
        // By its path alone, it is its training split in its default configuration.
        let first = configs.get("default").or(configs.get("en")).unwrap();
        let by_path = corpus(&shop, &format!("{folder:?}"), "held_out = 0");
        if layout != "converted" {
            assert_eq!(texts(&by_path.unwrap(), Split::Train), set(&first["train"]), "{layout}");
        }
    }
}

#[test]
fn what_is_not_there_is_told_with_what_is() {
    let shop = Workshop::new();
    let sharded = copied(&shop, "sharded");
    let configured = copied(&shop, "configured");
    let of = |folder: &Path, rest: &str| corpus(&shop, &format!("{{ path = {folder:?}{rest} }}"), "");
    refused(of(&sharded, ", split = 'tests'"), &["sharded", "no split `tests`", "`test_sft`, `train`, `validation`"]);
    refused(of(&sharded, ", held_out = 'dev'"), &["no split `dev`"]);
    refused(of(&sharded, ", held_out = 'train'"), &["both trained on and held out"]);
    refused(of(&sharded, ", field = 'body'"), &["no column `body`", "`id`, `text`, `meta`"]);
    refused(of(&sharded, ", config = 'fr'"), &["no configuration `fr`", "README.md names none"]);
    refused(of(&configured, ", config = 'fr'"), &["no configuration `fr`", "`en`, `de`, `more`, `folder`"]);
    let converted = copied(&shop, "converted");
    refused(of(&converted, ", config = 'fr'"), &["no configuration `fr`", "no such folder"]);
    refused(of(&sharded.join("data/train-00000-of-00002.parquet"), ", split = 'train'"), &["this is no folder"]);
    let card = |front: &str| {
        shop.write("set/README.md", &format!("---\n{front}---\n"));
        of(&shop.path("set"), "")
    };
    shop.write("outside.jsonl", "{\"text\": \"secret\"}\n");
    shop.write("set/a.jsonl", "{\"text\": \"a\"}\n");
    shop.write("set/b.csv", "text\nb\n");
    let files = |path: &str| format!("configs:\n- config_name: x\n  data_files: {path:?}\n");
    for path in ["../outside.jsonl", "/etc/passwd", "hf://datasets/a/b.jsonl", "x/../../outside.jsonl"] {
        refused(card(&files(path)), &["set", path, "leads out of the folder"]);
    }
    refused(card(&files("c/*.jsonl")), &["configuration `x`", "`c/*.jsonl`", "finds no file"]);
    refused(card(&files("**a")), &["is no pattern"]);
    refused(card(&files("*.csv")), &["b.csv", "not read", ".parquet"]);
    refused(card("configs: {a: b}\n"), &["README.md", "`configs` is no list"]);
    let two = "configs:\n- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: a.jsonl\n";
    refused(card(two), &["the configurations `x`, `y`", "name one"]);
    let named = "configs:\n- config_name: x\n  data_files: b.csv\n- config_name: default\n  data_files: a.jsonl\n";
    assert!(card(named).is_ok() && card(&files("a.jsonl")).is_ok());
    let splits = "data_files: [{split: train, path: a.jsonl}, {split: test, path: \"*.jsonl\"}]";
    shop.write("set/README.md", &format!("---\nconfigs:\n- config_name: x\n  {splits}\n---\n"));
    refused(of(&shop.path("set"), ", held_out = 'test'"), &["a.jsonl is in both splits, `train` and `test`"]);
    // Notes are no data set, whatever their first lines are.
    shop.write("notes/README.md", "---\ntitle: Notes\n---\nText.\n");
    shop.write("notes/a.txt", "More text.\n");
    assert_eq!(of(&shop.path("notes"), "").unwrap().manifest.sources[0].documents, 2);
    shop.write("notes/README.md", "---\na: [\n---\nText.\n");
    assert_eq!(of(&shop.path("notes"), "").unwrap().manifest.sources[0].documents, 2);
    refused(of(&shop.path("nowhere"), ", split = 'train'"), &["nowhere", "matches no file", "nearest existing folder"]);
    shop.write("empty/LICENSE", "text");
    refused(of(&shop.path("empty"), ", split = 'train'"), &["it has no data"]);
    fs::remove_file(sharded.join("data/train-00001-of-00002.parquet")).unwrap();
    refused(of(&sharded, ", split = 'train'"), &["sharded", "data/train-00001-of-00002 is missing", "name the files"]);
    assert!(of(&sharded, ", split = 'validation'").is_ok(), "others are whole");
    assert!(of(&sharded.join("data/train-00000-of-00002.parquet"), "").is_ok(), "a shard may be read alone");
}

/// Pages of other columns may be anything: they are not looked at.
#[test]
fn only_the_wanted_column_is_read() {
    let shop = Workshop::new();
    let folder = copied(&shop, "sharded");
    let path = folder.join("data/train-00000-of-00002.parquet");
    let reader = parquet::file::reader::SerializedFileReader::new(fs::File::open(&path).unwrap()).unwrap();
    let group = parquet::file::reader::FileReader::metadata(&reader).row_group(0).clone();
    let mut bytes = fs::read(&path).unwrap();
    for column in group.columns().iter().filter(|column| column.column_path().string() != "text") {
        let (start, length) = column.byte_range();
        bytes[start as usize..(start + length) as usize].fill(0xff);
    }
    fs::write(&path, &bytes).unwrap();
    let source = |field: &str| format!("{{ path = {folder:?}, field = '{field}' }}");
    let found = texts(&corpus(&shop, &source("text"), "held_out = 0").unwrap(), Split::Train);
    assert!(found.contains("text 1 of train shard 0"), "{found:?}");
    refused(corpus(&shop, &source("id"), "held_out = 0"), &["train-00000-of-00002.parquet"]);
}

/// A folder as a cache of the hub has it: `snapshots/REVISION/...` with links into `blobs`.
fn cached(shop: &Workshop, from: &Path, name: &str) -> PathBuf {
    let (cache, mut number) = (shop.path(name), 0);
    let snapshot = cache.join("snapshots/0123abcd");
    fs::create_dir_all(cache.join("blobs")).unwrap();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        fs::create_dir_all(snapshot.join(&folder)).unwrap();
        for entry in fs::read_dir(from.join(&folder)).unwrap() {
            let own = folder.join(entry.unwrap().file_name());
            if from.join(&own).is_dir() {
                folders.push(own);
                continue;
            }
            number += 1;
            fs::copy(from.join(&own), cache.join(format!("blobs/{number:040x}"))).unwrap();
            let up = "../".repeat(1 + own.components().count());
            symlink(format!("{up}blobs/{number:040x}"), snapshot.join(&own)).unwrap();
        }
    }
    snapshot
}

#[test]
fn caches_of_the_hub_are_read_where_they_lie() {
    let shop = Workshop::new();
    let folder = copied(&shop, "sharded");
    let snapshot = cached(&shop, &golden("sharded"), "datasets--a--b");
    let of = |folder: &Path| {
        let source = format!("{{ path = {folder:?}, held_out = 'validation' }}");
        let corpus = corpus(&shop, &source, "").unwrap();
        Split::ALL.map(|split| texts(&corpus, split))
    };
    assert_eq!(of(&snapshot), of(&folder));
    // And by the folder around it, which says what revision is meant.
    let whole = snapshot.ancestors().nth(2).unwrap();
    fs::create_dir_all(whole.join("refs")).unwrap();
    fs::write(whole.join("refs/main"), "0123abcd\n").unwrap();
    assert_eq!(of(whole), of(&folder));
    // Messages have the names of files, not of blobs.
    let source = format!("{{ path = {snapshot:?}, field = 'body' }}");
    refused(corpus(&shop, &source, ""), &["data/train-00000-of-00002.parquet has no column"]);

    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/golden/huggingface/llama");
    let snapshot = cached(&shop, &model, "models--a--b");
    let told = |folder: &Path| shop.succeeds(&format!("audit {}", folder.display())).out;
    assert_eq!(told(&snapshot), told(&model));
    shop.succeeds(&format!("convert {} imported", snapshot.display()));
    // Blobs are a cache's: beside a folder of another kind they are files like any other.
    let cache = |name: &str| shop.path("models--a--b").join(name);
    fs::rename(cache("snapshots"), cache("others")).unwrap();
    shop.fails(&format!("audit {}", cache("others/0123abcd").display()), 1, &["a link out of the folder"]);
    fs::rename(cache("others"), cache("snapshots")).unwrap();
    // A link to anything else is still refused, from within a cache too.
    let file = snapshot.join("model.safetensors");
    let elsewhere = shop.path("models--a--b/elsewhere");
    fs::copy(&file, &elsewhere).unwrap();
    fs::remove_file(&file).unwrap();
    symlink("../../elsewhere", &file).unwrap();
    shop.fails(&format!("audit {}", snapshot.display()), 1, &["model.safetensors", "a link out of the folder"]);
    let other = shop.path("models--a--c/blobs");
    fs::create_dir_all(&other).unwrap();
    fs::rename(&elsewhere, other.join("0")).unwrap();
    fs::remove_file(&file).unwrap();
    symlink("../../../models--a--c/blobs/0", &file).unwrap();
    shop.fails(&format!("audit {}", snapshot.display()), 1, &["model.safetensors", "a link out of the folder"]);
}

/// A column of conversations, with a split to hold out.
#[test]
fn a_chat_data_set_is_read() {
    let shop = Workshop::new();
    let folder = copied(&shop, "chats");
    let tokenizer = golden("../chat/chatml/tokenizer.json");
    let source = format!("{{ path = {folder:?}, chat = true, split = 'train_sft', held_out = 'test_sft' }}");
    let text = format!("sources = [{source}]\ncache = {:?}\ntokenizer = {tokenizer:?}", shop.path("cache"));
    let corpus = prepare(&toml::from_str(&text).unwrap(), 600, &|_| {}).unwrap();
    assert_eq!((corpus.manifest.train.documents, corpus.manifest.held_out.documents), (5, 1));
    let first = corpus.split(Split::HeldOut);
    let train = corpus.split(Split::Train);
    assert_eq!(first.read(first.document(0)).unwrap(), train.read(train.document(0)).unwrap());
}
