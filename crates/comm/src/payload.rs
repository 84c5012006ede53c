//! What an operation carries: one typed, owned buffer, of which a range takes part.
//!
//! Buffers are owned because an operation may outlive the call that started it: a borrowed slice could be freed
//! or reused while a peer still reads it. Lengths are in elements of the buffer's own kind unless named bytes.

use std::ops::Range;

use half::bf16;

use crate::device::DeviceBuffer;

/// The part `range` of an owned vector. The rest travels along untouched, so that a tensor can hand over an
/// aligned window of its storage and get the same allocation back.
#[derive(Debug, Clone, PartialEq)]
pub struct Span<T> {
    /// The whole allocation.
    pub data: Vec<T>,
    /// The elements of `data` that take part; must lie within it.
    pub range: Range<usize>,
}

impl<T> Span<T> {
    /// Elements that take part.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// True when no element takes part.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The elements that take part. Panics if the range does not lie within the data.
    pub fn as_slice(&self) -> &[T] {
        &self.data[self.range.clone()]
    }

    /// The elements that take part, to be written. Panics if the range does not lie within the data.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data[self.range.clone()]
    }

    fn is_within_data(&self) -> bool {
        self.range.start <= self.range.end && self.range.end <= self.data.len()
    }
}

impl<T> From<Vec<T>> for Span<T> {
    fn from(data: Vec<T>) -> Self {
        let range = 0..data.len();
        Span { data, range }
    }
}

/// The element type of a [`Payload`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ElementKind {
    F32,
    F64,
    Bf16,
    U32,
    U64,
    U8,
}

impl ElementKind {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            ElementKind::U8 => 1,
            ElementKind::Bf16 => 2,
            ElementKind::F32 | ElementKind::U32 => 4,
            ElementKind::F64 | ElementKind::U64 => 8,
        }
    }

    /// The name used in messages and reports.
    pub fn name(self) -> &'static str {
        match self {
            ElementKind::F32 => "f32",
            ElementKind::F64 => "f64",
            ElementKind::Bf16 => "bf16",
            ElementKind::U32 => "u32",
            ElementKind::U64 => "u64",
            ElementKind::U8 => "u8",
        }
    }
}

/// A buffer of one of the kinds that ranks exchange.
#[derive(Debug)]
pub enum Payload {
    F32(Span<f32>),
    F64(Span<f64>),
    Bf16(Span<bf16>),
    U32(Span<u32>),
    U64(Span<u64>),
    U8(Span<u8>),
    /// Elements that only the world of the lender can move: their kind and number. [`crate::sizes`] moves them by doing
    /// nothing; worlds of host memory refuse them.
    Opaque(ElementKind, usize),
    /// So many elements in memory of a device, for communicators that move them ([`crate::Communicator::moves_devices`]).
    Device(ElementKind, usize, Box<dyn DeviceBuffer>),
}

/// Evaluates one expression on the span of whichever kind, or another if the elements are out of reach.
macro_rules! on_span {
    ($payload:expr, $span:ident => $result:expr, $otherwise:expr) => {
        match $payload {
            Payload::F32($span) => $result,
            Payload::F64($span) => $result,
            Payload::Bf16($span) => $result,
            Payload::U32($span) => $result,
            Payload::U64($span) => $result,
            Payload::U8($span) => $result,
            Payload::Opaque(..) | Payload::Device(..) => $otherwise,
        }
    };
}

impl Payload {
    /// No elements; what a barrier carries.
    pub fn empty() -> Self {
        Payload::U8(Vec::new().into())
    }

    /// The element type.
    pub fn kind(&self) -> ElementKind {
        match self {
            Payload::F32(_) => ElementKind::F32,
            Payload::F64(_) => ElementKind::F64,
            Payload::Bf16(_) => ElementKind::Bf16,
            Payload::U32(_) => ElementKind::U32,
            Payload::U64(_) => ElementKind::U64,
            Payload::U8(_) => ElementKind::U8,
            Payload::Opaque(kind, _) | Payload::Device(kind, ..) => *kind,
        }
    }

    /// Elements that take part.
    pub fn len(&self) -> usize {
        on_span!(self, span => span.len(), self.len_elsewhere())
    }

    /// True when no element takes part.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that take part.
    pub fn bytes(&self) -> usize {
        self.len() * self.kind().size()
    }

    pub(crate) fn is_within_data(&self) -> bool {
        on_span!(self, span => span.is_within_data(), true)
    }

    /// Whether its elements are in host memory.
    pub fn is_on_host(&self) -> bool {
        on_span!(self, _span => true, false)
    }

    /// Whether its elements are in memory of a device.
    pub(crate) fn is_on_device(&self) -> bool {
        matches!(self, Payload::Device(..))
    }

    /// So many zeros of the same kind, in the same memory, which is not a device's.
    pub(crate) fn zeros_alike(&self, len: usize) -> Payload {
        match self {
            Payload::F32(_) => vec![0f32; len].into(),
            Payload::F64(_) => vec![0f64; len].into(),
            Payload::Bf16(_) => vec![bf16::ZERO; len].into(),
            Payload::U32(_) => vec![0u32; len].into(),
            Payload::U64(_) => vec![0u64; len].into(),
            Payload::U8(_) => vec![0u8; len].into(),
            Payload::Opaque(kind, _) => Payload::Opaque(*kind, len),
            Payload::Device(..) => unreachable!("refused by whoever needs memory of its own"),
        }
    }

    fn len_elsewhere(&self) -> usize {
        if let Payload::Opaque(_, len) | Payload::Device(_, len, _) = self { *len } else { 0 }
    }

    /// The first byte that takes part, valid for [`Payload::bytes`] while the payload lives and is not resized. Panics
    /// where it is not in host memory: worlds of host memory have refused it.
    pub(crate) fn as_mut_bytes_ptr(&mut self) -> *mut u8 {
        on_span!(
            self,
            span => span.as_mut_slice().as_mut_ptr().cast(),
            unreachable!("validated to be in host memory")
        )
    }
}

/// Conversions between `Vec<T>`, `Span<T>` and the payload of that kind.
macro_rules! conversions {
    ($($element:ty, $variant:ident, $into:ident;)*) => {
        $(impl From<Vec<$element>> for Payload {
            fn from(data: Vec<$element>) -> Self {
                Payload::$variant(data.into())
            }
        }
        impl From<Span<$element>> for Payload {
            fn from(span: Span<$element>) -> Self {
                Payload::$variant(span)
            }
        })*

        impl Payload {
            $(
                /// The whole vector back, with the elements outside the range. Panics on another kind.
                #[track_caller]
                pub fn $into(self) -> Vec<$element> {
                    match self {
                        Payload::$variant(span) => span.data,
                        other => panic!(
                            "this payload holds {}, not {}; ask for the kind that was sent",
                            other.kind().name(),
                            ElementKind::$variant.name(),
                        ),
                    }
                }
            )*
        }
    };
}

conversions! {
    f32, F32, into_f32;
    f64, F64, into_f64;
    bf16, Bf16, into_bf16;
    u32, U32, into_u32;
    u64, U64, into_u64;
    u8, U8, into_u8;
}

/// Copies what takes part of `from` to what takes part of `to`; both have one kind and one length.
pub(crate) fn copy(from: &Payload, to: &mut Payload) {
    copy_pieces(from, to, std::iter::once(0..from.len()));
}

/// Copies pieces of what takes part of `from` to what takes part of `to`, one behind the other; both have one kind, and all
/// pieces together are as long as `to`.
pub(crate) fn copy_pieces(from: &Payload, to: &mut Payload, pieces: impl Iterator<Item = Range<usize>>) {
    fn of_spans<T: Copy>(from: &Span<T>, to: &mut Span<T>, pieces: impl Iterator<Item = Range<usize>>) {
        let (from, mut to) = (from.as_slice(), to.as_mut_slice());
        for piece in pieces {
            let (next, rest) = to.split_at_mut(piece.len());
            next.copy_from_slice(&from[piece]);
            to = rest;
        }
        assert!(to.is_empty(), "{} elements are left", to.len());
    }
    match (from, to) {
        (Payload::F32(from), Payload::F32(to)) => of_spans(from, to, pieces),
        (Payload::F64(from), Payload::F64(to)) => of_spans(from, to, pieces),
        (Payload::Bf16(from), Payload::Bf16(to)) => of_spans(from, to, pieces),
        (Payload::U32(from), Payload::U32(to)) => of_spans(from, to, pieces),
        (Payload::U64(from), Payload::U64(to)) => of_spans(from, to, pieces),
        (Payload::U8(from), Payload::U8(to)) => of_spans(from, to, pieces),
        (Payload::Opaque(..), Payload::Opaque(..)) => {}
        (Payload::Device(kind, _, from), Payload::Device(_, _, to)) => {
            let mut first = 0;
            for piece in pieces {
                let bytes = piece.start * kind.size()..piece.end * kind.size();
                first += bytes.len();
                to.copy(first - bytes.len(), &**from, bytes);
            }
        }
        (from, to) => unreachable!("validated to be of one kind: {:?}, {:?}", from.kind(), to.kind()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_takes_part_with_its_range_only() {
        let mut span = Span { data: vec![1u32, 2, 3, 4], range: 1..3 };
        span.as_mut_slice()[0] = 9;
        assert_eq!(span.as_slice(), [9, 3]);
        let payload = Payload::from(span);
        assert_eq!((payload.len(), payload.bytes(), payload.kind()), (2, 8, ElementKind::U32));
        assert_eq!(payload.into_u32(), [1, 9, 3, 4]);
    }

    #[test]
    #[should_panic(expected = "holds f64, not f32")]
    fn the_wrong_kind_is_named() {
        Payload::from(vec![0f64]).into_f32();
    }

    #[test]
    fn a_range_outside_the_data_is_noticed() {
        let outside = Payload::from(Span { data: vec![0u8; 4], range: 2..5 });
        assert!(!outside.is_within_data());
    }
}
