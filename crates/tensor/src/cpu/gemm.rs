//! Matrix products on the CPU: strided views, the choice of kernel at run time, the split over threads.
//!
//! On CPUs with AVX-512 or with AVX2 our own kernels run (`sgemm_avx512`, `sgemm_avx2`: faster than the crate on the
//! machines measured, see BENCHMARKS.md); everywhere else the `gemm` crate's.

use std::ops::Range;

use super::mat::{Mat, MatMut};
use crate::device::Device;

/// A read-only matrix: element (i, j) at `data[i * row_stride + j * col_stride]`; one stride is 1.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> View<'a> {
    /// Rows of `cols` elements, `stride` apart.
    #[track_caller]
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> View<'a> {
        assert!(cols <= stride || rows <= 1, "rows of {cols} overlap at stride {stride}");
        assert!(covers(data.len(), rows, cols, stride), "{} elements, {rows} x {cols} at {stride}", data.len());
        View { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transposed matrix over the same memory.
    pub(crate) fn t(self) -> View<'a> {
        let View { data, rows, cols, row_stride, col_stride } = self;
        View { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Some of its rows.
    #[track_caller]
    pub(crate) fn at_rows(self, rows: Range<usize>) -> View<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        // A matrix without columns has no elements to begin at.
        let first = (rows.start * self.row_stride).min(self.data.len());
        View { data: &self.data[first..], rows: rows.len(), ..self }
    }

    fn mat(self) -> Mat {
        let View { data, rows, cols, row_stride, col_stride } = self;
        Mat { data: data.as_ptr(), rows, cols, row_stride, col_stride }
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

/// `c (+)= alpha * a * b` with all the device's threads. `c` has rows `stride` apart.
#[track_caller]
pub(crate) fn gemm(device: &Device, c: &mut [f32], stride: usize, a: View, b: View, how: Into) {
    let c = mat_mut(c, stride, a, b);
    let parts = if a.rows * a.cols * b.cols < 1 << 18 { 1 } else { device.threads() };
    if parts == 1 {
        // SAFETY: `mat_mut` has checked the shapes against the memory.
        return unsafe { multiply(c, a.mat(), b.mat(), how) };
    }
    // Every part packs all of the operand that is not split: split the longer side.
    let (by_rows, [tile_rows, tile_cols]) = (a.rows >= b.cols, register_tile());
    rayon::scope(|scope| {
        for part in 0..parts {
            let run = move || {
                // Whole register tiles for every part but the last.
                let cut = |n: usize, tile: usize, part: usize| (n * part / parts).next_multiple_of(tile).min(n);
                // SAFETY: the parts are disjoint blocks of C inside the checked shapes.
                unsafe {
                    if by_rows {
                        let (i, end) = (cut(a.rows, tile_rows, part), cut(a.rows, tile_rows, part + 1));
                        let rows = end - i;
                        multiply(c.block(i, 0, rows, c.cols), a.mat().block(i, 0, rows, a.cols), b.mat(), how);
                    } else {
                        let (j, end) = (cut(b.cols, tile_cols, part), cut(b.cols, tile_cols, part + 1));
                        let cols = end - j;
                        multiply(c.block(0, j, c.rows, cols), a.mat(), b.mat().block(0, j, b.rows, cols), how);
                    }
                }
            };
            if part + 1 == parts { run() } else { scope.spawn(move |_| run()) }
        }
    });
}

/// The same on the calling thread alone: for kernels that are parallel outside.
#[track_caller]
pub(crate) fn gemm_serial(c: &mut [f32], stride: usize, a: View, b: View, how: Into) {
    let c = mat_mut(c, stride, a, b);
    // SAFETY: `mat_mut` has checked the shapes against the memory.
    unsafe { multiply(c, a.mat(), b.mat(), how) }
}

#[track_caller]
fn mat_mut(c: &mut [f32], stride: usize, a: View, b: View) -> MatMut {
    assert_eq!(a.cols, b.rows, "{} x {} times {} x {}", a.rows, a.cols, b.rows, b.cols);
    assert!(b.cols <= stride || a.rows <= 1, "rows of {} overlap at stride {stride}", b.cols);
    assert!(covers(c.len(), a.rows, b.cols, stride), "{} x {} at {stride} in {}", a.rows, b.cols, c.len());
    MatMut { data: c.as_mut_ptr(), rows: a.rows, cols: b.cols, row_stride: stride }
}

/// Rows and columns of C that the kernel of this CPU keeps in registers.
fn register_tile() -> [usize; 2] {
    #[cfg(target_arch = "x86_64")]
    {
        use super::{sgemm_avx2, sgemm_avx512};
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
/// The matrices cover the memory their shapes and strides say, and C overlaps neither A nor B.
unsafe fn multiply(c: MatMut, a: Mat, b: Mat, how: Into) {
    if c.rows == 0 || c.cols == 0 {
        return;
    }
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

    /// Every kernel against an f64 loop, over shapes that leave every kind of edge and all three transpositions.
    #[test]
    fn products_equal_an_f64_loop() {
        let device = Device::new(2);
        for (m, n, k) in [
            (1, 1, 1),
            (14, 32, 16),
            (15, 33, 17),
            (3, 100, 300),
            (150, 70, 513),
            (29, 1100, 40),
            (7, 2061, 9),
            (5, 7, 0),
        ] {
            let transposed = [(false, false), (false, true), (true, false), (true, true)];
            for (accumulate, (ta, tb)) in [false, true].into_iter().flat_map(|add| transposed.map(|t| (add, t))) {
                let (a, b, c) = (numbers(m * k, 1), numbers(k * n, 2), numbers(m * n, 3));
                let view = |x: &'static str, data, rows, cols, t: bool| {
                    let _ = x;
                    if t { View::new(data, cols, rows, rows).t() } else { View::new(data, rows, cols, cols) }
                };
                let (va, vb) = (view("a", &a[..], m, k, ta), view("b", &b[..], k, n, tb));
                let how = Into { alpha: 0.5, accumulate };
                let (mut parallel, mut serial, mut other) = (c.clone(), c.clone(), c.clone());
                gemm(&device, &mut parallel, n, va, vb, how);
                gemm_serial(&mut serial, n, va, vb, how);
                // SAFETY: `mat_mut` checks the shapes.
                unsafe { multiply_by_crate(mat_mut(&mut other, n, va, vb), va.mat(), vb.mat(), how) };
                let mut narrow = other.clone();
                #[cfg(target_arch = "x86_64")]
                if super::super::sgemm_avx2::is_supported() && k > 0 {
                    narrow.copy_from_slice(&c);
                    let c = mat_mut(&mut narrow, n, va, vb);
                    // SAFETY: the CPU has been asked, and `mat_mut` checks the shapes.
                    unsafe { super::super::sgemm_avx2::sgemm(c, va.mat(), vb.mat(), how.alpha, how.accumulate) };
                }
                for i in 0..m {
                    for j in 0..n {
                        let at = |v: View, i: usize, j: usize| f64::from(v.data[i * v.row_stride + j * v.col_stride]);
                        let dot: f64 = (0..k).map(|p| at(va, i, p) * at(vb, p, j)).sum();
                        let want = if accumulate { f64::from(c[i * n + j]) } else { 0.0 } + 0.5 * dot;
                        // k products of magnitude 1/12 each, rounded at 2^-24: 1e-5 leaves a wide margin.
                        for got in [&parallel, &serial, &other, &narrow].map(|c| c[i * n + j]) {
                            assert!((f64::from(got) - want).abs() < 1e-5, "{m} {n} {k} {ta} {tb}: {got} {want}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn strided_output_leaves_the_rest_alone() {
        let (a, b) = (numbers(6, 1), numbers(6, 2));
        let mut c = vec![9.0; 10];
        gemm_serial(&mut c, 5, View::new(&a, 2, 3, 3), View::new(&b, 3, 2, 2), SET);
        assert!([2, 3, 4, 7, 8, 9].iter().all(|&i| c[i] == 9.0), "{c:?}");
    }
}
