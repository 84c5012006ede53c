//! `guildhall report`: a run drawn again, alone or beside another.

use super::{Failure, print};
use crate::cli::Report as Arguments;
use crate::report;

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let path = report::render(&arguments.run, arguments.against.as_deref()).map_err(Failure::request)?;
    print(&format!("{}\n", path.display()))
}
