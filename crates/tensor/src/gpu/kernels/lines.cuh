// Lines of bf16 numbers in shared memory, as tensor cores take them: a line is DIM numbers side by side, and eight of them,
// an octet, are what a lane fetches at once.
//
// A warp multiplies 16 lines of its own, or M times as many, with LINES lines, 16 or 32, that all warps of a block share.
// Those are brought in stages: while warps work on one, the next is under way.

#pragma once
#include "tensor_cores.cuh"

// Lines of a left factor that are multiplied at once.
constexpr u32 LEFT_LINES = 16;

// Where octet `o` of a line lies. Each of eight neighbouring lines has its octets in an order of its own, so that those of
// one column are in different banks.
template <u32 DIM> DEVICE u32 octet_place(u32 line, u32 o) {
    return line * (DIM / 8) + (o ^ (DIM == 32 ? line / 2 % 4 : line % 8));
}

// Begins to bring so many lines, which lie one after the other. Code of one thread.
template <u32 DIM> DEVICE void bring_lines(Octet* to, const u16* from, u32 lines) {
    for (u32 e = thread(); e < lines * (DIM / 8); e += threads()) {
        begin_copy(to + octet_place<DIM>(e / (DIM / 8), e % (DIM / 8)), (const Octet*)from + e);
    }
}

// Calls use(first, a, b) for each STAGE lines from `begin` to `end` of two matrices; `room_a` and `room_b` have room for two
// stages each. The work of a block: `use` ends at a barrier.
template <u32 DIM, u32 STAGE, class Use>
DEVICE void each_stage(Octet* room_a, Octet* room_b, const u16* a, const u16* b, u32 begin, u32 end, Use use) {
    constexpr u32 OCTETS = STAGE * DIM / 8;
    auto bring = [&](u32 first) {
        u32 half = (first - begin) / STAGE % 2 * OCTETS;
        bring_lines<DIM>(room_a + half, a + first * DIM, STAGE);
        bring_lines<DIM>(room_b + half, b + first * DIM, STAGE);
    };
    THREADS {
        if (begin < end) bring(begin);
        close_copies();
    }
    ROLLED for (u32 first = begin; first < end; first += STAGE) {
        THREADS {
            if (first + STAGE < end) bring(first + STAGE);
            close_copies();
            await_copies_before_last();
        }
        u32 half = (first - begin) / STAGE % 2 * OCTETS;
        use(first, room_a + half, room_b + half);
    }
}

// Lines 16 m to 16 m + 15 of M times 16, as left factors: those of columns 16 k on are number m * DIM / 16 + k.
template <u32 DIM, u32 M> struct LeftLines {
    LeftFactor factors[M * DIM / 16];

    // From lines that lie one after the other in memory.
    MEMBER void load(const u16* from) {
        EACH_LANE(lane) {
            UNROLLED for (u32 n = 0; n < M * DIM / 16; n++) {
                UNROLLED for (u32 i = 0; i < 4; i++) {
                    u32 line = n / (DIM / 16) * 16 + i % 2 * 8 + lane / 4;
                    u32 column = n % (DIM / 16) * 16 + i / 2 * 8 + lane % 4 * 2;
                    factors[n].of(lane)[i] = *(const u32*)(from + line * DIM + column);
                }
            }
        }
    }
};

// Products of M times 16 lines with LINES lines: as squares of 16 by 8.
template <u32 M, u32 LINES> struct LineProducts {
    Sums squares[M][LINES / 8];
};

// products += left right^T, the right factor being lines of a stage from `line` on
template <u32 DIM, u32 M, u32 LINES>
DEVICE void add_products(LineProducts<M, LINES>& products, LeftLines<DIM, M>& left, const Octet* right, u32 line) {
    UNROLLED for (u32 j = 0; j < DIM / 32; j++) {
        // Of each square: two right factors, of 16 columns each.
        Lanes<u32, 4> pairs[LINES / 8];
        UNROLLED for (u32 t = 0; t < LINES / 8; t++) {
            load_squares(pairs[t], [=](u32 lane) {
                return right + octet_place<DIM>(line + 8 * t + lane % 8, 4 * j + lane / 8);
            });
        }
        // Neighbouring instructions add to different squares: none waits for the one before.
        UNROLLED for (u32 half = 0; half < 2; half++) {
            UNROLLED for (u32 m = 0; m < M; m++) {
                UNROLLED for (u32 t = 0; t < LINES / 8; t++) {
                    RightFactor factor = half_of(pairs[t], half);
                    multiply_add(products.squares[m][t], left.factors[m * DIM / 16 + 2 * j + half], factor);
                }
            }
        }
    }
}

// Calls f(eight, column, value) for what a lane has of products: of line 8 eight + lane / 4, by reference.
template <u32 M, u32 LINES, class F> DEVICE void each_product(LineProducts<M, LINES>& products, u32 lane, F f) {
    UNROLLED for (u32 m = 0; m < M; m++) {
        UNROLLED for (u32 t = 0; t < LINES / 8; t++) {
            UNROLLED for (u32 i = 0; i < 4; i++) {
                f(2 * m + i / 2, 8 * t + lane % 4 * 2 + i % 2, products.squares[m][t].of(lane)[i]);
            }
        }
    }
}

// Sums of M times 16 lines of DIM columns.
template <u32 DIM, u32 M> struct LineSums {
    Sums squares[M][DIM / 8];
};

// Calls f(eight, column, value) for what a lane has of sums.
template <u32 DIM, u32 M, class F> DEVICE void each_sum(LineSums<DIM, M>& sums, u32 lane, F f) {
    UNROLLED for (u32 m = 0; m < M; m++) {
        UNROLLED for (u32 d = 0; d < DIM / 8; d++) {
            UNROLLED for (u32 i = 0; i < 4; i++) {
                f(2 * m + i / 2, 8 * d + lane % 4 * 2 + i % 2, sums.squares[m][d].of(lane)[i]);
            }
        }
    }
}

// sums += weights right, the weights being products, rounded, and the right factor lines of a stage from `line` on
template <u32 DIM, u32 M, u32 LINES>
DEVICE void add_weighted(LineSums<DIM, M>& sums, LineProducts<M, LINES>& weights, const Octet* right, u32 line) {
    // Of 16 lines each.
    LeftFactor factors[M][LINES / 16];
    EACH_LANE(lane) {
        UNROLLED for (u32 m = 0; m < M; m++) {
            UNROLLED for (u32 i = 0; i < LINES / 4; i++) {
                const float* pair = weights.squares[m][i / 2].of(lane) + i % 2 * 2;
                factors[m][i / 4].of(lane)[i % 4] = rounded_pair(pair[0], pair[1]);
            }
        }
    }
    // Columns of four squares: of 32 lines and eight numbers, or of 16 lines and 16 numbers.
    constexpr u32 WIDE = 32 / LINES, AT_ONCE = 4 / WIDE;
    UNROLLED for (u32 d = 0; d < DIM / 8; d += WIDE * AT_ONCE) {
        Lanes<u32, 4> pairs[AT_ONCE];
        UNROLLED for (u32 n = 0; n < AT_ONCE; n++) {
            load_turned_squares(pairs[n], [=](u32 lane) {
                return right + octet_place<DIM>(line + lane % LINES, d + WIDE * n + lane / LINES);
            });
        }
        UNROLLED for (u32 half = 0; half < 2; half++) {
            UNROLLED for (u32 n = 0; n < AT_ONCE; n++) {
                RightFactor factor = half_of(pairs[n], half);
                u32 square = d + WIDE * n + (WIDE == 2 ? half : 0), of_lines = WIDE == 2 ? 0 : half;
                UNROLLED for (u32 m = 0; m < M; m++) multiply_add(sums.squares[m][square], factors[m][of_lines], factor);
            }
        }
    }
}
