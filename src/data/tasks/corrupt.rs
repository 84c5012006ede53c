//! Denoising: a text that is to be restored from what corruption has left of it (mBART; Liu et al. 2020, 2.2). Sentences
//! change their order, words are dropped, and spans of words become one mask each.

use std::ops::Range;
use std::sync::Arc;

use guildhall_tensor::Draws;
use serde::{Deserialize, Serialize};

use crate::data::shuffle::Permutation;
use crate::data::tokenizer::Tokenizer;

/// How much of a text is corrupted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Corruption {
    /// Of the words that are not dropped, the share that masks hide.
    pub mask: f64,
    /// Mean number of words of a masked span, which has a Poisson distribution.
    pub span: f64,
    /// Probability that a word is dropped.
    pub drop: f64,
    /// Whether sentences change their order.
    pub shuffle: bool,
}

impl Default for Corruption {
    /// mBART's.
    fn default() -> Corruption {
        Corruption { mask: 0.35, span: 3.5, drop: 0.0, shuffle: true }
    }
}

/// Which tokens begin a word, and which end a sentence. In scripts without blanks each token is a word.
#[derive(Clone, Debug)]
pub struct TokenWords {
    begins: Arc<[bool]>,
    ends_sentence: Arc<[bool]>,
    mask: u32,
}

/// What draws are for, in the upper half of their index.
#[derive(Clone, Copy)]
enum CorruptionDraw {
    Order = 0,
    Drop = 1,
    Length = 2,
    Place = 3,
}

/// Draws of one text in one pass.
#[derive(Clone, Copy)]
pub(super) struct TextDraws(pub(super) Draws);

impl TextDraws {
    fn bits(&self, what: CorruptionDraw, index: usize) -> u32 {
        self.0.bits((what as u64) << 32 | index as u64)
    }

    fn uniform(&self, what: CorruptionDraw, index: usize) -> f64 {
        f64::from(self.bits(what, index)) / f64::from(u32::MAX)
    }

    fn order(&self, what: CorruptionDraw, len: usize) -> impl Iterator<Item = usize> {
        let seed = u64::from(self.bits(what, 0)) << 32 | u64::from(self.bits(what, 1));
        let order = Permutation::new(len as u64, seed, 0);
        (0..len as u64).map(move |place| order.get(place) as usize)
    }

    /// A number with a Poisson distribution, by inversion.
    fn poisson(&self, mean: f64, index: usize) -> usize {
        let wanted = self.uniform(CorruptionDraw::Length, index);
        let (mut number, mut probability) = (0, (-mean).exp());
        let mut sum = probability;
        while sum < wanted && probability > 0.0 {
            number += 1;
            probability *= mean / number as f64;
            sum += probability;
        }
        number
    }
}

impl TokenWords {
    /// # Errors
    /// A tokenizer without a mask.
    pub fn new(tokenizer: &Tokenizer) -> Result<TokenWords, crate::data::Error> {
        let mask = tokenizer.mask()?;
        let text = |id: u32| tokenizer.decode(&[id]).unwrap_or_default();
        let begins = |id: u32| {
            let marked = tokenizer.name(id).is_some_and(|name| name.starts_with(['Ġ', '▁']));
            // Of a sign that several tokens make up, none but the first can be cut off.
            marked || id == mask || text(id).starts_with(without_blanks)
        };
        let ends = |id: u32| text(id).trim_end().ends_with(['.', '!', '?', '。', '！', '？', '।']);
        let ids = || 0..tokenizer.vocab() as u32;
        Ok(TokenWords { begins: ids().map(begins).collect(), ends_sentence: ids().map(ends).collect(), mask })
    }

    /// The stretches of a text that are words: all that follows the beginning of one up to the next.
    fn words(&self, text: &[u32]) -> Vec<Range<usize>> {
        let begins = (0..text.len()).filter(|&at| at == 0 || self.begins[text[at] as usize]);
        stretches(begins.collect(), text.len())
    }

    fn sentences(&self, text: &[u32]) -> Vec<Range<usize>> {
        let begins = (0..text.len()).filter(|&at| at == 0 || self.ends_sentence[text[at - 1] as usize]);
        stretches(begins.collect(), text.len())
    }

    /// What is left of a text, never longer than it.
    pub(super) fn corrupt(&self, text: &[u32], by: &Corruption, draws: TextDraws) -> Vec<u32> {
        let mut left = text.to_vec();
        if by.shuffle {
            let sentences = self.sentences(text);
            let order = draws.order(CorruptionDraw::Order, sentences.len());
            left = order.flat_map(|sentence| &text[sentences[sentence].clone()]).copied().collect();
        }
        let words = self.words(&left);
        let stays = |word: &usize| draws.uniform(CorruptionDraw::Drop, *word) >= by.drop;
        let kept: Vec<&[u32]> = (0..words.len()).filter(stays).map(|word| &left[words[word].clone()]).collect();
        let hidden = (by.mask * kept.len() as f64).round() as usize;
        self.masked(&kept, &spans(hidden, kept.len(), by.span, draws), text.len(), draws)
    }

    /// With a mask in place of each span of so many words; spans lie between words that stay, no two side by side. Those of
    /// no words are left out where the text would become longer than `room`.
    fn masked(&self, words: &[&[u32]], spans: &[usize], room: usize, draws: TextDraws) -> Vec<u32> {
        let staying = words.len() - spans.iter().sum::<usize>();
        // Before each word that stays, and behind the last, there may be one span.
        let mut chosen: Vec<usize> = draws.order(CorruptionDraw::Place, staying + 1).take(spans.len()).collect();
        chosen.sort_unstable();
        let mut spans = chosen.into_iter().zip(spans).peekable();
        let (mut masked, mut next) = (Vec::new(), 0);
        let mut free = room.saturating_sub(words.iter().map(|word| word.len()).sum());
        for place in 0..=staying {
            if let Some((_, &hidden)) = spans.next_if(|(at, _)| *at == place) {
                let tokens: usize = words[next..next + hidden].iter().map(|word| word.len()).sum();
                if free + tokens > 0 {
                    masked.push(self.mask);
                    free = free + tokens - 1;
                }
                next += hidden;
            }
            if place < staying {
                masked.extend_from_slice(words[next]);
                next += 1;
            }
        }
        masked
    }
}

/// Lengths of spans that hide `hidden` of so many words, with the given mean; no more than there are gaps between words.
fn spans(hidden: usize, words: usize, mean: f64, draws: TextDraws) -> Vec<usize> {
    let gaps = words - hidden + 1;
    let (mut spans, mut left) = (Vec::new(), hidden);
    while left > 0 && spans.len() + 1 < gaps {
        let length = draws.poisson(mean, spans.len()).min(left);
        spans.push(length);
        left -= length;
    }
    if left > 0 {
        spans.push(left);
    }
    spans
}

/// Whether a sign belongs to a script that puts no blanks between words: Thai, Lao, Burmese, Khmer, Chinese, Japanese.
fn without_blanks(sign: char) -> bool {
    matches!(sign, '\u{e00}'..='\u{eff}' | '\u{1000}'..='\u{109f}' | '\u{1780}'..='\u{17ff}'
        | '\u{2e80}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{ff00}'..='\u{ffef}' | '\u{20000}'..='\u{3ffff}')
}

fn stretches(begins: Vec<usize>, end: usize) -> Vec<Range<usize>> {
    let ends = begins.iter().skip(1).copied().chain([end]);
    begins.iter().copied().zip(ends).map(|(begin, end)| begin..end).collect()
}

#[cfg(test)]
mod tests {
    use guildhall_tensor::Purpose;

    use super::*;

    /// Full stops of Chinese, Japanese and Hindi end sentences too.
    #[test]
    fn sentences_of_other_scripts_end() {
        for text in ["今日は。明日！本当？はい", "यह है। वह था। ठीक", "One. Two! Three? Four"]
        {
            let tokenizer = Tokenizer::train_tagged(&vec![text.to_owned(); 9], 400, None, &["xx".to_owned()]).unwrap();
            let tokens = tokenizer.encode(text).unwrap();
            let words = TokenWords::new(&tokenizer).unwrap();
            let sentences = words.sentences(&tokens).into_iter().map(|range| tokenizer.decode(&tokens[range]).unwrap());
            let wanted = text.split_inclusive(['。', '！', '？', '।', '.', '!', '?']).map(str::to_owned);
            assert_eq!(sentences.collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
        }
    }

    /// Each span has a length of its own, which follow a Poisson distribution and hide what they should.
    #[test]
    fn spans_are_drawn_one_by_one() {
        let spans = spans(3000, 9000, 3.5, TextDraws(Draws::new(1, Purpose::Test, 0, 0)));
        assert_eq!(spans.iter().sum::<usize>(), 3000);
        let mean = 3000.0 / spans.len() as f64;
        let variance = spans.iter().map(|&length| (length as f64 - mean).powi(2)).sum::<f64>() / spans.len() as f64;
        // Of 857 lengths both are within four standard errors: 0.064 of the mean, 0.18 of the variance.
        assert!((mean - 3.5).abs() < 0.26 && (variance - 3.5).abs() < 0.72, "mean {mean}, variance {variance}");
    }
}
