//! Two runs in one picture: the same losses by steps and by wall-clock, since a step of one may cost more than a step of
//! the other.

use super::chart::{Chart, Curve, Size, Style, XAxis, YRange};
use super::format::{escape, grouped, number};
use super::run::LoadedRun;
use super::series::Point;

pub(super) fn draw(run: &LoadedRun, other: &LoadedRun) -> String {
    let pair = |what: &str, of: fn(&LoadedRun) -> &[Point], style| {
        let chart = |title: &str, across, points: [&[Point]; 2]| {
            let line = |(run, points): (&LoadedRun, _)| (run.name.clone(), points);
            let named = [line((run, points[0])), line((other, points[1]))];
            let lines = named.iter().map(|(name, points)| Curve { name, points, style }).collect();
            Chart { title, unit: "nats per token", size: Size::Half, axis: YRange::Fitting, across, lines }.draw()
        };
        let by_time = [run, other].map(|run| run.by_second(of(run)));
        chart(&format!("{what} by step"), XAxis::Steps, [of(run), of(other)])
            + &chart(&format!("{what} by time"), XAxis::Seconds, [&by_time[0], &by_time[1]])
    };
    let mut charts = pair("Training loss", |run| &run.curves.loss, Style::Smoothed);
    if !run.curves.eval_loss.is_empty() || !other.curves.eval_loss.is_empty() {
        charts += &pair("Held-out loss", |run| &run.curves.eval_loss, Style::Dots);
    }
    format!(
        "<section><h2>Against {}</h2>\n<div class=\"charts\">\n{charts}</div>\n{}</section>\n",
        escape(&other.name),
        table(run, other)
    )
}

/// What both runs had reached when the shorter one ended, in steps and in seconds.
fn table(run: &LoadedRun, other: &LoadedRun) -> String {
    let common_step = run.step_last().min(other.step_last());
    let common_second = run.curves.seconds.min(other.curves.seconds) as u64;
    let rows: String = [run, other].map(|run| row(run, common_step, common_second)).concat();
    format!(
        "<div class=\"scroll\"><table><caption>Held-out loss where both runs have one, training loss elsewhere</caption>\
         <thead><tr><th>Run</th><th>Parameters</th><th>Active</th><th>Tokens per second</th><th>Loss at step {}</th>\
         <th>Loss at {} s</th></tr></thead><tbody>{rows}</tbody></table></div>",
        grouped(common_step),
        grouped(common_second)
    )
}

fn row(run: &LoadedRun, step: u64, second: u64) -> String {
    let measured = if run.curves.eval_loss.is_empty() { &run.curves.loss } else { &run.curves.eval_loss };
    let at = |points: &[Point], x: u64| {
        let reached = points.iter().rev().find(|point| point.0 <= x);
        reached.map_or_else(|| "none yet".to_owned(), |point| number(point.1))
    };
    let parameters = |of: fn(&crate::metrics::Summary) -> u64| {
        run.summary.as_ref().map_or_else(|| "unknown".to_owned(), |summary| grouped(of(summary)))
    };
    format!(
        "<tr><th>{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
        escape(&run.name),
        parameters(|summary| summary.params_total),
        parameters(|summary| summary.params_active),
        number(run.tokens_per_s()),
        at(measured, step),
        at(&run.by_second(measured), second),
    )
}
