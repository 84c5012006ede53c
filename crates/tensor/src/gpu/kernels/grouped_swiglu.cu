// Between the two products of SwiGLU experts. Rows are [gate | up]; values are rounded to the type that they are kept
// in.
#include "common.cuh"
#include "rows.cuh"

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// hidden [R, inner] = silu(gate) up of kept [R, 2 inner]
KERNEL(gated, (Any hidden, ConstAny kept, u64 inner)) {
    EACH(i, hidden.len) {
        Cell cell = cell_of(i, inner);
        u64 at = cell.row * 2 * inner + cell.column;
        float a = load(kept, at), b = load(kept, at + inner);
        store(hidden, i, a * sigmoid(a) * b);
    }
}

// hidden [R, inner] = silu(gate) up, and gate and up in kept [R, 2 inner] become their gradients by slopes [R, inner],
// those of hidden
KERNEL(gated_gradient, (Any kept, Any hidden, Span<const float> slopes, u64 inner)) {
    EACH(i, hidden.len) {
        Cell cell = cell_of(i, inner);
        u64 at = cell.row * 2 * inner + cell.column;
        float a = load(kept, at), b = load(kept, at + inner), slope = slopes.data[i];
        float s = sigmoid(a);
        store(hidden, i, a * s * b);
        store(kept, at, slope * b * s * (1.0f + a * (1.0f - s)));
        store(kept, at + inner, slope * a * s);
    }
}
