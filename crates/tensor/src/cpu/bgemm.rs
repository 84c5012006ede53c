//! Matrix product of bf16 with sums in f32, for CPUs that multiply bf16: one thread, any strides, `C = alpha A B (+ C)`.
//!
//! Two kernels share the packing: tiles (AMX) and pairs (AVX512-BF16). Both take two neighbours in k at once, as one word
//! of 32 bits. Packed blocks are squares of 16 lines by 16 words: for A, whose lines are its rows, line by line; for B,
//! whose lines are its columns, word by word. f32 is rounded as it is packed, once a block.
//!
//! An element of C is summed in the order of k, a pair at a time, wherever it lies, so the split over threads does not
//! change its bits.

use core::arch::asm;
use core::arch::x86_64::*;
use std::cell::RefCell;
use std::sync::OnceLock;

use half::bf16;

use super::mat::{Factor, Mat, MatMut};
use super::sgemm_avx512::{low_mask, store, transpose};

/// Lines of a packed block, and its words a line.
const SIDE: usize = 16;
/// Depth of a packed block.
const STEP: usize = 2 * SIDE;
/// Words of a packed block.
const SQUARE: usize = SIDE * SIDE;
/// Columns of C that a kernel computes at once.
pub(super) const NR: usize = 2 * SIDE;
/// Depth of a packed panel: 32 lines of A fill two thirds of a first-level cache of 48 KiB.
const KC: usize = 512;
/// Elements of a packed panel of B: a quarter of a second-level cache of 2 MiB.
const B_ELEMENTS: usize = 1 << 18;

/// What multiplies bf16 on this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Tiles: 16 x 32 by 32 x 16 in one instruction.
    Amx,
    /// Vectors of 16 words.
    Avx512,
}

impl Unit {
    /// The fastest that this CPU has, if any.
    pub(super) fn of_this_cpu() -> Option<Unit> {
        static FOUND: OnceLock<Option<Unit>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let has_pairs = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bf16");
            has_pairs.then(|| if may_use_tiles() { Unit::Amx } else { Unit::Avx512 })
        })
    }

    /// Rows of C that the kernel computes at once.
    pub(super) fn rows(self) -> usize {
        match self {
            Unit::Amx => 2 * SIDE,
            Unit::Avx512 => 14,
        }
    }

    /// Rows of A in a packed panel.
    fn rows_packed(self) -> usize {
        self.rows().min(SIDE)
    }
}

/// Whether the CPU has tiles, and the kernel gives them to this process, which has to ask.
fn may_use_tiles() -> bool {
    #[cfg(target_os = "linux")]
    {
        /// Bits of EDX of leaf 7: bf16 in tiles, tiles.
        const TILES: u32 = 1 << 22 | 1 << 24;
        const ARCH_PRCTL: i64 = 158;
        const REQUEST_STATE: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & TILES != TILES {
            return false;
        }
        let answer: i64;
        // SAFETY: the call takes two numbers and touches no memory; the kernel changes no other register.
        unsafe {
            asm!("syscall", inlateout("rax") ARCH_PRCTL => answer, in("rdi") REQUEST_STATE, in("rsi") TILE_DATA,
                out("rcx") _, out("r11") _, options(nostack));
        }
        answer == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct CacheLine([u32; 16]);

#[derive(Default)]
struct Scratch {
    a: Vec<CacheLine>,
    b: Vec<CacheLine>,
    has_tiles: bool,
}

thread_local! {
    /// Packing space, kept for the thread's life: fresh pages would cost as much as the packing.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// `c = alpha * a * b`, or `c += alpha * a * b` with `accumulate`. Shapes: a `[m, k]`, b `[k, n]`, c `[m, n]`; k > 0.
/// Sums are f32, and rounded once where C is not.
///
/// # Safety
/// This CPU has the unit, and the three matrices cover the memory their shapes and strides say.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn bgemm<T: Sums>(unit: Unit, c: MatMut<T>, a: Factor, b: Factor, alpha: f32, accumulate: bool) {
    SCRATCH.with_borrow_mut(|scratch| {
        if unit == Unit::Amx && !scratch.has_tiles {
            // SAFETY: the unit is this CPU's.
            unsafe { configure_tiles() };
            scratch.has_tiles = true;
        }
        let depth = panel_depth(a.cols(), T::DEPTH_MAX);
        let width = (B_ELEMENTS / depth / NR * NR).max(NR).min(c.cols.next_multiple_of(NR));
        let a_space = space(&mut scratch.a, 2 * SIDE * depth / 2);
        let b_space = space(&mut scratch.b, width * depth / 2);
        for j in (0..c.cols).step_by(width) {
            let n = width.min(c.cols - j);
            for p in (0..a.cols()).step_by(depth) {
                let k = depth.min(a.cols() - p);
                // SAFETY: every block below lies inside the matrices, by the loop bounds.
                unsafe {
                    pack(b_space, b.block(p, j, k, n).transposed(), SIDE, Order::WordByWord);
                    for i in (0..c.rows).step_by(unit.rows()) {
                        let m = unit.rows().min(c.rows - i);
                        let strip = strip(unit, a_space, a.block(i, p, m, k));
                        multiply_strip(unit, c.block(i, j, m, n), strip, b_space, (alpha, accumulate || p > 0));
                    }
                }
            }
        }
    });
}

/// Splits the depth evenly into panels of at most `most`, so that no thin last one is left over.
fn panel_depth(k: usize, most: usize) -> usize {
    k.div_ceil(k.div_ceil(most).max(1)).next_multiple_of(STEP)
}

fn space(lines: &mut Vec<CacheLine>, words: usize) -> *mut u32 {
    let count = words.div_ceil(16);
    if lines.len() < count {
        lines.resize(count, CacheLine([0; 16]));
    }
    lines.as_mut_ptr().cast()
}

/// Rows of A as the kernels read them.
#[derive(Clone, Copy)]
struct Strip {
    data: *const u8,
    /// Bytes from a line to the next, from one depth of `STEP` to the next, and from a panel of 16 lines to the next.
    line: usize,
    step: usize,
    panel: usize,
    steps: usize,
}

/// The rows of `a`, packed unless tiles can be loaded from where they are.
///
/// # Safety
/// `space` has room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn strip(unit: Unit, space: *mut u32, a: Factor) -> Strip {
    let steps = a.cols().div_ceil(STEP);
    if let (Unit::Amx, Factor::Bf16(mat)) = (unit, a)
        && mat.col_stride == 1
        && mat.rows.is_multiple_of(SIDE)
        && mat.cols.is_multiple_of(STEP)
    {
        let line = mat.row_stride * size_of::<bf16>();
        return Strip { data: mat.data.cast(), line, step: STEP * size_of::<bf16>(), panel: SIDE * line, steps };
    }
    // SAFETY: the caller's promise.
    unsafe { pack(space, a, unit.rows_packed(), Order::LineByLine) };
    let step = SQUARE * size_of::<u32>();
    Strip { data: space.cast(), line: SIDE * size_of::<u32>(), step, panel: steps * step, steps }
}

/// A strip of C by its rows of A and a packed panel of B.
///
/// # Safety
/// The strip and the panel are of C's rows and columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn multiply_strip<T: Sums>(unit: Unit, c: MatMut<T>, a: Strip, b: *const u32, (alpha, accumulate): (f32, bool)) {
    for j in (0..c.cols).step_by(NR) {
        let n = NR.min(c.cols - j);
        // SAFETY: panels were packed 16 columns wide; the tile lies inside C.
        unsafe {
            let (c, b) = (c.block(0, j, c.rows, n), b.add(j * a.steps * SIDE));
            match unit {
                Unit::Amx => multiply_tiles(c, a, b, alpha, accumulate),
                Unit::Avx512 => pairs_of_rows(c, a, b, alpha, accumulate),
            }
        }
    }
}

/// What sums are stored as.
pub(super) trait Sums: Copy {
    /// The most terms that may be summed before the sum is stored.
    const DEPTH_MAX: usize;

    /// The memory as f32, if it is.
    fn as_f32(data: *mut Self) -> Option<*mut f32>;

    /// Stores `sums * scale`, added to what is there with `accumulate`, at the lanes of `mask`.
    ///
    /// # Safety
    /// These lanes exist, and the CPU has the instructions.
    unsafe fn keep(to: *mut Self, mask: __mmask16, sums: __m512, scale: __m512, accumulate: bool);
}

impl Sums for f32 {
    const DEPTH_MAX: usize = KC;

    fn as_f32(data: *mut f32) -> Option<*mut f32> {
        Some(data)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn keep(to: *mut f32, mask: __mmask16, sums: __m512, scale: __m512, accumulate: bool) {
        // SAFETY: the caller's promise.
        unsafe { store(to, mask, sums, scale, accumulate) }
    }
}

impl Sums for bf16 {
    /// A sum in parts would be rounded more than once.
    const DEPTH_MAX: usize = usize::MAX;

    fn as_f32(_: *mut bf16) -> Option<*mut f32> {
        None
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn keep(to: *mut bf16, mask: __mmask16, sums: __m512, scale: __m512, accumulate: bool) {
        // SAFETY: masked lanes are neither read nor written; vectors of one size hold the same bits.
        unsafe {
            let out = if accumulate {
                let there = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, to.cast()));
                _mm512_fmadd_ps(sums, scale, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(there)))
            } else {
                _mm512_mul_ps(sums, scale)
            };
            let rounded = core::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(out));
            _mm256_mask_storeu_epi16(to.cast(), mask, rounded);
        }
    }
}

// --- packing --------------------------------------------------------------------------------------------------------

/// In which order the words of a square lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    LineByLine,
    WordByWord,
}

/// Packs lines `[lines, k]`, `per_panel` at most in a panel: panel by panel, square by square along k. Missing lines and
/// words are zeros.
///
/// # Safety
/// `to` has room for whole squares, and the matrix covers its memory.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack(to: *mut u32, lines: Factor, per_panel: usize, order: Order) {
    // SAFETY: the caller's promise.
    unsafe {
        match lines {
            Factor::F32(mat) => pack_from(to, mat, per_panel, order),
            Factor::Bf16(mat) => pack_from(to, mat, per_panel, order),
        }
    }
}

/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_from<T: Packs>(to: *mut u32, m: Mat<T>, per_panel: usize, order: Order) {
    let (panels, steps) = (m.rows.div_ceil(per_panel), m.cols.div_ceil(STEP));
    let square = |panel: usize, step: usize| {
        let (first, k) = (panel * per_panel, step * STEP);
        let (count, depth) = (per_panel.min(m.rows - first), STEP.min(m.cols - k));
        // SAFETY: the square lies inside the matrix, and its place inside the packed memory.
        unsafe {
            let from = m.block(first, k, count, depth);
            let words = if m.col_stride == 1 { along_k(from) } else { across_k(from) };
            let is_as_stored = (m.col_stride == 1) == (order == Order::LineByLine);
            let words = if is_as_stored { words } else { transpose(words) };
            let to = to.add((panel * steps + step) * SQUARE);
            words.iter().enumerate().for_each(|(at, word)| _mm512_store_ps(to.add(at * SIDE).cast(), *word));
        }
    };
    // In the order of memory.
    if m.col_stride == 1 {
        (0..panels).for_each(|panel| (0..steps).for_each(|step| square(panel, step)));
    } else {
        (0..steps).for_each(|step| (0..panels).for_each(|panel| square(panel, step)));
    }
}

/// Up to 16 lines of up to 32 elements that follow each other in memory: a vector a line.
///
/// # Safety
/// The matrix covers its memory, and k is contiguous.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn along_k<T: Packs>(m: Mat<T>) -> [__m512; SIDE] {
    let mut words = [_mm512_setzero_ps(); SIDE];
    for (line, word) in words.iter_mut().enumerate().take(m.rows) {
        // SAFETY: the line exists.
        *word = unsafe { T::run(m.data.add(line * m.row_stride), m.cols) };
    }
    words
}

/// Up to 16 lines side by side in memory, up to 32 elements deep: a vector for each two of k.
///
/// # Safety
/// The matrix covers its memory, and its lines are side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn across_k<T: Packs>(m: Mat<T>) -> [__m512; SIDE] {
    let mut words = [_mm512_setzero_ps(); SIDE];
    for (pair, word) in words.iter_mut().enumerate().take(m.cols.div_ceil(2)) {
        let odd = if 2 * pair + 1 < m.cols { m.rows } else { 0 };
        // SAFETY: the first of k exists; of one that does not, nothing is read.
        *word = unsafe {
            let first = m.data.add(2 * pair * m.col_stride);
            T::pairs([(first, m.rows), (first.wrapping_add(m.col_stride), odd)])
        };
    }
    words
}

/// Elements that can be packed as bf16.
trait Packs: Copy {
    /// `count` elements, at most 32, as bf16 in pairs; zeros behind them.
    ///
    /// # Safety
    /// They exist, and the CPU has the instructions.
    unsafe fn run(from: *const Self, count: usize) -> __m512;

    /// The elements of two runs, of at most 16 each, pair by pair.
    ///
    /// # Safety
    /// As [`Packs::run`].
    unsafe fn pairs(runs: [(*const Self, usize); 2]) -> __m512;
}

impl Packs for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run(from: *const bf16, count: usize) -> __m512 {
        // SAFETY: masked lanes are not read.
        _mm512_castsi512_ps(unsafe { _mm512_maskz_loadu_epi16(((1u64 << count) - 1) as __mmask32, from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pairs(runs: [(*const bf16, usize); 2]) -> __m512 {
        // SAFETY: as above.
        interleave(runs.map(|(from, count)| unsafe { _mm256_maskz_loadu_epi16(low_mask(count), from.cast()) }))
    }
}

impl Packs for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run(from: *const f32, count: usize) -> __m512 {
        let half = |first: usize| {
            let mask = low_mask(count.saturating_sub(first).min(16));
            // SAFETY: masked lanes are not read.
            unsafe { _mm512_maskz_loadu_ps(mask, from.wrapping_add(first)) }
        };
        let both = _mm512_cvtne2ps_pbh(half(16), half(0));
        // SAFETY: both are 64 bytes.
        unsafe { core::mem::transmute::<__m512bh, __m512>(both) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pairs(runs: [(*const f32, usize); 2]) -> __m512 {
        interleave(runs.map(|(from, count)| {
            // SAFETY: masked lanes are not read.
            let rounded = _mm512_cvtneps_pbh(unsafe { _mm512_maskz_loadu_ps(low_mask(count), from) });
            // SAFETY: both are 32 bytes.
            unsafe { core::mem::transmute::<__m256bh, __m256i>(rounded) }
        }))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn interleave([even, odd]: [__m256i; 2]) -> __m512 {
    let [even, odd] = [even, odd].map(|half| _mm512_cvtepu16_epi32(half));
    _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32::<16>(odd)))
}

// --- tiles ----------------------------------------------------------------------------------------------------------

/// Gives all eight tiles 16 lines of 64 bytes, on this thread.
///
/// # Safety
/// The CPU has tiles, and this process may use them.
unsafe fn configure_tiles() {
    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        line_bytes: [u16; 16],
        lines: [u8; 16],
    }
    let (mut line_bytes, mut lines) = ([0; 16], [0; 16]);
    line_bytes[..8].fill((SIDE * size_of::<u32>()) as u16);
    lines[..8].fill(SIDE as u8);
    let config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], line_bytes, lines };
    // SAFETY: 64 bytes of the form that palette 1 asks for.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
}

/// Up to 32 rows by 32 columns of C.
///
/// # Safety
/// As [`multiply_strip`]; this thread's tiles are configured.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn multiply_tiles<T: Sums>(c: MatMut<T>, a: Strip, b: *const u32, alpha: f32, accumulate: bool) {
    let (down, right) = (c.rows.div_ceil(SIDE), c.cols.div_ceil(SIDE));
    let is_whole = c.rows.is_multiple_of(SIDE) && c.cols.is_multiple_of(SIDE) && alpha == 1.0;
    let direct = T::as_f32(c.data).filter(|_| is_whole);
    // SAFETY: as many squares of A and B are there; what does not fill tiles goes through memory that does.
    unsafe {
        if let Some(to) = direct {
            return tiles(down, right, (to, c.row_stride), a, b, accumulate);
        }
        let mut found = [CacheLine([0; 16]); 2 * 2 * SIDE];
        let found: *mut f32 = found.as_mut_ptr().cast();
        tiles(down, right, (found, NR), a, b, false);
        let (scale, masks) = (_mm512_set1_ps(alpha), [c.cols.min(16), c.cols.saturating_sub(16)].map(low_mask));
        for r in 0..c.rows {
            for (half, mask) in masks.into_iter().enumerate() {
                let sums = _mm512_load_ps(found.add(r * NR + half * SIDE));
                T::keep(c.data.add(r * c.row_stride).wrapping_add(half * SIDE), mask, sums, scale, accumulate);
            }
        }
    }
}

/// One or two tiles down by one or two to the right, set or added to.
///
/// # Safety
/// As [`multiply_tiles`]; C has whole tiles.
#[inline]
unsafe fn tiles(down: usize, right: usize, (c, stride): (*mut f32, usize), a: Strip, b: *const u32, accumulate: bool) {
    let c_line = stride * size_of::<f32>();
    let (c_below, b_panel) = (c.wrapping_byte_add(SIDE * c_line), a.steps * SQUARE * size_of::<u32>());
    let (a_below, b_right) = (a.data.wrapping_add(a.panel), b.wrapping_byte_add(b_panel));
    // Sums in tiles 0 to 3, rows in 4 and 5, columns in 6 and 7.
    macro_rules! run {
        ([$($load:literal),*] [$($step:literal),*] [$($keep:literal),*]) => {{
            if accumulate {
                run!(@ [$($load),*] [$($step),*] [$($keep),*]);
            } else {
                run!(@ ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"] [$($step),*] [$($keep),*]);
            }
        }};
        (@ [$($load:literal),*] [$($step:literal),*] [$($keep:literal),*]) => {
            // SAFETY: the caller's promise. The loop reads the strips and the panels from first to last.
            unsafe {
                asm!(
                    $($load,)*
                    "2:",
                    $($step,)*
                    "add {a}, {a_step}",
                    "add {a_below}, {a_step}",
                    "add {b}, 1024",
                    "add {b_right}, 1024",
                    "dec {steps}",
                    "jnz 2b",
                    $($keep,)*
                    // Not every case names all of them in instructions.
                    "/* {c_below} {c_line} {a_line} {b_line} */",
                    c = in(reg) c,
                    c_below = in(reg) c_below,
                    c_line = in(reg) c_line,
                    a = inout(reg) a.data => _,
                    a_below = inout(reg) a_below => _,
                    a_line = in(reg) a.line,
                    a_step = in(reg) a.step,
                    b = inout(reg) b => _,
                    b_right = inout(reg) b_right => _,
                    b_line = in(reg) SIDE * size_of::<u32>(),
                    steps = inout(reg) a.steps => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        };
    }
    match (down, right) {
        (2, 2) => run!(
            ["tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm1, [{c} + {c_line} + 64]",
             "tileloadd tmm2, [{c_below} + {c_line}]", "tileloadd tmm3, [{c_below} + {c_line} + 64]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6",
             "tileloadd tmm7, [{b_right} + {b_line}]", "tdpbf16ps tmm1, tmm4, tmm7",
             "tileloadd tmm5, [{a_below} + {a_line}]", "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7"]
            ["tilestored [{c} + {c_line}], tmm0", "tilestored [{c} + {c_line} + 64], tmm1",
             "tilestored [{c_below} + {c_line}], tmm2", "tilestored [{c_below} + {c_line} + 64], tmm3"]
        ),
        (1, 2) => run!(
            ["tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm1, [{c} + {c_line} + 64]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6",
             "tileloadd tmm7, [{b_right} + {b_line}]", "tdpbf16ps tmm1, tmm4, tmm7"]
            ["tilestored [{c} + {c_line}], tmm0", "tilestored [{c} + {c_line} + 64], tmm1"]
        ),
        (2, 1) => run!(
            ["tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm2, [{c_below} + {c_line}]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6",
             "tileloadd tmm5, [{a_below} + {a_line}]", "tdpbf16ps tmm2, tmm5, tmm6"]
            ["tilestored [{c} + {c_line}], tmm0", "tilestored [{c_below} + {c_line}], tmm2"]
        ),
        _ => run!(
            ["tileloadd tmm0, [{c} + {c_line}]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6"]
            ["tilestored [{c} + {c_line}], tmm0"]
        ),
    }
}

// --- pairs ----------------------------------------------------------------------------------------------------------

/// Up to 14 rows by 32 columns of C.
///
/// # Safety
/// As [`multiply_strip`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs_of_rows<T: Sums>(c: MatMut<T>, a: Strip, b: *const u32, alpha: f32, accumulate: bool) {
    macro_rules! by_rows {
        ($($rows:literal)*) => {
            match c.rows {
                // SAFETY: forwarded from the caller.
                $($rows => unsafe { pairs::<$rows, T>(c, a, b, alpha, accumulate) },)*
                rows => unreachable!("a register tile has 1 to 14 rows, not {rows}"),
            }
        };
    }
    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// The register tile: `R` rows by two vectors. Each word of k loads two vectors of B and broadcasts `R` words of A.
///
/// # Safety
/// As [`pairs_of_rows`]; C has R rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs<const R: usize, T: Sums>(c: MatMut<T>, a: Strip, b: *const u32, alpha: f32, accumulate: bool) {
    let (mut left, mut right) = ([_mm512_setzero_ps(); R], [_mm512_setzero_ps(); R]);
    let halves = |words: __m512i| {
        // SAFETY: both are 64 bytes.
        unsafe { core::mem::transmute::<__m512i, __m512bh>(words) }
    };
    // With 16 columns or fewer there is no second panel; its products are not kept.
    let b_right = if c.cols > SIDE { b.wrapping_add(a.steps * SQUARE) } else { b };
    // SAFETY: the squares hold 16 words for each of 16 lines; C's rows hold `c.cols` columns.
    unsafe {
        for r in 0..R {
            _mm_prefetch::<_MM_HINT_T0>(c.data.wrapping_add(r * c.row_stride).cast());
            _mm_prefetch::<_MM_HINT_T0>(c.data.wrapping_add(r * c.row_stride + 16).cast());
        }
        for step in 0..a.steps {
            let lines: *const i32 = a.data.add(step * a.step).cast();
            for word in 0..SIDE {
                let at = step * SQUARE + word * SIDE;
                let [b0, b1] = [b, b_right].map(|b| halves(_mm512_load_si512(b.add(at).cast())));
                for r in 0..R {
                    let x = halves(_mm512_set1_epi32(*lines.add(r * SIDE + word)));
                    left[r] = _mm512_dpbf16_ps(left[r], x, b0);
                    right[r] = _mm512_dpbf16_ps(right[r], x, b1);
                }
            }
        }
        let scale = _mm512_set1_ps(alpha);
        let masks = [c.cols.min(16), c.cols.saturating_sub(16)].map(low_mask);
        for r in 0..R {
            let to = c.data.add(r * c.row_stride);
            T::keep(to, masks[0], left[r], scale, accumulate);
            T::keep(to.wrapping_add(16), masks[1], right[r], scale, accumulate);
        }
    }
}
