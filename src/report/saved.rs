//! What condensation and migration did in one MoE layer.

use super::chart::{Chart, Curve, Size, Style, XAxis, YRange};
use super::colours::{legend_of_relative, of_relative};
use super::columns::Columns;
use super::heatmap::HeatMap;
use super::series::Point;
use crate::metrics::{CondensedRecord, MigratedSequences, UnsentRecord};

/// The rows that a layer saved, over the run.
#[derive(Default)]
pub(super) struct SavedRows {
    uncomputed_percent: Vec<Point>,
    unsent_percent: Vec<Point>,
    /// Compared pairs of tokens, by cosine.
    similarity: Columns,
    /// Sequences that went on at another rank.
    moved: Vec<Point>,
}

impl SavedRows {
    pub(super) fn push_computed(&mut self, step: u64, condensed: &CondensedRecord) {
        self.uncomputed_percent.push((step, 100.0 * condensed.uncomputed_share));
        let pairs: Vec<f64> = condensed.similarity.iter().map(|&pairs| pairs as f64).collect();
        if pairs.iter().any(|&pairs| pairs > 0.0) {
            self.similarity.push(step, pairs);
        }
    }

    pub(super) fn push_sent(&mut self, step: u64, unsent: &UnsentRecord) {
        if unsent.routes > 0 {
            self.unsent_percent.push((step, 100.0 * unsent.unsent_share));
        }
    }

    pub(super) fn push_moved(&mut self, step: u64, migrated: &MigratedSequences) {
        self.moved.push((step, migrated.sequences as f64));
    }

    /// Nothing of a run without condensation and migration.
    pub(super) fn draw(&self) -> String {
        let condensed = [("not computed", &self.uncomputed_percent), ("not sent", &self.unsent_percent)];
        [
            chart("Condensed routes", "% of the routes, and of those to other ranks", &condensed),
            self.similarities(),
            chart("Sequences that moved", "per step", &[("moved", &self.moved)]),
        ]
        .concat()
    }

    fn similarities(&self) -> String {
        let bins = self.similarity.rows();
        let map = HeatMap {
            title: "Similarity of tokens",
            unit: "pairs by cosine, -1 at the top, 1 at the bottom; uniform = 1×",
            row: "bin",
            columns: &self.similarity,
            value: &|column, bin| column.relative(bin, bins),
            class: &of_relative,
            legend: legend_of_relative("no pairs"),
        };
        map.draw()
    }
}

/// Nothing without a point.
fn chart(title: &str, unit: &str, curves: &[(&str, &Vec<Point>)]) -> String {
    let told = curves.iter().filter(|(_, points)| !points.is_empty());
    let lines: Vec<Curve> = told.map(|&(name, points)| Curve { name, points, style: Style::Smoothed }).collect();
    if lines.is_empty() {
        return String::new();
    }
    Chart { title, unit, size: Size::Small, axis: YRange::FromZero, across: XAxis::Steps, lines }.draw()
}
