//! `bench.json`: how fast the machine is, and where the time of a recipe's step goes, as `guildhall bench` measured it.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Error;

/// Name of the measurement in a run folder.
pub const BENCH_FILE: &str = "bench.json";

/// What the ranks of a run reach together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Of large products on every rank at once; floating-point operations a second.
    pub f32_flops: f64,
    /// The same in bf16.
    pub bf16_flops: f64,
    /// Bytes a second that copies read and write, on every rank at once.
    pub copied: f64,
    /// Of the matrices in f32 and in bf16, each the smallest that took long enough.
    pub sides: [usize; 2],
    /// Of the products in the type of the weights, run after each step: the mean. Steps and these runs share what a machine's
    /// speed changes by meanwhile, so that shares are of this ceiling.
    pub beside: f64,
    /// Bytes a second that sums in place read and write, likewise.
    pub streamed_beside: f64,
}

/// The kernels of a name, or of a kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelShare {
    pub name: String,
    /// Seconds a step, the mean of all ranks.
    pub seconds: f64,
    /// Calls a step, the mean of all ranks.
    pub calls: f64,
}

/// The products within attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AttentionProducts {
    /// Seconds a step, the mean of all ranks.
    pub seconds: f64,
    /// Floating-point operations a step, of all ranks, with those that a mask makes void.
    pub flop: f64,
}

/// The speed of a recipe's steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSpeed {
    pub processor: String,
    pub ranks: usize,
    /// Of each rank.
    pub threads: usize,
    /// Weights are stored as `f32` or `bf16`.
    pub dtype: String,
    pub ceilings: Ceilings,
    /// Steps that were timed.
    pub steps: usize,
    /// Median over the steps of the slowest rank's time.
    pub seconds: f64,
    pub fastest: f64,
    pub slowest: f64,
    /// Mean over the steps, of which kernels' times are parts.
    pub mean: f64,
    pub tokens_per_s: f64,
    /// Seconds that a step would take with products, attention's too, at the ceiling, or their operands at the speed of sums in
    /// place where these take longer, and what all other kernels read and write at that speed, without waiting; of the slowest rank.
    pub roof: f64,
    /// Of these, seconds of products; the mean of all ranks.
    pub roof_products: f64,
    /// Floating-point operations of a step's products and attention, forward and backward, without what runs again; of all
    /// ranks, with rows spread evenly over experts.
    pub model_flop: f64,
    /// Of the products that kernels did in a step, attention's aside, what runs again among them; of all ranks.
    pub product_flop: f64,
    pub products: KernelShare,
    pub attention: KernelShare,
    /// Those of attention, where its kernels tell.
    pub attention_products: Option<AttentionProducts>,
    /// Kernels that are neither, those that took longest first.
    pub others: Vec<KernelShare>,
}

impl StepSpeed {
    /// Model FLOP utilisation: the share of the ceiling that the model's operations reach over the whole step.
    pub fn utilization(&self) -> f64 {
        self.model_flop / self.mean / self.ceilings.beside
    }

    /// The share of the ceiling that products reach while they run, attention's aside.
    pub fn products_of_ceiling(&self) -> f64 {
        self.of_ceiling(self.product_flop, self.products.seconds)
    }

    /// The same of those within attention.
    pub fn attention_products_of_ceiling(&self) -> f64 {
        self.attention_products.map_or(0.0, |of_it| self.of_ceiling(of_it.flop, of_it.seconds))
    }

    /// The share of their roof that products reach, attention's too: where they cannot reach the ceiling for their operands'
    /// bytes, it is larger than that of the ceiling. None where attention's are not told.
    pub fn products_of_roof(&self) -> Option<f64> {
        let seconds = self.products.seconds + self.attention_products?.seconds;
        (seconds > 0.0).then(|| self.roof_products / seconds)
    }

    fn of_ceiling(&self, flop: f64, seconds: f64) -> f64 {
        if seconds > 0.0 { flop / seconds / self.ceilings.beside } else { 0.0 }
    }

    /// Seconds of a step in which nothing is multiplied. None where attention's products are not told.
    pub fn no_products(&self) -> Option<f64> {
        Some((self.mean - self.products.seconds - self.attention_products?.seconds).max(0.0))
    }

    /// Seconds of a step in which no kernel runs: waiting for other ranks, for data, and the program itself.
    pub fn outside(&self) -> f64 {
        let others: f64 = self.others.iter().map(|kernel| kernel.seconds).sum();
        (self.mean - self.products.seconds - self.attention.seconds - others).max(0.0)
    }

    /// Reads the measurement in the folder `run`; [`Error::is_not_found`] tells a run without one.
    ///
    /// # Errors
    /// A file that is not there, or not what `bench` writes.
    pub fn read(run: &Path) -> Result<StepSpeed, Error> {
        let path = run.join(BENCH_FILE);
        let text = fs::read(&path).map_err(Error::io("read", &path))?;
        serde_json::from_slice(&text).map_err(|source| Error::CorruptBench { path, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_ceiling_beside_the_steps() {
        let share = |seconds| KernelShare { name: String::new(), seconds, calls: 1.0 };
        let speed = StepSpeed {
            processor: String::new(),
            ranks: 1,
            threads: 2,
            dtype: "f32".to_owned(),
            ceilings: Ceilings {
                f32_flops: 100.0,
                bf16_flops: 200.0,
                copied: 1.0,
                sides: [256; 2],
                beside: 80.0,
                streamed_beside: 1.0,
            },
            steps: 1,
            seconds: 1.5,
            fastest: 1.5,
            slowest: 3.0,
            mean: 2.0,
            tokens_per_s: 1.0,
            roof: 1.0,
            roof_products: 0.9,
            model_flop: 80.0,
            product_flop: 60.0,
            products: share(1.0),
            attention: share(0.25),
            attention_products: Some(AttentionProducts { seconds: 0.125, flop: 5.0 }),
            others: vec![share(0.25), share(0.25)],
        };
        assert_eq!((speed.utilization(), speed.products_of_ceiling()), (0.5, 0.75));
        assert_eq!(
            (speed.attention_products_of_ceiling(), speed.no_products(), speed.outside()),
            (0.5, Some(0.875), 0.25)
        );
        assert_eq!(speed.products_of_roof(), Some(0.8));
        let untold = StepSpeed { attention_products: None, ..speed };
        assert_eq!((untold.products_of_roof(), untold.no_products(), untold.outside()), (None, None, 0.25));
    }
}
