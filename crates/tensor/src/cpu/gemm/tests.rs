//! Products against a loop in f64, and what their bits may not depend on.

use half::bf16;

use super::kernel::multiply_by_crate;
use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::bgemm::Bf16Unit;
use crate::cpu::mat::Factor;
use crate::cpu::stored::{round, widen};
use crate::draws::{Draws, Purpose};

fn numbers(n: usize, stream: u32) -> Vec<f32> {
    let draws = Draws::new(5, Purpose::Test, 0, stream);
    (0..n as u64).map(|i| draws.uniform(i) - 0.5).collect()
}

/// A factor of each type, as it is stored, and its numbers as a product takes them.
struct TestFactor {
    wide: Vec<f32>,
    half: Vec<bf16>,
    rows: usize,
    cols: usize,
    transposed: bool,
}

impl TestFactor {
    fn new(rows: usize, cols: usize, transposed: bool, stream: u32) -> TestFactor {
        let wide = numbers(rows * cols, stream);
        let half = wide.iter().map(|&x| round(x)).collect();
        TestFactor { wide, half, rows, cols, transposed }
    }

    fn view(&self, is_half: bool) -> View<'_> {
        let data = if is_half { Numbers::Bf16(&self.half) } else { Numbers::F32(&self.wide) };
        match self.transposed {
            true => View::of(data, self.cols, self.rows, self.rows).t(),
            false => View::of(data, self.rows, self.cols, self.cols),
        }
    }

    /// A matrix that is stored by rows, stored by columns.
    fn turned(&self) -> TestFactor {
        let &TestFactor { rows, cols, .. } = self;
        let from = |at: usize| at % rows * cols + at / rows;
        let wide = (0..rows * cols).map(|at| self.wide[from(at)]).collect();
        let half = (0..rows * cols).map(|at| self.half[from(at)]).collect();
        TestFactor { wide, half, rows, cols, transposed: true }
    }

    /// The first columns of a matrix that is stored by rows.
    fn columns(&self, count: usize) -> TestFactor {
        fn first<T: Copy>(numbers: &[T], cols: usize, count: usize) -> Vec<T> {
            numbers.chunks(cols).flat_map(|line| &line[..count]).copied().collect()
        }
        let (wide, half) = (first(&self.wide, self.cols, count), first(&self.half, self.cols, count));
        TestFactor { wide, half, rows: self.rows, cols: count, transposed: false }
    }

    fn at(&self, i: usize, j: usize, rounds: bool) -> f64 {
        let at = if self.transposed { j * self.rows + i } else { i * self.cols + j };
        f64::from(if rounds { widen(self.half[at]) } else { self.wide[at] })
    }
}

/// In f32 and in bf16.
fn both(shape: (usize, usize, usize)) -> [((usize, usize, usize), bool); 2] {
    [(shape, false), (shape, true)]
}

/// Sizes as they are built in, and so small that every product has many blocks, with rows of A in place and packed.
fn all_blocks() -> [ProductBlocks; 4] {
    let blocks = |packed_kib, in_place_kib| ProductBlocks { packed_kib, in_place_kib };
    [blocks(1024, Some(512)), blocks(16, Some(1)), blocks(1, Some(64)), blocks(256, None)]
}

/// Kernels that this CPU can run.
fn all_kernels(is_bf16: bool) -> Vec<Kernel> {
    if !is_bf16 {
        return vec![Kernel::F32];
    }
    let mut kernels = vec![Kernel::Widened];
    #[cfg(target_arch = "x86_64")]
    kernels.extend(match Bf16Unit::of_this_cpu() {
        Some(Bf16Unit::Amx) => vec![Kernel::Bf16(Bf16Unit::Amx), Kernel::Bf16(Bf16Unit::Avx512)],
        Some(Bf16Unit::Avx512) => vec![Kernel::Bf16(Bf16Unit::Avx512)],
        None => vec![],
    });
    kernels
}

/// Every kernel against an f64 loop, over shapes that leave every kind of edge, all three transpositions and both types
/// of each factor.
#[test]
fn products_equal_an_f64_loop() {
    let device = Device::new(2);
    for (m, n, k) in [
        (1, 1, 1),
        (14, 32, 16),
        (15, 33, 17),
        (32, 64, 64),
        (48, 16, 96),
        (3, 100, 300),
        (150, 70, 513),
        (29, 1100, 40),
        (7, 2061, 9),
        (40, 530, 1100),
        // Rows that are packed for all blocks of columns, and such as are too many for that.
        (480, 40, 520),
        (700, 34, 520),
        (5, 7, 0),
    ] {
        let flags = |bits: u32| [0, 1, 2, 3, 4].map(|bit| bits >> bit & 1 == 1);
        for [accumulate, ta, tb, half_a, half_b] in (0..32).map(flags) {
            let (a, b, c) = (TestFactor::new(m, k, ta, 1), TestFactor::new(k, n, tb, 2), numbers(m * n, 3));
            let (va, vb, rounds) = (a.view(half_a), b.view(half_b), half_a || half_b);
            let how = Into { alpha: if tb { 0.5 } else { 1.0 }, accumulate };
            let (mut parallel, mut serial) = (c.clone(), c.clone());
            gemm(&device, &mut parallel, n, va, vb, how);
            gemm_serial(&device, &mut serial, n, va, vb, how);
            let mut all = vec![("parallel", parallel), ("serial", serial)];
            for blocks in all_blocks() {
                for kernel in all_kernels(rounds) {
                    let mut other = c.clone();
                    let to = mat_mut(&mut other, n, va, vb);
                    // SAFETY: `mat_mut` checks the shapes, and the CPU has the kernel.
                    unsafe { kernel.multiply(to, (va.factor(), vb.factor()), how.onto(to), blocks) };
                    all.push(("each kernel", other));
                }
                #[cfg(target_arch = "x86_64")]
                if let (Factor::F32(fa), Factor::F32(fb)) = (va.factor(), vb.factor())
                    && crate::cpu::sgemm_avx2::is_supported()
                    && k > 0
                {
                    let mut narrow = c.clone();
                    let to = mat_mut(&mut narrow, n, va, vb);
                    // SAFETY: the CPU has been asked, and `mat_mut` checks the shapes.
                    unsafe { crate::cpu::sgemm_avx2::sgemm(to, fa, fb, how.onto(to), blocks) };
                    all.push(("avx2", narrow));
                }
            }
            if let (Factor::F32(fa), Factor::F32(fb)) = (va.factor(), vb.factor()) {
                let mut other = c.clone();
                let to = mat_mut(&mut other, n, va, vb);
                // SAFETY: `mat_mut` checks the shapes.
                unsafe { multiply_by_crate(to, fa, fb, how.onto(to)) };
                all.push(("crate", other));
            }
            for i in 0..m {
                for j in 0..n {
                    let dot: f64 = (0..k).map(|p| a.at(i, p, rounds) * b.at(p, j, rounds)).sum();
                    let before = if accumulate { f64::from(c[i * n + j]) } else { 0.0 };
                    let want = before + f64::from(how.alpha) * dot;
                    // k products of magnitude 1/12 each, rounded at 2^-24: 1e-5 leaves a wide margin.
                    for (name, got) in &all {
                        let got = got[i * n + j];
                        let what = [ta, tb, half_a, half_b];
                        assert!((f64::from(got) - want).abs() < 2e-5, "{name} {m} {n} {k} {what:?}: {got} {want}");
                    }
                }
            }
        }
    }
}

/// How A is stored decides whether it is packed, and how many columns there are and how many threads, where C is cut, and
/// what was measured, how large blocks are. None of it changes a bit.
#[test]
fn bits_depend_on_neither_the_kernel_nor_the_division() {
    let all = all_blocks().map(|blocks| Blocking { f32: blocks, bf16: blocks });
    for ((m, n, k), is_half) in
        [(1, 70, 40), (13, 100, 300), (28, 290, 1), (150, 577, 513), (20, 200, 1100)].into_iter().flat_map(both)
    {
        let a = TestFactor::new(m, k, false, 1);
        let b = TestFactor::new(k, n, false, 2);
        let turned = a.turned();
        let mut want = vec![0.0; m * n];
        gemm_small(&mut want, n, a.view(is_half), b.view(is_half), SET);
        let bits = |c: &[f32]| c.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (threads, blocking) in [1, 2, 3].into_iter().flat_map(|threads| all.map(|blocking| (threads, blocking))) {
            for (a, stored) in [(&a, "by rows"), (&turned, "by columns")] {
                let mut c = vec![0.0; m * n];
                let device = Device::blocked(threads, blocking);
                gemm(&device, &mut c, n, a.view(is_half), b.view(is_half), SET);
                assert_eq!(bits(&c), bits(&want), "{m} {n} {k}, {threads} threads, {stored}, {blocking:?}");
            }
        }
        // Each kernel of this CPU, into both types of sums: one that a CPU passes over may be another's first.
        for kernel in all_kernels(is_half) {
            let product = |blocks: ProductBlocks, a: &TestFactor| {
                let (va, vb) = (a.view(is_half), b.view(is_half));
                let (mut wide, mut half) = (vec![0.0f32; m * n], vec![bf16::ZERO; m * n]);
                // SAFETY: `mat_mut` checks the shapes, and the CPU has the kernel.
                unsafe {
                    let factors = (va.factor(), vb.factor());
                    let (wide, half) = (mat_mut(&mut wide, n, va, vb), mat_mut(&mut half, n, va, vb));
                    kernel.multiply(wide, factors, SET.onto(wide), blocks);
                    kernel.multiply(half, factors, SET.onto(half), blocks);
                }
                (bits(&wide), half)
            };
            let want = product(all_blocks()[0], &a);
            for (blocks, a) in all_blocks().into_iter().flat_map(|blocks| [(blocks, &a), (blocks, &turned)]) {
                assert!(product(blocks, a) == want, "{m} {n} {k}, {kernel:?}, {blocks:?}, {}", a.transposed);
            }
        }
        #[cfg(target_arch = "x86_64")]
        if let (Factor::F32(_), true) = (a.view(is_half).factor(), crate::cpu::sgemm_avx2::is_supported()) {
            let product = |blocks: ProductBlocks, a: &TestFactor| {
                let (va, vb, mut c) = (a.view(false), b.view(false), vec![0.0f32; m * n]);
                let (Factor::F32(fa), Factor::F32(fb)) = (va.factor(), vb.factor()) else { unreachable!() };
                // SAFETY: the CPU has been asked, and `mat_mut` checks the shapes.
                let to = mat_mut(&mut c, n, va, vb);
                unsafe { crate::cpu::sgemm_avx2::sgemm(to, fa, fb, SET.onto(to), blocks) };
                bits(&c)
            };
            let want = product(all_blocks()[0], &a);
            for (blocks, a) in all_blocks().into_iter().flat_map(|blocks| [(blocks, &a), (blocks, &turned)]) {
                assert!(product(blocks, a) == want, "AVX2: {m} {n} {k}, {blocks:?}, {}", a.transposed);
            }
        }
        // Nor does it matter what else C has.
        let (few, mut c) = (n.min(20), vec![0.0; m * n.min(20)]);
        gemm_small(&mut c, few, a.view(is_half), b.columns(few).view(is_half), SET);
        let wanted: Vec<f32> = want.chunks(n).flat_map(|line| &line[..few]).copied().collect();
        assert_eq!(bits(&c), bits(&wanted), "{few} columns of {m} {n} {k}");
    }
}

/// Sums onto rows that are filled with `row`, and onto the row where it lies, by `multiply`.
fn both_ways<T: Copy>([row, stale]: [&[T]; 2], rows: usize, multiply: impl Fn(&mut [T], bool)) -> [Vec<T>; 2] {
    let (mut filled, mut started) = (row.repeat(rows), stale.repeat(rows));
    multiply(&mut filled, false);
    multiply(&mut started, true);
    [filled, started]
}

/// To the bit, whatever multiplies and however C is divided.
#[test]
fn a_row_is_a_start_like_rows_that_are_filled_with_it() {
    fn check<T: SumElement>([a, b]: [View; 2], rows: [&[T]; 2], bits: fn(&T) -> u32) {
        let what = format!("{} {} {}", a.rows, b.cols, a.cols);
        let start = |c: MatMut<T>, is_row: bool| if is_row { Onto::row(rows[0], a.rows) } else { ADD.onto(c) };
        let equal = |[filled, started]: [Vec<T>; 2], how: &str| {
            assert!(filled.iter().map(bits).eq(started.iter().map(bits)), "{what}, {how}");
        };
        for kernel in all_kernels(a.is_bf16()) {
            for blocks in all_blocks() {
                let ways = both_ways(rows, a.rows, |c, is_row| {
                    let c = mat_mut(c, b.cols, a, b);
                    // SAFETY: `mat_mut` checks the shapes, the CPU has the kernel, and a row is all rows of the start.
                    unsafe { kernel.multiply(c, (a.factor(), b.factor()), start(c, is_row), blocks) }
                });
                equal(ways, &format!("{kernel:?}, {blocks:?}"));
            }
        }
        for threads in [1, 2, 3] {
            let device = Device::new(threads);
            let ways = both_ways(rows, a.rows, |c, is_row| match is_row {
                true => gemm_onto_row(&device, c, a, b, rows[0]),
                false => gemm(&device, c, b.cols, a, b, ADD),
            });
            equal(ways, &format!("{threads} threads"));
        }
    }
    let shapes = [(1, 70, 40), (14, 33, 300), (28, 290, 1), (150, 577, 513), (32, 64, 64), (5, 7, 0)];
    for ((m, n, k), is_half) in shapes.into_iter().flat_map(both) {
        let (a, b) = (TestFactor::new(m, k, false, 1), TestFactor::new(k, n, true, 2));
        let row = numbers(n, 3);
        let half: Vec<bf16> = row.iter().map(|&x| round(x)).collect();
        for a in [&a, &a.turned()] {
            let factors = [a.view(is_half), b.view(is_half)];
            check(factors, [&row, &vec![f32::NAN; n]], |x| x.to_bits());
            check(factors, [&half, &vec![bf16::NAN; n]], |x| u32::from(x.to_bits()));
        }
    }
}

/// The same of what this CPU may pass over.
#[test]
fn other_kernels_start_from_a_row_too() {
    for (m, n, k) in [(1, 70, 40), (14, 33, 300), (150, 577, 513)] {
        let (a, b) = (TestFactor::new(m, k, false, 1), TestFactor::new(k, n, true, 2));
        let (row, a, b) = (numbers(n, 3), a.view(false), b.view(false));
        let (Factor::F32(fa), Factor::F32(fb)) = (a.factor(), b.factor()) else { unreachable!("they are stored so") };
        let check = |what: &str, multiply: &dyn Fn(MatMut, Onto)| {
            let [filled, started] = both_ways([&row, &vec![f32::NAN; n]], m, |c, is_row| {
                let c = mat_mut(c, n, a, b);
                multiply(c, if is_row { Onto::row(&row, m) } else { ADD.onto(c) });
            });
            let bits = |c: Vec<f32>| c.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(started), bits(filled), "{what}: {m} {n} {k}");
        };
        // SAFETY: `mat_mut` checks the shapes.
        check("crate", &|c, onto| unsafe { multiply_by_crate(c, fa, fb, onto) });
        #[cfg(target_arch = "x86_64")]
        if crate::cpu::sgemm_avx2::is_supported() {
            // SAFETY: the CPU has been asked, and `mat_mut` checks the shapes.
            check("avx2", &|c, onto| unsafe { crate::cpu::sgemm_avx2::sgemm(c, fa, fb, onto, all_blocks()[1]) });
        }
    }
}

/// Instructions for bf16 make zeros of sums below the smallest normal number, and keep their sign.
#[test]
fn the_sign_of_a_zero_does_not_depend_on_the_division() {
    let tiny = |len: usize, sign: f32| vec![round(sign * 1e-20); len];
    for (m, n, k) in [(7, 70, 40), (70, 130, 300)] {
        let (a, b) = (tiny(m * k, -1.0), tiny(k * n, 1.0));
        let a = View::of(Numbers::Bf16(&a), m, k, k);
        let b = View::of(Numbers::Bf16(&b), k, n, n);
        for kernel in all_kernels(true) {
            let product = |blocks: ProductBlocks| {
                let (mut wide, mut half) = (vec![1.0f32; m * n], vec![bf16::ONE; m * n]);
                let factors = (a.factor(), b.factor());
                let (to, to_half) = (mat_mut(&mut wide, n, a, b), mat_mut(&mut half, n, a, b));
                // SAFETY: `mat_mut` checks the shapes, and the CPU has the kernel.
                unsafe {
                    kernel.multiply(to, factors, SET.onto(to), blocks);
                    kernel.multiply(to_half, factors, SET.onto(to_half), blocks);
                }
                let half: Vec<u16> = half.iter().map(|x| x.to_bits()).collect();
                (wide.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), half)
            };
            let [want, others @ ..] = all_blocks().map(product);
            others.iter().for_each(|other| assert!(*other == want, "{kernel:?} {m} {n} {k}"));
            assert!(want.1.iter().all(|x| *x == want.1[0]), "{kernel:?} {m} {n} {k}");
        }
    }
}

/// Each sum is rounded once, however long it is.
#[test]
fn sums_are_rounded_once_where_they_are_stored_in_bf16() {
    let untold = Blocking::default();
    // Tiles round sums while they compute the next ones if there are many terms and alpha is 1.
    let shapes =
        [(32, 64, 64), (15, 33, 700), (150, 70, 17), (3, 1100, 1300), (5, 7, 0), (70, 130, 256), (96, 80, 300)];
    for ((m, n, k), alpha) in shapes.into_iter().flat_map(|shape| [(shape, 0.5), (shape, 1.0)]) {
        let (a, b, c) =
            (TestFactor::new(m, k, false, 1), TestFactor::new(k, n, true, 2), TestFactor::new(m, n, false, 3));
        for (rounds, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
            let (va, vb) = (a.view(rounds), b.view(rounds));
            let how = Into { alpha, accumulate };
            for kernel in all_kernels(rounds) {
                let (mut narrow, mut wide) = (c.half.clone(), c.half.iter().map(|&x| widen(x)).collect::<Vec<_>>());
                let (half, full) = (mat_mut(&mut narrow, n, va, vb), mat_mut(&mut wide, n, va, vb));
                let (factors, blocks) = ((va.factor(), vb.factor()), kernel.blocks(&untold));
                // SAFETY: `mat_mut` checks the shapes, and the CPU has the kernel.
                unsafe {
                    kernel.multiply(half, factors, how.onto(half), blocks);
                    kernel.multiply(full, factors, how.onto(full), blocks);
                }
                for (at, (got, want)) in narrow.iter().zip(&wide).enumerate() {
                    // Half a unit of the last of eight bits, and the sums in another order.
                    let most = want.abs() / 256.0 + 1e-5;
                    assert!((widen(*got) - want).abs() <= most, "{kernel:?} {m} {n} {k}, {at}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn strided_output_leaves_the_rest_alone() {
    let (a, b) = (TestFactor::new(7, 5, false, 1), numbers(3 * 100, 2));
    for a in [Numbers::F32(&a.wide), Numbers::Bf16(&a.half)] {
        for cols in [2, 33, 100] {
            let mut c = vec![9.0; 7 * 101];
            // Rows of A lie apart, too.
            gemm_small(&mut c, 101, View::of(a, 7, 3, 5), View::new(&b, 3, cols, 100), SET);
            let is_outside = |at: usize| at % 101 >= cols;
            assert!((0..c.len()).all(|at| is_outside(at) == (c[at] == 9.0)), "{cols}: {c:?}");
        }
    }
}
