//! The program: parse, run one command, say what went wrong, exit with a meaning.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use guildhall::cli::Cli;
use guildhall::{commands, data};

fn main() -> ExitCode {
    data::keep_guarded_panics_quiet();
    commands::run(Cli::parse())
}
