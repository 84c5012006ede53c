// Products of bf16 by warps that take their factors from memory by themselves: no shared memory, no barriers. A line is
// DIM numbers side by side, and lane 4 g + q reads eight of them at once, an octet, from place 8 q of every 32 of a line
// that belongs to g.
//
// Both factors of a product take octets so, which makes the numbers that are summed over come in another order, the same
// for both. Lines of the right factor are in an order of their own, too (`line_of`). The product's columns of a lane are
// then neighbours, and as octets again a factor of the next product.

#pragma once
#include "tensor_cores.cuh"

// Lines of a left factor, and of a right factor, that are multiplied at once.
constexpr u32 LEFT_LINES = 16;
constexpr u32 RIGHT_LINES = 32;
// Instructions that an octet of each lane is good for.
constexpr u32 STEPS = 2;

DEVICE Octet octet_at(const u16* from) { return *(const Octet*)from; }

// Line of the right factor that column `n` of square `t` of the product is of.
DEVICE u32 line_of(u32 t, u32 n) { return n / 2 * 8 + n % 2 + 2 * t; }

// Lines g and 8 + g of M times 16 of a left factor, DIM numbers each: held in registers, or read whenever they are needed.
template <u32 DIM, u32 M, bool IS_HELD> struct LeftLines {
    Lanes<Octet, IS_HELD ? M * DIM / 16 : 1> octets;
    const u16* from;

    MEMBER void load(const u16* lines) {
        from = lines;
        if (!IS_HELD) return;
        EACH_LANE(lane) {
            UNROLLED for (u32 n = 0; n < M * DIM / 16; n++) octets.of(lane)[n] = read(lane, n / (DIM / 32), n % (DIM / 32));
        }
    }

    // Octet `j` of line 8 eight + g.
    MEMBER Octet get(u32 lane, u32 eight, u32 j) {
        return IS_HELD ? octets.of(lane)[eight * (DIM / 32) + j] : read(lane, eight, j);
    }

    MEMBER Octet read(u32 lane, u32 eight, u32 j) const {
        return octet_at(from + (8 * eight + lane / 4) * DIM + 32 * j + lane % 4 * 8);
    }
};

// Sums of M times 16 lines with 32 lines: as squares of 16 by 8.
template <u32 M> struct LineProducts {
    Sums squares[M][4];
};

// What an instruction takes of octet `n`.
template <u32 N> DEVICE RightFactor right_factor(Lanes<Octet, N>& octets, u32 n, u32 step) {
    RightFactor factor;
    EACH_LANE(lane) {
        UNROLLED for (u32 i = 0; i < 2; i++) factor.of(lane)[i] = octets.of(lane)[n].pairs[2 * step + i];
    }
    return factor;
}

// products += left right^T, the 32 lines of the right factor lying from `right` on
template <u32 DIM, u32 M, bool IS_HELD>
DEVICE void add_products(LineProducts<M>& products, LeftLines<DIM, M, IS_HELD>& left, const u16* right) {
    UNROLLED for (u32 j = 0; j < DIM / 32; j++) {
        Lanes<Octet, 2 * M> of_left;
        EACH_LANE(lane) {
            UNROLLED for (u32 eight = 0; eight < 2 * M; eight++) of_left.of(lane)[eight] = left.get(lane, eight, j);
        }
        Lanes<Octet, 4> of_right;
        EACH_LANE(lane) {
            UNROLLED for (u32 t = 0; t < 4; t++) {
                of_right.of(lane)[t] = octet_at(right + line_of(t, lane / 4) * DIM + 32 * j + lane % 4 * 8);
            }
        }
        // Neighbouring instructions add to different squares: none waits for the one before.
        UNROLLED for (u32 step = 0; step < STEPS; step++) {
            UNROLLED for (u32 m = 0; m < M; m++) {
                LeftFactor a;
                EACH_LANE(lane) {
                    UNROLLED for (u32 i = 0; i < 4; i++) {
                        a.of(lane)[i] = of_left.of(lane)[2 * m + i % 2].pairs[2 * step + i / 2];
                    }
                }
                UNROLLED for (u32 t = 0; t < 4; t++) {
                    RightFactor b = right_factor(of_right, t, step);
                    multiply_add(products.squares[m][t], a, b);
                }
            }
        }
    }
}

// Calls f(eight, column, value) for what a lane has of products: of line 8 eight + g, by reference.
template <u32 M, class F> DEVICE void each_product(LineProducts<M>& products, u32 lane, F f) {
    UNROLLED for (u32 m = 0; m < M; m++) {
        UNROLLED for (u32 t = 0; t < 4; t++) {
            UNROLLED for (u32 i = 0; i < 4; i++) {
                f(2 * m + i / 2, lane % 4 * 8 + 2 * t + i % 2, products.squares[m][t].of(lane)[i]);
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

// sums += weights right, the weights being products, rounded; the right factor's 32 lines lie column by column from `right`
// on.
template <u32 DIM, u32 M>
DEVICE void add_weighted(LineSums<DIM, M>& sums, LineProducts<M>& weights, const u16* right) {
    LeftFactor factors[M][STEPS];
    EACH_LANE(lane) {
        UNROLLED for (u32 m = 0; m < M; m++) {
            UNROLLED for (u32 i = 0; i < 4 * STEPS; i++) {
                const float* pair = weights.squares[m][i / 2].of(lane) + i % 2 * 2;
                factors[m][i / 4].of(lane)[i % 4] = rounded_pair(pair[0], pair[1]);
            }
        }
    }
    constexpr u32 AT_ONCE = 4;
    UNROLLED for (u32 d = 0; d < DIM / 8; d += AT_ONCE) {
        Lanes<Octet, AT_ONCE> of_right;
        EACH_LANE(lane) {
            UNROLLED for (u32 n = 0; n < AT_ONCE; n++) {
                of_right.of(lane)[n] = octet_at(right + (8 * (d + n) + lane / 4) * RIGHT_LINES + lane % 4 * 8);
            }
        }
        UNROLLED for (u32 step = 0; step < STEPS; step++) {
            UNROLLED for (u32 n = 0; n < AT_ONCE; n++) {
                RightFactor b = right_factor(of_right, n, step);
                UNROLLED for (u32 m = 0; m < M; m++) multiply_add(sums.squares[m][d + n], factors[m][step], b);
            }
        }
    }
}
