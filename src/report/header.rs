//! The top of the page: name, status, and the figures one looks for first.

use crate::metrics::{Status, Summary};

use super::format::{bytes, count, duration, escape, grouped, loss, number, percent, quantity};
use super::run::LoadedRun;

/// What a card says when the run has not said it yet.
const UNKNOWN: &str = "–";

pub(super) fn draw(run: &LoadedRun) -> String {
    let (class, status) = status(run);
    let cards = [
        loss_card(run),
        eval_card(run),
        speed_card(run),
        tokens_card(run),
        parameters_card(run.summary.as_ref()),
        memory_card(run.summary.as_ref()),
        mesh_card(run.summary.as_ref()),
        experts_card(run),
    ];
    format!(
        "<header><p class=\"brand\">Guildhall run</p><h1>{}</h1><span class=\"status {class}\">{status}</span></header>\n\
         <section class=\"cards\">\n{}</section>\n",
        escape(&run.name),
        cards.concat()
    )
}

fn status(run: &LoadedRun) -> (&'static str, &'static str) {
    match run.summary.as_ref().map(|summary| summary.status) {
        Some(Status::Done) => ("done", "done"),
        Some(Status::Interrupted) => ("interrupted", "interrupted"),
        Some(Status::Failed) => ("failed", "failed"),
        None if run.step_last() == 0 => ("running", "no steps yet"),
        None => ("running", "not finished"),
    }
}

/// One figure, with what qualifies it; both are text, not markup.
fn card(title: &str, figure: &str, detail: &str) -> String {
    format!(
        "<div class=\"card\"><h2>{title}</h2><p class=\"figure\">{}</p><p class=\"detail\">{}</p></div>\n",
        escape(figure),
        escape(detail)
    )
}

fn loss_card(run: &LoadedRun) -> String {
    let curve = &run.curves.loss;
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else {
        return card("Loss", UNKNOWN, "no steps yet");
    };
    let detail = format!("nats per token, step {} to {}", grouped(first.0), grouped(last.0));
    card("Loss", &format!("{} → {}", short_loss(first.1), short_loss(last.1)), &detail)
}

/// Two of them must fit side by side.
fn short_loss(value: f64) -> String {
    if value.is_finite() && value.abs() < 1e3 { format!("{value:.3}") } else { number(value) }
}

fn eval_card(run: &LoadedRun) -> String {
    let evaluated = run.curves.eval_loss.last().copied();
    let from_summary = run.summary.as_ref().and_then(|summary| summary.eval_loss);
    let Some(value) = from_summary.or(evaluated.map(|point| point.1)) else {
        return card("Evaluation loss", UNKNOWN, "not evaluated");
    };
    let perplexity = value.exp();
    let perplexity = if perplexity >= 1e5 { "huge".to_owned() } else { number(perplexity) };
    card("Evaluation loss", &loss(value), &format!("perplexity {perplexity}"))
}

fn speed_card(run: &LoadedRun) -> String {
    let rate = run.tokens_per_s();
    if run.step_last() == 0 {
        return card("Throughput", UNKNOWN, "tokens per second");
    }
    card("Throughput", &quantity(rate), "tokens per second, median")
}

fn tokens_card(run: &LoadedRun) -> String {
    let seconds = run.summary.as_ref().map_or(run.curves.seconds, |summary| summary.seconds);
    let steps = run.step_last();
    let plural = if steps == 1 { "" } else { "s" };
    let detail = format!("tokens in {}, {} step{plural}", duration(seconds), grouped(steps));
    card("Trained on", &count(run.curves.tokens), &detail)
}

fn parameters_card(summary: Option<&Summary>) -> String {
    let Some(summary) = summary else {
        return card("Parameters", UNKNOWN, "known when the run ends");
    };
    let detail = format!("{} active for a token", count(summary.params_active));
    card("Parameters", &count(summary.params_total), &detail)
}

fn memory_card(summary: Option<&Summary>) -> String {
    let Some(summary) = summary else {
        return card("Peak memory", UNKNOWN, "known when the run ends");
    };
    let accounted = summary.peak_bytes.get("total").map_or_else(|| UNKNOWN.to_owned(), |&total| bytes(total));
    let rss = summary.peak_rss_mb.map(|mib| format!(", process {}", bytes(mib.saturating_mul(1 << 20))));
    let even = bytes(summary.predicted_peak_bytes);
    let skewed = summary.predicted_if_skewed().map(|skewed| format!(", {} with skewed rows", bytes(skewed)));
    let skewed = skewed.unwrap_or_default();
    let detail = format!("accounted; predicted {even}{skewed}{}", rss.unwrap_or_default());
    card("Peak memory", &accounted, &detail)
}

fn mesh_card(summary: Option<&Summary>) -> String {
    let Some(summary) = summary else {
        return card("Ranks", UNKNOWN, "known when the run ends");
    };
    let expert = match &summary.expert_by_layer[..] {
        [] => summary.expert.to_string(),
        layers => layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    };
    let detail = match summary.expert {
        1 => "every rank has all experts".to_owned(),
        _ => format!("experts spread over {expert}"),
    };
    card("Ranks × expert-parallel", &format!("{} × {expert}", summary.ranks), &detail)
}

fn experts_card(run: &LoadedRun) -> String {
    let counts = || run.layers.values().map(|layer| layer.loads.rows());
    let experts = match (counts().min().unwrap_or(0), counts().max().unwrap_or(0)) {
        (fewest, most) if fewest < most => format!("{fewest} to {most}"),
        (_, most) => most.to_string(),
    };
    if run.step_last() == 0 {
        return card("Experts", UNKNOWN, "no steps yet");
    }
    if run.layers.is_empty() {
        return card("Experts", "none", "a dense model");
    }
    let entropies = run.layers.values().filter_map(|layer| layer.entropy.last());
    let lowest = entropies.map(|point| point.1).fold(f64::INFINITY, f64::min);
    let dead = match run.dead.len() {
        0 => "none dead".to_owned(),
        dead => format!("{dead} dead"),
    };
    let figure = format!("{} × {experts}", run.layers.len());
    card("MoE layers × experts", &figure, &format!("{dead}, evenness {} at worst", percent(lowest)))
}
