//! The ranks: how long they waited for each other, and what they sent.

use super::colours::{legend_of_amount, of_amount};
use super::heatmap::HeatMap;
use super::matrix::MatrixChart;
use super::run::LoadedRun;

/// Nothing for a run whose log does not tell, and for a single rank.
pub(super) fn draw(run: &LoadedRun) -> String {
    if run.waiting.rows() < 2 {
        return String::new();
    }
    format!("<section><h2>Ranks</h2>\n<div class=\"charts\">\n{}{}</div></section>\n", waiting(run), traffic(run))
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
