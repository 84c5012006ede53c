//! A judge that is believed: over recipes by chance `guildhall verify` raises no alarm, in half the bits neither, and on
//! the recipes it is meant for it catches every bug that can show, there too.

use guildhall::verify::BUGS;
use guildhall_tensor::{Draws, Purpose};

use crate::program::{Finished, Workshop};

/// Those that `cargo test` tries; all of them take minutes.
const FEW: usize = 3;
const ALL: usize = 50;

#[test]
fn no_alarm_is_raised_over_recipes_by_chance() {
    judge(FEW);
}

#[test]
#[ignore = "takes minutes"]
fn no_alarm_is_raised_over_fifty_recipes_by_chance() {
    judge(ALL);
}

/// Searches recipes, and tells what came nearest to an alarm in each.
#[expect(clippy::print_stderr, reason = "figures, for who asks for them")]
fn judge(recipes: usize) {
    let (shop, mut alarms) = (Workshop::new(), Vec::new());
    for number in 0..recipes {
        shop.write("chance.toml", &by_chance(number));
        let found = shop.run("verify chance.toml --ranks 4 --only mesh,dtype,micro_batch,zero,schedule");
        let nearest = found.out.lines().filter(|line| line.contains("half the bits"));
        eprintln!("{number:2} {}", nearest.collect::<Vec<_>>().join("; "));
        if found.code != Some(0) {
            alarms.push(format!("{}\n{}{}", by_chance(number), found.out, found.err));
        }
    }
    assert!(alarms.is_empty(), "{} alarms:\n{}", alarms.len(), alarms.join("\n"));
}

/// What is drawn for one recipe.
struct Chance {
    draws: Draws,
    drawn: u64,
}

impl Chance {
    fn of<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        self.drawn += 1;
        &from[self.draws.bits(self.drawn) as usize % from.len()]
    }

    /// With so many chances in ten.
    fn happens(&mut self, in_ten: u32) -> bool {
        self.drawn += 1;
        self.draws.bits(self.drawn) % 10 < in_ten
    }
}

/// A recipe of any family, gate, limit and size that a search of seconds can hold.
fn by_chance(number: usize) -> String {
    let mut chance = Chance { draws: Draws::new(9, Purpose::Test, number as u64, 0), drawn: 0 };
    let family = *chance.of(&["mixtral", "gpt2", "bert", "transformer_xl"]);
    let (seq, layers) = (*chance.of(&[16, 32]), *chance.of(&[1, 2, 3]));
    let (rows, heads, std) = (*chance.of(&[8, 16]), *chance.of(&[2, 4]), *chance.of(&[0.02, 0.1, 0.2]));
    let mut text = format!(
        "[train]\nsteps = 4\nbatch_tokens = {}\nlr = 1e-2\nseed = {number}\n[model]\nfamily = {family:?}\nvocab = 300\n\
         d_model = 16\nlayers = {layers}\nheads = {heads}\nseq = {seq}\ninit_std = {std}\n",
        rows * seq
    );
    if family != "mixtral" {
        text += &format!("dropout = {:.1}\n", chance.of(&[0.0, 0.1, 0.3]));
    }
    match family {
        "transformer_xl" => text += &format!("segment = 8\nmemory = {}\n", chance.of(&[8, (seq - 8).min(12)])),
        "gpt2" | "bert" if chance.happens(5) => text += "tie_embeddings = true\n",
        _ => {}
    }
    text += &experts(&mut chance, family, seq);
    if layers > 1 && chance.happens(3) {
        text += "layers = { every = 2 }\n";
    }
    text + "[data]\nsources = [\"corpus\"]\nheld_out = 0.1\ncache = \"cache\"\n"
}

const GATES: [&str; 13] = [
    "softmax",
    "naive",
    "noisy",
    "gshard",
    "switch",
    "swipe",
    "hash",
    "balanced",
    "sigmoid",
    "sinkhorn",
    "distributed_capacity",
    "topology",
    "expert_choice",
];

fn experts(chance: &mut Chance, family: &str, seq: usize) -> String {
    // Experts of a causal model may not choose: they would look ahead.
    let gate = *chance.of(&GATES[..if family == "bert" { 13 } else { 12 }]);
    let top_k = match gate {
        "gshard" | "distributed_capacity" | "topology" => 2,
        "switch" => 1,
        _ => *chance.of(&[1, 2]),
    };
    let (experts, width) = (*chance.of(&[2, 4, 8]), *chance.of(&[16, 24]));
    let mut text = format!("[moe]\nexperts = {experts}\ntop_k = {top_k}\nd_expert = {width}\n");
    text += &match gate {
        "swipe" | "distributed_capacity" => format!("gate = {{ kind = {gate:?}, workers = 2 }}\n"),
        "sigmoid" => format!("gate = {{ kind = {gate:?}, bias_rate = 0.01 }}\n"),
        "topology" => format!("gate = {gate:?}\nlogical_nodes = 2\n"),
        _ => format!("gate = {gate:?}\n"),
    };
    let balance = if matches!(gate, "hash" | "expert_choice") { 0.0 } else { *chance.of(&[0.0, 0.01, 0.05]) };
    text += &format!("balance_weight = {balance:?}\n");
    if gate != "expert_choice" && chance.happens(3) {
        text += "z_weight = 0.001\n";
    }
    if !matches!(gate, "expert_choice" | "swipe" | "topology") && chance.happens(5) {
        let (factor, overflow) =
            (chance.of(&[0.5, 1.0, 1.5]), *chance.of(&["position", "probability", "random", "reroute"]));
        text += &format!("capacity_factor = {factor:?}\noverflow = {overflow:?}\n");
        if chance.happens(5) {
            text += &format!("group_tokens = {}\n", chance.of(&[seq, 2 * seq]));
        }
    }
    if chance.happens(2) {
        text += "shared_experts = 1\n";
    }
    text
}

const RECIPES: [&str; 3] = ["decoder", "encoder", "transformer_xl"];

/// Each bug on one of the tiny recipes where storage has half the bits, or where it needs gates that choose for themselves,
/// everywhere: caught, or refused with the reason.
#[test]
fn every_bug_is_caught_or_refused_on_tiny_recipes() {
    let shop = Workshop::new();
    for (number, bug) in BUGS.iter().enumerate() {
        let of_choices =
            matches!(bug.name, "recompute-routes-again" | "drops-tokens-silently" | "member-joins-another-cluster");
        check(&shop, RECIPES[number % RECIPES.len()], bug.name, if of_choices { "" } else { "--half" });
    }
}

/// The same in every layout of the search.
#[test]
#[ignore = "takes minutes"]
fn every_bug_is_caught_or_refused_in_every_layout() {
    let shop = Workshop::new();
    RECIPES.iter().for_each(|recipe| BUGS.iter().for_each(|bug| check(&shop, recipe, bug.name, "--only=all")));
}

/// On their own text the tiny recipes have shared rows where `condense` shares any, and so there is something to compare.
#[test]
fn the_tiny_recipes_condense() {
    let (shop, root) = (Workshop::new(), env!("CARGO_MANIFEST_DIR"));
    for recipe in RECIPES {
        let text = std::fs::read_to_string(format!("{root}/recipes/verify/{recipe}.toml")).unwrap();
        let text = text.replace("docs/**/*.md", &format!("{root}/docs/**/*.md"));
        shop.write(&format!("{recipe}.toml"), &(text + "cache = \"cache\"\n"));
        let found = shop.run(&format!("verify {recipe}.toml --ranks 1 --only condense --json"));
        assert_eq!(found.code, Some(0), "{}{}", found.out, found.err);
        let [report]: [serde_json::Value; 1] = serde_json::from_str(&found.out).unwrap();
        let share = report["condensed_share"].as_f64();
        match recipe {
            // Its experts choose their tokens.
            "encoder" => assert_eq!((share, report["layouts"].as_array().unwrap().len()), (None, 1), "{report}"),
            _ => assert!(share > Some(0.05), "{recipe}: {share:?} of the routes share rows"),
        }
    }
}

/// What a bug's layouts need besides meshes and storage.
fn option(bug: &str) -> &'static str {
    match bug {
        "aux-loss-scaled-by-micro-batches" => ",micro_batch",
        "zero-row-rank-skips-collective" => ",micro_batch,schedule,shadowing",
        "partition-by-wrong-group" => ",zero",
        "recompute-routes-again" | "bias-counts-recomputation" => ",recompute",
        "member-takes-another-clusters-output" | "member-joins-another-cluster" => ",condense",
        "target-stays-behind" | "residual-stays-behind" => ",migrate",
        "bias-in-evaluation" | "bias-not-saved" => ",between_steps",
        _ => "",
    }
}

#[expect(clippy::print_stderr, reason = "figures, for who asks for them")]
fn check(shop: &Workshop, recipe: &str, bug: &str, how: &str) {
    let path = format!("{}/recipes/verify/{recipe}.toml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap().replace("docs/**/*.md", "corpus");
    shop.write(&format!("{recipe}.toml"), &text.replace("max_bytes = 200000", "cache = \"cache\""));
    let how = match how {
        "--only=all" => String::new(),
        // On several ranks each adds up some of the micro-batches alone, which are too few.
        how if bug == "gradients-accumulate-in-bf16" => format!("{how} --only dtype,micro_batch"),
        how => format!("{how} --only mesh,dtype{}", option(bug)),
    };
    let timeout = "--set parallel.timeout_s=3";
    let found = shop.run(&format!("verify {recipe}.toml --ranks 4 {timeout} {how} --inject {bug}"));
    let Finished { code, out, err } = &found;
    let nearest = out.lines().find(|line| line.starts_with("DIFFERS") || line.starts_with("FAILED"));
    eprintln!("{recipe:15} {bug:45} {code:?} {}", nearest.or(err.lines().last()).unwrap_or_default());
    match code {
        Some(1) => assert!(out.ends_with(&format!("{bug} is caught\n")), "{recipe}: {out}{err}"),
        Some(2) => assert!(err.contains("cannot be planted") || err.contains("cannot show"), "{recipe}, {bug}: {err}"),
        _ => panic!("{recipe}, {bug}: {out}{err}"),
    }
}
