//! The ranks: how long they waited for each other, and what they sent.

use super::colours::{legend_of_amount, of_amount};
use super::heatmap::HeatMap;
use super::matrix::MatrixChart;
use super::run::LoadedRun;
use crate::metrics::ReplacedExperts;

/// Nothing for a run whose log does not tell, and for a single rank.
pub(super) fn draw(run: &LoadedRun) -> String {
    if run.waiting.rows() < 2 {
        return String::new();
    }
    let charts = format!("<div class=\"charts\">\n{}{}</div>", waiting(run), traffic(run));
    format!("<section><h2>Ranks</h2>\n{charts}{}</section>\n", replaced(run))
}

fn waiting(run: &LoadedRun) -> String {
    let columns = &run.waiting;
    let means = columns.columns.iter().flat_map(|column| (0..columns.rows()).map(|rank| column.mean(rank)));
    let most = means.fold(0.0, f64::max);
    let map = HeatMap {
        title: "Waiting",
        unit: "seconds a step inside collectives, by rank",
        row: "rank",
        columns,
        value: &|column, rank| column.mean(rank),
        class: &|seconds| of_amount(seconds, most),
        legend: legend_of_amount("0", &short(most)),
    };
    map.draw()
}

/// When experts changed ranks; nothing if none did.
fn replaced(run: &LoadedRun) -> String {
    if run.replaced.is_empty() {
        return String::new();
    }
    let row = |(step, layer): &(u64, ReplacedExperts)| {
        let ReplacedExperts { layer, moved, imbalance_before, imbalance_after, .. } = layer;
        format!(
            "<tr><td>{step}</td><td>{layer}</td><td>{moved}</td><td>{imbalance_before:.2}×</td>\
             <td>{imbalance_after:.2}×</td></tr>"
        )
    };
    format!(
        "<div class=\"scroll long\"><table><caption>Experts that changed ranks; rows of the busiest rank against an even \
         share</caption><thead><tr><th>Step</th><th>Layer</th><th>Experts</th><th>Before</th><th>After</th></tr></thead>\
         <tbody>{}</tbody></table></div>",
        run.replaced.iter().map(row).collect::<String>()
    )
}

fn short(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0} ms", seconds * 1e3) } else { format!("{seconds:.1} s") }
}

/// Nothing where every rank has all experts: no row leaves it.
fn traffic(run: &LoadedRun) -> String {
    let largest = run.sent.values().flatten().map(Vec::len).max().unwrap_or(0);
    if largest < 2 {
        return String::new();
    }
    let ranks = run.sent.values().map(Vec::len).max().unwrap_or(0);
    let mut amounts = vec![vec![None; ranks]; ranks];
    for (from, row) in run.sent.values().flat_map(|rows| rows.iter().enumerate()) {
        let first = from / row.len() * row.len();
        for (sum, n) in amounts[from][first..].iter_mut().zip(row) {
            *sum.get_or_insert(0.0) += n;
        }
    }
    let pairs = amounts.iter().flatten().flatten().count();
    let total: f64 = amounts.iter().flatten().flatten().sum();
    let matrix = MatrixChart {
        title: "Rows between ranks",
        unit: "from down, to across; even = 1×",
        names: ["rank", "rank"],
        nothing: "none",
        amounts: &amounts,
        even: total / pairs as f64,
    };
    matrix.draw()
}
