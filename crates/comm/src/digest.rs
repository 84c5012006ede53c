//! Numbers that stand for longer things: equal for equal ones, and by chance for others once in 2^64.

/// The finaliser of SplitMix64: neighbouring inputs give unrelated outputs.
pub(crate) fn mix(input: u64) -> u64 {
    let mut bits = input.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// The digest of a sequence of words, in which their order and number count.
pub(crate) fn digest(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0, |digest, word| mix(mix(digest) ^ word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_number_count() {
        let sequences: [&[u64]; 6] = [&[], &[0], &[0, 0], &[1, 2], &[2, 1], &[1, 2, 0]];
        for (index, one) in sequences.iter().enumerate() {
            for other in &sequences[..index] {
                assert_ne!(digest(one.iter().copied()), digest(other.iter().copied()), "{one:?}, {other:?}");
            }
        }
    }
}
