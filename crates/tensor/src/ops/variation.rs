//! What a noisy gate's losses are made of: the chance of being chosen, and how uneven sums over tokens are.

use super::f32_like;
use super::select::NOWHERE;
use crate::tape::Var;
use crate::tensor::Tensor;

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

impl Var {
    /// The chance that each column would be among the row's k largest if its own noise were drawn again:
    /// `Phi((clean - t) / sigma)`, t the k-th largest of `noisy`, or the next for those among the k themselves (Shazeer et
    /// al. 2017, eq. 9). Self is `clean`; all `[T, E]`, k < E. `noisy` lends its thresholds, with their gradient.
    #[track_caller]
    pub fn chance_of_top(&self, sigma: &Var, noisy: &Var, k: usize) -> Var {
        let (clean, spread, other) = (self.value().to_f32(), sigma.value().to_f32(), noisy.value().to_f32());
        let width = clean.cols();
        assert!(k < width && [spread.len(), other.len()] == [clean.len(); 2], "chances of top {k} of {width}");
        let thresholds = thresholds(other.f32s(), width, k);
        let mut z = f32_like(&clean);
        for (i, z) in z.f32s_mut().iter_mut().enumerate() {
            *z = (clean.f32s()[i] - other.f32s()[thresholds[i] as usize]) / spread.f32s()[i];
        }
        let mut out = f32_like(&clean);
        out.f32s_mut().iter_mut().zip(z.f32s()).for_each(|(p, z)| *p = normal_cdf(f64::from(*z)) as f32);
        let inputs = [self, sigma, noisy];
        let [to_clean, to_sigma, to_noisy] = inputs.map(Var::input);
        self.tape().op("chance_of_top", out, &inputs, move |g, gradients| {
            let device = g.device().clone();
            // d Phi(z) / d clean, for every element.
            let slope = |i: usize| {
                let z = z.f32s()[i];
                g.f32s()[i] * normal_density(z) / spread.f32s()[i]
            };
            gradients.write(&device, to_clean, z.shape(), |d, add| fill(d, add, slope));
            gradients.write(&device, to_sigma, z.shape(), |d, add| fill(d, add, |i| -slope(i) * z.f32s()[i]));
            gradients.write(&device, to_noisy, z.shape(), |d, add| {
                if !add {
                    d.fill(0.0);
                }
                (0..d.len()).for_each(|i| d[thresholds[i] as usize] -= slope(i));
            });
        })
    }

    /// Puts column j of each row at column `index[r * k + j]` of a wider row of zeros: `[T, k]` gives `[T, width]`.
    #[track_caller]
    pub fn scatter_columns(&self, index: &[u32], width: usize) -> Var {
        let (x, to, k) = (self.value().to_f32(), self.input(), self.value().cols());
        assert_eq!(index.len(), x.len(), "one column an element");
        let at = move |route: usize, column: u32| route / k * width + column as usize;
        let mut out = Tensor::zeros(self.device(), &[x.rows(), width]);
        for (route, &column) in index.iter().enumerate().filter(|(_, column)| **column != NOWHERE) {
            out.f32s_mut()[at(route, column)] = x.f32s()[route];
        }
        let (index, shape) = (index.to_vec(), x.shape().to_vec());
        self.tape().op("scatter_columns", out, &[self], move |g, gradients| {
            let device = g.device().clone();
            let of = |route: usize| if index[route] == NOWHERE { 0.0 } else { g.f32s()[at(route, index[route])] };
            gradients.write(&device, to, &shape, |d, add| fill(d, add, of));
        })
    }

    /// `sum_g share_g weight_g CV^2(sum of g's rows)`, whose slope along the rows is that of all shares together, with `CV^2(v) = var(v) / (mean(v)^2 + 1e-10)`, var with divisor E - 1; 0 for
    /// one column. x `[T, E]`; gives a scalar.
    #[track_caller]
    pub fn squared_variation(&self, groups: &[RowGroup]) -> Var {
        let (x, to, width) = (self.value().to_f32(), self.input(), self.value().cols());
        let slopes: Vec<(f64, Vec<f32>)> = groups.iter().map(|group| variation(x.f32s(), width, group)).collect();
        let total: f64 = slopes.iter().map(|(value, _)| value).sum();
        let value = Tensor::from_slice(self.device(), &[1], &[total as f32]);
        let (groups, shape) = (groups.to_vec(), x.shape().to_vec());
        self.tape().op("squared_variation", value, &[self], move |g, gradients| {
            let (device, g) = (g.device().clone(), g.scalar());
            gradients.write(&device, to, &shape, |d, add| {
                if !add {
                    d.fill(0.0);
                }
                for (group, (_, slope)) in groups.iter().zip(&slopes) {
                    for &row in &group.rows {
                        let line = &mut d[row as usize * width..][..width];
                        line.iter_mut().zip(slope).for_each(|(d, s)| *d += g * s);
                    }
                }
            });
        })
    }
}

fn fill(d: &mut [f32], add: bool, f: impl Fn(usize) -> f32) {
    for (i, d) in d.iter_mut().enumerate() {
        *d = if add { *d + f(i) } else { f(i) };
    }
}

/// The element, counted over the whole matrix, that each one is measured against: the largest beyond the k that remain
/// without it.
fn thresholds(noisy: &[f32], width: usize, k: usize) -> Vec<u32> {
    let of_row = |(r, row): (usize, &[f32])| {
        let mut order: Vec<usize> = (0..width).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        let (last_in, first_out) = (order[k - 1], order[k]);
        let against = |e: usize| if row[e] > row[first_out] { first_out } else { last_in };
        (0..width).map(|e| (r * width + against(e)) as u32).collect::<Vec<_>>()
    };
    noisy.chunks_exact(width).enumerate().flat_map(of_row).collect()
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
