//! Scores of what the run's model writes: a table of all directions, and a picture of the languages.

use std::collections::{BTreeMap, BTreeSet};

use crate::metrics::{PartScores, RunScores};

use super::colours::{legend_of_amount, of_amount};
use super::format::{escape, grouped, percent};
use super::parts::direction;

/// Cells of wider pictures are too small for their scores in digits.
const DIGITS_MAX: usize = 16;

/// Nothing of a run whose texts nobody scored.
pub(super) fn draw(scores: Option<&RunScores>) -> String {
    let Some(scores) = scores else { return String::new() };
    let scored: Vec<&PartScores> = scores.tasks.iter().filter(|part| part.sentences.is_some()).collect();
    if scored.is_empty() {
        return String::new();
    }
    format!(
        "<section><h2>Scores <small>of held-out texts, at step {}</small></h2>\n{}{}</section>\n",
        grouped(scores.step),
        pictures(&scored),
        table(&scored)
    )
}

/// What a picture shows: the first of these that the parts have.
struct Measure {
    name: &'static str,
    of: fn(&PartScores) -> Option<f64>,
}

const MEASURES: [Measure; 2] =
    [Measure { name: "chrF", of: |part| part.chrf }, Measure { name: "BLEU", of: |part| part.bleu }];

fn pictures(scored: &[&PartScores]) -> String {
    let tasks: BTreeSet<&str> = scored.iter().map(|part| part.part.task.as_str()).collect();
    let of_task = |task: &str| {
        let measured = |measure: &Measure| {
            let parts = scored.iter().copied().filter(|part| part.part.task == task);
            let scores = parts.filter_map(|part| {
                let score = (measure.of)(part).filter(|score| score.is_finite())?;
                Some(([&part.part.from[..], &part.part.to[..]], score))
            });
            scores.collect::<BTreeMap<[&str; 2], f64>>()
        };
        let with_scores = MEASURES.iter().map(|measure| (measure.name, measured(measure)));
        // A single direction is no picture.
        let found = with_scores.into_iter().find(|(_, scores)| !scores.is_empty());
        found.filter(|(_, scores)| scores.len() > 1).map_or_else(String::new, |(name, scores)| {
            ScoreGrid { title: &format!("{name}, {task}"), measure: name, scores: &scores }.draw()
        })
    };
    tasks.into_iter().map(of_task).collect()
}

/// Scores by language that is read and that is written.
struct ScoreGrid<'a> {
    title: &'a str,
    measure: &'a str,
    scores: &'a BTreeMap<[&'a str; 2], f64>,
}

impl<'a> ScoreGrid<'a> {
    fn draw(&self) -> String {
        let (lines, columns) = match self.pivot() {
            Some(pivot) => self.around(pivot),
            None => self.all(),
        };
        let most = self.scores.values().copied().fold(0.0, f64::max);
        let digits = columns.len() <= DIGITS_MAX;
        let head: String = columns.iter().map(|name| format!("<th><span>{}</span></th>", escape(name))).collect();
        let cell = |direction: &Option<[&str; 2]>| {
            let scored = direction.and_then(|direction| Some((direction, *self.scores.get(&direction)?)));
            let Some(([from, to], score)) = scored else { return "<td></td>".to_owned() };
            let class = of_amount(score, most).map_or_else(String::new, |class| format!("q{class}"));
            let text = if digits { format!("{score:.1}") } else { String::new() };
            let (name, measure) = (escape(&format!("{from} → {to}")), self.measure);
            format!("<td class=\"{class}\" title=\"{name}: {measure} {score:.1}\">{text}</td>")
        };
        let line = |(name, cells): &(String, Vec<Option<[&str; 2]>>)| {
            format!("<tr><th>{}</th>{}</tr>", escape(name), cells.iter().map(cell).collect::<String>())
        };
        let rows: String = lines.iter().map(line).collect();
        format!(
            "<figure class=\"heat\"><figcaption><b>{}</b>{}</figcaption><div class=\"scroll\">\
             <table class=\"grid {}\"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></figure>\n",
            escape(self.title),
            legend_of_amount("0", &format!("{most:.0}")),
            if digits { "roomy" } else { "dense" },
        )
    }

    /// The language that all directions share, if there are too many for a square that is mostly empty.
    fn pivot(&self) -> Option<&'a str> {
        let mut directions = self.scores.keys();
        let first = *directions.next()?;
        let shared = first.into_iter().find(|language| self.scores.keys().all(|both| both.contains(language)))?;
        (self.scores.len() > 2).then_some(shared)
    }

    /// From the pivot and into it, the best first.
    fn around(&self, pivot: &'a str) -> (Vec<GridLine<'a>>, Vec<&'a str>) {
        let others: BTreeSet<&str> = self.scores.keys().flatten().copied().filter(|name| *name != pivot).collect();
        let score = |direction: [&str; 2]| self.scores.get(&direction).copied().unwrap_or_default();
        let mut others: Vec<&str> = others.into_iter().collect();
        let both = |other: &str| score([pivot, other]) + score([other, pivot]);
        others.sort_by(|a, b| both(b).total_cmp(&both(a)));
        let out = others.iter().map(|other| Some([pivot, *other])).collect();
        let back = others.iter().map(|other| Some([*other, pivot])).collect();
        (vec![(format!("{pivot} → …"), out), (format!("… → {pivot}"), back)], others)
    }

    fn all(&self) -> (Vec<GridLine<'a>>, Vec<&'a str>) {
        let [from, to] = [0, 1].map(|side| self.scores.keys().map(|both| both[side]).collect::<BTreeSet<&str>>());
        let line = |from: &&'a str| {
            let cells = to.iter().map(|to| (from != to).then_some([*from, *to])).collect();
            (format!("{from} → …"), cells)
        };
        (from.iter().map(line).collect(), to.iter().copied().collect())
    }
}

/// What a line is called, and the direction of each of its cells.
type GridLine<'a> = (String, Vec<Option<[&'a str; 2]>>);

fn table(scored: &[&PartScores]) -> String {
    let has = |of: fn(&PartScores) -> Option<f64>| scored.iter().any(|part| of(part).is_some());
    let columns: Vec<&ScoreColumn> = COLUMNS.iter().filter(|column| has(column.of)).collect();
    let heads: String = columns.iter().map(|column| format!("<th>{}</th>", column.name)).collect();
    let row = |part: &&PartScores| {
        let cell = |column: &&ScoreColumn| match (column.of)(part) {
            Some(value) => format!("<td data-value=\"{value}\">{}</td>", (column.text)(value)),
            None => "<td data-value=\"\">–</td>".to_owned(),
        };
        let sentences = part.sentences.unwrap_or_default();
        format!(
            "<tr><th>{}</th><td class=\"text\">{}</td><td data-value=\"{sentences}\">{}</td>{}</tr>",
            escape(&part.part.task),
            escape(&direction(&part.part.from, &part.part.to)),
            grouped(sentences),
            columns.iter().map(cell).collect::<String>()
        )
    };
    let rows: String = scored.iter().map(row).collect();
    format!(
        "<div class=\"scroll long\"><table class=\"sortable\"><caption>Of every direction, as sacrebleu scores it</caption>\
         <thead><tr><th>Task</th><th class=\"text\">Direction</th><th>Texts</th>{heads}</tr></thead>\
         <tbody>{rows}</tbody></table></div>\n"
    )
}

struct ScoreColumn {
    name: &'static str,
    of: fn(&PartScores) -> Option<f64>,
    text: fn(f64) -> String,
}

const COLUMNS: [ScoreColumn; 5] = [
    ScoreColumn { name: "BLEU", of: |part| part.bleu, text: one_decimal },
    ScoreColumn { name: "chrF", of: |part| part.chrf, text: one_decimal },
    ScoreColumn { name: "Exact", of: |part| part.exact, text: percent },
    ScoreColumn { name: "Accuracy", of: |part| part.accuracy, text: percent },
    ScoreColumn { name: "Loss", of: |part| part.part.loss, text: super::format::loss },
];

fn one_decimal(score: f64) -> String {
    format!("{score:.1}")
}
