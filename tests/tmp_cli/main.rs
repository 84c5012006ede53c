//! Runs the tests of the command line alone.

#[path = "../it/cli.rs"]
mod cli;
#[path = "../it/crash.rs"]
mod crash;
#[path = "../it/errors.rs"]
mod errors;
#[path = "../it/program.rs"]
mod program;
