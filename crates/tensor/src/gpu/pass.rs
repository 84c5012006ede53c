//! Kernels' arguments as C sees them: the types of `kernels/common.cuh`.

use std::ffi::c_void;
use std::ops::Range;

use super::Call;
use crate::cpu::activation::Pointwise;
use crate::cpu::adamw::{AdamW, Strips};
use crate::cpu::attention_call::AttentionSizes;
use crate::cpu::columns::ColumnRange;
use crate::cpu::gather::Width;
use crate::cpu::relative_attention_call::RelativeAttentionSizes;
use crate::cpu::select::Among;
use crate::cpu::variation::RowGroup;
use crate::draws::Draws;
use crate::ops::NormMoments;
use crate::row_ids::RowIds;

/// The bytes of a number or of a struct: fields one after the other, each at a multiple of its size, as C lays them out.
#[derive(Clone, Debug, Default)]
pub(crate) struct CValue {
    /// Words, so that the first field is aligned.
    words: Vec<u64>,
    bytes: usize,
}

impl CValue {
    fn field<const N: usize>(&mut self, field: [u8; N]) {
        let start = self.bytes.next_multiple_of(N);
        self.bytes = start + N;
        self.words.resize(self.bytes.div_ceil(8), 0);
        let mut bytes = [0; 8];
        bytes[start % 8..][..N].copy_from_slice(&field);
        self.words[start / 8] |= u64::from_ne_bytes(bytes);
    }

    pub(super) fn u64(&mut self, x: u64) {
        self.field(x.to_ne_bytes());
    }

    pub(super) fn usize(&mut self, x: usize) {
        self.u64(x as u64);
    }

    pub(super) fn u32(&mut self, x: u32) {
        self.field(x.to_ne_bytes());
    }

    pub(super) fn f32(&mut self, x: f32) {
        self.field(x.to_ne_bytes());
    }

    fn f64(&mut self, x: f64) {
        self.field(x.to_ne_bytes());
    }

    pub(super) fn pointer(&self) -> *const c_void {
        self.words.as_ptr().cast()
    }

    /// An array: numbers stand side by side, structs at multiples of a word, since each has one of eight bytes.
    pub(super) fn list(elements: &[CValue]) -> Vec<u8> {
        let bytes = |element: &CValue| {
            let len = if element.bytes == 4 { 4 } else { element.words.len() * 8 };
            element.words.iter().flat_map(|word| word.to_ne_bytes()).take(len).collect::<Vec<u8>>()
        };
        elements.iter().flat_map(bytes).collect()
    }

    fn usizes(numbers: &[usize]) -> CValue {
        let mut value = CValue::default();
        numbers.iter().for_each(|&number| value.usize(number));
        value
    }
}

/// An argument of a kernel.
pub(crate) trait KernelArgument {
    fn pass(self, call: &mut Call);
}

/// One whose value C has at once.
macro_rules! pass {
    ($($argument:ident: $type:ty => $value:expr;)*) => { $(
        impl KernelArgument for $type {
            fn pass(self, call: &mut Call) {
                let $argument = self;
                call.argument($value.into());
            }
        }
    )* };
}

pass! {
    x: usize => CValue::usizes(&[x]);
    x: bool => u32::from(x);
    x: u32 => x;
    x: f32 => x;
    x: Pointwise => x as u32;
    x: NormMoments => x as u32;
    x: Among => x as u32;
    range: Range<usize> => CValue::usizes(&[range.start, range.end]);
    pair: [usize; 2] => CValue::usizes(&pair);
    of: Width => CValue::usizes(&[of.k, of.row]);
    of: ColumnRange => CValue::usizes(&[of.of, of.first, of.count]);
    of: Strips => CValue::usizes(&[of.first, of.stride, of.count, of.len]);
    of: RelativeAttentionSizes => CValue::usizes(&[of.seq, of.heads, of.head_dim, of.reach]);
    draws: Draws => {
        let mut value = CValue::default();
        draws.words().into_iter().for_each(|word| value.u32(word));
        value
    };
    of: AttentionSizes => {
        let AttentionSizes { rows, seq, key_seq, heads, kv_heads, head_dim, value_dim, rotary_dim, pairs, scale } = of;
        let mut value = CValue::usizes(&[rows, seq, key_seq, heads, kv_heads, head_dim, value_dim, rotary_dim]);
        value.u32(pairs as u32);
        value.f32(scale);
        value
    };
    rule: &AdamW => {
        let AdamW { lr, beta1, beta2, eps, weight_decay, gradient_scale, .. } = *rule;
        let [correct1, correct2] = rule.corrections();
        let mut value = CValue::default();
        [lr, beta1, beta2, eps, weight_decay, correct1, correct2, gradient_scale].into_iter().for_each(|x| value.f32(x));
        value
    };
}

impl From<u32> for CValue {
    fn from(x: u32) -> CValue {
        let mut value = CValue::default();
        value.u32(x);
        value
    }
}

impl From<f32> for CValue {
    fn from(x: f32) -> CValue {
        let mut value = CValue::default();
        value.f32(x);
        value
    }
}

impl From<f64> for CValue {
    fn from(x: f64) -> CValue {
        let mut value = CValue::default();
        value.f64(x);
        value
    }
}

fn pass_span(call: &mut Call, elements: &[CValue]) {
    let [address, len] = call.span(elements);
    let mut span = CValue::default();
    span.u64(address);
    span.u64(len);
    call.argument(span);
}

impl KernelArgument for &[usize] {
    fn pass(self, call: &mut Call) {
        let numbers: Vec<CValue> = self.iter().map(|&number| CValue::usizes(&[number])).collect();
        pass_span(call, &numbers);
    }
}

impl KernelArgument for &RowIds {
    fn pass(self, call: &mut Call) {
        let runs: Vec<CValue> =
            self.runs().iter().map(|run| CValue::usizes(&[run.start as usize, run.end as usize])).collect();
        pass_span(call, &runs);
    }
}

impl KernelArgument for &[RowGroup] {
    fn pass(self, call: &mut Call) {
        let of_group = |group: &RowGroup| {
            let rows: Vec<CValue> = group.rows.iter().map(|&row| row.into()).collect();
            let elsewhere: Vec<CValue> = group.elsewhere.iter().map(|&sum| sum.into()).collect();
            let mut value = CValue::default();
            call.span(&rows).into_iter().chain(call.span(&elsewhere)).for_each(|word| value.u64(word));
            value.f32(group.weight);
            value.f64(group.share);
            value
        };
        let groups: Vec<CValue> = self.iter().map(of_group).collect();
        pass_span(call, &groups);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(value: CValue, bytes: &[u8]) {
        assert_eq!(CValue::list(&[value]), bytes);
    }

    #[test]
    fn fields_lie_where_c_looks_for_them() {
        let mut value = CValue::from(1u32);
        value.u64(2);
        value.u32(3);
        check(value, &[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        let mut value = CValue::from(1u32);
        value.u32(2);
        check(value, &[1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(CValue::list(&[CValue::from(1u32), CValue::from(2u32)]), [1, 0, 0, 0, 2, 0, 0, 0]);
    }
}
