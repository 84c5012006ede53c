//! Stopping and continuing leaves no trace in the numbers, the mesh leaves none in the files, and a checkpoint that is
//! not whole or not the model's is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use guildhall::checkpoint::{
    CHECKPOINTS, CheckpointManifest, Destination, ElementType, Error, Extra, FileLayout, LATEST, NewestWhole,
    OpenCheckpoint, TensorKind, TrainingProgress, load_model, load_optimizer, newest, open, open_newest_whole, save,
    step_folder,
};
use guildhall::model::Sizes;
use guildhall::moe::BalanceScope;
use guildhall::optim::Settings;
use guildhall::train::{StepReport, Trainer};
use guildhall_tensor::{Dtype, Part, Recompute};
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};

use crate::gates::biased;
use crate::program::reseal;
use crate::tiny::{HYPER, Recipe, Tensors, gpt2, mixtral, same_bits, state, union};
use crate::world::{MESHES, ONE, SLICED, Shape, on_mesh, shape, sliced};

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const MANIFEST: &str = "manifest.json";
const CONFIG: &str = "config.toml";

fn recipe(sizes: Sizes) -> Recipe {
    Recipe { sizes, rows: 5, micro_batch: 4 }
}

fn extra(step: u64) -> Extra {
    let progress = TrainingProgress { step, tokens: 40 * step, seconds: 1.5, loss_trend: None };
    let files = vec![(CONFIG.to_owned(), b"answer = 42\n".to_vec())];
    Extra { progress, data_fingerprint: "rows".to_owned(), files }
}

fn write(run: &Path, trainer: &mut Trainer, step: u64, keep: usize) -> Result<PathBuf, Error> {
    write_in(u64::MAX, run, trainer, step, keep)
}

/// In files of at most so many bytes.
fn write_in(file_bytes: u64, run: &Path, trainer: &mut Trainer, step: u64, keep: usize) -> Result<PathBuf, Error> {
    let Trainer { model, optimizer, mesh, .. } = trainer;
    let to = Destination { keep, file_bytes, ..Destination::of(run) };
    save(to, model, optimizer, mesh, extra(step))
}

/// One file of a kind, and several.
const SIZES_OF_FILES: [u64; 2] = [u64::MAX, 8000];

fn read(folder: &Path, trainer: &mut Trainer) -> Result<(), Error> {
    let source = open(folder)?;
    load_model(&source, &mut trainer.model)?;
    load_optimizer(&source, &mut trainer.model, &mut trainer.optimizer)
}

#[track_caller]
fn assert_same(what: &str, a: &Tensors, b: &Tensors) {
    assert!(a.keys().eq(b.keys()), "{what}: {:?} instead of {:?}", a.keys(), b.keys());
    for (name, values) in a {
        assert!(same_bits(values, &b[name]), "{what}: {name} differs");
    }
}

/// A trainer per rank, handed to `f`, whose states are put together.
fn with_trainers<T: Send>(recipe: &Recipe, shape: Shape, f: impl Fn(&mut Trainer) -> T + Sync) -> (Vec<T>, Tensors) {
    let ranks = on_mesh(shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        (f(&mut trainer), state(&mut trainer))
    });
    let (values, states): (Vec<T>, Vec<Tensors>) = ranks.into_iter().unzip();
    (values, union(states))
}

#[test]
fn stopping_and_continuing_changes_no_bit() {
    let mut dropping = gpt2();
    dropping.model.dropout = 0.2;
    // A gate that remembers loads from step to step.
    let mut remembering = mixtral();
    let moe = remembering.moe.as_mut().expect("experts");
    (moe.gate, moe.balance_scope) = (biased(0.05), Some(BalanceScope::GlobalBatch));
    for sizes in [mixtral(), Sizes { dtype: Dtype::Bf16, ..mixtral() }, dropping, remembering] {
        let recipe = recipe(sizes);
        for shape in [ONE, shape(2, 2), shape(4, 2)] {
            check_continuing(&recipe, shape);
        }
    }
}

/// The part before the stop runs blocks twice, the part after it operations; at once, nothing runs twice.
#[test]
fn stopping_and_continuing_with_recomputation_changes_no_bit() {
    let recipe = recipe(mixtral());
    for shape in [ONE, shape(4, 2)] {
        let run = tempfile::tempdir().unwrap();
        let (at_once, want) = with_trainers(&recipe, shape, |trainer| recipe.train(trainer, 1..=6));
        with_trainers(&recipe, shape, |trainer| {
            trainer.recompute = Recompute::of(vec![Part::Block], true);
            recipe.train(trainer, 1..=3);
            write(run.path(), trainer, 3, 0).unwrap()
        });
        let (continued, got): (Vec<Vec<StepReport>>, _) = with_trainers(&recipe, shape, |trainer| {
            trainer.recompute = Recompute::of(vec![Part::Attention, Part::Experts], true);
            read(&newest(run.path()).unwrap().unwrap(), trainer).unwrap();
            recipe.train(trainer, 4..=6)
        });
        assert_eq!(continued[0], at_once[0][3..], "{shape:?}");
        assert_same(&format!("{shape:?}"), &got, &want);
    }
}

fn check_continuing(recipe: &Recipe, shape: Shape) {
    let run = tempfile::tempdir().unwrap();
    let (at_once, want) = with_trainers(recipe, shape, |trainer| recipe.train(trainer, 1..=6));
    with_trainers(recipe, shape, |trainer| {
        recipe.train(trainer, 1..=3);
        write(run.path(), trainer, 3, 0).unwrap()
    });
    let (continued, got): (Vec<Vec<StepReport>>, _) = with_trainers(recipe, shape, |trainer| {
        read(&newest(run.path()).unwrap().unwrap(), trainer).unwrap();
        recipe.train(trainer, 4..=6)
    });
    assert_eq!(continued[0], at_once[0][3..], "{shape:?}");
    assert_same(&format!("{shape:?}"), &got, &want);
}

/// Every file of a folder.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    files.map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap())).collect()
}

/// A trained state of `sizes`, written by `shape` as step 2 of a new run.
fn written(sizes: &Sizes, shape: Shape) -> (tempfile::TempDir, PathBuf, Tensors) {
    written_in(u64::MAX, sizes, shape)
}

fn written_in(file_bytes: u64, sizes: &Sizes, shape: Shape) -> (tempfile::TempDir, PathBuf, Tensors) {
    let (run, recipe) = (tempfile::tempdir().unwrap(), recipe(sizes.clone()));
    let (folders, state) = with_trainers(&recipe, shape, |trainer| {
        recipe.train(trainer, 1..=2);
        write_in(file_bytes, run.path(), trainer, 2, 0).unwrap()
    });
    (run, folders[0].clone(), state)
}

#[test]
fn any_mesh_reads_what_any_mesh_wrote_and_writes_it_again() {
    let cases =
        [(Sizes { dtype: Dtype::Bf16, ..mixtral() }, shape(2, 2)), (gpt2(), shape(2, 2)), (gpt2(), sliced(4, 2, 2))];
    for (sizes, shape) in cases {
        let (_run, folder, want) = written(&sizes, shape);
        for shape in MESHES.into_iter().chain(SLICED) {
            let other = tempfile::tempdir().unwrap();
            let (again, got) = with_trainers(&recipe(sizes.clone()), shape, |trainer| {
                read(&folder, trainer).unwrap();
                write(other.path(), trainer, 2, 0).unwrap()
            });
            assert_same(&format!("{shape:?}"), &got, &want);
            assert!(contents(&again[0]) == contents(&folder), "{shape:?}: files of the same state differ");
        }
    }
}

/// Calls that write, of the thread that asks, since it began.
fn writes() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").expect("the system counts");
    let count = text.lines().find_map(|line| line.strip_prefix("syscw: ")).expect("calls that write");
    count.parse().expect("a number")
}

/// Of matrices that are cut by columns a rank holds parts of rows: together the ranks write rows.
#[test]
fn slices_are_not_written_row_by_row() {
    let mut sizes = gpt2();
    (sizes.model.d_model, sizes.model.d_ff) = (64, Some(128));
    let recipe = recipe(sizes.clone());
    for (shape, tile) in [(sliced(2, 2, 1), None), (sliced(4, 2, 2), None), (sliced(4, 4, 1), Some(1000))] {
        let run = tempfile::tempdir().unwrap();
        let settings = Settings { tile, ..Settings::from(HYPER) };
        let counts = on_mesh(shape, |rank, mesh| {
            let mut trainer = recipe.trainer_with(rank, mesh, settings.clone()).unwrap();
            recipe.train(&mut trainer, 1..=1);
            let before = writes();
            let folder = write(run.path(), &mut trainer, 1, 0).unwrap();
            (writes() - before, folder)
        });
        let folder = &counts[0].1;
        let layouts = [MODEL, OPTIMIZER].map(|file| FileLayout::read(&folder.join(file)).unwrap());
        let tensors: usize = layouts.iter().map(|layout| layout.entries.len()).sum();
        let elements: u64 =
            layouts.iter().flat_map(|layout| layout.entries.values()).map(|entry| entry.elements()).sum();
        // A tensor is one block for each rank that holds a part of it, or one for each tile, of which the first and the
        // last row may be torn; headers, small files and the manifest besides.
        let tiles = tile.map_or(0, |tile| elements / tile as u64 * (2 * shape.tensor as u64 + 1));
        let allowed = tensors as u64 * 2 + tiles + 12;
        for (count, _) in &counts {
            assert!(*count <= allowed, "{shape:?}: {count} writes of {tensors} tensors");
        }
    }
}

#[test]
fn the_safetensors_crate_reads_the_files() {
    for (dtype, stored) in [(Dtype::F32, safetensors::Dtype::F32), (Dtype::Bf16, safetensors::Dtype::BF16)] {
        let (_run, folder, state) = written(&Sizes { dtype, ..mixtral() }, shape(2, 2));
        let files = contents(&folder);
        let mut names = Vec::new();
        for file in [MODEL, OPTIMIZER] {
            let tensors = SafeTensors::deserialize(&files[file]).unwrap();
            for (name, tensor) in tensors.tensors() {
                let of_router = name.ends_with("gate.weight");
                let full = file == OPTIMIZER || of_router;
                assert_eq!(tensor.dtype(), if full { safetensors::Dtype::F32 } else { stored }, "{name}");
                assert!(same_bits(&floats(&tensor), &state[&name]), "{name}");
                names.push(name);
            }
        }
        names.sort_unstable();
        assert!(names.iter().eq(state.keys()), "{names:?} instead of {:?}", state.keys());
    }
}

fn floats(tensor: &safetensors::tensor::TensorView) -> Vec<f32> {
    match tensor.dtype() {
        safetensors::Dtype::F32 => tensor.data().as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect(),
        // bf16 is the upper half of an f32.
        _ => tensor.data().as_chunks().0.iter().map(|&[a, b]| f32::from_le_bytes([0, 0, a, b])).collect(),
    }
}

#[test]
fn damage_is_noticed() {
    SIZES_OF_FILES.into_iter().for_each(damage_is_noticed_in);
}

fn damage_is_noticed_in(file_bytes: u64) {
    let (_run, folder, _) = written_in(file_bytes, &mixtral(), ONE);
    let damages: [(&str, fn(&mut Vec<u8>)); 6] = [
        ("first byte flipped", |bytes| bytes[0] ^= 1),
        ("middle byte flipped", |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }),
        ("last byte flipped", |bytes| *bytes.last_mut().unwrap() ^= 1),
        ("cut short", |bytes| bytes.truncate(bytes.len() - 1)),
        ("emptied", Vec::clear),
        ("lengthened", |bytes| bytes.push(0)),
    ];
    for (file, whole) in contents(&folder) {
        for (what, damage) in damages {
            let mut bytes = whole.clone();
            damage(&mut bytes);
            fs::write(folder.join(&file), bytes).unwrap();
            let error = open(&folder).expect_err(what);
            let says = matches!(&error, Error::Damaged { path, .. } if path.ends_with(&file));
            assert!(says, "{file} {what}: {error}");
        }
        fs::write(folder.join(&file), whole).unwrap();
    }
    open(&folder).expect("everything is as it was");
}

/// What training never writes, in however many bits.
#[test]
fn values_that_are_not_finite_are_refused() {
    for (dtype, nan) in [(Dtype::F32, &f32::NAN.to_le_bytes()[..]), (Dtype::Bf16, &[0xc0, 0x7f])] {
        for file_bytes in SIZES_OF_FILES {
            let sizes = Sizes { dtype, ..mixtral() };
            let (_run, folder, _) = written_in(file_bytes, &sizes, ONE);
            let set = open(&folder).unwrap().tensors(TensorKind::Model).unwrap();
            // The last, which is not in the first of several files.
            let (name, entry) =
                set.entries().filter(|(_, entry)| entry.dtype == ElementType::of(dtype)).last().expect("a weight");
            let path = folder.join(&set.files[set.entry(name).unwrap().0].0);
            let mut bytes = fs::read(&path).unwrap();
            bytes[entry.start as usize..][..nan.len()].copy_from_slice(nan);
            fs::write(&path, bytes).unwrap();
            reseal(&folder);
            let (errors, _) =
                with_trainers(&recipe(sizes), ONE, |trainer| read(&folder, trainer).expect_err("a NaN").to_string());
            let parts = [&format!("{name} has values that are no finite numbers"), path.to_str().unwrap()];
            assert!(parts.iter().all(|part| errors[0].contains(*part)), "{}", errors[0]);
        }
    }
}

/// The newest checkpoint is cut at every block of a file system: the one before it is found, and says which is damaged.
#[test]
fn a_run_goes_back_behind_a_checkpoint_that_is_cut_anywhere() {
    SIZES_OF_FILES.into_iter().for_each(cut_anywhere);
}

fn cut_anywhere(file_bytes: u64) {
    let run = tempfile::tempdir().unwrap();
    assert!(open_newest_whole(run.path()).unwrap().is_none(), "no checkpoint at all");
    with_trainers(&recipe(mixtral()), ONE, |trainer| {
        [4, 8].map(|step| write_in(file_bytes, run.path(), trainer, step, 2).unwrap())
    });
    let [older, newest] = [4, 8].map(|step| step_folder(run.path(), step));
    let mut cuts = 0;
    for (file, whole) in contents(&newest) {
        let path = newest.join(&file);
        for length in (0..whole.len()).step_by(4096) {
            fs::write(&path, &whole[..length]).unwrap();
            let NewestWhole { whole, damaged } = open_newest_whole(run.path()).unwrap().expect("one is whole");
            assert_eq!(whole.folder, older, "{file} cut to {length} bytes");
            let [(folder, error)] = &damaged[..] else { panic!("{damaged:?}") };
            assert!(*folder == newest && error.fault().contains(&file), "{file} cut to {length} bytes: {error}");
            cuts += 1;
        }
        fs::remove_file(&path).unwrap();
        let found = open_newest_whole(run.path()).unwrap().expect("one is whole");
        assert_eq!((found.whole.folder, found.damaged.len()), (older.clone(), 1), "{file} removed");
        fs::write(&path, &whole).unwrap();
    }
    assert!(cuts > 20, "{cuts} cuts");
    let found = open_newest_whole(run.path()).unwrap().expect("both are whole");
    assert_eq!((found.whole.folder, found.damaged.len()), (newest, 0));
}

/// Without its checksum, a file that is cut short is noticed by its own header.
#[test]
fn files_that_are_cut_short_are_noticed_by_their_header() {
    let (_run, folder, _) = written(&mixtral(), ONE);
    let path = folder.join(MODEL);
    let whole = fs::read(&path).unwrap();
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = FileLayout::read(&path).expect_err("a part is not the whole");
        assert!(matches!(error, Error::Damaged { .. }), "{length} bytes: {error}");
    }
    let (_run, folder, _) = written_in(SIZES_OF_FILES[1], &mixtral(), ONE);
    for (file, whole) in contents(&folder).into_iter().filter(|(file, _)| file.contains(".safetensors")) {
        // Of an index the end of its last line says nothing.
        let last = whole.len() - if file.ends_with(".json") { 2 } else { 1 };
        for length in [0, 7, 8, 100, whole.len() / 2, last] {
            fs::write(folder.join(&file), &whole[..length]).unwrap();
            reseal(&folder);
            let source = open(&folder).unwrap();
            let kinds = [TensorKind::Model, TensorKind::Optimizer];
            let errors: Vec<Error> = kinds.into_iter().filter_map(|kind| source.tensors(kind).err()).collect();
            let says = |error: &Error| matches!(error, Error::Damaged { path, .. } if path.ends_with(&file));
            assert!(errors.len() == 1 && says(&errors[0]), "{file}, {length} bytes: {errors:?}");
        }
        fs::write(folder.join(&file), whole).unwrap();
    }
}

#[test]
fn a_manifest_of_another_format_is_said_to_be_one() {
    let (_run, folder, _) = written(&mixtral(), ONE);
    let text = fs::read_to_string(folder.join(MANIFEST)).unwrap();
    let written = "\"format\": 3";
    assert!(text.contains(written), "{text}");
    // What else a later format says need not make sense.
    for (given, words) in
        [("\"format\": 4, \"parts\": []", "the newer version"), ("\"format\": 0", "the version that wrote")]
    {
        fs::write(folder.join(MANIFEST), sealed(&text.replace(written, given))).unwrap();
        let error = open(&folder).expect_err("another format");
        assert!(matches!(&error, Error::Format { reads: (1, 3), .. }), "{error}");
        let message = error.to_string();
        let parts = [&given[10..11], "this program reads formats 1 to 3", words];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    fs::write(folder.join(MANIFEST), sealed(&text.replace("\"format\": 3,", ""))).unwrap();
    let error = open(&folder).expect_err("no format");
    assert!(matches!(&error, Error::NotACheckpoint { reason, .. } if reason.contains("names no format")), "{error}");
    fs::write(folder.join(MANIFEST), sealed(&text.replace(written, "\"format\": 1"))).unwrap();
    assert_eq!(open(&folder).expect("an older format").manifest.format, 1);
}

/// A manifest's text with the checksum that belongs to it.
fn sealed(text: &str) -> String {
    let (before, after) = text.split_once("\"sha256\": \"").expect("a checksum");
    let without = format!("{before}\"sha256\": \"{}", &after[64..]);
    let digits: String = Sha256::digest(&without).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{before}\"sha256\": \"{digits}{}", &after[64..])
}

#[test]
fn what_is_not_there_is_named() {
    let (run, folder, _) = written(&mixtral(), ONE);
    assert_eq!(open(run.path()).unwrap().folder, folder, "the newest of a run");
    for path in [folder.parent().unwrap().to_owned(), run.path().join("nowhere")] {
        assert!(matches!(open(&path), Err(Error::NotACheckpoint { .. })));
    }
    fs::remove_file(folder.join(OPTIMIZER)).unwrap();
    assert!(matches!(open(&folder), Err(Error::Io { path, .. }) if path.ends_with(OPTIMIZER)));
    fs::remove_file(folder.join(MANIFEST)).unwrap();
    assert!(matches!(open(&folder), Err(Error::NotACheckpoint { .. })));
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let (_run, folder, _) = written(&mixtral(), shape(2, 2));
    let others: [(&str, fn(&mut Sizes)); 6] = [
        ("no tensor model.layers.2.", |sizes| sizes.model.layers = 3),
        ("no tensor model.embed_positions.weight", |sizes| sizes.model.family = gpt2().model.family),
        ("model.embed_tokens.weight", |sizes| sizes.model.vocab += 1),
        ("F32 [31, 16] there, Bf16 [31, 16] in the model", |sizes| sizes.dtype = Dtype::Bf16),
        ("experts.0.w1.weight is F32 [12, 16] there", |sizes| sizes.moe.as_mut().unwrap().d_expert = Some(13)),
        ("gate.weight is F32 [4, 16] there, F32 [8, 16]", |sizes| sizes.moe.as_mut().unwrap().experts = 8.into()),
    ];
    for (reason, change) in others {
        let mut sizes = mixtral();
        change(&mut sizes);
        let (errors, _) = with_trainers(&recipe(sizes), ONE, |trainer| read(&folder, trainer));
        let says = |error: &Error| matches!(error, Error::Mismatch { .. }) && error.to_string().contains(reason);
        assert!(errors[0].as_ref().is_err_and(says), "{reason}: {:?}", errors[0]);
    }
}

/// An optimizer's file without one moment of one weight.
#[test]
fn a_missing_moment_is_named() {
    let (_run, folder, _) = written(&mixtral(), ONE);
    let path = folder.join(OPTIMIZER);
    let whole = fs::read(&path).unwrap();
    let (tensors, lost) = (SafeTensors::deserialize(&whole).unwrap(), "v/model.norm.weight");
    let kept = tensors.tensors().into_iter().filter(|(name, _)| name != lost);
    fs::write(&path, safetensors::serialize(kept, None).unwrap()).unwrap();
    let source = OpenCheckpoint {
        folder: folder.clone(),
        manifest: CheckpointManifest::read(&folder).unwrap(),
        read_as: BTreeMap::new(),
    };
    let (errors, _) = with_trainers(&recipe(mixtral()), ONE, |trainer| {
        load_optimizer(&source, &mut trainer.model, &mut trainer.optimizer)
    });
    let says = |error: &Error| matches!(error, Error::Mismatch { reason, .. } if reason.contains(lost));
    assert!(errors[0].as_ref().is_err_and(says), "{:?}", errors[0]);
}

#[test]
fn only_whole_checkpoints_are_found() {
    let run = tempfile::tempdir().unwrap();
    assert_eq!(newest(run.path()).unwrap(), None);
    let [half, other] = [".partial-step-000008", "step-of-a-user"].map(|name| run.path().join(CHECKPOINTS).join(name));
    for folder in [&half, &other] {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(MODEL), "half").unwrap();
    }
    assert_eq!(newest(run.path()).unwrap(), None);
    with_trainers(&recipe(mixtral()), ONE, |trainer| write(run.path(), trainer, 4, 1).unwrap());
    assert_eq!(newest(run.path()).unwrap(), Some(step_folder(run.path(), 4)));
    assert!(!half.exists() && other.exists(), "what an interrupted write left is cleared away, nothing else");
    let manifest = open(&newest(run.path()).unwrap().unwrap()).unwrap().manifest;
    assert_eq!((manifest.progress, manifest.data_fingerprint), (extra(4).progress, "rows".to_owned()));
}

#[test]
fn old_checkpoints_are_pruned() {
    for (keep, want) in [(0, vec![1, 2, 3, 4]), (1, vec![4]), (3, vec![2, 3, 4])] {
        let run = tempfile::tempdir().unwrap();
        with_trainers(&recipe(mixtral()), shape(2, 2), |trainer| {
            // The third is written twice: the second takes the place of the first.
            [1, 2, 3, 3, 4].map(|step| write(run.path(), trainer, step, keep).unwrap())
        });
        let kept: Vec<u64> = (0..9).filter(|&step| step_folder(run.path(), step).exists()).collect();
        assert_eq!(kept, want, "keep {keep}");
        let latest = run.path().join(CHECKPOINTS).join(LATEST);
        assert_eq!(fs::canonicalize(latest).unwrap(), fs::canonicalize(step_folder(run.path(), 4)).unwrap());
        open(&newest(run.path()).unwrap().unwrap()).expect("whole");
    }
}

/// All ranks say which one it is, and it that it is itself; none waits for ever.
#[test]
fn all_ranks_learn_that_one_cannot_write() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join(CHECKPOINTS), "a file, not a folder").unwrap();
    let (errors, _) = with_trainers(&recipe(mixtral()), shape(2, 2), |trainer| write(run.path(), trainer, 1, 0));
    for (rank, error) in errors.iter().enumerate() {
        assert!(matches!(error, Err(Error::OfRank { rank: 0, is_here, .. }) if *is_here == (rank == 0)), "{error:?}");
    }
}
