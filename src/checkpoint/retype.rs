//! A checkpoint read as if a run of other types had written it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Error;
use super::cut::TensorCut;
use super::element::ElementType;
use super::file_set::{FileSet, TensorKind};
use super::held::{locals, prefix, tensors};
use super::layout::TensorList;
use super::load::{OpenCheckpoint, check_list};
use super::tensor_files::{TensorFiles, TensorView};
use crate::optim::{Optimizer, Strip};
use crate::parallel::{Mesh, Parameters};

/// The same checkpoint in the types of `model`: weights that are f32 here are the masters of 16-bit ones there, and masters
/// here are the f32 weights there, whose roundings the weights are. Nothing else changes, and no value of 32 bits is lost.
/// Every tensor of the model and of the optimizer is there, and no other. Collective.
///
/// # Errors
/// Files that cannot be read; all that differs, by name, on every rank alike; what the world reports.
pub fn retyped(
    source: &OpenCheckpoint,
    model: &mut dyn Parameters,
    optimizer: &Optimizer,
    mesh: &Mesh,
) -> Result<OpenCheckpoint, Error> {
    let locals = locals(model, Some(optimizer));
    let sets = [source.tensors(TensorKind::Model)?, source.tensors(TensorKind::Optimizer)?];
    let mut read_as = BTreeMap::new();
    for (kind, [own, other]) in [(TensorKind::Model, [0, 1]), (TensorKind::Optimizer, [1, 0])] {
        let all = sets[own].clone().with(&sets[other]);
        let here = tensors(kind, &locals, mesh)?;
        let views = views(&here, &sets[own], &all);
        let files = TensorFiles::new(&source.folder, all).seen(views);
        check_list(&files, &here)?;
        read_as.insert(kind, Arc::new(files));
    }
    Ok(OpenCheckpoint { read_as, ..source.clone() })
}

/// Where tensors are that are to be had `here`, and all else that the files of the kind have.
fn views(here: &TensorList, own: &FileSet, all: &FileSet) -> BTreeMap<String, TensorView> {
    let masters = prefix(Strip::Master);
    let whole = |name: &str, dtype: Option<ElementType>| {
        let (_, entry) = all.entry(name)?;
        let dtype = dtype.unwrap_or(entry.dtype);
        let (tensor, cut, shape) = (name.to_owned(), TensorCut::default(), entry.shape.clone());
        Some(TensorView { tensor, cut, packed: None, shape, dtype })
    };
    let wanted = here.iter().filter_map(|(name, (dtype, _))| {
        let view = match name.strip_prefix(masters) {
            Some(weight) => whole(name, None).or_else(|| whole(weight, Some(*dtype))),
            None if *dtype == ElementType::F32 => {
                whole(&format!("{masters}{name}"), None).or_else(|| whole(name, None))
            }
            None => whole(name, Some(*dtype)),
        };
        Some((name.clone(), view?))
    });
    let strangers = own.entries().map(|(name, _)| name).filter(|name| !here.contains_key(*name));
    // A weight that is f32 here makes up for its master.
    let strangers = strangers.filter(|name| !name.starts_with(masters));
    wanted.chain(strangers.filter_map(|name| Some((name.clone(), whole(name, None)?)))).collect()
}
