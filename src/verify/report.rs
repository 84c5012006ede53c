//! What a search found, as a table to read and as JSON.

use serde::Serialize;

use super::compare::Difference;
use super::cover::Combination;
use super::layouts::SkippedLayout;

pub(super) const BITS: &str = "bits";
pub(super) const ORDER: &str = "order of sums";
pub(super) const STORAGE: &str = "half the bits";
const TOLERANCES: [&str; 3] = [BITS, ORDER, STORAGE];

/// Layouts that differ, and that were skipped for one reason, of which tables tell.
const SHOWN: usize = 20;
const SKIPPED_SHOWN: usize = 4;

/// How a layout compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Comparison {
    /// Within what is allowed.
    Same,
    Differs,
    /// The run ended with an error.
    Failed,
}

impl Comparison {
    /// For tables.
    pub fn word(self) -> &'static str {
        match self {
            Comparison::Same => "same",
            Comparison::Differs => "DIFFERS",
            Comparison::Failed => "FAILED",
        }
    }
}

/// One layout.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checked {
    pub layout: String,
    /// By option, which of its values.
    #[serde(skip)]
    pub(super) row: Combination,
    /// The layout it is compared with.
    pub against: String,
    /// `bits`, `order of sums` or `half the bits`.
    pub tolerance: &'static str,
    pub outcome: Comparison,
    /// Tokens that rounding sent elsewhere, in words; the rest was then compared along the reference's routing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flips: Option<String>,
    /// An error, or what ranks do not agree on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<String>,
    /// What is too far off, and in any case what comes nearest to that; the worst first.
    pub differences: Vec<Difference>,
    pub seconds: f64,
}

/// What was drawn of all combinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SampleSummary {
    pub seed: u64,
    /// Of those drawn, the ones that are possible.
    pub layouts: usize,
    pub drawn: usize,
    /// Possible or not.
    pub combinations: usize,
}

/// The whole search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub steps: u64,
    pub ranks: usize,
    /// The planted bug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bug: Option<&'static str>,
    pub layouts: Vec<Checked>,
    /// The first layout that differs, without the options that it differs without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub smallest: Option<Checked>,
    pub skipped: Vec<SkippedLayout>,
    /// Of the routes of one rank that condenses, if layouts were compared with one: the share without a row of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condensed_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<SampleSummary>,
    /// Layouts that were not run because the search was stopped.
    #[serde(skip_serializing_if = "is_zero")]
    pub left: usize,
    pub seconds: f64,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl Checked {
    /// What tells most, on one line.
    pub fn summary(&self) -> String {
        let flips = self.flips.as_ref().map_or_else(String::new, |flips| format!("; {flips}"));
        match self.messages.first() {
            Some(message) => format!("{}{flips}", message.lines().next().unwrap_or_default()),
            None => format!("{}{flips}", self.worst()),
        }
    }

    fn worst(&self) -> String {
        match self.differences.first() {
            Some(worst) if worst.error == 0.0 => "the same bits".to_owned(),
            Some(worst) => format!("{:.1e} of {:.1e}: {worst}", worst.error, worst.allowed),
            None => "nothing was compared".to_owned(),
        }
    }

    /// Of one that differs: what it was compared with, and all that was kept.
    fn lines(&self) -> String {
        let mut text = format!("{:8} {}: {}\n", self.outcome.word(), self.layout, self.summary());
        text += &format!("         against {}, {}\n", self.against, self.tolerance);
        let differences = self.differences.iter().filter(|one| one.is_too_large());
        let told = differences.map(|one| format!("{:.1e} of {:.1e}: {one}", one.error, one.allowed));
        for line in self.messages.iter().cloned().chain(told).skip(1) {
            text += &format!("         {}\n", line.replace('\n', "\n         "));
        }
        text
    }
}

impl Report {
    pub fn has_differences(&self) -> bool {
        self.layouts.iter().any(|layout| layout.outcome != Comparison::Same)
    }

    /// How many are the same and how nearly, each that differs, and what was skipped, by reason.
    pub fn table(&self) -> String {
        let mut text: String = TOLERANCES.iter().map(|tolerance| self.same(tolerance)).collect();
        let differ: Vec<&Checked> = self.layouts.iter().filter(|layout| layout.outcome != Comparison::Same).collect();
        text += &differ.iter().take(SHOWN).map(|layout| layout.lines()).collect::<String>();
        if differ.len() > SHOWN {
            text += &format!("         and {} more that differ; --json shows all\n", differ.len() - SHOWN);
        }
        if differ.len() > 1 {
            text += &in_common(&differ);
        }
        if let Some(smallest) = &self.smallest {
            text += &format!("smallest {}: {}\n", smallest.layout, smallest.summary());
        }
        if let Some(share) = self.condensed_share {
            text += &format!("condense {:.1} % of routes share a row on one rank\n", 100.0 * share);
        }
        text += &self.skipped_by_reason();
        text += &self.sampled();
        text + &self.last_line()
    }

    /// One line about all layouts that are the same within a tolerance: the one that comes nearest to it.
    fn same(&self, tolerance: &str) -> String {
        let of_it = |layout: &&Checked| layout.outcome == Comparison::Same && layout.tolerance == tolerance;
        let share = |layout: &Checked| layout.differences.first().map_or(0.0, Difference::share);
        let same = self.layouts.iter().filter(of_it);
        let Some(nearest) = same.clone().max_by(|a, b| share(a).total_cmp(&share(b))) else { return String::new() };
        let count = same.count();
        match tolerance {
            BITS => format!("same     {count} to the bit\n"),
            _ => format!("same     {count} but for {tolerance}, at most {} ({})\n", nearest.worst(), nearest.layout),
        }
    }

    /// How to draw the same again, and how much it says of the whole.
    fn sampled(&self) -> String {
        let Some(SampleSummary { seed, layouts, drawn, combinations }) = self.sample else { return String::new() };
        format!("sample   {layouts} layouts, of {drawn} drawn from {combinations} combinations by --seed {seed}\n")
    }

    fn skipped_by_reason(&self) -> String {
        let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
        for SkippedLayout { layout, reason } in &self.skipped {
            match reasons.iter_mut().find(|(other, _)| other == reason) {
                Some((_, layouts)) => layouts.push(layout),
                None => reasons.push((reason, vec![layout])),
            }
        }
        let line = |(reason, layouts): (&str, Vec<&str>)| {
            let more = layouts.len().saturating_sub(SKIPPED_SHOWN);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            let shown = layouts[..layouts.len().min(SKIPPED_SHOWN)].join("; ");
            format!("skipped  {shown}{more}\n         because {reason}\n")
        };
        reasons.into_iter().map(line).collect()
    }

    fn last_line(&self) -> String {
        let differ = self.layouts.iter().filter(|layout| layout.outcome != Comparison::Same).count();
        let flips = self.layouts.iter().filter(|layout| layout.flips.is_some()).count();
        let flips =
            if flips > 0 { format!(", {flips} with tokens that rounding sent elsewhere") } else { String::new() };
        let left = if self.left > 0 { format!("; stopped, {} not run", self.left) } else { String::new() };
        let counts = format!("{} layouts in {:.0} s: {differ} differ{flips}{left}", self.layouts.len(), self.seconds);
        match (self.bug, differ > 0) {
            (None, _) => format!("{counts}\n"),
            (Some(bug), true) => format!("{counts}; {bug} is caught\n"),
            (Some(bug), false) => format!("{counts}; {bug} is NOT CAUGHT\n"),
        }
    }
}

/// What the names of all these layouts say.
fn in_common(layouts: &[&Checked]) -> String {
    let parts = |layout: &Checked| layout.layout.split(", ").map(str::to_owned).collect::<Vec<_>>();
    let all: Vec<Vec<String>> = layouts.iter().map(|layout| parts(layout)).collect();
    let shared = all[0].iter().filter(|part| all.iter().all(|parts| parts.contains(part)));
    match shared.cloned().collect::<Vec<_>>().join(", ") {
        shared if shared.is_empty() => String::new(),
        shared => format!("common   to all that differ: {shared}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(name: &str, tolerance: &'static str, error: f64, allowed: f64) -> Checked {
        let difference = Difference { what: "loss", step: Some(1), tensor: None, rank: None, error, allowed };
        let outcome = if error > allowed { Comparison::Differs } else { Comparison::Same };
        Checked {
            layout: name.to_owned(),
            row: Combination::new(),
            against: "1 rank".to_owned(),
            tolerance,
            outcome,
            flips: None,
            messages: Vec::new(),
            differences: vec![difference],
            seconds: 0.0,
        }
    }

    #[test]
    fn tables_of_thousands_of_layouts_are_short() {
        let same = (2..2000).map(|ranks| layout(&format!("{ranks} ranks"), ORDER, 1e-9 * f64::from(ranks), 1e-5));
        let differ = (2..27).map(|ranks| layout(&format!("{ranks} ranks, zero 3, tile 100"), BITS, 0.5, 0.0));
        let layouts = [layout("1 rank", BITS, 0.0, 0.0)].into_iter().chain(same).chain(differ).collect();
        let skipped = (0..9).map(|i| SkippedLayout { layout: format!("s{i}"), reason: "why".to_owned() }).collect();
        let sample = Some(SampleSummary { seed: 5, layouts: 2031, drawn: 9000, combinations: 1 << 20 });
        let report = Report {
            steps: 2,
            ranks: 8,
            bug: None,
            layouts,
            smallest: None,
            skipped,
            condensed_share: Some(0.242),
            sample,
            left: 7,
            seconds: 3.0,
        };
        let table = report.table();
        let mut lines = table.lines();
        assert_eq!(lines.next(), Some("same     1 to the bit"));
        let nearest = "same     1998 but for order of sums, at most 2.0e-6 of 1.0e-5: loss, step 1 (1999 ranks)";
        assert_eq!(lines.next(), Some(nearest));
        assert_eq!(lines.next(), Some("DIFFERS  2 ranks, zero 3, tile 100: 5.0e-1 of 0.0e0: loss, step 1"));
        let rest: Vec<&str> = lines.skip(2 * SHOWN - 1).collect();
        let end = [
            "         and 5 more that differ; --json shows all",
            "common   to all that differ: zero 3, tile 100",
            "condense 24.2 % of routes share a row on one rank",
            "skipped  s0; s1; s2; s3; and 5 more",
            "         because why",
            "sample   2031 layouts, of 9000 drawn from 1048576 combinations by --seed 5",
            "2024 layouts in 3 s: 25 differ; stopped, 7 not run",
        ];
        assert_eq!(rest, end);
    }
}
