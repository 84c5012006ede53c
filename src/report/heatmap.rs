//! A heat map of expert loads: experts down, steps across, colour for the share relative to uniform.

use std::fmt::Write;

use super::chart::labels_x;
use super::format::number;
use super::loads::Loads;
use super::scale::Scale;

/// Colours from coldest to hottest; the middle one is uniform.
const CLASSES: usize = 17;
/// The colours' ends: this many times uniform, and its inverse.
const HOTTEST: f64 = 4.0;

/// Draws the loads of one layer.
pub(super) fn draw(loads: &Loads) -> String {
    let (Some(first), Some(last)) = (loads.columns.first(), loads.columns.last()) else {
        return String::new();
    };
    let experts = loads.experts();
    let scale = Scale::cells(first.first, last.last);
    format!(
        "<figure class=\"heat\"><figcaption><b>Expert load</b> <span class=\"unit\">share of routes, uniform = 1×</span>{}\
         </figcaption><div class=\"plot\"><div class=\"y\">{}</div><div class=\"area\" style=\"height:{}px\">\
         <svg viewBox=\"0 0 {} {experts}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"Expert load\"{}>{}</svg>\
         </div><div class=\"x\">{}</div></div></figure>\n",
        legend(),
        labels(experts),
        height(experts),
        last.last - first.first + 1,
        read_out(loads, experts),
        cells(loads, experts),
        labels_x(&scale),
    )
}

/// Height of the map, CSS pixels: rows thick enough to see, the whole low enough to survey.
fn height(experts: usize) -> usize {
    let row = (288 / experts.max(1)).clamp(4, 18);
    row * experts
}

/// Every expert by number where rows are thick enough for it, else some.
fn labels(experts: usize) -> String {
    let every = experts.div_ceil(16).next_power_of_two();
    let label = |expert: usize| {
        let middle = (expert as f64 + 0.5) / experts as f64 * 100.0;
        format!("<span style=\"top:{middle:.2}%\">{expert}</span>")
    };
    (0..experts).step_by(every).map(label).collect()
}

/// One path for each colour: a rectangle for every element would be megabytes.
fn cells(loads: &Loads, experts: usize) -> String {
    let mut paths = vec![String::new(); CLASSES + 1];
    for expert in 0..experts {
        for run in runs(loads, expert, experts) {
            let Run { class, start, width } = run;
            write!(paths[class.unwrap_or(CLASSES)], "M{start} {expert}h{width}v1h-{width}z").unwrap();
        }
    }
    let path = |(index, path): (usize, &String)| {
        let class = if index == CLASSES { "zero".to_owned() } else { format!("q{index}") };
        format!("<path class=\"{class}\" d=\"{path}\"/>")
    };
    paths.iter().enumerate().filter(|(_, path)| !path.is_empty()).map(path).collect()
}

/// Neighbouring cells of one expert and one colour, in steps from the first.
struct Run {
    /// `None` without any route.
    class: Option<usize>,
    start: u64,
    width: u64,
}

fn runs(loads: &Loads, expert: usize, experts: usize) -> Vec<Run> {
    let origin = loads.columns[0].first;
    let mut runs: Vec<Run> = Vec::new();
    for (index, column) in loads.columns.iter().enumerate() {
        let class = class(column.relative(expert, experts));
        let next = loads.columns.get(index + 1).map_or(column.last + 1, |next| next.first);
        let width = next - column.first;
        match runs.last_mut().filter(|run| run.class == class) {
            Some(run) => run.width += width,
            None => runs.push(Run { class, start: column.first - origin, width }),
        }
    }
    runs
}

/// Colour of a share relative to uniform, on a scale of doublings.
fn class(relative: f64) -> Option<usize> {
    if relative <= 0.0 {
        return None;
    }
    let middle = (CLASSES / 2) as f64;
    let class = middle + relative.log2() / HOTTEST.log2() * middle;
    Some(class.round().clamp(0.0, (CLASSES - 1) as f64) as usize)
}

fn legend() -> String {
    let swatches: String = (0..CLASSES).map(|class| format!("<i class=\"q{class}\"></i>")).collect();
    format!("<span class=\"ramp\"><i class=\"zero\"></i> no routes <span>¼×</span>{swatches}<span>4×</span></span>")
}

/// The shares as the script shows them under the pointer: rows by `;`, columns by space.
fn read_out(loads: &Loads, experts: usize) -> String {
    let firsts: Vec<String> = loads.columns.iter().map(|column| column.first.to_string()).collect();
    let row = |expert| {
        let cells =
            loads.columns.iter().map(|column| number((column.relative(expert, experts) * 100.0).round() / 100.0));
        cells.collect::<Vec<_>>().join(" ")
    };
    let rows: Vec<String> = (0..experts).map(row).collect();
    let last = loads.columns.last().map_or(0, |column| column.last);
    format!(" data-firsts=\"{}\" data-last=\"{last}\" data-rows=\"{}\"", firsts.join(" "), rows.join(";"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_run_from_none_over_uniform_to_hot() {
        let check = |relative, expected| assert_eq!(class(relative), expected, "{relative}");
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
    fn equal_neighbours_are_one_rectangle() {
        let mut loads = Loads::default();
        (1..=100).for_each(|step| loads.push(step, &[1, 1]));
        let map = draw(&loads);
        assert!(map.contains("d=\"M0 0h100v1h-100zM0 1h100v1h-100z\""), "{map}");
    }

    #[test]
    fn many_experts_are_labelled_sparsely() {
        assert_eq!(labels(64).matches("<span").count(), 16);
        assert_eq!(labels(8).matches("<span").count(), 8);
        assert_eq!((height(8), height(64), height(1)), (144, 256, 18));
    }
}
