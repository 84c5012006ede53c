//! What the test files share: worlds to hold laws in, seeded data, and the sequential truth about reductions.

// Each test file compiles its own copy and uses a part of it.
#![allow(dead_code)]

use std::sync::Arc;
use std::time::Duration;

use guildhall_comm::wrap::{Cost, Fault, Faults, Link, Network, Trace};
use guildhall_comm::{Communicator, Error, Payload, Reduce, bf16, solo, threads};

pub(crate) type Comm = Arc<dyn Communicator>;
pub(crate) type Outcome = Result<(), Error>;

/// Long enough for any correct run on a loaded machine, short enough to notice a hang.
pub(crate) const PATIENT: threads::Options = threads::Options { timeout: Duration::from_secs(60) };

/// An implementation of the trait: `ranks` threads, each communicator dressed by `dress`.
struct World {
    name: &'static str,
    ranks: usize,
    dress: fn(Comm) -> Result<Comm, Error>,
}

const WORLDS: [World; 14] = [
    World { name: "one thread", ranks: 1, dress: Ok },
    World { name: "two threads", ranks: 2, dress: Ok },
    World { name: "three threads", ranks: 3, dress: Ok },
    World { name: "four threads", ranks: 4, dress: Ok },
    World { name: "eight threads", ranks: 8, dress: Ok },
    World { name: "traced", ranks: 3, dress: |comm| Ok(Trace::wrap(comm).0) },
    World { name: "delayed", ranks: 2, dress: |comm| Ok(delayed(comm, 1)) },
    World { name: "delayed more", ranks: 4, dress: |comm| Ok(delayed(comm, 2)) },
    World { name: "traced and delayed", ranks: 3, dress: |comm| Ok(delayed(Trace::wrap(comm).0, 3)) },
    World { name: "charged", ranks: 4, dress: |comm| Ok(charged(comm)) },
    World { name: "traced, charged and delayed", ranks: 3, dress: |comm| Ok(delayed(charged(Trace::wrap(comm).0), 4)) },
    World { name: "uneven halves", ranks: 5, dress: |comm| comm.split(comm.rank() % 2, comm.rank()) },
    World { name: "reversed", ranks: 3, dress: |comm| comm.split(0, 10 - comm.rank()) },
    World { name: "duplicate", ranks: 3, dress: |comm| comm.duplicate() },
];

fn delayed(comm: Comm, seed: u64) -> Comm {
    Fault::wrap(comm, Faults { seed, delay_max: Duration::from_micros(300), death: None })
}

/// Two ranks a node, and links fast enough for a suite of laws.
fn charged(comm: Comm) -> Comm {
    let link = |us, bandwidth| Link { latency: Duration::from_micros(us), bandwidth };
    Cost::wrap(comm, Network { ranks_per_node: 2, within: link(1, 1e10), between: link(20, 1e9) })
}

/// Holds `law` on every rank of every implementation.
pub(crate) fn hold(law: impl Fn(&Comm) -> Outcome + Sync) {
    law(&solo::world()).unwrap_or_else(|error| panic!("solo: {error}"));
    for world in &WORLDS {
        for result in threads::run(world.ranks, PATIENT, |comm| law(&(world.dress)(comm)?)) {
            result.unwrap_or_else(|failure| panic!("{}: {failure}", world.name));
        }
    }
}

/// Numbers by seed, equal on every rank that asks equally.
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Draws(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// `count` lengths of which about a third are zero.
    pub(crate) fn counts(&mut self, count: usize, bound: usize) -> Vec<usize> {
        (0..count).map(|_| if self.below(3) == 0 { 0 } else { self.below(bound) }).collect()
    }
}

/// An element type, with its own slow arithmetic.
pub(crate) trait Element: Copy + PartialEq + std::fmt::Debug + Send + Sync + 'static
where
    Payload: From<Vec<Self>>,
{
    fn draw(bits: u64) -> Self;
    fn fold(reduce: Reduce, values: impl Iterator<Item = Self>) -> Self;
    fn unpack(payload: Payload) -> Vec<Self>;
}

macro_rules! element {
    ($type:ty, $unpack:ident, $wide:ty, $widen:expr, $narrow:expr, $draw:expr, $add:expr) => {
        impl Element for $type {
            fn draw(bits: u64) -> Self {
                $draw(bits)
            }
            fn fold(reduce: Reduce, values: impl Iterator<Item = Self>) -> Self {
                let join = |a: $wide, b: $wide| match reduce {
                    Reduce::Sum => $add(a, b),
                    Reduce::Max => a.max(b),
                    Reduce::Min => a.min(b),
                };
                $narrow(values.map($widen).reduce(join).expect("a group has a rank"))
            }
            fn unpack(payload: Payload) -> Vec<Self> {
                payload.$unpack()
            }
        }
    };
}

/// Magnitudes so different that the order of a sum shows in its last bits.
fn draw_f64(bits: u64) -> f64 {
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    sign * (bits >> 40) as f64 * 2f64.powi((bits >> 1 & 15) as i32 - 20)
}

element!(f32, into_f32, f32, |x| x, |x| x, |bits| draw_f64(bits) as f32, |a, b| a + b);
element!(f64, into_f64, f64, |x| x, |x| x, draw_f64, |a, b| a + b);
element!(bf16, into_bf16, f32, bf16::to_f32, bf16::from_f32, |bits| bf16::from_f64(draw_f64(bits)), |a, b| a + b);
element!(u32, into_u32, u32, |x| x, |x| x, |bits| bits as u32, u32::wrapping_add);
element!(u64, into_u64, u64, |x| x, |x| x, |bits| bits, u64::wrapping_add);
element!(u8, into_u8, u8, |x| x, |x| x, |bits| bits as u8, u8::wrapping_add);

/// What rank `rank` contributes to `case`.
pub(crate) fn values<E: Element>(case: u64, rank: usize, len: usize) -> Vec<E>
where
    Payload: From<Vec<E>>,
{
    let mut draws = Draws::new(case << 32 ^ rank as u64);
    (0..len).map(|_| E::draw(draws.bits())).collect()
}

/// What the reduction of every rank's contribution to `case` must be, bit for bit.
pub(crate) fn reduced<E: Element>(reduce: Reduce, case: u64, size: usize, len: usize) -> Vec<E>
where
    Payload: From<Vec<E>>,
{
    let all: Vec<Vec<E>> = (0..size).map(|rank| values(case, rank, len)).collect();
    (0..len).map(|index| E::fold(reduce, all.iter().map(|values| values[index]))).collect()
}
