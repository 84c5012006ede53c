//! `guildhall report`: a run drawn again, alone or beside another.

use super::{CommandFailure, print};
use crate::cli::ReportArgs;
use crate::report;

pub(super) fn run(arguments: &ReportArgs) -> Result<(), CommandFailure> {
    let path = report::render(&arguments.run, arguments.against.as_deref()).map_err(CommandFailure::request)?;
    print(&format!("{}\n", path.display()))
}
