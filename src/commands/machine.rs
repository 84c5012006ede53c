//! What a rank runs on: a device of the table, one of the user's own, or its share of this machine, measured.

use std::path::Path;
use std::sync::Arc;

use guildhall_tensor::{Device, on_device};

use super::CommandFailure;
use super::ceilings::{RankCeilings, ceilings};
use crate::config::{self, Config};
use crate::launch;
use crate::memory::available_bytes;
use crate::plan::{FigureOrigins, LinkSpeed, Machine, names};
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

/// One rank's share of this machine: products and copies are measured, on what the recipe computes with.
fn here(config: &Config, neighbours: usize) -> Result<Machine, CommandFailure> {
    let backend = config.parallel.backend;
    let threads = launch::share_of_cores(&config.parallel, neighbours);
    let opened = launch::open_backend(backend, threads).map_err(|missing| {
        CommandFailure::Request(anyhow::anyhow!("{missing}; to plan for another machine, name a --device"))
    })?;
    let apart = opened.memory_apart(neighbours);
    let of_the_machine = || available_bytes().map(|free| free / neighbours as u64);
    let memory = apart.or_else(of_the_machine).ok_or_else(|| {
        CommandFailure::Request(anyhow::anyhow!("how much memory is free is not known here: name a --device"))
    })?;
    let [f32_flops, bf16_flops, bandwidth] = measured(&opened.device, memory)?;
    let wire = LinkSpeed { latency_s: LATENCY, message_s: 0.0, bandwidth };
    Ok(Machine {
        name: HERE.to_owned(),
        origins: FigureOrigins::MEASURED,
        memory,
        flops: [f32_flops, bf16_flops],
        efficiency: 1.0,
        bandwidth,
        ranks_per_node: config.parallel.ranks.max(neighbours),
        within: wire,
        between: wire,
        host: FILE_BANDWIDTH,
        host_memory: available_bytes().filter(|_| apart.is_some()),
        budget: None,
    })
}

/// What a rank's device reaches that has so much memory: [`RankCeilings::rates`].
fn measured(device: &Arc<Device>, memory: u64) -> Result<[f64; 3], CommandFailure> {
    let alone = guildhall_comm::solo::world();
    let measured = on_device(|| ceilings(device, &alone, memory / 2, None).map(|RankCeilings { rates, .. }| rates));
    let of_device = |failure| train::Error::Device { rank: 0, place: device.scope(), failure };
    measured.map_err(of_device).map_err(CommandFailure::run)?.map_err(CommandFailure::run)
}
