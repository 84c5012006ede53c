//! What a key may be, and what to say where it is not: ranges of numbers, the nearest values that fit, and findings.

use std::fmt;

use toml::Value;

/// Far above any model there is; keeps products of three sizes within 64 bits.
pub const SIZE_MAX: i64 = 1 << 20;

/// The values one number, or each of a list, may take; or true and false.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bounds {
    Truth,
    Whole {
        low: i64,
        high: i64,
    },
    /// Any finite number between two edges; `usual` is offered where no value is nearest.
    Real {
        low: Edge,
        high: Edge,
        usual: f64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edge {
    Open,
    Allowed(f64),
    Forbidden(f64),
}

pub const fn whole(low: i64, high: i64) -> Bounds {
    Bounds::Whole { low, high }
}

pub const fn above_zero(usual: f64) -> Bounds {
    Bounds::Real { low: Edge::Forbidden(0.0), high: Edge::Open, usual }
}

pub const fn from_zero(usual: f64) -> Bounds {
    Bounds::Real { low: Edge::Allowed(0.0), high: Edge::Open, usual }
}

pub const fn zero_to(high: Edge, usual: f64) -> Bounds {
    Bounds::Real { low: Edge::Allowed(0.0), high, usual }
}

impl Bounds {
    /// The remedy for a number outside, or the first such of a list; nothing for one inside, and for what is no number
    /// at all.
    pub fn remedy(&self, value: &Value) -> Option<String> {
        match (*self, value) {
            (Bounds::Whole { low, high }, Value::Integer(number)) => (!(low..=high).contains(number))
                .then(|| format!("the nearest valid value is {}", number.clamp(&low, &high))),
            (Bounds::Real { .. }, Value::Integer(number)) => self.real_remedy(*number as f64),
            (Bounds::Real { .. }, Value::Float(number)) => self.real_remedy(*number),
            (Bounds::Whole { low, high }, value) if let Some(is_above) = past_64_bits(value) => {
                Some(format!("the nearest valid value is {}", if is_above { high } else { low }))
            }
            (_, Value::Array(list)) => list.iter().find_map(|value| self.remedy(value)),
            _ => None,
        }
    }

    /// Arithmetic is f32, so a number must lie inside also when rounded to it.
    fn real_remedy(&self, number: f64) -> Option<String> {
        let rounded = f64::from(number as f32);
        self.past_edge(number).or_else(|| self.past_edge(rounded))
    }

    fn past_edge(&self, number: f64) -> Option<String> {
        let Bounds::Real { low, high, usual } = *self else {
            return None;
        };
        let nearest = match (low, high) {
            (Edge::Allowed(edge), _) if number < edge => Some(edge),
            (_, Edge::Allowed(edge)) if number > edge => Some(edge),
            (Edge::Forbidden(edge), _) if number <= edge => None,
            (_, Edge::Forbidden(edge)) if number >= edge => None,
            _ if number.is_finite() => return None,
            _ => None,
        };
        Some(match nearest.filter(|_| number.is_finite()) {
            Some(edge) => format!("the nearest valid value is {edge:?}"),
            None => format!("a usual value is {usual:?}"),
        })
    }
}

/// Of what is written as a whole number, but is none that 64 bits hold: whether it is above them.
fn past_64_bits(value: &Value) -> Option<bool> {
    match value {
        Value::Float(number) => (number.is_finite() && number.abs() >= i64::MAX as f64).then_some(*number > 0.0),
        Value::String(text) => {
            let (is_below, digits) = text.strip_prefix('-').map_or((false, text.as_str()), |digits| (true, digits));
            let is_whole = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            (is_whole && text.parse::<i64>().is_err()).then_some(!is_below)
        }
        _ => None,
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Bounds::Truth => f.write_str("true or false"),
            Bounds::Whole { low, high } if high == i64::MAX => {
                write!(f, "a whole number of at least {low}")
            }
            Bounds::Whole { low, high } => write!(f, "a whole number from {low} to {high}"),
            Bounds::Real { low, high, .. } => {
                f.write_str("a finite number")?;
                let mut joint = " ";
                for (edge, allowed, forbidden) in [(low, "at least", "above"), (high, "at most", "below")] {
                    match edge {
                        Edge::Open => continue,
                        Edge::Allowed(edge) => write!(f, "{joint}{allowed} {edge:?}")?,
                        Edge::Forbidden(edge) => write!(f, "{joint}{forbidden} {edge:?}")?,
                    }
                    joint = " and ";
                }
                Ok(())
            }
        }
    }
}

/// What is wrong and what to do, before it is known where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub(crate) wrong: String,
    pub(crate) remedy: String,
}

impl Finding {
    pub fn new(wrong: impl Into<String>, remedy: impl Into<String>) -> Self {
        Finding { wrong: wrong.into(), remedy: remedy.into() }
    }
}

/// The largest number that divides both.
pub fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// All divisors, ascending.
pub fn divisors(number: usize) -> Vec<usize> {
    let small = (1..).take_while(|d| d * d <= number).filter(|d| number.is_multiple_of(*d));
    let mut all: Vec<usize> = small.flat_map(|d| [d, number / d]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The neighbours of `value` among `valid`, which is ascending and not empty.
pub fn nearest_of(value: usize, valid: &[usize]) -> String {
    let below = valid.iter().rev().find(|valid| **valid < value);
    let above = valid.iter().find(|valid| **valid > value);
    match (below, above) {
        (Some(below), Some(above)) => format!("the nearest valid values are {below} and {above}"),
        (Some(one), None) | (None, Some(one)) => format!("the nearest valid value is {one}"),
        (None, None) => format!("valid values: {valid:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_offer_what_is_nearest() {
        let check = |bounds: Bounds, value: Value, expected: Option<&str>| {
            assert_eq!(bounds.remedy(&value).as_deref(), expected, "{bounds} {value}");
        };
        let nearest = |value| Some(["the nearest valid value is ", value].concat());
        check(whole(1, 9), 9.into(), None);
        check(whole(1, 9), 0.into(), nearest("1").as_deref());
        check(whole(1, 9), 10.into(), nearest("9").as_deref());
        check(whole(1, 9), Value::Float(10.0), None);
        check(whole(1, 9), vec![4, 1].into(), None);
        check(whole(1, 9), vec![4, 0, 10].into(), nearest("1").as_deref());
        check(whole(1, 9), Value::Float(1e30), nearest("9").as_deref());
        check(whole(1, 9), Value::Float(-1e30), nearest("1").as_deref());
        check(whole(1, 9), "18446744073709551616".into(), nearest("9").as_deref());
        check(whole(1, 9), "-18446744073709551616".into(), nearest("1").as_deref());
        check(whole(1, 9), "".into(), None);
        check(whole(1, 9), "9e99x".into(), None);
        check(above_zero(0.5), 1.into(), None);
        check(above_zero(0.5), 0.into(), Some("a usual value is 0.5"));
        check(from_zero(0.5), Value::Float(-1.0), nearest("0.0").as_deref());
        check(from_zero(0.5), Value::Float(f64::NAN), Some("a usual value is 0.5"));
        check(from_zero(0.5), Value::Float(f64::INFINITY), Some("a usual value is 0.5"));
        check(zero_to(Edge::Allowed(1.0), 0.5), 1.into(), None);
        check(zero_to(Edge::Allowed(1.0), 0.5), 2.into(), nearest("1.0").as_deref());
        check(zero_to(Edge::Forbidden(1.0), 0.5), 1.into(), Some("a usual value is 0.5"));
    }

    #[test]
    fn divisors_are_complete() {
        for number in 1..200 {
            let all: Vec<usize> = (1..=number).filter(|d| number % d == 0).collect();
            assert_eq!(divisors(number), all);
        }
    }

    #[test]
    fn common_divisors_divide_both() {
        for (a, b, expected) in [(4, 6, 2), (8, 8, 8), (3, 7, 1), (1, 5, 1)] {
            assert_eq!(common_divisor(a, b), expected);
        }
    }
}
