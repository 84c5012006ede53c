//! Rotary positions: by how much the pairs of a head turn from token to token.

use std::f64::consts::TAU;
use std::sync::Arc;

use guildhall_tensor::ops::{rotary_speeds, turning_tables};
use guildhall_tensor::{Device, Index, Tensor};

use super::{Positions, RotaryScaling, Sharpening, Sizes};

/// Cosines and sines for these positions, if the model rotates queries and keys.
pub(super) fn tables(device: &Arc<Device>, positions: Index, sizes: &Sizes) -> Option<[Tensor; 2]> {
    let Positions::Rotary { theta, scaling } = sizes.blueprint().positions else { return None };
    let factor = match scaling {
        RotaryScaling::Yarn { factor, sharpening: Sharpening::Turned, .. } => growth(factor),
        RotaryScaling::Yarn { sharpening: Sharpening::Scores, .. }
        | RotaryScaling::Llama { .. }
        | RotaryScaling::None => 1.0,
    };
    Some(turning_tables(device, positions, &speeds(sizes.heads().rotary_dim(), theta, scaling), factor))
}

/// Factor on products of queries and keys, if it is another than the usual one.
pub(super) fn score_scale(sizes: &Sizes) -> Option<f32> {
    let heads = sizes.heads();
    match sizes.blueprint().positions {
        _ if !heads.scaled => Some(1.0),
        Positions::Rotary { scaling: RotaryScaling::Yarn { factor, sharpening: Sharpening::Scores, .. }, .. } => {
            Some((growth(factor).powi(2) / (heads.head_dim as f64).sqrt()) as f32)
        }
        _ => None,
    }
}

/// By how much each pair of so many numbers turns from one position to the next.
fn speeds(dim: usize, theta: f32, scaling: RotaryScaling) -> Vec<f64> {
    let plain = rotary_speeds(dim, theta);
    let (factor, shares): (f32, Vec<f64>) = match scaling {
        RotaryScaling::None => return plain,
        RotaryScaling::Yarn { factor, pretrained, fast, slow, truncates, .. } => {
            // The pair that turns so often within the context of pretraining.
            let pair = |turns: f32| {
                let base = f64::from(theta).ln();
                dim as f64 * (pretrained as f64 / (f64::from(turns) * TAU)).ln() / (2.0 * base)
            };
            let (first, last) = (pair(fast), pair(slow));
            let (first, last) = if truncates { (first.floor(), last.ceil()) } else { (first, last) };
            let (first, last) = (first.max(0.0), last.min(dim as f64 - 1.0));
            let width = if first == last { 0.001 } else { last - first };
            (factor, (0..plain.len()).map(|pair| (pair as f64 - first) / width).collect())
        }
        RotaryScaling::Llama { factor, pretrained, fast, slow } => {
            let (fast, slow) = (f64::from(fast), f64::from(slow));
            let share = |speed: &f64| (fast - pretrained as f64 * speed / TAU) / (fast - slow);
            (factor, plain.iter().map(share).collect())
        }
    };
    let stretched = |(speed, share): (f64, f64)| {
        let share = share.clamp(0.0, 1.0);
        speed / f64::from(factor) * share + speed * (1.0 - share)
    };
    plain.into_iter().zip(shares).map(stretched).collect()
}

/// YaRN's m.
fn growth(factor: f32) -> f64 {
    0.1 * f64::from(factor.max(1.0)).ln() + 1.0
}
