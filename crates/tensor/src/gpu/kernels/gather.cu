// Moving rows by index: gather, scatter-add, a gather of rows that carry others, and the weighted sum that ends an MoE
// layer.
#include "common.cuh"
#include "rows.cuh"

// out [N, width] (+)= x[index]
KERNEL(gather, (Any out, ConstAny x, Span<const u32> index, u64 width, u32 accumulate)) {
    each_run(out.len, width, [=](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        Cell cell = cell_of(i, width);
        Numbers<N> from = load_run<N>(x, index.data[cell.row] * width + cell.column);
        if (accumulate) {
            Numbers<N> before = load_run<N>(out, i);
            UNROLLED for (u32 n = 0; n < N; n++) from.of[n] = before.of[n] + from.of[n];
        }
        store_run(out, i, from);
    });
}

// The lists of sources whose rows are `first` and those after it, before which heads are nowhere: whoever comes last is
// its list's first. Other sources are of no list.
KERNEL(list_sources, (Span<u32> heads, Span<u32> next, Span<const u32> rows, u64 first)) {
    EACH(source, rows.len) {
        u64 row = rows.data[source] - first;
        if (row < heads.len) next.data[source] = exchange(&heads.data[row], (u32)source);
    }
}

// out[index] (+)= x [N, width], rows of out that nothing goes to becoming zeros without `accumulate`
KERNEL(scatter_add, (Span<float> out, ConstAny x, Span<const u32> index, Span<const u32> heads,
                     Span<const u32> next, u64 width, u32 accumulate)) {
    sum_sources(
        Any{out.data, out.len, F32}, width, {heads, next}, accumulate,
        [=](u64 source) { return (u64)index.data[source]; },
        [=](auto& sums, u64 source, u64 column) { add_run(sums, 1.0f, x, source * width + column); });
}

// out [T, row] = sum_j w[t, j] x[places[t, j]], over the places there are
KERNEL(weighted_sum, (Any out, ConstAny x, Span<const float> w, Span<const u32> places, Width width)) {
    each_run(out.len, width.row, [=](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        Cell cell = cell_of(i, width.row);
        Numbers<N> sum = {};
        for (u64 route = cell.row * width.k; route < (cell.row + 1) * width.k; route++) {
            u32 place = places.data[route];
            if (place == NOWHERE) continue;
            Numbers<N> from = load_run<N>(x, place * width.row + cell.column);
            UNROLLED for (u32 n = 0; n < N; n++) sum.of[n] = fmaf(w.data[route], from.of[n], sum.of[n]);
        }
        store_run(out, i, sum);
    });
}

// dw[t, j] = <x[places[t, j]], g[t]>, 0 where there is no place
KERNEL(weighted_sum_back_weights,
       (Span<float> dw, ConstAny x, Span<const float> g, Span<const u32> places, Width width)) {
    BLOCKS(group, (dw.len + warps() - 1) / warps()) {
        WARPS {
            u64 route = group * warps() + warp();
            u32 place = route < dw.len ? places.data[route] : NOWHERE;
            u64 from = place == NOWHERE ? 0 : place * width.row, slopes = route / width.k * width.row;
            Lanes<float, 1> sum;
            EACH_LANE(lane) {
                sum.of(lane)[0] = 0.0f;
                if (place != NOWHERE) add_products_of_lane(sum.of(lane)[0], lane, width.row, x, from, g, slopes);
            }
            sum_over_lanes(sum, 32);
            EACH_LANE(lane) {
                if (lane == 0 && route < dw.len) dw.data[route] = sum.of(lane)[0];
            }
        }
    }
}

// dx[places[t, j]] (+)= w[t, j] g[t]
KERNEL(weighted_sum_back_rows, (Span<float> dx, Span<const float> g, Span<const float> w, Span<const u32> places,
                                Span<const u32> heads, Span<const u32> next, Width width, u32 accumulate)) {
    sum_sources(
        Any{dx.data, dx.len, F32}, width.row, {heads, next}, accumulate,
        [=](u64 route) { return (u64)places.data[route]; },
        [=](auto& sums, u64 route, u64 column) {
            u64 token = cell_of(route, width.k).row;
            add_run(sums, w.data[route], ConstAny{g.data, g.len, F32}, token * width.row + column);
        });
}

// out[i] = x[order[i]], or w[c] x[order[i]] + carried[c] with c = carriers[i] where there is such a row
KERNEL(carry, (Any out, ConstAny x, Span<const float> w, ConstAny carried, Span<const u32> order,
               Span<const u32> carriers, u64 width)) {
    EACH(i, out.len) {
        Cell cell = cell_of(i, width);
        float from = load(x, order.data[cell.row] * width + cell.column);
        u32 carrier = carriers.data[cell.row];
        bool carries = carrier != NOWHERE;
        store(out, i, carries ? fmaf(w.data[carrier], from, load(carried, carrier * width + cell.column)) : from);
    }
}

// dx[i] (+)= g[places[i]], times w[c] with c = carriers[places[i]] where there is such a row
KERNEL(carry_back, (Span<float> dx, Span<const float> g, Span<const float> w, Span<const u32> places,
                    Span<const u32> carriers, u64 width, u32 accumulate)) {
    EACH(i, dx.len) {
        Cell cell = cell_of(i, width);
        u32 place = places.data[cell.row], carrier = carriers.data[place];
        float weight = carrier == NOWHERE ? 1.0f : w.data[carrier], slope = g.data[place * width + cell.column];
        dx.data[i] = accumulate ? fmaf(weight, slope, dx.data[i]) : weight * slope;
    }
}

// dw[c] = <x[at[c]], g[outs[c]]>
KERNEL(carry_back_weights, (Span<float> dw, ConstAny x, Span<const float> g, Span<const u32> at,
                            Span<const u32> outs, u64 width)) {
    SHARED(float, partial, MAX_THREADS);
    BLOCKS(c, dw.len) {
        u64 from = at.data[c] * width;
        const float* slopes = g.data + outs.data[c] * width;
        float sum = block_total(partial, width, [=](u64 i) { return load(x, from + i) * slopes[i]; });
        THREADS {
            if (thread() == 0) dw.data[c] = sum;
        }
    }
}
