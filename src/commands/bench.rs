//! `guildhall bench`: what this machine's products and memory reach, and which share of it a recipe's step does.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guildhall_tensor::{Dtype, KernelKind, KernelTime, Phase, Work};

use super::blocking::{self, Measuring};
use super::ceilings::{BetweenSteps, RankCeilings, ceilings};
use super::fit::EVEN;
use super::prepare::{prepare, training_rows};
use super::{CommandFailure, devices, duration, print, say, short};
use crate::cli::BenchArgs;
use crate::config::{self, Config, StorageType};
use crate::data::Source;
use crate::launch::{self, Process, Rank};
use crate::metrics::{AttentionProducts, BENCH_FILE, Ceilings, KernelShare, StepSpeed, write_atomically};
use crate::moe::Routings;
use crate::plan::{Task, step};
use crate::train;

/// Steps in which memory is taken and caches are filled.
const WARM_UP: u64 = 2;
/// Kernels that are told by name.
const TOLD: usize = 8;

pub(super) fn run(arguments: BenchArgs) -> Result<(), CommandFailure> {
    let wrong = |text: String| Err(CommandFailure::Request(anyhow::anyhow!(text)));
    if arguments.steps == 0 {
        return wrong("--steps 0: there is nothing to time; use 1 or more".to_owned());
    }
    let set = arguments.backend.with(&arguments.overrides.set);
    let loaded = config::load(&arguments.recipe, &set, arguments.ranks).map_err(CommandFailure::request)?;
    loaded.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    let config = loaded.config;
    super::fit::here(&config)?;
    super::fit::planned(&config, config.parallel.ranks)?;
    let corpus = prepare(&config)?;
    let (data, _) = training_rows(&corpus, &config, &say)?;
    // What is to be known of a machine is worth measuring.
    let blocks = blocking::here(config.parallel.backend, Measuring::IfWorth { flop: f64::INFINITY });
    blocks.iter().for_each(|found| say(&format!("products {}", found.told())));
    let mut process = Process::whole(&config.parallel);
    process.divide(blocks.map(|found| found.blocking).unwrap_or_default());
    let ranks = process.each(&config.parallel, |rank| {
        train::Error::or_of_device(&rank, || measure(&rank, &config, &data, arguments.steps))
    });
    let ranks = launch::first_cause(ranks, train::Error::is_consequence)
        .map_err(|failure| CommandFailure::Run(anyhow::anyhow!("{failure}")))?;
    let speed = speed(&config, &ranks);
    let json = serde_json::to_string_pretty(&speed).map_err(CommandFailure::run)?;
    print(&if arguments.json { format!("{json}\n") } else { table(&speed) })?;
    let (dir, path) = (&config.run.dir, config.run.dir.join(BENCH_FILE));
    fs::create_dir_all(dir).map_err(|error| CommandFailure::Run(anyhow::anyhow!("{}: {error}", dir.display())))?;
    write_atomically(&path, format!("{json}\n").as_bytes()).map_err(CommandFailure::run)?;
    say(&format!("written  {}: `guildhall report` shows it once the run has steps", path.display()));
    Ok(())
}

/// What a rank measured.
struct RankSpeed {
    ceilings: Ceilings,
    threads: usize,
    /// Of each timed step.
    seconds: Vec<f64>,
    kernels: BTreeMap<&'static str, KernelTime>,
    multiply_adds: u64,
}

fn measure(rank: &Rank, config: &Config, data: &Arc<dyn Source>, steps: u64) -> Result<RankSpeed, train::Error> {
    // Matrices stay beside the model: steps and products are timed in turn.
    let room = train::rank_memory(config, config.parallel.ranks).unwrap_or(u64::MAX) / 8;
    let dtype = if config.train.dtype == StorageType::Bf16 { Dtype::Bf16 } else { Dtype::F32 };
    let RankCeilings { rates: [f32_flops, bf16_flops, copied], sides, beside } =
        ceilings(&rank.device, &rank.world, room, Some(dtype))?;
    let BetweenSteps { mut products, mut sums } = beside.expect("they were asked for");
    let mut trainer = train::trainer(rank, config)?;
    train::begin(rank, &mut trainer, config)?;
    trainer.routings = Arc::new(Routings { migration: train::migration_policy(config), ..Routings::NONE });
    let mut loader = train::loader(config, &trainer.mesh, data.clone(), 0)?;
    for step in 1..=WARM_UP {
        trainer.step(&loader.next()?, step)?;
    }
    let device = trainer.device.clone();
    device.take_kernel_times();
    let (mut seconds, mut taken, mut multiply_adds) = (Vec::new(), [0.0; 2], 0);
    let mut kernels = BTreeMap::<_, KernelTime>::new();
    for step in WARM_UP + 1..=WARM_UP + steps {
        let before = device.multiply_adds();
        let begun = Instant::now();
        trainer.step(&loader.next()?, step)?;
        device.wait();
        seconds.push(begun.elapsed().as_secs_f64());
        multiply_adds += device.multiply_adds() - before;
        device.take_kernel_times().into_iter().for_each(|(name, time)| *kernels.entry(name).or_default() += time);
        // Of times, as the steps' mean is.
        taken[0] += 1.0 / products.rate()?;
        taken[1] += 1.0 / sums.rate()?;
        device.take_kernel_times();
    }
    let [beside, streamed_beside] = taken.map(|taken| steps as f64 / taken);
    let ceilings = Ceilings { f32_flops, bf16_flops, copied, sides, beside, streamed_beside };
    Ok(RankSpeed { ceilings, threads: device.threads(), seconds, kernels, multiply_adds })
}

fn speed(config: &Config, ranks: &[RankSpeed]) -> StepSpeed {
    let task = Task::of(config, train::sizes(config));
    let work: Vec<_> = (0..ranks.len()).map(|rank| step(&task, rank, &EVEN).work).collect();
    let of_model = |work: &BTreeMap<(Phase, _), Work>| {
        let kept = work.iter().filter(|((phase, _), _)| matches!(phase, Phase::Forward | Phase::Backward));
        kept.map(|(_, work)| 2.0 * work.multiply_adds as f64).sum::<f64>()
    };
    let width = if config.train.dtype == StorageType::Bf16 { 0.5 } else { 1.0 };
    let roofs: Vec<[f64; 2]> =
        work.iter().zip(ranks).map(|(work, rank)| roof(work.values(), &rank.ceilings, width)).collect();
    let steps = ranks[0].seconds.len();
    let slowest = |step: usize| ranks.iter().map(|rank| rank.seconds[step]).fold(0.0, f64::max);
    let mut seconds: Vec<f64> = (0..steps).map(slowest).collect();
    seconds.sort_by(f64::total_cmp);
    let median = (seconds[(steps - 1) / 2] + seconds[steps / 2]) / 2.0;
    let ceiling = |which: fn(&Ceilings) -> f64| ranks.iter().map(|rank| which(&rank.ceilings)).sum();
    let per_step = (steps * ranks.len()) as f64;
    let shares = shares(ranks, per_step);
    let of_kind = |kind, name: &str| {
        let of_it = shares.iter().filter(|share| KernelKind::of(&share.name) == kind);
        of_it.fold(KernelShare { name: name.to_owned(), seconds: 0.0, calls: 0.0 }, |sum, share| KernelShare {
            seconds: sum.seconds + share.seconds,
            calls: sum.calls + share.calls,
            ..sum
        })
    };
    let attending = || {
        let kernels = ranks.iter().flat_map(|rank| &rank.kernels);
        kernels.filter(|(name, _)| KernelKind::of(name) == KernelKind::Attention).map(|(_, time)| time)
    };
    StepSpeed {
        processor: devices::processor(),
        ranks: ranks.len(),
        threads: ranks[0].threads,
        dtype: if config.train.dtype == StorageType::Bf16 { "bf16" } else { "f32" }.to_owned(),
        ceilings: Ceilings {
            f32_flops: ceiling(|of| of.f32_flops),
            bf16_flops: ceiling(|of| of.bf16_flops),
            copied: ceiling(|of| of.copied),
            sides: ranks[0].ceilings.sides,
            beside: ceiling(|of| of.beside),
            streamed_beside: ceiling(|of| of.streamed_beside),
        },
        steps,
        seconds: median,
        fastest: seconds[0],
        slowest: seconds[steps - 1],
        mean: seconds.iter().sum::<f64>() / steps as f64,
        tokens_per_s: config.train.batch_tokens as f64 / median,
        roof: roofs.iter().map(|[all, _]| *all).fold(0.0, f64::max),
        roof_products: roofs.iter().map(|[_, products]| products).sum::<f64>() / ranks.len() as f64,
        model_flop: work.iter().map(of_model).sum(),
        product_flop: ranks.iter().map(|rank| 2.0 * rank.multiply_adds as f64).sum::<f64>() / steps as f64,
        products: of_kind(KernelKind::Product, "products"),
        attention: of_kind(KernelKind::Attention, "attention"),
        attention_products: attending().all(|time| time.multiply_adds > 0).then(|| AttentionProducts {
            seconds: attending().map(|time| time.products.as_secs_f64()).sum::<f64>() / per_step,
            flop: attending().map(|time| 2.0 * time.multiply_adds as f64).sum::<f64>() / steps as f64,
        }),
        others: shares.into_iter().filter(|share| KernelKind::of(&share.name) == KernelKind::Other).collect(),
    }
}

/// The seconds of a rank's work at most as fast as its ceilings allow, and those of products among them. Products' bytes are
/// counted in f32; if all operands were of the weights' type they would be `width` of these.
fn roof<'a>(work: impl Iterator<Item = &'a Work>, ceilings: &Ceilings, width: f64) -> [f64; 2] {
    let at_speed_of_memory = |bytes: f64| bytes / ceilings.streamed_beside;
    work.fold([0.0; 2], |[all, products], work| {
        let arithmetic = 2.0 * work.multiply_adds as f64 / ceilings.beside;
        let multiplied = arithmetic.max(at_speed_of_memory(width * work.product_bytes as f64));
        [all + multiplied + at_speed_of_memory(work.other_bytes as f64), products + multiplied]
    })
}

/// Every kernel's time and calls, the longest first.
fn shares(ranks: &[RankSpeed], per_step: f64) -> Vec<KernelShare> {
    let mut sums = BTreeMap::<&str, (Duration, u64)>::new();
    for (name, time) in ranks.iter().flat_map(|rank| &rank.kernels) {
        let sum = sums.entry(name).or_default();
        *sum = (sum.0 + time.time, sum.1 + time.calls);
    }
    let share = |(name, (time, calls)): (&str, (Duration, u64))| KernelShare {
        name: name.to_owned(),
        seconds: time.as_secs_f64() / per_step,
        calls: calls as f64 / per_step,
    };
    let mut shares: Vec<KernelShare> = sums.into_iter().map(share).collect();
    shares.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    shares
}

fn table(speed: &StepSpeed) -> String {
    let mut text = String::new();
    say_machine(&mut |head, words| writeln!(text, "{head:<9}{words}").expect("written to memory"), speed);
    say_step(&mut |head, words| writeln!(text, "{head:<9}{words}").expect("written to memory"), speed);
    text
}

fn say_machine(line: &mut impl FnMut(&str, String), speed: &StepSpeed) {
    let (ranks, threads) = (speed.ranks, speed.threads);
    line("machine", format!("{}; ranks {ranks}, threads of each {threads}", speed.processor));
    let ceilings = &speed.ceilings;
    let flops = |flops: f64| format!("{}FLOP/s", short(flops as u64));
    let [f32s, bf16s] = ceilings.sides.map(|side| format!("{side} x {side} x {side}"));
    line("ceilings", format!("{:>14}  products in f32, {f32s}, on all ranks at once", flops(ceilings.f32_flops)));
    line("", format!("{:>14}  products in bf16, {bf16s}", flops(ceilings.bf16_flops)));
    line("", format!("{:>14}  copied, read and written", format!("{}B/s", short(ceilings.copied as u64))));
    let dtype = &speed.dtype;
    line(
        "",
        format!("{:>14}  products in {dtype} beside the steps: the ceiling of what follows", flops(ceilings.beside)),
    );
    line(
        "",
        format!(
            "{:>14}  read and written in place, beside the steps",
            format!("{}B/s", short(ceilings.streamed_beside as u64))
        ),
    );
}

fn say_step(line: &mut impl FnMut(&str, String), speed: &StepSpeed) {
    line(
        "step",
        format!(
            "{} ({} to {}), median of {}: {} tokens/s",
            duration(speed.seconds),
            duration(speed.fastest),
            duration(speed.slowest),
            speed.steps,
            short(speed.tokens_per_s as u64)
        ),
    );
    line(
        "",
        format!(
            "{}FLOP of the model, mean {}: {:.0} % of the ceiling (model FLOP utilisation)",
            short(speed.model_flop as u64),
            duration(speed.mean),
            100.0 * speed.utilization()
        ),
    );
    line(
        "",
        format!(
            "{}, the roof: products at the ceiling or at the speed of memory ({}), all else at the speed of memory",
            duration(speed.roof),
            duration(speed.roof_products)
        ),
    );
    line("", format!("{:.0} % of the roof", 100.0 * speed.roof / speed.mean));
    let share = |seconds: f64| format!("{:>10} {:>4.0} %", duration(seconds), 100.0 * seconds / speed.mean);
    line(
        "products",
        format!(
            "{}, at {:.0} % of the ceiling{}",
            share(speed.products.seconds),
            100.0 * speed.products_of_ceiling(),
            speed
                .products_of_roof()
                .map_or(String::new(), |part| format!(", with attention's at {:.0} % of their roof", 100.0 * part))
        ),
    );
    line("attention", format!("{}{}", share(speed.attention.seconds), within_attention(speed)));
    let (told, rest) = speed.others.split_at(speed.others.len().min(TOLD));
    for (i, kernel) in told.iter().enumerate() {
        line(if i == 0 { "others" } else { "" }, format!("{}  {}", share(kernel.seconds), kernel.name));
    }
    let rest: f64 = rest.iter().map(|kernel| kernel.seconds).sum();
    line("", format!("{}  all other kernels", share(rest)));
    line("outside", format!("{}  of kernels: waiting for ranks and data, the program", share(speed.outside())));
    if let Some(seconds) = speed.no_products() {
        line("all", format!("{}  of the step is not in products", share(seconds)));
    }
}

fn within_attention(speed: &StepSpeed) -> String {
    let Some(products) = speed.attention_products else { return String::new() };
    let (time, part) = (duration(products.seconds), 100.0 * products.seconds / speed.mean);
    let rate = 100.0 * speed.attention_products_of_ceiling();
    format!(", of which products are {time}, {part:.0} %, at {rate:.0} % of the ceiling")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_roof_is_of_arithmetic_or_of_memory_part_by_part() {
        let ceilings = Ceilings {
            f32_flops: 1.0,
            bf16_flops: 1.0,
            copied: 1.0,
            sides: [1; 2],
            beside: 10.0,
            streamed_beside: 4.0,
        };
        let computes = Work { multiply_adds: 100, product_bytes: 8, other_bytes: 4 };
        let reads = Work { multiply_adds: 5, product_bytes: 80, other_bytes: 0 };
        assert_eq!(roof([computes, reads].iter(), &ceilings, 1.0), [41.0, 40.0]);
        assert_eq!(roof([computes, reads].iter(), &ceilings, 0.5), [31.0, 30.0]);
    }
}
