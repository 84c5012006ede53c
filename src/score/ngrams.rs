//! Counting n-grams, of words or of characters.

use std::collections::HashMap;
use std::hash::Hash;

/// How often each run of `order` consecutive items occurs.
pub(super) fn counts<T: Eq + Hash>(items: &[T], order: usize) -> HashMap<&[T], u64> {
    let mut counts = HashMap::new();
    for ngram in items.windows(order) {
        *counts.entry(ngram).or_insert(0) += 1;
    }
    counts
}

/// The n-grams that two texts share, each as often as in the text with fewer of it.
pub(super) fn matches<T: Eq + Hash>(ours: &HashMap<&[T], u64>, theirs: &HashMap<&[T], u64>) -> u64 {
    ours.iter().map(|(ngram, &count)| count.min(theirs.get(ngram).copied().unwrap_or(0))).sum()
}
