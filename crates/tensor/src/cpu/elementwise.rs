//! Sums, factors, dropout, weighted sums to a scalar.

use super::rows::{for_rows, map, zip};
use super::stored::{Stored, StoredRef, as_numbers};
use crate::device::Device;
use crate::draws::Draws;
use crate::row_ids::RowIds;

pub(crate) fn sum(device: &Device, out: Stored, x: StoredRef, y: StoredRef) {
    as_numbers!(Stored(out), StoredRef(x), StoredRef(y) => zip(
        device,
        out,
        x,
        y,
        false,
        #[inline(always)]
        |x, y| x + y,
    ));
}

pub(crate) fn scale(device: &Device, out: &mut [f32], x: &[f32], factor: f32, accumulate: bool) {
    map(
        device,
        out,
        x,
        accumulate,
        #[inline(always)]
        |x| x * factor,
    );
}

pub(crate) fn scale_by(device: &Device, out: &mut [f32], x: &[f32], factor: &[f32], accumulate: bool) {
    scale(device, out, x, factor[0], accumulate);
}

pub(crate) fn scale_in_place(device: &Device, x: &mut [f32], factor: &[f32], scale: f32) {
    let alpha = scale * factor[0];
    for_rows(
        device,
        x,
        1,
        1 << 14,
        #[inline(always)]
        |_, run| run.iter_mut().for_each(|x| *x *= alpha),
    );
}

pub(crate) fn multiply(device: &Device, out: &mut [f32], x: &[f32], y: &[f32], accumulate: bool) {
    zip(
        device,
        out,
        x,
        y,
        accumulate,
        #[inline(always)]
        |x, y| x * y,
    );
}

/// Numbers that are drawn at once.
const DRAWN: usize = 1024;

pub(crate) fn drop_elements(
    device: &Device,
    out: &mut [f32],
    x: &[f32],
    p: f32,
    draws: Draws,
    rows: &RowIds,
    accumulate: bool,
) {
    let keep = 1.0 / (1.0 - p);
    let numbered = rows.elements(x.len() / rows.len().max(1));
    for_rows(
        device,
        out,
        1,
        4096,
        #[inline(always)]
        |first, run| {
            let mut drawn = [0.0; DRAWN];
            for elements in &numbered {
                let start = elements.range.start.clamp(first, first + run.len());
                let end = elements.range.end.clamp(start, first + run.len());
                let number = elements.first + start.saturating_sub(elements.range.start) as u64;
                let parts = run[start - first..end - first].chunks_mut(DRAWN).zip(x[start..end].chunks(DRAWN));
                for (number, (out, x)) in (number..).step_by(DRAWN).zip(parts) {
                    draws.uniforms(number, &mut drawn[..out.len()]);
                    for ((o, x), drawn) in out.iter_mut().zip(x).zip(&drawn) {
                        let kept = if *drawn < p { 0.0 } else { x * keep };
                        *o = if accumulate { *o + kept } else { kept };
                    }
                }
            }
        },
    );
}

pub(crate) fn dot(_: &Device, out: &mut [f32], x: &[f32], y: &[f32]) {
    let total: f64 = x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
    out[0] = total as f32;
}
