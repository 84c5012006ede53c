//! Two runs of one recipe beside each other, and how far they may be apart.

use super::collect::Run;
use super::tensors::{Distance, Tensors, size};
use crate::train::StepReport;

/// How far a run may be from another.
pub(super) enum Tolerance<'a> {
    /// Every number is the same, to the bit.
    Bits,
    /// The same numbers added in another order: 1e-5 of a tensor's norm, where a sum of thousands of terms, each rounded
    /// at 6e-8, is off by some 1e-6. A gradient that is zero in truth is noise of 6e-8 of its terms, which are as large
    /// as other gradients: 1e-6 of an average element is allowed besides.
    Order,
    /// Half the bits: half as much again as one rank loses by it.
    Storage { one_rank: &'a Losses },
}

const ORDER: f64 = 1e-5;
const ORDER_FLOOR: f64 = 1e-6;
/// Of the error of one rank: its own is a draw of the same rounding.
const STORAGE: f64 = 1.5;
/// Half of the last of eight bits: the least error of a number that went through them.
const STORAGE_FLOOR: f64 = 1.0 / 512.0;

/// One number or tensor that was compared.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Difference {
    /// `loss`, `gradient`, `weight`, ...
    pub what: &'static str,
    /// Counted from 1; absent for what is left at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// Whose part of the tensor is the farthest off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Of the norm of what it should be.
    #[serde(serialize_with = "finite")]
    pub error: f64,
    #[serde(serialize_with = "finite")]
    pub allowed: f64,
}

/// JSON has no infinity.
fn finite<S: serde::Serializer>(x: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if x.is_finite() { serializer.serialize_f64(*x) } else { serializer.serialize_str(&x.to_string()) }
}

impl Difference {
    pub fn is_too_large(&self) -> bool {
        // Also where the error is no number.
        !matches!(self.error.partial_cmp(&self.allowed), Some(std::cmp::Ordering::Less | std::cmp::Ordering::Equal))
    }

    /// How much of what is allowed is used up; for choosing the worst.
    fn share(&self) -> f64 {
        match (self.error, self.allowed) {
            (0.0, _) => 0.0,
            (error, _) if error.is_nan() => f64::INFINITY,
            (error, allowed) => error / allowed.max(f64::MIN_POSITIVE),
        }
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.what)?;
        if let Some(tensor) = &self.tensor {
            write!(f, " of {tensor}")?;
        }
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        if let Some(rank) = self.rank {
            write!(f, ", rank {rank}")?;
        }
        Ok(())
    }
}

/// Relative errors of one run, in the order in which things are compared.
#[derive(Clone, Debug, Default)]
pub(super) struct Losses {
    errors: Vec<f64>,
    /// Of all gradients of all steps together.
    overall: f64,
}

/// Everything compared, the worst first.
pub(super) fn compare(got: &Run, want: &Run, tolerance: &Tolerance) -> Vec<Difference> {
    let mut all = distances(got, want);
    let scale = |tensors: &Tensors| {
        let (norm, elements) = size(tensors);
        norm / (elements.max(1) as f64).sqrt()
    };
    let per_element: Vec<f64> = want.gradients.iter().map(scale).collect();
    for (index, measured) in all.iter_mut().enumerate() {
        let Measured { difference, size, elements, same_bits } = measured;
        difference.allowed = match tolerance {
            Tolerance::Bits => {
                difference.error = if *same_bits { 0.0 } else { difference.error.max(f64::MIN_POSITIVE) };
                0.0
            }
            Tolerance::Order => {
                let step = difference.step.map_or(want.gradients.len(), |step| step as usize).max(1) - 1;
                let floor = match difference.what {
                    // What a step moves is bounded by the learning rate; noise moves it by as much less.
                    "gradient" | "weight" => ORDER_FLOOR * per_element[step] * (*elements as f64).sqrt(),
                    _ => 0.0,
                };
                ORDER + floor / size.max(f64::MIN_POSITIVE)
            }
            Tolerance::Storage { one_rank } => {
                let floor = if *elements == 1 { STORAGE_FLOOR } else { one_rank.overall };
                STORAGE * one_rank.errors.get(index).copied().unwrap_or(0.0).max(floor)
            }
        };
    }
    let mut all: Vec<Difference> = all.into_iter().map(|measured| measured.difference).collect();
    all.sort_by(|a, b| b.is_too_large().cmp(&a.is_too_large()).then(b.share().total_cmp(&a.share())));
    all
}

/// What one rank loses by storing half the bits.
pub(super) fn losses(got: &Run, want: &Run) -> Losses {
    let all = distances(got, want);
    let gradients = || all.iter().filter(|measured| measured.difference.what == "gradient");
    let square = |x: f64| x * x;
    let error: f64 = gradients().map(|measured| square(measured.difference.error * measured.size)).sum();
    let size: f64 = gradients().map(|measured| square(measured.size)).sum();
    let overall = (error / size.max(f64::MIN_POSITIVE)).sqrt();
    Losses { errors: all.into_iter().map(|measured| measured.difference.error).collect(), overall }
}

struct Measured {
    difference: Difference,
    /// Norm of what it should be.
    size: f64,
    elements: usize,
    same_bits: bool,
}

/// Everything there is, in a fixed order.
fn distances(got: &Run, want: &Run) -> Vec<Measured> {
    let mut all = Vec::new();
    for (got, want) in got.reports.iter().zip(&want.reports) {
        all.extend(of_reports(got, want));
    }
    for ((got, want), step) in got.gradients.iter().zip(&want.gradients).zip(1..) {
        all.extend(of_tensors("gradient", Some(step), got, want));
    }
    all.extend(of_tensors("weight", None, &got.weights, &want.weights));
    all.extend(of_tensors("buffer", None, &got.buffers, &want.buffers));
    all
}

fn of_reports(got: &StepReport, want: &StepReport) -> Vec<Measured> {
    let step = Some(want.step);
    let number = |what: &'static str, got: f64, want: f64| {
        let size = want.abs().max(f64::MIN_POSITIVE);
        let difference =
            Difference { what, step, tensor: None, rank: None, error: (got - want).abs() / size, allowed: 0.0 };
        Measured { difference, size, elements: 1, same_bits: got.to_bits() == want.to_bits() }
    };
    let loads = |report: &StepReport| report.moe.iter().map(|layer| layer.load.clone()).collect::<Vec<_>>();
    let dropped = |report: &StepReport| report.moe.iter().map(|layer| layer.dropped).sum::<u64>() as f64;
    let pairs = |report: &StepReport| report.moe.iter().map(|layer| layer.clone()).collect::<Vec<_>>();
    // Integers that are not the same are wholly wrong.
    let whole = |what, same: bool| number(what, if same { 1.0 } else { 2.0 }, 1.0);
    let counts = |report: &StepReport| (report.valid_tokens, report.counted_tokens);
    vec![
        number("loss", got.loss, want.loss),
        number("balance loss", got.balance, want.balance),
        number("z-loss", got.z, want.z),
        number("gradient norm", got.gradient_norm, want.gradient_norm),
        number("learning rate", got.lr, want.lr),
        whole("number of tokens", counts(got) == counts(want)),
        whole("load of experts", loads(got) == loads(want)),
        number("dropped routes", dropped(got) + 1.0, dropped(want) + 1.0),
        whole("co-activation of experts", pairs(got) == pairs(want)),
    ]
}

fn of_tensors(what: &'static str, step: Option<u64>, got: &Tensors, want: &Tensors) -> Vec<Measured> {
    let measured = |name: &String, distance: Distance, elements: usize| {
        let Distance { error, size, rank, same_bits } = distance;
        let relative = if error == 0.0 { 0.0 } else { error / size.max(f64::MIN_POSITIVE) };
        let (tensor, rank) = (Some(name.clone()), Some(rank));
        let difference = Difference { what, step, tensor, rank, error: relative, allowed: 0.0 };
        Measured { difference, size, elements, same_bits }
    };
    let missing = Distance { error: f64::INFINITY, size: 1.0, rank: 0, same_bits: false };
    let mut all = Vec::new();
    for (name, want) in want {
        let elements = want.values.len();
        let fits = got.get(name).filter(|got| got.values.len() == elements);
        all.push(measured(name, fits.map_or(missing, |got| got.distance(want)), elements));
    }
    let strangers = got.keys().filter(|name| !want.contains_key(*name));
    all.extend(strangers.map(|name| measured(name, missing, 0)));
    all
}
