//! The kernel of tiles (AMX): 16 x 32 by 32 x 16 in one instruction.

use core::arch::asm;
use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use half::bf16;

use super::{FactorRows, NR, SIDE, SQUARE, SumStore};
use crate::cpu::gemm::Onto;
use crate::cpu::mat::MatMut;
use crate::cpu::sgemm_avx512::low_mask;

/// Gives all eight tiles 16 lines of 64 bytes, on this thread.
///
/// # Safety
/// The CPU has tiles, and this process may use them.
pub(super) unsafe fn configure_tiles() {
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

/// Sums of 32 rows by 32 columns, at an address that is a multiple of their size.
#[repr(C, align(4096))]
struct TileSums(MaybeUninit<[f32; 2 * SIDE * NR]>);
const _: () = assert!(size_of::<TileSums>() == 4096, "by which the instructions know where sums end");

/// Depths of `STEP` in which all of them are rounded, four rows in each.
const ROUNDING_STEPS: usize = 8;
/// Tiles of a row of them that ask for the next rows of A: an eighth each, four lines in each step.
const ASKING_TILES: usize = 8;

/// A block of C by its rows of A and packed panels of B: 32 rows by 32 columns at a time, or what is left at the edges.
///
/// # Safety
/// The rows and the panels are those of C; this thread's tiles are configured.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_by_tiles<T: SumStore>(c: MatMut<T>, a: FactorRows, b: *const u32, onto: Onto<T>) {
    let mut spaces = [const { TileSums(MaybeUninit::uninit()) }; 2];
    let (mut turn, mut waiting) = (0, None::<WaitingSums<T>>);
    for i in (0..c.rows).step_by(2 * SIDE) {
        let (m, a) = ((2 * SIDE).min(c.rows - i), a.at_row(i));
        for j in (0..c.cols).step_by(NR) {
            let n = NR.min(c.cols - j);
            let squares = [m, n].map(|side| side.div_ceil(SIDE));
            // SAFETY: panels were packed 16 columns wide, and this part lies inside C. It has as many squares of A and B. What
            // does not fill tiles goes through memory that does.
            unsafe {
                let (c, b, onto) = (c.block(i, j, m, n), b.add(j * a.steps * SIDE), onto.block(i, j, m, n));
                // Its own columns, which are near, if there is nothing to ask for.
                let ahead = a.ahead(j / NR).unwrap_or(b.cast());
                if let Some(to) = sums_in_place(c, onto) {
                    // Tiles take up what is in C.
                    if let Some(start) = onto.start {
                        c.fill_from(start);
                    }
                    tiles(squares, (to, c.row_stride), (a, b, ahead), onto.start.is_some());
                    continue;
                }
                turn = 1 - turn;
                let sums: *mut f32 = spaces[turn].0.as_mut_ptr().cast();
                // What does not fill tiles is summed in the same order as what does.
                let goes_on = T::as_f32(c.data).is_some() && onto.alpha == 1.0 && onto.start.is_some();
                let onto = match onto.start {
                    Some(start) if goes_on => {
                        MatMut { data: sums.cast(), rows: m, cols: n, row_stride: NR }.fill_from(start);
                        Onto { start: None, ..onto }
                    }
                    _ => onto,
                };
                // The sums before these are stored while these are computed: at once they would have to be waited for.
                let before = waiting.replace(WaitingSums { c, sums, onto });
                match before.as_ref().and_then(|before| before.rounding()) {
                    Some(before) if squares == [2, 2] && a.steps >= ROUNDING_STEPS => {
                        tiles_while_rounding(sums, (a, b, ahead), before);
                    }
                    _ => {
                        tiles(squares, (sums, NR), (a, b, ahead), goes_on);
                        before.inspect(|before| before.store());
                    }
                }
            }
        }
    }
    // SAFETY: its part of C lies inside it, and its sums are there.
    waiting.inspect(|last| unsafe { last.store() });
}

impl FactorRows {
    /// Where to ask for lines while this tile of a row of tiles is multiplied: in the next rows, if rows are read as they are
    /// stored and lie in one piece. Tiles that have nothing left to ask for go over their own rows.
    fn ahead(self, tile: usize) -> Option<*const u8> {
        let is_one_piece = self.step < SQUARE * size_of::<u32>() && self.line == self.steps * self.step;
        let rows = if tile < ASKING_TILES { 2 * SIDE } else { 0 };
        let lines = tile % ASKING_TILES * self.steps * 4;
        is_one_piece.then(|| self.data.wrapping_add(rows * self.line + lines * 64))
    }
}

/// Where tiles can leave the sums of this part of C themselves.
fn sums_in_place<T: SumStore>(c: MatMut<T>, onto: Onto<T>) -> Option<*mut f32> {
    let is_whole = c.rows.is_multiple_of(SIDE) && c.cols.is_multiple_of(SIDE) && onto.alpha == 1.0;
    T::as_f32(c.data).filter(|_| is_whole)
}

/// Sums of a part of C, `NR` to a row.
struct WaitingSums<T> {
    c: MatMut<T>,
    sums: *const f32,
    onto: Onto<T>,
}

/// Sums to be rounded, which fill tiles.
struct Rounding {
    sums: *const f32,
    /// What is added to each row of them.
    start: [__m512; 2],
    /// Where they go, and how many bytes lie between rows there.
    to: *mut bf16,
    line: usize,
}

impl<T: SumStore> WaitingSums<T> {
    /// If they fill tiles, and have no start or one row of it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn rounding(&self) -> Option<Rounding> {
        let WaitingSums { c, sums, onto } = *self;
        let is_whole = [c.rows, c.cols] == [2 * SIDE, NR] && onto.alpha == 1.0;
        let to = T::as_bf16(c.data).filter(|_| is_whole)?;
        let start = match onto.start {
            // Unlike +0, it leaves a sum of -0 as it is.
            None => [_mm512_set1_ps(-0.0); 2],
            Some(start) if start.row_stride == 0 => {
                let row = T::as_bf16(start.data.cast_mut())?;
                // SAFETY: a start has numbers for all columns of C.
                [0, SIDE].map(|j| unsafe { widened(row.add(j)) })
            }
            Some(_) => return None,
        };
        Some(Rounding { sums, start, to, line: c.row_stride * size_of::<bf16>() })
    }

    /// # Safety
    /// The part lies inside C, and the sums are there.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn store(&self) {
        let WaitingSums { c, sums, onto } = *self;
        let (scale, masks) = (_mm512_set1_ps(onto.alpha), [c.cols.min(16), c.cols.saturating_sub(16)].map(low_mask));
        for r in 0..c.rows {
            for (half, mask) in masks.into_iter().enumerate().take(c.cols.div_ceil(SIDE)) {
                // SAFETY: the caller's promise; masks leave out what C does not have.
                unsafe {
                    let sums = _mm512_load_ps(sums.add(r * NR + half * SIDE));
                    let to = c.data.add(r * c.row_stride).wrapping_add(half * SIDE);
                    T::keep(to, mask, sums, scale, onto.at(r, half * SIDE));
                }
            }
        }
    }
}

/// Sixteen numbers in f32.
///
/// # Safety
/// They exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn widened(from: *const bf16) -> __m512 {
    // SAFETY: the caller's promise.
    let numbers = unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(numbers))
}

/// Where the instructions of [`tiles`] find their operands.
struct TileOperands {
    c: *mut f32,
    c_below: *mut f32,
    c_line: usize,
    a: FactorRows,
    a_below: *const u8,
    b: *const u32,
    b_right: *const u32,
    /// What to ask for meanwhile.
    ahead: *const u8,
}

/// A step of two tiles by two, with what is done between its instructions; the next rows of A are asked for.
macro_rules! two_by_two {
    ([$($first:expr),*] [$($second:expr),*]) => {
        concat!(
            "tileloadd tmm4, [{a} + {a_line}]\n",
            "tileloadd tmm6, [{b} + {b_line}]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $($first, "\n",)*
            "tileloadd tmm7, [{b_right} + {b_line}]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $($second, "\n",)*
            "prefetcht1 [{ahead}]\n",
            "prefetcht1 [{ahead} + 64]\n",
            "prefetcht1 [{ahead} + 128]\n",
            "prefetcht1 [{ahead} + 192]\n",
            "add {ahead}, 256\n",
            "tileloadd tmm5, [{a_below} + {a_line}]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7",
        )
    };
}

/// Goes on to the next step, and tells whether there is one.
macro_rules! next_step {
    () => {
        concat!(
            "add {a}, {a_step}\n",
            "add {a_below}, {a_step}\n",
            "add {b}, 1024\n",
            "add {b_right}, 1024\n",
            "dec {steps}",
        )
    };
}

/// Loads or clears the sums, runs a step for every 32 of k, and stores the sums: those in tiles 0 to 3, rows in 4 and 5,
/// columns in 6 and 7.
macro_rules! run {
    ($operands:ident, $accumulate:ident, [$($load:literal),*] $step:tt $keep:tt) => {
        if $accumulate {
            run!(@ $operands, [$($load),*] $step $keep);
        } else {
            run!(@ $operands, ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"] $step $keep);
        }
    };
    (@ $operands:ident, [$($load:literal),*] [$($step:expr),*] [$($keep:literal),*]) => {
        // SAFETY: the caller's promise. The loop reads the panels from first to last.
        unsafe {
            asm!(
                $($load,)*
                "2:",
                $($step,)*
                next_step!(),
                "jnz 2b",
                $($keep,)*
                // Not every case names all of them in instructions.
                "/* {c_below} {c_line} {a_line} {b_line} {ahead} */",
                c = in(reg) $operands.c,
                c_below = in(reg) $operands.c_below,
                c_line = in(reg) $operands.c_line,
                a = inout(reg) $operands.a.data => _,
                a_below = inout(reg) $operands.a_below => _,
                a_line = in(reg) $operands.a.line,
                a_step = in(reg) $operands.a.step,
                b = inout(reg) $operands.b => _,
                b_right = inout(reg) $operands.b_right => _,
                b_line = in(reg) SIDE * size_of::<u32>(),
                ahead = inout(reg) $operands.ahead => _,
                steps = inout(reg) $operands.a.steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    };
}

/// One or two tiles down by one or two to the right, set or added to.
///
/// # Safety
/// As [`multiply_by_tiles`]; C has whole tiles.
#[inline]
unsafe fn tiles(
    [down, right]: [usize; 2],
    (c, stride): (*mut f32, usize),
    (a, b, ahead): (FactorRows, *const u32, *const u8),
    accumulate: bool,
) {
    let c_line = stride * size_of::<f32>();
    let b_panel = a.steps * SQUARE * size_of::<u32>();
    let operands = TileOperands {
        c,
        c_below: c.wrapping_byte_add(SIDE * c_line),
        c_line,
        a,
        a_below: a.data.wrapping_add(a.panel),
        b,
        b_right: b.wrapping_byte_add(b_panel),
        ahead,
    };
    match (down, right) {
        (2, 2) => run!(
            operands, accumulate,
            ["tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm1, [{c} + {c_line} + 64]",
             "tileloadd tmm2, [{c_below} + {c_line}]", "tileloadd tmm3, [{c_below} + {c_line} + 64]"]
            [two_by_two!([] [])]
            ["tilestored [{c} + {c_line}], tmm0", "tilestored [{c} + {c_line} + 64], tmm1",
             "tilestored [{c_below} + {c_line}], tmm2", "tilestored [{c_below} + {c_line} + 64], tmm3"]
        ),
        (1, 2) => run!(
            operands, accumulate,
            ["tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm1, [{c} + {c_line} + 64]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6",
             "tileloadd tmm7, [{b_right} + {b_line}]", "tdpbf16ps tmm1, tmm4, tmm7"]
            ["tilestored [{c} + {c_line}], tmm0", "tilestored [{c} + {c_line} + 64], tmm1"]
        ),
        (2, 1) => run!(
            operands, accumulate,
            ["tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm2, [{c_below} + {c_line}]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6",
             "tileloadd tmm5, [{a_below} + {a_line}]", "tdpbf16ps tmm2, tmm5, tmm6"]
            ["tilestored [{c} + {c_line}], tmm0", "tilestored [{c_below} + {c_line}], tmm2"]
        ),
        _ => run!(
            operands, accumulate,
            ["tileloadd tmm0, [{c} + {c_line}]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6"]
            ["tilestored [{c} + {c_line}], tmm0"]
        ),
    }
}

/// A row of sums, with the start added, rounded.
macro_rules! rounded_row {
    ($low:literal, $high:literal, $to:literal) => {
        concat!(
            concat!("vaddps zmm16, zmm18, [{from} + ", $low, "]\n"),
            concat!("vaddps zmm17, zmm19, [{from} + ", $high, "]\n"),
            "vcvtne2ps2bf16 zmm16, zmm17, zmm16\n",
            concat!("vmovdqu64 [", $to, "], zmm16"),
        )
    };
}

/// Two tiles down by two to the right, set, while as many other sums are rounded: four rows of these in each of the first
/// steps. Stores that come all at once would keep the next tiles waiting.
///
/// # Safety
/// As [`multiply_by_tiles`]; there are at least `ROUNDING_STEPS` steps, and `before` has memory of its own.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tiles_while_rounding(sums: *mut f32, (a, b, ahead): (FactorRows, *const u32, *const u8), before: Rounding) {
    let b_panel = a.steps * SQUARE * size_of::<u32>();
    // SAFETY: the caller's promise. The loops read the panels from first to last.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            two_by_two!(
                [rounded_row!("0", "64", "{to}"), rounded_row!("128", "192", "{to} + {to_line}"),
                 "lea {to}, [{to} + 2 * {to_line}]"]
                [rounded_row!("256", "320", "{to}"), rounded_row!("384", "448", "{to} + {to_line}"),
                 "lea {to}, [{to} + 2 * {to_line}]", "add {from}, 512"]
            ),
            next_step!(),
            // To the end of the sums.
            "test {from}, 4095",
            "jnz 2b",
            "test {steps}, {steps}",
            "jz 4f",
            "3:",
            two_by_two!([] []),
            next_step!(),
            "jnz 3b",
            "4:",
            // A row of sums is as long as two lines of B.
            "tilestored [{sums} + 2 * {b_line}], tmm0",
            "tilestored [{sums} + 2 * {b_line} + 64], tmm1",
            "tilestored [{sums} + 2 * {b_line} + 2048], tmm2",
            "tilestored [{sums} + 2 * {b_line} + 2112], tmm3",
            sums = in(reg) sums,
            a = inout(reg) a.data => _,
            a_below = inout(reg) a.data.wrapping_add(a.panel) => _,
            a_line = in(reg) a.line,
            a_step = in(reg) a.step,
            b = inout(reg) b => _,
            b_right = inout(reg) b.wrapping_byte_add(b_panel) => _,
            b_line = in(reg) SIDE * size_of::<u32>(),
            from = inout(reg) before.sums => _,
            to = inout(reg) before.to => _,
            to_line = in(reg) before.line,
            ahead = inout(reg) ahead => _,
            steps = inout(reg) a.steps => _,
            in("zmm18") before.start[0], in("zmm19") before.start[1],
            out("zmm16") _, out("zmm17") _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}
