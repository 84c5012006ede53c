//! What a run says of the nodes of its ranks, and of the links between them.

use crate::config::Config;
use crate::launch::DevicePath;
use crate::parallel::{AllToAll, Axis, Backend, ExpertTable, GpuTransport, Nodes};

/// How what GPUs send each other goes, if there are any.
pub(super) fn path(config: &Config, path: &DevicePath) -> String {
    let are_there = config.parallel.backend == Backend::Cuda && config.parallel.ranks > 1;
    if are_there { format!(", GPUs' memory {path}") } else { String::new() }
}

/// Why that is not the way it was to be.
fn path_notice(config: &Config, path: &DevicePath) -> Option<String> {
    let (backend, transport) = (config.parallel.backend, config.parallel.transport);
    match path {
        DevicePath::Host(Some(why)) => {
            Some(format!("what is in GPUs' memory goes from rank to rank {path}, which is slow: {why}"))
        }
        DevicePath::Own if transport == GpuTransport::Nccl => {
            let backend = backend.name();
            Some(format!(
                "parallel.transport = \"nccl\" has nothing to carry: parallel.backend = {backend:?}, parallel.ranks = {}",
                config.parallel.ranks
            ))
        }
        _ => None,
    }
}

/// How ranks lie on nodes, and how what they send each other goes from one to another; nothing of a single one.
pub(super) fn header(config: &Config, nodes: &Nodes) -> String {
    let by = match config.parallel.all_to_all {
        _ if nodes.count() == 1 => return String::new(),
        _ if !differ(config, nodes) => "",
        AllToAll::Auto => ", all-to-alls by the way that is measured to be fastest",
        AllToAll::Direct => "",
        AllToAll::TwoLevel => ", all-to-alls by two_level",
        AllToAll::TwoD => ", all-to-alls by two_d",
    };
    format!(", on {nodes}{by}")
}

/// The links that messages are charged for.
pub(super) fn links(config: &Config) -> Vec<String> {
    let told = |latency_us: f64, message_us: f64, gbytes_per_s: f64, whom: &str| {
        let each = if message_us > 0.0 { format!(", {message_us} us a message") } else { String::new() };
        format!("emulated: {latency_us} us{each} and {gbytes_per_s} GB/s for messages {whom}")
    };
    let (link, nodes) = (config.parallel.link, config.parallel.node_link);
    let whom = if nodes.is_some() { "within a node" } else { "between ranks" };
    let within = link.map(|link| told(link.latency_us, link.message_us, link.gbytes_per_s, whom));
    let between = nodes.map(|link| {
        let ranks =
            if link.ranks_per_node == 1 { "one rank".to_owned() } else { format!("{} ranks", link.ranks_per_node) };
        told(link.latency_us, link.message_us, link.gbytes_per_s, &format!("between nodes of {ranks}"))
    });
    within.into_iter().chain(between).collect()
}

/// Whether ways from node to node differ for the rows of any layer.
fn differ(config: &Config, nodes: &Nodes) -> bool {
    config.parallel.shapes().iter().any(|shape| nodes.may_gather_experts(shape))
}

/// What a recipe says of nodes and of GPUs that those that there are do not bear out.
pub(super) fn notices(config: &Config, nodes: &Nodes, path: &DevicePath) -> Vec<String> {
    let all = [way_round(config, nodes), logical_nodes(config, nodes), path_notice(config, path)];
    all.into_iter().flatten().collect()
}

/// A way that was asked for by name, and saves nothing.
fn way_round(config: &Config, nodes: &Nodes) -> Option<String> {
    let name = match config.parallel.all_to_all {
        AllToAll::Auto | AllToAll::Direct => return None,
        AllToAll::TwoLevel => "two_level",
        AllToAll::TwoD => "two_d",
    };
    // What has its own notice has been told.
    if config.parallel.expert.largest() == 1 || differ(config, nodes) {
        return None;
    }
    let why = match nodes.count() {
        1 => "all ranks are on 1 node".to_owned(),
        _ => format!("with {nodes}, no expert group has ranks on several nodes and several of them on one"),
    };
    Some(format!("parallel.all_to_all = {name:?} is as \"direct\": {why}"))
}

/// Nodes that a gate takes experts to be on, and on which they are not. Of a single node any number is an experiment.
fn logical_nodes(config: &Config, nodes: &Nodes) -> Option<String> {
    let moe = config.moe.as_ref().filter(|moe| nodes.count() > 1 && moe.reads_nodes())?;
    let (parallel, logical) = (&config.parallel, moe.logical_nodes);
    let table = |experts: usize, degree: usize| match &parallel.expert_table {
        Some(owners) => ExpertTable::new(owners, degree),
        None => ExpertTable::even(experts, degree),
    };
    let mut pairs = parallel.expert.pairs(&moe.experts).into_iter();
    let are_real = |(degree, experts): (usize, usize)| {
        let owners = table(experts, degree).owners();
        let shape = parallel.shape().at(degree);
        shape.groups(Axis::Expert(degree)).iter().all(|group| {
            let real = Nodes::named(owners.iter().map(|&owner| nodes.of(group[owner])));
            let meant = Nodes::named((0..experts).map(|expert| expert * logical / experts));
            real == meant
        })
    };
    if pairs.all(are_real) {
        return None;
    }
    Some(format!(
        "moe.logical_nodes = {logical} is not how experts lie on nodes ({nodes}): the gate goes by the recipe, so that results \
         do not depend on where a run runs, and does not save messages between the nodes that there are"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    fn loaded(set: &[&str]) -> Config {
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/quickstart.toml");
        let base = ["parallel.ranks=4", "parallel.expert=4", "moe.experts=8"].into_iter();
        let set: Vec<String> = base.chain(set.iter().copied()).map(str::to_owned).collect();
        config::load(&recipe, &set, None).expect("a recipe").config
    }

    #[test]
    fn a_header_tells_nodes_and_ways() {
        let told = |set: &[&str], nodes: Nodes| header(&loaded(set), &nodes);
        let two = || Nodes::of_consecutive(4, 2);
        assert_eq!(told(&["parallel.all_to_all=two_d"], Nodes::one(4)), "");
        assert_eq!(told(&[], two()), ", on 2 nodes of 2 ranks");
        assert_eq!(told(&["parallel.all_to_all=two_d"], two()), ", on 2 nodes of 2 ranks, all-to-alls by two_d");
        assert_eq!(told(&["parallel.all_to_all=two_d"], Nodes::of_consecutive(4, 1)), ", on 4 nodes of 1 rank");
        let uneven = told(&["parallel.all_to_all=auto"], Nodes::of_consecutive(4, 3));
        assert!(
            uneven.starts_with(", on 2 nodes of 3 and 1 rank, all-to-alls by the way that is measured"),
            "{uneven}"
        );
    }

    #[test]
    fn ways_that_save_nothing_are_told() {
        let told = |set: &[&str], nodes: Nodes| notices(&loaded(set), &nodes, &DevicePath::Own);
        assert_eq!(told(&["parallel.all_to_all=auto"], Nodes::one(4)), [""; 0]);
        let one = told(&["parallel.all_to_all=two_level"], Nodes::one(4));
        assert_eq!(one, ["parallel.all_to_all = \"two_level\" is as \"direct\": all ranks are on 1 node"]);
        let apart = told(&["parallel.all_to_all=two_d"], Nodes::of_consecutive(4, 1));
        assert!(apart[0].contains("with 4 nodes of 1 rank, no expert group has ranks on several nodes"), "{apart:?}");
    }

    /// The recipe's nodes are those there are, in the order of ranks, if each has as many of a group's experts.
    #[test]
    fn logical_nodes_that_are_no_nodes_are_told() {
        let told = |logical: &str, nodes: Nodes| {
            let kind = "moe.gate={kind=\"topology\",outside=0.5}";
            notices(&loaded(&[kind, &format!("moe.logical_nodes={logical}")]), &nodes, &DevicePath::Own).len()
        };
        assert_eq!(told("2", Nodes::of_consecutive(4, 2)), 0);
        assert_eq!(told("4", Nodes::of_consecutive(4, 1)), 0);
        assert_eq!(told("2", Nodes::one(4)), 0, "an experiment");
        assert_eq!(told("4", Nodes::of_consecutive(4, 2)), 1);
        assert_eq!(told("2", Nodes::of_consecutive(4, 3)), 1);
        assert_eq!(told("2", Nodes::named([0, 1, 0, 1])), 1, "ranks are dealt to nodes in turn");
    }
}
