// The optimizer's arithmetic, in place, and sums of squares.
#include "common.cuh"
#include "rows.cuh"

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

// sums[place], an f64 in two halves, += the sum of x[range]^2, by one block: the sum has one order
KERNEL(add_squares, (Span<u32> sums, Span<const float> x, u64 place, Range range)) {
    SHARED(double, partial, MAX_THREADS);
    BLOCKS(only, 1) {
        const float* from = x.data + range.start;
        double sum = block_total(partial, range.end - range.start, [=](u64 i) { return (double)from[i] * from[i]; });
        THREADS {
            if (thread() == 0) {
                u32* halves = sums.data + 2 * place;
                u64 bits = bits_of(double_of((u64)halves[1] << 32 | halves[0]) + sum);
                halves[0] = (u32)bits;
                halves[1] = (u32)(bits >> 32);
            }
        }
    }
}
