// What collectives make of the elements of several ranks.
#include "common.cuh"

// Of parts of `count` elements, one after the other, the reduction in their order: `count` elements from `first` on.
KERNEL(reduce, (Any out, ConstAny parts, u64 first, u64 count, u32 reduction)) {
    EACH(i, count) {
        float reduced = load(parts, i);
        for (u64 at = i + count; at < parts.len; at += count) {
            float next = load(parts, at);
            // A comparison with NaN is false.
            if (reduction == SUM) reduced += next;
            else if (next != next || (reduction == MAX ? next > reduced : next < reduced)) reduced = next;
        }
        store(out, first + i, reduced);
    }
}
