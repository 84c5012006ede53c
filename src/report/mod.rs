//! A run folder drawn as one page: `report.html`, which needs nothing but a browser.
//!
//! ```text
//! config.toml ---.                   .-> header   cards of key figures
//! metrics.jsonl --> run::LoadedRun --+-> training chart (series thins, scale places)
//! summary.json --|  (columns,        +-> tasks    charts and a table of parts
//! scores.json ---|   parts,          +-> scores   a grid of languages, a table of directions
//! bench.json ----'   series)         +-> moe      heatmap, matrix, chart, table of loads
//!                                    +-> ranks    heatmap, matrix
//!                                    +-> speed    tables of ceilings and kernels
//!                                    '-> tables   traffic, memory
//! ```
//!
//! Every picture is inline SVG stretched to its frame, with its labels as text beside it, so that letters
//! keep their size on any screen. Style and script are inline and the page's own policy forbids to load
//! anything. Text from the run is escaped where it enters the page.

mod against;
mod chart;
mod colours;
mod columns;
mod error;
mod format;
mod header;
mod heatmap;
mod matrix;
mod moe;
mod parts;
mod ranks;
mod run;
mod saved;
mod scale;
mod scores;
mod series;
mod speed;
mod tables;
mod tasks;
mod training;

use std::path::{Path, PathBuf};

use crate::metrics::write_atomically;

pub use error::Error;

use format::escape;
use run::LoadedRun;

/// Name of the page in a run folder.
pub const REPORT_FILE: &str = "report.html";

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("hover.js");

/// Draws the run in the folder `run_dir`, finished or not, beside another if one is given, and returns the path of the
/// page.
///
/// # Errors
/// A folder that holds no run, or a file of it that cannot be read or written.
pub fn render(run_dir: &Path, against: Option<&Path>) -> Result<PathBuf, Error> {
    let run = LoadedRun::read(run_dir)?;
    let other = against.map(LoadedRun::read).transpose()?;
    let path = run_dir.join(REPORT_FILE);
    write_atomically(&path, page(&run, other.as_ref()).as_bytes())?;
    Ok(path)
}

fn page(run: &LoadedRun, other: Option<&LoadedRun>) -> String {
    let title = escape(&run.name);
    let body = [
        header::draw(run),
        training::draw(run),
        other.map_or_else(String::new, |other| against::draw(run, other)),
        tasks::draw(run),
        scores::draw(run.scores.as_ref()),
        moe::draw(run),
        ranks::draw(run),
        speed::draw(run.speed.as_ref()),
        tables::memory(run.summary.as_ref()),
        tables::traffic(run.summary.as_ref()),
        configuration(run.config.as_deref()),
        footer(run),
    ]
    .concat();
    format!(
        r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"/>
<title>{title} · Guildhall run</title>
<style>
{STYLE}</style>
</head>
<body>
<main>
{body}</main>
<script>
{SCRIPT}</script>
</body>
</html>
"#
    )
}

fn configuration(config: Option<&str>) -> String {
    let Some(config) = config else {
        return "<section><h2>Configuration</h2><p class=\"none\">This run has no config.toml.</p></section>\n"
            .to_owned();
    };
    format!(
        "<section><h2>Configuration</h2>\n<details><summary>The resolved recipe, config.toml</summary>\
         <pre>{}</pre></details></section>\n",
        escape(config)
    )
}

fn footer(run: &LoadedRun) -> String {
    let Some(summary) = &run.summary else {
        return "<footer>This run has not ended: draw the report again for newer figures.</footer>\n".to_owned();
    };
    let commit = summary.commit.as_ref().map(|commit| format!(", commit {}", escape(commit))).unwrap_or_default();
    format!("<footer>Guildhall {}{commit}</footer>\n", escape(&summary.version))
}
