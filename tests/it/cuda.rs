//! The engine of NVIDIA's GPUs without one: the real program beside libraries that stand for the driver, NVRTC and cuBLAS
//! (`tests/fake_cuda/`), whose driver is as late as a device may be, notices what is misused and fails where it is told to.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use guildhall_tensor::find_nccl;
use serde_json::Value;

use crate::fake_gpu::{FAKE, LIBRARIES, machine};
use crate::program::{Finished, RECIPE, ROUNDING, RUN, Workshop, assert_near, damage, ended, numbers};

const ROUNDING_BF16: f64 = 1.0 / 256.0;

/// What programs exit with that the driver ended.
const MISUSED: i32 = 96;

/// A folder with some of the libraries.
fn only(shop: &Workshop, libraries: &[&str]) -> PathBuf {
    let folder = shop.path(&format!("libraries-{}", libraries.len()));
    fs::create_dir_all(&folder).unwrap();
    libraries.iter().for_each(|library| symlink(FAKE.join(library), folder.join(library)).unwrap());
    folder
}

/// The program on a machine with these libraries and settings of `FAKE_CUDA_...`.
fn beside(shop: &Workshop, libraries: &Path, settings: &[(&str, &str)], arguments: &str) -> Finished {
    let mut command = shop.command(arguments);
    command.envs(machine(shop, libraries, settings)).env("FAKE_CUDA_REPORT", shop.path("report.json"));
    let finished = ended(command);
    assert_ne!(finished.code, Some(MISUSED), "{arguments}: {}", finished.err);
    finished
}

fn with(shop: &Workshop, settings: &[(&str, &str)], arguments: &str) -> Finished {
    beside(shop, &FAKE, settings, arguments)
}

/// What must succeed on a GPU, and give back all that it took. The driver's counts.
fn succeeds(shop: &Workshop, settings: &[(&str, &str)], arguments: &str) -> (Finished, Value) {
    let finished = with(shop, settings, arguments);
    assert_eq!(finished.code, Some(0), "{arguments}: {}", finished.err);
    let report: Value = serde_json::from_str(&shop.read("report.json")).unwrap();
    for (name, count) in report.as_object().unwrap() {
        assert!(!name.starts_with("left ") || count == 0, "{arguments}: {name}: {count}");
    }
    assert_eq!(report["products that may sum in less than f32"], Value::Null, "{arguments}");
    (finished, report)
}

/// Trains by the same options on a GPU and on the processor. The driver's counts.
#[track_caller]
fn check_training(options: &str, settings: &[(&str, &str)], tolerance: f64) -> Value {
    let shop = Workshop::new();
    let run = |backend: &str| format!("train {RECIPE} --backend {backend} --set train.steps=2 {options}");
    shop.succeeds(&format!("{} --set run.dir=runs/cpu", run("cpu")));
    let (_, report) = succeeds(&shop, settings, &format!("{} --set run.dir=runs/gpu", run("cuda")));
    assert_near(options, &numbers(&shop, "runs/gpu"), &numbers(&shop, "runs/cpu"), tolerance);
    report
}

fn count(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or(0)
}

#[test]
fn a_gpu_is_listed_with_what_it_is() {
    let shop = Workshop::new();
    let told = succeeds(&shop, &[("DEVICES", "2")], "devices").0.out;
    let one = "Fake GPU, 1 GiB, compute capability 9.0";
    assert!(told.contains(&format!("cuda       ready    {one}; {one}; with NCCL\n")), "{told}");
    if find_nccl().is_err() {
        let told = beside(&shop, &only(&shop, &LIBRARIES.map(|(library, _)| library)[..4]), &[], "devices").out;
        assert!(told.contains("without NCCL: libnccl.so.2 is not to be found: install NCCL 2.22 or later"), "{told}");
        let old = with(&shop, &[("NCCL", "21700")], "devices").out;
        assert!(old.contains("without NCCL: libnccl.so.2 is version 21700: install NCCL 2.22"), "{old}");
    }
}

/// Every library at once, and each with where to get it. Before anything is done.
#[test]
fn what_a_machine_lacks_is_told() {
    let shop = Workshop::new();
    let refused = |finished: Finished, words: &[&str]| {
        finished.failed(2, &[&["parallel.backend = \"cuda\""], words].concat());
        assert!(!shop.path(RUN).exists(), "a folder of a run that was refused");
    };
    let train = format!("train {RECIPE} --backend cuda");
    refused(with(&shop, &[("DEVICES", "0")], &train), &["0 GPUs", "number"]);
    refused(with(&shop, &[("CAPABILITY", "7.5")], &train), &["Fake GPU", "compute capability 7.5", "8.0 or later"]);
    let unknown = ["NVRTC does not compile", "invalid value for --gpu-architecture=sm_99"];
    refused(with(&shop, &[("CAPABILITY", "9.9")], &train), &unknown);
    refused(with(&shop, &[("FAIL", "context:1")], &train), &["CUDA fails at opening the device", "out of memory"]);
    refused(with(&shop, &[("FAIL", "stage:1")], &train), &["CUDA fails at pinning memory", "out of memory"]);
    let old = with(&shop, &[("DRIVER", "12080")], &train);
    refused(old, &["driver is one for CUDA 12.8", "those of CUDA 13.0", "install a newer driver"]);
    if shop.succeeds("devices").out.contains("cuda       missing") {
        let devices = |libraries: &[&str]| beside(&shop, &only(&shop, libraries), &[], "devices").out;
        let told = devices(&["libcuda.so.1"]);
        let missing =
            ["libnvrtc.so", "libcublas.so", "libcublasLt.so"].map(|name| format!("{name} is not to be found"));
        missing.iter().for_each(|words| assert!(told.contains(words), "{words}: {told}"));
        assert!(told.contains("LD_LIBRARY_PATH"), "{told}");
        assert!(!told.contains("libcuda"), "{told}");
        let told = devices(&["libnvrtc.so.13", "libcublas.so.13"]);
        assert!(told.contains("libcuda.so.1 is not to be found: it comes with NVIDIA's driver"), "{told}");
        assert!(!told.contains("libnvrtc"), "{told}");
    }
}

/// A library of another version is told of with what it lacks, before anything is done.
#[test]
fn what_a_library_lacks_is_told() {
    let shop = Workshop::new();
    for (library, function) in [
        ("libcuda.so.1", "cuMemcpyPeerAsync"),
        ("libnvrtc.so.13", "nvrtcGetCUBINSize"),
        ("libcublas.so.13", "cublasSetMathMode"),
        ("libcublasLt.so.13", "cublasLtMatmulAlgoGetHeuristic"),
    ] {
        let folder = shop.path(function);
        fs::create_dir(&folder).unwrap();
        for (name, _) in LIBRARIES {
            let mut bytes = fs::read(FAKE.join(name)).unwrap();
            if name == library {
                rename(&mut bytes, function);
            }
            fs::write(folder.join(name), bytes).unwrap();
        }
        let lacks = format!("{} has no {function}, so it is of another version", library.trim_end_matches(".13"));
        beside(&shop, &folder, &[], &format!("train {RECIPE} --backend cuda")).failed(2, &[&lacks]);
        assert!(!shop.path(RUN).exists());
    }
}

/// Gives a function of a library another name.
fn rename(library: &mut [u8], function: &str) {
    let name = format!("\0{function}\0");
    let places: Vec<usize> = library
        .windows(name.len())
        .enumerate()
        .filter(|(_, bytes)| *bytes == name.as_bytes())
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty(), "{function} is there");
    places.into_iter().for_each(|at| library[at + 1] = b'_');
}

/// Kernels are made for the GPU at hand: a driver that is older than NVRTC takes them if it is of the same major version. Those
/// of another NVRTC are made anew.
#[test]
fn a_driver_may_be_older_than_the_libraries() {
    let shop = Workshop::new();
    succeeds(&shop, &[("LIBRARIES", "13020"), ("DRIVER", "13000")], "devices");
    let kept = || fs::read_dir(shop.path("home/.cache/guildhall")).unwrap().count();
    let before = kept();
    succeeds(&shop, &[("LIBRARIES", "13020"), ("DRIVER", "13000")], "devices");
    assert_eq!(kept(), before);
    succeeds(&shop, &[], "devices");
    assert_eq!(kept(), before + 1);
    // What is kept may be damaged.
    for folder in fs::read_dir(shop.path("home/.cache/guildhall")).unwrap().map(|entry| entry.unwrap().path()) {
        if folder.is_dir() && !folder.is_symlink() {
            fs::write(folder.join("attention.cubin"), "").unwrap();
        }
    }
    let told = with(&shop, &[], "devices").out;
    let words = ["attention.cubin has no kernels that can be loaded", "CUDA_ERROR_INVALID_IMAGE", "remove its folder"];
    words.iter().for_each(|word| assert!(told.contains(word), "{word}: {told}"));
}

#[test]
fn a_gpu_trains_as_the_processor_does() {
    let report = check_training("", &[], ROUNDING);
    for what in ["launches of attention", "products", "products of groups"] {
        assert!(count(&report, what) > 0, "no {what}: {report}");
    }
    // Results of another type than the factors are multiplied one by one.
    let report = check_training("--set train.dtype=bf16", &[], ROUNDING_BF16);
    assert!(count(&report, "products of groups") > 0, "{report}");
    // Of pinned memory there is a thousandth of the device's. With little, it is filled again while the device is behind.
    check_training("", &[("MEMORY", "8000000")], ROUNDING);
}

/// Two ranks are two engines: in one context of one GPU, or with a GPU each. What they exchange goes from device to device.
#[test]
fn ranks_share_gpus() {
    let report = check_training("--ranks 2", &[], ROUNDING);
    let counts =
        |report: &Value| ["bytes within devices", "bytes from other devices"].map(|what| count(report, what) > 0);
    assert_eq!(counts(&report), [true, false]);
    let two = &[("DEVICES", "2")];
    let report = check_training("--ranks 2 --set parallel.transport=copies --set parallel.expert=2", two, ROUNDING);
    assert_eq!(counts(&report), [true, true]);
    assert_eq!(count(&report, "devices that reach another"), 2);
    let zero = "--ranks 2 --set parallel.transport=copies --set parallel.zero=3 --set train.dtype=bf16";
    assert_eq!(counts(&check_training(zero, two, ROUNDING_BF16)), [true, true]);
    // So it is without NCCL, too.
    let report = check_training("--ranks 2", &[("DEVICES", "2"), ("NCCL", "21700")], ROUNDING);
    assert_eq!(counts(&report), [true, true]);
}

/// NCCL's groups of ranks that have a GPU each, with the same numbers as GPUs that copy from each other.
#[test]
fn nccl_carries_what_gpus_send_each_other() {
    let two = &[("DEVICES", "2")];
    let by_nccl = |options: &str, tolerance: f64| {
        let report = check_training(&format!("--ranks 2 {options}"), two, tolerance);
        assert!(count(&report, "bytes by NCCL") > 0 && count(&report, "communicators") > 2, "{options}: {report}");
        assert_eq!(count(&report, "bytes from other devices"), 0, "{options}: {report}");
    };
    by_nccl("--set parallel.expert=2", ROUNDING);
    by_nccl("--set parallel.zero=3 --set train.dtype=bf16 --set parallel.transport=nccl", ROUNDING_BF16);
    // Sums of more than is brought together at a time.
    let large = "--set model.d_model=1536 --set model.layers=1 --set train.batch_tokens=64 --set train.steps=1";
    by_nccl(large, ROUNDING);
}

/// Who wants NCCL is told why it is not to be had.
#[test]
fn nccl_takes_a_gpu_for_each_rank() {
    let shop = Workshop::new();
    let train = format!("train {RECIPE} --backend cuda --ranks 2 --set parallel.transport=nccl");
    let wanted = "parallel.transport = \"nccl\": ";
    with(&shop, &[], &train).failed(2, &[wanted, "ranks 0 and 1 share a GPU, and NCCL takes one for each"]);
    with(&shop, &[("DEVICES", "2"), ("NCCL", "21700")], &train).failed(2, &[wanted, "rank 0: ", "is version 21700"]);
    assert!(!shop.path(RUN).exists(), "a folder of a run that was refused");
    let on_cpu = shop.succeeds(&format!("train {RECIPE} --ranks 2 --set parallel.transport=nccl --set train.steps=1"));
    assert!(
        on_cpu.err.contains("note: parallel.transport = \"nccl\" has nothing to carry: parallel.backend = \"cpu\""),
        "{}",
        on_cpu.err
    );
    let report = check_training("--ranks 2 --set parallel.transport=host", &[("DEVICES", "2")], ROUNDING);
    assert_eq!(["bytes by NCCL", "bytes from other devices"].map(|what| count(&report, what)), [0, 0]);
}

/// Whatever NCCL meets with, all ranks end, and the run goes on from its checkpoint.
#[test]
fn ranks_outlive_a_failure_of_nccl() {
    let two = |fail: &'static str| [("DEVICES", "2"), ("FAIL", fail)];
    let by_nccl = "--ranks 2 --set parallel.transport=nccl --set parallel.timeout_s=2";
    let shop = Workshop::new();
    let begin = format!("train {RECIPE} --backend cuda {by_nccl}");
    with(&shop, &two("nccl:init:1"), &begin).failed(1, &["rank", "joining the others", "unhandled system error"]);
    let whole = [("DEVICES", "2")];
    check_failure_of((by_nccl, &whole), &two("nccl:group:27"), &["NCCL: unhandled system error"]);
    // A message that never comes.
    let waits = ["rank ", "an exchange with other ranks", "others have neither sent nor taken what they were to for 4"];
    check_failure_of((by_nccl, &whole), &two("nccl:stop:27"), &waits);
}

/// A GPU that is too old is there for others, wherever it is.
#[test]
fn ranks_compute_on_gpus_that_are_new_enough() {
    for capabilities in ["7.5,9.0", "9.0,7.5"] {
        check_training("--ranks 2", &[("DEVICES", "2"), ("CAPABILITY", capabilities)], ROUNDING);
    }
}

/// On threads and streams of its own, through pinned memory that is read and written late.
#[test]
fn state_beside_a_gpu_comes_and_goes() {
    let small = "--set memory.tile=500 --set train.steps=3";
    for options in ["--set memory.offload=host", "--set memory.offload=file --set train.dtype=bf16 --ranks 2"] {
        let tolerance = if options.contains("bf16") { ROUNDING_BF16 } else { ROUNDING };
        let report = check_training(&format!("{options} {small}"), &[], tolerance);
        assert!(count(&report, "bytes from pinned memory") > 0 && count(&report, "bytes to pinned memory") > 0);
    }
}

#[test]
fn a_gpu_evaluates_and_generates() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    let latest = format!("{RUN}/checkpoints/latest");
    let evaluate = format!("evaluate {latest} --rows 8 --backend");
    let loss = |out: &str| serde_json::from_str::<Value>(out).unwrap()["eval_loss"].as_f64().unwrap();
    let got = loss(&succeeds(&shop, &[], &format!("{evaluate} cuda")).0.out);
    assert_near("evaluate", &[got], &[loss(&shop.succeeds(&format!("{evaluate} cpu")).out)], ROUNDING);
    let generate = format!("generate {latest} --prompt the --tokens 12 --backend ");
    let got = succeeds(&shop, &[], &format!("{generate}cuda")).0.out;
    assert_eq!(got, shop.succeeds(&format!("{generate}cpu")).out);
}

/// A run that ends after step 2, whatever failed: the message, and the undisturbed losses when it goes on.
#[track_caller]
fn check_failure(options: &str, settings: &[(&str, &str)], words: &[&str]) {
    check_failure_of((options, &[]), settings, &[&["rank "], words].concat());
}

/// The same on a machine with these settings.
#[track_caller]
fn check_failure_of((options, whole): (&str, &[(&str, &str)]), settings: &[(&str, &str)], words: &[&str]) {
    let shop = Workshop::new();
    let train = |run: &str, rest: &str| {
        let small = "--set train.eval_every=4 --set train.checkpoint_every=2";
        format!("train {RECIPE} --backend cuda {small} --set run.dir=runs/{run} {options} {rest}")
    };
    succeeds(&shop, whole, &train("whole", "--set train.steps=4"));
    let told = with(&shop, settings, &train("broken", "--set train.steps=4"));
    told.failed(1, &[&["--resume continues from"], words].concat());
    assert_eq!(damage(&shop.checkpoint("runs/broken", 2)), None, "{settings:?}");
    succeeds(&shop, whole, &train("broken", "--set train.steps=4 --resume"));
    let [whole, broken] = ["whole", "broken"].map(|run| numbers(&shop, &format!("runs/{run}")));
    assert_eq!(broken, whole, "{settings:?}");
}

/// What there is no room for: before anything is done by what the device has, and on the way by what it gives.
#[test]
fn a_gpu_without_room_says_what_would_fit() {
    let shop = Workshop::new();
    let large = format!("train {RECIPE} --backend cuda --set train.batch_tokens=16384");
    let fits = "what fits: --set train.micro_batch=";
    // Less what products take to work with.
    for (full, free) in [("MEMORY", "47.9 MB"), ("ROOM", "45.9 MB")] {
        let words = format!("its devices have {free} free for 1 rank");
        with(&shop, &[(full, "48000000")], &large).failed(2, &[&words, fits]);
    }
    let words = ["step 1: rank 0, last in layer", "the device has no room for", "CUDA_ERROR_OUT_OF_MEMORY", fits];
    with(&shop, &[("LEFT", "40000000")], &large).failed(1, &words);
    // Too full even for measuring what would fit.
    let full = format!("train {RECIPE} --backend cuda");
    with(&shop, &[("MEMORY", "1000000")], &full).failed(1, &["rank 0, before the model: the device has no room for"]);

    let train = |run: &str, rest: &str| format!("train {RECIPE} --backend cuda --set run.dir=runs/{run} {rest}");
    ["whole", "broken"].iter().for_each(|run| drop(succeeds(&shop, &[], &train(run, "--set train.steps=2"))));
    succeeds(&shop, &[], &train("whole", "--set train.steps=4 --resume"));
    let resumed = train("broken", "--set train.steps=4 --resume");
    with(&shop, &[("LEFT", "3300000")], &resumed).failed(1, &["step 3: rank 0", "with --resume it continues from"]);
    succeeds(&shop, &[], &resumed);
    let [whole, broken] = ["whole", "broken"].map(|run| numbers(&shop, &format!("runs/{run}")));
    assert_eq!(broken, whole);
}

/// What other programs have of a GPU is not there for ranks. The device is opened once for a plan, as for a list.
#[test]
fn a_plan_measures_what_is_free_on_one_look() {
    let shop = Workshop::new();
    let listed = succeeds(&shop, &[], "devices").1;
    let plan = format!("plan {RECIPE} --set parallel.backend=cuda --json");
    let planned = |settings: &[(&str, &str)], options: &str| {
        let (finished, report) = succeeds(&shop, settings, &format!("{plan} {options}"));
        (serde_json::from_str::<Value>(&finished.out).unwrap()["device"].clone(), report)
    };
    // Products have taken a thousandth of the memory, twice.
    let (device, report) = planned(&[("ROOM", "300000000")], "--ranks 1");
    assert_eq!(
        (&device["memory"], &device["origins"]["memory"]),
        (&297_902_848.into(), &"measured".into()),
        "{device}"
    );
    assert!(device["host_memory"].as_u64() > Some(300_000_000), "{device}");
    assert_eq!([count(&report, "modules"), count(&report, "looks for devices")], [count(&listed, "modules"), 1]);
    let device = planned(&[("ROOM", "300000000"), ("DEVICES", "2")], "--ranks 4").0;
    assert_eq!(device["memory"], 297_902_848 / 2);
}

/// Where a call is refused that names itself, the message names it.
#[test]
fn a_launch_that_is_refused_ends_the_run() {
    let words =
        ["step 3", "kernel `adamw`", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, too many resources requested for launch"];
    check_failure("", &[("FAIL", "launch:adamw:36")], &words);
    let words = ["step 3", "last in layer", "products of groups", "CUBLAS_STATUS_EXECUTION_FAILED"];
    check_failure("", &[("FAIL", "product:90")], &words);
}

/// A kernel that fails while it runs is told of by what is asked next, after which nothing works.
#[test]
fn a_kernel_that_fails_late_ends_the_run() {
    let words =
        ["CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered", "a kernel that was launched before"];
    check_failure("--ranks 2", &[("FAIL", "kernel:attention:10")], &[&["step 3"], &words[..]].concat());
}

/// In the middle of what two GPUs copy from each other.
#[test]
fn a_gpu_that_is_lost_in_a_collective_ends_the_run() {
    for number in [108, 116] {
        let plan = format!("copy:{number}");
        let options = "--ranks 2 --set parallel.transport=copies --set parallel.expert=2";
        check_failure(options, &[("DEVICES", "2"), ("FAIL", &plan)], &["step 3"]);
    }
}

/// On the thread that moves state, in either direction.
#[test]
fn a_gpu_that_is_lost_while_state_moves_ends_the_run() {
    let options = "--set memory.offload=host --set memory.tile=500";
    for (kind, number) in [("fetch", 500), ("keep", 500)] {
        let plan = format!("{kind}:{number}");
        check_failure(options, &[("FAIL", &plan)], &["CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure"]);
    }
    let shop = Workshop::new();
    let told = with(&shop, &[("FAIL", "pin:2")], &format!("train {RECIPE} --backend cuda {options}"));
    told.failed(1, &["rank 0, before the model: the device fails at pinning", "out of memory", "start again"]);
    assert!(!told.err.contains("account"), "{}", told.err);
}
