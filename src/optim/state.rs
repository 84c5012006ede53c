//! Optimizer state, and the step over all weights.

use std::sync::Arc;

use guildhall_tensor::ops::{AdamW, SquareSums};
use guildhall_tensor::{Account, Cause, Device, Dtype, Gradient, Tensor};

use super::Error;
use super::away::{Away, Moved};
use super::backing::OffloadTarget;
use super::shard::{Access, Shard};
use super::store::{StateTile, StateWalk, Store};
use crate::parallel::{Landing, Mesh, Parameters, Sums, Weight, Zero, gradient_squares};

/// AdamW's constants; the learning rate comes with each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

/// How state is kept and worked on. None of it changes a bit of any number.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub hyper: Hyper,
    /// Most elements of a weight that are updated at once; absent means all.
    pub tile: Option<usize>,
    pub offload: OffloadTarget,
}

impl From<Hyper> for Settings {
    /// Untiled, on the device.
    fn from(hyper: Hyper) -> Settings {
        Settings { hyper, tile: None, offload: OffloadTarget::None }
    }
}

/// One of the sequences of numbers that a weight's state consists of, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strip {
    /// Mean of gradients.
    M,
    /// Mean of their squares.
    V,
    /// The weight in f32, when it is stored in less.
    Master,
}

impl Strip {
    pub const ALL: [Strip; 3] = [Strip::M, Strip::V, Strip::Master];
}

/// State of all weights that are trained, in the order of [`Parameters::visit_trained`]. With [`Zero::Optimizer`] and
/// above, of this rank's shares of them.
#[derive(Debug)]
pub struct Optimizer {
    device: Arc<Device>,
    hyper: Hyper,
    tile: usize,
    shards: Vec<Shard>,
    store: Store,
}

impl Optimizer {
    /// Zero moments, and masters where weights are not f32.
    ///
    /// # Errors
    /// State that is to be kept elsewhere and cannot.
    ///
    /// # Panics
    /// On tiles of no elements: configuration has been checked before.
    pub fn new(
        device: &Arc<Device>,
        model: &mut dyn Parameters,
        mesh: &Mesh,
        settings: impl Into<Settings>,
    ) -> Result<Optimizer, Error> {
        let Settings { hyper, tile, offload } = settings.into();
        let mut shards = Vec::new();
        model.visit_trained(&mut |weight| {
            let len = weight.parameter.len();
            let range = if mesh.zero() >= Zero::Optimizer { mesh.share(&weight.placement, len) } else { 0..len };
            let (strips, gradient) = (own_strips(weight), weight.parameter.gradient().dtype());
            shards.push(Shard { range, strips, gradient });
        });
        let store = match &offload {
            OffloadTarget::None => Store::on_device(device, &shards),
            OffloadTarget::Host | OffloadTarget::File(_) => {
                Store::Away(Box::new(Away::new(device, mesh.world.rank(), &offload, &shards)?))
            }
        };
        let tile = tile.unwrap_or(usize::MAX);
        assert!(tile > 0, "a tile has elements");
        let mut optimizer = Optimizer { device: device.clone(), hyper, tile, shards, store };
        // Writing it in full is what takes the room.
        optimizer.restart(model).map_err(|error| Error { action: "make room for", ..error })?;
        Ok(optimizer)
    }

    /// Begins anew with the weights as they now are.
    ///
    /// # Errors
    /// What moving state reports.
    pub fn restart(&mut self, model: &mut dyn Parameters) -> Result<(), Error> {
        self.visit(model, Access::Write, |weight, StateTile { elements, state, strips }| {
            (0..2).for_each(|moments| state.fill_part(strips.range(moments), 0.0));
            if strips.count > 2 {
                weight.parameter.stored().with_kept(|kept, first| {
                    state.copy_part(strips.range(2).start, kept, elements.start - first..elements.end - first);
                });
            }
            Ok(())
        })
    }

    /// Whether the sums of gradients go where state is as soon as they are taken.
    pub fn takes_sums(&self) -> bool {
        matches!(self.store, Store::Away(_))
    }

    /// Keeps sums where state is.
    ///
    /// # Panics
    /// If state is on the device, where gradients stay in the model.
    pub fn keep(&mut self, sums: Sums) {
        match &mut self.store {
            Store::Device(_) => panic!("gradients stay where they are"),
            Store::Away(away) => away.keep(sums),
        }
    }

    /// By weight, the squares of this rank's share of the gradient, as [`gradient_squares`] adds them up, wherever the sums
    /// are: the tensor is there too.
    ///
    /// # Errors
    /// What keeps sums.
    pub fn gradient_squares(&mut self, model: &mut dyn Parameters, mesh: &Mesh) -> Result<SquareSums, Error> {
        let Store::Away(away) = &mut self.store else { return Ok(gradient_squares(model, mesh)) };
        let mut shares = Vec::new();
        model.visit_trained(&mut |weight| shares.push(mesh.share(&weight.placement, weight.parameter.len())));
        away.squares(&shares)
    }

    /// Brings sums that are elsewhere back into the model, for whoever looks at them before the update.
    ///
    /// # Errors
    /// What moving them reports.
    pub fn recall(&mut self, model: &mut dyn Parameters) -> Result<(), Error> {
        if !matches!(&self.store, Store::Away(away) if away.has_sums()) {
            return Ok(());
        }
        let mut all: Vec<Vec<f32>> = Vec::new();
        let mut of_weight = None;
        self.visit(model, Access::Change, |weight, tile| {
            let address = weight.parameter.gradient().clone();
            if !of_weight.as_ref().is_some_and(|before: &Gradient| before.is(&address)) {
                all.push(Vec::new());
                of_weight = Some(address);
            }
            all.last_mut().expect("one was begun").extend_from_slice(&tile.read(own_strips(weight)));
            Ok::<_, Error>(())
        })?;
        let (mut sums, mut shards) = (all.into_iter(), self.shards.iter());
        let device = &self.device;
        model.visit_trained(&mut |weight| {
            let (gradient, range) = (weight.parameter.gradient(), &shards.next().expect("one a weight").range);
            let part = if range.is_empty() { Vec::new() } else { sums.next().expect("a sum") };
            let _charge = device.charge(Cause::Gradients);
            let part = Tensor::from_slice(device, &[part.len()], &part).cast(gradient.dtype());
            match range.len() == gradient.len() {
                true => gradient.put(part.reshape(&gradient.shape())),
                false => gradient.put_part(range.start, part),
            }
        });
        Ok(())
    }

    /// Sums that somebody left in the model go where state is.
    fn send_away(&mut self, model: &mut dyn Parameters) {
        let Store::Away(away) = &mut self.store else { return };
        if away.has_sums() {
            return;
        }
        let (shards, mut number) = (&self.shards, 0);
        model.visit_trained(&mut |weight| {
            let (gradient, range) = (weight.parameter.gradient(), shards[number].range.clone());
            let (device, len) = (gradient.device(), range.len());
            let _charge = device.charge(Cause::Gradients);
            let mut message = Tensor::stale(&device, &[len], Dtype::F32);
            if len > 0 {
                gradient.with_held(range.clone(), |held, first| message.copy_part(0, held, first..first + len));
            }
            let landings = vec![Landing { weight: number, elements: range, at: 0 }];
            away.keep(Sums { message, landings, are_first: true });
            weight.parameter.clear_gradient();
            number += 1;
        });
    }

    /// Updates every weight, or this rank's share of it, from its gradient times `gradient_scale`, and forgets the
    /// gradient. `step` counts from 1.
    ///
    /// # Errors
    /// What moving state reports; weights and state are then no longer one step's.
    pub fn step(&mut self, model: &mut dyn Parameters, step: u64, lr: f64, gradient_scale: f64) -> Result<(), Error> {
        let rule = AdamW {
            lr: lr as f32,
            beta1: self.hyper.beta1 as f32,
            beta2: self.hyper.beta2 as f32,
            eps: self.hyper.eps as f32,
            weight_decay: self.hyper.weight_decay as f32,
            step,
            gradient_scale: gradient_scale as f32,
        };
        self.send_away(model);
        self.visit(model, Access::Change, |weight, tile| {
            let rule = AdamW { weight_decay: if weight.decays { rule.weight_decay } else { 0.0 }, ..rule };
            update(weight, tile, &rule);
            Ok(())
        })?;
        model.visit_trained(&mut |weight| weight.parameter.clear_gradient());
        Ok(())
    }

    /// Calls `f` with every tile of every weight, of which each [`Strip`] has a part.
    ///
    /// # Errors
    /// What moving state reports, and what `f` does.
    pub fn visit<E: From<Error>>(
        &mut self,
        model: &mut dyn Parameters,
        access: Access,
        mut f: impl FnMut(&mut Weight, StateTile) -> Result<(), E>,
    ) -> Result<(), E> {
        self.visit_weights(model, access, |weight, tile| tile.map_or(Ok(()), |tile| f(weight, tile)))
    }

    /// [`Optimizer::visit`], where `f` is called once more behind the tiles of each weight: of every weight, also where this
    /// rank has none of its state and of frozen ones, which have none.
    ///
    /// # Errors
    /// What moving state reports, and what `f` does.
    pub fn visit_weights<E: From<Error>>(
        &mut self,
        model: &mut dyn Parameters,
        access: Access,
        mut f: impl FnMut(&mut Weight, Option<StateTile>) -> Result<(), E>,
    ) -> Result<(), E> {
        let _charge = self.device.charge(Cause::Optimizer);
        let mut walk = StateWalk::new(&mut self.store, &self.device, &self.shards, self.tile, access)?;
        let (mut outcome, mut number) = (Ok(()), 0);
        model.visit(&mut |weight| {
            if outcome.is_ok() && !weight.parameter.is_frozen() {
                outcome = walk.weight(number, |tile| f(weight, Some(tile)));
                number += 1;
            }
            if outcome.is_ok() {
                outcome = f(weight, None);
            }
        });
        outcome?;
        Ok(walk.finish()?)
    }

    /// Hands `f` all that is kept of one weight's state, `[strips, len]`, to change it. State that is elsewhere is on the
    /// device meanwhile.
    ///
    /// # Errors
    /// What moving state reports, and what `f` does.
    pub fn with_state<E: From<Error>>(
        &mut self,
        number: usize,
        f: impl FnOnce(&mut Tensor) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Store::Device(tensors) = &mut self.store {
            return f(&mut tensors[number]);
        }
        let _charge = self.device.charge(Cause::Optimizer);
        let shard = &self.shards[number];
        let (first, len) = (shard.range.start, shard.range.len());
        let mut all = Tensor::stale(&self.device, &[shard.strips, len], Dtype::F32);
        // Where a tile's strips lie in `all`, and in the tile.
        let places = |tile: &StateTile| {
            let at = tile.elements.start - first;
            let parts = (0..shard.strips).map(|strip| (strip * len + at, tile.strips.range(strip)));
            parts.collect::<Vec<_>>()
        };
        let walk = (&self.shards[..], self.tile);
        let mut reading = StateWalk::of_weight(number, &mut self.store, &self.device, walk, Access::Read)?;
        reading.weight(number, |tile| {
            places(&tile).into_iter().for_each(|(at, range)| all.copy_part(at, tile.state, range));
            Ok::<_, Error>(())
        })?;
        reading.finish()?;
        f(&mut all)?;
        let mut writing = StateWalk::of_weight(number, &mut self.store, &self.device, walk, Access::Write)?;
        writing.weight(number, |tile| {
            let parts = places(&tile);
            parts.into_iter().for_each(|(at, range)| tile.state.copy_part(range.start, &all, at..at + range.len()));
            Ok::<_, Error>(())
        })?;
        Ok(writing.finish()?)
    }

    /// What is kept of each trained weight's state.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Most elements of a weight that are worked on at once.
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// Counts memory of the host, where state is kept there.
    pub fn host(&self) -> Option<&Account> {
        match &self.store {
            Store::Device(_) => None,
            Store::Away(away) => away.host().map(|host| host.account()),
        }
    }

    /// What moving state has cost so far; nothing if it stays on the device.
    pub fn moved(&self) -> Option<Moved> {
        match &self.store {
            Store::Device(_) => None,
            Store::Away(away) => Some(away.moved()),
        }
    }
}

/// Strips of a weight's state.
fn own_strips(weight: &Weight) -> usize {
    if weight.parameter.dtype() == Dtype::F32 { 2 } else { 3 }
}

/// One tile of one weight. Of a bf16 gradient that is on the device there is an f32 copy meanwhile, of the tile's length.
fn update(weight: &mut Weight, tile: StateTile, rule: &AdamW) {
    let StateTile { elements, state, strips } = tile;
    let (gradient, own) = (weight.parameter.gradient(), own_strips(weight));
    weight.parameter.stored().with_kept(|kept, first| {
        let weights = (kept, elements.start - first);
        match strips.count > own {
            true => rule.update_by_strip(weights, (state, strips)),
            false => gradient.with_held(elements.clone(), |held, at| rule.update(weights, (held, at), (state, strips))),
        }
    });
}
