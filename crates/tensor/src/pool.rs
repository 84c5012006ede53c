//! Memory that is reused.
//!
//! Large allocations are returned to the operating system when freed and must be faulted in again, page by page,
//! when next used; a training step that allocates afresh spends as long on that as on arithmetic. So a dropped
//! tensor's memory goes to a free list and the next tensor of about the same size takes it, stale contents and all.

use std::collections::BTreeMap;
use std::ops::Range;

use half::bf16;

use crate::device::Device;
use crate::dtype::Dtype;
use crate::elements::Elements;
use crate::gpu::{DeviceFailure, DeviceMemory, Gpu};

/// Memory starts on a cache line, so that no vector load straddles two.
pub(crate) const ALIGN_BYTES: usize = 64;
/// Elements from which memory comes straight from the operating system, page by page as it is written.
const LARGE: usize = 1 << 16;
/// The least that an accelerator's memory is divided into.
const DEVICE_BYTES_MIN: usize = 1 << 10;

/// A tensor takes waiting memory of up to this many times its size.
const WASTE: usize = 4;

/// Memory waiting for reuse, by capacity. One list per element type, since safe code cannot retype memory.
#[derive(Debug, Default)]
pub(crate) struct Free {
    f32: BTreeMap<usize, Vec<(u64, Vec<f32>)>>,
    bf16: BTreeMap<usize, Vec<(u64, Vec<bf16>)>>,
    u32: BTreeMap<usize, Vec<(u64, Vec<u32>)>>,
    /// An accelerator's, by bytes.
    memory: BTreeMap<usize, Vec<(u64, DeviceMemory)>>,
    round: u64,
}

impl Device {
    /// Gives back memory that no tensor took since the call before. Called once a step, it keeps what
    /// steps reuse and lets go of what one unusual step left behind.
    pub fn trim(&self) {
        let mut free = self.free();
        free.round += 1;
        let oldest = free.round.saturating_sub(1);
        drop_older(&mut free.f32, oldest);
        drop_older(&mut free.bf16, oldest);
        drop_older(&mut free.u32, oldest);
        drop_older(&mut free.memory, oldest);
    }

    /// Bytes waiting for reuse.
    pub fn free_bytes(&self) -> u64 {
        let free = self.free();
        let f32s: usize = free.f32.iter().map(|(capacity, list)| capacity * list.len() * 4).sum();
        let bf16s: usize = free.bf16.iter().map(|(capacity, list)| capacity * list.len() * 2).sum();
        let u32s: usize = free.u32.iter().map(|(capacity, list)| capacity * list.len() * 4).sum();
        let memory: usize = free.memory.iter().map(|(bytes, list)| bytes * list.len()).sum();
        (f32s + bf16s + u32s + memory) as u64
    }

    pub(crate) fn take_f32(&self, len: usize) -> Vec<f32> {
        let capacity = capacity_for(len);
        let found = best_fit(&mut self.free().f32, capacity);
        found.unwrap_or_else(|| vec![0.0; capacity])
    }

    /// Memory for `len` elements, with room to align them.
    pub(crate) fn take(&self, dtype: Dtype, len: usize) -> Elements {
        let capacity = capacity_for(len);
        match dtype {
            Dtype::F32 => Elements::F32(self.take_f32(len)),
            Dtype::Bf16 => {
                let found = best_fit(&mut self.free().bf16, capacity);
                Elements::Bf16(found.unwrap_or_else(|| vec![bf16::ZERO; capacity]))
            }
            Dtype::U32 => {
                let found = best_fit(&mut self.free().u32, capacity);
                Elements::U32(found.unwrap_or_else(|| vec![0; capacity]))
            }
        }
    }

    pub(crate) fn give_f32(&self, data: Vec<f32>) {
        self.give(Elements::F32(data));
    }

    /// Takes host memory back. An empty vector is one whose memory went elsewhere.
    pub fn give(&self, elements: Elements) {
        let mut free = self.free();
        let round = free.round;
        match elements {
            Elements::F32(data) if !data.is_empty() => free.f32.entry(data.len()).or_default().push((round, data)),
            Elements::Bf16(data) if !data.is_empty() => free.bf16.entry(data.len()).or_default().push((round, data)),
            Elements::U32(data) if !data.is_empty() => free.u32.entry(data.len()).or_default().push((round, data)),
            _ => {}
        }
    }

    /// Memory of an accelerator for so many bytes, of whatever it last held.
    /// What waits for reuse is given back where there is no room; that there is none then either ends the rank's work.
    pub(crate) fn take_memory(&self, gpu: &Gpu, bytes: usize) -> DeviceMemory {
        let capacity = finely_rounded(bytes.max(DEVICE_BYTES_MIN));
        let found = best_fit(&mut self.free().memory, capacity);
        let memory = found.unwrap_or_else(|| {
            gpu.allocate(capacity)
                .or_else(|_| {
                    self.free().memory.clear();
                    gpu.allocate(capacity)
                })
                .unwrap_or_else(|reason| self.no_room(capacity, reason).raise())
        });
        memory.forget();
        memory
    }

    fn no_room(&self, bytes: usize, reason: String) -> DeviceFailure {
        DeviceFailure::NoRoom { bytes: bytes as u64, held: self.account().live_total(), reason }
    }

    pub(crate) fn give_memory(&self, memory: DeviceMemory) {
        let mut free = self.free();
        let round = free.round;
        free.memory.entry(memory.bytes()).or_default().push((round, memory));
    }
}

/// The smallest waiting memory of at least `capacity` elements, and at most `WASTE` times that: expert batches change
/// size every step, and a somewhat larger block that is there costs less than a fitting one whose pages are not.
fn best_fit<T>(lists: &mut BTreeMap<usize, Vec<(u64, T)>>, capacity: usize) -> Option<T> {
    let (&found, list) = lists.range_mut(capacity..=WASTE * capacity).next()?;
    let (_, data) = list.pop()?;
    if list.is_empty() {
        lists.remove(&found);
    }
    Some(data)
}

fn drop_older<T>(lists: &mut BTreeMap<usize, Vec<(u64, T)>>, oldest: u64) {
    for list in lists.values_mut() {
        list.retain(|(round, _)| *round >= oldest);
    }
    lists.retain(|_, list| !list.is_empty());
}

/// Elements allocated for a tensor of `len`: rounded up, small ones to one of eight sizes per doubling, large ones to a
/// power of two, so that ragged expert batches, whose sizes change every step, find each other's memory; then room to
/// align. Rounding a large allocation up costs address space only: pages nobody writes are never there.
fn capacity_for(len: usize) -> usize {
    let needed = len.max(256);
    let rounded = if needed < LARGE { finely_rounded(needed) } else { needed.next_power_of_two() };
    rounded + ALIGN_BYTES / 2
}

/// To one of eight sizes per doubling. Memory of accelerators is taken whether anybody writes to it or not.
fn finely_rounded(size: usize) -> usize {
    size.next_multiple_of((size.next_power_of_two() / 16).max(1))
}

/// The aligned window of `len` elements inside `data`.
pub(crate) fn aligned_window<T>(data: &[T], len: usize) -> Range<usize> {
    let misaligned = data.as_ptr().addr() % ALIGN_BYTES;
    let start = (ALIGN_BYTES - misaligned) % ALIGN_BYTES / size_of::<T>();
    let start = if start + len <= data.len() { start } else { 0 };
    start..start + len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reused_and_aligned() {
        let device = Device::new(1);
        let data = device.take_f32(1000);
        let address = data.as_ptr();
        let window = aligned_window(&data, 1000);
        assert_eq!(data[window].as_ptr().addr() % ALIGN_BYTES, 0);
        device.give_f32(data);
        let again = device.take_f32(1001);
        assert_eq!(again.as_ptr(), address);
    }

    #[test]
    fn capacity_is_little_more_than_asked_for() {
        for (len, most) in [(1usize << 12, 1.0), (5000, 1.13), (1 << 20, 1.0), (3_333_333, 2.0)] {
            let capacity = capacity_for(len);
            assert!(capacity >= len + 16 && capacity as f64 <= len as f64 * most + 64.0, "{len}: {capacity}");
        }
    }

    #[test]
    fn ragged_sizes_share_memory() {
        let device = Device::new(1);
        let data = device.take_f32(3_000_000);
        let address = data.as_ptr();
        device.give_f32(data);
        let again = device.take_f32(2_400_000);
        assert_eq!(again.as_ptr(), address);
        device.give_f32(again);
        let larger = device.take_f32(4_300_000);
        assert_ne!(larger.as_ptr(), address);
    }

    #[test]
    fn trim_keeps_what_is_used_every_step() {
        let device = Device::new(1);
        device.give_f32(device.take_f32(1 << 20));
        for _ in 0..6 {
            device.give_f32(device.take_f32(1 << 10));
            device.trim();
        }
        assert_eq!(device.free_bytes(), capacity_for(1 << 10) as u64 * 4);
    }
}
