//! Text to tokens and back: a byte-level BPE trained on the corpus, or any Hugging Face `tokenizer.json`.
//!
//! A thin wrapper that fixes what the underlying library leaves open: no special token is ever added or
//! recognised in text (a document cannot forge its own end), only in what chat templates write; nothing is padded or
//! truncated, and decoding an unknown token is an error instead of silence.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, PostProcessorWrapper};

use super::error::Error;
use super::guard::guarded;

/// The end-of-text token of trained tokenizers.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The names under which published tokenizers keep their end of text, most specific first.
const END_OF_TEXT_NAMES: [&str; 8] =
    [END_OF_TEXT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>", "<|eos|>", "[EOS]", "<|im_end|>"];

/// The token that hides another; trained tokenizers have the first.
const MASK_NAMES: [&str; 2] = ["<mask>", "[MASK]"];

/// One entry for each byte, one for the end of text, and the mask.
const VOCAB_MIN: usize = 258;

/// Distinct words whose tokens are remembered; a corpus repeats most of its words.
const CACHED_WORDS: usize = 1 << 16;

/// Turns text into tokens and tokens into text.
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab: usize,
    end_of_text: u32,
    mask: Option<u32>,
    /// The text it was read from, where numbers below the largest are no token's: the library writes such, and a warning
    /// onto standard output besides.
    holed: Option<String>,
}

impl fmt::Debug for Tokenizer {
    /// Without the vocabulary, which would fill pages.
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let Self { inner: _, vocab, end_of_text, mask, holed: _ } = self;
        let mut shown = formatter.debug_struct("Tokenizer");
        shown.field("vocab", vocab).field("end_of_text", end_of_text).field("mask", mask).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Whether texts are rewritten before they are cut, such as to lower case: what tokens give back is then not the text.
    pub fn normalizes(&self) -> bool {
        self.inner.get_normalizer().is_some()
    }

    /// Trains a byte-level BPE of at most `vocab` entries; fewer when the sample has no more pairs to merge.
    /// The same sample gives the same tokenizer.
    ///
    /// # Errors
    /// `vocab` too small to hold every byte.
    pub fn train(sample: &[String], vocab: usize, end_of_text: Option<&str>) -> Result<Self, Error> {
        Self::train_tagged(sample, vocab, end_of_text, &[])
    }

    /// The same with a tag for each of these languages.
    ///
    /// # Errors
    /// `vocab` too small to hold every byte and tag.
    pub fn train_tagged(
        sample: &[String],
        vocab: usize,
        end_of_text: Option<&str>,
        languages: &[String],
    ) -> Result<Self, Error> {
        let needed = VOCAB_MIN + languages.len();
        if vocab < needed {
            return Err(Error::SmallVocab { vocab, needed });
        }
        let end_of_text = end_of_text.unwrap_or(END_OF_TEXT);
        let tags = languages.iter().map(|language| tag_name(language));
        let special = [end_of_text, MASK_NAMES[0]].into_iter().map(str::to_owned).chain(tags);
        let trainer = BpeTrainer::builder()
            .vocab_size(vocab)
            .show_progress(false)
            .special_tokens(special.map(|name| AddedToken::from(name, true)).collect())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        inner.with_decoder(Some(ByteLevel::new(false, true, true)));
        inner
            .train(&mut TrainerWrapper::BpeTrainer(trainer), sample.iter())
            .map_err(|error| Error::Tokenizer(error.to_string()))?;
        Self::wrap(inner, Path::new("data.tokenizer = \"bpe\""), Some(end_of_text))
    }

    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// A file that cannot be read or understood, or whose end of text is unknown.
    pub fn open(path: &Path, end_of_text: Option<&str>) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(Error::io("read the tokenizer", path))?;
        Self::from_json(&bytes, path, end_of_text)
    }

    /// Holds that these bytes are a tokenizer, whatever its end of text.
    ///
    /// # Errors
    /// Bytes that are not understood; `path` is named.
    pub fn check(bytes: &[u8], path: &Path) -> Result<(), Error> {
        Self::parse(bytes, path).map(drop)
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<tokenizers::Tokenizer, Error> {
        let bad = |message: String| Error::BadTokenizer { path: path.to_owned(), message };
        guarded(|| tokenizers::Tokenizer::from_bytes(bytes))
            .ok_or_else(|| bad("a part of it is not understood".to_owned()))?
            .map_err(|error| bad(error.to_string()))
    }

    /// The same from bytes; `path` is only for messages.
    pub(crate) fn from_json(bytes: &[u8], path: &Path, end_of_text: Option<&str>) -> Result<Self, Error> {
        let mut tokenizer = Self::wrap(Self::parse(bytes, path)?, path, end_of_text)?;
        let own = tokenizer.inner.get_vocab(false);
        if own.values().max().is_some_and(|&last| last as usize >= own.len()) {
            tokenizer.holed = Some(String::from_utf8_lossy(bytes).into_owned());
        }
        Ok(tokenizer)
    }

    fn wrap(mut inner: tokenizers::Tokenizer, path: &Path, end_of_text: Option<&str>) -> Result<Self, Error> {
        let bad = |message: String| Error::BadTokenizer { path: path.to_owned(), message };
        inner.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        inner.with_padding(None);
        inner.set_encode_special_tokens(true);
        if let ModelWrapper::BPE(bpe) = inner.get_model() {
            let mut bpe = bpe.clone();
            bpe.resize_cache(CACHED_WORDS);
            inner.with_model(bpe);
        }
        let last = last_token(&inner).map_err(bad)?;
        let end_of_text = find_end_of_text(&inner, path, end_of_text)?;
        let mask = MASK_NAMES.iter().find_map(|name| inner.token_to_id(name)).filter(|mask| *mask != end_of_text);
        Ok(Self { inner, vocab: last as usize + 1, end_of_text, mask, holed: None })
    }

    /// A tokenizer that also tells where in a text its tokens are: with the names of special tokens as text, or as these
    /// tokens.
    pub(super) fn placing(&self, is_literal: bool) -> tokenizers::Tokenizer {
        let mut placing = self.inner.clone();
        placing.set_encode_special_tokens(is_literal);
        // It would leave spaces out of the places.
        placing.with_post_processor(None::<PostProcessorWrapper>);
        placing
    }

    /// The number of a token by its name.
    pub fn token(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// The tokens of a text, without an end of text.
    ///
    /// # Errors
    /// A text the tokenizer has no tokens for; cannot happen with byte-level ones.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, false);
        Ok(encoding.map_err(|error| Error::Tokenizer(error.to_string()))?.get_ids().to_vec())
    }

    /// The text of some tokens; the end of text appears by its name.
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        if let Some(&id) = tokens.iter().find(|&&id| self.inner.id_to_token(id).is_none()) {
            return Err(Error::UnknownToken { id, vocab: self.vocab });
        }
        self.inner.decode(tokens, false).map_err(|error| Error::Tokenizer(error.to_string()))
    }

    /// How a token is written in the vocabulary.
    pub fn name(&self, token: u32) -> Option<String> {
        self.inner.id_to_token(token)
    }

    /// One more than the largest token.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// The token that ends a document.
    pub fn end_of_text(&self) -> u32 {
        self.end_of_text
    }

    /// The name of the token that ends a document.
    pub fn end_of_text_name(&self) -> String {
        self.inner.id_to_token(self.end_of_text).unwrap_or_default()
    }

    /// The token that stands for a hidden one.
    ///
    /// # Errors
    /// A tokenizer that has none.
    pub fn mask(&self) -> Result<u32, Error> {
        self.mask.ok_or_else(|| Error::NoMask { tried: MASK_NAMES.map(str::to_owned).to_vec() })
    }

    /// The token before texts of a language.
    pub fn tag(&self, language: &str) -> Option<u32> {
        self.inner.token_to_id(&tag_name(language))
    }

    /// The languages that have a tag, sorted.
    pub fn tags(&self) -> Vec<String> {
        let special = self.inner.get_added_tokens_decoder().into_values().map(|token| token.content);
        let language = |name: String| Some(name.strip_prefix("__")?.strip_suffix("__")?.to_owned());
        let mut tags: Vec<String> = special.filter_map(language).filter(|language| !language.is_empty()).collect();
        tags.sort();
        tags
    }

    /// The contents of `tokenizer.json`.
    ///
    /// # Errors
    /// A tokenizer the library cannot write.
    pub fn to_json(&self) -> Result<String, Error> {
        if let Some(text) = &self.holed {
            return Ok(text.clone());
        }
        self.inner.to_string(true).map_err(|error| Error::Tokenizer(error.to_string()))
    }

    /// Refuses a vocabulary larger than the model's.
    ///
    /// # Errors
    /// A token for which the model has no entry.
    pub(crate) fn check_fits(&self, path: &Path, vocab: usize) -> Result<(), Error> {
        match self.vocab <= vocab {
            true => Ok(()),
            false => Err(Error::LargeTokenizer { path: PathBuf::from(path), found: self.vocab, vocab }),
        }
    }
}

/// How a language's tag is written, as in M2M100.
fn tag_name(language: &str) -> String {
    format!("__{language}__")
}

/// The largest number of a token; no two tokens may have the same.
fn last_token(inner: &tokenizers::Tokenizer) -> Result<u32, String> {
    let mut tokens: Vec<(u32, String)> = inner.get_vocab(true).into_iter().map(|(name, id)| (id, name)).collect();
    tokens.sort_unstable();
    if let Some([(id, one), (_, other)]) = tokens.array_windows().find(|[(a, _), (b, _)]| a == b) {
        return Err(format!("{one:?} and {other:?} are both token {id}"));
    }
    tokens.last().map(|(id, _)| *id).ok_or_else(|| "its vocabulary is empty".to_owned())
}

fn find_end_of_text(inner: &tokenizers::Tokenizer, path: &Path, wanted: Option<&str>) -> Result<u32, Error> {
    match wanted {
        Some(name) => inner.token_to_id(name).ok_or_else(|| {
            let message = format!("it has no token `{name}`, which data.end_of_text names");
            Error::BadTokenizer { path: path.to_owned(), message }
        }),
        None => END_OF_TEXT_NAMES.iter().find_map(|name| inner.token_to_id(name)).ok_or_else(|| {
            let tried = END_OF_TEXT_NAMES.map(str::to_owned).to_vec();
            Error::NoEndOfText { path: path.to_owned(), tried }
        }),
    }
}
