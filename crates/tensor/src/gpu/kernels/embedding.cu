// Rows of a table by id.
#include "common.cuh"
#include "rows.cuh"

// out [T, width]: rows of the table [N, width] whose ids are `first` to `first + N - 1`, zeros for other ids
KERNEL(look_up, (Any out, ConstAny table, Span<const u32> ids, u64 first, u64 width)) {
    u64 rows = width ? table.len / width : 0;
    EACH(i, out.len) {
        Cell cell = cell_of(i, width);
        // An id before the first wraps around to one far beyond the last.
        u64 row = ids.data[cell.row] - first;
        store(out, i, row < rows ? load(table, row * width + cell.column) : 0.0f);
    }
}

// table [N, width] (+)= the sums of the rows of g [T, width] by id. Sums are f32 and are rounded once.
KERNEL(look_up_back, (Any table, Span<const float> g, Span<const u32> ids, Span<const u32> heads, Span<const u32> next,
                      u64 first, u64 width, u32 accumulate)) {
    sum_sources(
        table, width, {heads, next}, accumulate,
        [=](u64 source) { return (u64)ids.data[source] - first; },
        [=](auto& sums, u64 source, u64 column) {
            add_run(sums, 1.0f, ConstAny{g.data, g.len, F32}, source * width + column);
        });
}
