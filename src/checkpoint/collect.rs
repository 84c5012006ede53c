//! What a rank writes of a checkpoint: bytes, and where they belong.

use std::ops::Range;
use std::sync::Arc;

use guildhall_comm::Communicator;
use guildhall_tensor::{Dtype, Held, HostElements, Tensor};

use super::Error;
use super::file_set::{FileSet, TensorKind};
use super::held::prefix;
use super::rows::{RowExchange, is_of_even_columns};
use crate::optim::{Access, Optimizer, Strip};
use crate::parallel::{Axis, ContiguousRun, Mesh, Parameters, Piece, Placement, Spread};

/// Bytes for the files of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct FileBytes {
    bytes: Vec<u8>,
    places: Vec<BlockSpot>,
    /// Says that they are there, to an account of memory.
    _held: Option<Held>,
}

/// Where the next bytes belong.
#[derive(Clone, Copy, Debug)]
struct BlockSpot {
    file: usize,
    /// From the file's start.
    at: u64,
    len: usize,
}

impl FileBytes {
    /// Room for so many bytes, which an account was told of.
    pub(super) fn with_room(bytes: u64, held: Held) -> FileBytes {
        FileBytes { bytes: Vec::with_capacity(bytes as usize), places: Vec::new(), _held: Some(held) }
    }

    /// Each block: the number of its file, its place in it, and its bytes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, u64, &[u8])> {
        let mut rest = &self.bytes[..];
        self.places.iter().map(move |place| {
            let (bytes, after) = rest.split_at(place.len);
            rest = after;
            (place.file, place.at, bytes)
        })
    }

    /// Empty again, with the room there is; none if an account holds it, which is given back.
    pub(super) fn emptied(mut self) -> Option<FileBytes> {
        self.bytes.clear();
        self.places.clear();
        self._held.is_none().then_some(self)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Gives the bytes appended since there were `before` of them their place.
    fn place(&mut self, file: usize, at: u64, before: usize) {
        let len = self.bytes.len() - before;
        match self.places.last_mut() {
            Some(last) if last.file == file && last.at + last.len as u64 == at => last.len += len,
            _ => self.places.push(BlockSpot { file, at, len }),
        }
    }
}

/// The files of a checkpoint's tensors, numbered from one kind to the next.
#[derive(Debug)]
pub(super) struct CheckpointFiles {
    pub(super) sets: Vec<(TensorKind, FileSet)>,
}

impl CheckpointFiles {
    /// The names of all, in the order of their numbers.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.sets.iter().flat_map(|(_, set)| &set.files).map(|(name, _)| name.as_str())
    }

    /// A tensor's file, where it begins in it, and how long the elements are.
    fn place(&self, kind: TensorKind, tensor: &str) -> (usize, u64) {
        let mut before = 0;
        for (own, set) in &self.sets {
            if *own == kind {
                let (file, entry) = set.entry(tensor).expect("the files have all tensors");
                return (before + file, entry.start);
            }
            before += set.files.len();
        }
        unreachable!("only what is written is collected")
    }
}

/// Collects what this rank answers for: the shares of weights, the buffers, and the optimizer's state if there is one.
/// `each` is told of every weight when its bytes are there, on every rank as often. Collective.
///
/// # Errors
/// What a group reports, moving state does, or `each` says.
pub(super) fn collect(
    (model, optimizer, mesh): (&mut dyn Parameters, Option<&mut Optimizer>, &Mesh),
    files: &CheckpointFiles,
    blocks: FileBytes,
    mut each: impl FnMut(&mut FileBytes) -> Result<(), Error>,
) -> Result<FileBytes, Error> {
    let (mut collector, mut outcome) = (Collector { files, mesh, blocks }, Ok(()));
    model.visit(&mut |weight| {
        if outcome.is_ok() {
            let (placement, value) = (&weight.placement, weight.parameter.stored());
            let range = mesh.share(placement, value.len());
            let part = WeightPart { kind: TensorKind::Model, prefix: "", placement, range: &range };
            outcome = value.with_kept(|kept, first| collector.add(&part, &ElementSlice::of(kept, first)));
            outcome = std::mem::replace(&mut outcome, Ok(())).and_then(|()| each(&mut collector.blocks));
        }
    });
    model.visit_buffers(&mut |buffer| {
        if outcome.is_ok() {
            let (placement, value) = (&buffer.placement, &buffer.value);
            let range = mesh.share(placement, value.len());
            let part = WeightPart { kind: TensorKind::Model, prefix: "", placement, range: &range };
            outcome = collector.add(&part, &ElementSlice::of(value, 0)).and_then(|()| each(&mut collector.blocks));
        }
    });
    outcome?;
    let Some(optimizer) = optimizer else { return Ok(collector.blocks) };
    optimizer.visit_weights(model, Access::Read, |weight, tile| {
        let Some(tile) = tile else { return each(&mut collector.blocks) };
        let placement = &weight.placement;
        let share = mesh.share(placement, weight.parameter.len());
        let range = share.start.max(tile.elements.start)..share.end.min(tile.elements.end);
        for (number, strip) in Strip::ALL.into_iter().enumerate().take(tile.strips.count) {
            let elements =
                ElementSlice { first: tile.elements.start, data: HostElements::F32(tile.read(number).into()) };
            let part = WeightPart { kind: TensorKind::Optimizer, prefix: prefix(strip), placement, range: &range };
            collector.add(&part, &elements)?;
        }
        Ok::<_, Error>(())
    })?;
    Ok(collector.blocks)
}

/// No fewer bytes than `collect` comes to: rows that ranks exchange are dealt out whole.
pub fn snapshot_bytes(model: &mut dyn Parameters, optimizer: &Optimizer, mesh: &Mesh) -> u64 {
    let (mut bytes, mut shards) = (0, optimizer.shards().iter());
    let mut add = |placement: &Placement, len: usize, size: usize| {
        if mesh.answers(placement) {
            let (range, group) = (mesh.share(placement, len), tensor_group(placement, mesh));
            let of_piece = |piece: &Piece| {
                let (start, end) = (piece.offset.max(range.start), (piece.offset + piece.len()).min(range.end));
                let own = end.saturating_sub(start);
                let exchanged = own > 0 && is_of_even_columns(piece, group.size());
                let part = start.saturating_sub(piece.offset)..end.saturating_sub(piece.offset);
                let rows = exchanged.then(|| RowExchange::of(piece, group, size));
                let more = rows.map_or(0, |rows| rows.excess(part, optimizer.tile()));
                (own * size + more) as u64
            };
            bytes += placement.pieces.iter().map(of_piece).sum::<u64>();
        }
    };
    model.visit(&mut |weight| {
        let (placement, parameter) = (&weight.placement, &weight.parameter);
        add(placement, parameter.len(), parameter.dtype().bytes());
        let strips = match parameter.is_frozen() {
            true => 0,
            false => shards.next().expect("a shard of every trained weight").strips,
        };
        (0..strips).for_each(|_| add(placement, parameter.len(), Dtype::F32.bytes()));
    });
    model.visit_buffers(&mut |buffer| add(&buffer.placement, buffer.value.len(), buffer.value.dtype().bytes()));
    bytes
}

/// The ranks that have the slices of what this one has one of.
fn tensor_group<'a>(placement: &Placement, mesh: &'a Mesh) -> &'a Arc<dyn Communicator> {
    mesh.group(if placement.spread == Spread::Tensor { Axis::Tensor } else { Axis::ExpertTensor })
}

struct Collector<'a> {
    files: &'a CheckpointFiles,
    mesh: &'a Mesh,
    blocks: FileBytes,
}

/// Elements `range` of a local weight, or of what the optimizer keeps of it.
struct WeightPart<'a> {
    kind: TensorKind,
    prefix: &'a str,
    placement: &'a Placement,
    range: &'a Range<usize>,
}

impl Collector<'_> {
    /// Adds a part of a weight that is among `elements`, if this rank answers for it. Collective for what is cut by columns
    /// evenly; parts of rows of other lengths are written where they belong.
    ///
    /// # Errors
    /// What a group reports.
    fn add(&mut self, part: &WeightPart, elements: &ElementSlice) -> Result<(), Error> {
        let WeightPart { kind, prefix, placement, range } = *part;
        if !self.mesh.answers(placement) {
            return Ok(());
        }
        let (group, size, blocks) = (tensor_group(placement, self.mesh), elements.size(), &mut self.blocks);
        for piece in &placement.pieces {
            let (file, start) = self.files.place(kind, &format!("{prefix}{}", piece.name));
            let runs: Vec<ContiguousRun> = piece.runs_within(range).collect();
            let at = |global: usize| start + (global * size) as u64;
            if !is_of_even_columns(piece, group.size()) {
                for run in &runs {
                    let before = blocks.bytes.len();
                    elements.append(run, &mut blocks.bytes);
                    blocks.place(file, at(run.global), before);
                }
                continue;
            }
            let rows = RowExchange::of(piece, group, size);
            for runs in rows.batches(&runs) {
                let mut own = Vec::new();
                runs.iter().for_each(|run| elements.append(run, &mut own));
                for block in rows.exchange(runs, own)? {
                    let before = blocks.bytes.len();
                    blocks.bytes.extend_from_slice(&block.bytes);
                    blocks.place(file, at(block.global), before);
                }
            }
        }
        Ok(())
    }
}

/// Elements of a local weight from number `first` on.
struct ElementSlice<'a> {
    first: usize,
    data: HostElements<'a>,
}

impl<'a> ElementSlice<'a> {
    fn of(tensor: &'a Tensor, first: usize) -> ElementSlice<'a> {
        ElementSlice { first, data: tensor.elements(0..tensor.len()) }
    }

    /// Appends those of a run as they are in a file.
    fn append(&self, run: &ContiguousRun, to: &mut Vec<u8>) {
        let (range, before) = (run.local - self.first..run.local + run.len - self.first, to.len());
        to.resize(before + run.len * self.size(), 0);
        let to = &mut to[before..];
        // By chunks of one length, which is a copy where the machine's order is the file's.
        match &self.data {
            HostElements::F32(all) => {
                to.as_chunks_mut().0.iter_mut().zip(&all[range]).for_each(|(to, x)| *to = x.to_le_bytes());
            }
            HostElements::Bf16(all) => {
                to.as_chunks_mut().0.iter_mut().zip(&all[range]).for_each(|(to, x)| *to = x.to_le_bytes());
            }
            HostElements::U32(_) => unreachable!("weights are numbers"),
        }
    }

    fn size(&self) -> usize {
        self.data.dtype().bytes()
    }
}
