//! What products, copies and sums reach on a device. Their sizes are found by growing them, so that one rule measures a core, whose
//! caches small ones show, and a GPU, which begins a product in about the time that it takes for a small one.

use std::sync::Arc;
use std::time::Instant;

use guildhall_comm::{Communicator, Error as CommError, Reduce};
use guildhall_tensor::{Device, Dtype, Tape, Tensor, on_device};

/// Seconds that a try lasts at least where memory lets it: waiting for a device counts for nothing beside it.
const LONG_ENOUGH: f64 = 0.02;
/// Of the size that was found the best of so many tries counts.
const TRIES: usize = 4;
/// Sides of the matrices that are multiplied.
const SIDES: [usize; 2] = [256, 1 << 14];
/// Rows of a copy, and elements of a row. What is copied most is far more than any cache holds.
const ROWS: [usize; 2] = [1 << 10, 1 << 18];
const ROW: usize = 1 << 10;

/// Of one rank, while all ranks do the same.
pub(super) struct RankCeilings<'a> {
    /// Of products in f32 and in bf16, floating-point operations a second, and of copies, bytes a second.
    pub(super) rates: [f64; 3],
    /// Of the matrices in either type.
    pub(super) sides: [usize; 2],
    /// What is to be measured between steps, too.
    pub(super) beside: Option<BetweenSteps<'a>>,
}

/// Products in one type, and sums in place.
pub(super) struct BetweenSteps<'a> {
    pub(super) products: Repeated<'a>,
    pub(super) sums: Repeated<'a>,
}

/// Something that is run and timed again and again.
pub(super) struct Repeated<'a> {
    trial: Trial<'a>,
    run: Box<dyn FnMut() + 'a>,
    /// Floating-point operations of a run, or bytes.
    amount: f64,
    /// Runs that last long enough.
    runs: usize,
}

impl Repeated<'_> {
    /// Of this, so much a second, now. Collective.
    pub(super) fn rate(&mut self) -> Result<f64, CommError> {
        Ok(self.amount * self.runs as f64 / self.trial.seconds(self.runs, &mut self.run)?)
    }
}

/// Measures with at most `room` bytes at once, unless the smallest sizes need more; and so much more stays where products in a
/// type, and sums, are to be run `again`. Collective over `world`.
pub(super) fn ceilings<'a>(
    device: &'a Arc<Device>,
    world: &'a Arc<dyn Communicator>,
    room: u64,
    again: Option<Dtype>,
) -> Result<RankCeilings<'a>, CommError> {
    let trial = Trial { device, world };
    let (mut rates, mut sides, mut kept) = ([0.0; 3], [0; 2], None);
    for (i, dtype) in [Dtype::F32, Dtype::Bf16].into_iter().enumerate() {
        let found = trial.products(dtype, room)?;
        (rates[i], sides[i]) = (found.rate(), found.size);
        kept = kept.or((again == Some(dtype)).then_some(found));
    }
    rates[2] = trial.copies(room)?.rate();
    let beside = match kept {
        Some(products) => Some(BetweenSteps { products: products.again(trial), sums: trial.sums(room)?.again(trial) }),
        None => None,
    };
    Ok(RankCeilings { rates, sides, beside })
}

/// A size that is large enough.
struct LargeTrial<'a> {
    size: usize,
    run: Box<dyn FnMut() + 'a>,
    /// Floating-point operations of a run, or bytes.
    amount: f64,
    /// Runs that last long enough, and the seconds of one at best.
    runs: usize,
    seconds: f64,
}

impl<'a> LargeTrial<'a> {
    fn rate(&self) -> f64 {
        self.amount / self.seconds
    }

    fn again(self, trial: Trial<'a>) -> Repeated<'a> {
        Repeated { trial, run: self.run, amount: self.amount, runs: self.runs }
    }
}

#[derive(Clone, Copy)]
struct Trial<'a> {
    device: &'a Arc<Device>,
    world: &'a Arc<dyn Communicator>,
}

impl<'a> Trial<'a> {
    fn products(self, dtype: Dtype, room: u64) -> Result<LargeTrial<'a>, CommError> {
        // With a matrix of f32 of which one of bf16 is made.
        let bytes = |side: usize| 4 * (side * side * size_of::<f32>()) as u64;
        self.grown(
            SIDES,
            |side| 2.0 * (side as f64).powi(3),
            |side| bytes(side) <= room,
            |side| {
                let tape = Tape::inference(self.device);
                // Rows are repeated: a GPU's matrices are too large to be made on the host, and zeros are multiplied faster.
                let rows: Vec<u32> = (0..side).map(|row| (row % SIDES[0]) as u32).collect();
                let matrix = |phase: usize| {
                    let few = Tensor::from_fn(self.device, &[SIDES[0], side], |i| ((i * 7 + phase) % 11) as f32 - 5.0);
                    tape.constant(few.gathered_rows(&rows).into_dtype(dtype))
                };
                let (x, w) = (matrix(0), matrix(3));
                move || drop(x.linear(&w, None))
            },
        )
    }

    fn copies(self, room: u64) -> Result<LargeTrial<'a>, CommError> {
        let bytes = |rows: usize| 2 * (rows * ROW * size_of::<f32>()) as u64;
        self.grown(
            ROWS,
            |rows| bytes(rows) as f64,
            |rows| bytes(rows) <= room,
            |rows| {
                let (x, order) = (Tensor::zeros(self.device, &[rows, ROW]), (0..rows as u32).collect::<Vec<_>>());
                move || drop(x.gathered_rows(&order))
            },
        )
    }

    /// Into memory that is read as well: unlike that of a copy, it need not be brought near for nothing.
    fn sums(self, room: u64) -> Result<LargeTrial<'a>, CommError> {
        let bytes = |rows: usize| 2 * (rows * ROW * size_of::<f32>()) as u64;
        self.grown(
            ROWS,
            |rows| 1.5 * bytes(rows) as f64,
            |rows| bytes(rows) <= room,
            |rows| {
                let [mut sum, x] = [(); 2].map(|()| Tensor::zeros(self.device, &[rows, ROW]));
                move || sum.add_scaled(&x, 1.0)
            },
        )
    }

    /// The size, doubled until one run is long enough or the next has no room, and the seconds of a run.
    fn grown<F: FnMut() + 'a>(
        self,
        [least, most]: [usize; 2],
        amount: impl Fn(usize) -> f64,
        fits: impl Fn(usize) -> bool,
        make: impl Fn(usize) -> F,
    ) -> Result<LargeTrial<'a>, CommError> {
        // The first run takes memory.
        let begun = |size: usize| {
            let mut run = make(size);
            run();
            self.device.wait();
            run
        };
        let (mut size, mut run) = (least, begun(least));
        let mut once = self.seconds(1, &mut run)?;
        while once < LONG_ENOUGH && 2 * size <= most && self.all(fits(2 * size))? {
            // Others may have taken what was free. A device that fails otherwise fails again below.
            let larger = on_device(|| begun(2 * size)).ok();
            if !self.all(larger.is_some())? {
                break;
            }
            (size, run) = (2 * size, larger.expect("it is there on all ranks"));
            once = self.seconds(1, &mut run)?;
        }
        let runs = (LONG_ENOUGH / once).ceil().clamp(1.0, 1000.0) as usize;
        let tries = (0..TRIES).map(|_| Ok::<_, CommError>(self.seconds(runs, &mut run)? / runs as f64));
        let seconds = tries.collect::<Result<Vec<_>, _>>()?.into_iter().fold(once, f64::min);
        Ok(LargeTrial { size, run: Box::new(run), amount: amount(size), runs, seconds })
    }

    /// Of the slowest rank, where all begin together.
    fn seconds(self, runs: usize, run: &mut impl FnMut()) -> Result<f64, CommError> {
        self.world.barrier()?;
        let begun = Instant::now();
        (0..runs).for_each(|_| run());
        self.device.wait();
        let seconds = begun.elapsed().as_secs_f64().max(1e-9);
        Ok(self.world.all_reduce(Reduce::Max, vec![seconds])?.into_f64()[0])
    }

    /// Whether it is so on every rank.
    fn all(self, is_so: bool) -> Result<bool, CommError> {
        let least = self.world.all_reduce(Reduce::Min, vec![f64::from(u8::from(is_so))])?;
        Ok(least.into_f64()[0] > 0.0)
    }
}
