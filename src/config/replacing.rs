//! What `parallel.replace_every` may be together with other keys: experts that change ranks are equally many on each.

use super::Config;
use super::rules::{Rule, Unused, conflict};
use crate::limits::Finding;
use crate::parallel::{Exchange, Migrate};

const EVERY: &str = "parallel.replace_every";

pub(super) const RULES: &[Rule] = &[
    Rule {
        key: EVERY,
        reads: &[EVERY, "parallel.expert_table", "parallel.expert", "moe.experts"],
        check: ranks_own_equally_many,
    },
    Rule {
        key: EVERY,
        reads: &[EVERY, "moe.record", "moe.replay", "moe.shadowing", "parallel.migrate"],
        check: recorded_decisions_are_of_one_table,
    },
];

fn ranks_own_equally_many(config: &Config) -> Option<Finding> {
    let (table, ranks) = (config.parallel.expert_table.as_ref()?, config.parallel.expert.largest());
    let owned = |rank: usize| table.iter().filter(|&&owner| owner == rank).count();
    if config.parallel.replace_every == 0 || (1..ranks).all(|rank| owned(rank) == owned(0)) {
        return None;
    }
    let wrong = "experts change places one for one, and parallel.expert_table gives ranks different numbers of them";
    conflict(wrong, "set it to 0, or leave parallel.expert_table out, or give every rank as many")
}

fn recorded_decisions_are_of_one_table(config: &Config) -> Option<Finding> {
    let moe = config.moe.as_ref().filter(|_| config.parallel.replace_every > 0)?;
    let file =
        [("moe.record", &moe.record), ("moe.replay", &moe.replay)].into_iter().find(|(_, path)| path.is_some())?.0;
    let decided = match (moe.shadowing != "off", config.parallel.migrate != Migrate::Off) {
        (true, _) => "shadow sets (moe.shadowing)",
        (false, true) => "hosts of sequences (parallel.migrate)",
        (false, false) => return None,
    };
    let wrong = format!("the {decided} beside {file} are of one table of experts");
    conflict(wrong, format!("set it to 0, or leave {file} out"))
}

pub(super) const UNUSED: &[Unused] = &[
    Unused {
        key: EVERY,
        reads: &[EVERY, "parallel.expert", "parallel.exchange", "moe.experts", "moe.layers", "model.layers"],
        because: |config| (config.parallel.replace_every > 0).then(|| experts_stay(config))?,
    },
    Unused {
        key: "parallel.replace_gain",
        reads: &[EVERY],
        because: |config| (config.parallel.replace_every == 0).then_some("parallel.replace_every = 0 moves no expert"),
    },
];

/// Why it does not matter who owns which expert, if it does not.
fn experts_stay(config: &Config) -> Option<&'static str> {
    let Some(moe) = &config.moe else { return Some("the recipe has no [moe] section") };
    let layers = moe.of_layers(config.model.layers);
    let degrees = config.parallel.expert.of_layers(layers.len());
    let mut layers = layers.iter().map(|(_, moe)| moe.experts).zip(degrees);
    if config.parallel.expert.largest() == 1 {
        Some("with parallel.expert = 1 every rank has all experts")
    } else if config.parallel.exchange == Exchange::Experts {
        Some("parallel.exchange = \"experts\" computes every row where its token is")
    } else {
        let alone = layers.all(|(experts, degree)| degree == 1 || experts <= degree);
        alone.then_some("every rank has one expert, and that makes no rank's rows fewer, whichever it is")
    }
}
