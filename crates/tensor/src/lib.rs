//! Values, kernels and the tape of one rank: everything Guildhall computes with, and nothing about other ranks.
//!
//! ```text
//!  Device ── memory that is reused and counted, threads
//!    └─ Tensor ── contiguous f32 or bf16 storage; arithmetic is always f32
//!         └─ Var ── a Tensor on a Tape; ops/* are its methods, forward beside backward
//!              └─ Gradients ── filled by Tape::backward, parameters' gradients in place
//! ```
//!
//! Shape errors are bugs of the caller and panic with both shapes and the caller's line. There are no views and no
//! strides: an op that wants part of a tensor says so in its arguments.

mod account;
mod books;
mod cpu;
mod device;
mod draws;
mod dtype;
pub mod gradcheck;
mod gradients;
mod kernels;
pub mod ops;
mod parameter;
mod storage;
mod tape;
mod tensor;
mod value;

pub use account::{Account, Cause, Charge, Excess, Held};
pub use books::{Books, Launches};
pub use device::Device;
pub use draws::{Draws, Purpose};
pub use dtype::Dtype;
pub use gradients::Gradients;
pub use parameter::{Gradient, Parameter};
pub use storage::Elements;
pub use tape::{Failure, Input, Kept, NonFinite, Part, Recompute, Tape, Var};
pub use tensor::{Tensor, to_host};
pub use value::Value;
