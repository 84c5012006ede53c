//! The similarity above which two tokens are condensed: fixed, or following the loss.

use super::may_share;

/// The rule that gives the threshold of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    Static(f64),
    /// `1 / (1 + exp(l))` with `l = (first - last) / first`, as printed (4.4). It starts at 0.5 and falls with the loss.
    Paper,
    /// `end + (start - end) 2 / (1 + exp(slope l))` with the smoothed loss in `l`; `start` during the first `warmup`
    /// steps, and while the loss is above the first.
    Adaptive {
        start: f64,
        end: f64,
        slope: f64,
        warmup: u64,
    },
}

/// The losses of a run that thresholds follow, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossTrend {
    /// Of the first step.
    pub first: f64,
    /// Of the last step.
    pub last: f64,
    /// Exponential moving average.
    pub smoothed: f64,
}

/// The weight of a new loss in the moving average: about ten steps are averaged.
const SMOOTHING: f64 = 0.1;

impl LossTrend {
    /// The trend after a step with this loss.
    pub fn after(trend: Option<LossTrend>, loss: f64) -> LossTrend {
        match trend {
            None => LossTrend { first: loss, last: loss, smoothed: loss },
            Some(trend) => {
                LossTrend { last: loss, smoothed: trend.smoothed + SMOOTHING * (loss - trend.smoothed), ..trend }
            }
        }
    }

    /// First, last, smoothed.
    pub fn numbers(self) -> [f64; 3] {
        [self.first, self.last, self.smoothed]
    }

    /// The inverse of [`LossTrend::numbers`].
    pub fn of_numbers([first, last, smoothed]: [f64; 3]) -> LossTrend {
        LossTrend { first, last, smoothed }
    }

    /// The share of the first loss that training has removed.
    fn fallen(&self, loss: f64) -> f64 {
        if self.first > 0.0 { (self.first - loss) / self.first } else { 0.0 }
    }
}

impl Threshold {
    /// Whether any rows can be so similar.
    pub fn is_reachable(&self) -> bool {
        !matches!(self, Threshold::Static(threshold) if !may_share(*threshold))
    }

    /// The threshold of `step` (from 1), when `trend` says what the losses were before it.
    pub fn at(&self, step: u64, trend: Option<&LossTrend>) -> f64 {
        match *self {
            Threshold::Static(threshold) => threshold,
            Threshold::Paper => 1.0 / (1.0 + trend.map_or(0.0, |trend| trend.fallen(trend.last)).exp()),
            Threshold::Adaptive { start, warmup, .. } if step <= warmup => start,
            Threshold::Adaptive { start, end, slope, .. } => {
                let fallen = trend.map_or(0.0, |trend| trend.fallen(trend.smoothed)).max(0.0);
                end + (start - end) * 2.0 / (1.0 + (slope * fallen).exp())
            }
        }
    }

    /// Whether it follows the loss.
    pub fn follows_the_loss(&self) -> bool {
        !matches!(self, Threshold::Static(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_formula_starts_at_a_half_and_falls() {
        let trend = |last| LossTrend { first: 8.0, last, smoothed: 7.0 };
        assert_eq!(Threshold::Paper.at(1, None), 0.5);
        assert_eq!(Threshold::Paper.at(2, Some(&trend(8.0))), 0.5);
        // The least that the formula gives, at a loss of 0: 1 / (1 + e).
        assert!((Threshold::Paper.at(9, Some(&trend(0.0))) - 0.268_941_421).abs() < 1e-9);
    }

    #[test]
    fn the_adaptive_threshold_goes_from_start_to_end_with_the_smoothed_loss() {
        let adaptive = Threshold::Adaptive { start: 0.9, end: 0.6, slope: 4.0, warmup: 3 };
        let trend = |smoothed| Some(LossTrend { first: 8.0, last: 1.0, smoothed });
        assert_eq!([adaptive.at(1, None), adaptive.at(3, trend(2.0).as_ref())], [0.9, 0.9]);
        assert_eq!(adaptive.at(4, trend(8.0).as_ref()), 0.9);
        // Half of the loss is gone: 2 / (1 + e^2) of the range is left.
        let half = 0.6 + 0.3 * 2.0 / (1.0 + 2.0f64.exp());
        assert!((adaptive.at(4, trend(4.0).as_ref()) - half).abs() < 1e-12);
        let rising = Threshold::Adaptive { start: 0.6, end: 0.9, slope: 4.0, warmup: 0 };
        assert!((rising.at(4, trend(4.0).as_ref()) - (1.5 - half)).abs() < 1e-12);
        // A loss above the first leaves it at its start.
        assert_eq!(adaptive.at(4, trend(9.0).as_ref()), 0.9);
    }

    #[test]
    fn a_trend_smooths_what_follows_the_first_loss() {
        let first = LossTrend::after(None, 4.0);
        assert_eq!(first, LossTrend { first: 4.0, last: 4.0, smoothed: 4.0 });
        assert_eq!(LossTrend::after(Some(first), 2.0), LossTrend { first: 4.0, last: 2.0, smoothed: 3.8 });
    }
}
