//! A device of the user's own: a file with the table `[device]`, read and checked as a recipe is.

use std::path::Path;

use serde::Deserialize;

use super::RecipeChecker;
use super::bounds::{GBYTES_PER_S, LATENCY_US, RANKS_MAX};
use super::problem::Problems;
use super::source::RecipeSource;
use crate::limits::{Bounds, Edge, whole, zero_to};
use crate::parallel::LinkCost;

/// What one rank is, and how the ranks of a node lie.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceTable {
    /// Absent means that of the file.
    pub name: Option<String>,
    pub memory_gb: f64,
    pub f32_tflops: f64,
    pub bf16_tflops: f64,
    /// Of which products reach this share.
    #[serde(default = "half")]
    pub efficiency: f64,
    /// Of its own memory.
    pub memory_gbytes_per_s: f64,
    pub ranks_per_node: usize,
    pub within: LinkCost,
    pub between: LinkCost,
    pub host_gbytes_per_s: f64,
    /// Of a node, for all of its ranks.
    pub host_memory_gb: f64,
}

/// Large products reach half of the best rate in training.
fn half() -> f64 {
    0.5
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceFile {
    device: DeviceTable,
}

/// Bytes of this many GB are within 64 bits.
const GB_MAX: f64 = 1e9;
const RATE: Bounds = Bounds::Real { low: Edge::Allowed(1e-6), high: Edge::Open, usual: 100.0 };

/// Every number of the table; a test holds that none is left out.
const BOUNDS: &[(&str, Bounds)] = &[
    ("device.memory_gb", Bounds::Real { low: Edge::Allowed(1e-3), high: Edge::Allowed(GB_MAX), usual: 80.0 }),
    ("device.f32_tflops", RATE),
    ("device.bf16_tflops", RATE),
    ("device.efficiency", Bounds::Real { low: Edge::Forbidden(0.0), high: Edge::Allowed(1.0), usual: 0.5 }),
    ("device.memory_gbytes_per_s", GBYTES_PER_S),
    ("device.ranks_per_node", whole(1, RANKS_MAX)),
    ("device.within.latency_us", LATENCY_US),
    ("device.within.message_us", LATENCY_US),
    ("device.within.gbytes_per_s", GBYTES_PER_S),
    ("device.between.latency_us", LATENCY_US),
    ("device.between.message_us", LATENCY_US),
    ("device.between.gbytes_per_s", GBYTES_PER_S),
    ("device.host_gbytes_per_s", GBYTES_PER_S),
    ("device.host_memory_gb", zero_to(Edge::Allowed(GB_MAX), 1000.0)),
];

/// Reads the table in `file`; reports everything that is wrong with it at once.
pub fn device(file: &Path) -> Result<DeviceTable, Problems> {
    let source = RecipeSource::read(file, "a device").map_err(Problems::new)?;
    let mut checker = RecipeChecker::new(&source);
    checker.check_bounds(BOUNDS.iter().map(|(key, range)| ((*key).to_owned(), *range)));
    match checker.read::<DeviceFile>() {
        Some(read) if checker.problems.is_empty() => Ok(read.device),
        _ => Err(Problems::new(checker.problems)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read;
    use crate::config::rejection::Expected;

    #[test]
    fn every_number_of_a_device_has_bounds() {
        let paths = read::paths::<DeviceFile>();
        let numbers: Vec<_> = paths.iter().filter(|(_, e)| matches!(e, Expected::Whole | Expected::Number)).collect();
        for (path, _) in &numbers {
            assert!(BOUNDS.iter().any(|(key, _)| key == path), "{path} has no bounds");
        }
        assert_eq!(numbers.len(), BOUNDS.len(), "bounds of keys that are no numbers");
    }
}
