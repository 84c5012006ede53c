//! Times collectives between thread ranks and prints one JSON line for each workload.
//!
//! `cargo bench -p guildhall-comm --bench collectives [-- MOST_RANKS]`, by default 2 and 4 ranks. Bytes are what
//! each rank holds, its whole send buffer. `algbw` is bytes / time; `busbw` multiplies it by (n-1)/n for
//! all-to-all and by 2(n-1)/n for all-reduce. Times are medians over repetitions of the slowest rank.

#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use guildhall_comm::{Communicator, Error, Reduce, threads};

const KIB: [usize; 3] = [64, 1 << 10, 16 << 10];
const WARM_UP: usize = 5;

type Comm = Arc<dyn Communicator>;

fn main() {
    let most_ranks = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(4);
    let options = threads::Options { timeout: Duration::from_secs(60) };
    for size in [2, 4, 8].into_iter().filter(|size| *size <= most_ranks) {
        for rank in threads::run(size, options, |comm| measure_all(&comm)) {
            rank.unwrap_or_else(|failure| panic!("{failure}"));
        }
    }
}

fn measure_all(comm: &Comm) -> Result<(), Error> {
    barrier(comm)?;
    for kib in KIB {
        all_to_all(comm, kib)?;
        all_reduce(comm, kib)?;
    }
    Ok(())
}

fn barrier(comm: &Comm) -> Result<(), Error> {
    let times = repeat(comm, 2001, || comm.barrier())?;
    print_line(comm, "barrier", 0, &times, 0.0);
    Ok(())
}

fn all_to_all(comm: &Comm, kib: usize) -> Result<(), Error> {
    let size = comm.size();
    let counts = vec![kib * 256 / size; size];
    let mut buffers = Some((vec![1f32; kib * 256], vec![0f32; kib * 256]));
    let times = repeat(comm, repetitions(kib), || {
        let (send, recv) = buffers.take().expect("returned below");
        let completed = comm.all_to_all(send, counts.clone(), recv, counts.clone())?;
        let send = completed.send.expect("an all-to-all returns what it sent");
        buffers = Some((send.into_f32(), completed.recv.into_f32()));
        Ok(())
    })?;
    print_line(comm, "all_to_all", kib, &times, 1.0);
    Ok(())
}

fn all_reduce(comm: &Comm, kib: usize) -> Result<(), Error> {
    let mut buffer = Some(vec![1f32; kib * 256]);
    let times = repeat(comm, repetitions(kib), || {
        let reduced = comm.all_reduce(Reduce::Sum, buffer.take().expect("returned below"))?;
        buffer = Some(reduced.into_f32());
        Ok(())
    })?;
    print_line(comm, "all_reduce_f32", kib, &times, 2.0);
    Ok(())
}

fn repetitions(kib: usize) -> usize {
    if kib > 4 << 10 { 31 } else { 201 }
}

/// Microseconds of the slowest rank, sorted, one entry a repetition.
fn repeat(
    comm: &Comm,
    repetitions: usize,
    mut operation: impl FnMut() -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let mut times = Vec::new();
    for _ in 0..WARM_UP + repetitions {
        comm.barrier()?;
        let start = Instant::now();
        operation()?;
        let own = start.elapsed().as_secs_f64() * 1e6;
        times.push(comm.all_reduce(Reduce::Max, vec![own])?.into_f64()[0]);
    }
    let mut times = times.split_off(WARM_UP);
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// `factor` times (n-1)/n of the bytes cross the bus.
fn print_line(comm: &Comm, workload: &str, kib: usize, times: &[f64], factor: f64) {
    if comm.rank() != 0 {
        return;
    }
    let (n, us) = (comm.size(), times[times.len() / 2]);
    let algbw = (kib << 10) as f64 / us / 1e3;
    let busbw = algbw * factor * (n - 1) as f64 / n as f64;
    println!(
        "{{\"system\": \"guildhall threads\", \"workload\": \"{workload} n{n} {kib} KiB\", \"us\": {us:.3}, \
         \"algbw_GBps\": {algbw:.3}, \"busbw_GBps\": {busbw:.3}, \"peak_rss_mb\": null, \
         \"notes\": \"median of {}, slowest rank; fastest {:.3} us\"}}",
        times.len(),
        times[0],
    );
}
