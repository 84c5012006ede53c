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
//! `(updating + moving - both) / moving`, of the medians.

#![allow(clippy::print_stdout)]

mod common;
#[path = "common/workload.rs"]
mod workload;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use common::{Flags, Measured, WARM_UP, median, milliseconds};
use guildhall::launch::Rank;
use guildhall::model::Decoder;
use guildhall::optim::{Access, Error, Hyper, Offload, Optimizer, Settings};
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
            let places = [("host", Offload::Host), ("file", Offload::File(PathBuf::from(&folder)))];
            let time = |rank: Rank| {
                let mesh = Mesh::new(rank.world.clone(), 1)?;
                let mut model = Decoder::new(&rank.device, &sizes, &mesh);
                round(&rank.device, &mut model, &mesh, (tile, &places), WARM_UP + flags.steps())
            };
            let (elements, ways) = on_ranks(&config, time)?.remove(0);
            let tiles = tile.map_or("whole weights".to_owned(), |tile| format!("tiles of {tile}"));
            let update = median(&ways[0][WARM_UP..]);
            for (index, (place, _)) in places.iter().enumerate() {
                let [moving, both] = [0, 1].map(|which| &ways[1 + 2 * index + which][WARM_UP..]);
                let measured = Measured {
                    workload: &format!("adamw {name} f32, {tiles}, state in {place}"),
                    tokens: elements,
                    ms: both,
                    losses: &[],
                    notes: "tokens are elements".to_owned(),
                };
                let moving = median(moving);
                measured.print(json!({
                    "state_mb": (elements * 8) as f64 / 1e6,
                    "ms_update": update,
                    "ms_move": moving,
                    "hidden": (update + moving - median(both)) / moving,
                }));
            }
        }
    }
    Ok(())
}

/// Elements of the model, and milliseconds of every round of: updating on the device; and by place moving, and both.
fn round(
    device: &Arc<Device>,
    model: &mut Decoder,
    mesh: &Mesh,
    (tile, places): (Option<usize>, &[(&str, Offload)]),
    rounds: usize,
) -> Result<(usize, Vec<Vec<f64>>)> {
    let hyper = Hyper { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let places = [Offload::None].into_iter().chain(places.iter().map(|(_, place)| place.clone()));
    let settings = places.map(|offload| Settings { hyper, tile, offload });
    let optimizers = settings.map(|settings| Optimizer::new(device, model, mesh, settings));
    let mut optimizers = optimizers.collect::<Result<Vec<_>, _>>()?;
    let mut ways = vec![Vec::new(); 2 * optimizers.len() - 1];
    for step in 1..=rounds as u64 {
        for (index, optimizer) in optimizers.iter_mut().enumerate() {
            if index > 0 {
                let moved = milliseconds(|| optimizer.visit(model, Access::Change, |_, _, _| Ok::<_, Error>(())));
                moved.1?;
                ways[2 * index - 1].push(moved.0);
            }
            give_gradients(device, model);
            let updated = milliseconds(|| optimizer.step(model, step, 1e-4, 1.0));
            updated.1?;
            ways[2 * index].push(updated.0);
        }
    }
    let mut elements = 0;
    model.visit(&mut |weight| elements += weight.parameter.len());
    Ok((elements, ways))
}

/// A gradient for every weight.
fn give_gradients(device: &Arc<Device>, model: &mut Decoder) {
    model.visit(&mut |weight| {
        let shape = weight.parameter.shape();
        weight.parameter.gradient().put(Tensor::from_fn(device, &shape, |i| (i % 7) as f32 * 1e-3 - 3e-3));
    });
}
