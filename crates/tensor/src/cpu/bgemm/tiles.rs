//! The kernel of tiles (AMX): 16 x 32 by 32 x 16 in one instruction.

use core::arch::asm;
use core::arch::x86_64::*;
use core::mem::MaybeUninit;

use super::{FactorRows, NR, SIDE, SQUARE, SumStore, WordLine};
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

/// Up to 32 rows by 32 columns of C.
///
/// # Safety
/// As [`multiply_block`]; this thread's tiles are configured.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_tiles<T: SumStore>(c: MatMut<T>, a: FactorRows, b: *const u32, onto: Onto<T>) {
    let (down, right) = (c.rows.div_ceil(SIDE), c.cols.div_ceil(SIDE));
    let is_whole = c.rows.is_multiple_of(SIDE) && c.cols.is_multiple_of(SIDE) && onto.alpha == 1.0;
    let direct = T::as_f32(c.data).filter(|_| is_whole);
    // SAFETY: as many squares of A and B are there; what does not fill tiles goes through memory that does.
    unsafe {
        if let Some(to) = direct {
            // Tiles take up what is in C.
            if let Some(start) = onto.start {
                c.fill_from(start);
            }
            return tiles(down, right, (to, c.row_stride), a, b, onto.start.is_some());
        }
        // Tiles fill what is read of it.
        let mut found = MaybeUninit::<[WordLine; 2 * 2 * SIDE]>::uninit();
        let found: *mut f32 = found.as_mut_ptr().cast();
        tiles(down, right, (found, NR), a, b, false);
        let (scale, masks) = (_mm512_set1_ps(onto.alpha), [c.cols.min(16), c.cols.saturating_sub(16)].map(low_mask));
        for r in 0..c.rows {
            for (half, mask) in masks.into_iter().enumerate().take(right) {
                let sums = _mm512_load_ps(found.add(r * NR + half * SIDE));
                let to = c.data.add(r * c.row_stride).wrapping_add(half * SIDE);
                T::keep(to, mask, sums, scale, onto.at(r, half * SIDE));
            }
        }
    }
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
    (@ $operands:ident, [$($load:literal),*] [$($step:literal),*] [$($keep:literal),*]) => {
        // SAFETY: the caller's promise. The loop reads the panels from first to last.
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
/// As [`multiply_tiles`]; C has whole tiles.
#[inline]
unsafe fn tiles(
    down: usize,
    right: usize,
    (c, stride): (*mut f32, usize),
    a: FactorRows,
    b: *const u32,
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
    };
    match (down, right) {
        (2, 2) => run!(
            operands, accumulate,
            ["tileloadd tmm0, [{c} + {c_line}]", "tileloadd tmm1, [{c} + {c_line} + 64]",
             "tileloadd tmm2, [{c_below} + {c_line}]", "tileloadd tmm3, [{c_below} + {c_line} + 64]"]
            ["tileloadd tmm4, [{a} + {a_line}]", "tileloadd tmm6, [{b} + {b_line}]", "tdpbf16ps tmm0, tmm4, tmm6",
             "tileloadd tmm7, [{b_right} + {b_line}]", "tdpbf16ps tmm1, tmm4, tmm7",
             "tileloadd tmm5, [{a_below} + {a_line}]", "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7"]
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
