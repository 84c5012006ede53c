// Sums, factors, dropout, weighted sums to a scalar.
#include "common.cuh"
#include "rows.cuh"

KERNEL(sum, (Any out, ConstAny x, ConstAny y)) {
    EACH(i, out.len) store(out, i, load(x, i) + load(y, i));
}

KERNEL(scale, (Span<float> out, Span<const float> x, float factor, u32 accumulate)) {
    EACH(i, out.len) set_or_add(out.data[i], x.data[i] * factor, accumulate);
}

KERNEL(scale_by, (Span<float> out, Span<const float> x, Span<const float> factor, u32 accumulate)) {
    EACH(i, out.len) set_or_add(out.data[i], x.data[i] * factor.data[0], accumulate);
}

KERNEL(scale_in_place, (Span<float> x, Span<const float> factor, float scale)) {
    float alpha = scale * factor.data[0];
    EACH(i, x.len) x.data[i] *= alpha;
}

KERNEL(multiply, (Span<float> out, Span<const float> x, Span<const float> y, u32 accumulate)) {
    EACH(i, out.len) set_or_add(out.data[i], x.data[i] * y.data[i], accumulate);
}

KERNEL(drop_elements, (Span<float> out, Span<const float> x, float p, Draws draws, Span<const Range> runs,
                       u32 accumulate)) {
    u64 rows = 0;
    for (u64 run = 0; run < runs.len; run++) rows += runs.data[run].end - runs.data[run].start;
    u64 width = rows ? x.len / rows : 0;
    float keep = 1.0f / (1.0f - p);
    EACH(i, rows * width) {
        // Runs are few; to find the row's among them costs less than the draw.
        u64 row = i / width, run = 0;
        while (row >= runs.data[run].end - runs.data[run].start) {
            row -= runs.data[run].end - runs.data[run].start;
            run++;
        }
        u64 number = (runs.data[run].start + row) * width + i % width;
        set_or_add(out.data[i], draw_uniform(draws, number) < p ? 0.0f : x.data[i] * keep, accumulate);
    }
}

// sums: those of x y, in f64, over `length` elements each
KERNEL(dots, (Span<u32> sums, Span<const float> x, Span<const float> y, u64 length)) {
    sum_stretches(sums, length, x.len, [=](u64 i) { return (double)x.data[i] * y.data[i]; });
}

// out[0] = scale times the sum of sums, which are few: by one block, so that the order is one
KERNEL(add_up, (Span<float> out, Span<const u32> sums, float scale)) {
    SHARED(double, partial, MAX_THREADS);
    BLOCKS(only, 1) {
        double sum = block_total(partial, sums.len / 2, [=](u64 i) { return load_double(sums, i); });
        THREADS {
            if (thread() == 0) out.data[0] = (float)(sum * scale);
        }
    }
}
