//! What a rank runs on: a device of the table, one of the user's own, or its share of this machine, measured.

use std::path::Path;
use std::time::Instant;

use guildhall_tensor::{Device, Dtype, Tensor};

use super::CommandFailure;
use crate::config::{self, Config};
use crate::launch;
use crate::memory::available_bytes;
use crate::parallel::{Config as Parallel, Mesh};
use crate::plan::{LinkSpeed, Machine, names};
use crate::train;

/// The machine that the program runs on.
pub(super) const HERE: &str = "this-machine";

/// Seconds a message between ranks of this machine takes however small it is, and bytes a second of a file, assumptions.
const LATENCY: f64 = 20e-6;
const FILE_BANDWIDTH: f64 = 1e9;

/// The machine called `name`, or of the table in the file `name`, with the recipe's budget. This machine is shared by as
/// many ranks as are `neighbours` on it.
pub(super) fn named(name: &str, config: &Config, neighbours: usize) -> Result<Machine, CommandFailure> {
    let known = || {
        Machine::known(name).ok_or_else(|| {
            let known: Vec<&str> = names().collect();
            let known = known.join(", ");
            let own = "or name a file with a table of your own, such as my-card.toml";
            CommandFailure::Request(anyhow::anyhow!("--device {name} is not known: choose {HERE}, {known}; {own}"))
        })
    };
    let machine = match name {
        HERE => here(config, neighbours)?,
        path if path.ends_with(".toml") || path.contains('/') => own(Path::new(path))?,
        _ => known()?,
    };
    Ok(Machine { budget: config.memory.budget_bytes(), ..machine })
}

/// The device that a file describes.
fn own(file: &Path) -> Result<Machine, CommandFailure> {
    let table = config::device(file).map_err(CommandFailure::request)?;
    Ok(Machine::of(&table, &file.file_stem().unwrap_or_default().to_string_lossy()))
}

/// One rank's share of this machine: a few products and a copy are measured, on what the recipe computes with.
fn here(config: &Config, neighbours: usize) -> Result<Machine, CommandFailure> {
    let memory = train::rank_memory(config, neighbours).ok_or_else(|| {
        CommandFailure::Request(anyhow::anyhow!("how much memory is free is not known here: name a --device"))
    })?;
    let backend = config.parallel.backend;
    launch::is_here(backend).map_err(|missing| {
        CommandFailure::Request(anyhow::anyhow!("{missing}; to plan for another machine, name a --device"))
    })?;
    let is_apart = launch::memory_apart(backend, neighbours).is_some();
    let threads = launch::share_of_cores(&config.parallel, neighbours);
    let alone = Parallel { backend, threads: Some(threads), ..Parallel::of(1, 1) };
    let measured = launch::run(&alone, |rank| {
        train::Error::or_of_device(&rank, || {
            let flops = |dtype: Dtype| {
                let rates = Mesh::new(rank.world.clone(), 1)?.measured(&rank.device, dtype)?.rates();
                Ok::<_, train::Error>(rates.map_or(1.0, |rates| rates.flops))
            };
            Ok(([flops(Dtype::F32)?, flops(Dtype::Bf16)?], copied(&rank.device)))
        })
    });
    let (flops, bandwidth) = launch::first_cause(measured, |_: &train::Error| false)
        .map_err(|failure| CommandFailure::Run(anyhow::anyhow!("{failure}")))?[0];
    let wire = LinkSpeed { latency_s: LATENCY, message_s: 0.0, bandwidth };
    Ok(Machine {
        name: HERE.to_owned(),
        memory,
        flops,
        efficiency: 1.0,
        bandwidth,
        ranks_per_node: config.parallel.ranks.max(neighbours),
        within: wire,
        between: wire,
        host: FILE_BANDWIDTH,
        host_memory: available_bytes().filter(|_| is_apart),
        budget: None,
    })
}

/// Bytes a second that a copy reads and writes.
fn copied(device: &std::sync::Arc<Device>) -> f64 {
    let x = Tensor::zeros(device, &[1 << 22]);
    drop(x.to_owned_copy());
    device.wait();
    let begun = Instant::now();
    (0..4).for_each(|_| drop(x.to_owned_copy()));
    device.wait();
    (4 * 2 * 4 * x.len()) as f64 / begun.elapsed().as_secs_f64()
}
