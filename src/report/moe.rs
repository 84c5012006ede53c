//! The MoE layers: who got the tokens.

use crate::metrics::DeadExpert;

use super::chart::{Chart, Curve, Size, Style, XAxis, YRange};
use super::colours::{legend_of_relative, of_relative};
use super::format::{count, grouped, percent};
use super::heatmap::HeatMap;
use super::matrix::MatrixChart;
use super::run::{LayerHistory, LoadedRun};

/// Experts of one table; more are set in several side by side.
const ROWS_MAX: usize = 16;

/// Nothing for a dense model.
pub(super) fn draw(run: &LoadedRun) -> String {
    if run.layers.is_empty() {
        return String::new();
    }
    let layers: String = run.layers.iter().map(|(&index, layer)| section(run, index, layer)).collect();
    format!("<section><h2>MoE layers</h2>\n{}{layers}</section>\n", overview(run))
}

/// One row a layer, which a single layer does not need.
fn overview(run: &LoadedRun) -> String {
    if run.layers.len() < 2 {
        return String::new();
    }
    let rows: String = run.layers.iter().map(|(&index, layer)| overview_row(run, index, layer)).collect();
    format!(
        "<div class=\"scroll\"><table><caption>Last step, by layer</caption><thead><tr><th>Layer</th><th>Evenness</th>\
         <th>Hottest</th><th>Coldest</th><th>Routes dropped over the run</th><th>Dead</th></tr></thead>\
         <tbody>{rows}</tbody></table></div>\n"
    )
}

fn overview_row(run: &LoadedRun, index: usize, layer: &LayerHistory) -> String {
    let load = StepLoad::new(&layer.load_last);
    let expert = |expert: Option<usize>| {
        expert
            .map_or_else(|| "–".to_owned(), |expert| format!("{expert} <small>{}</small>", percent(load.share(expert))))
    };
    let dead = dead_of(run, index);
    let class = if dead > 0 { " class=\"dead\"" } else { "" };
    format!(
        "<tr{class}><th>{index}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{dead}</td></tr>",
        layer.entropy.last().map_or_else(|| "–".to_owned(), |point| percent(point.1)),
        expert(load.hottest()),
        expert(load.coldest()),
        grouped(layer.dropped as u64),
    )
}

fn section(run: &LoadedRun, index: usize, layer: &LayerHistory) -> String {
    let experts = layer.loads.rows();
    let plural = if experts == 1 { "" } else { "s" };
    let class = if experts > ROWS_MAX { "layer many" } else { "layer" };
    format!(
        "<article class=\"{class}\"><h3>Layer {index} <small>{experts} expert{plural}</small>{}</h3>\n{}\
         <div class=\"pictures\">{}<div class=\"charts\">{}{}{}</div></div>\n<div class=\"loads\">{}{}</div></article>\n",
        dead_badge(run, index),
        dead_list(run, index),
        load_map(layer),
        entropy(layer),
        dropped(layer),
        layer.saved.draw(),
        loads(run, index, &layer.load_last),
        co_activation(layer, experts),
    )
}

fn dead_of(run: &LoadedRun, index: usize) -> usize {
    run.dead.iter().filter(|dead| dead.layer == index).count()
}

fn dead_badge(run: &LoadedRun, index: usize) -> String {
    match dead_of(run, index) {
        0 => String::new(),
        dead => format!(" <span class=\"status failed\">{dead} dead</span>"),
    }
}

fn dead_list(run: &LoadedRun, index: usize) -> String {
    let dead = run.dead.iter().filter(|dead| dead.layer == index);
    let text = |dead: &DeadExpert| format!("expert {} dead since step {}", dead.expert, grouped(dead.since_step));
    let sentences: Vec<String> = dead.map(text).collect();
    if sentences.is_empty() { String::new() } else { format!("<p class=\"blots\">{}</p>", sentences.join(", ")) }
}

fn load_map(layer: &LayerHistory) -> String {
    let experts = layer.loads.rows();
    let map = HeatMap {
        title: "Expert load",
        unit: "share of routes, uniform = 1×",
        row: "expert",
        columns: &layer.loads,
        value: &|column, expert| column.relative(expert, experts),
        class: &of_relative,
        legend: legend_of_relative("no routes"),
    };
    map.draw()
}

/// Which experts are chosen together: all pairs over the run, or the strongest of the last count.
fn co_activation(layer: &LayerHistory, experts: usize) -> String {
    if layer.pairs.len() != experts * experts.saturating_sub(1) / 2 || layer.pairs.is_empty() {
        return strongest_pairs(&layer.strongest_last);
    }
    let mut amounts = vec![vec![None; experts]; experts];
    let places = (0..experts).flat_map(|a| (a + 1..experts).map(move |b| (a, b)));
    for ((a, b), &tokens) in places.zip(&layer.pairs) {
        (amounts[a][b], amounts[b][a]) = (Some(tokens), Some(tokens));
    }
    let total: f64 = layer.pairs.iter().sum();
    let matrix = MatrixChart {
        title: "Chosen together",
        unit: "pairs of experts, even = 1×",
        names: ["expert", "expert"],
        nothing: "never",
        amounts: &amounts,
        even: total / layer.pairs.len() as f64,
    };
    matrix.draw()
}

fn strongest_pairs(pairs: &[(usize, usize, u64)]) -> String {
    if pairs.is_empty() {
        return String::new();
    }
    let row = |(a, b, tokens): &(usize, usize, u64)| format!("<tr><th>{a}, {b}</th><td>{}</td></tr>", grouped(*tokens));
    let rows: String = pairs.iter().take(ROWS_MAX).map(row).collect();
    format!(
        "<table class=\"load\"><thead><tr><th>Chosen together</th><th>Tokens, last count</th></tr></thead>\
         <tbody>{rows}</tbody></table>"
    )
}

fn entropy(layer: &LayerHistory) -> String {
    let lines = vec![Curve { name: "evenness", points: &layer.entropy, style: Style::Smoothed }];
    let (unit, across) = ("entropy of the load, 1 is uniform", XAxis::Steps);
    Chart { title: "Evenness", unit, size: Size::Small, axis: YRange::Unit, across, lines }.draw()
}

fn dropped(layer: &LayerHistory) -> String {
    if layer.drop_percent.iter().all(|point| point.1 == 0.0) {
        return "<figure class=\"chart small\"><figcaption><b>Dropped routes</b></figcaption>\
                <p class=\"none\">No route was dropped.</p></figure>\n"
            .to_owned();
    }
    let lines = vec![Curve { name: "dropped", points: &layer.drop_percent, style: Style::Smoothed }];
    let (unit, across) = ("% of the chosen", XAxis::Steps);
    Chart { title: "Dropped routes", unit, size: Size::Small, axis: YRange::FromZero, across, lines }.draw()
}

/// Routes per expert of one step.
struct StepLoad<'a> {
    routes: &'a [u64],
    total: f64,
}

impl StepLoad<'_> {
    fn new(routes: &[u64]) -> StepLoad<'_> {
        StepLoad { routes, total: routes.iter().map(|&routes| routes as f64).sum() }
    }

    fn share(&self, expert: usize) -> f64 {
        if self.total > 0.0 { self.routes[expert] as f64 / self.total } else { 0.0 }
    }

    /// The first of the busiest; nobody if all are equal.
    fn hottest(&self) -> Option<usize> {
        let most = self.routes.iter().max()?;
        (most > self.routes.iter().min()?).then(|| self.position(*most))
    }

    fn coldest(&self) -> Option<usize> {
        let least = self.routes.iter().min()?;
        (least < self.routes.iter().max()?).then(|| self.position(*least))
    }

    fn position(&self, routes: u64) -> usize {
        self.routes.iter().position(|&other| other == routes).unwrap_or(0)
    }
}

/// The last step's load as tables of at most [`ROWS_MAX`] experts.
fn loads(run: &LoadedRun, layer: usize, routes: &[u64]) -> String {
    let load = StepLoad::new(routes);
    let experts: Vec<usize> = (0..routes.len()).collect();
    let table = |experts: &[usize]| {
        let rows: String = experts.iter().map(|&expert| load_row(run, layer, &load, expert)).collect();
        format!(
            "<table class=\"load\"><thead><tr><th>Expert</th><th>Routes</th><th>Share</th><th colspan=\"2\">× uniform</th>\
             </tr></thead><tbody>{rows}</tbody></table>"
        )
    };
    experts.chunks(ROWS_MAX).map(table).collect()
}

fn load_row(run: &LoadedRun, layer: usize, load: &StepLoad, expert: usize) -> String {
    let (class, mark) = if run.is_dead(layer, expert) {
        ("dead", " <em>dead</em>")
    } else if load.hottest() == Some(expert) {
        ("hot", " <em>hottest</em>")
    } else if load.coldest() == Some(expert) {
        ("cold", " <em>coldest</em>")
    } else {
        ("", "")
    };
    let share = load.share(expert);
    let most = load.hottest().map_or(share, |hottest| load.share(hottest));
    let width = if most > 0.0 { share / most * 100.0 } else { 0.0 };
    format!(
        "<tr class=\"{class}\"><th>{expert}{mark}</th><td>{}</td><td>{}</td><td>{:.2}×</td>\
         <td class=\"bar\"><i style=\"width:{width:.1}%\"></i></td></tr>",
        count(load.routes[expert]),
        percent(share),
        share * load.routes.len() as f64,
    )
}
