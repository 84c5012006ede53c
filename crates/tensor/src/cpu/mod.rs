//! Kernels on the CPU: the loops, over slices. All arithmetic but that of bf16 products is f32; the instruction set is chosen
//! at run time.
//!
//! Functions with a line in [`crate::kernels`] take the device, what they write, what they read, and the rest, in that
//! order.
#![allow(clippy::too_many_arguments, reason = "operands are what a kernel has")]

pub(crate) mod activation;
pub(crate) mod adamw;
#[cfg(target_arch = "x86_64")]
mod ahead;
pub(crate) mod attention;
mod attention_blocks;
pub(crate) mod attention_call;
#[cfg(target_arch = "x86_64")]
mod bgemm;
pub(crate) mod cached_attention;
pub(crate) mod columns;
pub(crate) mod cross_entropy;
pub(crate) mod denorm;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod gather;
pub(crate) mod gemm;
pub(crate) mod grouped;
pub(crate) mod grouped_swiglu;
pub(crate) mod instructions;
mod mat;
pub(crate) mod math;
pub(crate) mod norm;
pub(crate) mod product;
pub(crate) mod relative_attention;
pub(crate) mod relative_attention_call;
pub(crate) mod rows;
pub(crate) mod select;
#[cfg(target_arch = "x86_64")]
mod sgemm_avx2;
#[cfg(target_arch = "x86_64")]
mod sgemm_avx512;
pub(crate) mod softmax;
pub(crate) mod stored;
pub(crate) mod variation;
