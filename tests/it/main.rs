//! One binary of all integration tests; `docs/testing.md` says which file asks which question.

mod adjoint;
mod cli;
mod config;
mod crash;
mod data;
mod errors;
mod examples;
mod families;
mod fastmoe;
mod gate_oracle;
mod gates;
mod golden;
mod grad_sync;
mod masking;
mod moe_oracle;
mod parity;
mod program;
mod recipes;
mod recording;
mod reference;
mod report;
mod resume;
mod surgery;
mod tidy;
mod tiny;
mod world;
