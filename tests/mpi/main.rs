//! Ranks that are processes of a launcher of MPI: they train to the bits of thread ranks, and whatever becomes of one of
//! them, all end and say why.

#[path = "../shared/mod.rs"]
mod shared;

mod clocks;
mod kills;
mod network;
mod refusals;
mod storage;

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use refusals::is_refused;

use shared::{disk, fake_gpu, memory, program};

use crate::fake_gpu::exported;
use crate::memory::{COMPARED, KEPT, flip_in_memory, kept_values};
use crate::program::{
    Finished, PROGRAM, RECIPE, ROUNDING, Running, Workshop, assert_near, damage, numbers, send_signal, skipped,
    wait_until,
};

/// As root and with more ranks than cores, both of which Open MPI asks to be told; MPICH does not ask.
/// The launcher is the one in `MPIRUN`, or `mpirun`.
const TOLD: &str = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1; \
                    MPIRUN=${MPIRUN:-mpirun}; ";

fn launch(shop: &Workshop, ranks: usize, options: &str) -> Running {
    shop.start_shell(&format!("{TOLD} exec $MPIRUN -n {ranks} {PROGRAM} train {RECIPE} {options}"))
}

fn launched(shop: &Workshop, ranks: usize, options: &str) -> Finished {
    launch(shop, ranks, options).wait()
}

/// Begins a script of which each rank runs a copy.
const RANK: &str = "RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; ";

/// Has Open MPI end nobody when a rank has ended with an error or is lost.
const MCA: &str = "--mca orte_abort_on_non_zero_status 0 --enable-recovery";

/// [`MCA`], where the launcher knows it: `MPIRUN` may be another.
fn without_help(shop: &Workshop) -> Option<&'static str> {
    let knows = shop.start_shell(&format!("{TOLD} exec $MPIRUN {MCA} -n 1 true")).wait().code == Some(0);
    knows.then_some(MCA)
}

/// The launcher, which ends nobody if it can be told so.
fn helping_nobody(shop: &Workshop) -> String {
    format!("$MPIRUN {}", without_help(shop).unwrap_or_default())
}

/// How each rank that runs `script` ends, and what it says itself: the launcher sees no output and no code.
fn each_by_itself(shop: &Workshop, ranks: usize, script: &str) -> Vec<Finished> {
    each_under(&helping_nobody(shop), shop, ranks, script)
}

fn each_under(launcher: &str, shop: &Workshop, ranks: usize, script: &str) -> Vec<Finished> {
    collected(shop, ranks, start_each(launcher, shop, ranks, script))
}

/// Starts ranks each of which has files of its own for what it says.
fn start_each(launcher: &str, shop: &Workshop, ranks: usize, script: &str) -> Running {
    for file in (0..ranks).flat_map(|rank| ["out", "err", "code"].map(|what| shop.path(&format!("{what}.{rank}")))) {
        // Those of an earlier run, if there was one.
        let _ = fs::remove_file(file);
    }
    shop.write("each", &format!("{RANK} ({script}) >out.$RANK 2>err.$RANK; echo $? >code.$RANK"));
    shop.start_shell(&format!("{TOLD} exec {launcher} -n {ranks} sh each"))
}

/// What is in these files when all have ended.
fn collected(shop: &Workshop, ranks: usize, launcher: Running) -> Vec<Finished> {
    let launcher = launcher.wait();
    let said = |rank: usize, what: &str| {
        let said = fs::read_to_string(shop.path(&format!("{what}.{rank}")));
        said.unwrap_or_else(|error| panic!("{what} of rank {rank}: {error}: {launcher:?}"))
    };
    let ended = |rank| Finished {
        code: said(rank, "code").trim().parse().ok(),
        out: said(rank, "out"),
        err: said(rank, "err"),
    };
    (0..ranks).map(ended).collect()
}

/// All-to-alls that go `way` between nodes of so many ranks, over links that cost nothing.
fn by_nodes(way: &str, ranks: usize, more: &str) -> String {
    let link = format!("parallel.node_link={{ranks_per_node={ranks},latency_us=0,gbytes_per_s=1000}}");
    format!("--set parallel.expert=4 --set parallel.all_to_all={way} --set {link} {more}")
}

#[test]
fn processes_train_to_the_bits_of_threads() {
    let shop = Workshop::new();
    let meshes = [
        (2, ""),
        (3, ""),
        (2, "--set parallel.expert=2"),
        (4, "--set parallel.expert=4 --set parallel.zero=2"),
        (4, "--set parallel.tensor=2 --set parallel.expert=2 --set parallel.sequence=true --set parallel.zero=3"),
        (4, "--set parallel.expert=4 --set moe.schedule=smart --set parallel.migrate=force --set moe.top_k=2"),
        (4, "--set parallel.expert=2 --set moe.shadowing=force:1 --set memory.recompute=block"),
        (2, "--set parallel.expert=2 --set train.checkpoint_async=true"),
        (4, &by_nodes("two_d", 2, "--set moe.schedule=smart --set parallel.migrate=force --set moe.top_k=2")),
        (4, &by_nodes("two_level", 3, "--set parallel.zero=3 --set train.dtype=bf16")),
    ];
    for (ranks, mesh) in meshes {
        // Three ranks need a step that they can share.
        let options = format!("{mesh} --set train.batch_tokens=384");
        let script = format!("exec {PROGRAM} train {RECIPE} {options} --set run.dir=processes");
        let ended = each_by_itself(&shop, ranks, &script);
        assert!(ended.iter().all(|rank| rank.code == Some(0)), "{mesh}: {ended:?}");
        shop.succeeds(&format!("train {RECIPE} {options} --ranks {ranks} --set run.dir=threads"));
        for step in [4, 6] {
            assert!(
                shop.tensors("processes", step) == shop.tensors("threads", step),
                "{ranks} ranks, {mesh}: other bits"
            );
        }
        for field in ["loss", "grad_norm", "eval_loss"] {
            assert_eq!(shop.series("processes", field), shop.series("threads", field), "{ranks} ranks, {mesh}");
        }
        let sent = |run: &str| shop.summary(run)["traffic"].clone();
        assert_eq!(sent("processes"), sent("threads"), "{ranks} ranks, {mesh}");
        let (first, others) = ended.split_first().expect("ranks");
        assert!(first.out.is_empty() && first.err.contains("done "), "{mesh}: {first:?}");
        let is_silent = |rank: &Finished| rank.out.is_empty() && rank.err.is_empty();
        assert!(others.iter().all(is_silent), "rank 0 alone speaks, {mesh}: {ended:?}");
    }
}

/// Processes whose ranks have a GPU each, and such as share one.
#[test]
fn gpus_of_processes_exchange_by_nccl_or_the_host() {
    let shop = Workshop::new();
    let options = "--ranks 2 --set parallel.expert=2 --set train.steps=2";
    shop.succeeds(&format!("train {RECIPE} {options} --set run.dir=threads"));
    let on_gpus = |devices: &str, options: &str| {
        let machine = exported(&shop, &[("DEVICES", devices)]);
        format!("{machine} exec {PROGRAM} train {RECIPE} --backend cuda {options} --set run.dir=gpus-{devices}")
    };
    for (devices, told) in [("2", "GPUs' memory by NCCL"), ("1", "GPUs' memory by way of the host")] {
        shop.write("rank", &on_gpus(devices, options));
        let finished = shop.start_shell(&format!("{TOLD} exec $MPIRUN -n 2 sh rank")).wait();
        assert!(finished.code == Some(0) && finished.err.contains(told), "{devices} GPUs: {}", finished.err);
        assert_near(told, &numbers(&shop, &format!("gpus-{devices}")), &numbers(&shop, "threads"), ROUNDING);
        let few = "goes from rank to rank by way of the host, which is slow: ranks 0 and 1 share a GPU";
        assert_eq!(finished.err.contains(few), devices == "1", "{}", finished.err);
    }
    let wanted = format!("{options} --set parallel.transport=nccl");
    is_refused(&shop, 2, &on_gpus("1", &wanted), "parallel.transport = \"nccl\": ranks 0 and 1 share a GPU");
    let copies = on_gpus("2", &format!("{options} --set parallel.transport=copies"));
    is_refused(
        &shop,
        2,
        &copies,
        "parallel.transport = \"copies\": GPUs of several processes do not copy from each other",
    );
    // A GPU of its own is another process's first.
    let machine = exported(&shop, &[]);
    let train =
        |first: usize| format!("-n 1 env FAKE_CUDA_FIRST={first} {PROGRAM} train {RECIPE} --backend cuda {wanted}");
    let alone =
        format!("{machine}{TOLD} exec $MPIRUN {} --set run.dir=alone : {} --set run.dir=alone", train(0), train(1));
    let alone = shop.start_shell(&alone).wait();
    assert!(alone.code == Some(0) && alone.err.contains("GPUs' memory by NCCL"), "{}", alone.err);
}

/// What one process meets with while the other one's GPU waits for it, or will: both end long before their timeout.
#[test]
fn a_process_outlives_one_that_nccl_waits_for() {
    let shop = Workshop::new();
    let machine = exported(&shop, &[("DEVICES", "2")]);
    let train = format!("{PROGRAM} train {RECIPE} --backend cuda --ranks 2 --set parallel.expert=2");
    let (refused, gone) = ("NCCL: unhandled system error", "rank 1 is gone: its control connection");
    // While it joins, in the first step, and in a later one.
    let fails = [("init:2", refused), ("group:12", refused), ("group:40", refused), ("die:12", gone), ("die:40", gone)];
    for (fail, told) in fails {
        let run = format!("{train} --set run.dir=runs/{}", fail.replace(':', "-"));
        let failing = format!("env FAKE_CUDA_FAIL=nccl:{fail} {run}");
        let begun = Instant::now();
        let finished = shop.start_shell(&format!("{machine}{TOLD} exec $MPIRUN -n 1 {run} : -n 1 {failing}")).wait();
        assert!(finished.code != Some(0) && finished.err.contains(told), "{fail}: {}", finished.err);
        assert!(begun.elapsed() < Duration::from_secs(60), "{fail}: {:?}", begun.elapsed());
    }
}

/// The recipe's four ranks become as many as there are processes, with the same rows in a step.
#[test]
fn an_elastic_run_goes_on_with_fewer_processes() {
    let shop = Workshop::new();
    let recipe = format!("{}\n[parallel]\nranks = 4\nexpert = 4\n", shop.read(RECIPE));
    shop.write(RECIPE, &recipe);
    is_refused(&shop, 2, &format!("exec {PROGRAM} train {RECIPE}"), "or set train.elastic = true");
    let steps = "--set train.schedule=constant --set train.warmup_steps=0 --set train.steps=8";
    let elastic = format!("--set train.elastic=true {steps}");
    let finished = launched(&shop, 4, &format!("{elastic} --set train.steps=4"));
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let finished = launched(&shop, 2, &format!("{elastic} --resume"));
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let said =
        ["parallel.expert = 4 (tiny.toml:28) does not divide 2 processes; 2 is used", "steps 5 to 8, 256 tokens each"];
    said.iter().for_each(|words| assert!(finished.err.contains(words), "no {words}: {}", finished.err));
    assert_eq!(shop.series("runs/tiny", "step").len(), 8);
    let summary = shop.summary("runs/tiny");
    assert_eq!((summary["ranks"].as_u64(), summary["expert"].as_u64()), (Some(2), Some(2)));
    // The same rows by four ranks to the end: sums are of another order.
    shop.succeeds(&format!("train {RECIPE} {steps} --set run.dir=four"));
    assert_near("four ranks, then two", &numbers(&shop, "runs/tiny"), &numbers(&shop, "four"), ROUNDING);
}

/// Two processes have to hold what four had: a layout that does not fit is exchanged for one that does, to the same numbers.
#[test]
fn an_elastic_run_that_does_not_fit_takes_the_planners_layout() {
    let shop = Workshop::new();
    let steps = "--set train.schedule=constant --set train.warmup_steps=0 --set train.steps=8";
    let recipe = format!("{}\n[parallel]\nranks = 4\nexpert = 4\n", shop.read(RECIPE));
    shop.write(RECIPE, &recipe);
    let finished = launched(&shop, 4, &format!("--set train.elastic=true {steps} --set train.steps=4"));
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let elastic = format!("--set train.elastic=true --set memory.budget=BUDGET {steps} --resume");
    let finished = launched(&shop, 2, &elastic.replace("BUDGET", "900KB"));
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    assert!(finished.err.contains("the recipe's layout does not fit the memory of 2 ranks"), "{}", finished.err);
    shop.succeeds(&format!("train {RECIPE} {steps} --set run.dir=four"));
    assert_near("four ranks, then two", &numbers(&shop, "runs/tiny"), &numbers(&shop, "four"), ROUNDING);
    let small = format!("exec {PROGRAM} train {RECIPE} {}", elastic.replace("BUDGET", "100KB"));
    is_refused(&shop, 2, &small, "memory.budget lets it hold 100 kB; none of ");
}

/// A search whose layouts of several ranks are processes.
fn verified(shop: &Workshop, options: &str) -> Finished {
    let words = "--engine mpi --launcher \"$MPIRUN -n {ranks}\" --set train.eval_every=0 --set model.init_std=0.1";
    shop.start_shell(&format!("{TOLD} exec {PROGRAM} verify {RECIPE} {words} {options}")).wait()
}

#[test]
fn layouts_of_processes_are_compared_with_one_rank() {
    let shop = Workshop::new();
    let found = verified(&shop, "--ranks 2 --only mesh,zero,schedule,condense,between_steps,dtype");
    assert!(found.code == Some(0) && found.out.contains(": 0 differ"), "{found:?}");
    assert!(found.err.contains("of several ranks by mpirun -n {ranks}"), "{}", found.err);
    assert!(found.out.contains("% of routes share a row"), "no clusters have come back: {}", found.out);
    // Bugs in the ranks' mesh, trainer and gradients: each is planted in the processes, and comes back in their numbers.
    for (bug, options) in [
        ("norm-counts-copies", "--only mesh,zero"),
        ("zero-row-rank-skips-collective", "--only mesh,micro_batch --set parallel.timeout_s=2"),
        ("bias-not-saved", "--only mesh,between_steps --set moe.gate=sigmoid --set moe.gate.bias_rate=0.01"),
    ] {
        let found = verified(&shop, &format!("--ranks 2 --inject {bug} {options}"));
        assert!(found.code == Some(1) && !found.out.contains("NOT CAUGHT"), "{bug}: {found:?}");
    }
}

#[test]
fn launchers_that_bring_no_results_are_told() {
    let shop = Workshop::new();
    shop.write("nobody", "echo error: nobody came >&2; exit 3");
    let with = |launcher: &str| {
        let options = format!("--ranks 2 --only mesh --engine mpi --launcher '{launcher}'");
        shop.start_shell(&format!("exec {PROGRAM} verify {RECIPE} {options}")).wait()
    };
    with("nowhere/mpirun {ranks}").failed(2, &["could not start nowhere/mpirun 2", "name another: --launcher"]);
    with("mpirun").failed(2, &["--launcher \"mpirun\"", "write {ranks} where the number of processes goes"]);
    for (launcher, told) in [("sh nobody {ranks}", "nobody came"), ("true {ranks}", "rank 0 has left nothing")] {
        let found = with(launcher);
        assert!(found.code == Some(1) && found.out.contains(told), "{found:?}");
    }
}

/// Long enough to be met in its middle.
const LONG: &str =
    "--set parallel.expert=2 --set train.steps=4000 --set train.eval_every=0 --set train.checkpoint_every=100";

/// Processes of a run that are there, in the order of their ranks.
fn processes(run: &str) -> Vec<String> {
    ranks(run).into_iter().map(|(_, pid)| pid).collect()
}

fn ranks(run: &str) -> Vec<(usize, String)> {
    ranks_where(|said, _| said.trim_end().ends_with(&format!("/{run}")))
}

/// Processes of the program of which that holds for their words and their environment, in the order of their ranks.
fn processes_where(holds: impl Fn(&str, &str) -> bool) -> Vec<String> {
    ranks_where(holds).into_iter().map(|(_, pid)| pid).collect()
}

/// The same with their ranks.
fn ranks_where(holds: impl Fn(&str, &str) -> bool) -> Vec<(usize, String)> {
    let all = fs::read_dir("/proc").expect("Linux").filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let rank = |pid: String| {
        let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let said = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
        let environment = String::from_utf8_lossy(&read("environ")).into_owned();
        let is_rank = read("comm") == b"guildhall\n" && holds(&said, &environment);
        let number = environment.split('\0').find_map(|variable| {
            let value = variable.strip_prefix("OMPI_COMM_WORLD_RANK=").or(variable.strip_prefix("PMI_RANK="))?;
            value.parse::<usize>().ok()
        });
        // Nobody has started the only process of a run.
        is_rank.then_some((number.unwrap_or(0), pid))
    };
    let mut found: Vec<(usize, String)> = all.filter_map(rank).collect();
    found.sort();
    found
}

/// What a process has of threads does not depend on how many others there are.
#[test]
fn many_processes_are_watched_by_few_threads() {
    const RANKS: usize = 16;
    let shop = Workshop::new();
    let options = "--set parallel.expert=4 --set train.batch_tokens=512 --set train.steps=400 --set train.eval_every=0 \
                   --set train.checkpoint_every=0 --set train.schedule=constant --set train.warmup_steps=0";
    let running = launch(&shop, RANKS, &format!("{options} --set run.dir={}", shop.path("many").display()));
    wait_until("steps", || shop.metrics("many").len() > 5);
    let all = processes("many");
    assert_eq!(all.len(), RANKS, "{all:?}");
    let watching = |pid: &String| {
        let threads =
            fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").map(|thread| thread.expect("one").path());
        threads
            .filter(|thread| fs::read_to_string(thread.join("comm")).is_ok_and(|is| is.starts_with("control ")))
            .count()
    };
    let watching: Vec<usize> = all.iter().map(watching).collect();
    running.signal("USR1");
    let finished = running.wait();
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    assert_eq!(watching, [4; RANKS], "two for each of two control lanes");
    let steps = shop.metrics("many").len();
    shop.succeeds(&format!("train {RECIPE} {options} --set train.steps={steps} --ranks {RANKS} --set run.dir=threads"));
    assert_eq!(shop.series("many", "loss"), shop.series("threads", "loss"));
}

/// Whichever rank is lost, the launcher ends the others and does not report success; the run goes on from its newest
/// checkpoint, to the weights of a run that nothing happened to.
#[test]
fn a_run_that_loses_a_rank_ends_and_goes_on() {
    let shop = Workshop::new();
    // Long after the first checkpoint: the kill must find it running.
    let short = LONG.replace("4000", "600");
    shop.succeeds(&format!("train {RECIPE} {short} --ranks 2 --set run.dir=whole"));
    for lost in 0..2 {
        let run = format!("lost{lost}");
        let folder = shop.path(&run);
        let long = format!("{short} --set run.dir={}", folder.display());
        let running = launch(&shop, 2, &long);
        wait_until("a checkpoint", || shop.checkpoint(&run, 100).exists());
        let all = processes(&run);
        assert_eq!(all.len(), 2, "{all:?}");
        let since = Instant::now();
        send_signal("KILL", &all[lost]);
        let finished = running.wait();
        assert!(!matches!(finished.code, Some(0)), "{}", finished.err);
        assert!(since.elapsed() < Duration::from_secs(30), "it took {:?}", since.elapsed());
        assert_eq!(processes(&run), Vec::<String>::new(), "nobody is left");
        let resumed = launched(&shop, 2, &format!("--resume {long}"));
        assert_eq!(resumed.code, Some(0), "{}", resumed.err);
        assert!(shop.tensors(&run, 600) == shop.tensors("whole", 600), "other weights after rank {lost} was lost");
    }
}

/// The launcher passes SIGUSR1 on and waits; of Ctrl-C it makes an end of its processes, which may be too busy for a checkpoint.
#[test]
fn a_launcher_that_is_asked_to_stop_leaves_a_checkpoint() {
    let shop = Workshop::new();
    let folder = shop.path("stopped");
    let options = format!("{} --set run.dir={}", LONG.replace("every=100", "every=0"), folder.display());
    let running = launch(&shop, 2, &options);
    wait_until("steps", || shop.metrics("stopped").len() > 10);
    running.signal("USR1");
    let finished = running.wait();
    assert_eq!(finished.code, Some(0), "{}", finished.err);
    let steps = shop.metrics("stopped").len() as u64;
    assert!(steps < 4000, "it was not stopped");
    assert_eq!(shop.summary("stopped")["status"], "interrupted", "{}", finished.err);
    assert_eq!(damage(&shop.checkpoint("stopped", steps)), None);
    assert_eq!(processes("stopped"), Vec::<String>::new(), "nobody is left");
}

/// Where there are three copies, the rank whose memory was changed is named.
#[test]
fn a_rank_whose_memory_is_changed_is_named() {
    let shop = Workshop::new();
    let values = kept_values(&shop);
    let folder = shop.path("changed");
    let options = format!("{COMPARED} --set train.batch_tokens=384 --set run.dir={}", folder.display());
    let running = launch(&shop, 3, &options);
    wait_until("steps", || shop.metrics("changed").len() > 2);
    assert!(flip_in_memory(&processes("changed")[1], &values) > 0, "a rank has its copy");
    let finished = running.wait();
    let what = format!("the copies of {KEPT} differ, that of rank 1 is not that of ranks 0, 2");
    assert!(finished.code == Some(1) && finished.err.contains(&what), "{finished:?}");
    assert_eq!(processes("changed"), Vec::<String>::new(), "nobody is left");
}

/// A rank that stands still is named by the other, with where it was last.
#[test]
fn a_rank_that_stands_still_is_named() {
    let shop = Workshop::new();
    let folder = shop.path("still");
    let running = launch(&shop, 2, &format!("{LONG} --set parallel.timeout_s=3 --set run.dir={}", folder.display()));
    wait_until("a checkpoint", || shop.checkpoint("still", 100).exists());
    let all = processes("still");
    send_signal("STOP", &all[1]);
    let since = Instant::now();
    let finished = running.wait();
    assert!(since.elapsed() < Duration::from_secs(40), "it took {:?}", since.elapsed());
    let told = ["step ", "rank(s) [1] (rank 1 was last in ", "), and [0] had come to it", "--resume continues from"];
    finished.failed(1, &told);
    // Of a step, the layer or what comes behind all layers.
    let place = finished.err.split("error: step ").nth(1).and_then(|told| told.split(": ").next()).expect("a step");
    let parts = ["layer ", "head", "embedding", "gradients", "update", "between steps", "evaluation", "checkpoint"];
    let (step, part) = place.split_once(", ").unwrap_or_else(|| panic!("no part: {}", finished.err));
    assert!(parts.iter().any(|known| part.starts_with(known)), "{place}");
    // The one that follows those that are recorded, or the last of them, of which a checkpoint is written.
    let (step, recorded) = (step.parse::<usize>().unwrap(), shop.metrics("still").len());
    assert_eq!(step, recorded + usize::from(!part.starts_with("checkpoint")), "{place}");
    assert_eq!(processes("still"), Vec::<String>::new(), "nobody is left");
}

/// Who waits for all to start MPI hears of no timeout from it, and ends by itself; the launcher then ends the other.
#[test]
fn a_process_that_never_starts_is_not_waited_for() {
    let shop = Workshop::new();
    let folder = shop.path("never");
    let stays = "if [ \"${OMPI_COMM_WORLD_RANK:-$PMI_RANK}\" = 1 ]; then echo $$ >stays; exec sleep 300; fi";
    let train = format!("train {RECIPE} --set parallel.timeout_s=3 --set run.dir={}", folder.display());
    let mut running = shop.start_shell(&format!("{TOLD} exec $MPIRUN -n 2 sh -c '{stays}; exec {PROGRAM} {train}'"));
    let since = Instant::now();
    while running.is_running() && since.elapsed() < Duration::from_secs(40) {
        sleep(Duration::from_millis(10));
    }
    let has_ended = !running.is_running();
    if !has_ended {
        // The launcher ends whom it has started.
        running.signal("TERM");
    }
    let finished = running.wait();
    assert!(has_ended, "it waits still: {}", finished.err);
    finished.failed(1, &["not all processes of the run have started MPI within 3 s (parallel.timeout_s)"]);
    assert_eq!(processes("never"), Vec::<String>::new(), "nobody is left");
    let stayed = shop.read("stays");
    // Who has ended has no words, though nobody may have looked after it yet.
    let words = || fs::read(Path::new("/proc").join(stayed.trim()).join("cmdline")).unwrap_or_default();
    wait_until("the end of who never started", || words().is_empty());
    assert!(!folder.exists(), "nothing was begun");
}

/// Without the launcher's clean-up, each of the others says who is lost, and where it was missed.
#[test]
fn without_a_launchers_help_all_others_name_who_is_lost() {
    let shop = Workshop::new();
    let Some(mca) = without_help(&shop) else { return skipped("the launcher ends others when a rank is lost") };
    // Of a rank that is killed all may have come to the operation that its death ends.
    let lost = [
        ("STOP", 0, "s for rank(s) [0] (rank 0 "),
        ("STOP", 2, "s for rank(s) [2] (rank 2 "),
        ("KILL", 1, "missed by rank "),
    ];
    for (signal, victim, missed) in lost {
        let run = format!("alone-{signal}{victim}");
        let folder = shop.path(&run);
        let options = format!("{LONG} --ranks 3 --set parallel.expert=1 --set train.batch_tokens=384");
        let program = format!("$MPIRUN {mca} -n 3 {PROGRAM} train {RECIPE} {options}");
        let timeout = format!("--set parallel.timeout_s=3 --set run.dir={}", folder.display());
        let running = shop.start_shell(&format!("{TOLD} exec {program} {timeout}"));
        wait_until("a checkpoint", || shop.checkpoint(&run, 100).exists());
        let victims = processes(&run);
        send_signal(signal, &victims[victim]);
        let is_left = |pid: &String| *pid == victims[victim] && signal == "STOP";
        let since = Instant::now();
        wait_until("the end of the others", || processes(&run).iter().all(is_left));
        // Ranks wait for the timeout, and for last words for another.
        assert!(since.elapsed() < Duration::from_secs(20), "it took {:?}", since.elapsed());
        if signal == "STOP" {
            send_signal("KILL", &victims[victim]);
        }
        let finished = running.wait();
        for rank in (0..3).filter(|rank| *rank != victim) {
            let begins = if rank == 0 { "error: ".to_owned() } else { format!("rank {rank}: error: ") };
            let told = finished.err.split('\n').skip_while(|line| !line.starts_with(&begins)).take(2);
            let told: String = told.collect();
            let parts = [&format!("rank {victim} "), "step ", missed];
            assert!(parts.iter().all(|part| told.contains(*part)), "{run}, rank {rank}: {}", finished.err);
            let place = told.split("step ").nth(1).and_then(|told| told.split(": ").next()).unwrap_or_default();
            assert!(place.contains(", "), "no part of the step: {told}");
            let met = ["communicator '", "heard of in "].iter().any(|part| told.contains(part));
            let who = ["had come to it", "to which all had come", " failed: "].iter().any(|part| told.contains(part));
            assert!(met && who, "the operation, and who had come to it: {told}");
        }
    }
}
