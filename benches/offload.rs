//! Times the optimizer's update with state on the device, in host memory and in a file: how much of moving state hides
//! behind updating it.
//!
//! ```text
//! cargo bench --bench offload -- [--tile 262144] [--dir FOLDER] [--steps 9]
//! ```
//!
//! One rank with one compute thread, besides which the thread that moves state has a core of its own where the machine has
//! two. Every round updates with state on the device (updating alone), moves state of each place there and back without
//! touching it (moving alone), and updates with state of each place (both), in turns. What of moving is hidden is
//! `(updating + moving - both) / moving` of the medians; and, as the optimizer itself counts it in updates, the share of the
//! time that moving took for which nobody waited.

#![allow(clippy::print_stdout)]

mod common;
#[path = "common/workload.rs"]
mod workload;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use common::{Flags, Measured, WARM_UP, median, milliseconds};
use guildhall::launch::Rank;
use guildhall::model::Model;
use guildhall::optim::{Access, Error, Hyper, OffloadTarget, Optimizer, Settings};
use guildhall::parallel::{self, Mesh, Parameters};
use guildhall_tensor::{Device, Tensor};
use serde_json::json;
use workload::{gpt, mixtral, on_ranks};

fn main() -> Result<()> {
    let flags = Flags::read();
    let folder = flags.get("--dir", std::env::temp_dir().display().to_string());
    let tiles = [Some(flags.get("--tile", 1usize << 18)), None];
    let config = parallel::Config { threads: Some(1), ..parallel::Config::of(1, 1) };
    for (name, sizes) in [("gpt2 d256 L4 F1024", gpt()), ("mixtral d256 L4 F1024 E8", mixtral())] {
        for tile in tiles {
            let places = [("host", OffloadTarget::Host), ("file", OffloadTarget::File(PathBuf::from(&folder)))];
            let time = |rank: Rank| {
                let mesh = Mesh::new(rank.world.clone(), 1)?;
                let mut model = Model::new(&rank.device, &sizes, &mesh);
                round(&rank.device, &mut model, &mesh, (tile, &places), WARM_UP + flags.steps())
            };
            let times = on_ranks(&config, time)?.remove(0);
            let tiles = tile.map_or("whole weights".to_owned(), |tile| format!("tiles of {tile}"));
            let update = median(&times.update[WARM_UP..]);
            for ((place, _), away) in places.iter().zip(&times.away) {
                let measured = Measured {
                    workload: &format!("adamw {name} f32, {tiles}, state in {place}"),
                    tokens: times.elements,
                    ms: &away.both[WARM_UP..],
                    losses: &[],
                    notes: "tokens are elements".to_owned(),
                };
                let (moving, both) = (median(&away.moving[WARM_UP..]), median(measured.ms));
                measured.print(json!({
                    "state_mb": (times.elements * 8) as f64 / 1e6,
                    "ms_update": update,
                    "ms_move": moving,
                    "hidden": (update + moving - both) / moving,
                    "hidden_counted": 1.0 - median(&away.waited[WARM_UP..]),
                }));
            }
        }
    }
    Ok(())
}

/// Milliseconds of every round.
struct Times {
    elements: usize,
    /// On the device.
    update: Vec<f64>,
    /// By place.
    away: Vec<Away>,
}

#[derive(Clone, Default)]
struct Away {
    moving: Vec<f64>,
    both: Vec<f64>,
    /// Of the time that moving took in an update, the share for which the update waited.
    waited: Vec<f64>,
}

fn round(
    device: &Arc<Device>,
    model: &mut Model,
    mesh: &Mesh,
    (tile, places): (Option<usize>, &[(&str, OffloadTarget)]),
    rounds: usize,
) -> Result<Times> {
    let hyper = Hyper { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = |offload| Optimizer::new(device, model, mesh, Settings { hyper, tile, offload });
    let mut here = optimizer(OffloadTarget::None)?;
    let elsewhere = places.iter().map(|(_, place)| optimizer(place.clone()));
    let mut elsewhere = elsewhere.collect::<Result<Vec<_>, _>>()?;
    let mut times = Times { elements: 0, update: Vec::new(), away: vec![Away::default(); places.len()] };
    model.visit(&mut |weight| times.elements += weight.parameter.len());
    for step in 1..=rounds as u64 {
        give_gradients(device, model);
        let (ms, updated) = milliseconds(|| here.step(model, step, 1e-4, 1.0));
        updated?;
        times.update.push(ms);
        for (optimizer, away) in elsewhere.iter_mut().zip(&mut times.away) {
            let (ms, moved) = milliseconds(|| optimizer.visit(model, Access::Change, |_, _| Ok::<_, Error>(())));
            moved?;
            away.moving.push(ms);
            give_gradients(device, model);
            let before = optimizer.moved().unwrap_or_default();
            let (ms, updated) = milliseconds(|| optimizer.step(model, step, 1e-4, 1.0));
            updated?;
            away.both.push(ms);
            let after = optimizer.moved().unwrap_or_default();
            away.waited.push((after.waited_s - before.waited_s) / (after.busy_s - before.busy_s));
        }
    }
    Ok(times)
}

/// A gradient for every weight.
fn give_gradients(device: &Arc<Device>, model: &mut Model) {
    model.visit(&mut |weight| {
        let shape = weight.parameter.shape();
        weight.parameter.gradient().put(Tensor::from_fn(device, &shape, |i| (i % 7) as f32 * 1e-3 - 3e-3));
    });
}
