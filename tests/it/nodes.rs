//! Ranks on several nodes: whichever way all-to-alls go from one to another, a run comes to the same bits, sends what is
//! planned, and says what it does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use guildhall::parallel::{Mesh, Nodes};
use guildhall_comm::wrap::Wrapper;
use guildhall_comm::{Collective, Communicator, Completed, Error as CommError, InFlight, Pending, Request};
use serde_json::Value;

use crate::program::{Finished, RECIPE, Workshop};
use crate::world::{on_mesh, shape};

/// Messages that cost next to nothing, between nodes of so many ranks.
fn nodes(ranks: usize) -> String {
    format!("--set parallel.node_link={{ranks_per_node={ranks},latency_us=0,gbytes_per_s=1000}}")
}

fn train(shop: &Workshop, run: &str, options: &str) -> Finished {
    shop.train(&format!("--set train.eval_every=0 --set model.init_std=0.1 --set run.dir={run} {options}"))
}

/// Calls, messages and bytes by group and collective.
fn sent(traffic: impl Iterator<Item = (String, Value)>) -> BTreeMap<String, [u64; 3]> {
    let counts = |sent: &Value| ["calls", "messages", "bytes"].map(|what| sent[what].as_u64().unwrap());
    traffic.map(|(name, sent)| (name, counts(&sent))).collect()
}

/// Those of a run.
fn counted(summary: &Value) -> BTreeMap<String, [u64; 3]> {
    let groups = summary["traffic_by_group"].as_object().unwrap().iter();
    let of_group = |(group, kinds): (&String, &Value)| {
        let kinds = kinds.as_object().unwrap().iter();
        kinds.map(|(kind, sent)| (format!("{group} {kind}"), sent.clone())).collect::<Vec<_>>()
    };
    sent(groups.flat_map(of_group))
}

/// With all that makes rows travel otherwise: steps, lanes, visitors, shared rows, sequences that move, other degrees.
#[test]
fn every_way_comes_to_the_same_bits() {
    let four = "--ranks 4 --set parallel.expert=4";
    let meshes = [
        format!("{four} --set moe.top_k=2"),
        format!("{four} --set moe.top_k=2 --set moe.schedule=smart"),
        format!("{four} --set moe.top_k=2 --set parallel.migrate=force --set moe.schedule=smart"),
        format!("{four} --set moe.condense=static --set moe.condense_threshold=0.5 --set parallel.migrate=force"),
        format!("{four} --set moe.shadowing=force:1 --set train.dtype=bf16 --set parallel.zero=3"),
        format!("{four} --set memory.recompute=block --set train.micro_batch=2"),
        "--ranks 4 --set parallel.expert=[4,2]".to_owned(),
        "--ranks 4 --set parallel.expert=4 --set moe.experts=8 --set parallel.replace_every=1 --set parallel.replace_gain=0"
            .to_owned(),
        "--ranks 8 --set parallel.tensor=2 --set parallel.expert=4 --set parallel.sequence=true".to_owned(),
        "--ranks 8 --set parallel.tensor=2 --set parallel.expert=4 --set parallel.expert_tensor=1".to_owned(),
    ];
    let shop = Workshop::new();
    for mesh in meshes {
        // Uneven, but for slices, whose groups would not have two ranks on a node.
        let is_sliced = mesh.contains("--ranks 8") && !mesh.contains("expert_tensor=1");
        for per_node in if is_sliced { vec![4] } else { vec![2, 3] } {
            let options = format!("{mesh} {}", nodes(per_node));
            train(&shop, "direct", &options);
            let direct = counted(&shop.summary("direct"));
            for way in ["two_d", "two_level"] {
                train(&shop, way, &format!("{options} --set parallel.all_to_all={way}"));
                let what = format!("{way}, {mesh}, nodes of {per_node}");
                assert!(shop.tensors(way, 6) == shop.tensors("direct", 6), "{what}: other bits");
                assert_eq!(shop.series(way, "loss"), shop.series("direct", "loss"), "{what}");
                let summary = shop.summary(way);
                assert!(summary["all_to_all"].as_object().unwrap().values().any(|by| by == way), "{what}: {summary}");
                let relayed = counted(&summary);
                let messages = |of: &BTreeMap<String, [u64; 3]>| -> u64 {
                    let all = of.iter().filter(|(name, _)| name.starts_with("expert") && name.ends_with("all_to_all"));
                    all.filter(|(name, _)| !name.contains("node")).map(|(_, sent)| sent[1]).sum()
                };
                assert!(messages(&relayed) < messages(&direct), "{what}: {relayed:?}, {direct:?}");
                let others = |of: &BTreeMap<String, [u64; 3]>| {
                    let mut of = of.clone();
                    of.retain(|name, _| !(name.starts_with("expert") && name.contains("all_to_all")));
                    of.retain(|name, _| !name.contains("node"));
                    of
                };
                assert_eq!(others(&relayed), others(&direct), "{what}");
            }
        }
    }
}

/// A run that records is planned from what it recorded: calls, messages and bytes, of every group and leg.
#[test]
fn what_goes_round_is_planned() {
    let shop = Workshop::new();
    for (mesh, per_node) in [
        ("--ranks 4 --set parallel.expert=4 --set moe.top_k=2", 2),
        ("--ranks 4 --set parallel.expert=4 --set moe.schedule=smart", 3),
        ("--ranks 4 --set parallel.expert=[4,2]", 2),
        ("--ranks 8 --set parallel.tensor=2 --set parallel.expert=4", 4),
    ] {
        for way in ["direct", "two_d", "two_level"] {
            let options =
                format!("{mesh} {} --set parallel.all_to_all={way} --set train.eval_every=0", nodes(per_node));
            let recorded = "--set moe.pairs_every=0 --set moe.record=routes";
            train(&shop, "run", &format!("{options} {recorded}"));
            let summary = shop.summary("run");
            let planned = shop.succeeds(&format!("plan {RECIPE} {options} --json --recording routes")).out;
            let planned: Value = serde_json::from_str(&planned).unwrap();
            let planned = planned["recorded"]["traffic"].as_array().unwrap().iter();
            let word = |sent: &Value, what: &str| sent[what].as_str().unwrap().to_owned();
            let name = |sent: &Value| format!("{} {}", word(sent, "group"), word(sent, "collective"));
            let planned = sent(planned.map(|sent| (name(sent), sent.clone())));
            let counted = counted(&summary);
            let of_experts = |of: BTreeMap<String, [u64; 3]>| {
                of.into_iter().filter(|(name, _)| name.starts_with("expert")).collect::<BTreeMap<_, _>>()
            };
            let (planned, counted) = (of_experts(planned), of_experts(counted));
            assert_eq!(planned, counted, "{way}, {mesh}");
            assert_eq!(counted.keys().any(|name| name.contains("_node")), way != "direct", "{counted:?}");
            std::fs::remove_file(shop.path("routes")).unwrap();
        }
    }
}

#[test]
fn a_run_says_what_its_nodes_are() {
    let shop = Workshop::new();
    let four = "--ranks 4 --set parallel.expert=4";
    let said = |run: &str, options: &str, words: &[&str]| {
        let told = train(&shop, run, options).err;
        words.iter().for_each(|words| assert!(told.contains(words), "no {words:?}: {told}"));
        shop.summary(run)
    };
    let way = "--set parallel.all_to_all=two_level";
    let words = "4 ranks, each with its own rows and 1 of 4 experts, on 2 nodes of 2 ranks, all-to-alls by two_level";
    let summary = said("two", &format!("{four} {way} {}", nodes(2)), &[words]);
    assert_eq!(
        (&summary["nodes"], &summary["all_to_all"]["expert"]),
        (&serde_json::json!([2, 2]), &"two_level".into())
    );
    let summary = said("one", &format!("{four} {way}"), &["is as \"direct\": all ranks are on 1 node"]);
    assert!(summary.get("nodes").is_none() && summary.get("all_to_all").is_none(), "{summary}");
    let apart = format!("{four} {way} {}", nodes(1));
    said("apart", &apart, &["on 4 nodes of 1 rank", "no expert group has ranks on several nodes and several of them"]);
    // What it measures it says, and takes; every rank the same.
    let measured = ["ways     expert: ", " from node to node; a layer takes direct ", "by the way that is measured"];
    let summary = said("auto", &format!("{four} --set parallel.all_to_all=auto {}", nodes(2)), &measured);
    let chosen = summary["all_to_all"]["expert"].as_str().unwrap();
    assert!(["direct", "two_level", "two_d"].contains(&chosen), "{chosen}");
    let gate = "--set moe.gate=topology --set moe.gate.outside=0.5 --set moe.logical_nodes=4";
    said(
        "logical",
        &format!("{four} {gate} {}", nodes(2)),
        &["note: moe.logical_nodes = 4 is not how experts lie on nodes"],
    );
    let wrong = format!("train {RECIPE} {four} --set parallel.all_to_all=round");
    shop.fails(&wrong, 2, &["parallel.all_to_all", "round", "two_level"]);
    let unused = "--set parallel.all_to_all=two_d --set parallel.expert=1";
    shop.fails(&format!("train {RECIPE} --ranks 2 {unused}"), 2, &["parallel.all_to_all", "no row travels"]);
}

/// Where every message takes long, far longer than a busy machine makes ranks wait, fewer are faster: the run finds out, and
/// so does the plan.
#[test]
fn the_fastest_way_is_found() {
    let shop = Workshop::new();
    let slow = "--set parallel.node_link={ranks_per_node=4,latency_us=0,message_us=20000,gbytes_per_s=1000}";
    let options = format!("--ranks 8 --set parallel.expert=8 --set moe.experts=8 --set train.steps=2 {slow}");
    train(&shop, "auto", &format!("{options} --set parallel.all_to_all=auto"));
    let chosen = shop.summary("auto")["all_to_all"]["expert"].clone();
    assert!(chosen == "two_d" || chosen == "two_level", "{chosen}");
    let device = "[device]\nmemory_gb = 8\nf32_tflops = 1\nbf16_tflops = 1\nefficiency = 0.5\nmemory_gbytes_per_s = 100\n\
                  ranks_per_node = 4\nwithin = { latency_us = 5, gbytes_per_s = 10 }\n\
                  between = { latency_us = 15, message_us = 20000, gbytes_per_s = 1 }\nhost_gbytes_per_s = 10\n\
                  host_memory_gb = 100\n";
    shop.write("card.toml", device);
    let plan = |set: &str| {
        let planned = shop.succeeds(&format!("plan {RECIPE} {options} --device card.toml --json {set}"));
        (serde_json::from_str::<Value>(&planned.out).unwrap(), planned.err)
    };
    let (planned, told) = plan("--set parallel.all_to_all=auto");
    assert!(told.contains("\"auto\" is planned as \"two_"), "{told}");
    assert!(planned["all_to_all"].as_str().unwrap().starts_with("two_"), "{planned}");
    let (direct, _) = plan("");
    assert!(planned["seconds_total"].as_f64() < direct["seconds_total"].as_f64());
}

/// A communicator whose rank has what an exchange brings later than the others.
struct LastServed(Arc<dyn Communicator>);

const LATER_BY: Duration = Duration::from_millis(20);

impl Wrapper for LastServed {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.0
    }

    fn around(&self, inner: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(LastServed(inner))
    }

    fn start(&self, request: Request) -> Result<Pending, CommError> {
        let is_exchange = request.operation.collective() == Collective::AllToAll;
        let pending = self.0.start(request)?;
        Ok(if is_exchange { Pending::in_flight(Box::new(ServedLater(pending))) } else { pending })
    }
}

struct ServedLater(Pending);

impl InFlight for ServedLater {
    fn wait(self: Box<Self>) -> Result<Completed, CommError> {
        let completed = self.0.wait();
        thread::sleep(LATER_BY);
        completed
    }
}

/// A layer takes five exchanges; the others never wait for the last rank's last. They are of the rows that are given.
#[test]
fn a_way_is_as_fast_as_its_slowest_rank() {
    const ROW_BYTES: usize = 4096;
    let four = shape(4, 4);
    let told = on_mesh(four, |rank, _| {
        let world = rank.world.clone();
        let world = if world.rank() == 1 { Arc::new(LastServed(world)) } else { world };
        let mesh = Mesh::of(world, four).unwrap().on_nodes(Nodes::of_consecutive(4, 2));
        let sent = || rank.ledger.snapshot().values().map(|sent| sent.bytes).sum::<u64>();
        let before = sent();
        let mesh = mesh.with_fastest_ways(|degree| ROW_BYTES * 4 / degree).unwrap();
        // Each way sends every other rank its rows, five times and once before, four exchanges each.
        let least = (3 * 6 * 4 * ROW_BYTES * 3) as u64;
        assert!((least..2 * least).contains(&(sent() - before)), "{} of {least}", sent() - before);
        mesh.measured_ways().to_vec()
    });
    assert!(told.iter().all(|ways| *ways == told[0]), "{told:?}");
    let [measured] = &told[0][..] else { panic!("{told:?}") };
    assert!(measured.seconds.iter().all(|seconds| *seconds >= 5.0 * LATER_BY.as_secs_f64()), "{measured}");
}
