//! What a noisy gate's losses are made of: the chance of being chosen, and how uneven sums over tokens are.

use crate::cpu::select::NOWHERE;
use crate::device::Device;

/// Keeps the mean of nothing from dividing (Shazeer et al. 2017).
const TINY: f64 = 1e-10;

/// Rows whose sum is one vector, and what its squared variation counts.
#[derive(Clone, Debug, PartialEq)]
pub struct RowGroup {
    pub rows: Vec<u32>,
    /// What others' rows add to the sum, one number a column; empty if all rows are here.
    pub elsewhere: Vec<f64>,
    pub weight: f32,
    /// The part of the value that is counted here, the rest being counted where the other rows are; 1 if all are here.
    pub share: f64,
}

/// Elements are counted over the whole matrix; each is measured against the largest beyond the k that remain without it.
pub(crate) fn thresholds(_: &Device, against: &mut [u32], noisy: &[f32], width: usize, k: usize) {
    for (r, (row, against)) in noisy.chunks_exact(width).zip(against.chunks_exact_mut(width)).enumerate() {
        let mut order: Vec<usize> = (0..width).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        let (last_in, first_out) = (order[k - 1], order[k]);
        for (e, against) in against.iter_mut().enumerate() {
            let place = if row[e] > row[first_out] { first_out } else { last_in };
            *against = (r * width + place) as u32;
        }
    }
}

pub(crate) fn chances(
    _: &Device,
    p: &mut [f32],
    z: &mut [f32],
    clean: &[f32],
    sigma: &[f32],
    noisy: &[f32],
    against: &[u32],
) {
    for (i, (p, z)) in p.iter_mut().zip(z).enumerate() {
        *z = (clean[i] - noisy[against[i] as usize]) / sigma[i];
        *p = normal_cdf(f64::from(*z)) as f32;
    }
}

/// d Phi(z) / d clean of element i, times its gradient.
fn slope(i: usize, z: &[f32], sigma: &[f32], g: &[f32]) -> f32 {
    g[i] * normal_density(z[i]) / sigma[i]
}

pub(crate) fn chances_back_clean(_: &Device, d: &mut [f32], z: &[f32], sigma: &[f32], g: &[f32], accumulate: bool) {
    fill(d, accumulate, |i| slope(i, z, sigma, g));
}

pub(crate) fn chances_back_sigma(_: &Device, d: &mut [f32], z: &[f32], sigma: &[f32], g: &[f32], accumulate: bool) {
    fill(d, accumulate, |i| -slope(i, z, sigma, g) * z[i]);
}

pub(crate) fn chances_back_noisy(
    _: &Device,
    d: &mut [f32],
    z: &[f32],
    sigma: &[f32],
    g: &[f32],
    against: &[u32],
    // Elements are measured within their row. Here this need not be known, where threads look for them it does.
    _width: usize,
    accumulate: bool,
) {
    if !accumulate {
        d.fill(0.0);
    }
    (0..z.len()).for_each(|i| d[against[i] as usize] -= slope(i, z, sigma, g));
}

pub(crate) fn scatter_columns(_: &Device, out: &mut [f32], x: &[f32], index: &[u32], k: usize, width: usize) {
    out.fill(0.0);
    for (route, &column) in index.iter().enumerate().filter(|(_, column)| **column != NOWHERE) {
        out[route / k * width + column as usize] = x[route];
    }
}

pub(crate) fn scatter_columns_back(
    _: &Device,
    d: &mut [f32],
    g: &[f32],
    index: &[u32],
    k: usize,
    width: usize,
    accumulate: bool,
) {
    let of = |route: usize| match index[route] {
        NOWHERE => 0.0,
        column => g[route / k * width + column as usize],
    };
    fill(d, accumulate, of);
}

pub(crate) fn squared_variation(
    _: &Device,
    out: &mut [f32],
    slopes: &mut [f32],
    x: &[f32],
    width: usize,
    groups: &[RowGroup],
) {
    let mut total = 0.0;
    for (group, slopes) in groups.iter().zip(slopes.chunks_exact_mut(width)) {
        let (value, slope) = variation(x, width, group);
        slopes.copy_from_slice(&slope);
        total += value;
    }
    out[0] = total as f32;
}

pub(crate) fn squared_variation_back(
    _: &Device,
    d: &mut [f32],
    slopes: &[f32],
    g: &[f32],
    width: usize,
    groups: &[RowGroup],
    accumulate: bool,
) {
    if !accumulate {
        d.fill(0.0);
    }
    for (group, slope) in groups.iter().zip(slopes.chunks_exact(width)) {
        for &row in &group.rows {
            let line = &mut d[row as usize * width..][..width];
            line.iter_mut().zip(slope).for_each(|(d, s)| *d += g[0] * s);
        }
    }
}

fn fill(d: &mut [f32], add: bool, f: impl Fn(usize) -> f32) {
    for (i, d) in d.iter_mut().enumerate() {
        *d = if add { *d + f(i) } else { f(i) };
    }
}

/// A group's weighted squared variation and its slope by each column's sum.
fn variation(x: &[f32], width: usize, group: &RowGroup) -> (f64, Vec<f32>) {
    let mut sums = if group.elsewhere.is_empty() { vec![0.0; width] } else { group.elsewhere.clone() };
    for &row in &group.rows {
        sums.iter_mut().zip(&x[row as usize * width..][..width]).for_each(|(s, x)| *s += f64::from(*x));
    }
    if width == 1 {
        return (0.0, vec![0.0]);
    }
    let (n, weight) = (width as f64, f64::from(group.weight));
    let mean = sums.iter().sum::<f64>() / n;
    let variance = sums.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>() / (n - 1.0);
    let scale = mean * mean + TINY;
    let slope = |s: &f64| {
        let by_variance = 2.0 * (s - mean) / (n - 1.0) / scale;
        let by_mean = variance / (scale * scale) * 2.0 * mean / n;
        (weight * (by_variance - by_mean)) as f32
    };
    (group.share * weight * variance / scale, sums.iter().map(slope).collect())
}

fn normal_density(z: f32) -> f32 {
    (-0.5 * z * z).exp() / (2.0 * std::f32::consts::PI).sqrt()
}

/// The integral of the normal density up to z, by its series near 0 and its continued fraction beyond: good to 1e-12.
fn normal_cdf(z: f64) -> f64 {
    let density = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if z.abs() < 3.0 {
        // Phi = 1/2 + density (z + z^3/3 + z^5/15 + ...).
        let (mut term, mut sum, mut odd) = (z, z, 1.0);
        while term.abs() > 1e-16 {
            odd += 2.0;
            term *= z * z / odd;
            sum += term;
        }
        return 0.5 + density * sum;
    }
    let tail = density / (1..60).rev().fold(z.abs(), |below, n| z.abs() + f64::from(n) / below);
    if z > 0.0 { 1.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the table every handbook prints.
    #[test]
    fn the_normal_integral() {
        let table = [(0.0, 0.5), (1.0, 0.841_344_746_068_542_9), (2.0, 0.977_249_868_051_820_8)];
        let far = [(3.0, 0.998_650_101_968_369_9), (4.0, 0.999_968_328_758_166_9)];
        for (z, want) in table.into_iter().chain(far) {
            assert!((normal_cdf(z) - want).abs() < 1e-12, "{z}: {}", normal_cdf(z));
            assert!((normal_cdf(-z) - (1.0 - want)).abs() < 1e-12, "-{z}: {}", normal_cdf(-z));
        }
    }
}
