//! The section of the tasks: losses by task, and a table of all parts.

use super::chart::{COLOURS, Chart, Curve, Size, Style, XAxis, YRange};
use super::format::{count, escape, grouped, loss, percent};
use super::parts::{PartHistories, PartHistory, direction};
use super::run::LoadedRun;
use super::series::Point;

/// Nothing for a run without tasks.
pub(super) fn draw(run: &LoadedRun) -> String {
    let histories = &run.parts;
    if histories.parts.is_empty() {
        return String::new();
    }
    let charts = [
        by_task(histories, "Training loss by task", Style::Smoothed, |task| &task.training),
        by_task(histories, "Held-out loss by task", Style::Dots, |task| &task.held_out),
        largest_parts(histories),
    ];
    format!(
        "<section><h2>Tasks</h2>\n<div class=\"charts\">\n{}</div>\n{}</section>\n",
        charts.concat(),
        table(histories)
    )
}

type Named<'a> = (String, &'a PartHistory);

/// Those with most tokens first.
fn by_tokens<'a>(histories: impl Iterator<Item = Named<'a>>) -> Vec<Named<'a>> {
    let mut sorted: Vec<Named> = histories.collect();
    sorted.sort_by(|a, b| b.1.tokens.cmp(&a.1.tokens).then_with(|| a.0.cmp(&b.0)));
    sorted
}

fn by_task(histories: &PartHistories, title: &str, style: Style, of: fn(&PartHistory) -> &[Point]) -> String {
    let tasks = by_tokens(histories.tasks.iter().map(|(name, task)| (name.clone(), task)));
    chart((title, Size::Half), "tasks", &tasks, style, of)
}

/// Of several parts a line each, of as many as there are colours.
fn largest_parts(histories: &PartHistories) -> String {
    if histories.parts.len() == histories.tasks.len() {
        return String::new();
    }
    let several = histories.tasks.len() > 1;
    let name = |[task, from, to]: &[String; 3]| {
        let direction = direction(from, to);
        if several { format!("{task} {direction}") } else { direction }
    };
    let parts = by_tokens(histories.parts.iter().map(|(key, part)| (name(key), part)));
    chart(("Held-out loss by part", Size::Wide), "parts", &parts, Style::Dots, |part| &part.held_out)
}

fn chart(
    (title, size): (&str, Size),
    what: &str,
    all: &[Named],
    style: Style,
    of: fn(&PartHistory) -> &[Point],
) -> String {
    let drawn: Vec<&Named> = all.iter().filter(|(_, history)| !of(history).is_empty()).collect();
    if drawn.is_empty() {
        return String::new();
    }
    let lines: Vec<Curve> =
        drawn.iter().take(COLOURS.len()).map(|(name, history)| Curve { name, points: of(history), style }).collect();
    let unit = match drawn.len() - lines.len() {
        0 => "nats per token".to_owned(),
        _ => format!("nats per token, the {} of {} {what} with most tokens", lines.len(), drawn.len()),
    };
    let (axis, across) = (YRange::Fitting, XAxis::Steps);
    Chart { title, unit: &unit, size, axis, across, lines }.draw()
}

/// A row for each part, and one for each task that has several, and for each language that several parts of a task write.
fn table(histories: &PartHistories) -> String {
    let all: u64 = histories.tasks.values().map(|task| task.rows).sum();
    let mut tasks: Vec<(&String, &PartHistory)> = histories.tasks.iter().collect();
    tasks.sort_by_key(|(_, task)| std::cmp::Reverse(task.tokens));
    let mut rows = String::new();
    for (name, _) in &tasks {
        let of_task = histories.parts.iter().filter(|([task, ..], _)| task == *name);
        let parts = by_tokens(of_task.map(|([_, from, to], part)| (direction(from, to), part)));
        rows.extend(parts.iter().map(|(direction, part)| row(name, direction, part, all)));
    }
    let several = tasks.iter().map(|(name, task)| (name, task, histories.parts_of(name)));
    let several = several.filter(|(_, _, parts)| *parts > 1);
    let of_tasks = several.map(|(name, task, parts)| (name.as_str(), format!("all {parts} parts"), *task));
    let languages = histories.languages.iter().map(|([task, to], own)| (task, to, own, histories.parts_into(task, to)));
    let shared = languages.filter(|(.., parts)| *parts > 1);
    let of_languages = shared.map(|(task, to, own, parts)| (task.as_str(), format!("{parts} parts → {to}"), own));
    let totals: String = of_tasks.chain(of_languages).map(|(task, what, own)| row(task, &what, own, all)).collect();
    format!(
        "<div class=\"scroll long\"><table class=\"sortable\"><caption>What was learned of each part; the training loss is \
         a mean over the last 20 steps that have the part</caption>\
         <thead><tr><th>Task</th><th class=\"text\">Part</th><th>Rows</th><th>Tokens</th><th>Of all rows</th><th></th>\
         <th>Training loss</th><th>Held out, first</th><th>Last</th><th>Best</th></tr></thead>\
         <tbody class=\"totals\">{totals}</tbody><tbody>{rows}</tbody></table></div>\n"
    )
}

fn row(task: &str, part: &str, history: &PartHistory, all: u64) -> String {
    let share = if all > 0 { history.rows as f64 / all as f64 } else { 0.0 };
    let [first, last, best] = match history.held_out_losses() {
        Some(losses) => losses.map(Some),
        None => [None; 3],
    };
    let losses = [history.last_training(), first, last, best].map(loss_cell);
    format!(
        "<tr><th>{}</th><td class=\"text\">{}</td>{}{}<td data-value=\"{share:.6}\">{}</td>\
         <td class=\"bar\"><i style=\"width:{:.1}%\"></i></td>{}</tr>",
        escape(task),
        escape(part),
        number_cell(history.rows, grouped),
        number_cell(history.tokens, count),
        percent(share),
        share * 100.0,
        losses.concat()
    )
}

fn number_cell(value: u64, text: fn(u64) -> String) -> String {
    format!("<td data-value=\"{value}\">{}</td>", text(value))
}

fn loss_cell(value: Option<f64>) -> String {
    match value {
        Some(value) => format!("<td data-value=\"{value}\">{}</td>", loss(value)),
        None => "<td data-value=\"\">–</td>".to_owned(),
    }
}
