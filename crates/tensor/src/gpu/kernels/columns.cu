// Columns of a matrix, and those of two matrices side by side.
#include "common.cuh"

// out [R, count] (+)= columns of x [R, of]
KERNEL(columns, (Span<float> out, Span<const float> x, ColumnRange columns, u32 accumulate)) {
    EACH(i, out.len) {
        u64 at = i / columns.count * columns.of + columns.first + i % columns.count;
        set_or_add(out.data[i], x.data[at], accumulate);
    }
}

// columns of d [R, of] (+)= g [R, count], the other columns becoming zeros without `accumulate`
KERNEL(columns_back, (Span<float> d, Span<const float> g, ColumnRange columns, u32 accumulate)) {
    EACH(i, d.len) {
        u64 row = i / columns.of, column = i % columns.of;
        if (column >= columns.first && column < columns.first + columns.count) {
            set_or_add(d.data[i], g.data[row * columns.count + column - columns.first], accumulate);
        } else if (!accumulate) {
            d.data[i] = 0.0f;
        }
    }
}

// out [R, a + b]: row r of x [R, a], behind it row r / repeats of other [R / repeats, b]
KERNEL(beside, (Span<float> out, Span<const float> x, Span<const float> other, Pair widths, u64 repeats)) {
    u64 width = widths.a + widths.b;
    EACH(i, out.len) {
        u64 row = i / width, column = i % width;
        out.data[i] = column < widths.a ? x.data[row * widths.a + column]
                                        : other.data[row / repeats * widths.b + column - widths.a];
    }
}

// d [R, count] (+)= the sums of columns of g [R repeats, of] over every `repeats` rows
KERNEL(beside_back, (Span<float> d, Span<const float> g, ColumnRange columns, u64 repeats, u32 accumulate)) {
    EACH(i, d.len) {
        u64 row = i / columns.count * repeats, column = columns.first + i % columns.count;
        float sum = accumulate ? d.data[i] : 0.0f;
        for (u64 r = row; r < row + repeats; r++) sum += g.data[r * columns.of + column];
        d.data[i] = sum;
    }
}
