//! What a run measures and leaves behind: a line a step, a summary, a progress bar.
//!
//! ```text
//! train/step -- StepRecord --> Writer ------> <run>/metrics.jsonl --> records, read --> report
//!                   |--------> EventWriter --> <run>/tensorboard/
//!                   |--------> DeadExperts -> ExpertEvent --> Progress::note
//!                   `--------> Progress ----> stderr
//! train end --- Summary ---------------------> <run>/summary.json  --> report
//! ```
//!
//! Nothing here measures by itself, except [`peak_rss_mb`]: the trainer hands in the numbers, already
//! reduced over ranks, and only one rank holds a [`Writer`] or a visible [`Progress`].

mod append;
mod config;
mod dead_experts;
mod error;
mod file;
mod float;
mod log;
mod peak_rss;
mod progress;
mod record;
mod scores;
mod speed;
mod summary;
mod tensorboard;

pub use config::Config;
pub use dead_experts::{DeadExperts, ExpertEvent};
pub use error::Error;
pub use file::write_atomically;
pub use log::{METRICS_FILE, Records, Writer, read, records};
pub use peak_rss::peak_rss_mb;
pub use progress::{Progress, say};
pub use record::{
    CondensedRecord, MigratedSequences, MoeRecord, PAIRS_ALL_MAX, ReplacedExperts, SentRows, StepRecord, TaskRecord,
    UnsentRecord, by_language, load_entropy, share,
};
pub use scores::{PartScores, RunScores, SCORES_FILE};
pub use speed::{AttentionProducts, BENCH_FILE, Ceilings, KernelShare, StepSpeed};
pub use summary::{
    CollectiveTraffic, CondensedSummary, DeadExpert, Imbalance, Offloaded, SUMMARY_FILE, Status, Summary,
    median_tokens_per_s,
};
pub use tensorboard::{EventWriter, TENSORBOARD_FOLDER};
