//! Kernels on the CPU. All arithmetic is f32; the instruction set is chosen at run time.

pub(crate) mod attention;
pub(crate) mod gemm;
pub(crate) mod math;
pub(crate) mod relative_attention;
pub(crate) mod rows;
#[cfg(target_arch = "x86_64")]
mod sgemm_avx512;
pub(crate) mod stored;
