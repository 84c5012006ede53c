//! What can be wrong with what is to be scored.

/// A corpus that has no score. Segments count from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("there are {hypotheses} hypotheses for {references} references: give one line of each for every segment")]
    Lengths { hypotheses: usize, references: usize },
    #[error("there is nothing to score: give at least one segment")]
    Nothing,
    #[error("segment {segment} has no reference: give it one, or leave the segment out")]
    NoReference { segment: usize },
    #[error("there is no tokenizer `{name}`: choose one of {}{}", names.join(", "), dictionaries(name))]
    UnknownTokenizer { name: String, names: Vec<&'static str> },
}

/// Says of tokenizers that sacrebleu has what to take in their place.
fn dictionaries(name: &str) -> &'static str {
    match name {
        "ja-mecab" | "ko-mecab" | "spm" | "flores101" | "flores200" | "spBLEU-1K" => {
            " (it needs a dictionary or a model, which this program lacks: `char` does without, and so does chrF)"
        }
        _ => "",
    }
}
