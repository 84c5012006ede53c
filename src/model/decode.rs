//! Decoding with two stacks: the encoder reads a text once, the decoder writes another token by token, in several
//! versions at once.
//!
//! ```text
//!  source -> encoder -> keys and values of cross-attention, a pair a decoder layer      once
//!  tokens of N versions -> decoder, each with caches of its own -> logits [N, V]         every step
//! ```

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::AttentionSpans;
use guildhall_tensor::{Device, Tape, Tensor};

use super::beam::{BeamOptions, Hypothesis, search};
use super::block::{CachedPass, Given, MemoryKeys};
use super::cache::Cache;
use super::stack::Stack;
use super::stream_facts::StreamFacts;
use super::{Caches, Context, Model};
use crate::data::IGNORE;
use crate::moe::Error;
use crate::parallel::{Mesh, Rows, Stream};

/// What an encoder made of a text, for the decoder that reads it.
pub struct Encoded {
    /// Keys and values of cross-attention, by layer of the decoder.
    layers: Vec<[Tensor; 2]>,
    tokens: usize,
}

/// Decodes with a model of two stacks. Tokens do not compete for places of experts, so that a text is decoded alike beside
/// any others; only a gate whose experts choose among tokens lets those of one source compete. All calls are collective
/// over the mesh, whose ranks decode the same text.
pub struct Translator<'a> {
    model: &'a Model,
    device: &'a Arc<Device>,
    context: Rc<Context>,
}

impl<'a> Translator<'a> {
    /// # Panics
    /// If the model does not have an encoder and a decoder.
    pub fn new(model: &'a Model, device: &'a Arc<Device>, mesh: &Mesh) -> Translator<'a> {
        assert_eq!(model.stacks.len(), 2, "an encoder and a decoder");
        Translator { model, device, context: Rc::new(Context::of_decoding(mesh)) }
    }

    fn decoder(&self) -> &'a Stack {
        &self.model.stacks[1]
    }

    /// Empty caches of one version.
    pub fn caches(&self) -> Caches {
        Caches::new(self.decoder().blocks.len())
    }

    /// Reads a text.
    ///
    /// # Errors
    /// Any error of a group's communicator, or of a MoE layer; so for all that follow.
    ///
    /// # Panics
    /// If the text is empty, or longer than the model's rows.
    pub fn encode(&self, source: &[u32]) -> Result<Encoded, Error> {
        let (model, encoder, count) = (self.model, &self.model.stacks[0], source.len());
        let longest = model.sizes().model.longest_row();
        assert!((1..=longest).contains(&count), "{count} tokens to read, of at least 1 and at most {longest}");
        let tape = Tape::inference(self.device);
        let (positions, segments, targets) = ((0..count as u32).collect(), vec![0; count], vec![IGNORE; count]);
        let rows = Rows { positions, segments, targets, ..Rows::of_ids(0, source) };
        let stream = Stream::whole(rows, &self.context.mesh.tensor);
        let facts = Rc::new(encoder.reader.facts(self.device, stream.clone(), None, &self.context)?);
        let distances = 1 - count as i64..count as i64;
        let (x, bias) = model.residency.within(0, &tape, || -> Result<_, Error> {
            Ok((model.embedding.forward(&tape, &stream)?, model.embedding.bias(&tape, 0, distances)))
        })?;
        let hidden = encoder.forward(x, Given { memory: None, bias }, &facts, &self.context, &model.residency)?;
        let memory = model.norm_between(&tape, hidden.x)?;
        let units = (self.decoder().first_unit..).zip(&self.decoder().blocks);
        let keys_values = |(unit, block): (usize, &Rc<super::block::Block>)| {
            model.residency.within(unit, &tape, || block.keys_values(&memory, &stream))
        };
        Ok(Encoded { layers: units.map(keys_values).collect::<Result<_, Error>>()?, tokens: count })
    }

    /// Logits `[N, V]` behind the next token of each of N versions, which have as many caches and are of one length.
    ///
    /// # Errors
    /// As [`Translator::encode`].
    ///
    /// # Panics
    /// If there are no tokens, or not as many caches; if versions are of different lengths, or longer than a row.
    pub fn next_logits(&self, tokens: &[u32], encoded: &Encoded, caches: &mut [Caches]) -> Result<Tensor, Error> {
        let (model, count, seen) = (self.model, tokens.len(), caches.first().map_or(0, Caches::len));
        assert!(count > 0 && caches.len() == count, "{count} tokens and {} caches", caches.len());
        assert!(caches.iter().all(|cache| cache.len() == seen), "versions of one length");
        caches.iter_mut().for_each(|cache| drop(cache.advance(1)));
        let tape = Tape::inference(self.device);
        let rows = Rows { positions: vec![seen as u32; count], ..Rows::of_ids(0, tokens) };
        // So few tokens are not worth splitting.
        let stream = Stream::whole(rows, &self.context.mesh.tensor);
        let facts = StreamFacts::of_next(self.device, stream.clone(), model.sizes(), &self.context, count)?;
        let all = 0..encoded.tokens as u32;
        let spans = Rc::new(AttentionSpans::new(self.device, count, &vec![all; count], None).across(encoded.tokens));
        let (mut x, bias) = model.residency.within(0, &tape, || -> Result<_, Error> {
            Ok((model.embedding.forward(&tape, &stream)?, model.embedding.bias(&tape, 1, -(seen as i64)..1)))
        })?;
        let mut layers: Vec<_> = caches.iter_mut().map(Caches::layers).collect();
        let units = (self.decoder().first_unit..).zip(&self.decoder().blocks);
        for ((unit, block), keys_values) in units.zip(&encoded.layers) {
            let mut caches: Vec<&mut Cache> = layers.iter_mut().filter_map(Iterator::next).collect();
            let memory = Some(MemoryKeys { keys_values, spans: &spans });
            let pass = CachedPass { facts: &facts, context: &self.context, memory, bias: bias.as_ref() };
            x = model.residency.within(unit, &tape, || block.forward_cached(&x, &pass, &mut caches))?;
        }
        model.last_logits(&tape, x, &stream)
    }

    /// The best texts that the decoder writes behind `first`, the best one first; none if no logit is a number. A token may
    /// be written if `writable` has true at its place.
    ///
    /// # Errors
    /// As [`Translator::encode`].
    ///
    /// # Panics
    /// As [`Translator::encode`].
    pub fn translate(
        &self,
        source: &[u32],
        first: u32,
        options: &BeamOptions,
        writable: &[bool],
    ) -> Result<Vec<Hypothesis>, Error> {
        let sizes = &self.model.sizes().model;
        let options = BeamOptions { max_tokens: options.max_tokens.min(sizes.seq), ..options.clone() };
        let (encoded, mut caches) = (self.encode(source)?, vec![self.caches()]);
        let may = |token: usize| writable.get(token).copied().unwrap_or(false);
        let masked = |logits: &[f32]| -> Vec<f32> {
            logits
                .iter()
                .enumerate()
                .map(|(token, &logit)| if may(token) { logit } else { f32::NEG_INFINITY })
                .collect()
        };
        search(&options, first, &mut |tokens, parents| {
            caches = parents.iter().map(|&parent| caches[parent].clone()).collect();
            let logits = self.next_logits(tokens, &encoded, &mut caches)?;
            Ok(logits.elements(0..logits.len()).f32s().chunks_exact(sizes.vocab).map(masked).collect())
        })
    }
}
