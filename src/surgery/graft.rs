//! A new model from the tensors of others: for each of its tensors, where it comes from.

use std::collections::BTreeMap;
use std::sync::Arc;

use guildhall_tensor::{Device, Tensor};

use crate::model::{Model, Sizes};
use crate::parallel::{Mesh, Parameters, Piece};

/// Where a tensor of the new model comes from. Models are numbered as they are given.
pub(super) enum TensorOrigin {
    /// It keeps its initial value.
    New,
    /// The tensor of this name in one model, bit by bit.
    Copy(usize, String),
    /// The elementwise mean of the tensors of this name in all models.
    Mean(String),
    /// Rows of tensors of this name.
    Rows(String, Vec<SourceRow>),
}

/// A row of a tensor, multiplied by a factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SourceRow {
    pub(super) model: usize,
    pub(super) row: usize,
    pub(super) factor: f64,
}

impl SourceRow {
    /// A row as it is.
    pub(super) fn of(model: usize, row: usize) -> SourceRow {
        SourceRow { model, row, factor: 1.0 }
    }
}

/// The name of a MoE layer, and of a tensor within it.
pub(super) fn within_layer(name: &str) -> Option<(&str, &str)> {
    name.split_once(".block_sparse_moe.")
}

/// The number of an expert, and of one of its tensors, from the name within the layer.
pub(super) fn within_expert(name: &str) -> Option<(usize, &str)> {
    let (expert, part) = name.strip_prefix("experts.")?.split_once('.')?;
    Some((expert.parse().ok()?, part))
}

/// The model that `sizes` describes, this rank's share, with every tensor from where `origin` says by its name. Nothing
/// is sent: each rank must hold what its share is made of.
///
/// # Panics
/// If a tensor has no such origin here, or one of another size.
pub(super) fn graft(
    device: &Arc<Device>,
    sizes: &Sizes,
    mesh: &Mesh,
    from: &mut [Model],
    origin: &dyn Fn(&str) -> TensorOrigin,
) -> Model {
    let sources: Vec<NamedTensors> = from.iter_mut().map(tensors).collect();
    let mut model = Model::new(device, sizes, mesh);
    model.visit(&mut |weight| {
        for piece in &weight.placement.pieces {
            fill(&mut weight.parameter.value_mut(), piece, &sources, &origin(&piece.name));
        }
    });
    model.visit_buffers(&mut |buffer| {
        for piece in &buffer.placement.pieces {
            fill(&mut buffer.value, piece, &sources, &origin(&piece.name));
        }
    });
    model
}

/// By global name, a tensor's piece and the local parameter that holds it.
type NamedTensors = BTreeMap<String, (Tensor, Piece)>;

fn tensors(model: &mut Model) -> NamedTensors {
    let mut tensors = BTreeMap::new();
    let mut add = |value: &Tensor, pieces: &[Piece]| {
        tensors.extend(pieces.iter().map(|piece| (piece.name.clone(), (value.clone(), piece.clone()))));
    };
    model.visit(&mut |weight| add(&weight.parameter.value(), &weight.placement.pieces));
    model.visit_buffers(&mut |buffer| add(&buffer.value, &buffer.placement.pieces));
    tensors
}

fn fill(to: &mut Tensor, piece: &Piece, sources: &[NamedTensors], origin: &TensorOrigin) {
    match origin {
        TensorOrigin::New => {}
        TensorOrigin::Copy(model, name) => {
            let (from, source) = found(&sources[*model], name);
            assert_eq!(source.local_shape(), piece.local_shape(), "{name} as {}", piece.name);
            to.copy_part(piece.offset, from, source.offset..source.offset + source.len());
        }
        TensorOrigin::Mean(name) => write(to, piece, &mean(sources, name)),
        TensorOrigin::Rows(name, rows) => write(to, piece, &stacked(sources, name, rows)),
    }
}

#[track_caller]
fn found<'a>(tensors: &'a NamedTensors, name: &str) -> &'a (Tensor, Piece) {
    tensors.get(name).unwrap_or_else(|| panic!("this rank has no tensor {name}"))
}

/// What this rank has of a tensor.
fn elements(tensors: &NamedTensors, name: &str) -> Vec<f32> {
    let (from, source) = found(tensors, name);
    from.to_f32().part_to_vec(source.offset..source.offset + source.len())
}

/// Rounded once: the mean of equal numbers is that number.
fn mean(sources: &[NamedTensors], name: &str) -> Vec<f32> {
    let mut sums = Vec::new();
    for tensors in sources {
        let values = elements(tensors, name);
        sums.resize(values.len(), 0.0);
        sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(x));
    }
    sums.into_iter().map(|sum| (sum / sources.len() as f64) as f32).collect()
}

fn stacked(sources: &[NamedTensors], name: &str, rows: &[SourceRow]) -> Vec<f32> {
    let all: Vec<Vec<f32>> = sources.iter().map(|tensors| elements(tensors, name)).collect();
    let width = |model: usize| all[model].len() / found(&sources[model], name).1.shape[0];
    let row = |&SourceRow { model, row, factor }: &SourceRow| {
        let values = &all[model][row * width(model)..][..width(model)];
        values.iter().map(move |&x| (f64::from(x) * factor) as f32)
    };
    rows.iter().flat_map(row).collect()
}

#[track_caller]
fn write(to: &mut Tensor, piece: &Piece, values: &[f32]) {
    let part = Tensor::from_slice(to.device(), &[piece.len()], values);
    to.copy_part(piece.offset, &part, 0..piece.len());
}
