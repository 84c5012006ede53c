//! Single products by cuBLAS.

use std::ffi::{c_int, c_void};

use cudarc::cublas::result as blas;
use cudarc::cublas::sys as blas_sys;
use cudarc::driver::CudaStream;

use super::{done, failed};
use crate::dtype::Dtype;
use crate::gpu::error::EngineError;
use crate::gpu::{DeviceMatrix, DeviceProduct};

/// Streams that share products of which none waits for another: at its end, a product leaves most of a GPU idle. More of them
/// than two are slower again (BENCHMARKS.md).
pub(super) const LANES: usize = 2;

/// A handle of cuBLAS.
#[derive(Debug)]
pub(super) struct BlasHandle(pub(super) blas_sys::cublasHandle_t);

// SAFETY: a handle may be used by any thread, one at a time.
unsafe impl Send for BlasHandle {}

impl BlasHandle {
    /// For products on this stream.
    pub(super) fn new(stream: &CudaStream) -> Result<BlasHandle, EngineError> {
        let handle = BlasHandle(blas::create_handle().map_err(|error| failed("starting cuBLAS", error))?);
        // SAFETY: both are there for as long as the engine is.
        let set = unsafe { blas::set_stream(handle.0, stream.cu_stream().cast()) };
        set.map_err(|error| failed("giving cuBLAS its stream", error))?;
        // Sums are f32 where they are taken in parts, too.
        let mode = blas_sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        // SAFETY: the handle is there.
        let set = unsafe { blas_sys::cublasSetMathMode(handle.0, mode) }.result();
        set.map_err(|error| failed("having cuBLAS sum in f32", error))?;
        Ok(handle)
    }

    /// Begins a product, in f32 throughout where factors are f32: no TF32. The device's context is the thread's.
    pub(super) fn multiply(&self, product: &DeviceProduct) {
        let [rows, inner, cols] = product.dims().map(|n| n as c_int);
        if rows == 0 || cols == 0 {
            return;
        }
        let DeviceProduct { c, a, b, accumulate } = product;
        let (one, keep) = (1.0f32, f32::from(u8::from(*accumulate)));
        // cuBLAS reads columns one after the other: what is stored by rows is the transpose to it, and c^T = b^T a^T.
        // SAFETY: the matrices lie in their memory, as `dims` has checked; the numbers are read before the call returns.
        let begun = unsafe {
            blas::gemm_ex(
                self.0,
                operation(b),
                operation(a),
                cols,
                rows,
                inner,
                (&raw const one).cast(),
                b.address() as *const c_void,
                blas_type(b),
                b.cols.max(1) as c_int,
                a.address() as *const c_void,
                blas_type(a),
                a.cols.max(1) as c_int,
                (&raw const keep).cast(),
                c.address() as *mut c_void,
                blas_type(c),
                cols,
                blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                blas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        done(begun, "a product");
    }
}

impl Drop for BlasHandle {
    fn drop(&mut self) {
        // Nobody is left to be told of a failure.
        // SAFETY: the handle is there and used by nobody else.
        let _ = unsafe { blas::destroy_handle(self.0) };
    }
}

pub(super) fn operation(of: &DeviceMatrix) -> blas_sys::cublasOperation_t {
    match of.transposed {
        true => blas_sys::cublasOperation_t::CUBLAS_OP_T,
        false => blas_sys::cublasOperation_t::CUBLAS_OP_N,
    }
}

pub(super) fn blas_type(of: &DeviceMatrix) -> blas_sys::cudaDataType {
    match of.elements.dtype() {
        Dtype::Bf16 => blas_sys::cudaDataType_t::CUDA_R_16BF,
        _ => blas_sys::cudaDataType_t::CUDA_R_32F,
    }
}
