//! The curves of the whole model.

use super::chart::{Chart, Curve, Size, Style, XAxis, YRange};
use super::run::{Curves, LoadedRun};
use super::series::Point;

pub(super) fn draw(run: &LoadedRun) -> String {
    let curves = &run.curves;
    if curves.loss.is_empty() {
        return "<section><h2>Training</h2><p class=\"none\">No step is logged yet.</p></section>\n".to_owned();
    }
    let charts: String = [loss(run), small_charts(curves)].concat();
    format!("<section><h2>Training</h2>\n<div class=\"charts\">\n{charts}</div></section>\n")
}

fn loss(run: &LoadedRun) -> String {
    let chart = |title, size, across, training: &[Point], evaluation: &[Point]| {
        let mut lines = vec![Curve { name: "training", points: training, style: Style::Smoothed }];
        if !evaluation.is_empty() {
            lines.push(Curve { name: "evaluation", points: evaluation, style: Style::Dots });
        }
        Chart { title, unit: "nats per token", size, axis: YRange::Fitting, across, lines }.draw()
    };
    let Curves { loss, eval_loss, .. } = &run.curves;
    let by_time = [loss, eval_loss].map(|points| run.by_second(points));
    chart("Loss", Size::Wide, XAxis::Steps, loss, eval_loss)
        + &chart("Loss by time", Size::Half, XAxis::Seconds, &by_time[0], &by_time[1])
}

fn small_charts(curves: &Curves) -> String {
    let half = |title, unit, axis, points, style| {
        let lines = vec![Curve { name: title, points, style }];
        Chart { title, unit, size: Size::Half, axis, across: XAxis::Steps, lines }.draw()
    };
    let mut charts = vec![
        half("Learning rate", "", YRange::FromZero, &curves.lr, Style::Plain),
        half("Gradient norm", "before clipping", YRange::Fitting, &curves.grad_norm, Style::Smoothed),
        half("Throughput", "tokens per second", YRange::FromZero, &curves.tokens_per_s, Style::Smoothed),
    ];
    if is_used(&curves.balance_loss) {
        charts.push(half("Balance loss", "1 is even", YRange::Fitting, &curves.balance_loss, Style::Smoothed));
    }
    if is_used(&curves.z_loss) {
        charts.push(half("Router z-loss", "", YRange::Fitting, &curves.z_loss, Style::Smoothed));
    }
    charts.concat()
}

/// An auxiliary loss that is 0 throughout belongs to a model without it.
fn is_used(points: &[Point]) -> bool {
    points.iter().any(|point| point.1 != 0.0)
}
