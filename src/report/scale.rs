//! Axes: from data values to places between 0 and 1, and the ticks between.

use super::format;

/// Ticks a linear axis has at most.
const TICKS: f64 = 6.0;
/// A log axis is worth its strangeness beyond this ratio of largest to smallest.
const LOG_FROM_RATIO: f64 = 100.0;
/// Beyond it, differences of two values overflow.
const LARGEST: f64 = 1e300;
/// Below it, digits are lost and powers of ten become 0.
const SMALLEST: f64 = 1e-290;

/// Maps the values of one axis to 0 (low end) to 1 (high end).
#[derive(Clone, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    /// Values that get a label, ascending.
    pub(super) ticks: Vec<f64>,
    /// Distance of two ticks of a linear axis.
    step: f64,
}

impl Scale {
    /// An axis of integers that ends exactly at `low` and `high`.
    pub(super) fn steps(low: u64, high: u64) -> Scale {
        let (low, high) = (low as f64, high as f64);
        let (low, high) = if low == high { (low - 1.0, high + 1.0) } else { (low, high) };
        let step = nice_step(high - low).max(1.0);
        let ticks = multiples(step, (low / step).ceil(), (high / step).floor());
        Scale { low, high, is_log: false, ticks, step }
    }

    /// An axis of integers that each have a width of one, for pictures made of cells.
    pub(super) fn cells(first: u64, last: u64) -> Scale {
        let step = nice_step((last - first) as f64).max(1.0);
        let ticks = multiples(step, (first as f64 / step).ceil(), (last as f64 / step).floor());
        Scale { low: first as f64 - 0.5, high: last as f64 + 0.5, is_log: false, ticks, step }
    }

    /// A linear axis from a tick at or below `low` to one at or above `high`.
    pub(super) fn linear(low: f64, high: f64) -> Scale {
        let (low, high) = widened(low, high);
        let step = nice_step(high - low);
        // The slack keeps 0.3 / 0.1 = 2.9999999999999996 from adding a tick.
        let (first, last) = ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
        Scale { low: first * step, high: last * step, is_log: false, ticks: multiples(step, first, last), step }
    }

    /// A logarithmic axis between 1, 2 or 5 times powers of ten; both ends must be positive.
    pub(super) fn log(low: f64, high: f64) -> Scale {
        assert!(low > 0.0 && low <= high, "a log axis from {low} to {high}");
        let (low, high) = (nice_floor(low.max(SMALLEST)), nice_ceil(high.min(LARGEST)));
        let (first, last) = (low.log10().ceil() as i32, high.log10().floor() as i32);
        let stride = ((last - first) as usize / TICKS as usize) + 1;
        let ticks = (first..=last).step_by(stride).map(power_of_ten).collect();
        Scale { low, high, is_log: true, ticks, step: 1.0 }
    }

    /// Linear, unless `values` are positive and span more than two decades.
    pub(super) fn fitting(low: f64, high: f64) -> Scale {
        if low > 0.0 && high / low > LOG_FROM_RATIO { Scale::log(low, high) } else { Scale::linear(low, high) }
    }

    /// Where `value` lies, clamped to the axis.
    pub(super) fn place(&self, value: f64) -> f64 {
        let place = if self.is_log {
            (value.max(self.low).log10() - self.low.log10()) / (self.high.log10() - self.low.log10())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        place.clamp(0.0, 1.0)
    }

    pub(super) fn label(&self, tick: f64) -> String {
        if self.is_log { format::tick_log(tick) } else { format::tick(tick, self.step, self.largest()) }
    }

    /// Both ends of the axis.
    pub(super) fn ends(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    pub(super) fn is_log(&self) -> bool {
        self.is_log
    }

    fn largest(&self) -> f64 {
        self.low.abs().max(self.high.abs())
    }
}

/// Ends that are finite, ordered and apart, even around a constant.
fn widened(low: f64, high: f64) -> (f64, f64) {
    let (low, high) = (low.clamp(-LARGEST, LARGEST), high.clamp(-LARGEST, LARGEST));
    let size = low.abs().max(high.abs());
    if size < SMALLEST {
        (0.0, 1.0)
    } else if high - low > size * 1e-9 {
        (low, high)
    } else {
        (low - size * 0.1, high + size * 0.1)
    }
}

/// 1, 2 or 5 times a power of ten, so that a span has at most [`TICKS`] of them.
fn nice_step(span: f64) -> f64 {
    nice_ceil(span / TICKS)
}

fn nice_ceil(value: f64) -> f64 {
    let power = power_of_ten(value.log10().floor() as i32);
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= value * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

fn nice_floor(value: f64) -> f64 {
    let power = power_of_ten(value.log10().floor() as i32);
    let factor = [5.0, 2.0, 1.0].into_iter().find(|factor| factor * power <= value * (1.0 + 1e-9));
    factor.unwrap_or(1.0) * power
}

/// Parsed, because `powi` of a negative exponent is off by an ulp and labels would show it.
fn power_of_ten(exponent: i32) -> f64 {
    format!("1e{exponent}").parse().expect("an integer exponent")
}

fn multiples(step: f64, first: f64, last: f64) -> Vec<f64> {
    let number = (last - first) as usize;
    (0..=number).map(|index| (first + index as f64) * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale) -> Vec<String> {
        scale.ticks.iter().map(|&tick| scale.label(tick)).collect()
    }

    #[test]
    fn linear_ticks_are_round_and_enclose_the_data() {
        let check = |low, high, expected: &[&str]| {
            let scale = Scale::linear(low, high);
            assert_eq!(labels(&scale), expected, "{low} to {high}");
            let (start, end) = scale.ends();
            assert!(start <= low && high <= end, "{low} to {high} in {start} to {end}");
        };
        check(0.0, 1.0, &["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        check(2.1, 8.4, &["2", "4", "6", "8", "10"]);
        check(0.1, 0.3, &["0.1", "0.15", "0.2", "0.25", "0.3"]);
        check(0.0, 3e-4, &["0", "5e-5", "1e-4", "1.5e-4", "2e-4", "2.5e-4", "3e-4"]);
        check(0.0, 25_000.0, &["0", "5 k", "10 k", "15 k", "20 k", "25 k"]);
        check(-1.0, 1.0, &["-1", "-0.5", "0", "0.5", "1"]);
    }

    #[test]
    fn constants_and_extremes_still_make_an_axis() {
        for (low, high) in
            [(0.0, 0.0), (3e-4, 3e-4), (-7.0, -7.0), (f64::MIN, f64::MAX), (0.0, 1e-320), (1.0, 1.0 + 1e-15)]
        {
            let scale = Scale::linear(low, high);
            assert!((2..=12).contains(&scale.ticks.len()), "{low} to {high}: {:?}", scale.ticks);
            assert!(scale.ticks.iter().all(|tick| tick.is_finite()), "{low} to {high}");
            assert!((0.0..=1.0).contains(&scale.place(low)), "{low} to {high}");
        }
    }

    #[test]
    fn steps_are_whole_and_end_with_the_data() {
        assert_eq!(Scale::steps(1, 1).ticks, [0.0, 1.0, 2.0]);
        assert_eq!(Scale::steps(1, 4).ticks, [1.0, 2.0, 3.0, 4.0]);
        let long = Scale::steps(1, 100_000);
        assert_eq!(labels(&long), ["20 k", "40 k", "60 k", "80 k", "100 k"]);
        assert_eq!((long.place(1.0), long.place(100_000.0)), (0.0, 1.0));
    }

    #[test]
    fn cells_are_labelled_in_their_middle() {
        assert_eq!(Scale::cells(7, 7).ticks, [7.0]);
        assert_eq!(Scale::cells(7, 7).place(7.0), 0.5);
        assert_eq!(Scale::cells(1, 2).place(1.0), 0.25);
        assert_eq!(labels(&Scale::cells(1, 1000)), ["200", "400", "600", "800", "1000"]);
    }

    #[test]
    fn log_axes_begin_beyond_two_decades() {
        assert!(!Scale::fitting(0.1, 10.0).is_log());
        assert!(!Scale::fitting(0.0, 1e6).is_log());
        let scale = Scale::fitting(0.03, 700.0);
        assert_eq!(scale.ends(), (0.02, 1000.0));
        assert_eq!(labels(&scale), ["0.1", "1", "10", "100", "1 k"]);
        assert_eq!(scale.place(-1.0), 0.0);
        let extreme = Scale::fitting(f64::from_bits(1), f64::MAX);
        assert!(extreme.ticks.iter().all(|tick| (0.0..=1.0).contains(&extreme.place(*tick))), "{extreme:?}");
        let wide = Scale::fitting(1e-30, 1e30);
        assert!((3..=8).contains(&wide.ticks.len()), "{:?}", wide.ticks);
    }
}
