//! Random numbers by counter: a draw is a pure function of its key and index, so no mesh, no order of evaluation
//! and no recomputation can change it. The generator is Philox 4x32 with ten rounds (Salmon et al., SC 2011).

use crate::cpu::rows::simd;

/// What a stream of draws is for. Streams of different purposes never meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    Init = 1,
    Dropout = 2,
    Gate = 3,
    Sample = 4,
    Test = 5,
    Mask = 6,
    Denoise = 7,
    Prune = 8,
    OutputMask = 9,
}

/// A stream of draws, addressed by index.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    key: [u32; 2],
    stream: [u32; 2],
}

impl Draws {
    /// The stream of (seed, purpose, step, layer). `layer` may be any small label, such as an op within a layer.
    pub fn new(seed: u64, purpose: Purpose, step: u64, layer: u32) -> Draws {
        // The step and the layer take the upper half of Philox's counter; 2^32 steps of 2^24 layers are distinct.
        let stream = [step as u32, (layer << 8) | purpose as u32];
        Draws { key: [seed as u32, (seed >> 32) as u32 ^ (step >> 32) as u32], stream }
    }

    /// 32 uniform bits at `index`.
    pub fn bits(&self, index: u64) -> u32 {
        self.block(index >> 2)[(index & 3) as usize]
    }

    /// Uniform in [0, 1) with 24 bits.
    pub fn uniform(&self, index: u64) -> f32 {
        unit(self.bits(index))
    }

    /// What [`Draws::uniform`] gives at the indices from `first` on. Many blocks of four numbers are made at once, in vectors.
    #[inline(always)]
    pub fn uniforms(&self, first: u64, out: &mut [f32]) {
        let (mut index, mut rest) = (first, out);
        while !rest.is_empty() {
            let skipped = (index % BATCH as u64) as usize;
            let count = rest.len().min(BATCH - skipped);
            let (part, later) = rest.split_at_mut(count);
            part.copy_from_slice(&self.batch((index - skipped as u64) >> 2)[skipped..skipped + count]);
            (index, rest) = (index + count as u64, later);
        }
    }

    #[inline(always)]
    fn batch(&self, counter: u64) -> [f32; BATCH] {
        let [a, b, c, d] = self.blocks(counter);
        let mut drawn = [0.0; BATCH];
        for lane in 0..LANES {
            let four = &mut drawn[4 * lane..][..4];
            (four[0], four[1], four[2], four[3]) = (unit(a[lane]), unit(b[lane]), unit(c[lane]), unit(d[lane]));
        }
        drawn
    }

    /// As many blocks as there are lanes, from one on: the four words of each in arrays of their own. Plain loops, since
    /// closures would be compiled for other instructions than the kernel that this becomes a part of.
    #[inline(always)]
    fn blocks(&self, counter: u64) -> [[u32; LANES]; 4] {
        let (mut a, mut b) = ([0u32; LANES], [0u32; LANES]);
        let (mut c, mut d, mut key) = ([self.stream[0]; LANES], [self.stream[1]; LANES], self.key);
        for lane in 0..LANES {
            let counter = counter + lane as u64;
            (a[lane], b[lane]) = (counter as u32, (counter >> 32) as u32);
        }
        for _ in 0..ROUNDS {
            for lane in 0..LANES {
                [a[lane], b[lane], c[lane], d[lane]] = round([a[lane], b[lane], c[lane], d[lane]], key);
            }
            key = next_key(key);
        }
        [a, b, c, d]
    }

    /// Standard normal, by Box and Muller from one half of a block.
    pub fn normal(&self, index: u64) -> f32 {
        let block = self.block(index >> 1);
        let pair = (index & 1) as usize * 2;
        normal_of(block[pair], block[pair + 1])
    }

    /// What [`Draws::normal`] gives at the indices from `first` on. Many blocks of two numbers are made at once, in vectors.
    pub fn normals(&self, first: u64, out: &mut [f32]) {
        simd(
            #[inline(always)]
            || self.normals_in_vectors(first, out),
        );
    }

    #[inline(always)]
    fn normals_in_vectors(&self, first: u64, out: &mut [f32]) {
        let (mut index, mut rest) = (first, out);
        while !rest.is_empty() {
            let skipped = (index % NORMALS as u64) as usize;
            let count = rest.len().min(NORMALS - skipped);
            let (part, later) = rest.split_at_mut(count);
            let [a, b, c, d] = self.blocks((index - skipped as u64) >> 1);
            for (i, x) in part.iter_mut().enumerate() {
                let (lane, second) = ((skipped + i) / 2, (skipped + i) % 2 == 1);
                *x = if second { normal_of(c[lane], d[lane]) } else { normal_of(a[lane], b[lane]) };
            }
            (index, rest) = (index + count as u64, later);
        }
    }

    /// Key and stream, as kernels take them.
    pub(crate) fn words(&self) -> [u32; 4] {
        let ([a, b], [c, d]) = (self.key, self.stream);
        [a, b, c, d]
    }

    fn block(&self, counter: u64) -> [u32; 4] {
        philox([counter as u32, (counter >> 32) as u32, self.stream[0], self.stream[1]], self.key)
    }
}

/// Blocks that are made at once, and the numbers in them: uniform ones, and normal ones, of two words each.
const LANES: usize = 16;
const BATCH: usize = 4 * LANES;
const NORMALS: usize = 2 * LANES;

const ROUNDS: usize = 10;

/// [0, 1) by the upper 24 bits.
#[inline(always)]
fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

fn normal_of(radius: u32, angle: u32) -> f32 {
    // (0, 1]: the logarithm stays finite.
    let radius = (f64::from(radius) + 1.0) / 4_294_967_296.0;
    let angle = f64::from(angle) / 4_294_967_296.0;
    ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        (counter, key) = (round(counter, key), next_key(key));
    }
    counter
}

#[inline(always)]
fn round(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let a = u64::from(counter[0]) * 0xD251_1F53;
    let b = u64::from(counter[2]) * 0xCD9E_8D57;
    [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32]
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the generator (Random123, kat_vectors).
    #[test]
    fn philox_gives_its_published_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
    }

    #[test]
    fn many_are_those_that_are_drawn_one_by_one() {
        let draws = Draws::new(7, Purpose::Test, 3, 1);
        for first in [0, 1, 63, 64, 130, (1 << 34) - 70] {
            for len in [0, 1, 3, 64, 65, 200] {
                let mut many = vec![0.0; len];
                draws.uniforms(first, &mut many);
                let one_by_one = |draw: fn(&Draws, u64) -> f32| -> Vec<f32> {
                    (first..first + len as u64).map(|index| draw(&draws, index)).collect()
                };
                assert_eq!(many, one_by_one(Draws::uniform), "{len} from {first}");
                draws.normals(first, &mut many);
                assert_eq!(many, one_by_one(Draws::normal), "{len} normal ones from {first}");
            }
        }
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let draws = Draws::new(7, Purpose::Test, 0, 0);
        let n = 100_000;
        let (mut sum, mut squares) = (0.0f64, 0.0f64);
        for i in 0..n {
            let x = f64::from(draws.normal(i));
            sum += x;
            squares += x * x;
        }
        // Standard errors are 0.003 and 0.0045; four of them.
        assert!((sum / n as f64).abs() < 0.013 && (squares / n as f64 - 1.0).abs() < 0.018);
    }

    #[test]
    fn streams_differ_by_every_part_of_their_key() {
        let base = Draws::new(1, Purpose::Dropout, 2, 3).bits(4);
        assert_ne!(base, Draws::new(9, Purpose::Dropout, 2, 3).bits(4));
        assert_ne!(base, Draws::new(1, Purpose::Gate, 2, 3).bits(4));
        assert_ne!(base, Draws::new(1, Purpose::Dropout, 9, 3).bits(4));
        assert_ne!(base, Draws::new(1, Purpose::Dropout, 2, 9).bits(4));
        assert_ne!(base, Draws::new(1, Purpose::Dropout, 2, 3).bits(5));
    }
}
