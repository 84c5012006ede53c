//! What `[[data.tasks]]` may say, and which families learn tasks.

use super::Config;
use super::rules::{Rule, Unused};
use crate::data::{TaskKind, TaskTable};
use crate::limits::Finding;

pub(super) const RULES: &[Rule] = &[Rule {
    key: "data.tasks",
    reads: &["data.tasks", "data.sources", "model.family"],
    check: families_have_their_kind_of_data,
}];

pub(super) const UNUSED: &[Unused] = &[Unused {
    key: "data.temperature",
    reads: &["data.tasks"],
    because: |config| config.data.tasks.is_empty().then_some("only the directions of data.tasks are mixed by it"),
}];

fn families_have_their_kind_of_data(config: &Config) -> Option<Finding> {
    let (family, stacked) = (config.model.family.name(), config.model.blueprint().reads_a_source());
    let (sources, tasks) = (&config.data.sources, &config.data.tasks);
    match (stacked, sources.is_empty(), tasks.is_empty()) {
        (_, false, false) => Some(Finding::new(
            "a recipe has data.sources or data.tasks, not both",
            "move the sources into a task, or leave one of the two out",
        )),
        (true, _, true) => Some(Finding::new(
            format!("missing: an encoder and a decoder (model.family = {family:?}) read one text and write another"),
            "name pairs of texts in [[data.tasks]], kind = \"translation\", sources = [\"news.en-de.tsv\"], in place of \
             data.sources",
        )),
        (false, true, false) => Some(Finding::new(
            format!("only an encoder and a decoder learn tasks, model.family is {family:?}"),
            "set model.family = \"m2m\", or name plain text as data.sources: a model of one stack learns that one task",
        )),
        _ => None,
    }
}

/// What the misfits of tasks depend on.
pub(super) const MISFITS_READ: &[&str] = &["data.tasks"];

/// The keys of tasks that do not fit their kinds or each other.
pub(super) fn misfits(config: &Config) -> Vec<(String, Finding)> {
    let tasks = &config.data.tasks;
    let translates = tasks.iter().any(|task| task.kind == TaskKind::Translation);
    let of_task = |(index, task): (usize, &TaskTable)| {
        let own = numbers(task).into_iter().chain(words(task)).chain(sources(task, translates));
        let twin = tasks[..index].iter().any(|other| other.name() == task.name());
        let twin = twin.then(|| {
            let wrong = format!("there is another task called {:?}", task.name());
            ("name", Finding::new(wrong, "give each a name of its own: name = \"news\""))
        });
        let keyed = |(key, finding): (&str, Finding)| (format!("data.tasks[{index}].{key}"), finding);
        own.chain(twin).map(keyed).collect::<Vec<_>>()
    };
    tasks.iter().enumerate().flat_map(of_task).collect()
}

type KeyFinding = (&'static str, Finding);

/// Numbers of a list's tables have no other bounds.
fn numbers(task: &TaskTable) -> Vec<KeyFinding> {
    let noise = task.noise.unwrap_or_default();
    let share = |share: f64| (0.0..1.0).contains(&share);
    let checks = [
        (
            "weight",
            task.weight.is_finite() && task.weight > 0.0,
            "above 0",
            "leave the task out to learn nothing of it",
        ),
        ("min_pairs", task.min_pairs >= 1, "at least 1", "the nearest valid value is 1"),
        ("max_chars", task.max_chars >= 1, "at least 1", "400 are usual"),
        ("length_ratio", task.length_ratio >= 1.0, "at least 1", "3 is usual"),
        ("noise.mask", share(noise.mask), "from 0 to below 1", "0.35 is usual"),
        ("noise.drop", share(noise.drop), "from 0 to below 1", "0.1 drops every tenth word"),
        ("noise.span", noise.span.is_finite() && noise.span > 0.0, "above 0", "3.5 words are usual"),
    ];
    let faults = checks.into_iter().filter(|(_, fine, ..)| !fine);
    faults.map(|(key, _, range, remedy)| (key, Finding::new(format!("must be {range}"), remedy))).collect()
}

/// Names, languages and directions.
fn words(task: &TaskTable) -> Vec<KeyFinding> {
    let mut found = Vec::new();
    let of_name = |sign: char| sign.is_ascii_alphanumeric() || "_-.".contains(sign);
    if task.name().is_empty() || !task.name().chars().all(of_name) {
        found.push(("name", Finding::new("not a name", "use letters, digits, dots, dashes and underscores")));
    }
    if task.languages.as_ref().is_some_and(Vec::is_empty) {
        found.push(("languages", Finding::new("takes no language", "leave the key out to take all")));
    }
    let directions = task.directions.as_deref().unwrap_or_default();
    let malformed = directions.iter().find(|pattern| {
        let sides = pattern.split_once('-');
        sides.is_none_or(|(from, to)| from.is_empty() || to.is_empty() || pattern.contains(char::is_whitespace))
    });
    if task.directions.is_some() && task.kind != TaskKind::Translation {
        let wrong = format!("a task of the kind {:?} has no directions", task.kind.name());
        found.push(("directions", Finding::new(wrong, "choose its languages: languages = [\"en\", \"de\"]")));
    } else if let Some(pattern) = malformed {
        let wrong = format!("{pattern:?} is no direction");
        found.push(("directions", Finding::new(wrong, "write \"en-de\", \"en-*\" or \"*-en\"")));
    } else if task.directions.is_some() && directions.is_empty() {
        found.push(("directions", Finding::new("takes no direction", "leave the key out to take all")));
    }
    if task.noise.is_some() && task.kind != TaskKind::Denoising {
        let wrong = format!("a task of the kind {:?} corrupts nothing", task.kind.name());
        found.push(("noise", Finding::new(wrong, "leave it out, or make the task one of the kind \"denoising\"")));
    }
    found
}

fn sources(task: &TaskTable, translates: bool) -> Option<KeyFinding> {
    if task.sources.iter().any(|source| source.path.trim().is_empty()) {
        return Some(("sources", Finding::new("an empty path", "name a file, a folder or a glob")));
    }
    if task.sources.is_empty() && !(task.kind.is_of_one_text() && translates) {
        let wrong = if task.kind.is_of_one_text() {
            "missing: there is no translation task whose texts it could take"
        } else {
            "missing: the task has nothing to learn from"
        };
        return Some(("sources", Finding::new(wrong, "name pairs of texts: sources = [\"corpus/\"]")));
    }
    if let Some(wrong) = wrong_texts(task) {
        return Some(("sources", wrong));
    }
    if task.kind != TaskKind::Classification {
        return None;
    }
    let labelled = task.sources.iter().all(|source| source.from.is_some() && source.to.is_none());
    (!labelled).then(|| {
        let wrong = "of texts with labels `from` is the texts' language, and there is no `to`";
        ("sources", Finding::new(wrong, "write { path = \"reviews.tsv\", from = \"en\", fields = [\"1\", \"2\"] }"))
    })
}

/// What is wrong with the first source that says of which one language it is, and should not, or says more.
fn wrong_texts(task: &TaskTable) -> Option<Finding> {
    task.sources.iter().find_map(|source| {
        let of_pairs = source.from.is_some() || source.to.is_some() || source.fields.is_some();
        let Some(language) = &source.language else {
            return source.field.as_ref().map(|_| {
                let wrong = "`field` is of texts of one language, and the source does not say of which";
                Finding::new(wrong, "add language = \"de\", or name the two fields of pairs as `fields`")
            });
        };
        if !task.kind.is_of_one_text() {
            let wrong =
                format!("a source with `language` has no pairs, and the kind {:?} needs them", task.kind.name());
            return Some(Finding::new(wrong, "give it to a task of the kind \"denoising\" or \"language_model\""));
        }
        if language.is_empty() || language.contains(|sign: char| sign.is_whitespace() || sign == ':') {
            return Some(Finding::new(format!("{language:?} is no language"), "write language = \"de\""));
        }
        of_pairs.then(|| {
            let wrong = "a source is of pairs (`from`, `to`, `fields`) or of one language (`language`, `field`)";
            Finding::new(wrong, "leave out the ones or the others")
        })
    })
}
