//! Rotary positions: by how much the pairs of a head turn from token to token.

use std::f64::consts::TAU;
use std::sync::Arc;

use guildhall_tensor::ops::{rotary_speeds, turning_tables};
use guildhall_tensor::{Device, Index, Tensor};

use super::{Positions, RotaryScaling, Sizes};

/// Cosines and sines for these positions, if the model rotates queries and keys.
pub(super) fn tables(device: &Arc<Device>, positions: Index, sizes: &Sizes) -> Option<[Tensor; 2]> {
    let Positions::Rotary { theta, scaling } = sizes.blueprint().positions else { return None };
    let head_dim = sizes.heads().head_dim;
    Some(turning_tables(device, positions, &speeds(head_dim, theta, scaling), magnitude(scaling)))
}

/// By how much each pair turns from one position to the next.
fn speeds(head_dim: usize, theta: f32, scaling: RotaryScaling) -> Vec<f64> {
    let plain = rotary_speeds(head_dim, theta);
    let RotaryScaling::Yarn { factor, pretrained, fast, slow, truncates, .. } = scaling else { return plain };
    // The pair that turns so often within the context of pretraining.
    let pair = |turns: f32| {
        let base = f64::from(theta).ln();
        head_dim as f64 * (pretrained as f64 / (f64::from(turns) * TAU)).ln() / (2.0 * base)
    };
    let (first, last) = (pair(fast), pair(slow));
    let (first, last) = if truncates { (first.floor(), last.ceil()) } else { (first, last) };
    let (first, last) = (first.max(0.0), last.min(head_dim as f64 - 1.0));
    let width = if first == last { 0.001 } else { last - first };
    let stretched = |(pair, speed): (usize, f64)| {
        let share = ((pair as f64 - first) / width).clamp(0.0, 1.0);
        speed / f64::from(factor) * share + speed * (1.0 - share)
    };
    plain.into_iter().enumerate().map(stretched).collect()
}

/// The factor on cosines and sines.
fn magnitude(scaling: RotaryScaling) -> f64 {
    match scaling {
        RotaryScaling::Yarn { factor, grows: true, .. } => 0.1 * f64::from(factor.max(1.0)).ln() + 1.0,
        RotaryScaling::Yarn { .. } | RotaryScaling::None => 1.0,
    }
}
