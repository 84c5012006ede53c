// Between the two products of SwiGLU experts. Rows are [gate | up]; values are rounded to the type that they are kept
// in.
#include "common.cuh"
#include "rows.cuh"

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// hidden [R, inner] = silu(gate) up of kept [R, 2 inner]
KERNEL(gated, (Any hidden, ConstAny kept, u64 inner)) {
    each_run(hidden.len, inner, [=](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        Cell cell = cell_of(i, inner);
        u64 at = cell.row * 2 * inner + cell.column;
        Numbers<N> a = load_run<N>(kept, at), b = load_run<N>(kept, at + inner);
        UNROLLED for (u32 n = 0; n < N; n++) a.of[n] = a.of[n] * sigmoid(a.of[n]) * b.of[n];
        store_run(hidden, i, a);
    });
}

// hidden [R, inner] = silu(gate) up, and gate and up in kept [R, 2 inner] become their gradients by slopes [R, inner],
// those of hidden
KERNEL(gated_gradient, (Any kept, Any hidden, Span<const float> slopes, u64 inner)) {
    each_run(hidden.len, inner, [=](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        Cell cell = cell_of(i, inner);
        u64 at = cell.row * 2 * inner + cell.column;
        Numbers<N> gate = load_run<N>(kept, at), up = load_run<N>(kept, at + inner), out;
        Numbers<N> slope = load_run<N>(slopes, i);
        UNROLLED for (u32 n = 0; n < N; n++) {
            float a = gate.of[n], b = up.of[n], s = sigmoid(a);
            out.of[n] = a * s * b;
            gate.of[n] = slope.of[n] * b * s * (1.0f + a * (1.0f - s));
            up.of[n] = slope.of[n] * a * s;
        }
        store_run(hidden, i, out);
        store_run(kept, at, gate);
        store_run(kept, at + inner, up);
    });
}
