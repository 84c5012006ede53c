//! Matrix product of bf16 with sums in f32, for CPUs that multiply bf16: one thread, any strides, `C = alpha A B (+ start)`.
//!
//! Two kernels share the packing ([`pack`]): tiles (AMX) and pairs (AVX512-BF16). Both take two neighbours in k at once, as
//! one word of 32 bits. Packed blocks are squares of 16 lines by 16 words. Lines of B are its columns, and B is packed word
//! by word. Lines of A are its rows: tiles take them line by line, pairs in whichever order packing gives them, or as they
//! are stored if they are bf16 and C is wide. f32 is rounded as it is packed, once a block.
//!
//! An element of C is summed in the same order wherever it lies: in that of k, a pair at a time, panel by panel. So neither
//! threads nor blocks change its bits.

mod pack;
mod pairs;
mod tiles;

use core::arch::asm;
use core::arch::x86_64::*;
use std::cell::RefCell;
use std::sync::OnceLock;

use half::bf16;

use super::gemm::{Onto, ProductBlocks};
use super::mat::{Factor, Mat, MatMut};
use super::sgemm_avx512::store;
use pack::{WordOrder, pack};
use pairs::{multiply_pairs, tile};
use tiles::{configure_tiles, multiply_by_tiles};

/// Lines of a packed square, and its words a line.
const SIDE: usize = 16;
/// Depth of a packed block.
const STEP: usize = 2 * SIDE;
/// Words of a packed block.
const SQUARE: usize = SIDE * SIDE;
/// Columns of C that a kernel computes at once.
const NR: usize = 2 * SIDE;
/// Rows that the kernel of pairs computes at once where A is packed.
const MR_PAIRS: usize = 14;
/// Rows and columns that it computes at once where A is not.
const MR_IN_PLACE: usize = 6;
const NR_IN_PLACE: usize = 4 * SIDE;
/// Depth of a packed panel: 32 lines of A fill two thirds of a first-level cache of 48 KiB.
const KC: usize = 512;
/// Elements of the panels of A that are packed together: rows that lie side by side are then read by several cache lines
/// at a time, for each k lies in a page of its own.
const A_ELEMENTS: usize = 1 << 17;
/// Words of all of A that are packed once for all blocks of B, instead of once for each: 2 MiB. Tests have small matrices.
const A_WORDS_KEPT: usize = if cfg!(test) { 3 << 16 } else { 1 << 19 };

/// What multiplies bf16 on this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bf16Unit {
    /// Tiles: 16 x 32 by 32 x 16 in one instruction.
    Amx,
    /// Vectors of 16 words.
    Avx512,
}

impl Bf16Unit {
    /// The fastest that this CPU has, if any.
    pub(super) fn of_this_cpu() -> Option<Bf16Unit> {
        static FOUND: OnceLock<Option<Bf16Unit>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let has_pairs = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bf16");
            has_pairs.then(|| if may_use_tiles() { Bf16Unit::Amx } else { Bf16Unit::Avx512 })
        })
    }

    /// Rows and columns of C that the kernel computes at once, for a product of `cols` columns by `a`.
    pub(super) fn tile(self, a: Factor, cols: usize, blocks: ProductBlocks) -> [usize; 2] {
        match self {
            Bf16Unit::Amx => [2 * SIDE, NR],
            Bf16Unit::Avx512 => tile(self.layout(a, cols, blocks)),
        }
    }

    /// Whether rows of A are packed in a product of `cols` columns.
    pub(super) fn packs(self, a: Factor, cols: usize, blocks: ProductBlocks) -> bool {
        self.layout(a, cols, blocks) != RowLayout::InPlace
    }

    /// How the kernel finds words of A.
    fn layout(self, a: Factor, cols: usize, blocks: ProductBlocks) -> RowLayout {
        let is_by_rows = a.col_stride() == 1;
        match (self, a) {
            // What tiles read where it lies is asked block by block.
            (Bf16Unit::Amx, _) => RowLayout::Squares(WordOrder::LineByLine),
            // A word is two numbers of a row.
            (_, Factor::Bf16(mat))
                if blocks.in_place_kib.is_some() && is_by_rows && mat.cols.is_multiple_of(2) && cols > NR =>
            {
                RowLayout::InPlace
            }
            _ if is_by_rows => RowLayout::Squares(WordOrder::LineByLine),
            _ => RowLayout::Squares(WordOrder::WordByWord),
        }
    }
}

/// How rows of A lie where the kernels read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowLayout {
    /// As they are stored.
    InPlace,
    /// In squares. Of those in line-by-line order tiles may read some as they are stored.
    Squares(WordOrder),
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
struct WordLine([u32; 16]);

#[derive(Default)]
struct Scratch {
    a: Vec<WordLine>,
    b: Vec<WordLine>,
    has_tiles: bool,
}

thread_local! {
    /// Packing space, kept for the thread's life: fresh pages would cost as much as the packing.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// `c = alpha * a * b + start`. Shapes: a `[m, k]`, b `[k, n]`, c `[m, n]`; k > 0.
/// Sums are f32, and rounded once where C is not.
///
/// # Safety
/// This CPU has the unit, the matrices cover the memory their shapes and strides say, and the start is one of C.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn bgemm<T: SumStore>(
    unit: Bf16Unit,
    c: MatMut<T>,
    (a, b): (Factor, Factor),
    onto: Onto<T>,
    blocks: ProductBlocks,
) {
    SCRATCH.with_borrow_mut(|scratch| {
        if unit == Bf16Unit::Amx && !scratch.has_tiles {
            // SAFETY: the unit is this CPU's.
            unsafe { configure_tiles() };
            scratch.has_tiles = true;
        }
        let (layout, [tile_rows, tile_cols]) = (unit.layout(a, c.cols, blocks), unit.tile(a, c.cols, blocks));
        let depth = panel_depth(a.cols(), T::DEPTH_MAX);
        // Rows of A that are read between two blocks of B, and words that they take packed.
        let (kib, height, a_words) = match (layout, blocks.in_place_kib) {
            (RowLayout::InPlace, Some(kib)) => (kib, c.rows, 0),
            _ => {
                let height = (A_ELEMENTS / depth / tile_rows).max(1) * tile_rows;
                let panels = height.min(c.rows).div_ceil(tile_rows.min(SIDE)) + 1;
                (blocks.packed_kib, height, panels * SIDE * depth / 2)
            }
        };
        let width = ProductBlocks::columns(kib, depth, size_of::<bf16>(), tile_cols).min(c.cols.next_multiple_of(SIDE));
        let [panels, chunks] = [a.cols().div_ceil(depth), c.rows.div_ceil(height)];
        let keeps_a = a_words > 0 && c.cols > width && panels * chunks * a_words <= A_WORDS_KEPT;
        let a_spaces = if keeps_a { panels * chunks } else { 1 };
        let (a_space, b_space) = (space(&mut scratch.a, a_spaces * a_words), space(&mut scratch.b, width * depth / 2));
        // Those of the first block of columns, in this order, if they are kept for the others.
        let mut kept = Vec::new();
        for j in (0..c.cols).step_by(width) {
            let n = width.min(c.cols - j);
            for p in (0..a.cols()).step_by(depth) {
                let (k, onto) = (depth.min(a.cols() - p), onto.after_terms(p, c));
                // SAFETY: every block below lies inside the matrices, by the loop bounds.
                unsafe {
                    pack(b_space, b.block(p, j, k, n).transposed(), SIDE, WordOrder::WordByWord);
                    for i in (0..c.rows).step_by(height) {
                        let (m, place) = (height.min(c.rows - i), p / depth * chunks + i / height);
                        let rows = kept.get(place).copied().unwrap_or_else(|| {
                            let space = a_space.add(kept.len() * a_words);
                            FactorRows::of(a.block(i, p, m, k), unit, layout, space, tile_rows)
                        });
                        if keeps_a && place == kept.len() {
                            kept.push(rows);
                        }
                        let (c, onto) = (c.block(i, j, m, n), onto.block(i, j, m, n));
                        multiply_block(unit, c, rows, [tile_rows, tile_cols], b_space, onto);
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

fn space(lines: &mut Vec<WordLine>, words: usize) -> *mut u32 {
    let count = words.div_ceil(16);
    if lines.len() < count {
        lines.resize(count, WordLine([0; 16]));
    }
    lines.as_mut_ptr().cast()
}

/// Rows of A as the kernels read them.
#[derive(Clone, Copy)]
struct FactorRows {
    data: *const u8,
    layout: RowLayout,
    /// Bytes from a row to the next, and from one depth of `STEP` to the next.
    line: usize,
    step: usize,
    /// Rows of a panel, and bytes from one to the next.
    panel_rows: usize,
    panel: usize,
    /// Depths of `STEP`, and words of a row.
    steps: usize,
    words: usize,
}

impl FactorRows {
    /// Those of `a`, packed unless they can be read where they are.
    ///
    /// # Safety
    /// `space` has room for what is packed, in panels of `tile_rows` or of 16.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn of(a: Factor, unit: Bf16Unit, layout: RowLayout, space: *mut u32, tile_rows: usize) -> FactorRows {
        let steps = a.cols().div_ceil(STEP);
        let order = match (layout, a) {
            (RowLayout::InPlace, Factor::Bf16(mat)) => {
                let rows = FactorRows::as_stored(mat, layout, 1, steps);
                return FactorRows { words: mat.cols / 2, ..rows };
            }
            (_, Factor::Bf16(mat)) if unit == Bf16Unit::Amx && is_in_tiles(mat) => {
                return FactorRows::as_stored(mat, layout, SIDE, steps);
            }
            (RowLayout::Squares(order), _) => order,
            (RowLayout::InPlace, Factor::F32(_)) => unreachable!("f32 is rounded on its way"),
        };
        let panel_rows = tile_rows.min(SIDE);
        // SAFETY: the caller's promise.
        unsafe { pack(space, a, panel_rows, order) };
        let (line, step) = (SIDE * size_of::<u32>(), SQUARE * size_of::<u32>());
        let (data, panel, words) = (space.cast_const().cast(), steps * step, steps * SIDE);
        FactorRows { data, layout, line, step, panel_rows, panel, steps, words }
    }

    fn as_stored(mat: Mat<bf16>, layout: RowLayout, panel_rows: usize, steps: usize) -> FactorRows {
        let line = mat.row_stride * size_of::<bf16>();
        let (step, panel) = (STEP * size_of::<bf16>(), panel_rows * line);
        FactorRows { data: mat.data.cast(), layout, line, step, panel_rows, panel, steps, words: steps * SIDE }
    }

    /// Those from a row on, with which a panel begins.
    fn at_row(self, row: usize) -> FactorRows {
        FactorRows { data: self.data.wrapping_add(row / self.panel_rows * self.panel), ..self }
    }
}

/// Whether tiles can be loaded from where the rows are.
fn is_in_tiles(mat: Mat<bf16>) -> bool {
    mat.col_stride == 1 && mat.rows.is_multiple_of(SIDE) && mat.cols.is_multiple_of(STEP)
}

/// A block of C by its rows of A and packed panels of B.
///
/// # Safety
/// The rows and the panels are those of C.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn multiply_block<T: SumStore>(
    unit: Bf16Unit,
    c: MatMut<T>,
    a: FactorRows,
    [tile_rows, tile_cols]: [usize; 2],
    b: *const u32,
    onto: Onto<T>,
) {
    if unit == Bf16Unit::Amx {
        // SAFETY: forwarded from the caller; `bgemm` has configured the tiles.
        return unsafe { multiply_by_tiles(c, a, b, onto) };
    }
    for i in (0..c.rows).step_by(tile_rows) {
        let (m, a) = (tile_rows.min(c.rows - i), a.at_row(i));
        for j in (0..c.cols).step_by(tile_cols) {
            let n = tile_cols.min(c.cols - j);
            // SAFETY: panels were packed 16 columns wide; the tile lies inside C.
            unsafe {
                let (c, b, onto) = (c.block(i, j, m, n), b.add(j * a.steps * SIDE), onto.block(i, j, m, n));
                multiply_pairs(c, a, b, onto);
            }
        }
    }
}

/// What sums are stored as.
pub(super) trait SumStore: Copy {
    /// The most terms that may be summed before the sum is stored.
    const DEPTH_MAX: usize;

    /// The memory as f32, if it is.
    fn as_f32(data: *mut Self) -> Option<*mut f32>;

    /// The memory as bf16, if it is.
    fn as_bf16(data: *mut Self) -> Option<*mut bf16>;

    /// Stores `sums * scale`, added to what is at `start`, at the lanes of `mask`.
    ///
    /// # Safety
    /// These lanes exist, and the CPU has the instructions.
    unsafe fn keep(to: *mut Self, mask: __mmask16, sums: __m512, scale: __m512, start: Option<*const Self>);
}

impl SumStore for f32 {
    const DEPTH_MAX: usize = KC;

    fn as_f32(data: *mut f32) -> Option<*mut f32> {
        Some(data)
    }

    fn as_bf16(_: *mut f32) -> Option<*mut bf16> {
        None
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn keep(to: *mut f32, mask: __mmask16, sums: __m512, scale: __m512, start: Option<*const f32>) {
        // SAFETY: the caller's promise.
        unsafe { store(to, mask, sums, scale, start) }
    }
}

impl SumStore for bf16 {
    /// A sum in parts would be rounded more than once.
    const DEPTH_MAX: usize = usize::MAX;

    fn as_f32(_: *mut bf16) -> Option<*mut f32> {
        None
    }

    fn as_bf16(data: *mut bf16) -> Option<*mut bf16> {
        Some(data)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn keep(to: *mut bf16, mask: __mmask16, sums: __m512, scale: __m512, start: Option<*const bf16>) {
        // SAFETY: masked lanes are neither read nor written; vectors of one size hold the same bits.
        unsafe {
            let out = match start {
                Some(start) => {
                    let start = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, start.cast()));
                    _mm512_fmadd_ps(sums, scale, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(start)))
                }
                None => _mm512_mul_ps(sums, scale),
            };
            let rounded = core::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(out));
            _mm256_mask_storeu_epi16(to.cast(), mask, rounded);
        }
    }
}
