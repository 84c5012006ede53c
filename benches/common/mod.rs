//! What the benchmarks share: flags, timing, and one JSON line a workload in the schema of `peers/`.

use std::str::FromStr;
use std::time::Instant;

use guildhall::metrics::peak_rss_mb;
use guildhall::parallel::Backend;
use guildhall_tensor::Dtype;
use serde_json::{Value, json};

pub(crate) const WARM_UP: usize = 3;

/// Flags of the command line: `--name value` or `--name`.
pub(crate) struct Flags(Vec<String>);

impl Flags {
    /// `cargo bench` adds a `--bench` of its own, which no benchmark here looks for.
    pub(crate) fn read() -> Flags {
        Flags(std::env::args().skip(1).collect())
    }

    #[allow(dead_code, reason = "not every benchmark has such a flag")]
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|flag| flag == name)
    }

    /// The value after `name`, or `default` where the flag is absent.
    pub(crate) fn get<T: FromStr>(&self, name: &str, default: T) -> T {
        let Some(place) = self.0.iter().position(|flag| flag == name) else { return default };
        let value = self.0.get(place + 1).unwrap_or_else(|| panic!("{name} needs a value"));
        value.parse().unwrap_or_else(|_| panic!("{name} cannot be {value:?}"))
    }

    /// What weights and activations are stored in.
    #[allow(dead_code, reason = "not every benchmark has such a flag")]
    pub(crate) fn dtype(&self) -> Dtype {
        match self.get("--dtype", "f32".to_owned()).as_str() {
            "f32" => Dtype::F32,
            "bf16" => Dtype::Bf16,
            other => panic!("--dtype is f32 or bf16, not {other:?}"),
        }
    }

    /// What ranks compute on.
    #[allow(dead_code, reason = "not every benchmark has such a flag")]
    pub(crate) fn backend(&self) -> Backend {
        let name = self.get("--backend", Backend::Cpu.name().to_owned());
        Backend::ALL.into_iter().find(|backend| backend.name() == name).unwrap_or_else(|| panic!("no backend {name:?}"))
    }

    /// Timed steps, after [`WARM_UP`] others.
    pub(crate) fn steps(&self) -> usize {
        self.get("--steps", 9)
    }
}

/// As workloads are called.
#[allow(dead_code, reason = "not every benchmark knows types")]
pub(crate) fn dtype_name(dtype: Dtype) -> &'static str {
    if dtype == Dtype::Bf16 { "bf16" } else { "f32" }
}

/// Milliseconds of `f`.
pub(crate) fn milliseconds<R>(f: impl FnOnce() -> R) -> (f64, R) {
    let start = Instant::now();
    let result = f();
    (start.elapsed().as_secs_f64() * 1e3, result)
}

/// The middle value; of an even number, the mean of the middle two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = ((sorted.len() - 1) / 2, sorted.len() / 2);
    (sorted[low] + sorted[high]) / 2.0
}

/// What was timed.
pub(crate) struct Measured<'a> {
    pub(crate) workload: &'a str,
    /// Tokens, or rows, of one step.
    pub(crate) tokens: usize,
    /// Of the timed steps.
    pub(crate) ms: &'a [f64],
    /// Of all steps, those of the warm-up included.
    pub(crate) losses: &'a [f64],
    pub(crate) notes: String,
}

impl Measured<'_> {
    /// Prints the line, with the fields of the object `more` after the common ones.
    pub(crate) fn print(&self, more: Value) {
        let ms = median(self.ms);
        let loss = |loss: Option<&f64>| loss.map(|loss| rounded(*loss, 4));
        let mut line = json!({
            "system": "guildhall",
            "workload": self.workload,
            "tokens_per_s": rounded(self.tokens as f64 / ms * 1e3, 1),
            "ms_per_step": rounded(ms, 3),
            "ms_min": rounded(self.ms.iter().copied().fold(f64::INFINITY, f64::min), 3),
            "peak_rss_mb": peak_rss_mb(),
            "loss_first": loss(self.losses.first()),
            "loss_last": loss(self.losses.last()),
            "env": "as built",
            "notes": self.notes,
        });
        if let (Some(line), Value::Object(more)) = (line.as_object_mut(), more) {
            line.extend(more);
        }
        println!("{line}");
    }
}

fn rounded(x: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (x * scale).round() / scale
}
