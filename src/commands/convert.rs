//! `guildhall convert`: a model in another layout, and a proof that it is the same one.

use std::path::Path;

use super::{CommandFailure, print, say};
use crate::checkpoint::{self, ElementType};
use crate::cli::{ConvertArgs, ConvertTo};
use crate::config::StorageType;
use crate::convert::{Error, ExportedAdapters, ModelFolder, ModelKind, compare, convert, export_adapters};

pub(super) fn run(arguments: &ConvertArgs) -> Result<(), CommandFailure> {
    let (input, output) = (&arguments.input, &arguments.output);
    let dtype = arguments.dtype.as_deref().map(dtype).transpose()?;
    check_is_new(output)?;
    // What is packed comes to numbers of f32, which are not rounded first where that is what is asked for.
    let wide = dtype.filter(|dtype| *dtype == ElementType::F32).map(|_| StorageType::F32);
    let from = ModelFolder::open(input, wide).map_err(CommandFailure::request)?;
    from.notices.iter().for_each(|notice| say(&format!("note: {notice}")));
    let to = match (arguments.to, from.kind) {
        (Some(ConvertTo::Peft), _) => return adapters(&from, dtype, output),
        (Some(ConvertTo::Hf), _) | (None, ModelKind::Guildhall) => ModelKind::HuggingFace,
        (Some(ConvertTo::Guildhall), _) | (None, ModelKind::HuggingFace) => ModelKind::Guildhall,
    };
    let (from, merged) = from.merged();
    if merged > 0 {
        say(&format!("merge    adapters become a part of {merged} matrices"));
    }
    let converted = convert(&from, to, dtype, arguments.file_mib << 20, output).map_err(failure)?;
    let (family, list) = (converted.family, from.files.list());
    say(&format!("convert  {} ({}) to {} ({family})", layout(from.kind), from.family, layout(converted.kind)));
    let rounded = ModelFolder::open(output, None).and_then(|made| compare(&from, &made));
    let rounded = rounded.map_err(|error| {
        // What is not the same has no name.
        let _ = std::fs::remove_dir_all(output);
        CommandFailure::run(error)
    })?;
    let elements: usize = list.values().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let same = match rounded {
        0 => "every one has the values it had".to_owned(),
        n => format!("{n} are rounded to the type they are stored in, the others have the values they had"),
    };
    say(&format!("audit    {} tensors, {elements} elements: {same}", list.len()));
    print(&format!("{}\n", output.display()))
}

/// The adapters of a checkpoint by themselves.
fn adapters(from: &ModelFolder, dtype: Option<ElementType>, output: &Path) -> Result<(), CommandFailure> {
    let ExportedAdapters { family, tensors, elements } = export_adapters(from, dtype, output).map_err(failure)?;
    say(&format!("convert  the adapters of {} ({}) to PEFT ({family})", layout(from.kind), from.family));
    say(&format!("wrote    {tensors} tensors, {elements} elements"));
    print(&format!("{}\n", output.display()))
}

/// The name of a layout.
pub(super) fn layout(kind: ModelKind) -> &'static str {
    match kind {
        ModelKind::Guildhall => "Guildhall",
        ModelKind::HuggingFace => "Hugging Face",
    }
}

fn dtype(name: &str) -> Result<ElementType, CommandFailure> {
    let named = ElementType::OF_WEIGHTS.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name));
    named.ok_or_else(|| CommandFailure::Request(anyhow::anyhow!("--dtype {name}: use f32, bf16 or f16")))
}

fn check_is_new(output: &Path) -> Result<(), CommandFailure> {
    match output.symlink_metadata() {
        Ok(_) => Err(CommandFailure::request(checkpoint::Error::Exists { path: output.to_owned() })),
        Err(_) => Ok(()),
    }
}

fn failure(error: Error) -> CommandFailure {
    if error.is_of_run() { CommandFailure::run(error) } else { CommandFailure::request(error) }
}
