//! Matrix products on the CPU: strided views, the choice of kernel at run time, the split over threads.
//!
//! A product of which either factor is bf16 multiplies bf16 and sums in f32; f32 numbers of the other factor are rounded.
//! Where the CPU multiplies bf16, `bgemm` runs; elsewhere the factors are widened, and sums alone may differ.
//!
//! Products of f32 run, on CPUs with AVX-512 or with AVX2, on our own kernels (`sgemm_avx512`, `sgemm_avx2`: faster than the
//! crate on the machines measured, see BENCHMARKS.md); everywhere else on the `gemm` crate's.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::bgemm::{self, Unit};
use super::mat::{Factor, Mat, MatMut};
use super::stored::{StoredRef, round, widen};
use crate::device::Device;

/// The numbers of a matrix, as they are stored.
#[derive(Clone, Copy)]
pub(crate) enum Numbers<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> From<StoredRef<'a>> for Numbers<'a> {
    #[track_caller]
    fn from(stored: StoredRef<'a>) -> Numbers<'a> {
        match stored {
            StoredRef::F32(numbers) => Numbers::F32(numbers),
            StoredRef::Bf16(numbers) => Numbers::Bf16(numbers),
            StoredRef::U32(_) => panic!("indices are not multiplied"),
        }
    }
}

impl<'a> Numbers<'a> {
    pub(crate) fn len(self) -> usize {
        match self {
            Numbers::F32(numbers) => numbers.len(),
            Numbers::Bf16(numbers) => numbers.len(),
        }
    }

    /// Those from `first` on.
    #[track_caller]
    pub(crate) fn tail(self, first: usize) -> Numbers<'a> {
        match self {
            Numbers::F32(numbers) => Numbers::F32(&numbers[first..]),
            Numbers::Bf16(numbers) => Numbers::Bf16(&numbers[first..]),
        }
    }
}

/// A read-only matrix: element (i, j) at `data[i * row_stride + j * col_stride]`; one stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    data: Numbers<'a>,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    /// Whether it is multiplied in bf16, though stored in f32.
    rounds: bool,
}

impl<'a> View<'a> {
    /// Rows of `cols` elements, `stride` apart.
    #[track_caller]
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> View<'a> {
        View::of(Numbers::F32(data), rows, cols, stride)
    }

    /// The same of numbers of either type.
    #[track_caller]
    pub(crate) fn of(data: Numbers<'a>, rows: usize, cols: usize, stride: usize) -> View<'a> {
        assert!(cols <= stride || rows <= 1, "rows of {cols} overlap at stride {stride}");
        assert!(covers(data.len(), rows, cols, stride), "{} elements, {rows} x {cols} at {stride}", data.len());
        View { data, rows, cols, row_stride: stride, col_stride: 1, rounds: false }
    }

    /// The transposed matrix over the same memory.
    pub(crate) fn t(self) -> View<'a> {
        let View { rows, cols, row_stride, col_stride, .. } = self;
        View { rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride, ..self }
    }

    /// The same, to be multiplied in bf16 if `rounds`, however it is stored.
    pub(crate) fn rounded(self, rounds: bool) -> View<'a> {
        View { rounds, ..self }
    }

    /// Some of its rows.
    #[track_caller]
    pub(crate) fn at_rows(self, rows: Range<usize>) -> View<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        // A matrix without columns has no elements to begin at.
        let first = (rows.start * self.row_stride).min(self.data.len());
        View { data: self.data.tail(first), rows: rows.len(), ..self }
    }

    fn is_bf16(&self) -> bool {
        self.rounds || matches!(self.data, Numbers::Bf16(_))
    }

    fn factor(self) -> Factor {
        let View { data, rows, cols, row_stride, col_stride, .. } = self;
        match data {
            Numbers::F32(data) => Factor::F32(Mat { data: data.as_ptr(), rows, cols, row_stride, col_stride }),
            Numbers::Bf16(data) => Factor::Bf16(Mat { data: data.as_ptr(), rows, cols, row_stride, col_stride }),
        }
    }
}

fn covers(len: usize, rows: usize, cols: usize, stride: usize) -> bool {
    rows == 0 || cols == 0 || (rows - 1) * stride + cols <= len
}

/// What to do with the product: `c = alpha * ab`, or `c += alpha * ab`.
#[derive(Clone, Copy)]
pub(crate) struct Into {
    pub(crate) alpha: f32,
    pub(crate) accumulate: bool,
}

/// `c = ab`.
pub(crate) const SET: Into = Into { alpha: 1.0, accumulate: false };
/// `c += ab`.
pub(crate) const ADD: Into = Into { alpha: 1.0, accumulate: true };

/// SET or ADD.
pub(crate) fn set_or_add(accumulate: bool) -> Into {
    Into { alpha: 1.0, accumulate }
}

/// `c (+)= alpha * a * b` with all the device's threads. `c` has rows `stride` apart; its sums are f32, rounded once where
/// it is not.
#[track_caller]
pub(super) fn gemm<T: Sum>(device: &Device, c: &mut [T], stride: usize, a: View, b: View, how: Into) {
    let c = mat_mut(c, stride, a, b);
    let kernel = Kernel::of(a, b);
    let parts = if a.rows * a.cols * b.cols < kernel.least_shared() { 1 } else { device.threads() };
    let factors = (a.factor(), b.factor());
    if parts == 1 {
        // SAFETY: `mat_mut` has checked the shapes against the memory.
        return unsafe { kernel.multiply(c, factors, how) };
    }
    // Every part packs all of the operand that is not split: split the longer side.
    let (by_rows, [tile_rows, tile_cols]) = (a.rows >= b.cols, kernel.tile());
    rayon::scope(|scope| {
        for part in 0..parts {
            let run = move || {
                // Whole register tiles for every part but the last.
                let cut = |n: usize, tile: usize, part: usize| (n * part / parts).next_multiple_of(tile).min(n);
                let (left, right) = factors;
                // SAFETY: the parts are disjoint blocks of C inside the checked shapes.
                unsafe {
                    if by_rows {
                        let (i, end) = (cut(a.rows, tile_rows, part), cut(a.rows, tile_rows, part + 1));
                        let factors = (left.block(i, 0, end - i, a.cols), right);
                        kernel.multiply(c.block(i, 0, end - i, c.cols), factors, how);
                    } else {
                        let (j, end) = (cut(b.cols, tile_cols, part), cut(b.cols, tile_cols, part + 1));
                        let factors = (left, right.block(0, j, b.rows, end - j));
                        kernel.multiply(c.block(0, j, c.rows, end - j), factors, how);
                    }
                }
            };
            if part + 1 == parts { run() } else { scope.spawn(move |_| run()) }
        }
    });
}

/// The same on the calling thread alone: for kernels that are parallel outside.
#[track_caller]
pub(super) fn gemm_serial<T: Sum>(c: &mut [T], stride: usize, a: View, b: View, how: Into) {
    let c = mat_mut(c, stride, a, b);
    // SAFETY: `mat_mut` has checked the shapes against the memory.
    unsafe { Kernel::of(a, b).multiply(c, (a.factor(), b.factor()), how) }
}

#[track_caller]
fn mat_mut<T>(c: &mut [T], stride: usize, a: View, b: View) -> MatMut<T> {
    assert_eq!(a.cols, b.rows, "{} x {} times {} x {}", a.rows, a.cols, b.rows, b.cols);
    assert!(b.cols <= stride || a.rows <= 1, "rows of {} overlap at stride {stride}", b.cols);
    assert!(covers(c.len(), a.rows, b.cols, stride), "{} x {} at {stride} in {}", a.rows, b.cols, c.len());
    MatMut { data: c.as_mut_ptr(), rows: a.rows, cols: b.cols, row_stride: stride }
}

/// What multiplies two matrices on this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// Products of bf16.
    #[cfg(target_arch = "x86_64")]
    Bf16(Unit),
    /// Products of bf16 where the CPU has none: its numbers are widened.
    Widened,
    F32,
}

impl Kernel {
    fn of(a: View, b: View) -> Kernel {
        if !a.is_bf16() && !b.is_bf16() {
            return Kernel::F32;
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(unit) = Unit::of_this_cpu() {
            return Kernel::Bf16(unit);
        }
        Kernel::Widened
    }

    /// Multiply-adds from which on more than one thread works on a product.
    fn least_shared(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Kernel::Bf16(Unit::Amx) => 1 << 21,
            _ => 1 << 18,
        }
    }

    /// Rows and columns of C that the kernel keeps in registers.
    fn tile(self) -> [usize; 2] {
        #[cfg(target_arch = "x86_64")]
        {
            use super::{sgemm_avx2, sgemm_avx512};
            if let Kernel::Bf16(unit) = self {
                return [unit.rows(), bgemm::NR];
            }
            if sgemm_avx512::is_supported() {
                return [sgemm_avx512::MR, sgemm_avx512::NR];
            }
            if sgemm_avx2::is_supported() {
                return [sgemm_avx2::MR, sgemm_avx2::NR];
            }
        }
        // The crate's kernels have several; all divide these.
        [12, 32]
    }

    /// # Safety
    /// The matrices cover the memory their shapes and strides say, and C overlaps neither factor.
    unsafe fn multiply<T: Sum>(self, c: MatMut<T>, (a, b): (Factor, Factor), how: Into) {
        if c.rows == 0 || c.cols == 0 {
            return;
        }
        // SAFETY: the caller's promise; the CPU has been asked for its unit.
        unsafe {
            match (self, a, b) {
                (Kernel::F32, Factor::F32(a), Factor::F32(b)) => T::multiply_f32(c, a, b, how),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Bf16(unit), ..) if a.cols() > 0 => bgemm::bgemm(unit, c, a, b, how.alpha, how.accumulate),
                _ => multiply_widened(c, a, b, how),
            }
        }
    }
}

/// What the elements of a product are stored as.
#[cfg(target_arch = "x86_64")]
pub(super) trait Sum: Stores + bgemm::Sums {}
#[cfg(target_arch = "x86_64")]
impl<T: Stores + bgemm::Sums> Sum for T {}

/// What the elements of a product are stored as.
#[cfg(not(target_arch = "x86_64"))]
pub(super) trait Sum: Stores {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: Stores> Sum for T {}

/// Elements that a product of f32 is stored as.
pub(super) trait Stores: Copy + Send + Sync {
    /// # Safety
    /// As [`Kernel::multiply`], and C has elements.
    unsafe fn multiply_f32(c: MatMut<Self>, a: Mat, b: Mat, how: Into);
}

impl Stores for f32 {
    unsafe fn multiply_f32(c: MatMut, a: Mat, b: Mat, how: Into) {
        // SAFETY: the caller's promise.
        unsafe { multiply(c, a, b, how) }
    }
}

impl Stores for bf16 {
    /// Through f32, a block at a time.
    unsafe fn multiply_f32(c: MatMut<bf16>, a: Mat, b: Mat, how: Into) {
        thread_local! {
            static WIDE: RefCell<Vec<f32>> = RefCell::default();
        }
        WIDE.with_borrow_mut(|space| {
            let rows = (BLOCK * BLOCK / c.cols).max(1);
            space.resize(space.len().max(rows.min(c.rows) * c.cols), 0.0);
            for i in (0..c.rows).step_by(rows) {
                let rows = rows.min(c.rows - i);
                let wide = MatMut { data: space.as_mut_ptr(), rows, cols: c.cols, row_stride: c.cols };
                // SAFETY: the blocks lie inside the matrices, and `space` has room for the sums of one.
                unsafe {
                    multiply(wide, a.block(i, 0, rows, a.cols), b, Into { accumulate: false, ..how });
                    for r in 0..rows {
                        let to = std::slice::from_raw_parts_mut(c.data.add((i + r) * c.row_stride), c.cols);
                        let sums = &space[r * c.cols..][..c.cols];
                        let before = |to: bf16| if how.accumulate { widen(to) } else { 0.0 };
                        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = round(before(*to) + sum));
                    }
                }
            }
        });
    }
}

/// Rows and columns of what is widened at once at most.
const BLOCK: usize = 512;

/// # Safety
/// As [`Kernel::multiply`], and C has elements.
unsafe fn multiply_widened<T: Sum>(c: MatMut<T>, a: Factor, b: Factor, how: Into) {
    thread_local! {
        /// The factors, kept for the thread's life.
        static WIDE: RefCell<[Vec<f32>; 2]> = RefCell::default();
    }
    let k = a.cols();
    let lines = (BLOCK * BLOCK / k.max(1)).clamp(32, BLOCK);
    WIDE.with_borrow_mut(|[a_space, b_space]| {
        for j in (0..c.cols).step_by(lines) {
            let cols = lines.min(c.cols - j);
            // SAFETY: the blocks lie inside the matrices; the rest is the caller's promise.
            unsafe {
                let b = widened(b.block(0, j, k, cols), b_space);
                for i in (0..c.rows).step_by(lines) {
                    let rows = lines.min(c.rows - i);
                    let a = widened(a.block(i, 0, rows, k), a_space);
                    T::multiply_f32(c.block(i, j, rows, cols), a, b, how);
                }
            }
        }
    });
}

/// The numbers of a factor, each one of bf16's, in memory of their own and in the order in which they lie.
///
/// # Safety
/// The matrix covers its memory.
unsafe fn widened(factor: Factor, space: &mut Vec<f32>) -> Mat {
    /// # Safety
    /// As [`widened`].
    unsafe fn each<T: Copy>(m: Mat<T>, space: &mut Vec<f32>, f: impl Fn(T) -> f32) -> Mat {
        let is_by_rows = m.col_stride == 1;
        let lines = if is_by_rows { m } else { m.transposed() };
        space.clear();
        for line in 0..lines.rows {
            // SAFETY: the line exists.
            let line = unsafe { std::slice::from_raw_parts(lines.data.add(line * lines.row_stride), lines.cols) };
            space.extend(line.iter().map(|&x| f(x)));
        }
        let wide =
            Mat { data: space.as_ptr(), rows: lines.rows, cols: lines.cols, row_stride: lines.cols, col_stride: 1 };
        if is_by_rows { wide } else { wide.transposed() }
    }
    // SAFETY: the caller's promise.
    unsafe {
        match factor {
            Factor::F32(mat) => each(mat, space, |x| widen(round(x))),
            Factor::Bf16(mat) => each(mat, space, widen),
        }
    }
}

/// # Safety
/// As [`Kernel::multiply`], and C has elements.
unsafe fn multiply(c: MatMut, a: Mat, b: Mat, how: Into) {
    #[cfg(target_arch = "x86_64")]
    if super::sgemm_avx512::is_supported() && a.cols > 0 {
        // SAFETY: the CPU has been asked; the rest is the caller's promise.
        return unsafe { super::sgemm_avx512::sgemm(c, a, b, how.alpha, how.accumulate) };
    }
    #[cfg(target_arch = "x86_64")]
    if super::sgemm_avx2::is_supported() && a.cols > 0 {
        // SAFETY: as above.
        return unsafe { super::sgemm_avx2::sgemm(c, a, b, how.alpha, how.accumulate) };
    }
    // SAFETY: the caller's promise.
    unsafe { multiply_by_crate(c, a, b, how) }
}

/// # Safety
/// As `multiply`.
unsafe fn multiply_by_crate(c: MatMut, a: Mat, b: Mat, how: Into) {
    let kernel = gemm_f32::gemm::f32::get_gemm_fn();
    let keep = if how.accumulate { 1.0 } else { 0.0 };
    // SAFETY: strides and shapes are those of the matrices; column strides come before row strides.
    unsafe {
        kernel(
            c.rows,
            c.cols,
            a.cols,
            c.data,
            1,
            c.row_stride as isize,
            how.accumulate,
            a.data,
            a.col_stride as isize,
            a.row_stride as isize,
            b.data,
            b.col_stride as isize,
            b.row_stride as isize,
            keep,
            how.alpha,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::{Draws, Purpose};

    fn numbers(n: usize, stream: u32) -> Vec<f32> {
        let draws = Draws::new(5, Purpose::Test, 0, stream);
        (0..n as u64).map(|i| draws.uniform(i) - 0.5).collect()
    }

    /// A factor of each type, as it is stored, and its numbers as a product takes them.
    struct Stored {
        wide: Vec<f32>,
        half: Vec<bf16>,
        rows: usize,
        cols: usize,
        transposed: bool,
    }

    impl Stored {
        fn new(rows: usize, cols: usize, transposed: bool, stream: u32) -> Stored {
            let wide = numbers(rows * cols, stream);
            let half = wide.iter().map(|&x| round(x)).collect();
            Stored { wide, half, rows, cols, transposed }
        }

        fn view(&self, is_half: bool) -> View<'_> {
            let data = if is_half { Numbers::Bf16(&self.half) } else { Numbers::F32(&self.wide) };
            match self.transposed {
                true => View::of(data, self.cols, self.rows, self.rows).t(),
                false => View::of(data, self.rows, self.cols, self.cols),
            }
        }

        fn at(&self, i: usize, j: usize, rounds: bool) -> f64 {
            let at = if self.transposed { j * self.rows + i } else { i * self.cols + j };
            f64::from(if rounds { widen(self.half[at]) } else { self.wide[at] })
        }
    }

    /// Kernels that this CPU can run.
    fn all_kernels(is_bf16: bool) -> Vec<Kernel> {
        if !is_bf16 {
            return vec![Kernel::F32];
        }
        let mut kernels = vec![Kernel::Widened];
        #[cfg(target_arch = "x86_64")]
        kernels.extend(match Unit::of_this_cpu() {
            Some(Unit::Amx) => vec![Kernel::Bf16(Unit::Amx), Kernel::Bf16(Unit::Avx512)],
            Some(Unit::Avx512) => vec![Kernel::Bf16(Unit::Avx512)],
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
            (5, 7, 0),
        ] {
            let flags = |bits: u32| [0, 1, 2, 3, 4].map(|bit| bits >> bit & 1 == 1);
            for [accumulate, ta, tb, half_a, half_b] in (0..32).map(flags) {
                let (a, b, c) = (Stored::new(m, k, ta, 1), Stored::new(k, n, tb, 2), numbers(m * n, 3));
                let (va, vb, rounds) = (a.view(half_a), b.view(half_b), half_a || half_b);
                let how = Into { alpha: if tb { 0.5 } else { 1.0 }, accumulate };
                let (mut parallel, mut serial) = (c.clone(), c.clone());
                gemm(&device, &mut parallel, n, va, vb, how);
                gemm_serial(&mut serial, n, va, vb, how);
                let mut all = vec![("parallel", parallel), ("serial", serial)];
                for kernel in all_kernels(rounds) {
                    let mut other = c.clone();
                    // SAFETY: `mat_mut` checks the shapes, and the CPU has the kernel.
                    unsafe { kernel.multiply(mat_mut(&mut other, n, va, vb), (va.factor(), vb.factor()), how) };
                    all.push(("each kernel", other));
                }
                if let (Factor::F32(fa), Factor::F32(fb)) = (va.factor(), vb.factor()) {
                    let mut other = c.clone();
                    // SAFETY: `mat_mut` checks the shapes.
                    unsafe { multiply_by_crate(mat_mut(&mut other, n, va, vb), fa, fb, how) };
                    all.push(("crate", other));
                    #[cfg(target_arch = "x86_64")]
                    if super::super::sgemm_avx2::is_supported() && k > 0 {
                        let mut narrow = c.clone();
                        let to = mat_mut(&mut narrow, n, va, vb);
                        // SAFETY: the CPU has been asked, and `mat_mut` checks the shapes.
                        unsafe { super::super::sgemm_avx2::sgemm(to, fa, fb, how.alpha, how.accumulate) };
                        all.push(("avx2", narrow));
                    }
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

    /// Each sum is rounded once, however long it is.
    #[test]
    fn sums_are_rounded_once_where_they_are_stored_in_bf16() {
        for (m, n, k) in [(32, 64, 64), (15, 33, 700), (150, 70, 17), (3, 1100, 1300), (5, 7, 0)] {
            let (a, b, c) = (Stored::new(m, k, false, 1), Stored::new(k, n, true, 2), Stored::new(m, n, false, 3));
            for (rounds, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
                let (va, vb) = (a.view(rounds), b.view(rounds));
                let how = Into { alpha: 0.5, accumulate };
                for kernel in all_kernels(rounds) {
                    let (mut narrow, mut wide) = (c.half.clone(), c.half.iter().map(|&x| widen(x)).collect::<Vec<_>>());
                    // SAFETY: `mat_mut` checks the shapes, and the CPU has the kernel.
                    unsafe {
                        kernel.multiply(mat_mut(&mut narrow, n, va, vb), (va.factor(), vb.factor()), how);
                        kernel.multiply(mat_mut(&mut wide, n, va, vb), (va.factor(), vb.factor()), how);
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
    fn f32_is_rounded_where_it_is_asked_for() {
        let (a, b) = (numbers(6 * 40, 1), numbers(40 * 3, 2));
        let product = |rounds: bool| {
            let mut c = vec![0.0; 18];
            gemm_serial(&mut c, 3, View::new(&a, 6, 40, 40).rounded(rounds), View::new(&b, 40, 3, 3), SET);
            c
        };
        let half = |x: &[f32]| x.iter().map(|&x| widen(round(x))).collect::<Vec<f32>>();
        let (a16, b16) = (half(&a), half(&b));
        let mut want = vec![0.0; 18];
        gemm_serial(&mut want, 3, View::new(&a16, 6, 40, 40), View::new(&b16, 40, 3, 3), SET);
        assert!(product(true).iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-6));
        assert!(product(false).iter().zip(&want).any(|(x, y)| (x - y).abs() > 1e-4), "the test sees the difference");
    }

    #[test]
    fn strided_output_leaves_the_rest_alone() {
        for rounds in [false, true] {
            let (a, b) = (numbers(6, 1), numbers(6, 2));
            let mut c = vec![9.0; 10];
            gemm_serial(&mut c, 5, View::new(&a, 2, 3, 3).rounded(rounds), View::new(&b, 3, 2, 2), SET);
            assert!([2, 3, 4, 7, 8, 9].iter().all(|&i| c[i] == 9.0), "{c:?}");
        }
    }
}
