//! A run that is killed again and again, at every kind of moment, ends as if nothing had happened.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use guildhall::checkpoint::CHECKPOINTS;

use crate::program::{RECIPE, RUN, Running, Workshop, damage};

const STEPS: u64 = 200;
const KILLS: usize = 28;
/// Training goes on while a checkpoint is written.
const BESIDE: &str = "--set train.checkpoint_async=true";
const MANIFEST: &str = "manifest.json";
/// A process that ends by itself must not make the test wait.
const PATIENCE: Duration = Duration::from_secs(20);

/// When to kill.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// This long after the process began.
    After(Duration),
    /// When this many more steps are in the log.
    Steps(usize),
    /// While a checkpoint is being written.
    Writing,
    /// When a checkpoint has just got its name.
    Named,
}

impl Moment {
    /// Kinds take turns, each with a growing delay.
    fn of(attempt: usize) -> Moment {
        let turn = attempt / 4;
        match attempt % 4 {
            0 => Moment::After(Duration::from_millis(4 * turn as u64)),
            1 => Moment::Steps(1 + turn % 4),
            2 => Moment::Writing,
            _ => Moment::Named,
        }
    }
}

/// The checkpoints of a run with a name.
fn named(shop: &Workshop) -> Vec<PathBuf> {
    let entries = fs::read_dir(shop.path(RUN).join("checkpoints")).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut steps: Vec<PathBuf> = paths.filter(|path| name(path).starts_with("step-")).collect();
    steps.sort();
    steps
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn is_writing(shop: &Workshop) -> bool {
    let mut entries = fs::read_dir(shop.path(RUN).join("checkpoints")).into_iter().flatten().flatten();
    entries.any(|entry| name(&entry.path()).starts_with(".partial-step"))
}

fn wait_for(moment: Moment, shop: &Workshop, run: &mut Running) {
    let (start, steps, newest) = (Instant::now(), shop.metrics(RUN).len(), named(shop).pop());
    // What an earlier process left half written is gone when this one writes.
    let mut was_clear = !is_writing(shop);
    while run.is_running() && start.elapsed() < PATIENCE {
        let come = match moment {
            Moment::After(delay) => start.elapsed() >= delay,
            Moment::Steps(more) => shop.metrics(RUN).len() >= steps + more,
            Moment::Named => named(shop).pop() > newest,
            Moment::Writing => {
                let writing = is_writing(shop);
                was_clear |= !writing;
                writing && was_clear
            }
        };
        if come {
            return;
        }
        sleep(Duration::from_micros(100));
    }
}

/// What a dead process left must be all there or not look so.
fn expect_sound(shop: &Workshop, moment: Moment) {
    let steps = named(shop);
    for folder in &steps {
        assert_eq!(damage(folder), None, "killed at {moment:?}");
    }
    let latest = shop.path(RUN).join("checkpoints/latest");
    match fs::read_link(&latest) {
        Ok(_) => assert_eq!(damage(&latest), None, "killed at {moment:?}"),
        Err(_) => assert!(steps.len() < 2, "killed at {moment:?}: no link to any of {steps:?}"),
    }
}

#[test]
fn a_run_killed_at_any_moment_ends_as_one_that_was_not() {
    kill_at_any_moment("");
}

#[test]
fn a_run_killed_while_it_writes_and_trains_ends_as_one_that_was_not() {
    kill_at_any_moment(BESIDE);
}

fn kill_at_any_moment(manner: &str) {
    let shop = Workshop::new();
    let options = format!("train {RECIPE} --ranks 2 --set parallel.expert=2 --set train.steps={STEPS} {manner}");
    let mut killed = 0;
    for attempt in 0..KILLS {
        let (moment, mut run) = (Moment::of(attempt), shop.start(&format!("{options} --resume")));
        wait_for(moment, &shop, &mut run);
        sleep(Duration::from_micros(300 * (attempt as u64 % 7)));
        killed += usize::from(run.is_running());
        drop(run);
        expect_sound(&shop, moment);
    }
    let reached = shop.metrics(RUN).len() as u64;
    assert!(killed >= 20 && reached < STEPS, "killed {killed} times, {reached} steps");

    shop.succeeds(&format!("{options} --resume"));
    shop.succeeds(&format!("{options} --set run.dir=whole"));
    assert_eq!(shop.series(RUN, "step"), Vec::from_iter(1..=STEPS));
    for field in ["loss", "eval_loss", "grad_norm", "tokens", "moe"] {
        assert_eq!(shop.series(RUN, field), shop.series("whole", field), "{field}");
    }
    assert!(shop.tensors(RUN, STEPS) == shop.tensors("whole", STEPS), "the weights differ");
    let last = fs::read_link(shop.path(RUN).join("checkpoints/latest")).unwrap();
    assert_eq!(name(&last), format!("step-{STEPS:06}"));
    let entries = fs::read_dir(shop.path(RUN).join("checkpoints")).unwrap();
    assert_eq!(entries.count(), 4, "the link, and three checkpoints as train.keep says");
}

/// What cannot be read is not known to be gone: nothing is begun anew or called damaged on account of it.
#[test]
fn checkpoints_that_cannot_be_read_are_left_where_they_are() {
    let shop = Workshop::new();
    shop.train("");
    let resume = format!("train {RECIPE} --resume --set train.steps=8 --set train.schedule=constant");
    let places = [shop.path(RUN).join(CHECKPOINTS), shop.checkpoint(RUN, 6), shop.checkpoint(RUN, 6).join(MANIFEST)];
    for place in &places {
        // A link in a circle: what the system says even to root.
        let kept = place.with_file_name("kept");
        fs::rename(place, &kept).unwrap();
        std::os::unix::fs::symlink(place, place).unwrap();
        let named = place.strip_prefix(shop.path("")).unwrap();
        shop.fails(&resume, 2, &[&named.display().to_string(), "symbolic links"]);
        fs::remove_file(place).unwrap();
        fs::rename(&kept, place).unwrap();
        assert_eq!(shop.metrics(RUN).len(), 6, "{place:?}");
        assert!(!shop.path(RUN).join("previous-1").exists(), "{place:?}");
    }
    assert!(places.iter().all(|place| place.exists()));
}

/// A kill while data is prepared or while an earlier run is set aside hurts neither.
#[test]
fn a_kill_before_the_first_step_costs_nothing() {
    let shop = Workshop::new();
    for attempt in 0..12 {
        let run = shop.start(&format!("train {RECIPE}"));
        sleep(Duration::from_millis(3 * attempt));
        drop(run);
    }
    shop.train("");
    assert_eq!(shop.series(RUN, "step"), [1, 2, 3, 4, 5, 6]);
    let kept = fs::read_dir(shop.path("cache")).unwrap().map(|entry| name(&entry.unwrap().path()));
    assert_eq!(kept.filter(|name| !name.starts_with('.')).count(), 1, "one corpus");
}
