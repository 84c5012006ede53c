//! What half the bits cost, measured: the errors of one rank that rounds again and again in other places, and how large the
//! next error may be before it is no rounding.
//!
//! A layout in half the bits is one more sample of the same noise, and may err as far as a prediction from the samples of one
//! rank says. Where something that is rounded travels, it stores values that one rank does not: a sum's parts beside the sum,
//! so at most twice as many. Independent errors add in squares: the square root of two. How the parts are rounded hangs on
//! where they are cut, which no sample of one rank shows: half a unit in the last place each, again in squares. Where nothing
//! of it travels there are no parts; twice remains, for weights that begin at zero, which no sample moves, may all be rounded
//! alike in the samples.

/// Samples that are taken.
pub(super) const SAMPLES: u64 = 16;

/// Student's t with one degree of freedom less than samples exceeds it once in ten million: a search compares some tens of
/// thousands of numbers, most of them with each other's errors.
const QUANTILE: f64 = 8.99;

/// Eight bits, rounded to the nearest.
const HALF_UNIT: f64 = 1.0 / 512.0;

/// Of the largest error of a sample: what may be rounded otherwise where nothing is rounded besides. One value in sixteen,
/// in squares; another order of sums in f32 moves one in some thousands over to its neighbour.
const OTHERWISE: f64 = 0.25;

/// By what is compared, the errors of the samples: mean and standard deviation.
#[derive(Clone, Debug, Default)]
pub(super) struct Noise(Vec<(f64, f64)>);

impl Noise {
    /// Of samples that compare the same things.
    pub(super) fn of(samples: &[Vec<f64>]) -> Noise {
        let things = samples.iter().map(Vec::len).min().unwrap_or(0);
        let of_one = |thing: usize| {
            let errors = samples.iter().map(|errors| errors[thing]);
            let mean = errors.clone().sum::<f64>() / samples.len() as f64;
            let squares = errors.map(|error| (error - mean).powi(2)).sum::<f64>();
            (mean, (squares / (samples.len() as f64 - 1.0)).sqrt())
        };
        Noise((0..things).map(of_one).collect())
    }

    /// The largest error of a layout that is still rounding, where so many parts of sums are rounded besides.
    pub(super) fn allowed(&self, thing: usize, parts: usize) -> f64 {
        std::f64::consts::SQRT_2 * self.of_the_next(thing) + HALF_UNIT * (parts as f64).sqrt()
    }

    /// How far two runs may be apart that round the same values, made of sums in other orders.
    pub(super) fn apart(&self, thing: usize) -> f64 {
        OTHERWISE * self.of_the_next(thing)
    }

    /// The largest error of one more sample.
    fn of_the_next(&self, thing: usize) -> f64 {
        // What only one of the two has is compared with nothing, and wrong by itself.
        let (mean, deviation) = self.0.get(thing).copied().unwrap_or_default();
        mean + QUANTILE * deviation * (1.0 + 1.0 / SAMPLES as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guildhall_tensor::{Draws, Purpose};

    /// The tail of Student's t by its density, which is elementary up to a factor that the whole fixes.
    #[test]
    fn the_quantile_is_students() {
        let freedom = SAMPLES as f64 - 1.0;
        let density = |t: f64| (1.0 + t * t / freedom).powf(-(freedom + 1.0) / 2.0);
        let integral = |from: f64, to: f64| {
            let step = (to - from) / 1e6;
            (0..1_000_000).map(|i| density(from + (f64::from(i) + 0.5) * step) * step).sum::<f64>()
        };
        let tail = integral(QUANTILE, 2000.0) / (2.0 * integral(0.0, 2000.0));
        assert!((tail * 1e7 - 1.0).abs() < 0.05, "{tail:e}");
    }

    /// Of a thousand further errors of the same kind none is called wrong, and one ten times as large is.
    #[test]
    fn noise_is_allowed_and_what_exceeds_it_is_not() {
        let draws = Draws::new(3, Purpose::Test, 0, 0);
        let error = |index: u64| f64::from(draws.normal(index)).abs();
        let samples: Vec<Vec<f64>> = (0..SAMPLES).map(|k| vec![error(2 * k), 5.0 + 0.1 * error(2 * k + 1)]).collect();
        let noise = Noise::of(&samples);
        assert!((100..1100).all(|index| error(index) < noise.allowed(0, 0)));
        assert!((100..1100).all(|index| 5.0 + 0.1 * error(index) < noise.allowed(1, 0)));
        assert!(noise.allowed(0, 1) < 10.0, "ten standard deviations: {}", noise.allowed(0, 1));
        assert!(noise.allowed(1, 1) < 9.0, "what varies little is allowed little more: {}", noise.allowed(1, 1));
        assert_eq!(noise.allowed(2, 4), 2.0 * HALF_UNIT, "what never varied may be rounded");
        assert_eq!(noise.allowed(2, 0), 0.0, "but not where nothing is");
    }
}
