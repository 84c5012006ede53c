//! Runs that are refused: every rank says why.

use std::fs;
use std::time::{Duration, Instant};

use super::{RANK, TOLD, collected, each_by_itself, each_under, helping_nobody, processes, processes_where};
use super::{start_each, without_help};
use crate::program::{Finished, PROGRAM, RECIPE, Workshop, skipped, wait_until};

/// Two starts of a few processes, on a machine that is busy.
const SOON: Duration = Duration::from_secs(30);

/// That the ranks that run `script` are refused: under the launcher, which ends all when the first has said why, and where
/// it helps nobody, so that every rank says it. Soon, with the code of a wrong request, and nobody is left.
pub(super) fn is_refused(shop: &Workshop, ranks: usize, script: &str, why: &str) -> Vec<Finished> {
    let since = Instant::now();
    shop.write("rank", &format!("{RANK} {script}"));
    let finished = shop.start_shell(&format!("{TOLD} exec $MPIRUN -n {ranks} sh rank")).wait();
    let said = |line: &str| line.contains("error: ") && line.contains(why);
    assert!(finished.code == Some(2) && finished.err.lines().any(said), "{finished:?}");
    assert_eq!(left(shop), Vec::<String>::new(), "nobody is left");
    let ended = each_by_itself(shop, ranks, script);
    ended.iter().enumerate().for_each(|(rank, ended)| says(rank, ended, 2, why));
    assert!(since.elapsed() < SOON, "it took {:?}", since.elapsed());
    assert_eq!(left(shop), Vec::<String>::new(), "nobody is left");
    ended
}

/// Processes that were started in a workshop and are there.
fn left(shop: &Workshop) -> Vec<String> {
    let mark = format!("TMPDIR={}\0", shop.path("").display()).replace("/\0", "\0");
    processes_where(|_, environment| format!("{environment}\0").contains(&mark))
}

/// That a rank has ended so, with one error in its own name.
pub(super) fn says(rank: usize, ended: &Finished, code: i32, why: &str) {
    let begins = if rank == 0 { "error: ".to_owned() } else { format!("rank {rank}: error: ") };
    let errors: Vec<&str> = ended.err.lines().filter(|line| line.contains("error: ")).collect();
    let is_so = matches!(errors[..], [error] if error.starts_with(&begins) && error.contains(why));
    assert!(ended.code == Some(code) && ended.out.is_empty() && is_so, "rank {rank}, {why}: {ended:?}");
}

#[test]
fn the_launcher_says_how_many_ranks_there_are() {
    let shop = Workshop::new();
    let refused = |words: &str, why: &str| is_refused(&shop, 2, &format!("exec {PROGRAM} {words} {RECIPE}"), why);
    let why = "parallel.ranks = 4, but mpirun has started 2 processes, and each is a rank: start 4, or add";
    refused("train --ranks 4", why);
    refused("plan", "mpirun has started 2 processes, but only train");
}

/// Another MPI than the program was built with starts worlds of one: each process says so.
#[test]
fn the_launcher_of_another_mpi_is_told() {
    let shop = Workshop::new();
    let own = shop.start_shell(&format!("{TOLD} exec $MPIRUN --version")).wait();
    let other = if own.out.contains("Open MPI") { "mpirun.mpich" } else { "mpirun.openmpi" };
    if shop.shell(&format!("command -v {other}")).code != Some(0) {
        return skipped(&format!("there is no {other}"));
    }
    let script = format!("exec {PROGRAM} train {RECIPE}");
    let told = shop.start_shell(&format!("{TOLD} exec {other} -n 2 {PROGRAM} train {RECIPE}")).wait();
    let why = "it is the launcher of another MPI library than this program was built with";
    assert!(told.code == Some(1) && told.err.contains(why), "{told:?}");
    let ended = each_under(other, &shop, 2, &script);
    ended.iter().enumerate().for_each(|(rank, ended)| says(rank, ended, 1, why));
    assert_eq!(left(&shop), Vec::<String>::new(), "nobody is left");
    assert!(!shop.path("runs").exists(), "nothing was begun");
}

/// That each of three ranks has named the one that has read another `what`, which is rank 1.
fn names_rank_1(told: &[Finished], what: &str) {
    let named = format!("rank 1 has read other {what}");
    assert!(told.len() == 3 && told.iter().all(|ended| ended.err.contains(&named)), "{told:?}");
}

/// Words of a run of three ranks, which need a step that they can share.
const THREE: &str = "--set train.batch_tokens=384";

#[test]
fn processes_that_read_different_recipes_are_told_so() {
    let shop = Workshop::new();
    let other = shop.read(RECIPE).replace("lr = 1e-2", "lr = 2e-2");
    shop.write("other.toml", &other);
    let pick = format!("RECIPE={RECIPE}; if [ $RANK = 1 ]; then RECIPE=other.toml; fi");
    let script = format!("{pick}; exec {PROGRAM} train $RECIPE {THREE} --set run.dir=one");
    let line = "recipes than rank 0 (`lr = 0.02`, not `lr = 0.01`)";
    names_rank_1(&is_refused(&shop, 3, &script, line), line);
    assert!(!shop.path("one").exists(), "nothing was begun");
}

/// What ranks do of which the second works in another folder.
fn apart(options: &str) -> String {
    format!("if [ $RANK = 1 ]; then cd other; fi; exec {PROGRAM} train {RECIPE} {THREE} {options}")
}

#[test]
fn processes_that_do_not_share_folders_or_data_are_told_so() {
    let shop = Workshop::new();
    fs::create_dir(shop.path("other")).unwrap();
    assert!(shop.start_shell("cp -r tiny.toml corpus other").wait().code == Some(0));
    let what = "contents of run.dir = runs/tiny";
    names_rank_1(&is_refused(&shop, 3, &apart(""), what), what);
    let shared = apart(&format!("--set run.dir={}", shop.path("shared").display()));
    // A cache of its own is prepared in turn, if it comes to the same.
    let ended = each_by_itself(&shop, 3, &shared);
    assert!(ended.iter().all(|rank| rank.code == Some(0)), "{ended:?}");
    shop.write("other/corpus/00.txt", "another text");
    names_rank_1(&is_refused(&shop, 3, &shared, "has read other training data"), "training data");
}

#[test]
fn a_node_without_the_data_is_told() {
    let shop = Workshop::new();
    shop.write("other/tiny.toml", &shop.read(RECIPE));
    let folder = shop.path("lacks");
    let script = apart(&format!("--set run.dir={}", folder.display()));
    let told = is_refused(&shop, 3, &script, "source `corpus` matches no file");
    for rank in [0, 2] {
        assert!(told[rank].err.contains("error: rank 1: source"), "rank {rank}: {told:?}");
    }
    assert!(!folder.join("metrics.jsonl").exists(), "nothing was begun");
}

/// Who is refused before it has met the others says why; they miss it when the timeout is over.
#[test]
fn a_rank_that_is_refused_before_it_joins_is_missed() {
    let shop = Workshop::new();
    if without_help(&shop).is_none() {
        return skipped("the launcher ends all ranks when one ends before it has started MPI");
    }
    let options = format!("--set parallel.timeout_s=3 --set run.dir={}", shop.path("missed").display());
    for (other, why) in [
        (format!("{RECIPE} --ranks 2"), "parallel.ranks = 2, but mpirun has started 3 processes"),
        ("nowhere.toml".to_owned(), "nowhere.toml: cannot be read"),
    ] {
        let since = Instant::now();
        let pick = format!("RECIPE={RECIPE}; if [ $RANK = 1 ]; then RECIPE='{other}'; fi");
        let told = each_by_itself(&shop, 3, &format!("{pick}; exec {PROGRAM} train $RECIPE {THREE} {options}"));
        says(1, &told[1], 2, why);
        let missed = "not all processes of the run have started MPI within 3 s (parallel.timeout_s)";
        [0, 2].into_iter().for_each(|rank| says(rank, &told[rank], 1, missed));
        assert!(since.elapsed() < SOON, "it took {:?}", since.elapsed());
        assert_eq!(processes("missed"), Vec::<String>::new(), "nobody is left");
        assert!(!shop.path("missed").exists(), "nothing was begun");
    }
}

/// Who is refused says so while another process still prepares text, and not when all have come to the same end.
#[test]
fn a_rank_that_is_refused_says_so_at_once() {
    let shop = Workshop::new();
    if without_help(&shop).is_none() {
        return skipped("the launcher ends the others when one has ended");
    }
    shop.write("lacks/tiny.toml", &shop.read(RECIPE));
    assert_eq!(
        shop.shell("mkdir busy && cp -r tiny.toml corpus busy && cd busy && $GUILDHALL prepare tiny.toml").code,
        Some(0)
    );
    let prepared = fs::read_dir(shop.path("busy/cache")).unwrap().map(|entry| entry.unwrap().path());
    let prepared = prepared.filter(|path| path.is_dir()).collect::<Vec<_>>();
    let [prepared] = &prepared[..] else { panic!("{prepared:?}") };
    fs::remove_dir_all(prepared).unwrap();
    // Whoever prepares the same text waits for who is at it.
    let name = prepared.file_name().unwrap().to_str().unwrap();
    let lock = fs::File::create(prepared.with_file_name(format!(".{name}.lock"))).unwrap();
    lock.lock().unwrap();
    let options = format!("--set parallel.timeout_s=2 --set run.dir={}", shop.path("unequal").display());
    let pick = "case $RANK in 1) cd busy;; 2) cd lacks;; esac";
    let script = format!("{pick}; exec {PROGRAM} train {RECIPE} {THREE} {options}");
    let running = start_each(&helping_nobody(&shop), &shop, 3, &script);
    wait_until("the end of rank 2", || shop.path("code.2").exists());
    assert_eq!(processes("unequal").len(), 2, "the others wait");
    lock.unlock().unwrap();
    let why = "source `corpus` matches no file";
    let ended = collected(&shop, 3, running);
    ended.iter().enumerate().for_each(|(rank, ended)| says(rank, ended, 2, why));
}
