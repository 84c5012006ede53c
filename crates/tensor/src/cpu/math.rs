//! Elementary functions written so that a loop over them becomes vector code: no branches, no calls.

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts: the first has few enough bits that `n * LN2_HIGH` is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// 1.5 * 2^23: adding it rounds to an integer and leaves that integer in the low bits.
const ROUND: f32 = 12_582_912.0;

/// e^x, relative error under 2e-7; below -87 it stays at e^-87 (1.6e-38), above 88 at e^88.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    // The Taylor series to r^7 on |r| <= ln(2)/2: its first neglected term is under 6e-9.
    let mut p = 1.0f32 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p.mul_add(r, c);
    }
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    p * f32::from_bits(exponent)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Hyperbolic tangent, absolute error under 2e-7.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

/// GELU in its tanh form (Hendrycks and Gimpel 2016), as GPT-2 uses it.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    let t = tanh(SQRT_2_OVER_PI * x * (GELU_CUBIC * x).mul_add(x, 1.0));
    0.5 * x * (1.0 + t)
}

/// The derivative of [`gelu`].
#[inline(always)]
pub(crate) fn gelu_slope(x: f32) -> f32 {
    let square = x * x;
    let t = tanh(SQRT_2_OVER_PI * x * GELU_CUBIC.mul_add(square, 1.0));
    let inner = SQRT_2_OVER_PI * (3.0 * GELU_CUBIC).mul_add(square, 1.0);
    0.5 * ((1.0 + t) + x * (1.0 - t * t) * inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, absolute: f64, relative: f64) {
        for i in -20_000..=20_000 {
            let x = i as f32 / 1000.0;
            let (got, want) = (f64::from(f(x)), exact(f64::from(x)));
            assert!((got - want).abs() <= absolute + relative * want.abs(), "at {x}: {got} instead of {want}");
        }
    }

    #[test]
    fn functions_agree_with_f64() {
        check(exp, f64::exp, 0.0, 2e-7);
        check(tanh, f64::tanh, 2e-7, 0.0);
        check(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 0.0, 3e-7);
    }

    #[test]
    fn exp_keeps_nan_and_stays_finite() {
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::INFINITY).is_finite() && exp(f32::NEG_INFINITY) < 2e-38);
    }
}
