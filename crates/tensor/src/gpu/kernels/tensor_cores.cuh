// Products of bf16 by tensor cores. A warp multiplies [16, 16] by [16, 8] and adds to [16, 8] of f32; its lanes hold
// the three matrices together. Which lane holds what, the PTX ISA says at `mma.m16n8k16`. The loads and stores here are
// the same text for a GPU and for the host, and `multiply_add` is the instruction on either.
//
// Factors come as pairs: a word with a number and the next along the dimension that is summed over, the first in its
// lower half.

#pragma once

// Lines and columns of results that a warp makes at once, by two instructions of the same lines, and terms that an
// instruction adds to each.
constexpr u32 SQUARE = 16;

// The multiple of SQUARE that has room for `n`.
template <class T> DEVICE T whole_squares(T n) { return (n + SQUARE - 1) / SQUARE * SQUARE; }

// Two numbers of bf16 as they are stored: what f32 has behind is zero.
DEVICE u32 pair_of(float first, float second) { return bits_of(first) >> 16 | (bits_of(second) & 0xffff0000u); }

// pair(row, k) of 16 rows and 16 numbers each.
template <class Pair> DEVICE void load_left(LeftFactor& to, Pair pair) {
    EACH_LANE(lane) {
        u32 row = lane / 4, k = lane % 4 * 2, *held = to.of(lane);
        held[0] = pair(row, k);
        held[1] = pair(row + 8, k);
        held[2] = pair(row, k + 8);
        held[3] = pair(row + 8, k + 8);
    }
}

// pair(k, column) of 8 columns and 16 numbers each.
template <class Pair> DEVICE void load_right(RightFactor& to, Pair pair) {
    EACH_LANE(lane) {
        u32 column = lane / 4, k = lane % 4 * 2, *held = to.of(lane);
        held[0] = pair(k, column);
        held[1] = pair(k + 8, column);
    }
}

// The factor of eight columns that lies in two of four squares: the first two, or the others.
DEVICE RightFactor half_of(Lanes<u32, 4>& squares, u32 half) {
    RightFactor factor;
    EACH_LANE(lane) {
        for (u32 i = 0; i < 2; i++) factor.of(lane)[i] = squares.of(lane)[2 * half + i];
    }
    return factor;
}

// Lets put(row, column, sum) have 16 rows of 8 columns.
template <class Put> DEVICE void put_sums(Sums& sums, Put put) {
    EACH_LANE(lane) {
        u32 row = lane / 4, column = lane % 4 * 2;
        float* held = sums.of(lane);
        put(row, column, held[0]);
        put(row, column + 1, held[1]);
        put(row + 8, column, held[2]);
        put(row + 8, column + 1, held[3]);
    }
}

// Lets put(row, column, sum) have the elements of a product of `rows` rows and `columns` columns, sums of `depth`
// terms; all three are multiples of SQUARE. a(row, k) and b(k, column) are pairs of numbers k and k + 1, k being even.
template <class A, class B, class Put>
DEVICE void multiply_pairs(u32 rows, u32 columns, u32 depth, A a, B b, Put put) {
    WARPS {
        for (u32 square = warp(); square < rows / SQUARE * (columns / SQUARE); square += warps()) {
            u32 row = square / (columns / SQUARE) * SQUARE, column = square % (columns / SQUARE) * SQUARE;
            Sums sums[2] = {};
            ROLLED for (u32 k = 0; k < depth; k += SQUARE) {
                LeftFactor left;
                load_left(left, [&](u32 r, u32 n) { return a(row + r, k + n); });
                for (u32 half = 0; half < 2; half++) {
                    RightFactor right;
                    load_right(right, [&](u32 n, u32 c) { return b(k + n, column + 8 * half + c); });
                    multiply_add(sums[half], left, right);
                }
            }
            for (u32 half = 0; half < 2; half++) {
                put_sums(sums[half], [&](u32 r, u32 c, float sum) { put(row + r, column + 8 * half + c, sum); });
            }
        }
    }
}
