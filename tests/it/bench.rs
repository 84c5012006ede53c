//! `guildhall bench`: times that add up, and operations that are counted.

use std::fs;

use guildhall::metrics::{BENCH_FILE, StepSpeed};
use guildhall_tensor::Blocking;
use serde_json::Value;

use crate::program::{RECIPE, RUN, Workshop, ended};

/// What the program prints, and what it says, in a home of the test's own, where it keeps what it measures.
fn at_home(shop: &Workshop, arguments: &str) -> [String; 2] {
    let mut command = shop.command(arguments);
    command.env("HOME", shop.path("home"));
    let done = ended(command);
    assert_eq!(done.code, Some(0), "{arguments}: {}", done.err);
    [done.out, done.err]
}

fn measured(shop: &Workshop, options: &str) -> StepSpeed {
    serde_json::from_str(&at_home(shop, &format!("bench {RECIPE} --steps 3 --json {options}"))[0]).unwrap()
}

/// A product of a decoder is done once forward and twice backward, by whatever kernels and ranks.
#[test]
fn operations_are_counted_and_times_add_up() {
    let shop = Workshop::new();
    for options in ["--ranks 1", "--ranks 2 --set parallel.expert=2", "--ranks 1 --set train.dtype=bf16"] {
        let speed = measured(&shop, options);
        let ceilings = &speed.ceilings;
        assert!([ceilings.f32_flops, ceilings.bf16_flops, ceilings.copied].iter().all(|rate| *rate > 1e8), "{speed:?}");
        // A product of the smallest lasts less than a processor that runs these tests is measured for.
        assert!(ceilings.sides.iter().all(|side| *side > 256 && side.is_power_of_two()), "{speed:?}");
        assert!(speed.fastest <= speed.seconds && speed.seconds <= speed.slowest, "{speed:?}");
        assert_eq!(speed.steps, 3);
        // Nothing runs again, so products are those of the model; attention, whose products are the model's too, is small.
        assert!(speed.product_flop < speed.model_flop && speed.product_flop > 0.8 * speed.model_flop, "{speed:?}");
        let others: f64 = speed.others.iter().map(|kernel| kernel.seconds).sum();
        let kernels = speed.products.seconds + speed.attention.seconds + others;
        assert!(kernels > 0.0 && kernels <= speed.mean, "{speed:?}");
        assert!([ceilings.beside, ceilings.streamed_beside].iter().all(|rate| *rate > 1e8), "{speed:?}");
        // What is masked is multiplied, too, and a backward has more products than the model counts.
        let attended = speed.attention_products.expect("a processor tells");
        assert!(0.0 < attended.seconds && attended.seconds < speed.attention.seconds, "{speed:?}");
        assert!(attended.flop > speed.model_flop - speed.product_flop, "{speed:?}");
        assert!(speed.products.calls > 10.0 && speed.attention.calls >= 4.0, "{speed:?}");
        assert!(speed.others.iter().any(|kernel| kernel.name.contains("rms_norm")), "{speed:?}");
        assert!(speed.utilization() > 0.0 && speed.utilization() < 1.5, "{speed:?}");
    }
    let alike = |options| (measured(&shop, options).model_flop, measured(&shop, options).product_flop);
    let (plain, again) = (alike("--ranks 1"), alike("--ranks 1 --set memory.recompute=block"));
    assert_eq!(plain.0, again.0, "what runs again is no work of the model");
    assert!(again.1 > 1.2 * plain.1, "{plain:?} {again:?}");
}

#[test]
fn the_page_of_a_run_shows_what_was_measured() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    assert!(!shop.read(&format!("{RUN}/report.html")).contains("<h2>Speed"));
    let [told, _] = at_home(&shop, &format!("bench {RECIPE} --steps 1"));
    for word in [
        "ceilings",
        "products in f32",
        "model FLOP utilisation",
        "attention",
        "of which products",
        "the roof",
        "not in products",
        "outside",
    ] {
        assert!(told.contains(word), "{word}: {told}");
    }
    shop.succeeds(&format!("report {RUN}"));
    let page = shop.read(&format!("{RUN}/report.html"));
    assert!(page.contains("<h2>Speed") && page.contains("Model FLOP utilisation") && page.contains("rms_norm"));
    let json: Value = serde_json::from_str(&shop.read(&format!("{RUN}/{BENCH_FILE}"))).unwrap();
    assert!(json["seconds"].as_f64() > Some(0.0));
    shop.write(&format!("{RUN}/{BENCH_FILE}"), "{");
    shop.fails(&format!("report {RUN}"), 2, &[BENCH_FILE, "guildhall bench", "delete it"]);
    for command in [format!("bench {RECIPE}"), format!("verify {RECIPE} --ranks 1 --only tile")] {
        shop.fails(&format!("{command} --set memory.budget=5"), 2, &["memory.budget lets it hold 5", "would need"]);
    }
    shop.fails(&format!("bench {RECIPE} --steps 0"), 2, &["--steps 0", "use 1 or more"]);
}

/// The first to look keeps what it has measured; a run that is too short for that takes what is kept. Neither the file nor
/// what it says changes a number.
#[test]
fn a_processor_is_measured_once_and_no_number_depends_on_it() {
    let shop = Workshop::new();
    let train = |run: &str, options: &str| {
        at_home(&shop, &format!("train {RECIPE} --set train.steps=2 --set run.dir={run} {options}"))[1].clone()
    };
    let short = train("short", "");
    if !Blocking::is_a_choice() {
        return assert!(!short.contains("products "), "{short}");
    }
    assert!(
        short.contains("products f32 in blocks of ") && short.contains("a run this short measures nothing"),
        "{short}"
    );
    train("short-bf16", "--set train.dtype=bf16");
    let bench = || at_home(&shop, &format!("bench {RECIPE} --steps 1"))[1].clone();
    let (first, second) = (bench(), bench());
    assert!(first.contains("measured in ") && first.contains("kept in "), "{first}");
    assert!(second.contains("measured on this processor"), "{second}");
    // The recipe is too small for the sizes to matter; rows are packed instead of read in place.
    let kept = fs::read_dir(shop.path("home/.cache/guildhall")).unwrap().next().unwrap().unwrap().path();
    let mut file: Value = serde_json::from_slice(&fs::read(&kept).unwrap()).unwrap();
    for dtype in ["f32", "bf16"] {
        file["blocking"][dtype]["packed_kib"] = 512.into();
        file["blocking"][dtype]["in_place_kib"] = Value::Null;
    }
    fs::write(&kept, file.to_string()).unwrap();
    for (dtype, like) in [("f32", "short"), ("bf16", "short-bf16")] {
        let told = train(dtype, &format!("--set train.dtype={dtype}"));
        assert!(told.contains("products f32 in blocks of 512 KiB; bf16 of 512 KiB (measured"), "{told}");
        assert_eq!(shop.tensors(dtype, 2), shop.tensors(like, 2), "{dtype}");
    }
}
