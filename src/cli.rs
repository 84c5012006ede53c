//! The command line: which file, and what to override. What a run does is said by its recipe, so a new
//! option needs a better reason than that a recipe's key would be longer to type.

mod convert;
mod surgery;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub use convert::{AuditArgs, ConvertArgs, ConvertTo};
pub use surgery::{AggregateArgs, MoefyArgs, PruneArgs, PruneBy, SurgeryArgs, SurgeryOperation};

/// Trains Mixture-of-Experts language models: one binary, from a laptop's threads up.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(name = "guildhall", version, after_help = "Exit codes: 0 done, 1 the run failed, 2 the request was wrong.")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum Command {
    Train(TrainArgs),
    Plan(PlanArgs),
    Prepare(PrepareArgs),
    Evaluate(EvaluateArgs),
    Generate(GenerateArgs),
    Translate(TranslateArgs),
    Surgery(SurgeryArgs),
    Convert(ConvertArgs),
    Audit(AuditArgs),
    Report(ReportArgs),
    Verify(VerifyArgs),
    #[command(hide = true)]
    TakePart(TakePartArgs),
    Simulate(SimulateArgs),
    Bench(BenchArgs),
    /// List what can compute here (parallel.backend), and what the others lack
    Devices,
}

impl Command {
    /// What is wrong with options that contradict each other.
    pub fn contradiction(&self) -> Option<String> {
        match self {
            Command::Train(TrainArgs { backend, overrides, .. })
            | Command::Evaluate(EvaluateArgs { backend, overrides, .. })
            | Command::Bench(BenchArgs { backend, overrides, .. }) => backend.contradiction(overrides),
            _ => None,
        }
    }
}

/// Train the model of a recipe, preparing its data first if need be
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall train recipes/quickstart.toml --ranks 2 --set train.steps=50 --set run.dir=/tmp/try")]
pub struct TrainArgs {
    /// The recipe, a TOML file
    pub recipe: PathBuf,
    /// Ranks (threads) to train with, instead of the recipe's parallel.ranks
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Go on from the newest checkpoint in the run's folder
    #[arg(long)]
    pub resume: bool,
    /// Train in a process of its own, and start it again with --resume when it fails or is killed, up to N times
    #[arg(long, value_name = "N")]
    pub restarts: Option<usize>,
    /// The process that looks after this one
    #[arg(long, value_name = "PID", hide = true)]
    pub started_by: Option<i32>,
    #[command(flatten)]
    pub backend: BackendChoice,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// Say what a recipe will need before it runs: bytes by cause, messages, time, and which layouts would do better
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall plan recipes/quickstart.toml --ranks 8 --device a100-40g --search")]
pub struct PlanArgs {
    /// The recipe, a TOML file
    pub recipe: PathBuf,
    /// Ranks to plan for, instead of the recipe's parallel.ranks
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// What each rank is: this-machine, v100-16g, v100-16g-pcie, a100-40g, a100-80g, h100, h200, or a file with a device table
    #[arg(long, value_name = "NAME", default_value = "this-machine")]
    pub device: String,
    /// Rows on the planned rank over an even share: in all layers, or MEAN,MOST on average and in one; or zipf:S, experts
    /// as popular as Zipf's law with exponent S says; or worst, all rows on one rank; or recorded:FILE, as a run that wrote
    /// it as moe.record had them [default: as early training is skewed]
    #[arg(long, value_name = "X")]
    pub imbalance: Option<String>,
    /// Also say what all ranks send in the steps of a run that wrote FILE as moe.record, on this mesh or another
    #[arg(long, value_name = "FILE")]
    pub recording: Option<PathBuf>,
    /// With moe.condense: share of the routes without a row of their own, as a run's summary.json has it in
    /// condensed.uncomputed_share [default: 0, or the clusters of a recording]
    #[arg(long, value_name = "SHARE")]
    pub condensed: Option<f64>,
    /// Make up sequences that send this share of their routes to the rank that most go to, and plan the slowest rank: with
    /// parallel.migrate, they move [default: spread evenly, nothing moves]; --recording FILE says what a run's share was
    #[arg(long, value_name = "SHARE")]
    pub concentration: Option<f64>,
    /// Try meshes, stages of ZeRO, recomputation, offload and micro-batches for these ranks
    #[arg(long)]
    pub search: bool,
    /// List the ranks of every group
    #[arg(long)]
    pub explain: bool,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// Train the tokenizer and write the token shards of a recipe, without training the model
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall prepare recipes/quickstart.toml --set 'data.sources=[\"corpus/*.txt\"]'")]
pub struct PrepareArgs {
    /// The recipe, a TOML file
    pub recipe: PathBuf,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// Measure the loss of a checkpoint on the held-out part of its data
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall evaluate runs/quickstart/checkpoints/latest --rows 256")]
pub struct EvaluateArgs {
    /// The checkpoint's folder
    pub checkpoint: PathBuf,
    /// Rows of held-out text to use [default: all]
    #[arg(long, value_name = "N")]
    pub rows: Option<usize>,
    /// Ranks (threads) to evaluate with, instead of those it was trained with
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Translate held-out texts, and add BLEU to each direction
    #[arg(long)]
    pub bleu: bool,
    /// Translate held-out texts, and add chrF to each direction
    #[arg(long)]
    pub chrf: bool,
    /// Texts of each direction to translate [default: 200]
    #[arg(long, value_name = "N")]
    pub sentences: Option<usize>,
    /// Translations that are continued at every step [default: 1]
    #[arg(long, value_name = "N")]
    pub beams: Option<usize>,
    /// Where to write what was translated, its translations and the references, in files of lines
    #[arg(long, value_name = "DIR")]
    pub outputs: Option<PathBuf>,
    #[command(flatten)]
    pub backend: BackendChoice,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// Continue a text with a checkpoint's model
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall generate runs/quickstart/checkpoints/latest --prompt 'pub fn ' --tokens 64")]
pub struct GenerateArgs {
    /// The checkpoint's folder
    pub checkpoint: PathBuf,
    /// The text to continue
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,
    /// The text is a user's message, which the model's chat template writes; only the answer is printed
    #[arg(long)]
    pub chat: bool,
    /// Tokens to add at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// The same seed draws the same text
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,
    /// Below 1 likely tokens get likelier; 0 always takes the likeliest
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    pub temperature: f32,
    /// Draw among this many likeliest tokens; 0 means all
    #[arg(long, value_name = "K", default_value_t = 40)]
    pub top_k: usize,
    /// Draw among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub top_p: f32,
    #[command(flatten)]
    pub backend: BackendChoice,
}

/// Translate lines of text with a checkpoint's encoder and decoder
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Reads standard input if no FILE is given; each line is translated by itself, an empty one stays empty.

Example:
  echo 'The dog sleeps.' | guildhall translate runs/pairs/checkpoints/latest --from en --to de"
)]
pub struct TranslateArgs {
    /// The checkpoint's folder
    pub checkpoint: PathBuf,
    /// The language of the lines, by its tag: en, pt_BR
    #[arg(long, value_name = "LANGUAGE")]
    pub from: String,
    /// The language to write
    #[arg(long, value_name = "LANGUAGE")]
    pub to: String,
    /// The text, a line at a time
    pub file: Option<PathBuf>,
    /// Translations that are continued at every step; 1 always takes the likeliest token
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub beams: usize,
    /// Log-probabilities are divided by the length to this power: more favours longer translations
    #[arg(long, value_name = "A", default_value_t = 1.0, allow_negative_numbers = true)]
    pub length_penalty: f64,
    /// Tokens of a translation at most [default: model.seq]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub backend: BackendChoice,
}

/// Draw a run's report.html again, also while it trains, or beside another run
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall report runs/experts --against runs/dense")]
pub struct ReportArgs {
    /// The run's folder
    pub run: PathBuf,
    /// Another run's folder: its losses are drawn too, by step and by wall-clock
    #[arg(long, value_name = "RUN")]
    pub against: Option<PathBuf>,
}

/// Train the first steps of a recipe in many ways and compare them with one rank
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Exit codes: 0 no differences, 1 differences, 2 the request was wrong; with --inject too.

Examples:
  guildhall verify recipes/quickstart.toml --ranks 4 --set train.batch_tokens=2048
  guildhall verify recipes/verify/*.toml --ranks 8 --full --only mesh,dtype,zero,recompute
  guildhall verify recipes/verify/decoder.toml --full --sample 1000 --seed 7")]
pub struct VerifyArgs {
    /// Recipes, TOML files
    #[arg(required = true, value_name = "RECIPE")]
    pub recipes: Vec<PathBuf>,
    /// Ranks of the largest mesh [default: 4, or the recipe's if it has more]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Steps of every run
    #[arg(long, value_name = "K", default_value_t = 2)]
    pub steps: u64,
    /// Run every combination of the options that vary, of 100,000 at most, not only so many that every two values meet
    #[arg(long)]
    pub full: bool,
    /// With --full: run only so many of all combinations, drawn at random, each at most once
    #[arg(long, value_name = "N", requires = "full")]
    pub sample: Option<usize>,
    /// The same seed draws the same sample [default: 0]
    #[arg(long, value_name = "S", requires = "sample")]
    pub seed: Option<u64>,
    /// Let only these options vary, others stay plain
    #[arg(long, value_name = "OPTION,...", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Plant a known bug, which must then show
    #[arg(long, value_name = "NAME")]
    pub inject: Option<String>,
    /// Plant it where storage has half the bits and nowhere else: it must show through their rounding
    #[arg(long, requires = "inject")]
    pub half: bool,
    /// What the ranks of layouts of several are: threads of this process, or processes of MPI; those of one rank, which others
    /// are compared with, are always threads
    #[arg(long, value_name = "NAME", default_value = "threads")]
    pub engine: RankEngine,
    /// With --engine mpi: the words that start as many processes as stand for {ranks}
    #[arg(long, value_name = "WORDS", default_value = LAUNCHER)]
    pub launcher: String,
    /// Print every layout and its differences as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// What `verify --engine mpi` starts processes with, unless it is told.
pub const LAUNCHER: &str = "mpirun -n {ranks}";

/// What ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RankEngine {
    Threads,
    Mpi,
}

/// Run one layout as one of the processes that a search has started
#[derive(Clone, Debug, PartialEq, Args)]
pub struct TakePartArgs {
    /// The search's folder
    pub folder: PathBuf,
}

/// Run a recipe's first steps in thousands of orders of events, with deaths and standstills, each drawn by a seed: every run
/// must end, name who was lost, go on from its checkpoint, and come to the same weights
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Examples:
  guildhall simulate recipes/verify/decoder.toml --ranks 4 --seeds 1000
  guildhall simulate recipes/verify/decoder.toml --ranks 4 --seed 17")]
pub struct SimulateArgs {
    /// The recipe, a TOML file
    pub recipe: PathBuf,
    /// Ranks to simulate, instead of the recipe's parallel.ranks
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Schedules to run: those of the seeds from 0, or from --seed, on [default: 100, or one with --seed]
    #[arg(long, value_name = "N")]
    pub seeds: Option<u64>,
    /// The first seed
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Steps of every run; each leaves a checkpoint unless --set train.checkpoint_every says otherwise
    #[arg(long, value_name = "K", default_value_t = 2)]
    pub steps: u64,
    /// Plant a bug in the transport, which must then show: overtaking or loss
    #[arg(long, value_name = "NAME")]
    pub inject: Option<String>,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// Measure how fast this machine multiplies and copies, and where the time of a recipe's steps goes
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = "Example:
  guildhall bench recipes/quickstart.toml --ranks 2")]
pub struct BenchArgs {
    /// The recipe, a TOML file
    pub recipe: PathBuf,
    /// Ranks (threads) to run, instead of the recipe's parallel.ranks
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Steps to time, behind two that are not
    #[arg(long, value_name = "K", default_value_t = 8)]
    pub steps: u64,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub backend: BackendChoice,
    #[command(flatten)]
    pub overrides: Overrides,
}

/// The backend for this command alone.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BackendChoice {
    /// What computes, instead of the recipe's parallel.backend: cpu, simulated or cuda; guildhall devices lists them
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
}

impl BackendChoice {
    /// Overrides with the choice among them.
    pub fn with(&self, set: &[String]) -> Vec<String> {
        let choice = self.backend.iter().map(|name| format!("parallel.backend=\"{name}\""));
        set.iter().cloned().chain(choice).collect()
    }

    /// What is wrong with the choice beside `--set`, if that says another.
    pub fn contradiction(&self, Overrides { set }: &Overrides) -> Option<String> {
        let choice = self.backend.as_deref()?;
        let mut keys = set.iter().filter_map(|set| set.split_once('='));
        let (_, value) = keys.rfind(|(key, _)| key.trim() == "parallel.backend")?;
        let other = value.trim().trim_matches(['"', '\'']);
        (other != choice).then(|| format!("--backend {choice} and --set parallel.backend={other}: give one of them"))
    }
}

/// Keys given for this command alone.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct Overrides {
    /// Override a key of the recipe; the value is TOML, a bare word is a string; may be repeated, the last
    /// one wins
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}
