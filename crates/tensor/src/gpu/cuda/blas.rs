//! cuBLAS, which has products of groups.

use cudarc::cublas::result as blas;
use cudarc::cublas::sys as blas_sys;
use cudarc::driver::CudaStream;

use super::failed;
use crate::dtype::Dtype;
use crate::gpu::DeviceMatrix;
use crate::gpu::error::EngineError;

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
