//! Several nodes on one machine: network namespaces with names and addresses of their own (peers/network/links.sh), in a
//! space of the test's own, which leaves nothing behind. The program is told nothing of them.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::refusals::says;
use super::{LONG, MCA, collected, processes, start_each, without_help};
use crate::program::{PROGRAM, RECIPE, Running, Workshop, skipped, wait_until};

/// Three nodes, and the launcher in the first; a file named `cut` has the last lose its link. Exits with 77 where that may not
/// be.
fn network(shop: &Workshop) -> Option<&'static str> {
    let links = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/network/links.sh");
    let script = [
        "mount -t tmpfs none /run && bash $LINKS up 3 none || exit 77",
        "(until [ -e cut ]; do sleep 0.05; done; ip link set guildv2 down) &",
        "[ $# = 0 ] && exit",
        "nodes=$1; shift 3; bash $LINKS mpirun $nodes $MCA \"$@\"; exit $?",
    ];
    shop.write("network", &format!("LINKS={}\n{}\n", links.display(), script.join("\n")));
    const OWN: &str = "unshare --map-root-user --net --mount --uts --pid --fork --kill-child --mount-proc sh network";
    let there = shop.shell(OWN);
    if without_help(shop).is_none() {
        skipped("its nodes are Open MPI's");
    } else if there.code != Some(0) {
        skipped(&format!("no namespaces of a network can be made: {}", there.err));
    } else {
        return Some(OWN);
    }
    None
}

/// Starts so many ranks on nodes, `NODESxRANKS` or one on each, by a launcher with options of its own.
fn start_on(shop: &Workshop, (own, mca): (&str, &str), (nodes, ranks): (&str, usize), options: &str) -> Running {
    let script = format!("exec {PROGRAM} train {RECIPE} {options}");
    start_each(&format!("env MCA='{mca}' {own} {nodes}"), shop, ranks, &script)
}

#[test]
fn nodes_are_found_and_train_to_the_bits_of_threads() {
    let shop = Workshop::new();
    let Some(own) = network(&shop) else { return };
    let (four, link) = ("--set parallel.expert=4 --set moe.top_k=2", "ranks_per_node=2,latency_us=0,gbytes_per_s=1000");
    for (way, told) in [
        ("two_level", "all-to-alls by two_level"),
        ("two_d", "all-to-alls by two_d"),
        ("auto", "all-to-alls by the way that is measured to be fastest"),
    ] {
        let options = format!("{four} --set parallel.all_to_all={way}");
        let run = start_on(&shop, (own, MCA), ("2x2", 4), &format!("{options} --set run.dir=nodes"));
        let ended = collected(&shop, 4, run);
        assert!(ended.iter().all(|rank| rank.code == Some(0)), "{way}: {ended:?}");
        assert!(ended[0].err.contains(&format!("on 2 nodes of 2 ranks, {told}")), "{way}: {}", ended[0].err);
        let summary = shop.summary("nodes");
        assert_eq!(summary["nodes"], serde_json::json!([2, 2]), "{way}");
        let taken = summary["all_to_all"]["expert"].as_str().expect("a way").to_owned();
        if way == "auto" {
            let measured = ["ways     expert: ", " from node to node; a layer takes direct "];
            measured.iter().for_each(|words| assert!(ended[0].err.contains(words), "no {words}: {}", ended[0].err));
        } else {
            assert_eq!(taken, way);
        }
        let options = format!("{four} --set parallel.all_to_all={taken} --set parallel.node_link={{{link}}}");
        shop.succeeds(&format!("train {RECIPE} --ranks 4 {options} --set run.dir=threads"));
        assert!(shop.tensors("nodes", 6) == shop.tensors("threads", 6), "{way}: other bits");
        ["loss", "grad_norm", "eval_loss"]
            .iter()
            .for_each(|field| assert_eq!(shop.series("nodes", field), shop.series("threads", field), "{way}: {field}"));
        assert_eq!(summary["traffic_by_group"], shop.summary("threads")["traffic_by_group"], "{way}");
    }
}

/// Starts a rank on each of three nodes, and cuts off the third in the middle of the run.
fn cut_off(shop: &Workshop, launcher: (&str, &str), run: &str, timeout_s: u64) -> Running {
    let folder = shop.path(run);
    let options = LONG.replace("parallel.expert=2", "parallel.expert=1 --set train.batch_tokens=384");
    let options = options.replace("checkpoint_every=100", "checkpoint_every=20");
    let options = format!("{options} --set parallel.timeout_s={timeout_s} --set run.dir={}", folder.display());
    let running = start_on(shop, launcher, ("3", 3), &options);
    wait_until("a checkpoint", || shop.checkpoint(run, 20).exists());
    shop.write("cut", "");
    let since = Instant::now();
    wait_until("the end of all ranks", || processes(run).is_empty());
    assert!(since.elapsed() < Duration::from_secs(20), "it took {:?}", since.elapsed());
    running
}

/// Its connections stay open and carry nothing: nobody ends them.
#[test]
fn a_node_behind_a_cut_link_is_named() {
    let shop = Workshop::new();
    let Some(own) = network(&shop) else { return };
    let running = cut_off(&shop, (own, MCA), "missed", 2);
    let has_ended =
        |rank| fs::read_to_string(shop.path(&format!("code.{rank}"))).is_ok_and(|code| code.ends_with('\n'));
    wait_until("their codes", || (0..3).all(has_ended));
    // The launcher does not look whether its node is there.
    running.signal("KILL");
    let ended = collected(&shop, 3, running);
    (0..2).for_each(|rank| says(rank, &ended[rank], 1, "rank 2 "));
    // The last messages of one of the two may have come through before the cut.
    let error = ended[2].err.lines().find(|line| line.contains("error: ")).unwrap_or_default();
    let missed = ["rank 0 ", "rank 1 "].into_iter().find(|rank| error.contains(&format!("({rank}was last")));
    says(2, &ended[2], 1, missed.unwrap_or("rank 0 or 1"));
}

/// As `docs/clusters.md` has it, but sooner.
#[test]
fn a_launcher_that_looks_after_its_nodes_ends_with_one() {
    const LOOKS: &str =
        "--mca oob_tcp_keepalive_time 2 --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 3";
    let shop = Workshop::new();
    let Some(own) = network(&shop) else { return };
    let ended = cut_off(&shop, (own, LOOKS), "looked-after", 300).wait();
    assert!(ended.code.is_some_and(|code| code > 2), "it is to be started again: {ended:?}");
    assert!(ended.err.contains("lost communication with a remote daemon"), "{ended:?}");
}
