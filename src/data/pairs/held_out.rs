//! Which texts are held out: a function of the text alone.
//!
//! Corpora of several languages share their sentences. Were places in files to decide, a sentence could be trained on
//! in one language and evaluated in another.

use sha2::{Digest, Sha256};

use super::markup::Markup;
use crate::data::splits::Split;

/// What tells messages apart, however they are written.
#[derive(Clone, Debug)]
pub struct MessageKeys {
    markup: Markup,
}

impl Default for MessageKeys {
    fn default() -> Self {
        Self { markup: Markup::new() }
    }
}

impl MessageKeys {
    /// What texts have in common that differ in case, punctuation, white space or placeholders: their words. A text
    /// without words is its own key.
    pub fn key(&self, text: &str) -> String {
        let bare = self.markup.without(text).to_lowercase();
        let words = bare.split(|letter: char| !letter.is_alphanumeric()).filter(|word| !word.is_empty());
        let words: Vec<&str> = words.collect();
        if words.is_empty() { text.trim().to_owned() } else { words.join(" ") }
    }

    /// Holds out about `fraction` of all texts, by a hash of their keys. Ask with the side that all languages share.
    pub fn split(&self, text: &str, fraction: f64) -> Split {
        let digest: [u8; 32] = Sha256::digest(self.key(text)).into();
        let hash = u64::from_be_bytes(digest[..8].try_into().unwrap_or_default());
        // The cast saturates: a fraction of 1 holds out everything but the largest hash.
        if hash < (fraction * 2f64.powi(64)) as u64 { Split::HeldOut } else { Split::Train }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn about_the_fraction_is_held_out() {
        let keys = MessageKeys::default();
        let held_out = |count: &usize| keys.split(&format!("message {count}"), 0.1) == Split::HeldOut;
        let count = (0..10_000).filter(held_out).count();
        // Three standard deviations of the binomial distribution are 90.
        assert!((910..1090).contains(&count), "{count}");
        assert_eq!(keys.split("anything", 0.0), Split::Train);
    }

    #[test]
    fn a_key_is_the_words() {
        let keys = MessageKeys::default();
        for text in ["Open the file", "open the file…", "  OPEN: the\n\tfile %s!", "<b>Open</b> the {0} file."] {
            assert_eq!(keys.key(text), "open the file", "{text}");
        }
        assert_eq!(keys.key(" ... "), "...");
        assert_ne!(keys.key("Page 1"), keys.key("Page 2"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// However a message is written, it is on one side.
        #[test]
        fn ways_of_writing_a_message_share_its_split(
            words in prop::collection::vec("[a-zäжи中]{1,6}", 1..6),
            ends in "[.!…: ]{0,3}",
            upper: bool,
            fraction in 0.0f64..1.0,
        ) {
            let keys = MessageKeys::default();
            let plain = words.join(" ");
            let written = format!("{}{ends}", words.join("  \n"));
            let written = if upper { written.to_uppercase() } else { written };
            prop_assert_eq!(keys.split(&plain, fraction), keys.split(&written, fraction));
        }
    }
}
