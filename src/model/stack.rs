//! Blocks one behind the other, and the norm behind them: an encoder, whose tokens see each other, or a decoder, whose
//! tokens see no later ones.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::{Device, Var};

use super::Context;
use super::block::Block;
use super::norm::Norm;
use super::stream_facts::{Reader, StreamFacts};
use crate::moe::{Error, LayerOutput, MoeLayer};
use crate::parallel::{Buffer, Mesh, Parameters, Residency, Weight};

/// One stack of a model; this rank's share of it.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) reader: Reader,
    /// Shared with a tape on which they are to run again.
    pub(super) blocks: Vec<Rc<Block>>,
    /// Only where the blocks leave their sums as they are.
    norm: Option<Norm>,
    /// The first block's among the units of the model's weights.
    pub(super) first_unit: usize,
}

/// What a MoE layer says besides its features, with its number.
pub(super) type LayerOutputs = Vec<(usize, LayerOutput)>;

impl Stack {
    /// A stack whose blocks are the next units of the model.
    pub(super) fn new(device: &Arc<Device>, reader: Reader, mesh: &Mesh, residency: &Residency) -> Stack {
        let Reader { sizes, stack: blueprint, .. } = &reader;
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

    /// Features of the tokens that are here, before the last norm, and what MoE layers say besides. `memory` is what
    /// the stack before made of another text.
    ///
    /// # Errors
    /// What a group reports.
    pub(super) fn forward(
        &self,
        mut x: Var,
        memory: Option<&Var>,
        facts: &Rc<StreamFacts>,
        context: &Rc<Context>,
        residency: &Residency,
    ) -> Result<(Var, LayerOutputs), Error> {
        let tape = x.tape().clone();
        let mut outputs = Vec::new();
        for ((unit, layer), block) in (self.first_unit..).zip(self.reader.stack.layers.clone()).zip(&self.blocks) {
            let (y, output) = residency.within(unit, &tape, || block.forward(&x, memory, facts, context))?;
            x = y;
            outputs.extend(output.map(|output| (layer, output)));
        }
        Ok((x, outputs))
    }

    /// The norm behind the last block.
    pub(super) fn normed(&self, x: Var) -> Var {
        self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(&x))
    }

    pub(super) fn visit_norm(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.norm.iter_mut().for_each(|norm| norm.visit(f));
    }

    /// Layer `layer` of the model, if it is here and MoE.
    pub(super) fn moe_layer(&mut self, layer: usize) -> Option<&mut MoeLayer> {
        let index = layer.checked_sub(self.reader.stack.layers.start)?;
        alone(self.blocks.get_mut(index)?).moe_layer()
    }
}

/// A block, to change.
fn alone(block: &mut Rc<Block>) -> &mut Block {
    Rc::get_mut(block).expect("no tape is to run this block again: backward has been, or the tape is gone")
}

impl Parameters for Stack {
    fn visit(&mut self, f: &mut dyn FnMut(&mut Weight)) {
        self.blocks.iter_mut().for_each(|block| alone(block).visit(f));
        self.visit_norm(f);
    }

    fn visit_buffers(&mut self, f: &mut dyn FnMut(&mut Buffer)) {
        self.blocks.iter_mut().for_each(|block| alone(block).visit_buffers(f));
    }
}
