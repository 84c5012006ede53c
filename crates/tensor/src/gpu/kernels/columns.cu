// Columns of a matrix, and those of two matrices side by side.
#include "common.cuh"
#include "rows.cuh"

// out [R, count] (+)= columns of x [R, of]
KERNEL(columns, (Any out, ConstAny x, ColumnRange columns, u32 accumulate)) {
    EACH(i, out.len) {
        Cell cell = cell_of(i, columns.count);
        set_or_add(out, i, load(x, cell.row * columns.of + columns.first + cell.column), accumulate);
    }
}

// columns of d [R, of] (+)= g [R, count], the other columns becoming zeros without `accumulate`
KERNEL(columns_back, (Span<float> d, Span<const float> g, ColumnRange columns, u32 accumulate)) {
    EACH(i, d.len) {
        Cell cell = cell_of(i, columns.of);
        if (cell.column >= columns.first && cell.column < columns.first + columns.count) {
            set_or_add(d.data[i], g.data[cell.row * columns.count + cell.column - columns.first], accumulate);
        } else if (!accumulate) {
            d.data[i] = 0.0f;
        }
    }
}

// out [R, a + b]: row r of x [R, a], behind it row r / repeats of other [R / repeats, b]
KERNEL(beside, (Any out, ConstAny x, ConstAny other, Pair widths, u64 repeats)) {
    u64 width = widths.a + widths.b;
    EACH(i, out.len) {
        Cell cell = cell_of(i, width);
        store(out, i, cell.column < widths.a ? load(x, cell.row * widths.a + cell.column)
                                             : load(other, cell.row / repeats * widths.b + cell.column - widths.a));
    }
}

// d [R, count] (+)= the sums of columns of g [R repeats, of] over every `repeats` rows
KERNEL(beside_back, (Span<float> d, Span<const float> g, ColumnRange columns, u64 repeats, u32 accumulate)) {
    EACH(i, d.len) {
        Cell cell = cell_of(i, columns.count);
        u64 row = cell.row * repeats, column = columns.first + cell.column;
        float sum = accumulate ? d.data[i] : 0.0f;
        for (u64 r = row; r < row + repeats; r++) sum += g.data[r * columns.of + column];
        d.data[i] = sum;
    }
}
