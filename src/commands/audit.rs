//! `guildhall audit`: what a folder's tensors come to, or what is wrong with them.

use super::convert::layout;
use super::{CommandFailure, print};
use crate::cli::AuditArgs;
use crate::convert::{AuditReport, TensorSum, audit};

pub(super) fn run(arguments: &AuditArgs) -> Result<(), CommandFailure> {
    match audit(&arguments.folder) {
        Ok((model, report)) => {
            model.notices.iter().for_each(|notice| super::say(&format!("note: {notice}")));
            print(&text(&report))
        }
        Err(error) if error.is_fault() => Err(CommandFailure::run(error)),
        Err(error) => Err(CommandFailure::request(error)),
    }
}

fn text(report: &AuditReport) -> String {
    let mut text = format!("{} ({})\n", layout(report.kind), report.family);
    text += &format!("{:<14}{:>9}{:>16}  {}\n", "part", "tensors", "elements", "stored as");
    let line = |TensorSum { part, tensors, elements, dtypes }: &TensorSum| {
        format!("{part:<14}{tensors:>9}{elements:>16}  {dtypes}\n")
    };
    report.parts.iter().for_each(|part| text += &line(part));
    let sum = |of: fn(&TensorSum) -> u64| report.parts.iter().map(of).sum::<u64>();
    text += &format!("{:<14}{:>9}{:>16}\n", "all", sum(|part| part.tensors), sum(|part| part.elements));
    text += &format!("files         {} with {} tensors\n", report.files, report.stored);
    if let Some((_, experts)) = report.experts.first() {
        let counts: Vec<String> = report.experts.iter().map(|(_, experts)| experts.to_string()).collect();
        let even = report.experts.iter().all(|(_, other)| other == experts);
        let each = if even { experts.to_string() } else { counts.join(", ") };
        text += &format!("experts       {each} in each of {} layers\n", report.experts.len());
    }
    text + &format!("sha256        {}\n", report.sha256)
}
