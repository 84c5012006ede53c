//! The values a number of a recipe may take by itself: one table, a line a key.

use std::fmt;

use toml::Value;

/// Far above any model there is; keeps products of three sizes within 64 bits.
const SIZE_MAX: i64 = 1 << 20;
const COUNT_MAX: i64 = 1 << 31;
/// What grows with a model's depth is walked layer by layer.
const LAYERS_MAX: i64 = 1 << 13;
/// What is planned may be larger than what runs here.
pub(super) const RANKS_MAX: i64 = 1 << 16;

/// The values one number, or each of a list, may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bounds {
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
pub(super) enum Edge {
    Open,
    Allowed(f64),
    Forbidden(f64),
}

pub(super) const fn whole(low: i64, high: i64) -> Bounds {
    Bounds::Whole { low, high }
}

const fn above_zero(usual: f64) -> Bounds {
    Bounds::Real { low: Edge::Forbidden(0.0), high: Edge::Open, usual }
}

const fn from_zero(usual: f64) -> Bounds {
    Bounds::Real { low: Edge::Allowed(0.0), high: Edge::Open, usual }
}

pub(super) const fn zero_to(high: Edge, usual: f64) -> Bounds {
    Bounds::Real { low: Edge::Allowed(0.0), high, usual }
}

/// At most a thousand seconds.
pub(super) const LATENCY_US: Bounds = zero_to(Edge::Allowed(1e9), 20.0);

/// At least a kilobyte a second, so that the time of any message is a time.
pub(super) const GBYTES_PER_S: Bounds = Bounds::Real { low: Edge::Allowed(1e-6), high: Edge::Open, usual: 10.0 };

/// Every number of a recipe; a test holds that none is left out.
pub(super) const BOUNDS: &[(&str, Bounds)] = &[
    ("train.steps", whole(1, i64::MAX)),
    ("train.seed", whole(0, i64::MAX)),
    ("train.batch_tokens", whole(1, COUNT_MAX)),
    ("train.micro_batch", whole(1, COUNT_MAX)),
    ("train.lr", above_zero(3e-4)),
    ("train.warmup_steps", whole(0, i64::MAX)),
    ("train.lr_end", zero_to(Edge::Allowed(1.0), 0.1)),
    ("train.weight_decay", from_zero(0.1)),
    ("train.beta1", zero_to(Edge::Forbidden(1.0), 0.9)),
    ("train.beta2", zero_to(Edge::Forbidden(1.0), 0.95)),
    ("train.eps", above_zero(1e-8)),
    ("train.clip", from_zero(1.0)),
    ("train.checkpoint_every", whole(0, i64::MAX)),
    ("train.keep", whole(0, COUNT_MAX)),
    ("train.eval_every", whole(0, i64::MAX)),
    ("train.eval_rows", whole(0, COUNT_MAX)),
    ("parallel.ranks", whole(1, RANKS_MAX)),
    ("parallel.expert", whole(1, RANKS_MAX)),
    ("parallel.tensor", whole(1, RANKS_MAX)),
    ("parallel.expert_tensor", whole(1, RANKS_MAX)),
    ("parallel.zero", whole(0, 3)),
    ("parallel.threads", whole(1, 1024)),
    ("parallel.timeout_s", whole(1, COUNT_MAX)),
    ("parallel.bucket_bytes", whole(1, i64::MAX)),
    ("parallel.link.latency_us", LATENCY_US),
    ("parallel.link.gbytes_per_s", GBYTES_PER_S),
    ("parallel.node_link.ranks_per_node", whole(1, 1024)),
    ("parallel.node_link.latency_us", LATENCY_US),
    ("parallel.node_link.gbytes_per_s", GBYTES_PER_S),
    ("memory.tile", whole(1, i64::MAX)),
    ("model.vocab", whole(1, 1 << 24)),
    ("model.d_model", whole(1, SIZE_MAX)),
    ("model.layers", whole(1, LAYERS_MAX)),
    ("model.encoder_layers", whole(1, LAYERS_MAX)),
    ("model.heads", whole(1, SIZE_MAX)),
    ("model.kv_heads", whole(1, SIZE_MAX)),
    ("model.d_ff", whole(1, 4 * SIZE_MAX)),
    ("model.seq", whole(1, SIZE_MAX)),
    ("model.segment", whole(1, SIZE_MAX)),
    ("model.memory", whole(0, SIZE_MAX)),
    ("model.dropout", zero_to(Edge::Forbidden(1.0), 0.1)),
    ("model.rope_theta", above_zero(10_000.0)),
    ("model.norm_eps", above_zero(1e-5)),
    ("model.init_std", above_zero(0.02)),
    ("moe.experts", whole(1, SIZE_MAX)),
    ("moe.top_k", whole(1, SIZE_MAX)),
    ("moe.d_expert", whole(1, 4 * SIZE_MAX)),
    ("moe.capacity_factor", above_zero(1.25)),
    ("moe.group_tokens", whole(1, COUNT_MAX)),
    ("moe.logical_workers", whole(1, SIZE_MAX)),
    ("moe.logical_nodes", whole(1, SIZE_MAX)),
    ("moe.groups", whole(1, SIZE_MAX)),
    ("moe.top_groups", whole(1, SIZE_MAX)),
    ("moe.route_scale", above_zero(1.0)),
    ("moe.bias_rate", from_zero(0.001)),
    ("moe.outside", zero_to(Edge::Allowed(1.0), 0.14)),
    ("moe.shared_experts", whole(0, SIZE_MAX)),
    ("moe.schedule_groups", whole(1, 1024)),
    ("moe.balance_weight", from_zero(0.01)),
    ("moe.z_weight", from_zero(0.001)),
    ("moe.dead_after", whole(1, i64::MAX)),
    ("moe.pairs_every", whole(0, i64::MAX)),
    ("data.held_out", zero_to(Edge::Allowed(0.5), 0.01)),
    ("data.mask_rate", Bounds::Real { low: Edge::Forbidden(0.0), high: Edge::Allowed(1.0), usual: 0.15 }),
    ("data.max_bytes", whole(1, i64::MAX)),
];

impl Bounds {
    /// The remedy for a number outside, or the first such of a list; nothing for one inside, and for what is no number
    /// at all.
    pub(super) fn remedy(&self, value: &Value) -> Option<String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::read::{self, Expected};

    #[test]
    fn every_number_of_a_recipe_has_bounds() {
        let paths = read::paths::<Config>();
        let or_list = "parallel.expert";
        let is_number = |path: &str, e: &Expected| matches!(e, Expected::Whole | Expected::Number) || path == or_list;
        let numbers: Vec<&String> = paths.iter().filter(|(path, e)| is_number(path, e)).map(|(path, _)| path).collect();
        for path in &numbers {
            assert!(BOUNDS.iter().any(|(key, _)| key == path), "{path} has no bounds");
        }
        assert_eq!(numbers.len(), BOUNDS.len(), "bounds of keys that are no numbers");
    }

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
}
