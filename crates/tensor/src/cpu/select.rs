//! Columns chosen per row, and what is made of the chosen values among themselves.

use super::rows::for_rows;
use crate::device::Device;

/// Rows of a thread at least.
const LEAST: usize = 256;

/// A column that was not chosen.
pub const NOWHERE: u32 = u32::MAX;

/// What becomes of a row's chosen values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Among {
    /// Nothing.
    Plain,
    /// They are divided by their sum.
    Normalised,
    /// Their softmax.
    Softmax,
}

impl Among {
    /// In place.
    fn apply(self, y: &mut [f32], index: &[u32]) {
        match self {
            Among::Plain => {}
            Among::Normalised => {
                let sum = y.iter().sum::<f32>() + TINY;
                y.iter_mut().for_each(|y| *y /= sum);
            }
            Among::Softmax => softmax_of_chosen(y, index),
        }
    }

    /// From the chosen values `x`, the results `y` and their gradient `g`, which becomes the values' gradient.
    fn apply_back(self, x: &[f32], y: &[f32], g: &mut [f32]) {
        match self {
            Among::Plain => {}
            Among::Normalised => {
                let (sum, inner) = (x.iter().sum::<f32>() + TINY, inner(y, g));
                g.iter_mut().for_each(|g| *g = (*g - inner) / sum);
            }
            Among::Softmax => {
                let inner = inner(y, g);
                g.iter_mut().zip(y).for_each(|(g, y)| *g = y * (*g - inner));
            }
        }
    }
}

/// A score as scores are compared: NaN is minus infinity, and both zeros are one number.
pub fn comparable(x: f32) -> f32 {
    if x.is_nan() { f32::NEG_INFINITY } else { x + 0.0 }
}

pub(crate) fn top_k(device: &Device, chosen: &mut [u32], scores: &[f32], k: usize, width: usize) {
    for_rows(device, chosen, k, LEAST, |first, run| {
        let lines = scores[first * width..].chunks_exact(width);
        run.chunks_exact_mut(k).zip(lines).for_each(|(best, scores)| largest_of(scores, best, |_| true));
    });
}

/// The indices of the largest of those that are allowed, the largest first and equal ones in their order; [`NOWHERE`] where
/// there are no more. Each moves forward past what is less.
pub fn largest_of(scores: &[f32], best: &mut [u32], allowed: impl Fn(usize) -> bool) {
    let mut found = 0;
    for at in (0..scores.len()).filter(|&at| allowed(at)) {
        let score = comparable(scores[at]);
        let is_less = |than: u32| comparable(scores[than as usize]) < score;
        if found == best.len() && !best.last().is_some_and(|&last| is_less(last)) {
            continue;
        }
        let mut place = found.min(best.len() - 1);
        found = (found + 1).min(best.len());
        while place > 0 && is_less(best[place - 1]) {
            best[place] = best[place - 1];
            place -= 1;
        }
        best[place] = at as u32;
    }
    best[found..].fill(NOWHERE);
}

pub(crate) fn select(
    _: &Device,
    chosen: &mut [f32],
    y: &mut [f32],
    x: &[f32],
    index: &[u32],
    k: usize,
    width: usize,
    among: Among,
) {
    for (route, (slot, &column)) in chosen.iter_mut().zip(index).enumerate() {
        *slot = if column == NOWHERE { 0.0 } else { x[route / k * width + column as usize] };
    }
    y.copy_from_slice(chosen);
    y.chunks_exact_mut(k).zip(index.chunks_exact(k)).for_each(|(y, index)| among.apply(y, index));
}

pub(crate) fn select_back(
    _: &Device,
    dx: &mut [f32],
    chosen: &[f32],
    y: &[f32],
    g: &[f32],
    index: &[u32],
    k: usize,
    width: usize,
    among: Among,
    accumulate: bool,
) {
    if !accumulate {
        dx.fill(0.0);
    }
    let mut line = vec![0.0; k];
    for (r, dx) in dx.chunks_exact_mut(width).enumerate() {
        let at = r * k..(r + 1) * k;
        line.copy_from_slice(&g[at.clone()]);
        among.apply_back(&chosen[at.clone()], &y[at.clone()], &mut line);
        for (&column, g) in index[at].iter().zip(&line).filter(|(column, _)| **column != NOWHERE) {
            dx[column as usize] += g;
        }
    }
}

/// Keeps a sum of nothing from dividing: far below what rounding leaves of a sum of probabilities.
const TINY: f32 = 1e-20;

fn inner(y: &[f32], g: &[f32]) -> f32 {
    y.iter().zip(g.iter()).map(|(y, g)| y * g).sum()
}

fn softmax_of_chosen(y: &mut [f32], index: &[u32]) {
    let chosen = |(y, index): (&f32, &u32)| if *index == NOWHERE { f32::NEG_INFINITY } else { *y };
    let top = y.iter().zip(index).map(chosen).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (y, &index) in y.iter_mut().zip(index) {
        *y = if index == NOWHERE { 0.0 } else { (*y - top).exp() };
        sum += *y;
    }
    if sum > 0.0 {
        y.iter_mut().for_each(|y| *y /= sum);
    }
}
