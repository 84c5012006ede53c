//! What kernels would have done on a device that only knows sizes: by part of the model and kernel, how often each was
//! launched and the bytes it would have read and written; by part, the multiply-adds of its matrix products.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use crate::tensor::Tensor;

/// The launches of one kernel from one part of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    pub count: u64,
    /// Of all operands, each once a launch.
    pub bytes: u64,
}

/// Launches and products so far.
#[derive(Debug, Default)]
pub struct Books(Mutex<Pages>);

#[derive(Debug, Default)]
struct Pages {
    scope: String,
    launches: BTreeMap<(String, &'static str), Launches>,
    multiply_adds: BTreeMap<String, u64>,
}

impl Books {
    /// By part of the model and kernel.
    pub fn launches(&self) -> BTreeMap<(String, &'static str), Launches> {
        self.pages().launches.clone()
    }

    /// Of matrix products, by part of the model.
    pub fn multiply_adds(&self) -> BTreeMap<String, u64> {
        self.pages().multiply_adds.clone()
    }

    pub(crate) fn set_scope(&self, scope: &str) {
        scope.clone_into(&mut self.pages().scope);
    }

    pub(crate) fn launch(&self, kernel: &'static str, operands: &[&Tensor]) {
        let bytes: usize = operands.iter().map(|operand| operand.len() * operand.dtype().bytes()).sum();
        let mut pages = self.pages();
        let scope = pages.scope.clone();
        let launches = pages.launches.entry((scope, kernel)).or_default();
        launches.count += 1;
        launches.bytes += bytes as u64;
    }

    pub(crate) fn add_product(&self, multiply_adds: u64) {
        let mut pages = self.pages();
        let scope = pages.scope.clone();
        *pages.multiply_adds.entry(scope).or_default() += multiply_adds;
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        // Counters are never half written.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
