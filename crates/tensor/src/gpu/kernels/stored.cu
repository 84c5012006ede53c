// Elements in whichever type they are stored in: conversions, constants, sums.
#include "common.cuh"

// Integers are copied, never converted.
KERNEL(convert, (Any to, ConstAny from, u64 first, Range range)) {
    u64 len = range.end - range.start;
    if (to.dtype == U32) {
        EACH(i, len) ((u32*)to.data)[first + i] = ((const u32*)from.data)[range.start + i];
        return;
    }
    // What is left of whole runs, one by one.
    u64 whole = first % RUN == 0 && range.start % RUN == 0 ? len / RUN * RUN : 0;
    EACH(run, whole / RUN) store_run(to, first + run * RUN, load_run<RUN>(from, range.start + run * RUN));
    EACH(i, len - whole) store(to, first + whole + i, load(from, range.start + whole + i));
}

KERNEL(fill, (Any to, float value, Range range)) {
    EACH(i, range.end - range.start) store(to, range.start + i, value);
}

KERNEL(count_up, (Span<u32> to, u32 first, u32 period)) {
    EACH(i, to.len) to.data[i] = first + (u32)(i % period);
}

KERNEL(put, (Any to, Span<const float> x, u32 accumulate)) {
    EACH(i, to.len) set_or_add(to, i, x.data[i], accumulate);
}

KERNEL(add_range, (Any to, Span<const float> x, u64 first, Range range)) {
    EACH(i, range.end - range.start) set_or_add(to, first + i, x.data[range.start + i], true);
}
