//! Which text is held out: a pure function of the corpus's shape.
//!
//! Documents are chosen by a hash of their place in the corpus, so the choice does not depend on reading
//! order or machine. Where one document holds more than half of the text, choosing whole documents would
//! hold out almost everything or almost nothing; then the end of that document is held out instead.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::shuffle::mix;

/// A part of the documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    Train,
    HeldOut,
}

impl Split {
    pub const ALL: [Split; 2] = [Split::Train, Split::HeldOut];

    /// Which of two belongs to this split.
    pub fn of<T>(self, train: T, held_out: T) -> T {
        match self {
            Split::Train => train,
            Split::HeldOut => held_out,
        }
    }

    fn stem(self) -> &'static str {
        self.of("train", "held-out")
    }

    pub(crate) fn shard_name(self, index: usize) -> String {
        format!("{}-{index:05}.tokens", self.stem())
    }

    /// The table of pairs of documents.
    pub(crate) fn pairs_name(self) -> String {
        format!("{}.pairs", self.stem())
    }

    /// The stretches of tokens that are given.
    pub(crate) fn given_name(self) -> String {
        format!("{}.given", self.stem())
    }

    pub(crate) fn boundaries_name(self) -> String {
        format!("{}.documents", self.stem())
    }
}

impl fmt::Display for Split {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.stem())
    }
}

/// The shape of a corpus, as far as the choice needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CorpusShape {
    pub(crate) documents: u64,
    /// Bytes of text.
    pub(crate) bytes: u64,
    /// Place of the longest document.
    pub(crate) longest: u64,
    /// Bytes of the longest document.
    pub(crate) longest_bytes: u64,
}

/// The choice, ready to be asked for any document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeldOut {
    Nothing,
    /// The documents of the files that sources name for it.
    Named,
    /// Documents whose hash lies below a bound, but for one that is kept where it is needed.
    Documents {
        below: u64,
        always: Option<u64>,
        never: Option<u64>,
    },
    /// The end of one document, from a byte on.
    Tail {
        document: u64,
        byte: u64,
    },
}

impl HeldOut {
    /// Holds out about `fraction` of the documents: at least one, and never all.
    pub(crate) fn choose(fraction: f64, shape: CorpusShape) -> HeldOut {
        if fraction <= 0.0 || shape.documents == 0 {
            return HeldOut::Nothing;
        }
        if shape.longest_bytes * 2 > shape.bytes {
            return Self::tail(fraction, shape);
        }
        let below = (fraction * 2f64.powi(64)) as u64;
        let hashes = || (0..shape.documents).map(|document| (hash(document), document));
        let (least, first) = hashes().min().unwrap_or_default();
        let (most, last) = hashes().max().unwrap_or_default();
        HeldOut::Documents { below, always: (least >= below).then_some(first), never: (most < below).then_some(last) }
    }

    fn tail(fraction: f64, shape: CorpusShape) -> HeldOut {
        let wanted = (fraction * shape.bytes as f64).round() as u64;
        let bytes = wanted.clamp(1, (shape.longest_bytes / 2).max(1));
        if bytes >= shape.longest_bytes {
            return HeldOut::Nothing;
        }
        HeldOut::Tail { document: shape.longest, byte: shape.longest_bytes - bytes }
    }

    /// The split of a document, or of its beginning. `is_named` is whether a source names its file as held out.
    pub(crate) fn split(&self, document: u64, is_named: bool) -> Split {
        let held_out = match *self {
            HeldOut::Nothing | HeldOut::Tail { .. } => false,
            HeldOut::Named => is_named,
            HeldOut::Documents { below, always, never } => {
                always == Some(document) || (hash(document) < below && never != Some(document))
            }
        };
        if held_out { Split::HeldOut } else { Split::Train }
    }

    /// The byte from which a document belongs to the held-out split, where it is cut.
    pub(crate) fn cut(&self, document: u64) -> Option<u64> {
        match *self {
            HeldOut::Tail { document: cut, byte } if cut == document => Some(byte),
            _ => None,
        }
    }
}

/// Salted, so that the choice is independent of every other use of the numbers of documents.
fn hash(document: u64) -> u64 {
    mix(document ^ 0x9f1c_7a2e_55d3_0b81)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(documents: u64) -> CorpusShape {
        CorpusShape { documents, bytes: documents * 10, longest: 0, longest_bytes: 10 }
    }

    fn held_out(choice: HeldOut, documents: u64) -> u64 {
        (0..documents).filter(|&document| choice.split(document, false) == Split::HeldOut).count() as u64
    }

    #[test]
    fn about_the_fraction_is_held_out() {
        let count = held_out(HeldOut::choose(0.1, even(10_000)), 10_000);
        // Three standard deviations of the binomial distribution are 90.
        assert!((910..1090).contains(&count), "{count}");
    }

    #[test]
    fn some_but_never_all_documents_are_held_out() {
        for documents in 2..40 {
            for fraction in [1e-9, 0.01, 0.5] {
                let count = held_out(HeldOut::choose(fraction, even(documents)), documents);
                assert!(count >= 1 && count < documents, "{count} of {documents} at {fraction}");
            }
        }
        let nearly_all = held_out(HeldOut::choose(0.999_999, even(5)), 5);
        assert_eq!(nearly_all, 4);
    }

    #[test]
    fn a_fraction_of_zero_holds_nothing_out() {
        assert_eq!(HeldOut::choose(0.0, even(100)), HeldOut::Nothing);
    }

    #[test]
    fn a_dominant_document_is_cut() {
        let shape = CorpusShape { documents: 2, bytes: 1000, longest: 1, longest_bytes: 900 };
        let choice = HeldOut::choose(0.1, shape);
        assert_eq!(choice, HeldOut::Tail { document: 1, byte: 800 });
        assert_eq!((choice.cut(0), choice.cut(1)), (None, Some(800)));
        let alone = CorpusShape { documents: 1, bytes: 3, longest: 0, longest_bytes: 3 };
        assert_eq!(HeldOut::choose(0.01, alone), HeldOut::Tail { document: 0, byte: 2 });
        let single = CorpusShape { documents: 1, bytes: 1, longest: 0, longest_bytes: 1 };
        assert_eq!(HeldOut::choose(0.01, single), HeldOut::Nothing);
    }
}
