//! The page of a run of tasks: losses by task and part, scores by direction.

use std::fs;

use guildhall::metrics::{PartScores, RunScores, SCORES_FILE, StepRecord, Summary, TaskRecord, by_language};
use guildhall::report::render;

use crate::report::{folder, page, step, summary, write_log};

fn part(task: &str, [from, to]: [&str; 2], tokens: u64, loss: Option<f64>) -> TaskRecord {
    let [task, from, to] = [task, from, to].map(str::to_owned);
    TaskRecord { task, from, to, rows: tokens / 100, tokens, loss }
}

/// Losses fall with the steps; every third step has no row of the label's part, and one has a row without tokens.
fn learned(number: u64) -> StepRecord {
    let loss = |start: f64| Some(start / number as f64);
    let mut tasks = vec![
        part("translation", ["en", "de"], 300, loss(6.0)),
        part("translation", ["de", "en"], 100, loss(2.0)),
        part("denoising", ["de", "de"], 500, loss(4.0)),
    ];
    match number % 3 {
        0 => {}
        1 => tasks.push(part("tone", ["en", "classification:tone"], 200, loss(1.0))),
        _ => tasks.push(part("tone", ["en", "classification:tone"], 0, None)),
    }
    let evaluated = [part("translation", ["en", "de"], 900, loss(7.0)), part("translation", ["fr", "de"], 0, None)];
    let eval_tasks = if number.is_multiple_of(10) { evaluated.to_vec() } else { Vec::new() };
    StepRecord { tasks, eval_tasks, ..step(number) }
}

/// The cells of the row of a part.
fn cells<'a>(html: &'a str, task: &str, part: &str) -> Vec<&'a str> {
    let row = format!("<tr><th>{task}</th><td class=\"text\">{part}</td>");
    let row = html.split(&row).nth(1).unwrap_or_else(|| panic!("no row {row}")).split("</tr>").next().unwrap();
    let text = |cell: &'a str| cell.split_once('>').unwrap().1.split('<').next().unwrap();
    row.split("<td").skip(1).map(text).collect()
}

#[test]
fn parts_have_a_row_and_tasks_a_curve() {
    let run = folder();
    write_log(run.path(), (1..=60).map(learned));
    // The last evaluation of a run may be behind a step that is none of those that evaluate.
    let last = vec![part("translation", ["en", "de"], 900, Some(0.0625))];
    Summary { eval_tasks: last, ..summary(60) }.write(run.path()).unwrap();
    let html = page(run.path());
    for title in ["Training loss by task", "Held-out loss by task", "Held-out loss by part"] {
        assert!(html.contains(&format!("<b>{title}</b>")), "{title}");
    }
    // 300 tokens of 60 steps; the mean of 6 / n over the last 20 steps; held out at steps 10 to 60.
    let mean = |start: f64| (41..=60).map(|n| start / f64::from(n)).sum::<f64>() / 20.0;
    let last = format!("{:.4}", mean(6.0));
    let share = |rows: f64| format!("{:.1} %", 100.0 * rows / (180.0 + 60.0 + 300.0 + 40.0));
    let row = ["180", "18 k", &share(180.0), "", &last, "0.7000", "0.1167", "0.1167"];
    assert_eq!(cells(&html, "translation", "en → de"), row);
    // Of a part that some steps lack; nothing of it is held out.
    let steps: Vec<f64> = (1..=60).filter(|n| n % 3 == 1).map(f64::from).collect();
    let last = format!("{:.4}", steps.iter().map(|n| 1.0 / n).sum::<f64>() / steps.len() as f64);
    let row = ["40", "4 k", &share(40.0), "", &last, "–", "–", "–"];
    assert_eq!(cells(&html, "tone", "en → label"), row);
    // A part that is held out and not trained on; and by tokens, both directions together.
    assert_eq!(cells(&html, "translation", "fr → de")[..2], ["0", "0"]);
    assert_eq!(cells(&html, "translation", "all 3 parts")[4], format!("{:.4}", mean(5.0)));
    // Two directions write German, one of which nothing was learned of: together they are the other.
    let shared = cells(&html, "translation", "2 parts → de");
    assert_eq!(shared, cells(&html, "translation", "en → de"));
    assert!(!html.contains(">1 parts"), "a language that one part writes is that part");
    let rows = html.split("</tbody><tbody>").nth(1).unwrap();
    assert!(rows.find("<th>denoising") < rows.find("<th>translation"), "the task with most tokens comes first");
}

#[test]
fn the_loss_of_a_language_is_the_mean_of_what_writes_it() {
    let parts = [
        part("translation", ["en", "de"], 300, Some(6.0)),
        part("translation", ["de", "en"], 700, Some(5.0)),
        part("translation", ["fr", "de"], 100, Some(2.0)),
        part("translation", ["it", "de"], 0, None),
        part("denoising", ["de", "de"], 500, Some(4.0)),
    ];
    assert_eq!(by_language(&parts), [part("translation", ["*", "de"], 400, Some(5.0))]);
    assert_eq!(by_language(&[parts[3].clone(), parts[3].clone()]), [part("translation", ["*", "de"], 0, None)]);
}

#[test]
fn the_last_evaluation_is_the_summarys() {
    let run = folder();
    write_log(run.path(), (1..=15).map(learned));
    let last = vec![part("translation", ["en", "de"], 900, Some(0.0625))];
    Summary { eval_tasks: last, ..summary(15) }.write(run.path()).unwrap();
    assert_eq!(cells(&page(run.path()), "translation", "en → de")[5..], ["0.7000", "0.0625", "0.0625"]);
}

/// Of hundreds of directions a picture has a few lines, and the table all.
#[test]
fn many_parts_stay_readable() {
    let run = folder();
    let languages: Vec<String> = (0..200).map(|n| format!("l{n}")).collect();
    let record = |number: u64| {
        let parts = languages.iter().zip(1..).map(|(to, tokens)| part("translation", ["en", to], tokens, Some(2.0)));
        let tasks: Vec<TaskRecord> = parts.collect();
        StepRecord { eval_tasks: tasks.clone(), tasks, ..step(number) }
    };
    write_log(run.path(), (1..=30).map(record));
    let html = page(run.path());
    assert!(html.contains("the 6 of 200 parts with most tokens"));
    let figure = html.split("<b>Held-out loss by part</b>").nth(1).unwrap().split("</figure>").next().unwrap();
    assert!((figure.contains("l199") && figure.contains("l194")) && !figure.contains("l193"), "{figure:.600}");
    assert!(languages.iter().all(|to| html.contains(&format!("en → {to}</td>"))));
    assert!(html.len() < 400_000, "{} bytes", html.len());
}

fn scored(task: &str, languages: [&str; 2], [bleu, chrf]: [Option<f64>; 2]) -> PartScores {
    let (part, sentences) = (part(task, languages, 50, Some(1.5)), Some(20));
    PartScores { part, sentences, bleu, chrf, exact: Some(0.25), accuracy: None }
}

fn write_scores(run: &std::path::Path, tasks: Vec<PartScores>) {
    let text = serde_json::to_string(&RunScores { step: 40, tasks }).unwrap();
    fs::write(run.join(SCORES_FILE), text).unwrap();
}

#[test]
fn scores_are_a_table_and_a_grid() {
    let run = folder();
    write_log(run.path(), (1..=60).map(learned));
    assert!(!page(run.path()).contains("<h2>Scores"));
    let directions = [["en", "de"], ["de", "en"], ["fr", "de"], ["en", "fr"]];
    let mut tasks: Vec<PartScores> = directions
        .into_iter()
        .zip([40.0, 30.0, 20.0, 10.0])
        .map(|(both, chrf)| scored("translation", both, [Some(chrf / 2.0), Some(chrf)]))
        .collect();
    let label = ["en", "classification:tone"];
    tasks.push(PartScores { exact: None, accuracy: Some(0.5), ..scored("tone", label, [None; 2]) });
    tasks.push(PartScores { sentences: None, exact: None, ..scored("denoising", ["de", "de"], [None; 2]) });
    write_scores(run.path(), tasks);
    let html = page(run.path());
    assert!(html.contains("at step 40"), "whose scores they are");
    let section = html.split("<h2>Scores").nth(1).unwrap();
    assert_eq!(cells(section, "translation", "en → de"), ["20", "20.0", "40.0", "25.0 %", "–", "1.5000"]);
    assert_eq!(cells(section, "tone", "en → label"), ["20", "–", "–", "–", "50.0 %", "1.5000"]);
    assert!(!section.contains("<th>denoising</th>"), "no text of it was scored");
    // The hottest colour is the best direction's.
    assert!(section.contains("<td class=\"q16\" title=\"en → de: chrF 40.0\">40.0</td>"), "{section:.2000}");
    assert!(section.contains("<td class=\"q10\" title=\"en → fr: chrF 10.0\">"), "a quarter of it");
}

/// A square of a hundred languages would be empty but for a line and a column.
#[test]
fn directions_that_share_a_language_are_drawn_around_it() {
    let run = folder();
    write_log(run.path(), (1..=3).map(learned));
    let languages: Vec<String> = (0..100).map(|n| format!("l{n}")).collect();
    let both = |(language, n): (&String, i32)| {
        let [out, back] = [["en", language], [language, "en"]];
        [(out, f64::from(n)), (back, 100.0 - f64::from(n))].map(|(both, bleu)| scored("t", both, [Some(bleu), None]))
    };
    write_scores(run.path(), languages.iter().zip(0..).flat_map(both).collect());
    let html = page(run.path());
    let grid = html.split("<table class=\"grid dense\">").nth(1).unwrap().split("</table>").next().unwrap();
    assert_eq!(grid.matches("<tr>").count(), 3, "a head, a line from and a line into the language");
    assert!(grid.contains("en → …") && grid.contains("… → en") && grid.contains("title=\"l7 → en: BLEU 93.0\""));
    assert!(!grid.contains(">93.0<"), "there is no room for digits");
}

#[test]
fn scores_that_are_none_are_refused_with_a_remedy() {
    let run = folder();
    write_log(run.path(), (1..=3).map(learned));
    for text in ["", "{\"step\": 3", "{\"step\": 3}"] {
        fs::write(run.path().join(SCORES_FILE), text).unwrap();
        let error = render(run.path(), None).unwrap_err().to_string();
        assert!(error.contains(SCORES_FILE) && error.contains("delete it"), "{error}");
    }
}
