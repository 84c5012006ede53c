//! Progress on stderr: a bar on a terminal, a plain line now and then in a file.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{MoeRecord, StepRecord};

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows how far a run is. One rank shows, the others are [`Progress::silent`].
#[derive(Debug)]
pub struct Progress {
    output: ProgressOutput,
}

#[derive(Debug)]
enum ProgressOutput {
    Bar(ProgressBar),
    Lines(Lines),
    Silent,
}

impl Progress {
    /// A bar if stderr is a terminal, else lines; `steps_done` of `steps` were done before this process.
    pub fn new(steps: u64, steps_done: u64) -> Progress {
        let output = if io::stderr().is_terminal() {
            ProgressOutput::Bar(bar(steps, steps_done))
        } else {
            ProgressOutput::Lines(Lines::new(steps, steps_done, Instant::now()))
        };
        Progress { output }
    }

    /// Shows nothing, not even notes.
    pub fn silent() -> Progress {
        Progress { output: ProgressOutput::Silent }
    }

    /// Shows the step just done.
    pub fn step(&mut self, record: &StepRecord) {
        match &mut self.output {
            ProgressOutput::Bar(bar) => {
                bar.set_position(record.step);
                bar.set_message(figures(record));
            }
            ProgressOutput::Lines(lines) => {
                if let Some(line) = lines.line(record, Instant::now()) {
                    say(&line);
                }
            }
            ProgressOutput::Silent => {}
        }
    }

    /// Prints a line for the user, above the bar if there is one.
    pub fn note(&self, text: &str) {
        match &self.output {
            ProgressOutput::Bar(bar) => bar.suspend(|| say(text)),
            ProgressOutput::Lines(_) => say(text),
            ProgressOutput::Silent => {}
        }
    }

    /// Leaves the bar as it stands and the cursor below it.
    pub fn finish(&mut self) {
        if let ProgressOutput::Bar(bar) = &self.output {
            bar.abandon();
        }
    }
}

fn bar(steps: u64, steps_done: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{pos}/{len} [{bar:20}] eta {eta}  {wide_msg}")
        .expect("the template is constant")
        .progress_chars("=> ");
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr())
        .with_style(style)
        .with_position(steps_done);
    // Steps done by an earlier process say nothing about the speed of this one.
    bar.reset_eta();
    bar
}

/// A closed stderr must not stop a run.
/// A line for the user on stderr, written at once, so that lines of several processes are not mixed. A closed stderr stops
/// nothing.
pub fn say(line: &str) {
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Decides which steps are worth a line: the first, each tenth of the run, and one in [`LINE_EVERY`].
#[derive(Debug)]
struct Lines {
    steps: u64,
    steps_done: u64,
    started: Instant,
    /// Tenth of the run and time of the last line.
    printed: Option<(u64, Instant)>,
}

impl Lines {
    fn new(steps: u64, steps_done: u64, started: Instant) -> Lines {
        Lines { steps, steps_done, started, printed: None }
    }

    fn line(&mut self, record: &StepRecord, now: Instant) -> Option<String> {
        let tenth = record.step.saturating_mul(10) / self.steps.max(1);
        let due =
            self.printed.is_none_or(|(last_tenth, at)| tenth > last_tenth || now.duration_since(at) >= LINE_EVERY);
        if !due {
            return None;
        }
        self.printed = Some((tenth, now));
        let eta = HumanDuration(self.eta(record.step, now));
        Some(format!("step {}/{}  {}  eta {eta:#}", record.step, self.steps, figures(record)))
    }

    /// Time the rest takes at the mean pace of this process.
    fn eta(&self, step: u64, now: Instant) -> Duration {
        let done = step.saturating_sub(self.steps_done).max(1);
        let left = self.steps.saturating_sub(step);
        let seconds = now.duration_since(self.started).as_secs_f64() * left as f64 / done as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// `loss 3.2100  12,345 tokens/s  hot L2 e3:18% cold L5 e6:7%`
fn figures(record: &StepRecord) -> String {
    let rate = HumanCount(record.tokens_per_s as u64);
    let mut text = format!("loss {:.4}  {rate} tokens/s", record.loss);
    if let Some(eval_loss) = record.eval_loss {
        text += &format!("  eval {eval_loss:.4}");
    }
    if let Some((hot, cold)) = extremes(&record.moe) {
        text += &format!("  hot {} cold {}", hot.text(), cold.text());
    }
    text
}

/// One expert's share of its layer's routes, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ExpertShare {
    layer: usize,
    expert: usize,
    share: f64,
}

impl ExpertShare {
    fn text(self) -> String {
        format!("L{} e{}:{:.0}%", self.layer, self.expert, self.share * 100.0)
    }
}

/// The hottest and the coldest expert over all layers; ties go to the first.
fn extremes(layers: &[MoeRecord]) -> Option<(ExpertShare, ExpertShare)> {
    let mut shares = layers.iter().flat_map(shares);
    let first = shares.next()?;
    Some(shares.fold((first, first), |(hot, cold), next| {
        let hot = if next.share > hot.share { next } else { hot };
        let cold = if next.share < cold.share { next } else { cold };
        (hot, cold)
    }))
}

fn shares(record: &MoeRecord) -> impl Iterator<Item = ExpertShare> {
    let total: f64 = record.load.iter().map(|&routes| routes as f64).sum();
    let experts = record.load.iter().enumerate().filter(move |_| total > 0.0);
    experts.map(move |(expert, &routes)| ExpertShare { layer: record.layer, expert, share: routes as f64 / total })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, moe: Vec<MoeRecord>) -> StepRecord {
        StepRecord {
            step,
            loss: 3.21,
            balance_loss: 1.0,
            z_loss: 0.0,
            grad_norm: 1.0,
            lr: 1e-3,
            tokens: step * 100,
            tokens_per_s: 12345.6,
            seconds: step as f64,
            eval_loss: None,
            tasks: vec![],
            eval_tasks: vec![],
            shadowed: 0,
            condense_threshold: None,
            moe,
            waiting_s: vec![],
            sent: vec![],
            migrated: vec![],
            replaced: vec![],
        }
    }

    #[test]
    fn the_extremes_name_layer_and_expert() {
        let layers = vec![
            MoeRecord::new(2, vec![4, 4, 1, 1], 10, 0),
            MoeRecord::new(5, vec![0, 0, 0, 0], 0, 0),
            MoeRecord::new(7, vec![1, 2, 3, 94], 100, 0),
        ];
        let text = figures(&record(1, layers));
        assert_eq!(text, "loss 3.2100  12,345 tokens/s  hot L7 e3:94% cold L7 e0:1%");
        assert_eq!(figures(&record(1, vec![])), "loss 3.2100  12,345 tokens/s");
    }

    #[test]
    fn a_fast_run_prints_its_tenths_and_a_slow_one_by_the_clock() {
        let start = Instant::now();
        let mut lines = Lines::new(100, 0, start);
        let fast: Vec<u64> = (1..=100).filter(|&step| lines.line(&record(step, vec![]), start).is_some()).collect();
        assert_eq!(fast, [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);

        let mut lines = Lines::new(1000, 0, start);
        let at = |step: u64| start + Duration::from_secs(step);
        let slow: Vec<u64> = (1..=12).filter(|&step| lines.line(&record(step, vec![]), at(step)).is_some()).collect();
        assert_eq!(slow, [1, 6, 11]);
    }

    #[test]
    fn the_time_left_counts_only_steps_of_this_process() {
        let start = Instant::now();
        let lines = Lines::new(100, 50, start);
        assert_eq!(lines.eta(60, start + Duration::from_secs(10)), Duration::from_secs(40));
        assert_eq!(lines.eta(100, start + Duration::from_secs(10)), Duration::ZERO);
    }

    #[test]
    fn not_a_number_is_shown_as_such() {
        let mut broken = record(1, vec![]);
        (broken.loss, broken.tokens_per_s) = (f64::NAN, f64::NAN);
        assert_eq!(figures(&broken), "loss NaN  0 tokens/s");
    }
}
