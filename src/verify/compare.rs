//! Two runs of one recipe beside each other, and how far they may be apart.
//!
//! Errors are relative: of a number to itself; of a tensor, by 2-norms, to the size it should have, and a little more
//! where that may be nothing. A gradient that is zero in truth is the noise of terms as large as other gradients', so a
//! tenth of an average gradient of as many elements is added. To a weight, which may begin at zero, what its steps may
//! move is added.

use super::collect::RunResult;
use super::noise::Noise;
use super::tensors::{Distance, Tensors, size};
use crate::train::StepReport;

/// How far a run may be from another.
pub(super) enum Tolerance<'a> {
    /// Every number is the same, to the bit.
    Bits,
    /// The same numbers added in another order.
    Order,
    /// Half the bits, against what one rank loses by it.
    Storage { one_rank: &'a Noise, parts: usize },
    /// The same half of the bits, of sums in another order.
    Rounding(&'a Noise),
}

impl Tolerance<'_> {
    /// What can be asked where engines promise the bits of sums, or do not.
    fn of_sums(&self, are_exact: bool) -> &Self {
        match self {
            Tolerance::Bits if !are_exact => &Tolerance::Order,
            asked => asked,
        }
    }
}

/// Sums of thousands of terms, each rounded at 6e-8, some layers and steps deep: 4e-6 was the most seen.
const ORDER: f64 = 1e-5;

/// Of an average gradient: what is added to the size of one that may be zero in truth.
const FLOOR: f64 = 0.1;

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
    /// Relative.
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
    pub(super) fn share(&self) -> f64 {
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

/// Everything compared, the worst first.
pub(super) fn compare(got: &RunResult, want: &RunResult, tolerance: &Tolerance) -> Vec<Difference> {
    let tolerance = tolerance.of_sums(got.sums_are_exact && want.sums_are_exact);
    let all = distances(got, want).into_iter().enumerate().map(|(index, measured)| {
        let Measured { mut difference, same_bits, kind, .. } = measured;
        difference.allowed = match tolerance {
            Tolerance::Bits => 0.0,
            Tolerance::Order => ORDER,
            Tolerance::Storage { .. } | Tolerance::Rounding(_) if kind == Exactness::Exact => ORDER,
            // A weight is rounded by itself at the end, so a few that are rounded otherwise may be much of a small tensor.
            Tolerance::Rounding(noise) if difference.what == "weight" => ORDER + noise.allowed(index, 0),
            Tolerance::Rounding(noise) => ORDER + noise.apart(index),
            Tolerance::Storage { one_rank, parts } => ORDER + one_rank.allowed(index, *parts),
        };
        // Numbers that print alike may differ in a bit, and the same NaN is the same.
        match (tolerance, same_bits) {
            (_, true) => difference.error = 0.0,
            (Tolerance::Bits, false) => difference.error = difference.error.max(f64::MIN_POSITIVE),
            _ => {}
        }
        difference
    });
    let mut all: Vec<Difference> = all.collect();
    all.sort_by(|a, b| b.is_too_large().cmp(&a.is_too_large()).then(b.share().total_cmp(&a.share())));
    all
}

/// The errors of a run, in the order in which things are compared.
pub(super) fn errors(got: &RunResult, want: &RunResult) -> Vec<f64> {
    distances(got, want).iter().map(|measured| measured.difference.error).collect()
}

struct Measured {
    difference: Difference,
    kind: Exactness,
    /// What the error is relative to.
    scale: f64,
    same_bits: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Exactness {
    /// Goes through what is stored in half the bits, if anything is.
    Rounded,
    /// Does not, along the same routing: learning rates, counts, and biases that follow from counts.
    Exact,
}

/// Everything there is, in a fixed order.
fn distances(got: &RunResult, want: &RunResult) -> Vec<Measured> {
    let mut all = Vec::new();
    for (got, want) in got.reports.iter().zip(&want.reports) {
        all.extend(of_reports(got, want));
    }
    for ((got, want), step) in got.gradients.iter().zip(&want.gradients).zip(1..) {
        let (norm, elements) = size(want);
        let average = norm / (elements.max(1) as f64).sqrt();
        let own = of_tensors("gradient", Some(step), got, want, FLOOR * average);
        let square = |measured: &Measured| (measured.difference.error * measured.scale).powi(2);
        let error = own.iter().map(square).sum::<f64>().sqrt();
        all.extend(own);
        all.push(number("whole gradient", Some(step), Exactness::Rounded, norm + error, norm));
    }
    let steps = want.reports.iter().zip(&want.gradients);
    let moved = steps.map(|(report, gradients)| moved(report.lr, gradients, want)).sum();
    all.extend(of_tensors("weight", None, &got.weights, &want.weights, moved));
    let buffers = of_tensors("buffer", None, &got.buffers, &want.buffers, 0.0);
    all.extend(buffers.into_iter().map(|measured| Measured { kind: Exactness::Exact, ..measured }));
    all
}

/// How far a step may move one element of a weight, and so be off: by the learning rate; or, where a gradient is zero in
/// truth, by what AdamW makes of as much as such a one may be off, which it divides by its eps alone.
fn moved(lr: f64, gradients: &Tensors, run: &RunResult) -> f64 {
    let (norm, elements) = size(gradients);
    let average = norm / (elements.max(1) as f64).sqrt();
    let clipped = if run.clip > 0.0 { (run.clip / norm).min(1.0) } else { 1.0 };
    lr * (FLOOR * average * clipped / run.eps.max(f64::MIN_POSITIVE)).max(1.0)
}

fn number(what: &'static str, step: Option<u64>, kind: Exactness, got: f64, want: f64) -> Measured {
    let scale = want.abs().max(f64::MIN_POSITIVE);
    let error = if got.to_bits() == want.to_bits() { 0.0 } else { (got - want).abs() / scale };
    let difference = Difference { what, step, tensor: None, rank: None, error, allowed: 0.0 };
    Measured { difference, kind, scale, same_bits: got.to_bits() == want.to_bits() }
}

fn of_reports(got: &StepReport, want: &StepReport) -> Vec<Measured> {
    let step = Some(want.step);
    let exact = |what, got: f64, want: f64| number(what, step, Exactness::Exact, got, want);
    let number = |what, got: f64, want: f64| number(what, step, Exactness::Rounded, got, want);
    // Integers that are not the same are wholly wrong.
    let whole = |what, same: bool| exact(what, if same { 1.0 } else { 2.0 }, 1.0);
    let loads = |report: &StepReport| report.moe.iter().map(|layer| layer.load.clone()).collect::<Vec<_>>();
    let dropped = |report: &StepReport| report.moe.iter().map(|layer| layer.dropped).collect::<Vec<_>>();
    let counts = |report: &StepReport| (report.valid_tokens, report.counted_tokens);
    let uncomputed = |report: &StepReport| {
        let of_layers = report.moe.iter().map(|layer| layer.condensed.as_ref().map_or(0, |saved| saved.uncomputed));
        of_layers.collect::<Vec<_>>()
    };
    // How similar pairs are is rounded before it is counted; and where clusters are followed, none are compared.
    let others = |report: &StepReport| {
        let mut layers = report.moe.clone();
        layers.iter_mut().for_each(|layer| layer.condensed = None);
        layers
    };
    vec![
        number("loss", got.loss, want.loss),
        number("balance loss", got.balance, want.balance),
        number("z-loss", got.z, want.z),
        number("gradient norm", got.gradient_norm, want.gradient_norm),
        exact("learning rate", got.lr, want.lr),
        whole("number of tokens", counts(got) == counts(want)),
        whole("load of experts", loads(got) == loads(want)),
        whole("dropped routes", dropped(got) == dropped(want)),
        whole("routes without a row", uncomputed(got) == uncomputed(want)),
        whole("other counts of routes", others(got) == others(want)),
    ]
}

/// `extra` is what is added to the size of a tensor, for one element.
fn of_tensors(what: &'static str, step: Option<u64>, got: &Tensors, want: &Tensors, extra: f64) -> Vec<Measured> {
    let measured = |name: &String, distance: Distance, elements: usize| {
        let Distance { error, size, rank, same_bits } = distance;
        let scale = (size + extra * (elements as f64).sqrt()).max(f64::MIN_POSITIVE);
        let (tensor, rank) = (Some(name.clone()), Some(rank));
        let error = if error == 0.0 { 0.0 } else { error / scale };
        let difference = Difference { what, step, tensor, rank, error, allowed: 0.0 };
        Measured { difference, kind: Exactness::Rounded, scale, same_bits }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_asked_of_engines_that_promise_them() {
        assert!(matches!(Tolerance::Bits.of_sums(true), Tolerance::Bits));
        assert!(matches!(Tolerance::Bits.of_sums(false), Tolerance::Order));
        assert!(matches!(Tolerance::Order.of_sums(true), Tolerance::Order));
    }
}
