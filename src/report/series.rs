//! Curves: what is known of a value step by step, smoothed, and thinned to what a screen can show.

/// A step and the value it had.
pub(super) type Point = (u64, f64);

/// Neighbouring points drawn as one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bin {
    pub(super) first: u64,
    pub(super) last: u64,
    /// Of the finite values; `None` if there are none.
    pub(super) value: Option<Band>,
    /// Some value was not finite: the line is interrupted here.
    pub(super) broken: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Band {
    pub(super) low: f64,
    pub(super) mean: f64,
    pub(super) high: f64,
}

impl Bin {
    /// The step at which the bin is drawn.
    pub(super) fn step(&self) -> f64 {
        (self.first as f64 + self.last as f64) / 2.0
    }
}

/// At most `bins_max` bins of equally many points; each point its own where they fit.
pub(super) fn bins(points: &[Point], bins_max: usize) -> Vec<Bin> {
    let width = points.len().div_ceil(bins_max).max(1);
    points.chunks(width).map(bin).collect()
}

fn bin(points: &[Point]) -> Bin {
    let finite = || points.iter().map(|point| point.1).filter(|value| value.is_finite());
    let number = finite().count();
    let value = (number > 0).then(|| Band {
        low: finite().fold(f64::INFINITY, f64::min),
        // Divided first: the sum of a few huge values would overflow.
        mean: finite().map(|value| value / number as f64).sum(),
        high: finite().fold(f64::NEG_INFINITY, f64::max),
    });
    Bin { first: points[0].0, last: points[points.len() - 1].0, value, broken: number < points.len() }
}

/// Smallest and largest finite value.
pub(super) fn range<'a>(points: impl Iterator<Item = &'a Point>) -> Option<(f64, f64)> {
    let finite = points.map(|point| point.1).filter(|value| value.is_finite());
    finite.fold(None, |range, value| {
        let (low, high) = range.unwrap_or((value, value));
        Some((value.min(low), value.max(high)))
    })
}

/// A smooth version of a curve; values that are not finite stay as gaps and weigh nothing.
///
/// An exponential mean run forwards and one run backwards, averaged, so that the line does not lag behind
/// a falling loss as a one-sided mean does.
pub(super) fn smooth(points: &[Point]) -> Vec<Point> {
    let half_life = (points.len() as f64 / 80.0).max(1.0);
    let keep = 0.5f64.powf(1.0 / half_life);
    let forwards = exponential_mean(points.iter(), keep);
    let mut backwards = exponential_mean(points.iter().rev(), keep);
    backwards.reverse();
    let means = forwards.into_iter().zip(backwards).map(|(before, after)| (before + after) / 2.0);
    points
        .iter()
        .zip(means)
        .map(|(&(step, value), mean)| (step, if value.is_finite() { mean } else { value }))
        .collect()
}

fn exponential_mean<'a>(points: impl Iterator<Item = &'a Point>, keep: f64) -> Vec<f64> {
    let (mut sum, mut weight) = (0.0, 0.0);
    let mean = |&(_, value): &Point| {
        if value.is_finite() {
            sum = sum * keep + value * (1.0 - keep);
            weight = weight * keep + (1.0 - keep);
        }
        // Without the division the first values would be drawn towards 0.
        if weight > 0.0 { sum / weight } else { f64::NAN }
    };
    points.map(mean).collect()
}

/// Neighbouring values that are not finite.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Blot {
    pub(super) first: u64,
    pub(super) last: u64,
    /// The first of them: `NaN`, `inf` or `-inf`.
    pub(super) value: String,
}

/// All runs of values that are not finite.
pub(super) fn blots(points: &[Point]) -> Vec<Blot> {
    let runs = points.chunk_by(|before, after| before.1.is_finite() == after.1.is_finite());
    let broken = runs.filter(|run| !run[0].1.is_finite());
    broken.map(|run| Blot { first: run[0].0, last: run[run.len() - 1].0, value: run[0].1.to_string() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp(number: u64) -> Vec<Point> {
        (1..=number).map(|step| (step, step as f64)).collect()
    }

    #[test]
    fn few_points_stay_and_many_become_bands() {
        assert_eq!(bins(&ramp(5), 600).len(), 5);
        assert_eq!(bins(&[], 600), []);
        let thinned = bins(&ramp(100_000), 600);
        assert!((500..=600).contains(&thinned.len()));
        let spread = thinned[0].value.unwrap();
        assert_eq!((spread.low, spread.high), (1.0, 167.0));
        assert!((spread.mean - 84.0).abs() < 1e-9, "{}", spread.mean);
        assert_eq!(thinned.last().unwrap().last, 100_000);
    }

    #[test]
    fn values_that_are_not_finite_break_a_bin_without_spoiling_it() {
        let points = [(1, 2.0), (2, f64::NAN), (3, f64::INFINITY), (4, f64::NAN)];
        let halves = bins(&points, 2);
        assert_eq!(halves[0].value, Some(Band { low: 2.0, mean: 2.0, high: 2.0 }));
        assert!(halves[0].broken && halves[1].broken);
        assert_eq!(halves[1].value, None);
        assert_eq!(blots(&points), [Blot { first: 2, last: 4, value: "NaN".to_owned() }]);
    }

    #[test]
    fn smoothing_keeps_constants_and_gaps() {
        let points = [(1, 3.0), (2, f64::NAN), (3, 3.0), (4, 3.0)];
        let smoothed = smooth(&points);
        assert!(smoothed[1].1.is_nan());
        for index in [0, 2, 3] {
            assert!((smoothed[index].1 - 3.0).abs() < 1e-12, "{smoothed:?}");
        }
    }

    #[test]
    fn smoothing_does_not_lag() {
        let smoothed = smooth(&ramp(1001));
        assert!((smoothed[500].1 - 501.0).abs() < 1e-6, "{:?}", smoothed[500]);
    }
}
