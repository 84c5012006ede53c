//! How fast ranks compute and talk, measured: what decisions about communication are made with.

use std::sync::Arc;
use std::time::Instant;

use guildhall_comm::{Communicator, Error, Reduce, Request};
use guildhall_tensor::{Cause, Device, Dtype, Tape, Tensor, on_device};

use super::flight::{Flight, arriving, payload, received};

/// Speeds that hold for every rank of a world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Of matrix products on one rank, while all compute; floating-point operations a second.
    pub flops: f64,
    /// Bytes a second that one rank sends to the others of its expert group; infinite where there are no others.
    pub bandwidth: f64,
    /// Seconds of an exchange of next to nothing within an expert group.
    pub latency: f64,
    /// Bytes of its memory a second that one rank reads and writes in copying rows, while all copy.
    pub memory: f64,
}

/// Side of the measured products: about that of an expert's. Of a device that is done with them in no time it is doubled, up to
/// the second one.
const SIDE: usize = 384;
const SIDE_MOST: usize = 8 * SIDE;
const NO_TIME: f64 = 0.005;
const PRODUCTS: usize = 12;
/// Elements that each rank sends to each other at once.
const ELEMENTS: usize = 1 << 18;
const EXCHANGES: usize = 4;
const SHORT_EXCHANGES: usize = 16;
/// Rows of `SIDE` elements, more than a core's caches hold.
const ROWS: usize = 1 << 13;
const COPIES: usize = 4;

impl Rates {
    /// Times products of `dtype`, all-to-alls and copies of rows; the slowest rank of the world speaks for all, so that all decide alike.
    ///
    /// # Errors
    /// What the groups report.
    pub(super) fn measure(
        (device, dtype): (&Arc<Device>, Dtype),
        group: &Arc<dyn Communicator>,
        world: &Arc<dyn Communicator>,
    ) -> Result<Rates, Error> {
        let computing = [seconds_of_operation(device, dtype), copies(device)];
        let exchanges = |elements, times| exchanges(device, group, elements, times);
        let talking = [exchanges(ELEMENTS, EXCHANGES)?, exchanges(1, SHORT_EXCHANGES)?];
        let seconds = [computing, talking].concat();
        let slowest = world.all_reduce(Reduce::Max, seconds)?.into_f64();
        let bytes = (EXCHANGES * ELEMENTS * (group.size() - 1) * size_of::<f32>()) as f64;
        let bandwidth = if group.size() == 1 { f64::INFINITY } else { bytes / slowest[2] };
        let copied = (2 * COPIES * ROWS * SIDE * size_of::<f32>()) as f64;
        Ok(Rates {
            flops: 1.0 / slowest[0],
            bandwidth,
            latency: slowest[3] / SHORT_EXCHANGES as f64,
            memory: copied / slowest[1],
        })
    }
}

/// Seconds of a floating-point operation in products.
fn seconds_of_operation(device: &Arc<Device>, dtype: Dtype) -> f64 {
    let (mut side, mut seconds) = (SIDE, products(device, dtype, SIDE));
    while device.has_own_memory() && seconds < NO_TIME && side < SIDE_MOST {
        // Where there is no room the smaller one has to do.
        let Ok(larger) = on_device(|| products(device, dtype, 2 * side)) else { break };
        (side, seconds) = (2 * side, larger);
    }
    seconds / (2 * PRODUCTS * side.pow(3)) as f64
}

fn products(device: &Arc<Device>, dtype: Dtype, side: usize) -> f64 {
    let tape = Tape::inference(device);
    let matrix = |phase: usize| {
        Tensor::from_fn(device, &[side, side], |i| ((i * 7 + phase) % 11) as f32 - 5.0).into_dtype(dtype)
    };
    let (x, w) = (tape.constant(matrix(0)), tape.constant(matrix(3)));
    seconds_of(device, PRODUCTS, || drop(x.linear(&w, None)))
}

/// Seconds in which rows are copied in another order, as deliveries do.
fn copies(device: &Arc<Device>) -> f64 {
    let tape = Tape::inference(device);
    let x = tape.constant(Tensor::zeros(device, &[ROWS, SIDE]));
    // An odd step visits every row once.
    let order: Vec<u32> = (0..ROWS).map(|i| (i * 4099 % ROWS) as u32).collect();
    seconds_of(device, COPIES, || drop(x.gather_rows(&order)))
}

/// Seconds of so many runs behind a first one, until the device is done with them.
fn seconds_of(device: &Device, runs: usize, run: impl Fn()) -> f64 {
    run();
    device.wait();
    let begun = Instant::now();
    (0..runs).for_each(|_| run());
    device.wait();
    begun.elapsed().as_secs_f64()
}

/// Seconds of so many exchanges, in which each rank sends so many elements to each other, from where tensors are and by the way
/// that they take.
fn exchanges(device: &Arc<Device>, group: &Arc<dyn Communicator>, elements: usize, times: usize) -> Result<f64, Error> {
    let (counts, all) = (vec![elements; group.size()], elements * group.size());
    let exchange = || -> Result<(), Error> {
        let (sent, arrives) =
            (payload(group, Tensor::zeros(device, &[all])), arriving(group, device, &[all], Dtype::F32));
        let request = Request::all_to_all(sent, counts.clone(), arrives, counts.clone());
        let done = Flight::start(group, device, Cause::Communication, request)?.wait()?;
        drop(received(device, &[all], done));
        device.wait();
        Ok(())
    };
    exchange()?;
    let mut seconds = 0.0;
    for _ in 0..times {
        group.barrier()?;
        let begun = Instant::now();
        exchange()?;
        seconds += begun.elapsed().as_secs_f64();
    }
    Ok(seconds)
}
