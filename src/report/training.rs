//! The curves of the whole model.

use super::chart::{Axis, Chart, Line, Size, Style};
use super::run::Curves;
use super::series::Point;

pub(super) fn draw(curves: &Curves) -> String {
    if curves.loss.is_empty() {
        return "<section><h2>Training</h2><p class=\"none\">No step is logged yet.</p></section>\n".to_owned();
    }
    let charts: String = [loss(curves), small_charts(curves)].concat();
    format!("<section><h2>Training</h2>\n<div class=\"charts\">\n{charts}</div></section>\n")
}

fn loss(curves: &Curves) -> String {
    let mut lines = vec![Line { name: "training", points: &curves.loss, style: Style::Smoothed }];
    if !curves.eval_loss.is_empty() {
        lines.push(Line { name: "evaluation", points: &curves.eval_loss, style: Style::Dots });
    }
    Chart { title: "Loss", unit: "nats per token", size: Size::Wide, axis: Axis::Fitting, lines }.draw()
}

fn small_charts(curves: &Curves) -> String {
    let half = |title, unit, axis, points, style| {
        let lines = vec![Line { name: title, points, style }];
        Chart { title, unit, size: Size::Half, axis, lines }.draw()
    };
    let mut charts = vec![
        half("Learning rate", "", Axis::FromZero, &curves.lr, Style::Plain),
        half("Gradient norm", "before clipping", Axis::Fitting, &curves.grad_norm, Style::Smoothed),
        half("Throughput", "tokens per second", Axis::FromZero, &curves.tokens_per_s, Style::Smoothed),
    ];
    if is_used(&curves.balance_loss) {
        charts.push(half("Balance loss", "1 is even", Axis::Fitting, &curves.balance_loss, Style::Smoothed));
    }
    if is_used(&curves.z_loss) {
        charts.push(half("Router z-loss", "", Axis::Fitting, &curves.z_loss, Style::Smoothed));
    }
    charts.concat()
}

/// An auxiliary loss that is 0 throughout belongs to a model without it.
fn is_used(points: &[Point]) -> bool {
    points.iter().any(|point| point.1 != 0.0)
}
