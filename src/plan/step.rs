//! One training step of one rank, of sizes: as `src/train/step.rs` and `src/parallel/grad_sync.rs` have it.

use std::collections::BTreeMap;
use std::rc::Rc;

use guildhall_comm::Collective;
use guildhall_tensor::{Cause, Dtype};

use super::books::{Books, Bytes, Messages, Part, Phase, Traffic, When, Work};
use super::layout::{Load, Offload, Task};
use super::model::{Model, Weight};
use super::sketch::Array;
use super::sync::Sync;
use super::tape::{Complete, Tape};
use crate::model::Forward;
use crate::parallel::Axis;

/// What one step costs one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// What is alive when the most is.
    pub at_peak: Bytes,
    /// The most of each cause by itself.
    pub peaks: Bytes,
    /// Optimizer state and sums of gradients that are not on the device.
    pub offloaded: u64,
    /// Of these, the sums, which leave while backward goes on.
    pub offloaded_sums: u64,
    /// The most that the update takes for a moment, besides the state.
    pub update: u64,
    pub messages: Messages,
    pub work: BTreeMap<(Phase, Part), Work>,
    /// Weights held by this rank, elements.
    pub elements: u64,
}

/// Walks one step of `task` on a rank. Of a layer that is hotter than others it is not known which: where rows of all
/// layers are kept most is alive while the last goes back, where they are made again while the first does, beside the
/// gradients of all others. So both are walked, and the one that takes more is the cost.
pub fn step(task: &Task, rank: usize, load: &Load) -> Cost {
    let Load::Skewed { mean, most } = *load else { return walk(task, rank, load) };
    let layers: Vec<usize> = (0..task.sizes.model.layers).filter(|&layer| task.sizes.moe_of(layer).is_some()).collect();
    let others = (mean * layers.len() as f64 - most) / (layers.len().max(2) - 1) as f64;
    let with_hottest = |hot: usize| {
        let of = |&layer: &usize| (layer, if layer == hot { most } else { others.max(0.0) });
        walk(task, rank, &Load::ByLayer(layers.iter().map(of).collect()))
    };
    let (Some(&first), Some(&last)) = (layers.first(), layers.last()) else { return walk(task, rank, load) };
    let (early, late) = (with_hottest(first), with_hottest(last));
    if early.at_peak.total() > late.at_peak.total() { early } else { late }
}

fn walk(task: &Task, rank: usize, load: &Load) -> Cost {
    let books = Books::new();
    let (model, weights) = Model::new(&books, task, rank, load);
    let state = State::new(&books, task, rank, &weights);
    let _pairs = Array::new(&books, Cause::Other, (2, task.sizes.pairs().1 as u64), Dtype::F32);
    let micro_batches = task.micro_batches() as u64;
    let losses = Forward::LOSSES as u64;
    let _losses = Array::new(&books, Cause::Other, (micro_batches, losses), Dtype::F32);
    task.group(Axis::Data, rank).all_gather(&books, 16);
    let predicted = predicted(task, rank);
    let sync = Rc::new(Sync::new(&books, task, rank, &weights));
    let run = |travels: bool| {
        let telling = sync.clone();
        let complete: Complete = Rc::new(move |gradient| {
            if travels {
                telling.complete(gradient)
            }
        });
        let tape = Tape::new(&books, task.layout.recompute.segments(), complete);
        books.phase.set(Phase::Forward);
        let loss = model.loss(&tape, predicted);
        let _losses = Array::new(&books, Cause::Activations, (1, losses), Dtype::F32);
        books.phase.set(Phase::Backward);
        tape.backward(&loss);
        drop(loss);
        if travels {
            sync.settle();
        }
    };
    if micro_batches > 1 {
        // All but the last are alike; from the second on, there are gradients to add to.
        books.times.set(micro_batches - 1);
        run(sync.every_micro_batch());
        books.times.set(1);
    }
    run(true);
    sync.finish();
    // Of each weight's gradient the sum of its squares, an f64.
    let squares = if task.layout.offload == Offload::Nowhere { weights.len() as u64 } else { 0 };
    let squares = Array::new(&books, Cause::Other, (2, squares), Dtype::F32);
    state.totals(task, rank);
    drop(squares);
    let update = state.update(&weights);
    sync.gather_weights();
    let elements = weights.iter().map(|weight| weight.value.len()).sum();
    Cost {
        at_peak: books.at_peak(),
        peaks: books.peaks(),
        offloaded: state.offloaded(),
        offloaded_sums: state.offloaded_sums(),
        update,
        messages: books.messages(),
        work: books.all_work(),
        elements,
    }
}

/// What a rank sends where the ranks add up which experts are chosen together: not a part of every step.
pub fn pairs(task: &Task, rank: usize) -> Traffic {
    let books = Books::new();
    let bytes = task.sizes.pairs().1 as u64 * 8;
    if bytes > 0 {
        task.group(Axis::World, rank).all_reduce(&books, When::Now, bytes);
    }
    traffic(&books.messages()).into_values().next().unwrap_or_default()
}

/// Tokens that a masked model predicts, on average; of others all count.
fn predicted(task: &Task, rank: usize) -> u64 {
    (task.tokens(rank) as f64 * task.predicted).ceil() as u64
}

/// The optimizer's state: of each weight this rank's share.
struct State {
    books: Rc<Books>,
    shards: Vec<Shard>,
    _arrays: Vec<Array>,
    tile: u64,
    offload: Offload,
}

/// What is kept of one weight's state: moments and, of weights that are not f32, a master.
struct Shard {
    len: u64,
    strips: u64,
    /// How the gradient is stored.
    gradient: Dtype,
}

/// Staging memory where state is elsewhere: one tile comes, one is worked on, one goes.
const STAGES: u64 = 3;

impl State {
    fn new(books: &Rc<Books>, task: &Task, rank: usize, weights: &[Weight]) -> State {
        let shard = |weight: &Weight| {
            let (rows, cols) = weight.value.size();
            let len = match task.layout.zero {
                0 => rows * cols,
                _ => task.group(weight.holders, rank).share(rows * cols),
            };
            Shard {
                len,
                strips: if weight.value.dtype == Dtype::F32 { 2 } else { 3 },
                gradient: weight.gradient.dtype(),
            }
        };
        let shards: Vec<Shard> = weights.iter().map(shard).collect();
        let array = |shard: &Shard| Array::new(books, Cause::Optimizer, (shard.strips, shard.len), Dtype::F32);
        let arrays = match task.layout.offload {
            Offload::Nowhere => shards.iter().map(array).collect(),
            Offload::Host | Offload::File => Vec::new(),
        };
        let tile = task.layout.tile.unwrap_or(u64::MAX);
        State { books: books.clone(), shards, _arrays: arrays, tile, offload: task.layout.offload }
    }

    /// Bytes that are not on the device.
    fn offloaded(&self) -> u64 {
        match self.offload {
            Offload::Nowhere => 0,
            Offload::Host | Offload::File => {
                self.shards.iter().map(|shard| shard.strips * shard.len * 4).sum::<u64>() + self.offloaded_sums()
            }
        }
    }

    /// Sums are f32 there, whatever they were.
    fn offloaded_sums(&self) -> u64 {
        match self.offload {
            Offload::Nowhere => 0,
            Offload::Host | Offload::File => self.shards.iter().map(|shard| shard.len * 4).sum(),
        }
    }

    /// What all ranks tell each other of a step, and the gradient's norm.
    fn totals(&self, task: &Task, rank: usize) {
        let (world, sizes) = (task.group(Axis::World, rank), &task.sizes);
        let of = |layer: usize| {
            let (moe, sent) = (sizes.moe_of(layer)?, world.size as usize * task.degree(layer));
            Some(moe.experts + 2 + sent)
        };
        let counts: Vec<usize> = (0..sizes.model.layers).filter_map(of).collect();
        // What each rank had to send and received.
        let routes = if counts.is_empty() { 0 } else { 3 * world.size };
        world.all_reduce(&self.books, When::Now, (4 + routes + counts.iter().sum::<usize>() as u64) * 8);
        world.all_reduce(&self.books, When::Now, 8);
    }

    /// Tile by tile: of a gradient that is not f32 there is a copy of the tile that is, and of what is elsewhere what comes
    /// and goes. Bytes of the largest copy.
    fn update(&self, weights: &[Weight]) -> u64 {
        self.books.phase.set(Phase::Update);
        self.books.part.set(Part::Optimizer);
        let tile = |shard: &Shard| shard.len.min(self.tile);
        let is_here = self.offload == Offload::Nowhere;
        let copied = |shard: &&Shard| is_here && shard.gradient != Dtype::F32;
        let copied = self.shards.iter().filter(copied).map(tile).max().unwrap_or(0);
        let optimizer = |size| Array::new(&self.books, Cause::Optimizer, size, Dtype::F32);
        let stages = match self.offload {
            Offload::Nowhere => 0,
            Offload::Host | Offload::File => {
                self.shards.iter().map(|s| s.len.div_ceil(self.tile)).sum::<u64>().min(STAGES)
            }
        };
        // With the gradient.
        let largest = self.shards.iter().map(|shard| (shard.strips + 1) * tile(shard)).max().unwrap_or(0);
        let (_staging, copy) = (optimizer((stages, largest)), optimizer((1, copied)));
        // Read: weight, gradient, moments; written: weight, moments.
        self.books.pass(self.shards.iter().map(|shard| shard.len * 28).sum());
        weights.iter().for_each(|weight| drop(weight.gradient.replace(None)));
        copy.bytes()
    }
}

/// The bytes of all messages of a kind, whenever they leave.
pub fn traffic(messages: &Messages) -> BTreeMap<(Axis, Collective), Traffic> {
    let mut sums = BTreeMap::<_, Traffic>::new();
    for ((axis, collective, _), traffic) in messages {
        let sum = sums.entry((*axis, *collective)).or_default();
        sum.calls += traffic.calls;
        sum.bytes += traffic.bytes;
    }
    sums
}
