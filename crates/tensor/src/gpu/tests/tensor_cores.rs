//! Products of bf16 as a simulated warp makes them, of small integers, whose sums are exact in any order.

use std::sync::Arc;

use super::super::sources::{self, KernelSource};
use super::super::{Accelerator, Call, Gpu, KernelArgument, OperandKind, SimulatedLimits};
use super::Simulated;
use crate::device::{Device, Engine};
use crate::draws::{Draws, Purpose};
use crate::tensor::Tensor;

const QUERIES: usize = 32;
const KEYS: usize = 64;

/// Every way that attention has to multiply a tile, three times: an odd block's warps run in the other order.
const TILES: &str = r#"
#include "common.cuh"
#include "tiles.cuh"

// For each of three blocks: scores [QUERIES, KEYS] = a b^T, of_queries [QUERIES, dim] = w b and of_keys [KEYS, dim] =
// w^T a, a being [QUERIES, dim], b [KEYS, dim] and w [QUERIES, KEYS].
KERNEL(tile_products, (Span<float> scores, Span<float> of_queries, Span<float> of_keys, Span<const float> a,
                       Span<const float> b, Span<const float> w, u64 dim)) {
    SHARED(float, tile, SCORES);
    SHARED(float, a_chunk, QUERY_CHUNK);
    SHARED(float, b_chunk, KEY_CHUNK);
    auto of_a = [&](u32 query, u64 c) { return a.data[query * dim + c]; };
    auto of_b = [&](u32 key, u64 c) { return b.data[key * dim + c]; };
    BLOCKS(block, 3) {
        auto put = [&](Span<float> to, u32 lines) {
            return [=](u32 line, u64 c, float sum) { to.data[(block * lines + line) * dim + c] = sum; };
        };
        multiply_lines(BF16, tile, a_chunk, b_chunk, dim, of_a, of_b);
        THREADS {
            for (u32 e = thread(); e < QUERIES * KEYS; e += threads()) {
                float& x = tile[e / KEYS * SCORE_LINE + e % KEYS];
                scores.data[block * QUERIES * KEYS + e] = x;
                x = w.data[e];
            }
        }
        sum_over_keys(BF16, tile, b_chunk, dim, of_b, put(of_queries, QUERIES));
        auto weight = [&](u32 query, u32 key) { return tile[query * SCORE_LINE + key]; };
        sum_over_queries(BF16, a_chunk, dim, weight, of_a, put(of_keys, KEYS));
    }
}
"#;

/// A matrix, row by row.
struct Integers {
    cols: usize,
    values: Vec<f32>,
}

impl Integers {
    /// From -8 to 8.
    fn drawn([rows, cols]: [usize; 2], stream: u64) -> Integers {
        let draws = Draws::new(17, Purpose::Test, stream, 0);
        let values = (0..rows * cols).map(|i| (draws.uniform(i as u64) * 17.0).floor() - 8.0).collect();
        Integers { cols, values }
    }

    fn transposed(&self) -> Integers {
        let rows = self.values.len() / self.cols;
        let values = (0..self.values.len()).map(|i| self.values[i % rows * self.cols + i / rows]).collect();
        Integers { cols: rows, values }
    }

    fn times(&self, right: &Integers) -> Vec<f32> {
        let element = |row: &[f32], c: usize| -> f32 {
            row.iter().enumerate().map(|(k, x)| x * right.values[k * right.cols + c]).sum()
        };
        self.values.chunks_exact(self.cols).flat_map(|row| (0..right.cols).map(|c| element(row, c))).collect()
    }

    fn on(&self, device: &Arc<Device>) -> Tensor {
        Tensor::from_slice(device, &[self.values.len() / self.cols, self.cols], &self.values)
    }
}

/// A device with the kernel above, which no line of the table has.
fn device() -> Arc<Device> {
    let mut sources = sources::all();
    sources.retain(|source| source.module == "stored");
    sources.push(KernelSource { module: "tile_products", text: TILES.to_owned() });
    let engine: Arc<dyn Accelerator> = Arc::new(Simulated::new(SimulatedLimits::default(), &sources).unwrap());
    Device::accelerated(1, Gpu::new(engine, None))
}

/// Columns of less than an instruction's depth and more, odd ones, whole chunks of 64 and ragged ones.
#[test]
fn products_of_tiles_in_bf16_are_exact() {
    let device = device();
    let Engine::Accelerator(gpu) = device.engine() else { panic!("an accelerator") };
    for dim in [1, 7, 8, 16, 17, 63, 64, 65, 128, 150] {
        let [a, b] = [(QUERIES, 1), (KEYS, 2)].map(|(lines, stream)| Integers::drawn([lines, dim], stream));
        let w = Integers::drawn([QUERIES, KEYS], 3);
        let inputs = [&a, &b, &w].map(|matrix| matrix.on(&device));
        let mut outputs = [[QUERIES, KEYS], [QUERIES, dim], [KEYS, dim]].map(|[lines, columns]| {
            Tensor::from_slice(&device, &[3, lines, columns], &vec![f32::NAN; 3 * lines * columns])
        });
        let mut call = Call::new(gpu, &device, "tile_products", "tile_products");
        outputs.iter_mut().for_each(|output| call.output(output, OperandKind::F32));
        inputs.iter().for_each(|input| call.input(input, OperandKind::F32));
        dim.pass(&mut call);
        call.launch();
        let [scores, of_queries, of_keys] = outputs.map(|output| output.to_vec());
        assert_eq!(scores, a.times(&b.transposed()).repeat(3), "queries times keys, {dim} columns");
        assert_eq!(of_queries, w.times(&b).repeat(3), "sums over keys, {dim} columns");
        assert_eq!(of_keys, w.transposed().times(&a).repeat(3), "sums over queries, {dim} columns");
    }
}
