//! Luffy's Table III by the planner (arXiv:2411.15419): milliseconds of computation and communication of three models on
//! 2 to 16 ranks, beside the paper's, of plain expert parallelism, experts that travel (EXT), shadowing (HYT) and Luffy,
//! and of each of Luffy's techniques alone.
//!
//! ```text
//! cargo bench --bench luffy_table -- [--only xl|bert|gpt2] [--inputs FILE] [--concentration SHARE]
//! ```
//!
//! Four numbers are fitted to the paper's rows of plain expert parallelism: how many times as fast as by the data sheet (of
//! which products reach half) it computes, in f32 and in 16 bits; the time of a byte on two ranks; and how much more it is
//! with every rank. All other rows are predictions. The inputs, by model and ranks, are a line each of
//! `benches/condensation/table.csv`: shares as measured on smaller models.

#![allow(clippy::print_stdout)]

#[allow(dead_code, reason = "not every benchmark uses all of it")]
mod common;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use common::Flags;
use guildhall::config;
use guildhall::plan::{LinkSpeed, Machine, StepCost, Task, seconds};
use guildhall::train;
use guildhall_tensor::Dtype;

const RANKS: [usize; 4] = [2, 4, 8, 16];

/// A method's computation and communication, in milliseconds, for each number of ranks.
type PaperRow = [[f64; 2]; 4];

/// A model, and the paper's rows of Vanilla, EXT, HYT and Luffy.
const PAPER: [(&str, [PaperRow; 4]); 3] = [
    (
        "xl",
        [
            [[2169.0, 843.0], [2102.0, 1522.0], [1923.0, 2548.0], [1533.0, 4599.0]],
            [[2403.0, 209.0], [2714.0, 370.0], [3054.0, 625.0], [3699.0, 1233.0]],
            [[2265.0, 197.0], [2387.0, 357.0], [2629.0, 539.0], [3204.0, 1068.0]],
            [[1521.0, 480.0], [1389.0, 851.0], [1225.0, 1043.0], [1012.0, 1238.0]],
        ],
    ),
    (
        "bert",
        [
            [[973.0, 899.0], [953.0, 2122.0], [918.0, 3072.0], [756.0, 4284.0]],
            [[1258.0, 314.0], [1989.0, 561.0], [2011.0, 1181.0], [2112.0, 1728.0]],
            [[1123.0, 281.0], [1794.0, 506.0], [1843.0, 1083.0], [1914.0, 1386.0]],
            [[784.0, 404.0], [728.0, 672.0], [638.0, 1042.0], [525.0, 1225.0]],
        ],
    ),
    (
        "gpt2",
        [
            [[955.0, 881.0], [847.0, 1573.0], [774.0, 2592.0], [676.0, 3834.0]],
            [[1399.0, 209.0], [1706.0, 374.0], [2048.0, 544.0], [2402.0, 718.0]],
            [[1278.0, 174.0], [1509.0, 331.0], [1741.0, 435.0], [2095.0, 557.0]],
            [[752.0, 292.0], [724.0, 780.0], [669.0, 963.0], [571.0, 1330.0]],
        ],
    ),
];

/// What is set in the recipe, and the paper's row beside it.
const METHODS: [(&str, &[&str], Option<usize>); 7] = [
    ("Vanilla", &[], Some(0)),
    ("EXT", &["parallel.exchange=experts"], Some(1)),
    ("HYT, by itself", &["moe.shadowing=auto"], Some(2)),
    ("HYT, half of the experts", &["moe.shadowing=force:{half}"], Some(2)),
    ("Luffy", &["moe.condense=static", "parallel.migrate=auto"], Some(3)),
    ("condensation alone", &["moe.condense=static"], None),
    ("migration alone", &["parallel.migrate=auto"], None),
];

/// What was measured: the share of routes without a row, and of a sequence's routes to the rank that most go to.
#[derive(Clone, Copy)]
struct Inputs {
    condensed: f64,
    concentration: f64,
}

/// What is fitted.
#[derive(Clone, Copy, Debug)]
struct Fitted {
    /// How many times as fast as by the data sheet a device computes, in f32 and in 16 bits.
    speeds: [f64; 2],
    /// Seconds a byte takes on two ranks, and more with every rank beyond.
    wire: [f64; 2],
}

fn main() -> Result<()> {
    let flags = Flags::read();
    let only: String = flags.get("--only", String::new());
    let mut inputs = inputs(&flags.get("--inputs", here("benches/condensation/table.csv")))?;
    let concentration = flags.get("--concentration", f64::NAN);
    inputs.iter_mut().filter(|_| !concentration.is_nan()).for_each(|(.., input)| input.concentration = concentration);
    let base = Machine::known("v100-16g-pcie").context("a device of the table")?;
    let mut plain = Vec::new();
    for (model, _) in &PAPER {
        for ranks in RANKS {
            let input = input(&inputs, model, ranks)?;
            let task = task(model, ranks, &[], input)?;
            plain.push((task.clone(), task.walked(possible(&task, input))));
        }
    }
    let fitted = fit(&base, &plain)?;
    println!(
        "fitted: {:.2} times the data sheet's speed in f32, {:.2} in 16 bits; {:.2} GB/s on two ranks, {:.2} on sixteen\n",
        fitted.speeds[0],
        fitted.speeds[1],
        1e-9 / fitted.wire[0],
        1e-9 / (fitted.wire[0] + 14.0 * fitted.wire[1])
    );
    println!(
        "| model | ranks | method | computation | paper | error | communication | paper | error | times Vanilla | paper |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (model, paper) in PAPER.iter().filter(|(model, _)| model.contains(&only)) {
        for (place, ranks) in RANKS.into_iter().enumerate() {
            row(model, paper, (place, ranks), input(&inputs, model, ranks)?, (&base, &fitted))?;
        }
    }
    Ok(())
}

/// All methods of a model on so many ranks.
fn row(
    model: &str,
    paper: &[PaperRow; 4],
    (place, ranks): (usize, usize),
    input: Inputs,
    (base, fitted): (&Machine, &Fitted),
) -> Result<()> {
    let mut first = 0.0;
    for (method, set, beside) in METHODS {
        let mut task = task(model, ranks, set, input)?;
        let machine = fitted.machine(base, (ranks, task.sizes.dtype));
        task.layout.rates = machine.rates(task.sizes.dtype, &task.layout.mesh);
        let [computes, sends] = parts(&task, &task.walked(possible(&task, input)), &machine);
        let sum = computes + sends;
        if first == 0.0 {
            first = sum;
        }
        let cell = |own: f64, paper: Option<f64>| match paper {
            Some(paper) => format!("{own:.0} | {paper:.0} | {:+.0} %", 100.0 * (own / paper - 1.0)),
            None => format!("{own:.0} | | "),
        };
        let of_paper = beside.map(|row| paper[row][place]);
        let plain: f64 = paper[0][place].iter().sum();
        let times = of_paper.map_or(String::new(), |of| format!("{:.2}", plain / of.iter().sum::<f64>()));
        println!(
            "| {model} | {ranks} | {method} | {} | {} | {:.2} | {times} |",
            cell(computes, of_paper.map(|of| of[0])),
            cell(sends, of_paper.map(|of| of[1])),
            first / sum
        );
    }
    Ok(())
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Lines of model, ranks, share condensed, concentration.
fn inputs(path: &Path) -> Result<Vec<(String, usize, Inputs)>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let line = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        ensure!(fields.len() == 4, "{line}: not model,ranks,condensed,concentration");
        let of = Inputs { condensed: fields[2].parse()?, concentration: fields[3].parse()? };
        Ok((fields[0].to_owned(), fields[1].parse()?, of))
    };
    text.lines().skip(1).map(line).collect()
}

fn input(inputs: &[(String, usize, Inputs)], model: &str, ranks: usize) -> Result<Inputs> {
    let found = inputs.iter().find(|(name, of, _)| name == model && *of == ranks);
    Ok(found.with_context(|| format!("no inputs of {model} on {ranks} ranks"))?.2)
}

fn task(model: &str, ranks: usize, set: &[&str], input: Inputs) -> Result<Task> {
    let recipe = here(&format!("recipes/papers/luffy_{model}.toml"));
    let seq = config::load(&recipe, &[], None)?.config.model.seq;
    let sizes = [
        format!("parallel.ranks={ranks}"),
        format!("parallel.expert={ranks}"),
        format!("moe.experts={ranks}"),
        format!("train.batch_tokens={}", 64 * ranks * seq),
    ];
    let sets: Vec<String> =
        sizes.into_iter().chain(set.iter().map(|set| set.replace("{half}", &(ranks / 2).to_string()))).collect();
    let config = config::load(&recipe, &sets, None)?.config;
    let mut task = Task::of(&config, train::sizes(&config));
    if config.moe.as_ref().is_some_and(|moe| moe.condenses()) {
        task.layout.condensed = input.condensed;
    }
    Ok(task)
}

/// The concentration, or the nearest that is possible.
fn possible(task: &Task, Inputs { concentration, .. }: Inputs) -> f64 {
    let possible = task.concentrations().expect("tokens choose");
    concentration.clamp(*possible.start(), *possible.end())
}

/// Milliseconds of computing and of messages: of each, those of the rank that takes longest.
fn parts(task: &Task, costs: &[StepCost], machine: &Machine) -> [f64; 2] {
    let of_rank = |cost: &StepCost| {
        let seconds = seconds(task, cost, machine);
        [seconds.computing() * 1e3, (seconds.total() - seconds.computing()) * 1e3]
    };
    costs.iter().map(of_rank).fold([0.0, 0.0], |[a, b], [computes, sends]| [computes.max(a), sends.max(b)])
}

impl Fitted {
    fn machine(&self, base: &Machine, (ranks, dtype): (usize, Dtype)) -> Machine {
        let bandwidth = 1.0 / (self.wire[0] + self.wire[1] * (ranks - 2) as f64);
        let link = LinkSpeed { bandwidth, ..base.within };
        let speed = self.speeds[usize::from(dtype == Dtype::Bf16)];
        Machine {
            flops: base.flops.map(|flops| flops * speed),
            bandwidth: base.bandwidth * speed,
            within: link,
            between: link,
            ranks_per_node: ranks,
            ..base.clone()
        }
    }
}

/// The parameters with the least sum of squared errors, in logarithms, of all cells of Vanilla. Coordinates take turns.
fn fit(base: &Machine, plain: &[(Task, Vec<StepCost>)]) -> Result<Fitted> {
    let cells = || PAPER.iter().flat_map(|(_, rows)| rows[0]).zip(plain);
    let error = |fitted: &Fitted| {
        let of = |(paper, (task, cost)): ([f64; 2], &(Task, Vec<StepCost>))| {
            let own = parts(task, cost, &fitted.machine(base, (task.layout.mesh.ranks, task.sizes.dtype)));
            (0..2).map(|i| (own[i] / paper[i]).ln().powi(2)).sum::<f64>()
        };
        cells().map(of).sum::<f64>()
    };
    let mut fitted = Fitted { speeds: [1.0; 2], wire: [2e-10, 2e-11] };
    let mut step = 2.0f64;
    while step > 1.001 {
        let before = error(&fitted);
        for place in 0..4 {
            for factor in [step, 1.0 / step] {
                let mut other = fitted;
                match place {
                    0 | 1 => other.speeds[place] *= factor,
                    _ => other.wire[place - 2] *= factor,
                }
                if error(&other) < error(&fitted) {
                    fitted = other;
                }
            }
        }
        if error(&fitted) >= before {
            step = step.sqrt();
        }
    }
    ensure!(error(&fitted).is_finite(), "no fit");
    Ok(fitted)
}
