//! Every example does what it says; each ends in an error if it does not.

use std::collections::BTreeSet;
use std::path::Path;

#[path = "../../examples/catalogues.rs"]
mod catalogues;
#[path = "../../examples/moe_feed_forward.rs"]
mod moe_feed_forward;
#[path = "../../examples/own_gate_and_expert.rs"]
mod own_gate_and_expert;
#[path = "../../examples/training_loop.rs"]
mod training_loop;
#[path = "../../examples/upcycle.rs"]
mod upcycle;

const EXAMPLES: [(&str, fn() -> anyhow::Result<()>); 5] = [
    ("catalogues", catalogues::main),
    ("moe_feed_forward", moe_feed_forward::main),
    ("own_gate_and_expert", own_gate_and_expert::main),
    ("training_loop", training_loop::main),
    ("upcycle", upcycle::main),
];

#[test]
fn every_example_does_what_it_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let files = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let there: BTreeSet<String> = files.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect();
    assert_eq!(there, EXAMPLES.map(|(name, _)| name.to_owned()).into());
    for (name, run) in EXAMPLES {
        run().unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}
