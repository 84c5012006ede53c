//! Attention spans: which keys each query attends to, computed once for all layers of a stack.

use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::ops::{self, Stretches, causal_keys, cross_keys, rotary_tables, segment_keys};
use guildhall_tensor::{Device, Index, Tensor};

use super::{Positions, Sizes};
use crate::parallel::{Rows, Stream};

/// For each token, the tokens of its own stream that it attends to.
pub(super) enum Spans {
    Heads(Rc<ops::AttentionSpans>),
    Relative(Arc<Stretches>),
}

/// What cross-attention needs to know about the stream that is attended to.
pub(super) struct Across {
    pub(super) spans: Rc<ops::AttentionSpans>,
    /// The stream that is attended to.
    pub(super) stream: Stream,
}

impl Spans {
    pub(super) fn new(device: &Arc<Device>, rows: &Rows, is_causal: bool, sizes: &Sizes) -> Spans {
        let (segments, seq) = (&rows.segments, rows.seq);
        if sizes.blueprint().is_segmented() {
            let (segment, memory) = sizes.segment_and_memory();
            return Spans::Relative(Arc::new(match rows.counted {
                Some(_) => Stretches::counted(device, (seq, rows.len()), segment, memory),
                None => Stretches::new(device, segments, seq, segment, memory),
            }));
        }
        let rotary = rotary(device, rows.index(&rows.positions), sizes);
        if rows.counted.is_some() {
            // Assumes one document per row.
            let seen = if is_causal { (seq as f64 + 1.0) / 2.0 } else { seq as f64 };
            return Spans::Heads(Rc::new(ops::AttentionSpans::counted(device, (seq, rows.len()), seen, rotary)));
        }
        let keys = if is_causal { causal_keys } else { segment_keys };
        Spans::Heads(Rc::new(ops::AttentionSpans::new(device, seq, &keys(segments, seq), rotary)))
    }

    /// The spans of tokens that attend to another stream, row by row.
    pub(super) fn across(device: &Arc<Device>, rows: &Rows, source: &Rows) -> ops::AttentionSpans {
        if rows.counted.is_some() {
            return ops::AttentionSpans::counted(device, (rows.seq, rows.len()), source.seq as f64, None)
                .across(source.seq);
        }
        let keys = cross_keys((&rows.segments, rows.seq), (&source.segments, source.seq));
        ops::AttentionSpans::new(device, rows.seq, &keys, None).across(source.seq)
    }

    /// The spans of the next tokens of one document, at these positions.
    pub(super) fn of_next(device: &Arc<Device>, positions: &[u32], sizes: &Sizes) -> Spans {
        if sizes.blueprint().is_segmented() {
            let (segment, memory) = sizes.segment_and_memory();
            let tokens = positions.last().map_or(0, |&last| last as usize + 1);
            return Spans::Relative(Arc::new(Stretches::new(device, &vec![0; tokens], tokens, segment, memory)));
        }
        // The cache has the keys that they attend to.
        let rotary = rotary(device, positions.into(), sizes);
        Spans::Heads(Rc::new(ops::AttentionSpans::new(device, positions.len(), &[], rotary)))
    }
}

/// Rotary tables for these positions, if the model rotates queries and keys.
fn rotary(device: &Arc<Device>, positions: Index, sizes: &Sizes) -> Option<[Tensor; 2]> {
    let Positions::Rotary { theta, .. } = sizes.blueprint().positions else { return None };
    Some(rotary_tables(device, positions, sizes.heads().head_dim, theta))
}
