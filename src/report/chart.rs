//! A line chart: curves over steps, as SVG stretched to its frame with labels around it.

use std::fmt::Write;

use super::format::{escape, grouped, number};
use super::scale::Scale;
use super::series::{Bin, Blot, Point, bins, blots, range, smooth};

/// Width and height of the drawing; the browser stretches it.
const SIDE: f64 = 1000.0;
/// Marks of values that are not finite, beyond which they are only counted.
const MARKS_MAX: usize = 12;
/// Shorter curves are drawn as they are, each value with a dot.
const SMOOTH_FROM: usize = 20;

/// Classes of the style sheet, a curve each.
pub(super) const COLOURS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// What to draw; text is escaped here.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    pub(super) unit: &'a str,
    pub(super) size: Size,
    pub(super) axis: YRange,
    pub(super) across: XAxis,
    pub(super) lines: Vec<Curve<'a>>,
}

/// One curve; its colour is its place in the chart.
pub(super) struct Curve<'a> {
    pub(super) name: &'a str,
    pub(super) points: &'a [Point],
    pub(super) style: Style,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// The values faint, a smooth line over them.
    Smoothed,
    Plain,
    /// A dot at each value and a faint line between.
    Dots,
}

/// What runs from left to right.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum XAxis {
    Steps,
    /// Whole seconds of wall-clock since the run began.
    Seconds,
}

impl XAxis {
    fn name(self) -> &'static str {
        match self {
            XAxis::Steps => "step",
            XAxis::Seconds => "second",
        }
    }
}

/// How the vertical axis is chosen.
#[derive(Clone, Copy)]
pub(super) enum YRange {
    /// Around the data, logarithmic if they span more than two decades.
    Fitting,
    FromZero,
    /// From 0 to 1, so that charts compare.
    Unit,
}

#[derive(Clone, Copy)]
pub(super) enum Size {
    Wide,
    Half,
    Small,
}

impl Size {
    fn class(self) -> &'static str {
        match self {
            Size::Wide => "wide",
            Size::Half => "half",
            Size::Small => "small",
        }
    }

    fn bins_max(self) -> usize {
        match self {
            Size::Wide => 600,
            Size::Half => 400,
            Size::Small => 200,
        }
    }
}

impl Chart<'_> {
    pub(super) fn draw(&self) -> String {
        let (x, y) = self.scales();
        let blots: Vec<Blot> = self.lines.iter().flat_map(|line| blots(line.points)).collect();
        let frame = Frame { x: &x, y: &y };
        let mut drawing = grid(&frame);
        for (line, color) in self.lines.iter().zip(COLOURS) {
            drawing += &curve(line, color, self.size.bins_max(), &frame);
        }
        drawing += &marks(&blots, &frame);
        let (low, high) = x.ends();
        let title = escape(self.title);
        format!(
            "<figure class=\"chart {}\">{}<div class=\"plot\"><div class=\"y\">{}</div><div class=\"area\">\
             <svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{title}\" \
             data-low=\"{low}\" data-high=\"{high}\" data-across=\"{}\">{drawing}</svg></div><div class=\"x\">{}</div></div>{}</figure>\n",
            self.size.class(),
            self.caption(&y),
            labels_y(&y),
            self.across.name(),
            labels_x(&x),
            blot_note(&blots, self.across.name()),
        )
    }

    fn scales(&self) -> (Scale, Scale) {
        let points = || self.lines.iter().flat_map(|line| line.points);
        let first = points().map(|point| point.0).min().unwrap_or(0);
        let last = points().map(|point| point.0).max().unwrap_or(0);
        let (low, high) = range(points()).unwrap_or((0.0, 1.0));
        let y = match self.axis {
            YRange::Fitting => Scale::fitting(low, high),
            YRange::FromZero => Scale::linear(low.min(0.0), high.max(0.0)),
            YRange::Unit => Scale::linear(0.0, 1.0),
        };
        (Scale::steps(first, last), y)
    }

    fn caption(&self, y: &Scale) -> String {
        let mut caption = format!("<figcaption><b>{}</b>", escape(self.title));
        let log = if y.is_log() { "log scale" } else { "" };
        let across = if self.across == XAxis::Seconds { "seconds across" } else { "" };
        let units: Vec<&str> = [self.unit, across, log].into_iter().filter(|text| !text.is_empty()).collect();
        if !units.is_empty() {
            write!(caption, " <span class=\"unit\">{}</span>", escape(&units.join(", "))).unwrap();
        }
        if self.lines.len() > 1 {
            for (line, color) in self.lines.iter().zip(COLOURS) {
                write!(caption, " <span class=\"key {color}\">{}</span>", escape(line.name)).unwrap();
            }
        }
        caption + "</figcaption>"
    }
}

/// Both axes.
struct Frame<'a> {
    x: &'a Scale,
    y: &'a Scale,
}

impl Frame<'_> {
    /// `x y` of the drawing, whose y runs downwards.
    fn at(&self, step: f64, value: f64) -> String {
        format!("{:.1} {:.1}", self.x.place(step) * SIDE, (1.0 - self.y.place(value)) * SIDE)
    }
}

fn grid(frame: &Frame) -> String {
    let heights = frame.y.ticks.iter().map(|&tick| (1.0 - frame.y.place(tick)) * SIDE);
    let path: String = heights.map(|height| format!("M0 {height:.1}h1000")).collect();
    format!("<path class=\"grid\" d=\"{path}\"/>")
}

fn curve(line: &Curve, color: &str, bins_max: usize, frame: &Frame) -> String {
    let raw = bins(line.points, bins_max);
    let read_out = read_out(line.name, &raw);
    let smoothed = line.style == Style::Smoothed && line.points.len() >= SMOOTH_FROM;
    let mut drawing = String::new();
    if raw.len() < line.points.len() {
        write!(drawing, "<path class=\"band {color}\" d=\"{}\"/>", band(&raw, frame)).unwrap();
    }
    let class = match line.style {
        Style::Smoothed if smoothed => "raw",
        Style::Dots => "raw",
        _ => "line",
    };
    write!(drawing, "<path class=\"{class} {color}\" d=\"{}\"{read_out}/>", trace(&raw, frame)).unwrap();
    if smoothed {
        let path = trace(&bins(&smoothed_points(line.points, frame), bins_max), frame);
        write!(drawing, "<path class=\"line {color}\" d=\"{path}\"/>").unwrap();
    }
    // A few values do not make a line that one sees.
    if line.style == Style::Dots || line.points.len() < SMOOTH_FROM {
        write!(drawing, "<path class=\"dots {color}\" d=\"{}\"/>", dots(&raw, frame)).unwrap();
    }
    drawing
}

/// On a log axis the mean is geometric, or every spike would lift it off the line one sees.
fn smoothed_points(points: &[Point], frame: &Frame) -> Vec<Point> {
    if !frame.y.is_log() {
        return smooth(points);
    }
    let logs: Vec<Point> = points.iter().map(|&(step, value)| (step, value.ln())).collect();
    smooth(&logs).into_iter().map(|(step, log)| (step, log.exp())).collect()
}

/// The values as the script shows them under the pointer.
fn read_out(name: &str, bins: &[Bin]) -> String {
    let steps: Vec<String> = bins.iter().map(|bin| format!("{:.0}", bin.step().floor())).collect();
    let text = |bin: &Bin| bin.value.map_or_else(|| "not-finite".to_owned(), |spread| number(spread.mean));
    let values: Vec<String> = bins.iter().map(text).collect();
    format!(" data-name=\"{}\" data-x=\"{}\" data-y=\"{}\"", escape(name), steps.join(" "), values.join(" "))
}

/// A line through the means, interrupted where values are not finite; a lone value becomes a dot.
fn trace(bins: &[Bin], frame: &Frame) -> String {
    let mut path = String::new();
    let mut pen_down = false;
    for bin in bins {
        if let Some(spread) = bin.value {
            let at = frame.at(bin.step(), spread.mean);
            // The empty stroke makes round caps draw a point that has no neighbours.
            let end = if pen_down { "" } else { "h0" };
            write!(path, "{}{at}{end}", if pen_down { "L" } else { "M" }).unwrap();
        }
        pen_down = bin.value.is_some() && !bin.broken;
    }
    path
}

/// The area from the lowest to the highest values, one polygon for each uninterrupted stretch.
fn band(bins: &[Bin], frame: &Frame) -> String {
    let stretches = bins.chunk_by(|before, after| before.value.is_some() && !before.broken && after.value.is_some());
    stretches.map(|stretch| polygon(stretch, frame)).collect()
}

fn polygon(stretch: &[Bin], frame: &Frame) -> String {
    let spreads = || stretch.iter().filter_map(|bin| Some((bin.step(), bin.value?)));
    let above = spreads().map(|(step, spread)| frame.at(step, spread.high));
    let below = spreads().rev().map(|(step, spread)| frame.at(step, spread.low));
    let corners: Vec<String> = above.chain(below).collect();
    if corners.is_empty() { String::new() } else { format!("M{}Z", corners.join("L")) }
}

fn dots(bins: &[Bin], frame: &Frame) -> String {
    let finite = bins.iter().filter_map(|bin| Some((bin.step(), bin.value?.mean)));
    finite.map(|(step, value)| format!("M{}h0", frame.at(step, value))).collect()
}

/// Red lines where values are not finite.
fn marks(blots: &[Blot], frame: &Frame) -> String {
    let places = blots.iter().take(MARKS_MAX).map(|blot| frame.x.place(blot.first as f64) * SIDE);
    let places: Vec<f64> = places.collect();
    if places.is_empty() {
        return String::new();
    }
    let lines: String = places.iter().map(|x| format!("M{x:.1} 0v1000")).collect();
    let heads: String = places.iter().map(|x| format!("M{x:.1} 1000h0")).collect();
    format!("<path class=\"mark\" d=\"{lines}\"/><path class=\"dots mark\" d=\"{heads}\"/>")
}

fn blot_note(blots: &[Blot], across: &str) -> String {
    if blots.is_empty() {
        return String::new();
    }
    let text = |blot: &Blot| match blot.last {
        last if last == blot.first => format!("{} at {across} {}", blot.value, grouped(blot.first)),
        last => format!("{} at {across}s {} to {}", blot.value, grouped(blot.first), grouped(last)),
    };
    let mut parts: Vec<String> = blots.iter().take(MARKS_MAX).map(text).collect();
    if blots.len() > MARKS_MAX {
        parts.push(format!("and {} more times", blots.len() - MARKS_MAX));
    }
    format!("<p class=\"blots\">{}</p>", escape(&parts.join(", ")))
}

/// Labels beside the drawing, one at each tick.
fn labels_y(scale: &Scale) -> String {
    let label = |&tick: &f64| {
        let top = (1.0 - scale.place(tick)) * 100.0;
        format!("<span style=\"top:{top:.2}%\">{}</span>", scale.label(tick))
    };
    scale.ticks.iter().map(label).collect()
}

/// Labels under the drawing; shared with the heat map.
pub(super) fn labels_x(scale: &Scale) -> String {
    let label = |&tick: &f64| {
        let left = scale.place(tick) * 100.0;
        format!("<span style=\"left:{left:.2}%\">{}</span>", scale.label(tick))
    };
    scale.ticks.iter().map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(points: &[Point], style: Style) -> String {
        let lines = vec![Curve { name: "loss", points, style }];
        Chart { title: "Loss", unit: "nats", size: Size::Wide, axis: YRange::Fitting, across: XAxis::Steps, lines }
            .draw()
    }

    #[test]
    fn a_gap_lifts_the_pen_and_is_marked() {
        let points = [(1, 1.0), (2, 2.0), (3, f64::NAN), (4, 1.0)];
        let chart = drawn(&points, Style::Plain);
        let path = chart.split("class=\"line a\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(path.matches('M').count(), 2, "{path}");
        assert!(chart.contains("NaN at step 3"), "{chart}");
        assert!(chart.contains("class=\"mark\""), "{chart}");
    }

    #[test]
    fn a_long_curve_becomes_a_band_and_a_line() {
        let points: Vec<Point> = (1..=100_000).map(|step| (step, (step as f64).sin())).collect();
        let chart = drawn(&points, Style::Smoothed);
        assert!(chart.contains("class=\"band a\"") && chart.contains("class=\"line a\""));
        assert!(chart.len() < 100_000, "{} bytes", chart.len());
    }

    #[test]
    fn nothing_and_nothing_finite_still_draw_axes() {
        for points in [vec![], vec![(1, f64::NAN)], vec![(1, f64::INFINITY), (2, f64::NEG_INFINITY)]] {
            let chart = drawn(&points, Style::Smoothed);
            assert!(chart.contains("class=\"grid\""), "{chart}");
        }
    }
}
