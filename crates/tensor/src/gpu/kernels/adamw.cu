// The optimizer's arithmetic, in place, and sums of squares.
#include "common.cuh"

// weights[first + i] by gradient[i]. Strips of state are m, v and, where weights are bf16, the master that is rounded
// to them.
DEVICE void update(Any weights, u64 first, float* state, const float* gradient, AdamW rule, Strips strips) {
    float correct1 = 1.0f / (float)(1.0 - pow((double)rule.beta1, (double)rule.step));
    float correct2 = 1.0f / (float)(1.0 - pow((double)rule.beta2, (double)rule.step));
    float keep = 1.0f - rule.lr * rule.weight_decay;
    float *m = state + strips.first, *v = m + strips.stride;
    float* w = weights.dtype == BF16 ? v + strips.stride : (float*)weights.data + first;
    EACH(i, strips.len) {
        float g = gradient[i] * rule.gradient_scale;
        m[i] = rule.beta1 * m[i] + (1.0f - rule.beta1) * g;
        v[i] = rule.beta2 * v[i] + (1.0f - rule.beta2) * g * g;
        float step = m[i] * correct1 / (sqrtf(v[i] * correct2) + rule.eps);
        w[i] = w[i] * keep - rule.lr * step;
        if (weights.dtype == BF16) store(weights, first + i, w[i]);
    }
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

// The CPU's order of additions, so that a norm has the same bits wherever its parts are summed: blocks of so many
// elements, in each as many sums side by side, then what is left over and these sums, then the blocks.
constexpr u64 BLOCK = 1 << 14;
constexpr u64 LANES = 16;

DEVICE double square(float x) { return (double)x * x; }

// The sum of squares that a lane of a block of `len` elements has
DEVICE double lane_sum(const float* from, u64 len, u64 lane) {
    double sum = 0.0;
    for (u64 i = lane; i < len / LANES * LANES; i += LANES) sum += square(from[i]);
    return sum;
}

DEVICE double block_of_lanes(const float* from, u64 len, const double* lanes) {
    double rest = 0.0, sum = 0.0;
    for (u64 i = len / LANES * LANES; i < len; i++) rest += square(from[i]);
    for (u64 lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return rest + sum;
}

// sums[place], an f64 in two halves, += the sum of x[range]^2, by one block
KERNEL(add_squares, (Span<u32> sums, Span<const float> x, u64 place, Range range)) {
    SHARED(double, lanes, MAX_THREADS);
    SHARED(double, total, 1);
    BLOCKS(only, 1) {
        const float* from = x.data + range.start;
        u64 len = range.end - range.start, count = (len + BLOCK - 1) / BLOCK;
        THREADS {
            if (thread() == 0) total[0] = 0.0;
        }
        for (u64 first = 0; first < count; first += MAX_THREADS / LANES) {
            u64 here = least<u64>(count - first, MAX_THREADS / LANES);
            THREADS {
                for (u64 i = thread(); i < here * LANES; i += threads()) {
                    u64 start = (first + i / LANES) * BLOCK;
                    lanes[i] = lane_sum(from + start, least(len - start, BLOCK), i % LANES);
                }
            }
            THREADS {
                for (u64 i = 0; thread() == 0 && i < here; i++) {
                    u64 start = (first + i) * BLOCK;
                    total[0] += block_of_lanes(from + start, least(len - start, BLOCK), lanes + i * LANES);
                }
            }
        }
        THREADS {
            if (thread() == 0) {
                u32* halves = sums.data + 2 * place;
                u64 bits = bits_of(double_of((u64)halves[1] << 32 | halves[0]) + total[0]);
                halves[0] = (u32)bits;
                halves[1] = (u32)(bits >> 32);
            }
        }
    }
}
