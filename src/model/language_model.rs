//! The whole model: embedding, one stack of blocks or two, head, loss.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::stretch_sums;
use guildhall_tensor::{Device, Tape, Tensor, Var};

use super::block::{CachedPass, Given};
use super::embedding::Embedding;
use super::generate::Caches;
use super::head::{Head, Wanted};
use super::stack::{Hidden, Stack};
use super::stream_facts::{self, StackReader, StreamFacts, rows};
use super::{Context, Role, Sizes};
use crate::data::Batch;
use crate::moe::migration::FollowingWork;
use crate::moe::{BalanceLoss, Counts, Error, LayerOutput, MoeLayer};
use crate::parallel::{Buffer, Mesh, Migration, Parameters, Residency, Rows, Stream, Weight};

/// A language model of any family: a decoder, an encoder, or an encoder followed by a decoder; this rank's part of it.
#[derive(Debug)]
pub struct Model {
    sizes: Sizes,
    pub(super) embedding: Embedding,
    /// In the order in which they run; the head follows the last.
    pub(super) stacks: Vec<Stack>,
    head: Head,
    /// The units in which sharded weights are gathered and freed: the embedding, each block, the norm between two
    /// stacks, and everything after the last block.
    pub(super) residency: Residency,
}

/// The output of a forward pass over a batch. Losses are this rank's part of sums over the step's tokens, divided by
/// the step's number of valid tokens. The auxiliary ones are divided by the step's number of tokens that count in them.
pub struct Forward {
    /// The scalar from which backward starts: cross-entropy plus weighted auxiliary losses.
    pub loss: Var,
    /// [`Forward::LOSSES`] scalars: cross-entropy, balance loss and z-loss, the latter two unweighted and summed over
    /// MoE layers. In training they are not read before the step's gradients are complete.
    pub losses: Tensor,
    /// The losses of the rows that came to the head on this rank, if the context asks for them.
    pub rows: Option<RowLosses>,
    pub loads: Vec<LayerLoad>,
}

/// What of a cross-entropy is of which row.
pub struct RowLosses {
    /// By row, the summed cross-entropy of its tokens, not divided by anything.
    pub sums: Tensor,
    /// By row, its place in the step.
    pub places: Vec<usize>,
}

/// The load of one MoE layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLoad {
    pub layer: usize,
    /// The counts of this rank's tokens.
    pub counts: Counts,
    /// Number of experts whose weights were copied to the ranks of this rank's expert group.
    pub shadowed: usize,
}

impl Model {
    /// A model with initial values. The values depend on `sizes` alone, not on the mesh.
    pub fn new(device: &Arc<Device>, sizes: &Sizes, mesh: &Mesh) -> Model {
        let (blueprint, residency) = (sizes.blueprint(), Residency::default());
        let mut embedding = Embedding::new(device, sizes, mesh);
        residency.add(mesh, |f| embedding.visit(f));
        let mut stacks = Vec::new();
        let count = blueprint.stacks().len();
        for stack in blueprint.stacks() {
            if let Some(before) = stacks.last_mut() {
                residency.add(mesh, |f| Stack::visit_norm(before, f));
            }
            let reader = StackReader { sizes: sizes.clone(), is_last: stacks.len() + 1 == count, stack };
            stacks.push(Stack::new(device, reader, mesh, &residency));
        }
        let mut head = Head::new(device, sizes, mesh);
        for (number, stack) in stacks.iter_mut().enumerate() {
            let is_last = number + 1 == count;
            stack.foresee(
                if is_last { head.work(&embedding.tokens, mesh.tensor.size()) } else { FollowingWork::default() },
                mesh,
            );
        }
        residency.add(mesh, |f| {
            stacks.iter_mut().last().expect("a stack").visit_norm(f);
            head.visit(f);
            if sizes.model.tie_embeddings {
                f(&mut embedding.tokens);
            }
        });
        let mut model = Model { sizes: sizes.clone(), embedding, stacks, head, residency };
        model.visit(&mut |Weight { parameter, .. }| {
            parameter.gradient().store_as(sizes.gradient_of(parameter.dtype()));
        });
        model.freeze(&sizes.frozen);
        model
    }

    /// Weights of these roles keep their values from now on, but for adapters, and so does the bias that balances a frozen router.
    fn freeze(&mut self, frozen: &[Role]) {
        self.visit_roles(&mut |role, weight| {
            if frozen.contains(&role) && !weight.adapts {
                weight.parameter.freeze();
            }
        });
        if frozen.contains(&Role::Router) {
            for layer in 0..self.sizes.model.layers {
                self.moe_layer(layer).into_iter().for_each(|layer| layer.state.freeze());
            }
        }
    }

    /// Calls `f` with every weight and what it is for, in the order of [`Parameters::visit`].
    pub fn visit_roles(&mut self, f: &mut dyn FnMut(Role, &mut Weight)) {
        self.embedding.visit_roles(f);
        self.stacks.iter_mut().for_each(|stack| stack.visit_roles(f));
        self.head.visit(&mut |weight| f(Role::Head, weight));
    }

    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The loss of a batch on `tape`. Collective: every rank calls it, also with a batch of no rows.
    ///
    /// # Errors
    /// Any error of a group's communicator, or of a MoE layer.
    ///
    /// # Panics
    /// If there are two stacks and the batch has no source, or one stack and the batch has a source.
    pub fn forward(&self, tape: &Tape, batch: &Batch, context: &Context) -> Result<Forward, Error> {
        let Hidden { x, stream, layers } = self.hidden(tape, batch, context)?;
        let rows = stream.rows();
        let (targets, valid) = (rows.index(&rows.targets), stream_facts::valid(rows));
        let wanted = Wanted { targets, valid, scale: context.per_valid_token() };
        let (cross_entropy, losses) = self.residency.within(self.last_unit(), tape, || {
            let hidden = self.last_norm(x);
            tape.set_scope("head");
            self.head.loss(&hidden, &self.embedding.tokens, wanted, &stream)
        })?;
        let rows = context.tells_rows.then(|| RowLosses::of(rows, &losses));
        drop(losses);
        let mut forward = Forward::new(cross_entropy, rows);
        tape.set_scope("auxiliary losses");
        let joined = self.balance_of_all_layers(&layers, context)?;
        for (layer, output) in layers {
            forward.add(layer, output, &self.sizes, joined.is_none());
        }
        if let (Some(balance), Some(moe)) = (joined, &self.sizes.moe) {
            // Reported as if every layer had this loss.
            forward.report(Forward::BALANCE, &balance.scale(forward.loads.len() as f32));
            forward.loss = forward.loss.add(&balance.scale(moe.balance_weight));
        }
        Ok(forward)
    }

    /// The balance loss, if it is one loss of all MoE layers together; then collective.
    fn balance_of_all_layers(&self, layers: &[(usize, LayerOutput)], context: &Context) -> Result<Option<Var>, Error> {
        let moe = self.sizes.moe.as_ref().filter(|moe| moe.joins_layers());
        let Some(moe) = moe.filter(|_| !layers.is_empty()) else { return Ok(None) };
        let means: Vec<Var> = layers.iter().map(|(_, output)| output.losses.balance.clone()).collect();
        let loads: Vec<&[u64]> = layers.iter().map(|(_, output)| &output.counts.load[..]).collect();
        Ok(Some(BalanceLoss::of_all_layers(&means, &loads, moe.top_k, &context.mesh.data)?))
    }

    /// Logits `[T, V]` of a batch, as f32.
    ///
    /// # Errors
    /// Any error of a group's communicator, or of a MoE layer.
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn logits(&self, tape: &Tape, batch: &Batch, context: &Context) -> Result<Tensor, Error> {
        let Hidden { x, stream, .. } = come_home(self.hidden(tape, batch, context)?, context)?;
        self.last_logits(tape, x, &stream)
    }

    pub(super) fn last_logits(&self, tape: &Tape, hidden: Var, stream: &Stream) -> Result<Tensor, Error> {
        let logits = || self.head.logits(&self.last_norm(hidden), &self.embedding.tokens, stream);
        Ok(self.residency.within(self.last_unit(), tape, logits)?)
    }

    /// The unit of the last norm and the head.
    fn last_unit(&self) -> usize {
        self.residency.len() - 1
    }

    /// Runs the stacks, each on its own stream.
    fn hidden(&self, tape: &Tape, batch: &Batch, context: &Context) -> Result<Hidden, Error> {
        let (texts, context) = (self.texts(tape.device(), batch, context)?, Rc::new(context.clone()));
        tape.set_scope("embedding");
        let embed = |(stack, facts): (usize, &Rc<StreamFacts>)| {
            let seq = facts.stream.rows().seq as i64;
            Ok((self.embedding.forward(tape, &facts.stream)?, self.embedding.bias(tape, stack, 1 - seq..seq)))
        };
        let embed = || texts.iter().enumerate().map(embed).collect::<Result<Vec<(Var, Option<Var>)>, Error>>();
        let embedded = self.residency.within(0, tape, embed)?;
        let mut done: Option<Hidden> = None;
        for ((stack, facts), (mut x, bias)) in self.stacks.iter().zip(&texts).zip(embedded) {
            if context.facts.trains {
                let draws = context.dropout(stack.reader.stack.first_place);
                x = x.dropout(self.sizes.model.dropout, draws, facts.stream.numbers());
            }
            let (mut layers, mut memory) = (Vec::new(), None);
            if let Some(before) = done.take() {
                let before = come_home(before, &context)?;
                // The next stack attends to normalized features.
                memory = Some(self.norm_between(tape, before.x)?);
                layers = before.layers;
            }
            let hidden = stack.forward(x, Given { memory, bias }, facts, &context, &self.residency)?;
            layers.extend(hidden.layers);
            done = Some(Hidden { layers, ..hidden });
        }
        Ok(done.expect("a stack"))
    }

    /// The norm after an encoder that a decoder follows; its unit is the one before the decoder's first.
    pub(super) fn norm_between(&self, tape: &Tape, x: Var) -> Result<Var, Error> {
        let unit = self.stacks[1].first_unit - 1;
        self.residency.within(unit, tape, || {
            tape.set_scope("encoder norm");
            Ok(self.stacks[0].normed(x))
        })
    }

    /// For each stack, the facts of the stream that it runs on.
    fn texts(&self, device: &Arc<Device>, batch: &Batch, context: &Context) -> Result<Vec<Rc<StreamFacts>>, Error> {
        let batches: Vec<&Batch> = batch.source.as_deref().into_iter().chain([batch]).collect();
        assert_eq!(batches.len(), self.stacks.len(), "a text for each of the {} stacks", self.stacks.len());
        let origin = context.mesh.data.rank();
        let mut texts: Vec<Rc<StreamFacts>> = Vec::new();
        for (stack, batch) in self.stacks.iter().zip(batches) {
            let (stream, source) = (context.mesh.stream(rows(batch, origin)), texts.last().map(|text| &text.stream));
            let facts = stack.reader.facts(device, stream, source, context)?;
            texts.push(Rc::new(facts));
        }
        Ok(texts)
    }

    fn last_stack(&self) -> &Stack {
        self.stacks.last().expect("a model has a stack")
    }

    fn last_norm(&self, x: Var) -> Var {
        x.tape().set_scope("final norm");
        self.last_stack().normed(x)
    }

    /// Logits `[V]` after `tokens`, which follow those already in `caches`, without gradients. Collective.
    ///
    /// # Errors
    /// Any error of a group's communicator, or of a MoE layer.
    ///
    /// # Panics
    /// If there are no tokens, or if the model is not a single decoder.
    pub fn next_logits(
        &self,
        device: &Arc<Device>,
        tokens: &[u32],
        caches: &mut Caches,
        context: &Context,
    ) -> Result<Tensor, Error> {
        let [stack] = &self.stacks[..] else { panic!("there is no source to read") };
        assert!(stack.reader.stack.is_causal, "an encoder has no next token");
        let tape = Tape::inference(device);
        // All ranks continue the same text, and its keys and values stay where they are.
        let context = &context.without_migration();
        let positions = caches.advance(tokens.len());
        let first = u64::from(positions[0]);
        let rows = Rows { positions, ..Rows::of_ids(first, tokens) };
        // So few tokens are not worth splitting.
        let stream = Stream::whole(rows, &context.mesh.tensor);
        let facts = StreamFacts::of_next(device, stream.clone(), &self.sizes, context, 1)?;
        let (mut x, bias) = self.residency.within(0, &tape, || -> Result<_, Error> {
            let seen = 1 - caches.len() as i64;
            Ok((self.embedding.forward(&tape, &stream)?, self.embedding.bias(&tape, 0, seen..1)))
        })?;
        for ((unit, block), cache) in (stack.first_unit..).zip(&stack.blocks).zip(caches.layers()) {
            let pass = CachedPass { facts: &facts, context, memory: None, bias: bias.as_ref() };
            let forward = || block.forward_cached(&x, &pass, &mut [cache]);
            x = self.residency.within(unit, &tape, forward)?;
        }
        self.last_logits(&tape, x.gather_rows(&[tokens.len() as u32 - 1]), &stream)
    }

    /// Updates the gate state of layer `index`, if it is MoE, with its loads of a whole optimizer step, over all ranks.
    pub fn end_step(&mut self, index: usize, load: &[u64]) {
        if let Some(layer) = self.moe_layer(index) {
            layer.state.end_step(load);
        }
    }

    /// Layer `index`, if it is MoE.
    pub fn moe_layer(&mut self, index: usize) -> Option<&mut MoeLayer> {
        self.stacks.iter_mut().find_map(|stack| stack.moe_layer(index))
    }
}

/// Returns the sequences in a stack's output to the ranks that loaded them. Collective over the data group if sequences
/// migrate.
fn come_home(hidden: Hidden, context: &Context) -> Result<Hidden, Error> {
    if context.facts.routings.migration.is_none() {
        return Ok(hidden);
    }
    let home = Migration::home(&hidden.stream, context.mesh.all_hosts())?;
    Ok(Hidden { x: home.apply(&hidden.x)?, stream: home.stream().clone(), ..hidden })
}

impl Forward {
    /// Indices in `losses`, and their number.
    const CROSS_ENTROPY: usize = 0;
    const BALANCE: usize = 1;
    const Z: usize = 2;
    pub const LOSSES: usize = 3;

    /// The output of a model without MoE layers.
    fn new(cross_entropy: Var, rows: Option<RowLosses>) -> Forward {
        let losses = Tensor::zeros(cross_entropy.device(), &[Forward::LOSSES]);
        let mut forward = Forward { loss: cross_entropy.clone(), losses, rows, loads: Vec::new() };
        forward.report(Forward::CROSS_ENTROPY, &cross_entropy);
        forward
    }

    /// The cross-entropy, copied to the host; waits for the device.
    pub fn cross_entropy(&self) -> f32 {
        self.losses.part_to_vec(Forward::CROSS_ENTROPY..Forward::CROSS_ENTROPY + 1)[0]
    }

    /// Adds a scalar to one of the losses.
    fn report(&mut self, which: usize, loss: &Var) {
        self.losses.add_to_part(which, loss.value(), 0..1);
    }

    /// Adds the losses and counts of a MoE layer, with or without its balance loss.
    fn add(&mut self, layer: usize, output: LayerOutput, sizes: &Sizes, balances: bool) {
        let moe = sizes.moe.as_ref().expect("a MoE layer comes of a MoE section");
        let LayerOutput { losses, counts, shadowed, .. } = output;
        self.report(Forward::Z, &losses.z);
        let balance = balances.then_some((losses.balance, moe.balance_weight));
        balance.iter().for_each(|(loss, _)| self.report(Forward::BALANCE, loss));
        for (loss, weight) in balance.into_iter().chain([(losses.z, moe.z_weight)]) {
            // A loss with weight 0 is reported but needs no backward.
            if weight != 0.0 {
                self.loss = self.loss.add(&loss.scale(weight));
            }
        }
        self.loads.push(LayerLoad { layer, counts, shadowed: shadowed.len() });
    }
}

impl RowLosses {
    /// Of the losses of all tokens of a table.
    fn of(rows: &Rows, losses: &Tensor) -> RowLosses {
        assert_eq!(losses.len(), rows.len(), "a masked model has losses of masked tokens alone");
        let places = rows.sequences.iter().map(|first| (first / rows.seq as u64) as usize).collect();
        RowLosses { sums: stretch_sums(losses, rows.sequences.len()), places }
    }
}

impl Parameters for Model {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.visit_roles(&mut |_, weight| f(weight));
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.stacks.iter_mut().for_each(|stack| stack.visit_buffers(f));
    }
}
