//! What computes makes no difference that rounding does not make: training on accelerators' kernels, of which each is held
//! against the CPU's on the way, gives the CPU's losses, and what one backend has written another reads.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use guildhall::launch::{self, Rank};
use guildhall::model::Sizes;
use guildhall::optim::OffloadTarget;
use guildhall::parallel::{self, Backend, Mesh, Zero};
use guildhall::train::Error;
use guildhall_tensor::{Device, DeviceFailure, Dtype, SimulatedLimits};
use serde_json::Value;

use crate::parity::{Run, compare};
use crate::program::{Finished, RECIPE, RUN, Workshop, ended};
use crate::tiny::{Recipe, families, mixtral};
use crate::world::{ONE, Shape, on_backend, shape, sliced};
use crate::zero::{Keeping, keeping};

/// Two orders of sums in f32 differ by some 1e-7 of what is summed; the second loss is behind an update.
const ROUNDING: f64 = 1e-5;

/// The losses and gradient norms of two steps of six rows.
fn numbers(backend: Backend, sizes: &Sizes, shape: Shape) -> Vec<f64> {
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 3 };
    let mut ranks = on_backend(backend, shape, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        let reports = recipe.train(&mut trainer, 1..=2);
        reports.iter().flat_map(|report| [report.loss, report.gradient_norm]).collect()
    });
    ranks.swap_remove(0)
}

#[track_caller]
fn check(what: &str, sizes: &Sizes, shape: Shape, tolerance: f64) {
    let [got, want] = [Backend::Simulated, Backend::Cpu].map(|backend| numbers(backend, sizes, shape));
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() <= tolerance * want.abs(), "{what}: {got:?} instead of {want:?}");
    }
}

/// Two steps of six rows: what is reported, every weight and, by its first moment, every gradient.
fn trained(backend: Backend, sizes: &Sizes) -> Run {
    let recipe = Recipe { sizes: sizes.clone(), rows: 6, micro_batch: 3 };
    Run::of_all(on_backend(backend, ONE, |rank, mesh| {
        let mut trainer = recipe.trainer(rank, mesh);
        let reports = recipe.train(&mut trainer, 1..=2);
        Run::of(&mut trainer, reports)
    }))
}

#[test]
fn every_family_trains_on_accelerators_kernels() {
    for (name, sizes) in families() {
        compare(name, &trained(Backend::Simulated, &sizes), &trained(Backend::Cpu, &sizes));
    }
}

/// Rows, slices and gradients go from device to device, ZeRO's parts, too.
#[test]
fn ranks_exchange_what_their_devices_hold() {
    for shape in [shape(2, 2), sliced(2, 2, 1), shape(4, 2)] {
        check("mixtral", &mixtral(), shape, ROUNDING);
    }
}

/// Rounding to half the bits goes either way where two numbers are equally near.
#[test]
fn accelerators_store_half_the_bits_as_the_cpu_does() {
    for gradients in [Dtype::F32, Dtype::Bf16] {
        let sizes = Sizes { dtype: Dtype::Bf16, gradients, ..mixtral() };
        check("mixtral in bf16", &sizes, ONE, 1.0 / 256.0);
    }
}

/// State and sums that are kept beside an accelerator come and go while its kernels run, on other streams, through pinned
/// memory: nothing is used before it is there, and the numbers are those of state on the device.
#[test]
fn what_is_kept_beside_an_accelerator_comes_and_goes_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let places = [OffloadTarget::Host, OffloadTarget::File(folder.path().to_owned())];
    for (dtype, gradients) in [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16)] {
        let recipe = Recipe { sizes: Sizes { dtype, gradients, ..mixtral() }, rows: 6, micro_batch: 2 };
        let trained = |offload: &OffloadTarget| {
            on_backend(Backend::Simulated, shape(2, 2), |rank, mesh| {
                let keeping = Keeping { tile: Some(50), offload: offload.clone(), ..keeping(Zero::Gradients) };
                let mut trainer = keeping.trainer(&recipe, rank, mesh);
                let reports = recipe.train(&mut trainer, 1..=2);
                let moved = trainer.optimizer.moved().map_or(0, |moved| moved.bytes);
                assert_eq!(moved > 0, *offload != OffloadTarget::None);
                reports.iter().flat_map(|report| [report.loss, report.gradient_norm]).collect::<Vec<f64>>()
            })
        };
        let want = trained(&OffloadTarget::None);
        places.iter().for_each(|place| assert_eq!(trained(place), want, "{dtype:?}, {place:?}"));
    }
}

/// Whatever a device was about to do when it was lost, and whoever asked for it, the rank's thread or the one that moves state:
/// that is an error with the rank and what failed, and nothing hangs or panics while all that is half done is dropped.
#[test]
fn a_device_may_be_lost_at_any_operation() {
    let recipe = Recipe { sizes: mixtral(), rows: 4, micro_batch: 2 };
    let run = |limits: SimulatedLimits| {
        let ranks = on_backend(Backend::Cpu, ONE, |rank, mesh| {
            let rank = Rank { device: Device::simulated_with(1, limits).unwrap(), ..rank.clone() };
            Error::or_of_device(&rank, || {
                let keeping = Keeping { tile: Some(200), offload: OffloadTarget::Host, ..keeping(Zero::Off) };
                let mut trainer = keeping.trainer(&recipe, &rank, mesh);
                recipe.train(&mut trainer, 1..=2);
                Ok(())
            })
        });
        ranks.into_iter().next().unwrap()
    };
    let mut failed = BTreeSet::new();
    for operations in (0..).step_by(17) {
        match run(SimulatedLimits { operations, ..SimulatedLimits::default() }) {
            Ok(()) => break,
            Err(Error::Device { rank: 0, failure: DeviceFailure::Broken { what, .. }, .. }) => failed.insert(what),
            Err(error) => panic!("after {operations}: {error}"),
        };
    }
    let all = ["a copy to the device", "a copy to the host", "a product", "kernel `adamw_of_strip`"];
    all.iter().for_each(|what| assert!(failed.contains(*what), "never {what}: {failed:?}"));
    let little = run(SimulatedLimits { bytes: 1 << 17, ..SimulatedLimits::default() }).unwrap_err();
    assert!(matches!(little, Error::Device { failure: DeviceFailure::NoRoom { .. }, .. }), "{little}");
}

/// A rank whose device is lost, in the middle of what devices copy from each other, too, ends all ranks: its own error says
/// what failed, and the others' name it.
#[test]
fn a_device_that_is_lost_ends_all_ranks() {
    let recipe = Recipe { sizes: mixtral(), rows: 4, micro_batch: 2 };
    let config = parallel::Config { threads: Some(1), timeout_s: 60, ..parallel::Config::of(2, 2) };
    let run = |operations: u64| {
        launch::run(&config, |rank| {
            let operations = if rank.world.rank() == 1 { operations } else { u64::MAX };
            let limits = SimulatedLimits { operations, ..SimulatedLimits::default() };
            let rank = Rank { device: Device::simulated_with(1, limits).unwrap(), ..rank.clone() };
            let trained = Error::or_of_device(&rank, || {
                let mesh = Mesh::of(rank.world.clone(), shape(2, 2))?;
                recipe.train(&mut keeping(Zero::Gradients).trainer(&recipe, &rank, &mesh), 1..=2);
                Ok(())
            });
            trained.map_err(|error| error.to_string())
        })
    };
    let (mut failed, mut late) = (BTreeSet::new(), 0);
    for operations in (0..).step_by(3) {
        let [other, lost] = <[_; 2]>::try_from(run(operations)).expect("two ranks");
        let Err(lost) = lost else { break };
        // Who is lost behind the last collective holds up nobody.
        let Err(other) = other else {
            late += 1;
            continue;
        };
        assert_eq!(late, 0, "a peer went on to its end without one that was lost earlier");
        let (lost, other) = (lost.to_string(), other.to_string());
        assert!(lost.contains("the device fails at") && other.contains("rank 1"), "{lost}\n{other}");
        failed.extend(["a copy within devices", "kernel `reduce`"].into_iter().filter(|what| lost.contains(*what)));
    }
    assert_eq!(failed.len(), 2, "{failed:?}");
}

#[test]
fn what_one_backend_has_written_another_goes_on_from() {
    let shop = Workshop::new();
    let losses = |[first, second]: [&str; 2]| -> Vec<f64> {
        let run = format!("runs/{first}-{second}");
        shop.train(&format!("--set run.dir={run} --set train.steps=4 --backend {first}"));
        shop.train(&format!("--set run.dir={run} --backend {second} --resume"));
        let measured = shop.succeeds(&format!("evaluate {run}/checkpoints/latest --rows 8 --backend {first}")).out;
        let losses = shop.series(&run, "loss").into_iter().chain([by_key(&measured, "eval_loss")]);
        losses.map(|loss| loss.as_f64().expect("a loss")).collect()
    };
    let want = losses(["cpu", "cpu"]);
    assert_eq!(want.len(), 6 + 1);
    for backends in [["cpu", "simulated"], ["simulated", "cpu"]] {
        let got = losses(backends);
        let is_near = got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= ROUNDING * want);
        assert!(is_near && got.len() == want.len(), "{backends:?}: {got:?} instead of {want:?}");
    }
}

/// Where devices add up what ranks send is in the account of a run and in its plan: the same bytes in both, beside what a run on
/// processors has. A budget counts them.
#[test]
fn what_devices_add_up_in_is_planned_and_counted() {
    let shop = Workshop::new();
    for (i, options) in
        ["", "--set parallel.expert=2", "--set parallel.zero=2", "--set train.dtype=bf16"].iter().enumerate()
    {
        let both = [("cpu", "this-machine"), ("simulated", "h100")].map(|(backend, device)| {
            let options = format!("--ranks 2 --set train.steps=2 --set train.eval_every=0 {options}");
            let plan = format!("plan {RECIPE} {options} --json --device {device} --set parallel.backend={backend}");
            let planned: Value = serde_json::from_str(&shop.succeeds(&plan).out).unwrap();
            let run = format!("runs/{backend}-{i}");
            shop.train(&format!("{options} --backend {backend} --set run.dir={run}"));
            let [planned, held] = [&planned["bytes_total"], &shop.summary(&run)["peak_bytes_by_rank"][0]["total"]];
            [planned, held].map(|bytes| bytes.as_u64().unwrap())
        });
        let [planned, held] = [0, 1].map(|i| both[1][i] - both[0][i]);
        assert!(planned == held && held > 0, "{options}: {both:?}");
    }
    let [cpu, simulated] = ["cpu", "simulated"].map(|backend| format!("train {RECIPE} --ranks 2 --backend {backend}"));
    let total = shop.summary("runs/simulated-0")["peak_bytes_by_rank"][0]["total"].as_u64().unwrap();
    let tight = format!("--set memory.budget={} --set train.steps=1 --set run.dir=runs/tight", total - 1);
    shop.succeeds(&format!("{cpu} {tight}"));
    shop.fails(&format!("{simulated} {tight}"), 2, &["memory.budget lets it hold"]);
}

/// A device without a kernel that a step needs: the run ends with the rank, the place and the kernel, what
/// was saved stays, and the run goes on from there elsewhere.
#[test]
fn a_device_that_fails_ends_the_run_and_costs_no_checkpoint() {
    let shop = Workshop::new();
    let run = |name: &str, options: &str| format!("train tiny.toml --set run.dir=runs/{name} {options}");
    shop.succeeds(&run("whole", "--set train.steps=2"));
    shop.succeeds(&run("whole", "--set train.steps=4 --resume"));
    // With kernels made, if nobody has made them.
    shop.succeeds(&run("broken", "--set train.steps=2 --backend simulated --ranks 2"));
    let (home, other) = (shop.path("home"), shop.path("other"));
    break_kernels(&home, "attention");
    break_kernels(&other, "stored");

    let at = |home: &Path, arguments: &str| {
        let mut command = shop.command(arguments);
        command.env("HOME", home);
        ended(command)
    };
    let on = |arguments: &str| at(&home, arguments);
    let told = on(&run("broken", "--set train.steps=4 --backend simulated --ranks 2 --resume"));
    let words = ["step 3: rank ", "last in layer 0", "kernel `attention`", "--resume continues from", "step-000002"];
    told.failed(1, &words);
    let told = on("evaluate runs/broken/checkpoints/latest --backend simulated");
    told.failed(1, &["last in layer 0", "kernel `attention`"]);
    on("verify tiny.toml --ranks 1 --only dtype --set parallel.backend=simulated").failed(1, &["kernel `attention`"]);

    // Before the first step, too, it is the run that fails, and not the request.
    let told = at(&other, &run("never", "--backend simulated"));
    told.failed(1, &["rank 0, before the model", "kernel `fill`", "no checkpoint had been written"]);

    shop.succeeds(&run("broken", "--set train.steps=4 --backend cpu --ranks 2 --resume"));
    let [whole, broken] = ["whole", "broken"].map(|name| shop.series(&format!("runs/{name}"), "loss"));
    let is_near = |(got, want): (&Value, &Value)| {
        let [got, want] = [got, want].map(|loss| loss.as_f64().unwrap());
        (got - want).abs() <= ROUNDING * want
    };
    assert!(whole.len() == 4 && broken.len() == 4, "{whole:?} {broken:?}");
    assert!(broken.iter().zip(&whole).all(is_near), "{broken:?} instead of {whole:?}");
}

/// Puts into this home all kernels that were compiled for this user, those of one module aside: there is a library without
/// any in its place.
fn break_kernels(home: &Path, module: &str) {
    let (from, to) = (env::home_dir().unwrap().join(".cache/guildhall"), home.join(".cache/guildhall"));
    let empty = home.join("empty.so");
    fs::create_dir_all(&to).unwrap();
    // Another program may be making some.
    let lock = fs::File::create(from.join("lock")).unwrap();
    lock.lock().unwrap();
    let made = Command::new("c++").args(["-shared", "-fPIC", "-x", "c++", "/dev/null", "-o"]).arg(&empty).status();
    assert!(made.unwrap().success());
    for kernels in fs::read_dir(from).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_dir()) {
        let folder = to.join(kernels.file_name());
        fs::create_dir(&folder).unwrap();
        for file in fs::read_dir(kernels.path()).unwrap().map(|file| file.unwrap().path()) {
            let is_broken = file.file_stem().unwrap() == module && file.extension().unwrap() == "so";
            fs::copy(if is_broken { &empty } else { &file }, folder.join(file.file_name().unwrap())).unwrap();
        }
    }
}

fn by_key(json: &str, key: &str) -> Value {
    serde_json::from_str::<Value>(json).expect("an object")[key].clone()
}

#[test]
fn a_backend_that_is_not_here_is_refused_before_anything_is_done() {
    let shop = Workshop::new();
    if shop.succeeds("devices").out.contains("cuda       missing") {
        shop.fails("train tiny.toml --backend cuda", 2, &["parallel.backend = \"cuda\"", "is not to be found"]);
        let here = "plan tiny.toml --set parallel.backend=cuda";
        shop.fails(here, 2, &["parallel.backend = \"cuda\"", "to plan for another machine, name a --device"]);
        shop.succeeds(&format!("{here} --device h100"));
    }
    shop.succeeds("plan tiny.toml --set parallel.backend=simulated");
    shop.fails("train tiny.toml --backend gpu", 2, &["parallel.backend", "\"cpu\", \"simulated\", \"cuda\""]);
    let mut lost = shop.command("train tiny.toml --backend simulated");
    lost.env("PATH", "/nonexistent");
    let Finished { code, err: told, .. } = ended(lost);
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("parallel.backend = \"simulated\"") && told.contains("c++, g++, clang++"), "{told}");
    assert!(!shop.path(RUN).exists(), "a folder of a run that was refused");
}

#[test]
fn devices_are_listed_with_what_they_lack() {
    let told = Workshop::new().succeeds("devices").out;
    let lines: Vec<Vec<&str>> = told.lines().map(|line| line.split_whitespace().take(2).collect()).collect();
    assert_eq!(lines, [["cpu", "ready"], ["simulated", "ready"], ["cuda", lines[2][1]]], "{told}");
    assert!(["ready", "missing"].contains(&lines[2][1]), "{told}");
}

/// Two ways to name the backend have to agree, for whatever command takes both.
#[test]
fn a_backend_is_named_once() {
    let shop = Workshop::new();
    let both = "--backend cpu --set parallel.backend=simulated";
    for command in [format!("train {RECIPE}"), format!("bench {RECIPE}"), format!("evaluate {RUN}/checkpoints/latest")]
    {
        shop.fails(
            &format!("{command} {both}"),
            2,
            &["--backend cpu and --set parallel.backend=simulated", "one of them"],
        );
    }
    let agreed = "--backend cpu --set parallel.backend=simulated --set parallel.backend=\"cpu\"";
    shop.succeeds(&format!("train {RECIPE} --set train.steps=1 {agreed}"));
}
