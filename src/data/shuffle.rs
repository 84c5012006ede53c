//! A seeded order of `0..n` as arithmetic: no table, so the order of a trillion rows costs nothing.
//!
//! A Feistel network is a permutation of the numbers of an even count of bits whatever its round function;
//! walking along its cycles until a number below `n` appears (the network's domain is less than four times
//! `n`) restricts it to `0..n`. It is for shuffling, not for cryptography.

/// Enough for every output bit to depend on every input bit several times over.
const ROUNDS: usize = 6;

/// One order of `0..n`; a different one for every seed and epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The order of `0..n` for one pass over the data.
    pub fn new(n: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let key = mix(mix(seed ^ 0x6a09_e667_f3bc_c908).wrapping_add(epoch));
        let keys = std::array::from_fn(|round| mix(key.wrapping_add(round as u64 + 1)));
        Self { n, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// What stands at place `index`.
    ///
    /// # Panics
    /// If `index` is not below `n`.
    #[track_caller]
    pub fn get(&self, index: u64) -> u64 {
        assert!(index < self.n, "place {index} of an order of {} things", self.n);
        let mut value = self.round_trip(index);
        while value >= self.n {
            value = self.round_trip(value);
        }
        value
    }

    fn round_trip(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right.wrapping_add(key)) & mask));
        }
        left << self.half_bits | right
    }
}

/// Spreads every bit of `value` over all bits of the result, one to one (the finaliser of SplitMix64).
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(n: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = Permutation::new(n, seed, epoch);
        (0..n).map(|index| permutation.get(index)).collect()
    }

    #[test]
    fn every_small_order_is_a_bijection() {
        for n in 0..300 {
            let mut values = order(n, 7, 3);
            values.sort_unstable();
            assert!(values.into_iter().eq(0..n), "n = {n}");
        }
    }

    #[test]
    fn huge_orders_stay_in_range() {
        for n in [u64::MAX, 1 << 63, (1 << 62) + 1, (1 << 32) - 1] {
            let permutation = Permutation::new(n, 1, 1);
            for index in [0, 1, n / 2, n - 1] {
                assert!(permutation.get(index) < n, "n = {n}");
            }
        }
    }

    #[test]
    fn seed_and_epoch_change_the_order() {
        let first = order(1000, 1, 0);
        assert_ne!(first, order(1000, 2, 0));
        assert_ne!(first, order(1000, 1, 1));
        assert_eq!(first, order(1000, 1, 0));
        let fixed = first.iter().enumerate().filter(|(place, value)| *place as u64 == **value).count();
        // A random order leaves one thing in place on average; ten has probability below 1e-6.
        assert!(fixed < 10, "{fixed} things stay in place");
    }

    /// Each value should be equally likely at each place: counts of 60 orders of 8 things, over many seeds.
    #[test]
    fn small_orders_are_nearly_uniform() {
        const SEEDS: u64 = 8000;
        let mut counts = [[0u32; 8]; 8];
        for seed in 0..SEEDS {
            for (place, value) in order(8, seed, 0).into_iter().enumerate() {
                counts[place][value as usize] += 1;
            }
        }
        // Each count has mean 1000 and standard deviation 30; five of them leave room for 64 counts.
        let expected = 850..1150;
        assert!(counts.iter().flatten().all(|count| expected.contains(count)), "{counts:?}");
    }
}
