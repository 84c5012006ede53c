//! Every recipe trains: two steps of each, on less text and fewer tokens than it asks for.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::program::{Finished, PROGRAM, ended};

/// A compiled catalogue of these messages and translations, as msgfmt writes it.
fn catalogue(pairs: &[(String, String)]) -> Vec<u8> {
    let header = (String::new(), "Content-Type: text/plain; charset=UTF-8\n".to_owned());
    let mut pairs = [&[header], pairs].concat();
    pairs.sort();
    let tables = 28 + 16 * pairs.len();
    let (mut head, mut texts) = (Vec::new(), Vec::new());
    for number in [0x9504_12de, 0, pairs.len(), 28, 28 + 8 * pairs.len(), 0, 0] {
        head.extend((number as u32).to_le_bytes());
    }
    for side in [|pair: &(String, String)| pair.0.clone(), |pair: &(String, String)| pair.1.clone()] {
        for text in pairs.iter().map(side) {
            head.extend([text.len(), tables + texts.len()].map(|n| (n as u32).to_le_bytes()).concat());
            texts.extend([text.as_bytes(), b"\0"].concat());
        }
    }
    [head, texts].concat()
}

/// Catalogues of three languages, with enough messages for the recipe's `min_pairs`, and of one with too few.
fn write_catalogues(folder: &Path) {
    let (verbs, things) =
        (["open", "close", "print", "send", "delete"], ["file", "window", "letter", "page", "folder"]);
    let message = |n: usize| {
        let word = |n: usize| (0..3).map(|place| char::from(b'a' + (n >> (4 * place)) as u8 % 16)).collect::<String>();
        format!("{} the {} called {}", verbs[n % 5], things[n / 5 % 5], word(n))
    };
    for (language, count) in [("de", 1400), ("fr", 1300), ("pt_BR", 1250), ("fi", 40)] {
        let pair = |n: usize| (message(n), format!("{language} {}", message(n).replace("the", "das")));
        let pairs: Vec<_> = (0..count).map(pair).collect();
        let folder = folder.join(language).join("LC_MESSAGES");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("program.mo"), catalogue(&pairs)).unwrap();
    }
}

#[test]
fn every_recipe_trains_for_two_steps() {
    train_every_recipe("cpu", 2);
}

/// Every kernel runs a second time, on the CPU, to be compared, and a second step has no kernel that the first has not.
#[test]
fn every_recipe_trains_on_accelerators_kernels() {
    train_every_recipe("simulated", 1);
}

fn train_every_recipe(backend: &str, steps: u64) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let within = |folder: &str| root.join(folder).read_dir().unwrap().map(|entry| entry.unwrap().path());
    let recipes = within("recipes").chain(within("recipes/modes"));
    let recipes: Vec<_> = recipes.filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
    assert!(!recipes.is_empty());
    // A machine may have no catalogues of its own.
    write_catalogues(&folder.path().join("locale"));
    for recipe in recipes {
        let name = recipe.file_stem().unwrap().to_string_lossy().into_owned();
        let run = folder.path().join(&name);
        let mut train = Command::new(PROGRAM);
        train
            .current_dir(root)
            .env("GUILDHALL_CATALOGUES", folder.path().join("locale"))
            .arg("train")
            .arg(&recipe)
            .args(["--backend", backend, "--set", "train.batch_tokens=256"])
            .args(["--set", &format!("train.steps={steps}"), "--set", "train.warmup_steps=1"])
            .args(["--set", &format!("train.eval_every={steps}"), "--set", "train.eval_rows=2"])
            .args(["--set", "data.max_bytes=400000"])
            .args(["--set", "data.held_out=0.1"])
            .args(["--set", &format!("run.dir={}", run.display())])
            .args(["--set", &format!("data.cache={}", folder.path().join("cache").display())]);
        let Finished { code, err: told, .. } = ended(train);
        assert_eq!(code, Some(0), "{name}: {told}");
        if name == "translate" {
            for words in
                ["4 languages with texts", "en-de", "pt_BR-en", "fewer than min_pairs pairs: translation en-fi"]
            {
                assert!(told.contains(words), "no {words:?} in {told}");
            }
        }
        assert!(run.join("checkpoints/latest/manifest.json").is_file(), "{name} left no checkpoint");
    }
}
