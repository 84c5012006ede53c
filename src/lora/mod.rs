//! Low-rank adapters (Hu et al. 2021): a matrix keeps its values, and a product of two small ones is trained that is added
//! to it.
//!
//! ```text
//!  y = x W^T + (alpha / rank) (x A^T) B^T        W [out, in], A [rank, in] random, B [out, rank] zero at first
//!
//!  W over a tensor group   A                     B
//!  by outputs              whole, in parts       by outputs
//!  by inputs               by inputs             whole, in parts
//! ```
//!
//! A factor that is whole on every rank of a tensor group has gradients that are parts of a sum over it: each rank makes
//! them of its own outputs, or inputs.

mod adapter;
mod config;
mod low_rank;

pub use adapter::{AdapterSizes, Adapters, FACTORS, GATE_AND_UP, MatrixSlice, Unadapted, factors_of, is_factor};
pub use config::{Config, Target, Targets};
pub use low_rank::{LowRank, grouped_product, product};
