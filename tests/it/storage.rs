//! Checkpoints of several files, and checkpoints that are written while training goes on: the same bytes as of one file, and
//! as when training waits.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use guildhall::checkpoint::{
    Destination, Error, Extra, OpenCheckpoint, TensorKind, TrainingProgress, WritePace, WriteProgress, Writing,
    load_model, load_optimizer, open, retyped, save, snapshot_bytes,
};
use guildhall::model::Sizes;
use guildhall::optim::OffloadTarget;
use guildhall::parallel::Zero;
use guildhall::train::Trainer;
use guildhall_tensor::{Cause, Dtype};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::program::{reseal, sealed};
use crate::tiny::{Recipe, gpt2, mixtral};
use crate::world::{MESHES, ONE, SLICED, Shape, on_mesh, shape, sliced};
use crate::zero::{Files, Keeping, contents, keeping, ways};

const KINDS: [&str; 2] = ["model", "optimizer"];
/// Some tensors have more bytes alone.
const SMALL: u64 = 2000;

fn recipe(sizes: Sizes) -> Recipe {
    Recipe { sizes, rows: 5, micro_batch: 4 }
}

fn extra(step: u64) -> Extra {
    let progress = TrainingProgress { step, tokens: 40 * step, seconds: 1.5, loss_trend: None };
    Extra {
        progress,
        data_fingerprint: "rows".to_owned(),
        files: vec![("config.toml".to_owned(), b"x = 1\n".to_vec())],
    }
}

fn write(to: Destination, trainer: &mut Trainer, step: u64) -> PathBuf {
    let Trainer { model, optimizer, mesh, .. } = trainer;
    save(to, model, optimizer, mesh, extra(step)).unwrap()
}

fn in_files_of(run: &Path, file_bytes: u64) -> Destination<'_> {
    Destination { file_bytes, ..Destination::of(run) }
}

fn read(folder: &Path, trainer: &mut Trainer) -> Result<(), Error> {
    let source = open(folder)?;
    let source = retyped(&source, &mut trainer.model, &trainer.optimizer, &trainer.mesh)?;
    load_model(&source, &mut trainer.model)?;
    load_optimizer(&source, &mut trainer.model, &mut trainer.optimizer)
}

// --- several files ----------------------------------------------------------------------------------------------

/// What two steps on `shape` come to, in files of at most so many bytes.
fn written(sizes: &Sizes, shape: Shape, file_bytes: u64) -> (tempfile::TempDir, PathBuf) {
    let (run, recipe) = (tempfile::tempdir().unwrap(), recipe(sizes.clone()));
    let folders = on_mesh(shape, |rank, mesh| {
        let mut trainer = keeping(Zero::Off).trainer(&recipe, rank, mesh);
        recipe.train(&mut trainer, 1..=2);
        write(in_files_of(run.path(), file_bytes), &mut trainer, 2)
    });
    (run, folders[0].clone())
}

/// The files of a kind in a folder, by name.
fn of_kind<'a>(files: &'a Files, kind: &str) -> Vec<(&'a String, &'a Vec<u8>)> {
    files.iter().filter(|(name, _)| name.starts_with(kind) && name.ends_with(".safetensors")).collect()
}

/// Every tensor of a kind as another reader sees it: type, shape and bytes.
fn tensors(files: &Files, kind: &str) -> BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for (file, bytes) in of_kind(files, kind) {
        for (name, tensor) in SafeTensors::deserialize(bytes).unwrap().tensors() {
            let value = (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
            assert!(all.insert(name.clone(), value).is_none(), "{name} is in {file} and in another");
        }
    }
    all
}

#[test]
fn several_files_hold_what_one_does_whichever_mesh_writes() {
    for (sizes, wrote) in [(Sizes { dtype: Dtype::Bf16, ..mixtral() }, shape(2, 2)), (gpt2(), sliced(4, 2, 2))] {
        let (_run, one) = written(&sizes, wrote, u64::MAX);
        let one = contents(&one);
        for file_bytes in [1, SMALL, 12_000] {
            let (_run, folder) = written(&sizes, wrote, file_bytes);
            let several = contents(&folder);
            for kind in KINDS {
                assert!(tensors(&several, kind) == tensors(&one, kind), "{kind} in files of {file_bytes}");
                expect_index(&several, kind, file_bytes);
            }
            for shape in MESHES.into_iter().chain(SLICED) {
                let run = tempfile::tempdir().unwrap();
                let again = on_mesh(shape, |rank, mesh| {
                    let mut trainer = keeping(Zero::Off).trainer(&recipe(sizes.clone()), rank, mesh);
                    read(&folder, &mut trainer).unwrap();
                    write(in_files_of(run.path(), file_bytes), &mut trainer, 2)
                });
                assert!(contents(&again[0]) == several, "{shape:?}, files of {file_bytes}");
            }
        }
    }
}

/// That the index of a kind says where every tensor is, and that files are as small as they are to be.
fn expect_index(files: &Files, kind: &str, file_bytes: u64) {
    let own = of_kind(files, kind);
    assert!(own.len() > 1, "{} files of {file_bytes}", own.len());
    let index: Value = serde_json::from_slice(&files[&format!("{kind}.safetensors.index.json")]).unwrap();
    let (mut map, mut total) = (BTreeMap::new(), 0);
    for (number, (name, bytes)) in (1..).zip(&own) {
        assert_eq!(**name, format!("{kind}-{number:05}-of-{:05}.safetensors", own.len()));
        let read = SafeTensors::deserialize(bytes).unwrap();
        assert!(bytes.len() as u64 <= file_bytes || read.len() == 1, "{name} has {} bytes", bytes.len());
        map.extend(read.names().into_iter().map(|tensor| (tensor.to_owned(), (*name).clone())));
        total += read.tensors().iter().map(|(_, tensor)| tensor.data().len()).sum::<usize>();
    }
    assert_eq!(index, json!({ "metadata": { "total_size": total }, "weight_map": map }));
}

fn files_of(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.to_string_lossy().ends_with(ending)).collect();
    paths.sort();
    paths
}

fn change_index(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut index);
    fs::write(path, index.to_string()).unwrap();
}

fn change_list(folder: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(manifest["files"].as_object_mut().unwrap());
    fs::write(path, sealed(manifest)).unwrap();
}

/// A file of the model with other tensors.
fn rewrite(folder: &Path, file: &Path, change: impl FnOnce(&mut BTreeMap<String, (Vec<usize>, Vec<u8>)>)) {
    let bytes = fs::read(folder.join(file)).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = read.tensors().into_iter();
    let mut tensors = tensors.map(|(name, view)| (name, (view.shape().to_vec(), view.data().to_vec()))).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (shape, data))| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap())
    });
    fs::write(folder.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// With checksums that fit.
#[test]
fn an_index_and_files_that_contradict_each_other_are_refused() {
    let (_run, folder) = written(&mixtral(), ONE, 12_000);
    let whole = contents(&folder);
    let [first, second] = [1, 2].map(|number| files_of(&folder, ".safetensors")[number - 1].clone());
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let (one, two) = (name(&first), name(&second));
    let moved = || {
        let index: Value = serde_json::from_slice(&whole["model.safetensors.index.json"]).unwrap();
        let map = index["weight_map"].as_object().unwrap();
        map.iter().find(|(_, file)| **file == one).unwrap().0.clone()
    };
    let tensor = moved();
    let attacks: Vec<(&str, Box<dyn Fn()>, &str)> = vec![
        (
            "a tensor in another file than the index says",
            { Box::new(|| change_index(&folder, |index| index["weight_map"][&tensor] = two.clone().into())) },
            "which by the index is in",
        ),
        (
            "a tensor that the index does not list",
            {
                Box::new(|| {
                    change_index(&folder, |index| drop(index["weight_map"].as_object_mut().unwrap().remove(&tensor)))
                })
            },
            "which the index does not list",
        ),
        (
            "a tensor that is nowhere",
            { Box::new(|| change_index(&folder, |index| index["weight_map"]["more"] = one.clone().into())) },
            "it has no more, which by the index is in it",
        ),
        (
            "a tensor in two files",
            { Box::new(|| rewrite(&folder, &second, |all| drop(all.insert(tensor.clone(), (vec![1], vec![0; 4]))))) },
            "which by the index is in",
        ),
        (
            "a tensor more in a file",
            {
                Box::new(|| rewrite(&folder, &second, |all| drop(all.insert("more".to_owned(), (vec![1], vec![0; 4])))))
            },
            "it has more, which the index does not list",
        ),
        (
            "another size in all",
            { Box::new(|| change_index(&folder, |index| index["metadata"]["total_size"] = 4.into())) },
            "its total_size is 4",
        ),
        (
            "a file outside",
            {
                Box::new(|| {
                    let outside = format!("../{}/{one}", name(&folder));
                    change_index(&folder, |index| {
                        let map = index["weight_map"].as_object_mut().unwrap();
                        map.values_mut().filter(|file| **file == one).for_each(|file| *file = outside.clone().into());
                    });
                })
            },
            "where model-00001-of-",
        ),
        (
            "a file that the manifest does not list",
            { Box::new(|| change_list(&folder, |files| drop(files.remove(&one)))) },
            "its manifest does not list it",
        ),
        (
            "an index that the manifest does not list",
            { Box::new(|| change_list(&folder, |files| drop(files.remove("model.safetensors.index.json")))) },
            "no index says what is in it",
        ),
        (
            "one file beside several",
            {
                Box::new(|| {
                    fs::copy(&first, folder.join("model.safetensors")).unwrap();
                    change_list(&folder, |files| {
                        drop(files.insert("model.safetensors".to_owned(), files[&one].clone()))
                    });
                })
            },
            "no index says what is in it",
        ),
        (
            "a file of another count",
            {
                Box::new(|| {
                    let more = one.replace("00001-of", "00001-of-0");
                    fs::copy(&first, folder.join(&more)).unwrap();
                    change_list(&folder, |files| drop(files.insert(more, files[&one].clone())));
                })
            },
            "no index says what is in it",
        ),
        (
            "a link that leads out",
            {
                Box::new(|| {
                    fs::remove_file(&second).unwrap();
                    symlink("/dev/zero", &second).unwrap();
                })
            },
            "it is no regular file",
        ),
        (
            "files with each other's names",
            {
                Box::new(|| {
                    fs::write(&first, &whole[&two]).unwrap();
                    fs::write(&second, &whole[&one]).unwrap();
                })
            },
            "which by the index is in",
        ),
        ("a file that is gone", Box::new(|| fs::remove_file(&second).unwrap()), "No such file"),
        (
            "no JSON",
            { Box::new(|| fs::write(folder.join("model.safetensors.index.json"), "{").unwrap()) },
            "it is no index",
        ),
    ];
    for (what, attack, words) in &attacks {
        attack();
        let is_file = |name: &String| folder.join(name).metadata().is_ok_and(|metadata| metadata.is_file());
        if whole.keys().all(is_file) {
            reseal(&folder);
        }
        let error = opened(&folder).expect_err(what);
        assert!(error.to_string().contains(words), "{what}: {error}");
        fs::remove_dir_all(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        whole.iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).unwrap());
    }
    opened(&folder).expect("everything is as it was");
}

fn opened(folder: &Path) -> Result<OpenCheckpoint, Error> {
    let source = open(folder)?;
    source.tensors(TensorKind::Model)?;
    source.tensors(TensorKind::Optimizer)?;
    Ok(source)
}

// --- beside the steps -------------------------------------------------------------------------------------------

/// Writes step 2 of a run while the steps up to `last` are taken; looks between steps whether all are ready, as a run does.
fn beside(run: &Path, recipe: &Recipe, trainer: &mut Trainer, last: u64) -> PathBuf {
    let to = in_files_of(run, SMALL);
    let writing = {
        let Trainer { device, model, optimizer, mesh, .. } = &mut *trainer;
        Writing::of_snapshot(to, device, (model, optimizer, mesh), extra(2)).unwrap()
    };
    let held = trainer.device.account().live(Cause::Checkpoint);
    assert!(held <= snapshot_bytes(&mut trainer.model, &trainer.optimizer, &trainer.mesh));
    let mut progress = WriteProgress::UnderWay(Box::new(writing));
    for step in 3..=last {
        recipe.train(trainer, step..=step);
        if let WriteProgress::UnderWay(mut writing) = progress {
            let behind = trainer.mesh.world.all_gather_u64(&[u64::from(!writing.is_ready())]).unwrap();
            let all_ready = behind.iter().all(|&behind| behind == 0);
            progress = match all_ready {
                true => writing.advance(&trainer.mesh).unwrap(),
                false => WriteProgress::UnderWay(writing),
            };
        }
    }
    let folder = match progress {
        WriteProgress::UnderWay(writing) => writing.finish(&trainer.mesh).unwrap(),
        WriteProgress::Whole(folder) => folder,
    };
    assert_eq!(trainer.device.account().live(Cause::Checkpoint), 0, "the copy is gone");
    folder
}

/// The state of step 2, written then, and while steps 3 to 6 are taken: byte for byte.
fn check_beside(recipe: &Recipe, shape: Shape, keeping: &Keeping) {
    let [waited, gone_on] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let steps = 6;
    let want = on_mesh(shape, |rank, mesh| {
        let mut trainer = keeping.trainer(recipe, rank, mesh);
        recipe.train(&mut trainer, 1..=2);
        let folder = write(in_files_of(waited.path(), SMALL), &mut trainer, 2);
        recipe.train(&mut trainer, 3..=steps);
        (folder, write(in_files_of(waited.path(), SMALL), &mut trainer, steps))
    });
    let got = on_mesh(shape, |rank, mesh| {
        let mut trainer = keeping.trainer(recipe, rank, mesh);
        recipe.train(&mut trainer, 1..=2);
        let folder = beside(gone_on.path(), recipe, &mut trainer, steps);
        (folder, write(in_files_of(gone_on.path(), SMALL), &mut trainer, steps))
    });
    assert!(contents(&got[0].0) == contents(&want[0].0), "{shape:?}, {keeping:?}: another state was written");
    assert!(contents(&got[0].1) == contents(&want[0].1), "{shape:?}, {keeping:?}: training went on otherwise");
}

#[test]
fn a_copy_is_written_as_the_state_was_on_every_mesh() {
    for sizes in [mixtral(), Sizes { dtype: Dtype::Bf16, ..gpt2() }] {
        let recipe = recipe(sizes);
        for shape in MESHES.into_iter().chain(SLICED) {
            check_beside(&recipe, shape, &keeping(Zero::Off));
        }
    }
}

/// Each place and stage on one of two meshes.
#[test]
fn a_copy_is_written_as_the_state_was_wherever_it_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(Sizes { dtype: Dtype::Bf16, ..mixtral() });
    for (number, keeping) in ways(folder.path()).into_iter().enumerate() {
        check_beside(&recipe, [shape(2, 1), sliced(4, 2, 2)][number % 2], &keeping);
    }
}

/// A copy takes the bytes that were predicted, of which those that are written come to as much but for rows dealt out whole.
#[test]
fn a_copy_takes_what_was_predicted() {
    for (shape, offload) in
        [(ONE, OffloadTarget::None), (shape(4, 2), OffloadTarget::Host), (sliced(4, 2, 2), OffloadTarget::None)]
    {
        let (run, recipe) = (tempfile::tempdir().unwrap(), recipe(mixtral()));
        let ranks = on_mesh(shape, |rank, mesh| {
            let keeping = Keeping { offload: offload.clone(), ..keeping(Zero::Optimizer) };
            let mut trainer = keeping.trainer(&recipe, rank, mesh);
            recipe.train(&mut trainer, 1..=1);
            let before = trainer.device.account().live_total();
            let Trainer { device, model, optimizer, mesh, .. } = &mut trainer;
            let to = Destination { pace: WritePace::InTurn, ..Destination::of(run.path()) };
            let writing = Writing::of_snapshot(to, device, (model, optimizer, mesh), extra(1)).unwrap();
            let held = device.account().live_total() - before;
            (held, snapshot_bytes(model, optimizer, mesh), writing.finish(mesh).unwrap())
        });
        assert!(ranks.iter().all(|(held, predicted, _)| held == predicted));
        let files = contents(&ranks[0].2);
        let bytes: usize = KINDS.iter().flat_map(|kind| tensors(&files, kind).into_values()).map(|t| t.2.len()).sum();
        let held: u64 = ranks.iter().map(|(held, ..)| held).sum();
        // Shares of a slice are of parts of rows, which are dealt out whole.
        let most = if shape.tensor > 1 { 3 * bytes as u64 } else { bytes as u64 };
        assert!((bytes as u64..=most).contains(&held), "{shape:?}: {held} for {bytes}");
    }
}

/// What is dropped is no checkpoint, and the next write clears it away.
#[test]
fn a_checkpoint_that_is_given_up_is_none() {
    let (run, recipe) = (tempfile::tempdir().unwrap(), recipe(mixtral()));
    on_mesh(shape(2, 2), |rank, mesh| {
        let mut trainer = keeping(Zero::Off).trainer(&recipe, rank, mesh);
        recipe.train(&mut trainer, 1..=1);
        for stages in 0..4 {
            let Trainer { device, model, optimizer, mesh, .. } = &mut trainer;
            let to = Destination::of(run.path());
            let writing = Writing::of_snapshot(to, device, (model, optimizer, mesh), extra(1)).unwrap();
            let mut progress = WriteProgress::UnderWay(Box::new(writing));
            for _ in 0..stages {
                let WriteProgress::UnderWay(writing) = progress else { unreachable!("there is one stage more") };
                progress = writing.advance(mesh).unwrap();
            }
            drop(progress);
            assert_eq!(trainer.device.account().live(Cause::Checkpoint), 0);
            // Published by then, or not: whole or none.
            let newest = guildhall::checkpoint::newest(run.path()).unwrap();
            assert!(newest.is_none() || stages == 3, "{newest:?} after {stages} stages");
            newest.into_iter().for_each(|folder| drop(open(&folder).unwrap()));
            trainer.mesh.world.barrier().unwrap();
        }
        write(Destination::of(run.path()), &mut trainer, 1);
    });
    let left = fs::read_dir(run.path().join("checkpoints")).unwrap();
    let mut left: Vec<String> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["latest", "step-000001"]);
}

/// Every rank learns of it where it would begin the next stage, and nothing has a checkpoint's name.
#[test]
fn all_ranks_learn_that_a_copy_cannot_be_written() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join("checkpoints"), "a file, not a folder").unwrap();
    let recipe = recipe(mixtral());
    let errors = on_mesh(shape(2, 2), |rank, mesh| {
        let mut trainer = keeping(Zero::Off).trainer(&recipe, rank, mesh);
        let Trainer { device, model, optimizer, mesh, .. } = &mut trainer;
        let to = Destination::of(run.path());
        let writing = Writing::of_snapshot(to, device, (model, optimizer, mesh), extra(1)).unwrap();
        writing.finish(mesh).expect_err("there is no folder")
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(matches!(error, Error::OfRank { rank: 0, is_here, .. } if *is_here == (rank == 0)), "{error:?}");
    }
}
