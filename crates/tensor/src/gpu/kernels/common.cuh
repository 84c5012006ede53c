// The language that kernels are written in: CUDA C++17 of which a host compiler reads the same text (host.h).
//
//     KERNEL(scale, (Span<float> out, Span<const float> x, float factor, u32 accumulate)) {
//         EACH(i, out.len) set_or_add(out.data[i], x.data[i] * factor, accumulate);
//     }
//
// A body is that of one block. Threads appear in it in three ways only: the iterations of EACH; THREADS { ... }, the
// code of one thread up to a barrier; and WARPS { ... }, the code of one warp up to a barrier. What is declared outside
// is the same for all threads of a block; what threads tell each other lies in SHARED memory. Inside these loops there
// is no `break` and no `return`.
//
// A warp is 32 threads, its lanes. What each of them does stands in EACH_LANE(lane) { ... }, and what it holds is in
// Lanes: registers of one thread on a GPU, of all lanes on the host. Code of a warp does not ask for thread().
//
// Results depend neither on the number of blocks and threads, up to rounding, nor on timing: no atomics on floats.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Eight numbers of bf16, two in a word.
struct alignas(16) Octet {
    u32 pairs[4];
};

#ifdef __CUDACC_RTC__

#define DEVICE __device__ inline
#define KERNEL(name, params) extern "C" __global__ void name params

#define MEMBER __device__

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 block_count() { return gridDim.x; }
DEVICE u32 warp() { return threadIdx.x / 32; }
DEVICE u32 warps() { return blockDim.x / 32; }
DEVICE void barrier() { __syncthreads(); }
DEVICE bool note_work() { return true; }
DEVICE u32 exchange(u32* at, u32 value) { return atomicExch(at, value); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u64 bits_of(double x) { return __double_as_longlong(x); }
DEVICE double double_of(u64 bits) { return __longlong_as_double(bits); }

// `i` goes over 0..n, one thread an element.
#define EACH(i, n)                                                                                             \
    for (u64 i = (u64)block_index() * threads() + thread(), i##_end = (n); i < i##_end;                        \
         i += (u64)block_count() * threads())
// The code of one thread, then a barrier.
#define THREADS for (bool phase = true; phase; phase = false, barrier())
// The code of one warp, then a barrier; within it that of each lane.
#define WARPS THREADS
#define EACH_LANE(lane) for (u32 lane = threadIdx.x % 32, once = 1; once; once = 0)
// Before a loop whose unrolled code would take registers that more blocks can use, and before one whose index says which
// registers are meant.
#define ROLLED _Pragma("unroll 1")
#define UNROLLED _Pragma("unroll")
// Memory of a block, of whatever it last held.
#define SHARED(type, name, count) __shared__ type name[count]

// N values of each lane.
template <class T, u32 N> struct Lanes {
    T held[N];

    MEMBER T* of(u32) { return held; }
};

// What each warp keeps from one phase to the next.
template <class T> struct OfWarp {
    T held;

    MEMBER T& mine() { return held; }
};

// What lanes hold of [16, 16] and [16, 8] in bf16, two in a register, and of [16, 8] in f32.
typedef Lanes<u32, 4> LeftFactor;
typedef Lanes<u32, 2> RightFactor;
typedef Lanes<float, 4> Sums;

// sums += left right. All lanes of a warp come here together.
DEVICE void multiply_add(Sums& sums, const LeftFactor& left, const RightFactor& right) {
    float* d = sums.held;
    const u32 *a = left.held, *b = right.held;
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two numbers as bf16, to the nearest, ties to even: the first in the lower half.
DEVICE u32 rounded_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Begins a copy of an octet to shared memory. Copies are closed in groups; each thread awaits its own.
DEVICE void begin_copy(Octet* to, const Octet* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
DEVICE void close_copies() { asm volatile("cp.async.commit_group;"); }
DEVICE void await_copies_before_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Four squares of eight lines of eight numbers in shared memory: at(lane) is line lane % 8 of square lane / 8, and a lane
// gets a pair of each, of line lane / 4 and column lane % 4 * 2.
template <class At> DEVICE void load_squares(Lanes<u32, 4>& to, At at) {
    u32* x = to.held;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(at(threadIdx.x % 32)))
                 : "memory");
}
// The same with lines and columns exchanged.
template <class At> DEVICE void load_turned_squares(Lanes<u32, 4>& to, At at) {
    u32* x = to.held;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(at(threadIdx.x % 32)))
                 : "memory");
}

// To the last bit or two; nothing below the smallest normal number.
DEVICE float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// All `values` of a block as one, for all threads: within warps by shuffles, and then one warp's after the other.
template <class T, class Join> DEVICE T join_block(T* values, Join join) {
    T x = values[thread()];
    for (u32 far = 16; far > 0; far /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, far));
    // All have read theirs.
    barrier();
    if (thread() % 32 == 0) values[warp()] = x;
    barrier();
    x = values[0];
    for (u32 other = 1; other < warps(); other++) x = join(x, values[other]);
    // Nobody writes to `values` again before all have read the results.
    barrier();
    return x;
}

DEVICE bool any_of_lanes(Lanes<bool, 1>& flags) { return __any_sync(0xffffffffu, flags.held[0]); }

// Each value becomes that of all lanes of its group of `width` neighbours. All lanes of a warp come here together.
template <u32 N, class Join> DEVICE void join_lanes(Lanes<float, N>& values, u32 width, Join join) {
    UNROLLED for (u32 n = 0; n < N; n++) {
        for (u32 far = 1; far < width; far *= 2) {
            values.held[n] = join(values.held[n], __shfl_xor_sync(0xffffffffu, values.held[n], far));
        }
    }
}

#else
#include "host.h"
#endif

// The sum over the lanes of a group, and the largest of them.
template <u32 N> DEVICE void sum_over_lanes(Lanes<float, N>& values, u32 width) {
    join_lanes(values, width, [](float a, float b) { return a + b; });
}
template <u32 N> DEVICE void max_over_lanes(Lanes<float, N>& values, u32 width) {
    join_lanes(values, width, [](float a, float b) { return fmaxf(a, b); });
}

// `i` goes over 0..n, one block each.
#define BLOCKS(i, n) for (u64 i = block_index(), i##_end = (n); i < i##_end && note_work(); i += block_count())

// The most threads of a block; their number is a power of two, and at least a warp's.
constexpr u32 MAX_THREADS = 256;
// Place or index of what is nowhere.
constexpr u32 NOWHERE = 0xffffffffu;

// --- operands --------------------------------------------------------------------------------------------------------

// Elements of one type: `f32` and `u32` in the table of kernels.
template <class T> struct Span {
    T* data;
    u64 len;
};

enum Dtype : u32 { F32, BF16, U32 };

// Elements of either float type: `any` in the table of kernels.
struct Any {
    void* data;
    u64 len;
    u32 dtype;
};
struct ConstAny {
    const void* data;
    u64 len;
    u32 dtype;
};

DEVICE float widen(u16 bf16) { return float_of((u32)bf16 << 16); }

// To the nearest, ties to even.
DEVICE u16 round_to_bf16(float x) {
    u32 bits = bits_of(x);
    // Rounding could carry a NaN into infinity; setting its quiet bit keeps it one.
    if (x != x) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

DEVICE float load(ConstAny x, u64 i) {
    return x.dtype == BF16 ? widen(((const u16*)x.data)[i]) : ((const float*)x.data)[i];
}
DEVICE float load(Any x, u64 i) { return load(ConstAny{x.data, x.len, x.dtype}, i); }

DEVICE void store(Any to, u64 i, float x) {
    if (to.dtype == BF16) ((u16*)to.data)[i] = round_to_bf16(x);
    else ((float*)to.data)[i] = x;
}

// Set, or add to.
DEVICE void set_or_add(float& to, float x, u32 accumulate) { to = accumulate ? to + x : x; }
DEVICE void set_or_add(Any to, u64 i, float x, u32 accumulate) {
    store(to, i, accumulate ? load(to, i) + x : x);
}

// Elements that a thread takes at once where they lie at a multiple of as many: one access to memory brings them.
constexpr u32 RUN = 8;

template <u32 N> struct Numbers {
    float of[N];
};
struct alignas(16) Eight {
    float of[8];
};

template <u32 N> DEVICE Numbers<N> load_run(ConstAny x, u64 i) {
    Numbers<N> run;
    if (N == 1) {
        run.of[0] = load(x, i);
    } else if (x.dtype == BF16) {
        Octet octet = *(const Octet*)((const u16*)x.data + i);
        UNROLLED for (u32 n = 0; n < N; n++) {
            u32 pair = octet.pairs[n / 2];
            run.of[n] = float_of(n % 2 ? pair & 0xffff0000u : pair << 16);
        }
    } else {
        Eight eight = *(const Eight*)((const float*)x.data + i);
        UNROLLED for (u32 n = 0; n < N; n++) run.of[n] = eight.of[n];
    }
    return run;
}
template <u32 N> DEVICE Numbers<N> load_run(Any x, u64 i) { return load_run<N>(ConstAny{x.data, x.len, x.dtype}, i); }
template <u32 N> DEVICE Numbers<N> load_run(Span<const float> x, u64 i) { return load_run<N>(ConstAny{x.data, x.len, F32}, i); }

template <u32 N> DEVICE void store_run(Any to, u64 i, Numbers<N> run) {
    if (N == 1) {
        store(to, i, run.of[0]);
    } else if (to.dtype == BF16) {
        Octet octet;
        UNROLLED for (u32 n = 0; n < N; n += 2) octet.pairs[n / 2] = rounded_pair(run.of[n], run.of[n + 1 < N ? n + 1 : n]);
        *(Octet*)((u16*)to.data + i) = octet;
    } else {
        Eight eight;
        UNROLLED for (u32 n = 0; n < N; n++) eight.of[n] = run.of[n];
        *(Eight*)((float*)to.data + i) = eight;
    }
}

// How many elements a run has, as a type.
template <u32 N> struct RunOf {
    static constexpr u32 COUNT = N;
};

// Calls f(first, RunOf<N>()) for runs of n elements, of which `width`, which divides n, lie in a line: by eights where lines
// are whole eights, and otherwise one by one.
template <class F> DEVICE void each_run(u64 n, u64 width, F f) {
    if (width % RUN == 0) {
        EACH(i, n / RUN) f(i * RUN, RunOf<RUN>());
    } else {
        EACH(i, n) f(i, RunOf<1>());
    }
}

// An f64 in two halves: `f64` in the table of kernels.
DEVICE double load_double(Span<const u32> from, u64 i) {
    return double_of((u64)from.data[2 * i + 1] << 32 | from.data[2 * i]);
}
DEVICE void store_double(Span<u32> to, u64 i, double x) {
    to.data[2 * i] = (u32)bits_of(x);
    to.data[2 * i + 1] = (u32)(bits_of(x) >> 32);
}

// --- arguments: the fields of the Rust types of these names, in their order ------------------------------------------

struct Range {
    u64 start, end;
};
struct Pair {
    u64 a, b;
};
struct Width {
    u64 k, row;
};
struct ColumnRange {
    u64 of, first, count;
};
enum Pointwise : u32 { RELU, GELU, SIGMOID, SOFTPLUS };
enum NormMoments : u32 { CENTRED, PLAIN_MOMENTS };
enum Among : u32 { PLAIN, NORMALISED, SOFTMAX };
enum Reduction : u32 { SUM, MAX, MIN };
enum TurningPairs : u32 { HALVES, NEIGHBOURS };
struct AttentionSizes {
    u64 rows, seq, key_seq, heads, kv_heads, head_dim, value_dim, rotary_dim;
    TurningPairs pairs;
    float scale;
};
struct RelativeAttentionSizes {
    u64 seq, heads, head_dim, reach;
};
struct AdamW {
    float lr, beta1, beta2, eps, weight_decay, correct1, correct2, gradient_scale;
};
struct Strips {
    u64 first, stride, count, len;
};
struct RowGroup {
    Span<const u32> rows;
    Span<const double> elsewhere;
    float weight;
    double share;
};
// `&RowIds` is a Span<const Range> of its runs, `&[usize]` a Span<const u64>, `&[RowGroup]` a Span<const RowGroup>.

// --- draws -----------------------------------------------------------------------------------------------------------

struct Draws {
    u32 key[2], stream[2];
};

// Philox 4x32 with ten rounds (Salmon et al., SC 2011): the bits of `Draws::bits`.
DEVICE u32 draw_bits(Draws draws, u64 index) {
    u64 at = index >> 2;
    u32 c[4] = {(u32)at, (u32)(at >> 32), draws.stream[0], draws.stream[1]}, key[2] = {draws.key[0], draws.key[1]};
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)c[0] * 0xD2511F53u, b = (u64)c[2] * 0xCD9E8D57u;
        u32 next[4] = {(u32)(b >> 32) ^ c[1] ^ key[0], (u32)b, (u32)(a >> 32) ^ c[3] ^ key[1], (u32)a};
        for (int i = 0; i < 4; i++) c[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return c[index & 3];
}

// Uniform in [0, 1) with 24 bits.
DEVICE float draw_uniform(Draws draws, u64 index) {
    return (float)(draw_bits(draws, index) >> 8) * (1.0f / 16777216.0f);
}

// --- reductions over a block's threads -------------------------------------------------------------------------------

DEVICE float infinity() { return float_of(0x7f800000u); }
template <class T> DEVICE T least(T a, T b) { return b < a ? b : a; }
template <class T> DEVICE T most(T a, T b) { return a < b ? b : a; }

// The sum of `values`, shared memory with an element of each thread, which it overwrites. The order of additions is fixed by
// the number of threads.
template <class T> DEVICE T block_sum(T* values) {
    return join_block(values, [](T a, T b) { return a + b; });
}

// Likewise the largest.
template <class T> DEVICE T block_max(T* values) {
    return join_block(values, [](T a, T b) { return most(a, b); });
}
