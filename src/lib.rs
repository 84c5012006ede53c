//! Guildhall trains Mixture-of-Experts language models. See ARCHITECTURE.md for the plan of the house.

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod config;
pub mod convert;
pub mod data;
mod durable;
pub mod launch;
pub mod limits;
pub mod lora;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod moe;
pub mod optim;
pub mod parallel;
pub mod plan;
pub mod report;
pub mod score;
pub mod surgery;
pub mod train;
pub mod verify;

/// The examples of docs/extending.md, which `cargo test` compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../docs/extending.md")]
pub struct ExtendingPage;
