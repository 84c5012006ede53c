//! Tensors of accelerators as buffers of collectives: devices copy from each other and add up, each on a stream of its own
//! beside the kernels, and wait for each other by themselves.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::{Device, Engine};
use crate::dtype::Dtype;
use crate::gpu::{
    Call, DeviceElements, DeviceMemory, DeviceStream, Event, Gpu, KernelArgument, OperandKind, on_device,
};
use crate::storage::Allocation;
use crate::tensor::Tensor;

/// How elements of several ranks become one, in their order. Sums are f32, and rounded once. Maxima and minima pass NaN on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Max,
    Min,
}

/// Bytes that a reduction brings together of each rank at a time: enough that a copy's latency does not count. The memory for
/// them is no tensor's, and the account counts it.
pub const PIECE: usize = 4 << 20;

/// A tensor's memory while a collective has it, which counts it ([`crate::Held`]). Offsets and ranges are in bytes.
///
/// It bears a *mark*: a point in its device's work that others wait for before they use it, first that at which it was lent.
#[derive(Debug)]
pub struct LentTensor {
    memory: DeviceMemory,
    dtype: Dtype,
    len: usize,
    mark: Mutex<Event>,
    device: Arc<Device>,
}

impl Tensor {
    /// Lends the memory of an accelerator's tensor, or a copy of it if another handle shares it.
    ///
    /// # Panics
    /// If the tensor is not an accelerator's.
    pub fn into_lent(self) -> LentTensor {
        let (device, dtype, len) = (self.device().clone(), self.dtype(), self.len());
        let memory = self.into_allocation().into_memory();
        let mark = Mutex::new(gpu(&device).point());
        LentTensor { memory, dtype, len, mark, device }
    }
}

#[track_caller]
fn gpu(device: &Device) -> &Gpu {
    let Engine::Accelerator(gpu) = device.engine() else { panic!("only accelerators have memory to lend") };
    gpu
}

impl LentTensor {
    fn gpu(&self) -> &Gpu {
        gpu(&self.device)
    }

    fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    fn marked(&self) -> MutexGuard<'_, Event> {
        self.mark.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[track_caller]
    fn check(&self, bytes: &Range<usize>) {
        assert!(bytes.start <= bytes.end && bytes.end <= self.bytes(), "bytes {bytes:?} of {}", self.bytes());
    }

    /// This device's exchange goes on after the mark.
    pub(crate) fn await_mark(&self) {
        self.exchange_after(self);
    }

    /// The exchange of this device goes on after the mark of `other`.
    fn exchange_after(&self, other: &LentTensor) {
        self.gpu().engine().wait(DeviceStream::Exchange, &other.marked());
    }

    /// Where these bytes are.
    ///
    /// # Panics
    /// If they lie beyond it.
    #[track_caller]
    pub(crate) fn address_of(&self, bytes: &Range<usize>) -> u64 {
        self.check(bytes);
        self.memory.address() + bytes.start as u64
    }

    /// Begins to copy `bytes` of `from` over those from `first` on, after the marks of both.
    ///
    /// # Panics
    /// If bytes lie beyond either, types differ, or bytes would be read that are written.
    #[track_caller]
    pub fn copy(&self, first: usize, from: &LentTensor, bytes: Range<usize>) {
        assert_eq!(self.dtype, from.dtype, "bytes are copied, not converted");
        self.check(&(first..first + bytes.len()));
        from.check(&bytes);
        if bytes.is_empty() {
            return;
        }
        let is_apart = !std::ptr::eq(self, from) || first.abs_diff(bytes.start) >= bytes.len();
        assert!(is_apart, "bytes {bytes:?} are copied over bytes of themselves, from {first} on");
        self.exchange_after(self);
        self.exchange_after(from);
        let (to, from) = ((&self.memory, first), (&from.memory, bytes.start));
        self.gpu().engine().copy(DeviceStream::Exchange, to, from, bytes.len());
    }

    /// Begins to copy `bytes` of it to other memory of its device, whose exchange has waited for its mark.
    pub(crate) fn copy_to(&self, to: (&DeviceMemory, usize), bytes: Range<usize>) {
        self.gpu().engine().copy(DeviceStream::Exchange, to, (&self.memory, bytes.start), bytes.len());
    }

    /// Begins to write the reduction of `bytes` of all `from` over those from `first` on, after the marks of all. It may be one
    /// of them.
    ///
    /// # Panics
    /// If bytes lie beyond one of them, types differ, elements are no floats, or the only part lies over itself elsewhere.
    #[track_caller]
    pub fn reduce(&self, first: usize, reduction: Reduction, from: &[&LentTensor], bytes: Range<usize>) {
        assert!(self.dtype != Dtype::U32 && from.iter().all(|part| part.dtype == self.dtype), "floats of one type");
        self.check(&(first..first + bytes.len()));
        from.iter().for_each(|part| part.check(&bytes));
        self.exchange_after(self);
        from.iter().for_each(|part| self.exchange_after(part));
        if let [part] = from {
            // Of one part there is nothing to add.
            if !std::ptr::eq(*part, self) || first != bytes.start {
                self.copy(first, part, bytes);
            }
            return;
        }
        for start in bytes.clone().step_by(PIECE) {
            let piece = start..bytes.end.min(start + PIECE);
            self.reduce_piece(first + start - bytes.start, reduction, from, piece);
        }
    }

    /// Parts are brought together first: memory of another GPU is copied fast, and read by kernels slowly or not at all.
    fn reduce_piece(&self, first: usize, reduction: Reduction, from: &[&LentTensor], bytes: Range<usize>) {
        let (engine, each) = (self.gpu().engine(), bytes.len());
        self.with_parts(from.len(), each, |parts| {
            for (place, part) in from.iter().enumerate() {
                engine.copy(DeviceStream::Exchange, (parts, place * each), (&part.memory, bytes.start), each);
            }
            self.reduce_parts(first, reduction, (parts, from.len(), each));
        });
    }

    /// Calls `f` with memory for so many parts of `each` bytes.
    pub(crate) fn with_parts<R>(&self, parts: usize, each: usize, f: impl FnOnce(&DeviceMemory) -> R) -> R {
        self.gpu().with_workspace(&self.device, parts * each, f)
    }

    /// Begins to write the reduction of parts of `each` bytes over those from `first` on.
    pub(crate) fn reduce_parts(
        &self,
        first: usize,
        reduction: Reduction,
        (parts, count, each): (&DeviceMemory, usize, usize),
    ) {
        assert!(self.dtype != Dtype::U32, "what is reduced are floats");
        let size = self.dtype.bytes();
        let mut call = Call::new(self.gpu(), &self.device, "exchange", "reduce");
        // Others may be reading the rest.
        let own = DeviceElements::new(&self.memory, self.dtype, self.len);
        call.write_part(own, OperandKind::Any, first..first + each);
        call.read(DeviceElements::new(parts, self.dtype, count * each / size), OperandKind::Any);
        (first / size).pass(&mut call);
        (each / size).pass(&mut call);
        (reduction as u32).pass(&mut call);
        call.launch_on(DeviceStream::Exchange);
    }

    /// Marks it with all that this device's exchange has begun, and with what it was marked with before.
    pub fn mark(&self) {
        self.exchange_after(self);
        *self.marked() = self.gpu().engine().record(DeviceStream::Exchange);
    }

    /// Kernels that are launched from here on come after the mark of `other`, and so does whatever waits for them.
    pub fn wait(&self, other: &LentTensor) {
        self.gpu().engine().wait(DeviceStream::Compute, &other.marked());
    }

    /// Waits until this device's exchange is done, or has failed.
    pub fn settle(&self) {
        let _ = on_device(|| self.gpu().engine().synchronize(DeviceStream::Exchange));
    }

    /// The tensor again.
    ///
    /// # Panics
    /// If the shape does not hold the elements.
    #[track_caller]
    pub fn into_tensor(self, shape: &[usize]) -> Tensor {
        Tensor::from_allocation(shape, Allocation::of_memory(&self.device, self.memory, self.dtype, self.len))
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Two ranks' devices.
    fn devices() -> [Arc<Device>; 2] {
        [(); 2].map(|()| Device::simulated(1).expect("a C++ compiler"))
    }

    fn numbers(device: &Arc<Device>, len: usize, rank: usize) -> Tensor {
        Tensor::from_fn(device, &[len], |i| ((i * 7 + rank * 13) % 29) as f32 / 3.0 - 4.0)
    }

    #[test]
    fn what_another_device_holds_is_copied() {
        let [one, other] = devices();
        let (to, from) = (numbers(&one, 9, 0).into_lent(), numbers(&other, 5, 1).into_lent());
        to.copy(8, &from, 4..16);
        to.mark();
        to.wait(&to);
        from.wait(&to);
        let (got, sent) = (to.into_tensor(&[3, 3]).to_vec(), from.into_tensor(&[5]).to_vec());
        let want = [&numbers(&one, 9, 0).to_vec()[..2], &sent[1..4], &numbers(&one, 9, 0).to_vec()[5..]].concat();
        assert_eq!(got, want);
        assert_eq!(sent, numbers(&other, 5, 1).to_vec());
    }

    /// In their order, rounded once, and NaN passed on.
    #[test]
    fn parts_are_reduced_in_order() {
        let [one, other] = devices();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for reduction in [Reduction::Sum, Reduction::Max, Reduction::Min] {
                let part = |device: &Arc<Device>, rank| {
                    let numbers = numbers(device, 40, rank);
                    let broken = |i| if i == 20 + rank { f32::NAN } else { numbers.elements(i..i + 1).f32s()[0] };
                    Tensor::from_fn(device, &[40], broken).cast(dtype)
                };
                let parts = [part(&one, 0), part(&other, 1), part(&other, 2)];
                let reduce = |own: f32, next: f32| match reduction {
                    Reduction::Sum => own + next,
                    _ if own.is_nan() || next.is_nan() => f32::NAN,
                    Reduction::Max => own.max(next),
                    Reduction::Min => own.min(next),
                };
                let [a, b, c] = [0, 1, 2].map(|of: usize| parts[of].to_vec());
                let rounded = |x: f32| if dtype == Dtype::Bf16 { bf16::from_f32(x).to_f32() } else { x };
                let want: Vec<u32> = (10..35).map(|i| rounded(reduce(reduce(a[i], b[i]), c[i])).to_bits()).collect();
                let [own, second, third] = parts.map(Tensor::into_lent);
                let bytes = 10 * dtype.bytes()..35 * dtype.bytes();
                own.reduce(bytes.start, reduction, &[&own, &second, &third], bytes);
                own.mark();
                own.wait(&own);
                let got = own.into_tensor(&[40]).to_vec();
                let bits: Vec<u32> = got[10..35].iter().map(|x| x.to_bits()).collect();
                let same = bits
                    .iter()
                    .zip(&want)
                    .all(|(got, want)| got == want || f32::from_bits(*got).is_nan() && f32::from_bits(*want).is_nan());
                assert!(same, "{dtype:?} {reduction:?}: {got:?}");
                assert_eq!((got[9], got[35]), (a[9], a[35]), "beside the range");
            }
        }
    }

    /// It is copied, from wherever it is; where it is already, it stays.
    #[test]
    fn of_one_part_the_reduction_is_that_part() {
        let [one, other] = devices();
        let before = numbers(&one, 40, 0).to_vec();
        let (own, part) = (numbers(&one, 40, 0).into_lent(), numbers(&other, 40, 1).into_lent());
        own.reduce(0, Reduction::Sum, &[&part], 4 * 10..4 * 15);
        own.reduce(4 * 20, Reduction::Max, &[&own], 4 * 30..4 * 40);
        own.reduce(4 * 7, Reduction::Sum, &[&own], 4 * 7..4 * 30);
        own.mark();
        own.wait(&own);
        let got = own.into_tensor(&[40]).to_vec();
        let want = [&numbers(&other, 40, 1).to_vec()[10..15], &before[5..20], &before[30..], &before[30..]].concat();
        assert_eq!(got, want);
    }

    #[test]
    #[should_panic(expected = "over bytes of themselves")]
    fn a_part_over_itself_is_refused() {
        let [one, _] = devices();
        let own = numbers(&one, 40, 0).into_lent();
        own.reduce(4, Reduction::Sum, &[&own], 0..4 * 20);
    }

    /// More than is brought together at a time, whose last piece is shorter.
    #[test]
    fn reductions_go_piece_by_piece() {
        let [one, other] = devices();
        let len = 2 * PIECE / 4 + 5;
        let (own, second) = (numbers(&one, len, 0).into_lent(), numbers(&other, len, 1).into_lent());
        let sums = Tensor::stale(&one, &[len - 1], Dtype::F32).into_lent();
        sums.reduce(0, Reduction::Sum, &[&own, &second], 4..4 * len);
        sums.mark();
        sums.wait(&sums);
        let (a, b) = (numbers(&one, len, 0).to_vec(), numbers(&one, len, 1).to_vec());
        let want: Vec<f32> = a.iter().zip(&b).skip(1).map(|(a, b)| a + b).collect();
        assert!(sums.into_tensor(&[len - 1]).to_vec() == want);
    }

    #[test]
    #[should_panic(expected = "on stream Compute uses memory that another stream may not be done with")]
    fn what_is_copied_is_waited_for() {
        let [one, other] = devices();
        let (to, from) = (numbers(&one, 4, 0).into_lent(), numbers(&other, 4, 1).into_lent());
        to.copy(0, &from, 0..16);
        to.mark();
        to.into_tensor(&[4]).fill(0.0);
    }

    #[test]
    #[should_panic(expected = "on stream Compute uses memory that another stream may not be done with")]
    fn what_others_read_is_not_overwritten_before() {
        let [one, other] = devices();
        let (to, from) = (numbers(&one, 4, 0).into_lent(), numbers(&other, 4, 1).into_lent());
        to.copy(0, &from, 0..16);
        to.mark();
        from.into_tensor(&[4]).fill(0.0);
    }

    /// A rank that has nothing to copy lends what its kernels have written all the same.
    #[test]
    fn a_mark_is_of_what_came_before_it_too() {
        let [one, other] = devices();
        let (own, peer) = (numbers(&one, 4, 0).into_lent(), numbers(&other, 4, 1).into_lent());
        own.mark();
        peer.copy(0, &own, 0..16);
        peer.mark();
        peer.wait(&peer);
        assert_eq!(peer.into_tensor(&[4]).to_vec(), numbers(&one, 4, 0).to_vec());
    }

    /// NCCL's groups copy what a rank gives itself, also nothing, and mark both: they still bear what came before.
    #[test]
    fn a_mark_behind_a_copy_of_nothing_is_of_what_came_before_it() {
        let [one, other] = devices();
        let (to, from) = (numbers(&one, 4, 0).into_lent(), numbers(&one, 4, 1).into_lent());
        to.copy(0, &from, 0..0);
        [&to, &from].into_iter().for_each(LentTensor::mark);
        let peer = numbers(&other, 8, 2).into_lent();
        peer.copy(0, &to, 0..16);
        peer.copy(16, &from, 0..16);
    }

    /// Peers that read what a rank has reduced wait for its mark.
    #[test]
    #[should_panic(expected = "on stream Exchange uses memory that another stream may not be done with")]
    fn what_is_not_marked_is_not_read() {
        let [one, other] = devices();
        let (own, peer) = (numbers(&one, 4, 0).into_lent(), numbers(&other, 4, 1).into_lent());
        own.reduce(0, Reduction::Sum, &[&own, &peer], 0..8);
        peer.copy(0, &own, 0..8);
    }
}
