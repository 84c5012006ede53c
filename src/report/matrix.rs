//! A matrix of amounts between two of a kind: from down, to across, coloured by how they compare with an even share.

use super::colours::{Cells, legend_of_relative, of_relative};
use super::format::{count, escape, number};
use super::heatmap::{labelled, labels_y, middle};

/// Cells of a larger matrix are too small for their amounts in digits.
const DIGITS_MAX: usize = 4;

/// What to draw; text is escaped here.
pub(super) struct MatrixChart<'a> {
    pub(super) title: &'a str,
    pub(super) unit: &'a str,
    /// What a row and what a column is.
    pub(super) names: [&'a str; 2],
    /// What a cell of 0 says in the legend.
    pub(super) nothing: &'a str,
    /// By row, then by column; square. A cell without a meaning is `None`.
    pub(super) amounts: &'a [Vec<Option<f64>>],
    /// The amount of every cell, if all were even.
    pub(super) even: f64,
}

impl MatrixChart<'_> {
    pub(super) fn draw(&self) -> String {
        let (size, title) = (self.amounts.len(), escape(self.title));
        format!(
            "<figure class=\"heat matrix\"><figcaption><b>{title}</b> <span class=\"unit\">{}</span>{}</figcaption>\
             <div class=\"plot\"><div class=\"y\">{}</div><div class=\"area\">\
             <svg viewBox=\"0 0 {size} {size}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{title}\"{}>{}\
             </svg>{}</div><div class=\"x\">{}</div></div></figure>\n",
            escape(self.unit),
            legend_of_relative(self.nothing),
            labels_y(size),
            self.read_out(),
            self.cells(),
            self.digits(),
            labels_x(size),
        )
    }

    fn relative(&self, amount: f64) -> f64 {
        if self.even > 0.0 { amount / self.even } else { 0.0 }
    }

    /// Every cell that has a meaning: its place and amount.
    fn filled(&self) -> impl Iterator<Item = (usize, usize, f64)> {
        let of_row = |(y, row): (usize, &Vec<Option<f64>>)| {
            row.iter().enumerate().filter_map(move |(x, amount)| Some((x, y, (*amount)?))).collect::<Vec<_>>()
        };
        self.amounts.iter().enumerate().flat_map(of_row)
    }

    fn cells(&self) -> String {
        let mut cells = Cells::new();
        self.filled().for_each(|(x, y, amount)| cells.push(of_relative(self.relative(amount)), (x as u64, y), 1));
        cells.draw()
    }

    /// The amounts over their cells.
    fn digits(&self) -> String {
        let size = self.amounts.len();
        let digits = |(x, y, amount): (usize, usize, f64)| {
            let (left, top) = (middle(x, size), middle(y, size));
            format!("<span style=\"left:{left:.2}%;top:{top:.2}%\">{}</span>", count(amount as u64))
        };
        if size > DIGITS_MAX { String::new() } else { self.filled().map(digits).collect() }
    }

    /// The amounts as the script shows them under the pointer: rows by `;`, columns by space, `-` for no meaning.
    fn read_out(&self) -> String {
        let cell = |amount: &Option<f64>| match amount {
            Some(amount) => {
                format!("{}/{}", count(*amount as u64).replace(' ', "_"), number(rounded(self.relative(*amount))))
            }
            None => "-".to_owned(),
        };
        let row = |row: &Vec<Option<f64>>| row.iter().map(cell).collect::<Vec<_>>().join(" ");
        let rows: Vec<String> = self.amounts.iter().map(row).collect();
        let [down, across] = self.names.map(escape);
        format!(" data-down=\"{down}\" data-across=\"{across}\" data-cells=\"{}\"", rows.join(";"))
    }
}

fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn labels_x(columns: usize) -> String {
    let label = |column: usize| format!("<span style=\"left:{:.2}%\">{column}</span>", middle(column, columns));
    labelled(columns).map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_coloured_by_their_share_and_those_without_a_meaning_are_left_out() {
        let amounts = [vec![None, Some(8.0)], vec![Some(0.0), Some(2.0)]];
        let names = ["from", "to"];
        let matrix = MatrixChart { title: "T", unit: "u", names, nothing: "none", amounts: &amounts, even: 2.0 };
        let drawn = matrix.draw();
        for expected in [
            "class=\"q16\" d=\"M1 0h1v1h-1z\"",
            "class=\"q8\" d=\"M1 1h1v1h-1z\"",
            "class=\"zero\" d=\"M0 1h1v1h-1z\"",
            "data-cells=\"- 8/4;0/0 2/1\"",
        ] {
            assert!(drawn.contains(expected), "{expected}: {drawn}");
        }
        assert!(!drawn.contains("M0 0h1"), "{drawn}");
        assert_eq!(drawn.matches("left:").count(), 3 + 2, "digits and labels: {drawn}");
    }
}
