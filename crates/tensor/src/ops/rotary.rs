//! Rotary positions: the turns of each pair of a head's numbers at each position.

use std::sync::Arc;

use crate::device::Device;
use crate::dtype::Dtype;
use crate::index::Index;
use crate::tensor::Tensor;

/// Cosines and sines `[positions.len(), head_dim / 2]` of rotary positions (Su et al. 2021), pair i turning by
/// `position * theta^(-2 i / head_dim)`. Where `head_dim` is less than that of a head, its last numbers turn.
pub fn rotary_tables<'a>(
    device: &Arc<Device>,
    positions: impl Into<Index<'a>>,
    head_dim: usize,
    theta: f32,
) -> [Tensor; 2] {
    turning_tables(device, positions, &rotary_speeds(head_dim, theta), 1.0)
}

/// By how much each pair turns from one position to the next.
pub fn rotary_speeds(head_dim: usize, theta: f32) -> Vec<f64> {
    (0..head_dim / 2).map(|i| f64::from(theta).powf(-2.0 * i as f64 / head_dim as f64)).collect()
}

/// Positions that a thread turns at a time.
const TURNED_AT_ONCE: usize = 64;

/// [`rotary_tables`] of other speeds, times a factor.
pub fn turning_tables<'a>(
    device: &Arc<Device>,
    positions: impl Into<Index<'a>>,
    speeds: &[f64],
    factor: f64,
) -> [Tensor; 2] {
    let (positions, half) = (positions.into(), speeds.len());
    let shape = [positions.len(), half];
    if !device.has_data() || half == 0 {
        return [(); 2].map(|()| Tensor::stale(device, &shape, Dtype::F32));
    }
    let numbers: Vec<u32> = (0..positions.len()).map(|i| positions.at(i)).collect();
    // Rows of a batch have the same positions: each is computed once.
    let mut distinct = numbers.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let [mut cosines, mut sines] = [(); 2].map(|()| vec![0.0; distinct.len() * half]);
    let lines = cosines.chunks_mut(half * TURNED_AT_ONCE).zip(sines.chunks_mut(half * TURNED_AT_ONCE));
    device.share(distinct.chunks(TURNED_AT_ONCE).zip(lines), |(positions, (cosines, sines))| {
        let angles = positions.iter().flat_map(|&at| speeds.iter().map(move |speed| f64::from(at) * speed));
        for (angle, (cosine, sine)) in angles.zip(cosines.iter_mut().zip(sines)) {
            (*cosine, *sine) = ((factor * angle.cos()) as f32, (factor * angle.sin()) as f32);
        }
    });
    let places: Vec<usize> = numbers.iter().map(|at| distinct.partition_point(|other| other < at) * half).collect();
    [cosines, sines].map(|of_distinct| {
        let mut table = vec![0.0; places.len() * half];
        let lines = places.chunks(TURNED_AT_ONCE).zip(table.chunks_mut(half * TURNED_AT_ONCE));
        device.share(lines, |(places, table)| {
            let lines = places.iter().zip(table.chunks_exact_mut(half));
            lines.for_each(|(&place, line)| line.copy_from_slice(&of_distinct[place..][..half]));
        });
        Tensor::from_slice(device, &shape, &table)
    })
}
