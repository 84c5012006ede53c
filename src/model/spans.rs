//! Attention spans: which keys each query attends to, computed once for all layers of a stack.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use guildhall_tensor::Device;
use guildhall_tensor::ops::{self, Stretches, TurningPairs, causal_keys, cross_keys, segment_keys, within_window};

use super::{Sizes, Window, rotary};
use crate::parallel::{Rows, Stream};

/// For each token, the tokens of its own stream that it attends to.
pub(super) enum Spans {
    Heads(HeadSpans),
    Relative(Arc<Stretches>),
}

/// Of attention by heads.
pub(super) struct HeadSpans {
    pub(super) all: Rc<ops::AttentionSpans>,
    /// Of the blocks whose tokens see a window only, if there are such.
    pub(super) windowed: Option<Rc<ops::AttentionSpans>>,
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
        let rotary = rotary::tables(device, rows.index(&rows.positions), sizes);
        let window = match sizes.blueprint().window {
            Window::Alternating { tokens } => Some(tokens),
            Window::Full => None,
        };
        if rows.counted.is_some() {
            // Assumes one document per row.
            let all = if is_causal { (seq as f64 + 1.0) / 2.0 } else { seq as f64 };
            let spans = |seen| {
                let counted = ops::AttentionSpans::counted(device, (seq, rows.len()), seen, rotary.clone());
                Rc::new(counted.turning(pairs(sizes)))
            };
            let within = |window: usize| (1..=seq).map(|seen| seen.min(window) as f64).sum::<f64>() / seq as f64;
            let windowed = window.map(|window| spans(within(window)));
            return Spans::Heads(HeadSpans { all: spans(all), windowed });
        }
        let keys = if is_causal { causal_keys } else { segment_keys };
        let keys = keys(segments, seq);
        let spans = |keys: &[Range<u32>]| {
            Rc::new(ops::AttentionSpans::new(device, seq, keys, rotary.clone()).turning(pairs(sizes)))
        };
        let windowed = window.map(|window| spans(&within_window(keys.clone(), seq, window)));
        Spans::Heads(HeadSpans { all: spans(&keys), windowed })
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
        // The cache has the keys that they attend to, and attention knows its window.
        let rotary = rotary::tables(device, positions.into(), sizes);
        let all = ops::AttentionSpans::new(device, positions.len(), &[], rotary).turning(pairs(sizes));
        Spans::Heads(HeadSpans { all: Rc::new(all), windowed: None })
    }
}

/// Which numbers of a head turn together.
fn pairs(sizes: &Sizes) -> TurningPairs {
    if sizes.heads().latent.is_some() { TurningPairs::Neighbours } else { TurningPairs::Halves }
}
