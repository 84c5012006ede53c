//! `guildhall simulate`: schedules that end well, transports that do not, and requests that cannot be met.

use crate::program::{RECIPE, Workshop, wait_until};

/// Stages of one checkpoint are beside steps, and one that comes due waits for another.
const BESIDE: &str = "--set train.checkpoint_async=true";
const OPTIONS: &str = "--ranks 3 --set train.batch_tokens=192 --set train.eval_every=0";

#[test]
fn schedules_end_well() {
    let shop = Workshop::new();
    let told = shop.succeeds(&format!("simulate {RECIPE} {OPTIONS} --seeds 30")).err;
    for part in [
        "canary   messages that overtake each other: noticed by seed",
        "canary   messages that are lost: noticed by seed",
        "ran      30 schedules in",
        "canary   another bit of a weight or state: noticed",
        "canary   another bit of a loss: noticed",
        "found    nothing",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    check_counts(&told);
}

/// Of thirty seeds ten draw nothing, ten a death and ten a standstill, nearly all of which come before the end.
fn check_counts(told: &str) {
    let line = told.lines().find(|line| line.starts_with("ran ")).expect("it says what it ran");
    let count = |what: &str| -> u64 {
        let before = line.split(what).next().unwrap();
        before.rsplit([' ', ',']).find(|word| !word.is_empty()).unwrap().parse().unwrap()
    };
    let [undisturbed, deaths, standstills, late] =
        [" undisturbed", " with a death", " with a standstill", " in which it would"].map(count);
    assert_eq!((undisturbed, deaths + standstills + late), (10, 20), "{line}");
    assert!(deaths >= 8 && standstills >= 8, "{line}");
}

/// What is written beside the steps is written in a rank's turn there, stage after stage.
#[test]
fn schedules_end_well_where_training_goes_on_while_checkpoints_are_written() {
    let shop = Workshop::new();
    let told = shop.succeeds(&format!("simulate {RECIPE} {OPTIONS} {BESIDE} --seeds 30")).err;
    assert!(told.contains("found    nothing"), "{told}");
    check_counts(&told);
}

#[test]
fn a_seed_is_one_schedule() {
    for manner in ["", BESIDE] {
        one_schedule(manner);
    }
}

fn one_schedule(manner: &str) {
    let shop = Workshop::new();
    let turns = |seed: u64| {
        let told = shop.succeeds(&format!("simulate {RECIPE} {OPTIONS} {manner} --seed {seed}")).err;
        let line = told.lines().find(|line| line.starts_with("ran ")).expect("it says what it ran").to_owned();
        line.split_once(" s, ").expect("after a time").1.to_owned()
    };
    for seed in [0, 1, 2] {
        assert_eq!(turns(seed), turns(seed));
    }
    assert_ne!(turns(0), turns(3));
}

#[test]
fn seeds_begin_where_it_is_said() {
    let shop = Workshop::new();
    let told = shop.succeeds(&format!("simulate {RECIPE} {OPTIONS} --seed 5 --seeds 2")).err;
    assert!(
        ["seeds    5 to 6\n", "ran      2 schedules in", "canary"].iter().all(|part| told.contains(part)),
        "{told}"
    );
}

#[test]
fn a_broken_transport_is_found_with_its_seed() {
    let shop = Workshop::new();
    for name in ["overtaking", "loss"] {
        let found = shop.run(&format!("simulate {RECIPE} {OPTIONS} --seeds 12 --inject {name}"));
        assert_eq!(found.code, Some(1), "{}", found.err);
        assert!(found.err.contains("left     "), "{}", found.err);
        let version = format!("by       guildhall {}", env!("CARGO_PKG_VERSION"));
        assert!(found.err.contains(&version), "{}", found.err);
        let again = found.err.lines().find(|line| line.starts_with("again ")).expect("a command").to_owned();
        let seed = again.rsplit(' ').next().expect("its last word");
        let again = shop.run(&format!("simulate {RECIPE} {OPTIONS} --seed {seed} --inject {name}"));
        assert_eq!(again.code, Some(1), "{}", again.err);
    }
}

#[test]
fn what_no_seed_repeats_is_refused() {
    let shop = Workshop::new();
    for (options, parts) in [
        ("--ranks 2 --set parallel.expert=2 --set moe.shadowing=auto", ["measured speeds", "moe.shadowing=off"]),
        (
            "--ranks 2 --set parallel.expert=2 --set parallel.all_to_all=auto --set \
             parallel.node_link={ranks_per_node=1,latency_us=1,gbytes_per_s=1}",
            ["measured speeds", "parallel.all_to_all=direct"],
        ),
        ("--steps 0", ["train.steps = 0", "at least 1"]),
        ("--seeds 0", ["--seeds 0", "use 1 or more"]),
        ("--set parallel.timeout_s=1", ["parallel.timeout_s = 1", "use 10 or more"]),
        ("--set train.steps=9", ["--set train.steps", "--steps"]),
        ("--ranks 64", ["64 ranks", "--ranks 32 or fewer"]),
        ("--ranks 1", ["1 rank:", "--ranks 2 or more"]),
        ("--inject sleep", ["--inject sleep", "overtaking or loss"]),
    ] {
        shop.run(&format!("simulate {RECIPE} {options}")).failed(2, &parts);
    }
    let names = std::fs::read_dir(shop.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(
        !names.into_iter().any(|name| name.to_string_lossy().starts_with("guildhall-simulate-")),
        "a folder is left"
    );
}

/// What was not run may end badly.
#[test]
fn a_search_that_is_stopped_is_no_success() {
    let shop = Workshop::new();
    let search = shop.start_logged(&format!("simulate {RECIPE} {OPTIONS} --seeds 1000000"), "log");
    wait_until("the search", || shop.read("log").contains("seeds    0 to 999999"));
    search.signal("INT");
    assert_eq!(search.wait().code, Some(1));
    let log = shop.read("log");
    assert!(log.contains("error: stopped: ") && log.contains("schedules were not run"), "{log}");
}
