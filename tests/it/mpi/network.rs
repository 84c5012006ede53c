//! Several nodes on one machine: network namespaces with names and addresses of their own (peers/network/links.sh), in a
//! space of the test's own, which leaves nothing behind. The program is told nothing of them.

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
    shop.write("network", &format!("LINKS={} MCA='{MCA}'\n{}\n", links.display(), script.join("\n")));
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

/// Starts so many ranks on nodes, `NODESxRANKS` or one on each.
fn start_on(shop: &Workshop, own: &str, (nodes, ranks): (&str, usize), options: &str) -> Running {
    let script = format!("exec {PROGRAM} train {RECIPE} {options}");
    start_each(&format!("{own} {nodes}"), shop, ranks, &script)
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
        let run = start_on(&shop, own, ("2x2", 4), &format!("{options} --set run.dir=nodes"));
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

/// Its connections stay open and carry nothing: nobody ends them.
#[test]
fn a_node_behind_a_cut_link_is_named() {
    let shop = Workshop::new();
    let Some(own) = network(&shop) else { return };
    let folder = shop.path("cut-off");
    let options = LONG.replace("parallel.expert=2", "parallel.expert=1 --set train.batch_tokens=384");
    let options = format!("{options} --set parallel.timeout_s=2 --set run.dir={}", folder.display());
    let running = start_on(&shop, own, ("3", 3), &options);
    wait_until("a checkpoint", || shop.checkpoint("cut-off", 100).exists());
    let since = Instant::now();
    shop.write("cut", "");
    wait_until("the end of all ranks", || processes("cut-off").is_empty());
    assert!(since.elapsed() < Duration::from_secs(20), "it took {:?}", since.elapsed());
    // The launcher waits for a word of the node that it has lost.
    running.signal("KILL");
    let ended = collected(&shop, 3, running);
    for (rank, lost) in [(0, "rank 2 "), (1, "rank 2 "), (2, "rank 0 ")] {
        says(rank, &ended[rank], 1, lost);
    }
}
