// The optimizer's arithmetic, in place, and sums of squares.
#include "common.cuh"

// weights[first + i] by gradient[i]. Strips of state are m, v and, where weights are bf16, the master that is rounded
// to them.
DEVICE void update(Any weights, u64 first, float* state, const float* gradient, AdamW rule, Strips strips) {
    float keep = 1.0f - rule.lr * rule.weight_decay;
    float *of_m = state + strips.first, *of_v = of_m + strips.stride;
    bool has_master = weights.dtype == BF16;
    float* of_w = has_master ? of_v + strips.stride : (float*)weights.data + first;
    // Whatever one of them begins with, the others do, too, or runs are of one element.
    u64 places = first | strips.first | strips.stride | (u64)gradient / sizeof(float) | strips.len;
    each_run(strips.len, places % RUN ? 1 : RUN, [=](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        auto at = [=](float* from) { return Any{from, strips.len, F32}; };
        Numbers<N> g = load_run<N>(Span<const float>{gradient, strips.len}, i);
        Numbers<N> m = load_run<N>(at(of_m), i), v = load_run<N>(at(of_v), i), w = load_run<N>(at(of_w), i);
        UNROLLED for (u32 n = 0; n < N; n++) {
            float slope = g.of[n] * rule.gradient_scale;
            m.of[n] = rule.beta1 * m.of[n] + (1.0f - rule.beta1) * slope;
            v.of[n] = rule.beta2 * v.of[n] + (1.0f - rule.beta2) * slope * slope;
            float step = m.of[n] * rule.correct1 / (sqrtf(v.of[n] * rule.correct2) + rule.eps);
            w.of[n] = w.of[n] * keep - rule.lr * step;
        }
        store_run(at(of_m), i, m);
        store_run(at(of_v), i, v);
        store_run(at(of_w), i, w);
        if (has_master) store_run(weights, first + i, w);
    });
}

// One step (Loshchilov and Hutter 2019) of weights from firsts.a on by the gradient from firsts.b on
KERNEL(adamw, (Any weights, Span<float> state, Span<const float> gradient, AdamW rule, Pair firsts, Strips strips)) {
    update(weights, firsts.a, state.data, gradient.data + firsts.b, rule, strips);
}

// The same with the gradient as the last strip
KERNEL(adamw_of_strip, (Any weights, Span<float> state, AdamW rule, u64 first, Strips strips)) {
    const float* gradient = state.data + strips.first + (strips.count - 1) * strips.stride;
    update(weights, first, state.data, gradient, rule, strips);
}

// The CPU's order of additions, so that a norm has the same bits wherever its parts are summed: in a block of elements as
// many sums side by side, then what is left over and these sums; then the blocks.
constexpr u64 LANES = 16;
// Elements that a lane has on their way from memory at once.
constexpr u32 READ_AHEAD = 16;

DEVICE double square(float x) { return (double)x * x; }

// The sum of a lane's squares of so many elements, which are whole lanes.
DEVICE double lane_squares(const float* from, u64 lane, u64 whole) {
    double sum = 0.0;
    u64 i = lane;
    for (; i + (READ_AHEAD - 1) * LANES < whole; i += READ_AHEAD * LANES) {
        float x[READ_AHEAD];
        UNROLLED for (u32 n = 0; n < READ_AHEAD; n++) x[n] = from[i + n * LANES];
        UNROLLED for (u32 n = 0; n < READ_AHEAD; n++) sum += square(x[n]);
    }
    for (; i < whole; i += LANES) sum += square(from[i]);
    return sum;
}

// sums: those of the squares of x[range], over `length` elements each, of which a thread has a lane
KERNEL(block_squares, (Span<u32> sums, Span<const float> x, Range range, u64 length)) {
    SHARED(double, lanes, MAX_THREADS);
    u64 count = sums.len / 2, at_once = threads() / LANES;
    auto first_of = [=](u64 block) { return range.start + block * length; };
    auto length_of = [=](u64 block) { return least(range.end - first_of(block), length); };
    BLOCKS(group, (count + at_once - 1) / at_once) {
        THREADS {
            u64 block = group * at_once + thread() / LANES;
            bool is_one = block < count;
            u64 whole = is_one ? length_of(block) / LANES * LANES : 0;
            lanes[thread()] = is_one ? lane_squares(x.data + first_of(block), thread() % LANES, whole) : 0.0;
        }
        THREADS {
            u64 block = group * at_once + thread() / LANES;
            if (thread() % LANES == 0 && block < count) {
                const float* from = x.data + first_of(block);
                u64 len = length_of(block);
                double rest = 0.0, sum = 0.0;
                for (u64 i = len / LANES * LANES; i < len; i++) rest += square(from[i]);
                for (u64 lane = 0; lane < LANES; lane++) sum += lanes[thread() + lane];
                store_double(sums, block, rest + sum);
            }
        }
    }
}

// sums[place] += the sums of tiles of `length` parts each, one tile after the other. Each thread adds up the parts of a tile;
// then one adds these sums.
KERNEL(add_in_order, (Span<u32> sums, Span<const u32> parts, u64 place, u64 length)) {
    SHARED(double, tiles, MAX_THREADS);
    SHARED(double, total, 1);
    BLOCKS(only, 1) {
        u64 count = parts.len / 2;
        THREADS {
            if (thread() == 0) total[0] = load_double({sums.data, sums.len}, place);
        }
        for (u64 first = 0; first < count; first += threads() * length) {
            THREADS {
                double sum = 0.0;
                u64 start = first + thread() * length, end = least(start + length, count);
                for (u64 part = start; part < end; part++) sum += load_double(parts, part);
                tiles[thread()] = sum;
            }
            THREADS {
                if (thread() == 0) {
                    double sum = total[0];
                    for (u64 tile = 0; tile < threads() && first + tile * length < count; tile++) sum += tiles[tile];
                    total[0] = sum;
                }
            }
        }
        THREADS {
            if (thread() == 0) store_double(sums, place, total[0]);
        }
    }
}
