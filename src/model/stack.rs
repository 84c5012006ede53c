//! A stack: blocks that run one after the other, and the norm after the last. It is an encoder, whose tokens attend to
//! each other, or a decoder, whose tokens attend to no later ones.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::{Device, Var};

use super::block::{Block, Given};
use super::norm::Norm;
use super::stream_facts::{StackReader, StreamFacts};
use super::{Context, Role};
use crate::moe::migration::FollowingWork;
use crate::moe::{Error, LayerOutput, MoeLayer};
use crate::parallel::{Buffer, Mesh, Migration, Parameters, Residency, Stream, Weight};

/// One stack of a model: this rank's part of it.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) reader: StackReader,
    /// Shared with a tape that may run them again in backward.
    pub(super) blocks: Vec<Rc<Block>>,
    /// Present only if the blocks do not normalize their outputs.
    norm: Option<Norm>,
    /// Index of the first block among the units of the model's weights.
    pub(super) first_unit: usize,
}

/// The output of a stack, before its last norm.
pub(super) struct Hidden {
    /// Features of this rank's tokens.
    pub(super) x: Var,
    pub(super) stream: Stream,
    /// The outputs of the MoE layers, each with the layer's number.
    pub(super) layers: Vec<(usize, LayerOutput)>,
}

impl Stack {
    /// A stack whose blocks become the next units of the model's weights.
    pub(super) fn new(device: &Arc<Device>, reader: StackReader, mesh: &Mesh, residency: &Residency) -> Stack {
        let StackReader { sizes, stack: blueprint, .. } = &reader;
        let first_unit = residency.len();
        let block = |layer| {
            let mut block = Block::new(device, (blueprint, layer), sizes, mesh);
            residency.add(mesh, |f| block.visit(f));
            Rc::new(block)
        };
        let blocks = blueprint.layers.clone().map(block).collect();
        let norm = blueprint
            .norm
            .map(|norm| Norm::new(device, &format!("{}.{norm}", blueprint.name), sizes, mesh.is_sequence_parallel()));
        Stack { reader, blocks, norm, first_unit }
    }

    /// Tells the MoE layers what follows them, if `behind` follows the stack.
    pub(super) fn foresee(&mut self, behind: FollowingWork, mesh: &Mesh) {
        let lanes = mesh.tensor.size();
        let pairs = self.reader.sizes.work_of_pairs(lanes);
        self.blocks.iter_mut().rev().fold(behind, |behind, block| alone(block).foresee(behind, (&pairs, lanes)));
    }

    /// Runs the blocks on x, the features of the tokens in `facts`. Sequences may migrate to other ranks after any block.
    ///
    /// # Errors
    /// Any error of a group's communicator, or of a MoE layer.
    pub(super) fn forward(
        &self,
        x: Var,
        mut given: Given,
        facts: &Rc<StreamFacts>,
        context: &Rc<Context>,
        residency: &Residency,
    ) -> Result<Hidden, Error> {
        let tape = x.tape().clone();
        let (mut x, mut facts, mut layers) = (x, facts.clone(), Vec::new());
        let mut moved: Option<Rc<Migration>> = None;
        for ((unit, layer), block) in (self.first_unit..).zip(self.reader.stack.layers.clone()).zip(&self.blocks) {
            if let Some(migration) = moved.take() {
                (facts, given.memory) = self.follow(&migration, &facts, given.memory, tape.device(), context)?;
            }
            let forward = || block.forward(&x, &given, &facts, context);
            let (y, output) = residency.within(unit, &tape, forward)?;
            x = y;
            moved = output.as_ref().and_then(|output| output.migration.clone());
            layers.extend(output.map(|output| (layer, output)));
        }
        let stream = moved.as_ref().map_or(&facts.stream, |migration| migration.stream()).clone();
        Ok(Hidden { x, stream, layers })
    }

    /// After a migration: the facts of the tokens that this rank has now, and the encoder output that they attend to,
    /// which migrates with them.
    fn follow(
        &self,
        migration: &Migration,
        facts: &StreamFacts,
        memory: Option<Var>,
        device: &Arc<Device>,
        context: &Context,
    ) -> Result<(Rc<StreamFacts>, Option<Var>), Error> {
        let source = facts.across.as_ref().map(|across| migration.of_text(&across.stream)).transpose()?;
        let memory = match (&source, memory) {
            (Some(source), Some(memory)) => Some(source.apply(&memory)?),
            (_, memory) => memory,
        };
        let (stream, source) = (migration.stream().clone(), source.as_ref().map(Migration::stream));
        let facts = self.reader.facts(device, stream, source, context)?;
        Ok((Rc::new(facts), memory))
    }

    /// Applies the norm after the last block, if there is one.
    pub(super) fn normed(&self, x: Var) -> Var {
        self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x))
    }

    pub(super) fn visit_norm(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.norm.iter_mut().for_each(|norm| norm.visit(f));
    }

    /// Layer `layer` of the model, if this stack has it and it is a MoE layer.
    pub(super) fn moe_layer(&mut self, layer: usize) -> Option<&mut MoeLayer> {
        let index = layer.checked_sub(self.reader.stack.layers.start)?;
        alone(self.blocks.get_mut(index)?).moe_layer()
    }
}

/// A block as its only owner, for changes.
fn alone(block: &mut Rc<Block>) -> &mut Block {
    Rc::get_mut(block).expect("no tape is to run this block again: backward has been, or the tape is gone")
}

impl Stack {
    pub(super) fn visit_roles(&mut self, f: &mut dyn FnMut(Role, &mut Weight)) {
        self.blocks.iter_mut().for_each(|block| alone(block).visit_roles(f));
        self.visit_norm(&mut |weight| f(Role::Norms, weight));
    }
}

impl Parameters for Stack {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.visit_roles(&mut |_, weight| f(weight));
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.blocks.iter_mut().for_each(|block| alone(block).visit_buffers(f));
    }
}
