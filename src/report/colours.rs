//! Colours of cells, shared by heat maps and matrices: a class in the style sheet for every value.

use std::fmt::Write;

use super::format::escape;

/// Colours from coldest to hottest; the middle one is flat.
pub(super) const CLASSES: usize = 17;
const MIDDLE: usize = CLASSES / 2;
/// The ends of colours that compare with uniform: this many times, and its inverse.
const HOTTEST: f64 = 4.0;

/// Colour of a value relative to uniform, on a scale of doublings; `None` for nothing at all.
pub(super) fn of_relative(relative: f64) -> Option<usize> {
    if relative <= 0.0 {
        return None;
    }
    let middle = MIDDLE as f64;
    let class = middle + relative.log2() / HOTTEST.log2() * middle;
    Some(class.round().clamp(0.0, (CLASSES - 1) as f64) as usize)
}

/// Colour of an amount on a linear scale from 0, which is flat, to `most`.
pub(super) fn of_amount(amount: f64, most: f64) -> Option<usize> {
    let share = if most > 0.0 { (amount / most).clamp(0.0, 1.0) } else { 0.0 };
    Some(MIDDLE + (share * (CLASSES - 1 - MIDDLE) as f64).round() as usize)
}

/// What the colours of [`of_relative`] mean; `nothing` names the colour of none.
pub(super) fn legend_of_relative(nothing: &str) -> String {
    let swatches = swatches(0..CLASSES);
    format!(
        "<span class=\"ramp\"><i class=\"zero\"></i> {} <span>¼×</span>{swatches}<span>4×</span></span>",
        escape(nothing)
    )
}

/// What the colours of [`of_amount`] mean.
pub(super) fn legend_of_amount(none: &str, most: &str) -> String {
    let swatches = swatches(MIDDLE..CLASSES);
    format!("<span class=\"ramp\"><span>{}</span>{swatches}<span>{}</span></span>", escape(none), escape(most))
}

fn swatches(classes: std::ops::Range<usize>) -> String {
    classes.map(|class| format!("<i class=\"q{class}\"></i>")).collect()
}

/// Cells of one unit's height, as one path for each colour: a rectangle for every element would be megabytes.
pub(super) struct Cells {
    paths: Vec<String>,
}

impl Cells {
    pub(super) fn new() -> Cells {
        Cells { paths: vec![String::new(); CLASSES + 1] }
    }

    pub(super) fn push(&mut self, class: Option<usize>, (x, y): (u64, usize), width: u64) {
        write!(self.paths[class.unwrap_or(CLASSES)], "M{x} {y}h{width}v1h-{width}z").unwrap();
    }

    pub(super) fn draw(&self) -> String {
        let path = |(index, path): (usize, &String)| {
            let class = if index == CLASSES { "zero".to_owned() } else { format!("q{index}") };
            format!("<path class=\"{class}\" d=\"{path}\"/>")
        };
        self.paths.iter().enumerate().filter(|(_, path)| !path.is_empty()).map(path).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_run_from_none_over_uniform_to_hot() {
        let check = |relative, expected| assert_eq!(of_relative(relative), expected, "{relative}");
        check(0.0, None);
        check(1e-9, Some(0));
        check(0.25, Some(0));
        check(0.5, Some(4));
        check(1.0, Some(8));
        check(2.0, Some(12));
        check(4.0, Some(16));
        check(64.0, Some(16));
    }

    #[test]
    fn amounts_run_from_flat_to_hot() {
        assert_eq!([0.0, 0.25, 1.0, 2.0].map(|amount| of_amount(amount, 1.0)), [Some(8), Some(10), Some(16), Some(16)]);
        assert_eq!(of_amount(0.0, 0.0), Some(8));
    }
}
