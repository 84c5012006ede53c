//! Whether collectives go on while kernels run: times a collective alone, matrix products alone, and the products while
//! the collective is under way.
//!
//! ```text
//! cargo bench --bench progress -- [--ranks 2] [--mb 4] [--steps 9]
//! ```
//!
//! Built with `--features mpi`, ranks are processes: `mpirun -n 2 target/release/deps/progress-*`, or behind limited links
//! `peers/network/links.sh mpirun 2 ...`. There are as many products as take about the collective's time. `hidden` is the
//! part of the shorter of the two that both together do not take. Threads that share memory move bytes when they wait for
//! them, so that nothing hides there.

#![allow(clippy::print_stdout)]

mod common;

use anyhow::{Result, anyhow};
use common::{Flags, Measured, WARM_UP, median, milliseconds};
use guildhall::commands::give_up;
use guildhall::launch::{Joined, Rank};
use guildhall::parallel;
use guildhall::train::Error;
use guildhall_comm::{Reduce, Request};
use guildhall_tensor::{Parameter, Tape, Tensor};
use serde_json::json;

/// What travels, of so many elements a rank.
type Start = fn(usize, &Rank) -> Request;

const COLLECTIVES: [(&str, Start); 2] = [
    ("all-to-all", |elements, rank| {
        let counts = vec![elements / rank.world.size(); rank.world.size()];
        Request::all_to_all(vec![1.0f32; elements], counts.clone(), vec![0.0f32; elements], counts)
    }),
    ("all-reduce", |elements, _| Request::all_reduce(Reduce::Sum, vec![1.0f32; elements])),
];

fn main() -> Result<()> {
    let flags = Flags::read();
    let ranks: usize = flags.get("--ranks", 2);
    let elements = (flags.get("--mb", 4.0) * 1e6) as usize / size_of::<f32>() / ranks * ranks;
    let mesh = parallel::Config { threads: Some(1), ..parallel::Config::of(ranks, ranks) };
    let joined = Joined::of(&mesh, give_up).map_err(|refusal| anyhow!("{}", refusal.text))?;
    let rows = joined.process.run(&mesh, |rank| {
        let row = |(name, start): &(&'static str, Start)| Ok((*name, times(&rank, elements, *start, flags.steps())?));
        COLLECTIVES.iter().map(row).collect::<Result<Vec<_>, Error>>()
    });
    let rows = rows.map_err(|failure| anyhow!("{failure}"))?;
    let leads = joined.process.leads();
    joined.leave(give_up).map_err(|error| anyhow!(error))?;
    for (name, [alone, products, both]) in rows[0].iter().filter(|_| leads) {
        let [alone_ms, products_ms, both_ms] = [alone, products, both].map(|ms| median(ms));
        let hidden = (alone_ms + products_ms - both_ms) / alone_ms.min(products_ms);
        let mb = (elements * size_of::<f32>()) as f64 / 1e6;
        let workload = &format!("{name} of {mb:.1} MB beside products x{ranks}");
        let measured = Measured { workload, tokens: 0, ms: both, losses: &[], notes: String::new() };
        measured.print(json!({ "alone_ms": alone_ms, "products_ms": products_ms, "hidden": hidden }));
    }
    Ok(())
}

/// Milliseconds of the collective, of the products, and of both, on the slowest rank, in every timed step.
fn times(rank: &Rank, elements: usize, start: Start, steps: usize) -> Result<[Vec<f64>; 3], Error> {
    let weight = Parameter::new("weight", Tensor::from_fn(&rank.device, &[512, 512], |i| (i % 7) as f32));
    let x = Tensor::from_fn(&rank.device, &[256, 512], |i| (i % 5) as f32);
    let products = |count: usize| {
        let tape = Tape::inference(&rank.device);
        let (x, weight) = (tape.constant(x.clone()), tape.parameter(&weight));
        (0..count).for_each(|_| drop(x.linear(&weight, None)));
    };
    let (one, ()) = milliseconds(|| products(50));
    let mut count = 1;
    let mut ms = [const { Vec::new() }; 3];
    for step in 0..WARM_UP + steps {
        for (kind, ms) in ms.iter_mut().enumerate() {
            let request = (kind != 1).then(|| start(elements, rank));
            rank.world.barrier()?;
            let (taken, done) = milliseconds(|| {
                let pending = request.map(|request| rank.world.start(request)).transpose()?;
                if kind != 0 {
                    products(count);
                }
                pending.map(|pending| pending.wait()).transpose()
            });
            done?;
            let slowest = rank.world.all_reduce(Reduce::Max, vec![(taken * 1e6) as u64])?.into_u64()[0];
            ms.push(slowest as f64 / 1e6);
        }
        if step < WARM_UP {
            let wanted = (median(&ms[0]) / (one / 50.0)).ceil() as u64;
            count = rank.world.all_reduce(Reduce::Max, vec![wanted])?.into_u64()[0] as usize;
        }
    }
    Ok(ms.map(|ms| ms[WARM_UP..].to_vec()))
}
