//! Every recipe trains: two steps of each, on less text and fewer tokens than it asks for.

use std::path::Path;
use std::process::Command;

use crate::program::PROGRAM;

#[test]
fn every_recipe_trains_for_two_steps() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let within = |folder: &str| root.join(folder).read_dir().unwrap().map(|entry| entry.unwrap().path());
    let recipes = within("recipes").chain(within("recipes/modes"));
    let recipes: Vec<_> = recipes.filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
    assert!(!recipes.is_empty());
    for recipe in recipes {
        let name = recipe.file_stem().unwrap().to_string_lossy().into_owned();
        let run = folder.path().join(&name);
        let output = Command::new(PROGRAM)
            .current_dir(root)
            .arg("train")
            .arg(&recipe)
            .args(["--set", "train.steps=2", "--set", "train.warmup_steps=1", "--set", "train.batch_tokens=512"])
            .args(["--set", "train.eval_every=2", "--set", "train.eval_rows=2", "--set", "data.max_bytes=400000"])
            .args(["--set", "data.held_out=0.1"])
            .args(["--set", &format!("run.dir={}", run.display())])
            .args(["--set", &format!("data.cache={}", folder.path().join("cache").display())])
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(run.join("checkpoints/latest/manifest.json").is_file(), "{name} left no checkpoint");
    }
}
