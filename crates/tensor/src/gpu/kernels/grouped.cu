// Biases of experts and their gradients: rows are sorted by expert, `counts[e]` of expert e one after the other.
#include "common.cuh"
#include "rows.cuh"

// y [R, C]: each row becomes its expert's bias [E, C]
KERNEL(grouped_fill, (Any y, ConstAny bias, Span<const u64> counts)) {
    u64 width = counts.len ? bias.len / counts.len : 0;
    BLOCKS(row, width ? y.len / width : 0) {
        u64 expert = 0, end = counts.data[0];
        while (row >= end) end += counts.data[++expert];
        THREADS {
            for (u64 c = thread(); c < width; c += threads()) store(y, row * width + c, load(bias, expert * width + c));
        }
    }
}

// db [E, C] (+)= the sum of each expert's rows of g [R, C]
KERNEL(grouped_bias_gradient, (Span<float> db, Span<const float> g, Span<const u64> counts, u32 accumulate)) {
    u64 width = counts.len ? db.len / counts.len : 0, strips = strips_of(width);
    BLOCKS(task, counts.len * strips) {
        u64 expert = task / strips, first = 0;
        for (u64 e = 0; e < expert; e++) first += counts.data[e];
        const float* rows = g.data + first * width;
        sum_strip(db.data + expert * width, task % strips, {0, counts.data[expert]}, width, accumulate,
                  [=](u64 row, u64 c) { return rows[row * width + c]; });
    }
}
