//! Shadow sets on disk: a run that chose them by speeds is repeated at other speeds to the bit, and a file that cannot be
//! followed is refused, or left and said to be.

use std::fs;
use std::path::Path;

use guildhall::launch::Rank;
use guildhall::moe::recording::{Visiting, Visits};
use guildhall::moe::{self, Recording, Routings};
use guildhall::parallel::{ExpertTable, Mesh, Order, PerLayer, Rates};

use crate::parity::{Run, STEPS, compare, run_on, train_on};
use crate::program::{RUN, TENSORS, Workshop, flip};
use crate::recording::{ROWS, recorded};
use crate::tiny::{Recipe, mixtral};
use crate::world::{Shape, shape, sliced};

const MICRO_BATCH: usize = 4;

/// With slow arithmetic and fast links any expert that is hotter than others visits; the other way round none does.
const SLOW_ARITHMETIC: Rates = Rates { flops: 1e6, bandwidth: 1e15, latency: 0.0, memory: f64::INFINITY };
const SLOW_LINKS: Rates = Rates { flops: 1e15, bandwidth: 1e6, latency: 0.0, memory: f64::INFINITY };

/// Two MoE layers of four experts that visit where that pays.
fn recipe() -> Recipe {
    let mut sizes = mixtral();
    sizes.moe.iter_mut().for_each(|moe: &mut moe::Config| moe.shadowing = "auto".to_owned());
    Recipe { sizes, rows: ROWS, micro_batch: MICRO_BATCH }
}

/// What sets depend on where both layers' experts lie on as many ranks as the shape says, or each on its own number.
fn visiting(shape: Shape, degrees: [usize; 2]) -> Visiting {
    let tables = degrees.map(|degree| ExpertTable::even(4, degree));
    Visiting::new(&recorded(&recipe().sizes), shape, &tables, MICRO_BATCH)
}

fn recording_to(path: &Path, visiting: Visiting) -> Routings {
    let routes = recorded(&recipe().sizes);
    Routings {
        record: Some(Recording::create(path, routes, 1).unwrap()),
        record_visits: Some(Visits::create(&Visits::beside(path), visiting, 1).unwrap()),
        ..Routings::NONE
    }
}

fn following(path: &Path, visiting: Visiting) -> Routings {
    let replay_visits = Visits::follow(&Visits::beside(path), visiting, 1..=STEPS).unwrap().unwrap();
    Routings { replay_visits: Some(replay_visits), ..following_routes(path) }
}

fn following_routes(path: &Path) -> Routings {
    let replay = Some(Recording::open(path, recorded(&recipe().sizes), 1..=STEPS).unwrap());
    Routings { replay, ..Routings::NONE }
}

fn train(shape: Shape, rates: Rates, routings: Routings) -> Run {
    run_on(&recipe(), shape, routings, |_, mesh| mesh.clone().with_rates(rates))
}

fn visits(run: &Run) -> Vec<u64> {
    run.reports.iter().map(|report| report.shadowed).collect()
}

/// Reports have the rows that travelled and how many visited; with the weights and moments all must be the same bits.
#[test]
fn what_speeds_chose_is_repeated_at_other_speeds_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let [first, again] = ["first", "again"].map(|name| folder.path().join(name));
    let other_order = Shape { order: Order::DataExpert, ..shape(4, 2) };
    for shape in [shape(2, 2), shape(4, 2), shape(4, 4), other_order, sliced(4, 2, 2), sliced(8, 2, 2)] {
        let own = || visiting(shape, [shape.expert; 2]);
        let want = train(shape, SLOW_ARITHMETIC, recording_to(&first, own()));
        assert!(visits(&want).iter().sum::<u64>() > 0, "{shape:?}: none visits");

        // Routing alone leaves the sets to the speeds: others, and with them sums in another order.
        let anew = train(shape, SLOW_LINKS, following_routes(&first));
        assert_eq!(visits(&anew), [0; STEPS as usize], "{shape:?}");
        assert!(anew.weights != want.weights, "{shape:?}: shadows are not seen in the bits");
        compare(&format!("{shape:?}, sets decided anew"), &anew, &want);

        let both = Routings { record: None, record_visits: None, ..following(&first, own()) };
        let record = recording_to(&again, own());
        let both = Routings { record: record.record, record_visits: record.record_visits, ..both };
        let got = train(shape, SLOW_LINKS, both);
        assert_eq!(visits(&got), visits(&want), "{shape:?}");
        assert!(got == want, "{shape:?}: other bits");
        for path in [|path: &Path| path.to_owned(), Visits::beside] {
            assert!(fs::read(path(&first)).unwrap() == fs::read(path(&again)).unwrap(), "{shape:?}: other files");
        }
    }
}

/// Each layer has expert groups of its own.
#[test]
fn layers_of_several_degrees_keep_their_own_sets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("routes");
    for (shape, degrees) in [(shape(4, 1), [4, 2]), (sliced(4, 2, 1), [1, 2])] {
        let run = |rates: Rates, routings: Routings| {
            let routings = std::sync::Arc::new(routings);
            let mesh = |rank: &Rank, _: &Mesh| {
                let mesh = Mesh::of_degrees(rank.world.clone(), shape, PerLayer::Each(degrees.to_vec()));
                mesh.unwrap().with_rates(rates)
            };
            train_on(&recipe(), shape, mesh, |trainer| trainer.routings = routings.clone())
        };
        let want = run(SLOW_ARITHMETIC, recording_to(&path, visiting(shape, degrees)));
        assert!(visits(&want).iter().sum::<u64>() > 0, "{degrees:?}: none visits");
        assert!(run(SLOW_LINKS, following(&path, visiting(shape, degrees))) == want, "{degrees:?}");
    }
}

// --- the program ---

/// Two micro-batches a step, two layers, one expert group.
const TRAIN: &str = "train tiny.toml --set train.schedule=constant --set train.micro_batch=4 --set train.eval_every=0";
const MESH: &str = "--set parallel.ranks=2 --set parallel.expert=2";

fn record(shop: &Workshop, options: &str) -> String {
    shop.succeeds(&format!("{TRAIN} {MESH} --set moe.record=routes --set moe.shadowing=force:2 {options}")).err
}

fn replay(options: &str) -> String {
    format!("{TRAIN} {MESH} --set moe.replay=routes --set moe.shadowing=auto --set run.dir=again {options}")
}

const NOTE: &str = "note: shadow sets are decided anew: ";

#[test]
fn a_run_whose_sets_are_recorded_is_repeated_to_the_bit() {
    let shop = Workshop::new();
    let said = record(&shop, "");
    assert!(!said.contains("shadow sets") && !said.contains("shadows "), "{said}");
    let said = shop.succeeds(&replay("--set moe.record=both")).err;
    assert!(said.contains("shadows  as recorded in routes.visits") && !said.contains(NOTE), "{said}");
    for name in TENSORS {
        let [want, got] = [RUN, "again"].map(|run| fs::read(shop.checkpoint(run, 6).join(name)).unwrap());
        assert!(got == want, "{name}");
    }
    let shadowed = |run: &str| shop.metrics(run).iter().map(|line| line["shadowed"].as_u64()).collect::<Vec<_>>();
    assert_eq!(shadowed("again"), [Some(8); 6]);
    for [first, again] in [["routes", "both"], ["routes.visits", "both.visits"]] {
        assert!(fs::read(shop.path(first)).unwrap() == fs::read(shop.path(again)).unwrap(), "{again}");
    }
    // By hand: a header of 68 bytes and 8 a layer with its hash; a byte for four experts, and a hash.
    assert_eq!(fs::read(shop.path("both.visits")).unwrap().len(), 68 + 2 * 8 + 8 + 6 * 2 * 2 * (1 + 8));
}

#[test]
fn sets_of_another_mesh_are_left_and_that_is_said_once() {
    let shop = Workshop::new();
    record(&shop, "");
    let says = |options: &str, words: &str| {
        let said = shop.succeeds(&replay(&format!("--set train.steps=1 {options}"))).err;
        assert_eq!(said.matches(NOTE).count(), usize::from(!words.is_empty()), "{options}: {said}");
        assert!(said.contains(words) && said.contains("routing  as recorded in routes"), "{options}: {said}");
        assert_eq!(said.contains("shadows  as recorded"), options.is_empty(), "{options}: {said}");
    };
    says("", "");
    says("--set moe.shadowing=off", "");
    let otherwise = "routes.visits was recorded otherwise";
    says("--set parallel.ranks=4", &format!("{otherwise} (parallel.ranks: 2 there, 4 here)"));
    says("--set parallel.expert=[2,1]", &format!("{otherwise} (parallel.expert: [2, 2] there, [2, 1] here)"));
    says("--set parallel.expert_table=[0,1,0,1]", &format!("{otherwise} (parallel.expert_table: another there)"));
    says("--set train.micro_batch=2", &format!("{otherwise} (rows of a micro-batch: 4 there, 2 here)"));
    fs::copy(shop.path("routes.visits"), shop.path("kept")).unwrap();
    fs::remove_file(shop.path("routes.visits")).unwrap();
    says("--set moe.shadowing=force:1", "routes.visits is not there");
    // The sets of a run with another seed, beside routings that are not theirs.
    fs::rename(shop.path("routes"), shop.path("routes of seed 0")).unwrap();
    record(&shop, "--set train.seed=1");
    fs::rename(shop.path("routes of seed 0"), shop.path("routes")).unwrap();
    says("--set moe.shadowing=force:1", &format!("{otherwise} (it belongs to other routings)"));
    // A run without shadows leaves no others' beside its routings.
    record(&shop, "--set moe.shadowing=off");
    says("--set moe.shadowing=force:1", "routes.visits is not there");
}

#[test]
fn a_resumed_run_goes_on_recording_sets() {
    let shop = Workshop::new();
    record(&shop, "--set run.dir=whole --set moe.record=all");
    record(&shop, "--set train.steps=4");
    fs::remove_dir_all(shop.checkpoint(RUN, 4)).unwrap();
    record(&shop, "--set train.steps=3 --resume");
    let read = |name: &str| fs::read(shop.path(name)).unwrap();
    assert!(read("all.visits").starts_with(&read("routes.visits")) && read("all.visits") != read("routes.visits"));
    record(&shop, "--resume");
    for [whole, part] in [["all", "routes"], ["all.visits", "routes.visits"]] {
        assert!(read(whole) == read(part), "{part}");
    }
    // On another mesh sets are others: the file begins where they do, the routings go on.
    fs::remove_dir_all(shop.checkpoint(RUN, 6)).unwrap();
    record(&shop, "--set parallel.ranks=4 --resume");
    assert!(read("all").len() == read("routes").len() && read("all.visits").len() > read("routes.visits").len());
    let said = shop.succeeds(&replay("--set parallel.ranks=4 --set train.steps=1")).err;
    assert!(said.contains(&format!("{NOTE}routes.visits begins at step 5")), "{said}");
}

/// One rank's expert group reads the bad block; the others must not wait for it.
#[test]
fn sets_that_cannot_be_read_end_the_run_or_are_a_wrong_request() {
    let shop = Workshop::new();
    record(&shop, "--set parallel.ranks=4");
    let (visits, routes) = (fs::read(shop.path("routes.visits")).unwrap(), fs::read(shop.path("routes")).unwrap());
    flip(&shop.path("routes.visits"), visits.len() - 9);
    let damaged =
        "routes.visits is damaged at step 6, layer 1, micro-batch 1, expert group 1: its checksum does not fit";
    shop.fails(&replay("--set parallel.ranks=4 --set parallel.timeout_s=60"), 1, &[damaged, "no further than step 5"]);
    assert_eq!(shop.metrics("again").len(), 5);
    fs::remove_dir_all(shop.path("again")).unwrap();
    let refused = |options: &str, words: &[&str]| {
        shop.fails(&replay(&format!("--set parallel.ranks=4 {options}")), 2, words);
        assert!(!shop.path("again").join("metrics.jsonl").exists(), "{options}: something was begun");
    };
    for (bytes, words) in [
        (&visits[..visits.len() - 1], ["routes.visits holds whole steps to 5 only, step 6 is wanted"]),
        (&visits[..40], ["routes.visits is not a recording of shadow sets (cut off after 40 bytes): take it away"]),
        (&b"a text"[..], ["routes.visits is not a recording of shadow sets (its first bytes are others)"]),
        (&routes[..], ["routes.visits is not a recording of shadow sets (its first bytes are others)"]),
        (&[&visits[..20], &[9], &visits[21..]].concat(), ["its header is damaged"]),
    ] {
        fs::write(shop.path("routes.visits"), bytes).unwrap();
        refused("", &words);
    }
    // Neither file of a recording is begun where the other cannot be.
    shop.write("new.visits", "a text");
    fs::remove_file(shop.path("routes.visits")).unwrap();
    refused("--set moe.record=new", &["moe.record would overwrite new.visits, which is not a recording"]);
    assert!(!shop.path("new").exists() && shop.read("new.visits") == "a text");
    fs::write(shop.path("routes.visits"), &visits).unwrap();
    std::os::unix::fs::symlink("routes.visits", shop.path("other.visits")).unwrap();
    refused("--set moe.record=other", &["the same file, other.visits"]);
    assert!(fs::read(shop.path("routes.visits")).unwrap() == visits, "a refused request changes nothing");
}
