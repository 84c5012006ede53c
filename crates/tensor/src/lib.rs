//! Values, kernels and the tape of one rank: everything Guildhall computes with, and nothing about other ranks.
//!
//! ```text
//!  Device ── an engine that runs kernels; memory that is reused and counted
//!    └─ Tensor ── contiguous f32, bf16 or u32 storage: of the host, an accelerator's, or its size alone
//!         ├─ kernels ── every kernel as a verb on tensors, dispatched to the engine: loops of cpu/*, or kernels of gpu/*
//!         └─ Var ── a Tensor on a Tape; ops/* are its methods, forward beside backward, and speak kernels
//!              └─ Gradients ── filled by Tape::backward, parameters' gradients in place
//! ```
//!
//! Kernels do not wait; [`to_host`] alone does.
//!
//! Shape errors are bugs of the caller and panic with both shapes and the caller's line. There are no views and no
//! strides: an op that wants part of a tensor says so in its arguments.

mod account;
mod books;
mod cache;
mod cpu;
mod crossing;
mod device;
mod draws;
mod dtype;
mod elements;
mod gpu;
pub mod gradcheck;
mod gradients;
mod index;
mod kernel_times;
mod kernels;
mod lent;
mod nccl;
pub mod ops;
mod parameter;
mod pool;
mod row_ids;
mod standby;
mod storage;
mod tape;
mod team;
mod tensor;
mod transfer;
mod value;

pub use account::{Account, Cause, Charge, Excess};
pub use books::{Books, Launches, Phase, Work};
pub use cache::cache_folder;
pub use cpu::gemm::{Blocking, ProductBlocks};
pub use cpu::instructions::instruction_sets;
pub use crossing::to_host;
pub use device::{Device, Held};
pub use draws::{Draws, Purpose};
pub use dtype::Dtype;
pub use elements::{Elements, ElementsMut, HostElements};
pub use gpu::{
    Compiler, CudaDevice, DeviceFailure, EngineError, SimulatedLimits, cuda_devices, find_compiler,
    nccl::{NcclId, find_nccl},
    on_device,
};
pub use gradients::Gradients;
pub use index::{Index, Indices};
pub use kernel_times::{KernelKind, KernelTime};
pub use lent::{LentTensor, PIECE as REDUCED_PIECE, Reduction};
pub use nccl::{LentParcel, NcclGroup, NcclRank};
pub use parameter::{Gradient, Parameter};
pub use row_ids::RowIds;
pub use standby::Standby;
pub use tape::{BackwardError, Input, Kept, NonFinite, Part, Recompute, Tape, Var};
pub use tensor::Tensor;
pub use transfer::{DevicePoint, PinnedTensor};
pub use value::Value;
