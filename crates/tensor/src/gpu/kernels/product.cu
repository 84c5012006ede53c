// What goes with matrix products: biases and their gradients.
#include "common.cuh"
#include "rows.cuh"

// sums [parts, C] (+)= the sums of the columns of each part of the rows of x [rows, C]
KERNEL(column_sums, (Span<float> sums, Span<const float> x, u64 rows, u64 parts, u32 accumulate)) {
    u64 width = sums.len / parts;
    sum_columns(sums.data, parts, rows, width, accumulate, [=](u64 row, u64 c) { return x.data[row * width + c]; });
}

// out [rows, C] = row [C] in every row
KERNEL(fill_rows, (Any out, ConstAny row, u64 rows)) {
    EACH(i, rows * row.len) { store(out, i, load(row, cell_of(i, row.len).column)); }
}
