//! The files a run leaves: the log and its repair, the summary, and the page drawn from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use guildhall::metrics::{
    self, CollectiveTraffic, CondensedRecord, DeadExpert, Imbalance, MigratedSequences, MoeRecord, SentRows, Status,
    StepRecord, Summary, UnsentRecord, Writer, read, write_atomically,
};
use guildhall::report::{self, render};

use crate::program::{RUN, Workshop};

pub(crate) fn step(step: u64) -> StepRecord {
    StepRecord {
        step,
        loss: 2.0 + 6.0 / step as f64,
        balance_loss: 0.0,
        z_loss: 0.0,
        grad_norm: 1.0 / step as f64,
        lr: 3e-4,
        tokens: step * 4096,
        tokens_per_s: 12_000.0,
        seconds: step as f64 * 0.34,
        eval_loss: step.is_multiple_of(10).then_some(2.5),
        tasks: vec![],
        eval_tasks: vec![],
        shadowed: 0,
        condense_threshold: None,
        moe: vec![],
        waiting_s: vec![],
        sent: vec![],
        migrated: vec![],
        replaced: vec![],
    }
}

/// A step of `layers` MoE layers whose expert 1 gets nothing.
fn moe_step(number: u64, layers: usize, experts: usize) -> StepRecord {
    let load = |layer: usize| {
        (0..experts).map(move |expert| if expert == 1 { 0 } else { (layer + expert) as u64 + number % 7 })
    };
    let record = |layer| MoeRecord::new(layer, load(layer).collect(), load(layer).sum(), number % 3);
    let moe = (0..layers).map(record).collect();
    StepRecord { moe, balance_loss: 1.1, z_loss: 0.2, ..step(number) }
}

pub(crate) fn summary(steps: u64) -> Summary {
    let traffic =
        BTreeMap::from([("all_to_all".to_owned(), CollectiveTraffic { calls: 40, messages: 40, bytes: 5 << 20 })]);
    let peak = [("total", 900), ("parameters", 500), ("other", 400)].map(|(cause, bytes)| (cause.to_owned(), bytes));
    Summary {
        status: Status::Done,
        steps,
        loss_first: 8.0,
        loss_last: f64::NAN,
        eval_loss: Some(2.5),
        eval_tasks: Vec::new(),
        tokens_per_s: 12_000.0,
        seconds: 3.5,
        peak_bytes: BTreeMap::from(peak),
        peak_bytes_by_rank: [300, 600].map(|total| BTreeMap::from([("total".to_owned(), total)])).into(),
        predicted_peak_bytes: 1000,
        predicted_skewed_bytes: 1200,
        imbalance: Some(Imbalance { mean: 1.2, most: 1.3 }),
        peak_rss_mb: Some(77),
        params_total: 45_000_000,
        params_active: 12_000_000,
        ranks: 4,
        expert: 2,
        traffic: traffic.clone(),
        traffic_by_group: BTreeMap::from([("expert".to_owned(), traffic)]),
        offload: None,
        shadowed: 0,
        condensed: None,
        migrated: 0,
        routes: 9000,
        routes_dropped: 60,
        waiting_s: vec![0.5, 0.25],
        expert_by_layer: Vec::new(),
        nodes: Vec::new(),
        all_to_all: BTreeMap::new(),
        rows_sent: vec![vec![3, 4], vec![5, 6]],
        dead_experts: vec![DeadExpert { layer: 0, expert: 1, since_step: 3 }],
        version: "0.1.0".to_owned(),
        commit: None,
    }
}

pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn log_of(run: &Path) -> PathBuf {
    run.join(metrics::METRICS_FILE)
}

pub(crate) fn write_log(run: &Path, records: impl IntoIterator<Item = StepRecord>) {
    let mut writer = Writer::create(run).unwrap();
    records.into_iter().for_each(|record| writer.write(&record).unwrap());
}

fn steps_in(run: &Path) -> Vec<u64> {
    read(&log_of(run)).unwrap().iter().map(|record| record.step).collect()
}

fn append(path: &Path, bytes: &[u8]) {
    let whole = [&fs::read(path).unwrap(), bytes].concat();
    fs::write(path, whole).unwrap();
}

// --- the log ---

#[test]
fn resuming_cuts_the_log_and_keeps_earlier_bytes() {
    let run = folder();
    write_log(run.path(), (1..=3).map(step));
    let mut early = fs::read(log_of(run.path())).unwrap();
    // A field of a later version, and a number our own writer would spell otherwise, must survive too.
    let foreign = String::from_utf8(early.clone()).unwrap().replacen("\"lr\":0.0003", "\"lr\":3.0E-4,\"x\":1", 1);
    early = foreign.into_bytes();
    fs::write(log_of(run.path()), &early).unwrap();
    let mut writer = Writer::resume(run.path(), 3).unwrap();
    (4..=9).for_each(|number| writer.write(&step(number)).unwrap());
    append(&log_of(run.path()), b"{\"step\":10,\"lo");

    let mut writer = Writer::resume(run.path(), 3).unwrap();
    assert_eq!(fs::read(log_of(run.path())).unwrap(), early);
    writer.write(&step(4)).unwrap();
    assert_eq!(steps_in(run.path()), [1, 2, 3, 4]);
}

#[test]
fn a_torn_last_line_is_no_record_and_goes_on_resume() {
    let run = folder();
    write_log(run.path(), (1..=4).map(step));
    let whole = fs::read(log_of(run.path())).unwrap();
    let last_line = whole[..whole.len() - 1].iter().rposition(|&byte| byte == b'\n').unwrap() + 1;
    for length in last_line..=whole.len() {
        fs::write(log_of(run.path()), &whole[..length]).unwrap();
        // Without its newline the record is still whole.
        let kept: &[u64] = if length + 1 >= whole.len() { &[1, 2, 3, 4] } else { &[1, 2, 3] };
        assert_eq!(steps_in(run.path()), kept, "{length} of {} bytes", whole.len());
        let mut writer = Writer::resume(run.path(), 9).unwrap();
        assert_eq!(steps_in(run.path()), kept, "resumed from {length} bytes");
        writer.write(&step(5)).unwrap();
        assert_eq!(steps_in(run.path()), [kept, &[5]].concat(), "continued from {length} bytes");
    }
}

#[test]
fn resuming_before_the_first_step_or_without_a_log_starts_empty() {
    let run = folder();
    drop(Writer::resume(run.path(), 7).unwrap());
    assert!(steps_in(run.path()).is_empty());
    write_log(run.path(), (1..=3).map(step));
    drop(Writer::resume(run.path(), 0).unwrap());
    assert_eq!(fs::read(log_of(run.path())).unwrap(), b"");
}

#[test]
fn a_broken_line_in_the_middle_is_named() {
    let run = folder();
    write_log(run.path(), [step(1)]);
    append(&log_of(run.path()), b"garbage\n");
    append(&log_of(run.path()), &serde_json::to_vec(&step(2)).unwrap());
    for message in
        [read(&log_of(run.path())).unwrap_err().to_string(), Writer::resume(run.path(), 9).unwrap_err().to_string()]
    {
        assert!(message.contains("metrics.jsonl line 2"), "{message}");
    }
}

#[test]
fn lines_that_go_back_or_have_no_place_on_an_axis_are_named() {
    let run = folder();
    for (steps, said) in [
        ([1, 9, 3], "metrics.jsonl line 3 is of step 3, which cannot follow step 9"),
        ([1, 2, 2], "metrics.jsonl line 3 is of step 2, which cannot follow step 2"),
        ([1, 2, u64::MAX], "metrics.jsonl line 3 is of step 18446744073709551615"),
        ([u64::MAX, 1, 2], "metrics.jsonl line 1 is of step 18446744073709551615, which no run has"),
    ] {
        let record = |number| StepRecord { step: number, ..step(1) };
        let lines = steps.map(|number| serde_json::to_string(&record(number)).unwrap() + "\n");
        fs::write(log_of(run.path()), lines.concat()).unwrap();
        let reports = render(run.path(), None).unwrap_err().to_string();
        let reads = read(&log_of(run.path())).unwrap_err().to_string();
        let resumes = Writer::resume(run.path(), u64::MAX).unwrap_err().to_string();
        for message in [reports, reads, resumes] {
            assert!(message.contains(said), "{message}");
        }
    }
}

#[test]
#[should_panic(expected = "step 2 written after step Some(2)")]
fn steps_are_written_in_order() {
    let run = folder();
    write_log(run.path(), [step(1), step(2), step(2)]);
}

#[test]
fn values_that_are_no_numbers_survive_the_log() {
    let run = folder();
    let mut record = moe_step(1, 1, 2);
    (record.loss, record.grad_norm, record.z_loss) = (f64::NAN, f64::INFINITY, f64::NEG_INFINITY);
    record.eval_loss = Some(f64::NAN);
    record.moe[0].entropy = f64::NAN;
    write_log(run.path(), [record.clone()]);

    let text = fs::read_to_string(log_of(run.path())).unwrap();
    assert!(text.contains(r#""loss":"NaN""#) && text.contains(r#""grad_norm":"inf""#), "{text}");
    let found = read(&log_of(run.path())).unwrap().remove(0);
    assert!(found.loss.is_nan() && found.eval_loss.is_some_and(f64::is_nan) && found.moe[0].entropy.is_nan());
    assert_eq!((found.grad_norm, found.z_loss, found.lr), (f64::INFINITY, f64::NEG_INFINITY, record.lr));
}

#[test]
fn absent_values_leave_no_key() {
    let text = serde_json::to_string(&step(1)).unwrap();
    assert!(!text.contains("eval_loss") && !text.contains("moe"), "{text}");
    assert_eq!(serde_json::from_str::<StepRecord>(&text).unwrap(), step(1));
}

// --- the summary ---

#[test]
fn a_summary_comes_back_as_written() {
    let run = folder();
    assert!(Summary::read(run.path()).unwrap_err().is_not_found());
    let written = Summary { loss_last: 2.25, commit: Some("abc".to_owned()), ..summary(9) };
    summary(8).write(run.path()).unwrap();
    written.write(run.path()).unwrap();
    assert_eq!(Summary::read(run.path()).unwrap(), written);
    let text = fs::read_to_string(run.path().join(metrics::SUMMARY_FILE)).unwrap();
    assert!(text.contains(r#""status": "done""#), "{text}");
    assert_eq!(fs::read_dir(run.path()).unwrap().count(), 1, "no temporary file stays");
}

#[test]
fn a_summary_of_a_failed_run_keeps_its_nan() {
    let run = folder();
    Summary { status: Status::Failed, ..summary(1) }.write(run.path()).unwrap();
    assert!(Summary::read(run.path()).unwrap().loss_last.is_nan());
}

#[test]
fn an_atomic_write_into_nowhere_says_where() {
    let message = write_atomically(Path::new("/no/such/folder/file"), b"x").unwrap_err().to_string();
    assert!(message.contains("/no/such/folder/file"), "{message}");
}

// --- the page ---

/// Renders and checks what every page must satisfy.
pub(crate) fn page(run: &Path) -> String {
    let path = render(run, None).unwrap();
    assert_eq!(path, run.join(report::REPORT_FILE));
    let html = fs::read_to_string(path).unwrap();
    check_well_formed(&html);
    check_self_contained(&html);
    html
}

fn page_of(records: impl IntoIterator<Item = StepRecord>, summary: Option<Summary>) -> String {
    let run = folder();
    fs::write(run.path().join("config.toml"), "[model]\nlayers = 2 # <&>\n").unwrap();
    write_log(run.path(), records);
    summary.iter().for_each(|summary| summary.write(run.path()).unwrap());
    page(run.path())
}

/// The other run takes twice as long for a step: at equal time it has done half the steps.
#[test]
fn two_runs_are_compared_by_steps_and_by_time() {
    let (fast, slow) = (folder(), folder());
    let record = |number: u64, seconds: f64, loss: f64| StepRecord {
        seconds: number as f64 * seconds,
        eval_loss: number.is_multiple_of(10).then_some(loss / number as f64),
        ..step(number)
    };
    write_log(fast.path(), (1..=40).map(|number| record(number, 1.0, 100.0)));
    write_log(slow.path(), (1..=40).map(|number| record(number, 2.0, 50.0)));
    render(fast.path(), Some(slow.path())).unwrap();
    let html = fs::read_to_string(fast.path().join(report::REPORT_FILE)).unwrap();
    check_well_formed(&html);
    check_self_contained(&html);
    for part in ["Held-out loss by step", "Held-out loss by time", "Loss at step 40", "Loss at 40 s"] {
        assert!(html.contains(part), "{part}");
    }
    let section = html.split("<h2>Against").nth(1).unwrap();
    let cells: Vec<&str> = section.split("<td>").skip(1).map(|cell| cell.split('<').next().unwrap()).collect();
    // At step 40: 100 / 40 and 50 / 40. At 40 s: 100 / 40, and 50 / 20, of step 20.
    assert_eq!([cells[3], cells[4], cells[8], cells[9]], ["2.5", "2.5", "1.25", "2.5"]);
    let nowhere = render(fast.path(), Some(Path::new("/no/such/run"))).unwrap_err().to_string();
    assert!(nowhere.contains("/no/such/run"), "{nowhere}");
}

/// Every tag closed, in order; attributes quoted, none twice.
fn check_well_formed(html: &str) {
    let mut open: Vec<String> = Vec::new();
    let mut rest = html.strip_prefix("<!DOCTYPE html>").expect("a document type");
    while let Some(start) = rest.find('<') {
        assert!(!rest[..start].contains('>'), "stray > in {:?}", &rest[..start]);
        let end = start + rest[start..].find('>').expect("an unclosed tag");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "closed in the wrong order");
            continue;
        }
        let (name, attributes) = tag.split_once(char::is_whitespace).unwrap_or((tag, ""));
        check_attributes(attributes.trim_end_matches('/'));
        if matches!(name, "style" | "script") {
            let close = format!("</{name}>");
            rest = rest.split_once(close.as_str()).expect("a closed raw element").1;
        } else if !tag.ends_with('/') {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty(), "never closed: {open:?}");
}

fn check_attributes(text: &str) {
    let mut seen = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (name, value) = rest.split_once("=\"").unwrap_or_else(|| panic!("unquoted attribute in {rest:.80}"));
        assert!(name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-'), "attribute {name:?}");
        assert!(!seen.contains(&name), "attribute {name} twice");
        seen.push(name);
        rest = value.split_once('"').expect("a closed value").1.trim_start();
    }
}

fn check_self_contained(html: &str) {
    for forbidden in ["http:", "https:", "src=", "@import", "url(", "<link", "href=", "//"] {
        let at = html.find(forbidden);
        assert!(at.is_none(), "{forbidden} at {at:?}");
    }
}

#[test]
fn the_checker_sees_what_is_wrong() {
    let page = |body: &str| format!("<!DOCTYPE html><p>{body}</p>");
    check_well_formed(&page("<b class=\"x\" id=\"y\">1</b><br/>"));
    for body in ["<b>", "<b><i></b></i>", "<b class=x></b>", "</b>", "<b id=\"1\" id=\"2\"></b>"] {
        let html = page(body);
        assert!(std::panic::catch_unwind(|| check_well_formed(&html)).is_err(), "{body} passed");
    }
}

#[test]
fn a_finished_run_shows_everything() {
    let html = page_of((1..=60).map(|number| moe_step(number, 2, 8)), Some(summary(60)));
    for expected in [
        "class=\"status done\"",
        "8.000 → 2.100",
        "perplexity 12.18",
        "45 M",
        "12 M active",
        "900 B",
        "4 × 2",
        "all_to_all",
        "5 MiB",
        "Balance loss",
        "Router z-loss",
        "dead since step 3",
        "1 dead",
        "layers = 2 # &lt;&amp;&gt;",
        "11.1 %",
        "above the total",
        "predicted 1000 B, 1.17 KiB with skewed rows",
        "predicted, skewed rows</th><td>1.17 KiB</td><td colspan=\"2\">33.3 % above",
        "evaluation",
        "Layer 1",
    ] {
        assert!(html.contains(expected), "{expected} is missing");
    }
}

/// What is condensed and what moves is drawn by layer; other runs have no room for it.
#[test]
fn rows_that_are_saved_are_drawn() {
    let pages = [false, true].map(|saves| {
        page_of(
            (1..=30).map(|number| {
                let mut record = moe_step(number, 2, 4);
                if saves {
                    let similarity = (0..20).map(|bin| bin * number).collect();
                    let (routes, uncomputed) = (100, number);
                    let uncomputed_share = uncomputed as f64 / routes as f64;
                    let condensed =
                        CondensedRecord { routes, uncomputed, uncomputed_share, similarity, ..Default::default() };
                    record.moe.iter_mut().for_each(|moe| moe.condensed = Some(condensed.clone()));
                    let unsent = UnsentRecord { routes: 50, unsent: number, unsent_share: number as f64 / 50.0 };
                    let rows = vec![vec![1]];
                    record.sent =
                        (0..2).map(|layer| SentRows { layer, rows: rows.clone(), condensed: Some(unsent) }).collect();
                    record.migrated = vec![MigratedSequences {
                        layer: 1,
                        sequences: number,
                        tokens: 0,
                        residual_rows: 0,
                        results_if_stayed: 0,
                        results: 0,
                    }];
                }
                record
            }),
            None,
        )
    });
    let titles = ["Condensed routes", "Similarity of tokens", "Sequences that moved"];
    let drawn = |page: &str| titles.map(|title| page.matches(&format!("<figcaption><b>{title}</b>")).count());
    assert_eq!(pages.each_ref().map(|page| drawn(page)), [[0, 0, 0], [2, 2, 1]]);
    assert!(pages[1].contains("not sent") && pages[1].contains("not computed"));
}

/// Two ranks of one expert group each way: the ranks of group 1 are idle, and rank 2 waits for all.
fn ranks_step(number: u64) -> StepRecord {
    let rows = vec![vec![5, 1], vec![1, 5], vec![0, 0], vec![0, 0]];
    let mut record = moe_step(number, 2, 4);
    record.moe = record.moe.into_iter().map(|moe| moe.with_pairs(vec![9, 0, 1, 2, 3, 0])).collect();
    record.sent = (0..2).map(|layer| SentRows { layer, rows: rows.clone(), condensed: None }).collect();
    record.waiting_s = vec![0.01, 0.02, 0.4, 0.0];
    record
}

#[test]
fn ranks_and_pairs_are_drawn_with_their_amounts() {
    let html = page_of((1..=30).map(ranks_step), Some(summary(30)));
    // Over two layers and 30 steps, against a mean of 90; nothing stands where no row can go.
    assert!(html.contains("data-cells=\"300/3.33 60/0.67 - -;60/0.67 300/3.33 - -;- - 0/0 0/0;- - 0/0 0/0\""));
    // 270 of 450 tokens' pairs are {0, 1}: 3.6 times a sixth. The diagonal has no meaning.
    assert!(html.contains("data-cells=\"- 270/3.6 0/0 30/0.4;270/3.6 - 60/0.8 90/1.2;"));
    let waiting = html.split("aria-label=\"Waiting\"").nth(1).expect("a map of waiting");
    let rows = waiting.split("data-rows=\"").nth(1).unwrap().split('"').next().unwrap();
    let first: Vec<&str> = rows.split(';').map(|row| row.split(' ').next().unwrap()).collect();
    assert_eq!(first, ["0.01", "0.02", "0.4", "0"]);
    assert!(html.contains("<span>400 ms</span>"));
    // A run resumed on another mesh: what came before belongs to other ranks.
    let alone = |number| StepRecord { waiting_s: vec![0.1], sent: vec![], ..ranks_step(number) };
    let resumed = page_of((1..=20).map(alone).chain((21..=30).map(ranks_step)), None);
    assert!(resumed.contains("data-cells=\"100/3.33 20/0.67 - -;"));
    assert!(resumed.split("aria-label=\"Waiting\"").nth(1).unwrap().contains("data-firsts=\"21 "));
}

/// One layer in groups of two ranks, and one in a group of four.
#[test]
fn rows_of_layers_of_several_degrees_go_between_the_same_ranks() {
    let mixed = |number| {
        let mut record = ranks_step(number);
        record.sent[0].rows[2] = vec![2, 9];
        record.sent[1].rows = vec![vec![1, 2, 3, 4], vec![0; 4], vec![7, 0, 0, 0], vec![0, 0, 8, 8]];
        record
    };
    let html = page_of((1..=10).map(mixed), Some(summary(10)));
    let cells = html.split("aria-label=\"Rows between ranks\"").nth(1).expect("a matrix of ranks");
    let cells = cells.split("data-cells=\"").nth(1).unwrap().split('"').next().unwrap();
    let amounts = |row: &str| row.split(' ').map(|cell| cell.split('/').next().unwrap().to_owned()).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = cells.split(';').map(amounts).collect();
    let want = [["60", "30", "30", "40"], ["10", "50", "0", "0"], ["70", "0", "20", "90"], ["0", "0", "80", "80"]];
    assert_eq!(rows, want, "{cells}");
}

#[test]
fn many_experts_show_their_strongest_pairs() {
    let mut triangle = vec![0; 80 * 79 / 2];
    triangle[78] = 12_345;
    let record = |number| {
        let mut record = moe_step(number, 1, 80);
        record.moe = record.moe.into_iter().map(|moe| moe.with_pairs(triangle.clone())).collect();
        record
    };
    assert!(page_of((1..=3).map(record), None).contains("<th>0, 79</th><td>12\u{202f}345</td>"));
}

#[test]
fn layers_of_different_numbers_of_experts_are_counted() {
    let record = |number| {
        let mut record = moe_step(number, 2, 4);
        record.moe[1] = MoeRecord::new(1, vec![3, 5], 8, 0);
        record
    };
    assert!(page_of((1..=3).map(record), None).contains("2 × 2 to 4"));
}

/// A line as it was before records told of pairs, ranks and rates.
const OLD_LINE: &str = r#"{"step":1,"loss":3.5,"balance_loss":1.0,"z_loss":0.1,"grad_norm":1.0,"lr":0.001,"tokens":64,
    "tokens_per_s":100.0,"seconds":0.5,"moe":[{"layer":0,"load":[3,1],"entropy":0.8,"dropped":1}]}"#;

#[test]
fn logs_of_earlier_versions_are_drawn_without_what_they_lack() {
    let run = folder();
    let lines =
        (1..=30).map(|step| format!("{}\n", OLD_LINE.replace('\n', "").replacen(":1,", &format!(":{step},"), 1)));
    fs::write(log_of(run.path()), lines.collect::<String>()).unwrap();
    let html = page(run.path());
    assert!(!html.contains("Chosen together") && !html.contains("aria-label=\"Waiting\""));
    assert!(html.contains("% of the chosen") && html.contains(" 25 25 25 "), "the drop rate follows from the counts");
    let text = fs::read_to_string(run.path().join("report.html")).unwrap();
    assert!(text.contains("Expert load"));
}

/// Without a summary, the log and the recipe tell who is dead.
#[test]
fn the_recipe_says_when_an_expert_is_dead() {
    let page_with = |config: &str| {
        let run = folder();
        fs::write(run.path().join("config.toml"), config).unwrap();
        write_log(run.path(), (1..=10).map(|number| moe_step(number, 1, 4)));
        page(run.path())
    };
    assert!(!page_with("[moe]\nexperts = 4\n").contains("dead since"), "20 steps if nothing is said");
    assert!(!page_with("[moe]\ndead_after = 11\n").contains("dead since"));
    assert!(page_with("[moe]\ndead_after = 10\n").contains("expert 1 dead since step 1"));
}

#[test]
fn a_run_without_summary_is_drawn_as_far_as_it_got() {
    let html = page_of((1..=30).map(|number| moe_step(number, 1, 4)), None);
    assert!(html.contains("not finished") && html.contains("This run has not ended"));
    assert!(html.contains("dead since step 1"), "the log alone shows dead experts");
}

#[test]
fn a_summary_older_than_the_log_is_not_believed() {
    let html = page_of((1..=30).map(step), Some(summary(20)));
    assert!(html.contains("not finished") && !html.contains("45 M"));
}

#[test]
fn every_length_of_run_is_drawn() {
    assert!(page_of([], None).contains("No step is logged yet"));
    assert!(page_of([], Some(Summary { status: Status::Failed, ..summary(0) })).contains("failed"));
    assert!(page_of([moe_step(1, 1, 4)], Some(summary(1))).contains("Layer 0"));
    assert!(page_of([step(1), step(2)], Some(summary(2))).contains("Gradient norm"));
}

#[test]
fn a_long_run_makes_a_page_of_bounded_size() {
    let html = page_of((1..=100_000).map(|number| moe_step(number, 1, 4)), Some(summary(100_000)));
    assert!(html.contains("class=\"band a\""));
    assert!(html.len() < 400_000, "{} bytes", html.len());
}

#[test]
fn dense_models_have_no_moe_section() {
    let html = page_of((1..=30).map(step), Some(summary(30)));
    assert!(!html.contains("<h2>MoE layers</h2>") && !html.contains("Balance loss"));
    assert!(html.contains("a dense model"));
}

#[test]
fn wide_and_deep_models_are_drawn() {
    let wide = page_of((1..=50).map(|number| moe_step(number, 1, 64)), Some(summary(50)));
    assert_eq!(wide.matches("<table class=\"load\">").count(), 4);
    let deep = page_of((1..=50).map(|number| moe_step(number, 12, 8)), Some(summary(50)));
    assert_eq!(deep.matches("<article").count(), 12);
    assert!(deep.contains("Last step, by layer"));
    let single = page_of((1..=3).map(|number| moe_step(number, 1, 1)), None);
    assert!(single.contains("1 expert<"));
}

#[test]
fn values_that_are_no_numbers_are_marked_with_their_step() {
    let broken = |number: u64| match number {
        20..=22 => StepRecord { loss: f64::NAN, grad_norm: f64::INFINITY, ..step(number) },
        _ => step(number),
    };
    let html = page_of((1..=40).map(broken), None);
    assert!(html.contains("NaN at steps 20 to 22") && html.contains("inf at steps 20 to 22"));
    let nothing = page_of((1..=40).map(|number| StepRecord { loss: f64::NAN, ..step(number) }), Some(summary(40)));
    assert!(nothing.contains("NaN at steps 1 to 40"));
    let alternating = |number: u64| {
        if number.is_multiple_of(2) { StepRecord { loss: f64::NAN, ..step(number) } } else { step(number) }
    };
    assert!(page_of((1..=2000).map(alternating), None).contains("and 988 more times"));
}

#[test]
fn hostile_text_stays_text() {
    let parent = folder();
    let run = parent.path().join("<script>alert('1')<\" & onload=x>");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("config.toml"), b"# </pre><script>alert(2) \xff\x00").unwrap();
    write_log(&run, (1..=3).map(|number| moe_step(number, 1, 4)));
    let bad = "</td><img onerror=x>";
    let traffic = BTreeMap::from([(bad.to_owned(), CollectiveTraffic::default())]);
    let hostile = Summary {
        traffic: traffic.clone(),
        traffic_by_group: BTreeMap::from([(bad.to_owned(), traffic)]),
        peak_bytes: BTreeMap::from([(bad.to_owned(), u64::MAX), ("total".to_owned(), 0)]),
        version: bad.to_owned(),
        commit: Some(bad.to_owned()),
        ..summary(3)
    };
    hostile.write(&run).unwrap();
    let html = page(&run);
    assert!(!html.contains("<img") && !html.contains("<script>alert"), "markup from the run");
    assert!(html.contains("&lt;script&gt;alert(&#39;1&#39;)"));
}

#[test]
fn extreme_numbers_are_drawn() {
    let extreme = |number: u64| StepRecord {
        loss: if number == 2 { f64::MAX } else { f64::MIN },
        grad_norm: if number == 2 { 1e-320 } else { f64::MAX },
        lr: 0.0,
        tokens: u64::MAX,
        tokens_per_s: -1.0,
        seconds: f64::INFINITY,
        moe: vec![MoeRecord::new(0, vec![u64::MAX, u64::MAX, 0], u64::MAX, u64::MAX)],
        ..step(number)
    };
    let html = page_of((1..=3).map(extreme), Some(summary(3)));
    assert!(!html.contains("NaN%") && !html.contains("NaN "), "a coordinate is not a number");
}

#[test]
fn what_is_no_run_is_refused_with_a_hint() {
    let empty = folder();
    let message = render(empty.path(), None).unwrap_err().to_string();
    assert!(message.contains("is not a run folder") && message.contains("runs/quickstart"), "{message}");
    fs::write(empty.path().join(metrics::SUMMARY_FILE), "{").unwrap();
    fs::write(empty.path().join("config.toml"), "").unwrap();
    let message = render(empty.path(), None).unwrap_err().to_string();
    assert!(message.contains("summary.json is not a run summary"), "{message}");
}

/// A checkpoint has a recipe, too, and lies in the run that is meant.
#[test]
fn a_report_of_a_checkpoint_names_the_run() {
    let shop = Workshop::new();
    shop.train("--set train.steps=2");
    for folder in ["checkpoints/latest", "checkpoints/step-000002"] {
        let words = ["is a checkpoint and not a run folder", &format!("here {RUN}\n")];
        shop.fails(&format!("report {RUN}/{folder}"), 2, &words);
        assert!(!shop.path(&format!("{RUN}/{folder}/report.html")).exists());
    }
    shop.fails(&format!("report {RUN}/checkpoints"), 2, &["is not a run folder", &format!("here {RUN}\n")]);
}
