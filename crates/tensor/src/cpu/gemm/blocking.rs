//! How products are divided among caches. What a processor does best is measured on it. No bit of a result depends on it:
//! the depth at which sums are cut is always the same.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::hint::black_box;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use half::bf16;
use serde::{Deserialize, Serialize};

use super::kernel::Kernel;
use super::{Numbers, SET, View, multiply_on_thread};
use crate::cpu::stored::round;
use crate::team::Team;

/// How products of each type are divided on a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blocking {
    pub f32: ProductBlocks,
    pub bf16: ProductBlocks,
}

/// The largest blocks of B that are packed for products of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductBlocks {
    /// KiB, where rows of A are packed, too.
    pub packed_kib: usize,
    /// KiB, where rows of A are read as they are stored; nothing if they never are.
    pub in_place_kib: Option<usize>,
}

/// Sides of the products that are measured: experts of a small model.
const ROWS: usize = 512;
const DEPTH: usize = 512;
const COLS: usize = 2048;
/// Every choice is tried so often, in turn; its fastest try counts.
const ROUNDS: usize = 6;
/// By what part a choice must be faster than the best before it: less is noise.
const GAIN: f64 = 0.03;

impl ProductBlocks {
    /// Columns of B in a block of this depth, whole tiles of them.
    pub(in crate::cpu) fn columns(kib: usize, depth: usize, element_bytes: usize, tile: usize) -> usize {
        ((kib << 10) / (depth * element_bytes) / tile * tile).max(tile)
    }
}

/// What a kernel can be told. The first is what it does untold.
struct Choices {
    packed_kib: &'static [usize],
    in_place_kib: &'static [Option<usize>],
}

impl Choices {
    fn of(kernel: Kernel) -> Choices {
        const NEVER: &[Option<usize>] = &[None];
        #[cfg(target_arch = "x86_64")]
        {
            use crate::cpu::bgemm::Bf16Unit;
            use crate::cpu::{sgemm_avx2, sgemm_avx512};
            const IN_PLACE: &[Option<usize>] = &[Some(512), Some(256), Some(1024), Some(2048), None];
            match kernel {
                Kernel::Bf16(Bf16Unit::Avx512) => {
                    return Choices { packed_kib: &[512, 256, 1024, 2048], in_place_kib: IN_PLACE };
                }
                Kernel::Bf16(Bf16Unit::Amx) => {
                    return Choices { packed_kib: &[512, 256, 1024, 2048], in_place_kib: NEVER };
                }
                Kernel::F32 | Kernel::Widened if sgemm_avx512::is_supported() => {
                    return Choices { packed_kib: &[1024, 256, 512, 2048], in_place_kib: IN_PLACE };
                }
                Kernel::F32 | Kernel::Widened if sgemm_avx2::is_supported() => {
                    return Choices { packed_kib: &[2048, 512, 1024], in_place_kib: NEVER };
                }
                Kernel::F32 | Kernel::Widened => {}
            }
        }
        // The crate's kernels divide as they see fit.
        let _ = kernel;
        Choices { packed_kib: &[1024], in_place_kib: NEVER }
    }

    fn first(&self) -> ProductBlocks {
        ProductBlocks { packed_kib: self.packed_kib[0], in_place_kib: self.in_place_kib[0] }
    }
}

impl Default for Blocking {
    /// Sizes while nothing was measured: right for processors with 1 or 2 MiB of second-level cache.
    fn default() -> Blocking {
        static BUILT_IN: OnceLock<Blocking> = OnceLock::new();
        *BUILT_IN.get_or_init(|| {
            let [f32, bf16] = kernels().map(|kernel| Choices::of(kernel).first());
            Blocking { f32, bf16 }
        })
    }
}

impl Blocking {
    /// What this processor does best while `threads` threads do the same: about a second of products.
    pub fn measured(threads: usize) -> Blocking {
        let [f32, bf16] = kernels().map(|kernel| measured(kernel, threads));
        Blocking { f32, bf16 }
    }

    /// Whether every size is one that could have been measured.
    pub fn is_sound(&self) -> bool {
        kernels().into_iter().zip([self.f32, self.bf16]).all(|(kernel, blocks)| {
            let Choices { packed_kib, in_place_kib } = Choices::of(kernel);
            packed_kib.contains(&blocks.packed_kib) && in_place_kib.contains(&blocks.in_place_kib)
        })
    }

    /// A number that tells these kernels from those of other builds, made of their sources.
    pub fn kernels_fingerprint() -> u64 {
        let sources = [
            include_str!("blocking.rs"),
            include_str!("kernel.rs"),
            include_str!("mod.rs"),
            include_str!("wide.rs"),
            include_str!("../ahead.rs"),
            include_str!("../bgemm/mod.rs"),
            include_str!("../bgemm/pack.rs"),
            include_str!("../bgemm/pairs.rs"),
            include_str!("../bgemm/tiles.rs"),
            include_str!("../sgemm_avx2.rs"),
            include_str!("../sgemm_avx512.rs"),
        ];
        let mut hasher = DefaultHasher::new();
        sources.hash(&mut hasher);
        hasher.finish()
    }

    /// Whether there is anything to measure on this processor.
    pub fn is_a_choice() -> bool {
        kernels().map(Choices::of).iter().any(|choices| choices.packed_kib.len() > 1)
    }
}

/// The kernels of f32 and of bf16 on this processor.
fn kernels() -> [Kernel; 2] {
    let half = View::of(Numbers::Bf16(&[]), 0, 0, 0);
    [Kernel::F32, Kernel::of(half, half)]
}

/// A factor to measure with.
enum SampleFactor {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl SampleFactor {
    fn new(kernel: Kernel, len: usize) -> SampleFactor {
        let numbers = (0..len).map(|at| (at % 13) as f32 - 6.0);
        match kernel {
            Kernel::F32 => SampleFactor::F32(numbers.collect()),
            _ => SampleFactor::Bf16(numbers.map(round).collect()),
        }
    }

    fn view(&self, rows: usize, cols: usize) -> View<'_> {
        let numbers = match self {
            SampleFactor::F32(numbers) => Numbers::F32(numbers),
            SampleFactor::Bf16(numbers) => Numbers::Bf16(numbers),
        };
        View::of(numbers, rows, cols, cols)
    }
}

/// A product to measure.
struct SampleProduct {
    a: SampleFactor,
    b: SampleFactor,
    sums: Vec<f32>,
}

impl SampleProduct {
    fn new(kernel: Kernel) -> SampleProduct {
        let [a, b] = [ROWS * DEPTH, DEPTH * COLS].map(|len| SampleFactor::new(kernel, len));
        SampleProduct { a, b, sums: vec![0.0; ROWS * COLS] }
    }

    /// Rows of an A that is stored transposed are always packed.
    fn run(&mut self, is_transposed: bool, blocks: ProductBlocks) {
        let a = if is_transposed { self.a.view(DEPTH, ROWS).t() } else { self.a.view(ROWS, DEPTH) };
        multiply_on_thread(black_box(&mut self.sums), COLS, a, self.b.view(DEPTH, COLS), SET, blocks);
    }
}

/// First what is best where rows of A are packed, then whether that is better than reading them in place.
fn measured(kernel: Kernel, threads: usize) -> ProductBlocks {
    let choices = Choices::of(kernel);
    // Each task has its own, as ranks and tasks do, in memory that a thread of the team was the first to write.
    let slots: Vec<Mutex<Option<SampleProduct>>> = (0..threads).map(|_| Mutex::default()).collect();
    let team = Team::new(threads);
    let seconds = |blocks: ProductBlocks, is_transposed: bool| {
        let begun = Instant::now();
        team.share(&slots, |slot| {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.get_or_insert_with(|| SampleProduct::new(kernel)).run(is_transposed, blocks);
        });
        begun.elapsed().as_secs_f64()
    };
    let first = choices.first();
    let packed: Vec<ProductBlocks> =
        choices.packed_kib.iter().map(|&packed_kib| ProductBlocks { packed_kib, ..first }).collect();
    let packed = fastest(&packed, |blocks| seconds(blocks, true));
    let in_place: Vec<ProductBlocks> =
        choices.in_place_kib.iter().map(|&in_place_kib| ProductBlocks { in_place_kib, ..packed }).collect();
    fastest(&in_place, |blocks| seconds(blocks, false))
}

/// The choice of which a try takes least time; the first where another gains next to nothing.
fn fastest(choices: &[ProductBlocks], mut seconds: impl FnMut(ProductBlocks) -> f64) -> ProductBlocks {
    if let [only] = choices {
        return *only;
    }
    let mut best = vec![f64::INFINITY; choices.len()];
    for _ in 0..ROUNDS {
        for (best, &blocks) in best.iter_mut().zip(choices) {
            *best = best.min(seconds(blocks));
        }
    }
    let at = (0..choices.len()).fold(0, |at, other| if best[other] < best[at] * (1.0 - GAIN) { other } else { at });
    choices[at]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(packed_kib: usize) -> ProductBlocks {
        ProductBlocks { packed_kib, in_place_kib: None }
    }

    #[test]
    fn a_choice_must_gain_to_be_taken() {
        let choices = [blocks(1), blocks(2), blocks(3)];
        let taken = |times: [f64; 3]| fastest(&choices, |blocks| times[blocks.packed_kib - 1]).packed_kib;
        assert_eq!(taken([1.0, 0.99, 1.5]), 1);
        assert_eq!(taken([1.0, 0.9, 0.89]), 2);
        assert_eq!(taken([1.0, 0.9, 0.5]), 3);
        // The fastest try counts, since others may use the machine meanwhile.
        let mut tries = 0;
        let noisy = fastest(&choices, |blocks| {
            tries += 1;
            if blocks.packed_kib == 3 && tries > 6 { 0.5 } else { 1.0 }
        });
        assert_eq!((noisy.packed_kib, tries), (3, 3 * ROUNDS));
    }

    #[test]
    fn what_is_measured_is_one_of_the_choices() {
        let measured = Blocking::measured(2);
        assert!(measured.is_sound() && Blocking::default().is_sound(), "{measured:?}");
        assert!(!Blocking { f32: blocks(3), ..measured }.is_sound());
    }

    #[test]
    fn blocks_have_whole_tiles() {
        assert_eq!(ProductBlocks::columns(512, 256, 4, 64), 512);
        assert_eq!(ProductBlocks::columns(512, 250, 4, 64), 512);
        assert_eq!(ProductBlocks::columns(512, 272, 4, 64), 448);
        assert_eq!(ProductBlocks::columns(1, 256, 4, 64), 64);
    }
}
