// What stands for a GPU where a host compiler compiles kernels: blocks run one after the other, and so do the threads
// of each between two barriers.

#pragma once
#include <math.h>
#include <string.h>

#define DEVICE static inline
#define MEMBER

// Of the block that runs on this thread of the host: ranks launch at the same time.
namespace simulated {
static thread_local u32 block, blocks, thread, threads, warp;
// Whether a loop over all blocks has given this one anything to do.
static thread_local bool is_busy;

template <u64... Is> struct Places {};
template <u64 N, u64... Is> struct PlacesTo : PlacesTo<N - 1, N - 1, Is...> {};
template <u64... Is> struct PlacesTo<0, Is...> {
    typedef Places<Is...> list;
};

template <class... Params, u64... Is>
u32 run(void (*body)(Params...), void** arguments, u32 grid, u32 group, Places<Is...>) {
    blocks = grid;
    threads = group;
    u32 busy = 0;
    for (block = 0; block < blocks; block++) {
        is_busy = false;
        body(*(Params*)arguments[Is]...);
        busy += is_busy;
    }
    return busy;
}

// Bytes of each parameter, for who keeps them until the kernel runs. How many there are.
template <class... Params> u32 sizes(void (*)(Params...), u32* to) {
    const u32 bytes[] = {(u32)sizeof(Params)...};
    for (u32 i = 0; i < sizeof...(Params); i++) to[i] = bytes[i];
    return sizeof...(Params);
}

// Whether there is a thread whose turn comes after so many.
inline bool turn(u32 before) {
    thread = block % 2 ? threads - 1 - before : before;
    return before < threads;
}

// Likewise a warp.
inline bool warp_turn(u32 before) {
    u32 warps = threads / 32;
    warp = block % 2 ? warps - 1 - before : before;
    return before < warps;
}

template <class T> void forget(T* memory, u64 count) { memset((void*)memory, 0xff, count * sizeof(T)); }
}  // namespace simulated

// The body as a function of one block, and what runs all blocks and says how many were busy. That has a name of its own: C has a `select`.
#define KERNEL(name, params)                                                                                   \
    static void name##_block params;                                                                           \
    template <class... Params> static auto name##_places(void (*)(Params...))                                  \
        -> typename simulated::PlacesTo<sizeof...(Params)>::list;                                              \
    extern "C" u32 simulated_##name(void** arguments, u32 blocks, u32 threads) {                               \
        auto places = decltype(name##_places(name##_block))();                                                 \
        return simulated::run(name##_block, arguments, blocks, threads, places);                               \
    }                                                                                                          \
    extern "C" u32 parameters_of_##name(u32* sizes) { return simulated::sizes(name##_block, sizes); }          \
    static void name##_block params

DEVICE u32 thread() { return simulated::thread; }
DEVICE u32 threads() { return simulated::threads; }
DEVICE u32 block_index() { return simulated::block; }
DEVICE u32 block_count() { return simulated::blocks; }
DEVICE u32 warp() { return simulated::warp; }
DEVICE u32 warps() { return simulated::threads / 32; }
DEVICE void barrier() {}
DEVICE bool note_work() { return simulated::is_busy = true; }
DEVICE u32 exchange(u32* at, u32 value) {
    u32 before = *at;
    *at = value;
    return before;
}

template <class To, class From> static inline To with_bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
DEVICE u32 bits_of(float x) { return with_bits_of<u32>(x); }
DEVICE float float_of(u32 bits) { return with_bits_of<float>(bits); }
DEVICE u64 bits_of(double x) { return with_bits_of<u64>(x); }
DEVICE double double_of(u64 bits) { return with_bits_of<double>(bits); }

// All threads of a block in turn, each time it comes to their elements.
#define EACH(i, n)                                                                                             \
    for (u64 i##_end = (n), i##_first = (u64)block_index() * threads(); i##_first < i##_end && note_work();    \
         i##_first += (u64)block_count() * threads())                                                          \
        for (u64 i = i##_first; i < i##_end && i < i##_first + threads(); i++)

// In odd blocks from the last thread to the first: code that needs threads in an order gives different results.
#define THREADS for (u32 turn = 0; simulated::turn(turn); turn++)

// Likewise warps. A warp's lanes are together at the end of EACH_LANE.
#define WARPS for (u32 turn = 0; simulated::warp_turn(turn); turn++)
#define EACH_LANE(lane) for (u32 lane = 0; lane < 32; lane++)

#define ROLLED
#define UNROLLED

// N values of each lane.
template <class T, u32 N> struct Lanes {
    T held[32][N];

    T* of(u32 lane) { return held[lane]; }
};

typedef Lanes<u32, 4> LeftFactor;
typedef Lanes<u32, 2> RightFactor;
typedef Lanes<float, 4> Sums;

// `mma.m16n8k16`, by the formulas of the PTX ISA for the row and column of element `i` of a lane. They are written down
// independently of the loads and stores in tensor_cores.cuh, whose mistakes thus give wrong products. Products of bf16
// are exact in f32; the order of their sum is the instruction's own.
DEVICE void multiply_add(Sums& sums, const LeftFactor& left, const RightFactor& right) {
    float a[16][16], b[16][8], d[16][8];
    auto half = [](const u32* held, u32 i) { return float_of(i % 2 ? held[i / 2] & 0xffff0000u : held[i / 2] << 16); };
    for (u32 lane = 0; lane < 32; lane++) {
        u32 group = lane >> 2, in_group = lane & 3;
        for (u32 i = 0; i < 8; i++) {
            u32 row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
            a[row][in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0)] = half(left.held[lane], i);
        }
        for (u32 i = 0; i < 4; i++) b[in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = half(right.held[lane], i);
        for (u32 i = 0; i < 4; i++) d[i < 2 ? group : group + 8][in_group * 2 + (i & 1)] = sums.held[lane][i];
    }
    for (u32 row = 0; row < 16; row++) {
        for (u32 k = 0; k < 16; k++) {
            for (u32 column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (u32 lane = 0; lane < 32; lane++) {
        u32 group = lane >> 2, in_group = lane & 3;
        for (u32 i = 0; i < 4; i++) sums.held[lane][i] = d[i < 2 ? group : group + 8][in_group * 2 + (i & 1)];
    }
}

// Two numbers as bf16: the first in the lower half.
DEVICE u16 round_to_bf16(float x);
DEVICE u32 rounded_pair(float first, float second) { return round_to_bf16(first) | (u32)round_to_bf16(second) << 16; }

// What each warp keeps from one phase to the next.
template <class T> struct OfWarp {
    T held[8];

    T& mine() { return held[warp()]; }
};

// Copies are done at once.
DEVICE void begin_copy(Octet* to, const Octet* from) { *to = *from; }
DEVICE void close_copies() {}
DEVICE void await_copies_before_last() {}

// `ldmatrix`: number `place` of eight lines of eight, at(lane) being line lane % 8 of square lane / 8.
template <class At> DEVICE u32 number_of_square(At at, u32 square, u32 line, u32 place) {
    return at(8 * square + line)->pairs[place / 2] >> place % 2 * 16 & 0xffff;
}
template <class At> DEVICE void load_squares(Lanes<u32, 4>& to, At at) {
    EACH_LANE(lane) {
        for (u32 square = 0; square < 4; square++) {
            u32 line = lane / 4, place = lane % 4 * 2;
            to.of(lane)[square] =
                number_of_square(at, square, line, place) | number_of_square(at, square, line, place + 1) << 16;
        }
    }
}
template <class At> DEVICE void load_turned_squares(Lanes<u32, 4>& to, At at) {
    EACH_LANE(lane) {
        for (u32 square = 0; square < 4; square++) {
            u32 place = lane / 4, line = lane % 4 * 2;
            to.of(lane)[square] =
                number_of_square(at, square, line, place) | number_of_square(at, square, line + 1, place) << 16;
        }
    }
}

DEVICE float power_of_2(float x) { return exp2f(x); }

// All `values` of a block as one, in a tree.
template <class T, class Join> DEVICE T join_block(T* values, Join join) {
    for (u32 half = threads() / 2; half > 0; half /= 2) {
        for (u32 i = 0; i < half; i++) values[i] = join(values[i], values[i + half]);
    }
    return values[0];
}

DEVICE bool any_of_lanes(Lanes<bool, 1>& flags) {
    bool any = false;
    EACH_LANE(lane) any |= flags.of(lane)[0];
    return any;
}

// Lanes exchange values as shuffles do, so that all of a group get the same.
template <u32 N, class Join> DEVICE void join_lanes(Lanes<float, N>& values, u32 width, Join join) {
    for (u32 far = 1; far < width; far *= 2) {
        Lanes<float, N> before = values;
        EACH_LANE(lane) {
            for (u32 n = 0; n < N; n++) {
                values.of(lane)[n] = join(before.of(lane)[n], before.of(lane ^ far)[n]);
            }
        }
    }
}

// Memory that nobody has written holds NaN.
#define SHARED(type, name, count)                                                                              \
    type name[count];                                                                                          \
    simulated::forget(name, count)
