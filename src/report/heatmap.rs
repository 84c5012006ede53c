//! A heat map over a run: rows down, steps across.

use super::chart::labels_x;
use super::colours::Cells;
use super::columns::{Column, Columns};
use super::format::{escape, number};
use super::scale::Scale;

/// What to draw; text is escaped here, except the legend.
pub(super) struct HeatMap<'a> {
    pub(super) title: &'a str,
    pub(super) unit: &'a str,
    /// What a row is, for the script.
    pub(super) row: &'a str,
    pub(super) columns: &'a Columns,
    /// The value of a row in a column.
    pub(super) value: &'a dyn Fn(&Column, usize) -> f64,
    pub(super) class: &'a dyn Fn(f64) -> Option<usize>,
    pub(super) legend: String,
}

impl HeatMap<'_> {
    /// Nothing without a column.
    pub(super) fn draw(&self) -> String {
        let columns = &self.columns.columns;
        let (Some(first), Some(last)) = (columns.first(), columns.last()) else {
            return String::new();
        };
        let rows = self.columns.rows();
        let title = escape(self.title);
        format!(
            "<figure class=\"heat\"><figcaption><b>{title}</b> <span class=\"unit\">{}</span>{}</figcaption>\
             <div class=\"plot\"><div class=\"y\">{}</div><div class=\"area\" style=\"height:{}px\">\
             <svg viewBox=\"0 0 {} {rows}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{title}\"{}>{}</svg>\
             </div><div class=\"x\">{}</div></div></figure>\n",
            escape(self.unit),
            self.legend,
            labels_y(rows),
            height(rows),
            last.last - first.first + 1,
            self.read_out(rows),
            self.cells(rows),
            labels_x(&Scale::cells(first.first, last.last)),
        )
    }

    fn cells(&self, rows: usize) -> String {
        let mut cells = Cells::new();
        for row in 0..rows {
            for CellRun { class, start, width } in self.runs(row) {
                cells.push(class, (start, row), width);
            }
        }
        cells.draw()
    }

    fn runs(&self, row: usize) -> Vec<CellRun> {
        let columns = &self.columns.columns;
        let origin = columns[0].first;
        let mut runs: Vec<CellRun> = Vec::new();
        for (index, column) in columns.iter().enumerate() {
            let class = (self.class)((self.value)(column, row));
            let next = columns.get(index + 1).map_or(column.last + 1, |next| next.first);
            let width = next - column.first;
            match runs.last_mut().filter(|run| run.class == class) {
                Some(run) => run.width += width,
                None => runs.push(CellRun { class, start: column.first - origin, width }),
            }
        }
        runs
    }

    /// The values as the script shows them under the pointer: rows by `;`, columns by space.
    fn read_out(&self, rows: usize) -> String {
        let columns = &self.columns.columns;
        let firsts: Vec<String> = columns.iter().map(|column| column.first.to_string()).collect();
        let text = |value: f64| number(if value < 0.1 { value } else { (value * 100.0).round() / 100.0 });
        let row = |row| columns.iter().map(|column| text((self.value)(column, row))).collect::<Vec<_>>().join(" ");
        let rows: Vec<String> = (0..rows).map(row).collect();
        let last = columns.last().map_or(0, |column| column.last);
        format!(
            " data-row=\"{}\" data-firsts=\"{}\" data-last=\"{last}\" data-rows=\"{}\"",
            escape(self.row),
            firsts.join(" "),
            rows.join(";")
        )
    }
}

/// Neighbouring cells of one row and one colour, in steps from the first.
struct CellRun {
    class: Option<usize>,
    start: u64,
    width: u64,
}

/// Height of the map, CSS pixels: rows thick enough to see, the whole low enough to survey.
fn height(rows: usize) -> usize {
    let row = (288 / rows.max(1)).clamp(4, 18);
    row * rows
}

/// Every row by number where rows are thick enough for it, else some; shared with the matrix.
pub(super) fn labels_y(rows: usize) -> String {
    let label = |row: usize| format!("<span style=\"top:{:.2}%\">{row}</span>", middle(row, rows));
    labelled(rows).map(label).collect()
}

/// The rows that have a label.
pub(super) fn labelled(rows: usize) -> impl Iterator<Item = usize> {
    (0..rows).step_by(rows.div_ceil(16).next_power_of_two())
}

/// The middle of a row in per cent of all.
pub(super) fn middle(row: usize, rows: usize) -> f64 {
    (row as f64 + 0.5) / rows as f64 * 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::colours::of_relative;

    #[test]
    fn equal_neighbours_are_one_rectangle() {
        let mut columns = Columns::default();
        (1..=100).for_each(|step| columns.push(step, vec![1.0, 1.0]));
        let map = HeatMap {
            title: "Load",
            unit: "",
            row: "expert",
            columns: &columns,
            value: &|column, row| column.relative(row, 2),
            class: &of_relative,
            legend: String::new(),
        };
        let map = map.draw();
        assert!(map.contains("d=\"M0 0h100v1h-100zM0 1h100v1h-100z\""), "{map}");
    }

    #[test]
    fn many_rows_are_labelled_sparsely() {
        assert_eq!(labels_y(64).matches("<span").count(), 16);
        assert_eq!(labels_y(8).matches("<span").count(), 8);
        assert_eq!((height(8), height(64), height(1)), (144, 256, 18));
    }
}
