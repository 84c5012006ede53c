//! Runs the tidy test by itself.

#[path = "../it/tidy.rs"]
mod tidy;
