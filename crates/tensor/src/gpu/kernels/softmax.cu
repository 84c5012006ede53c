// Softmax and log-sum-exp, a block a row.
#include "common.cuh"
#include "rows.cuh"

// The largest of x[i], i < n, for all threads.
DEVICE float block_top(float* partial, const float* x, u64 n) {
    THREADS {
        float top = -infinity();
        for (u64 i = thread(); i < n; i += threads()) top = fmaxf(top, x[i]);
        partial[thread()] = top;
    }
    return block_max(partial);
}

// out [R, width] = the softmax of each row of x
KERNEL(softmax, (Span<float> out, Span<const float> x, u64 width)) {
    SHARED(float, partial, MAX_THREADS);
    BLOCKS(row, width ? out.len / width : 0) {
        const float* line = x.data + row * width;
        float top = block_top(partial, line, width);
        float sum = block_total(partial, width, [=](u64 i) { return expf(line[i] - top); });
        float inverse = 1.0f / sum;
        THREADS {
            for (u64 i = thread(); i < width; i += threads()) {
                out.data[row * width + i] = expf(line[i] - top) * inverse;
            }
        }
    }
}

// dx [R, width] (+)= y (g - sum y g) of each row
KERNEL(softmax_back, (Span<float> dx, Span<const float> y, Span<const float> g, u64 width, u32 accumulate)) {
    SHARED(float, partial, MAX_THREADS);
    BLOCKS(row, width ? dx.len / width : 0) {
        const float *line = y.data + row * width, *slopes = g.data + row * width;
        float inner = block_total(partial, width, [=](u64 i) { return line[i] * slopes[i]; });
        THREADS {
            for (u64 i = thread(); i < width; i += threads()) {
                set_or_add(dx.data[row * width + i], line[i] * (slopes[i] - inner), accumulate);
            }
        }
    }
}

// lse [R] = ln sum exp of each row of x [R, width]
KERNEL(log_sum_exp, (Span<float> lse, Span<const float> x, u64 width)) {
    SHARED(float, partial, MAX_THREADS);
    BLOCKS(row, lse.len) {
        const float* line = x.data + row * width;
        float top = block_top(partial, line, width);
        float sum = block_total(partial, width, [=](u64 i) { return expf(line[i] - top); });
        THREADS {
            if (thread() == 0) lse.data[row] = top + logf(sum);
        }
    }
}

// sums: those of weights lse^2, in f64, over `length` rows each
KERNEL(squares_by_weight, (Span<u32> sums, Span<const float> lse, Span<const float> weights, u64 length)) {
    sum_stretches(sums, length, lse.len, [=](u64 i) { return (double)lse.data[i] * lse.data[i] * weights.data[i]; });
}

// dx [R, width] (+)= 2 lse weights g[0] exp(x - lse)
KERNEL(weighted_squares_back, (Span<float> dx, Span<const float> x, Span<const float> lse, Span<const float> weights,
                               Span<const float> g, u64 width, u32 accumulate)) {
    EACH(i, dx.len) {
        u64 row = cell_of(i, width).row;
        float factor = 2.0f * lse.data[row] * weights.data[row] * g.data[0];
        set_or_add(dx.data[i], factor * expf(x.data[i] - lse.data[row]), accumulate);
    }
}
