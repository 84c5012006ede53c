//! What the blocks of a stack need to know about their tokens; it is computed from the stream's row table.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::Device;

use super::context::present;
use super::spans::{Across, Spans};
use super::{Context, Sizes, StackBlueprint, counted};
use crate::data::{Batch, IGNORE, PAD};
use crate::moe::{self, Error, Facts, History, Homes, Importance};
use crate::parallel::{Rows, Stream};

/// Number of documents assumed for a row if the documents are not known.
const DOCUMENTS: usize = 4;

/// What a block needs to know about a stream.
pub(super) struct StreamFacts {
    /// The distribution of the tokens between sub-layers, and their row table.
    pub(super) stream: Stream,
    pub(super) spans: Spans,
    /// Present if the tokens attend to another stream (cross-attention).
    pub(super) across: Option<Across>,
    importance: Importance,
    homes: Homes,
    history: History,
}

/// The row table of a batch that rank `origin` of the data group has loaded.
pub(super) fn rows(batch: &Batch, origin: usize) -> Rows {
    Rows {
        seq: batch.seq,
        micro_batch: batch.micro_batch,
        sequences: (0..batch.rows).map(|row| batch.first_token + (row * batch.seq) as u64).collect(),
        origins: vec![origin as u32; batch.rows],
        ids: batch.tokens.clone(),
        positions: batch.positions.clone(),
        segments: batch.segments.clone(),
        targets: batch.targets.clone(),
        counted: batch.counted.map(|counted| counted.valid),
    }
}

/// Number of tokens with a target.
pub(super) fn valid(rows: &Rows) -> usize {
    rows.counted.unwrap_or_else(|| rows.targets.iter().filter(|&&target| target != IGNORE).count())
}

/// The properties of a stack that decide what its blocks need to know about their tokens.
#[derive(Debug)]
pub(super) struct StackReader {
    pub(super) sizes: Sizes,
    pub(super) stack: StackBlueprint,
    /// Whether this is the last stack, which the head follows.
    pub(super) is_last: bool,
}

impl StackReader {
    /// What the stack's blocks need to know about a stream, whose tokens attend to those of `source` if there is one.
    /// Collective if tokens compete for experts.
    ///
    /// # Errors
    /// Any error of the data group's communicator.
    pub(super) fn facts(
        &self,
        device: &Arc<Device>,
        stream: Stream,
        source: Option<&Stream>,
        context: &Context,
    ) -> Result<StreamFacts, Error> {
        let rows = stream.rows();
        let across = source.map(|source| Across {
            spans: Rc::new(Spans::across(device, rows, source.rows())),
            stream: source.clone(),
        });
        Ok(StreamFacts {
            spans: Spans::new(device, rows, self.stack.is_causal, &self.sizes),
            across,
            importance: self.importance(rows, context),
            homes: homes(&self.sizes, rows, context)?,
            history: History::default(),
            stream,
        })
    }

    /// The weight of each token in auxiliary losses, and which tokens are of one sequence.
    fn importance(&self, rows: &Rows, context: &Context) -> Importance {
        let by_row = self.sizes.moe.as_ref().is_some_and(moe::Config::counts_rows);
        if rows.counted.is_some() {
            return Importance::counted(rows.len(), rows.sequences.len() * if by_row { 1 } else { DOCUMENTS });
        }
        let whole_rows = vec![0; if by_row { rows.len() } else { 0 }];
        let segments = if by_row { &whole_rows } else { &rows.segments };
        let (counts, weight) = match self.is_last {
            true => (counted(&self.sizes, &rows.targets, &rows.segments), context.per_counted_token()),
            // Every token of a source helps to predict the targets.
            false => (present(&rows.segments), context.per_source_token()),
        };
        Importance::new(segments, rows.seq, counts, weight)
    }
}

impl StreamFacts {
    /// For the next tokens of so many versions of one document, which are of one length, without gradients.
    ///
    /// # Errors
    /// As [`StackReader::facts`].
    pub(super) fn of_next(
        device: &Arc<Device>,
        stream: Stream,
        sizes: &Sizes,
        context: &Context,
        versions: usize,
    ) -> Result<StreamFacts, Error> {
        let rows = stream.rows();
        Ok(StreamFacts {
            spans: Spans::of_next(device, &rows.positions[..rows.len() / versions], sizes),
            across: None,
            importance: Importance::new(&vec![0; rows.len()], rows.len(), vec![true; rows.len()], 1.0),
            homes: homes(sizes, rows, context)?,
            history: History::default(),
            stream,
        })
    }

    /// What a MoE layer needs to know about the tokens.
    pub(super) fn of_layer<'a>(&'a self, context: &'a Context) -> Facts<'a> {
        Facts { importance: &self.importance, homes: &self.homes, history: &self.history, step: &context.facts }
    }
}

/// Which tokens are padding, and which rank has which tokens of a micro-batch, if tokens compete for experts in any layer.
/// Collective, once for all layers.
fn homes(sizes: &Sizes, rows: &Rows, context: &Context) -> Result<Homes, Error> {
    let selector = sizes.moe.as_ref().map(|moe| moe.widest().selector());
    let selector = selector.map(|selector| if context.facts.unlimited { selector.unlimited() } else { selector });
    if !selector.is_some_and(|selector| selector.competes()) {
        return Ok(Homes::default().padded(padding(rows), None)?);
    }
    let (routings, numbers) = (&context.facts.routings, rows.numbers());
    let gathered = match &routings.migration {
        None => Homes::gather(&numbers, &context.mesh.data)?,
        Some(_) => Homes::gather_runs(&numbers, &context.mesh.data)?,
    };
    let script = routings.script.as_ref();
    let homes = script.and_then(|script| script.homes(rows.micro_batch, rows.seq)).unwrap_or(gathered);
    // Only texts in pairs leave places in rows.
    let told = sizes.blueprint().reads_a_source().then_some(&context.mesh.data);
    Ok(homes.padded(padding(rows), told)?)
}

/// Of each row, the numbers of the tokens at its end that are padding.
fn padding(rows: &Rows) -> Vec<Range<u64>> {
    let of_row = |(place, &first): (usize, &u64)| {
        let end = first + rows.seq as u64;
        let segments = rows.segments.get(place * rows.seq..(place + 1) * rows.seq).unwrap_or_default();
        end - segments.iter().rev().take_while(|&&segment| segment == PAD).count() as u64..end
    };
    rows.sequences.iter().enumerate().map(of_row).collect()
}
