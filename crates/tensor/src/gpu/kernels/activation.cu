// Functions of one element, and SiLU-gated products.
#include "common.cuh"
#include "rows.cuh"

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

constexpr float SQRT_2_OVER_PI = 0.7978846f;
constexpr float GELU_CUBIC = 0.044715f;

// GELU in its tanh form (Hendrycks and Gimpel 2016).
DEVICE float gelu(float x) { return 0.5f * x * (1.0f + tanhf(SQRT_2_OVER_PI * x * (GELU_CUBIC * x * x + 1.0f))); }

DEVICE float gelu_slope(float x) {
    float square = x * x;
    float t = tanhf(SQRT_2_OVER_PI * x * (GELU_CUBIC * square + 1.0f));
    float inner = SQRT_2_OVER_PI * (3.0f * GELU_CUBIC * square + 1.0f);
    return 0.5f * ((1.0f + t) + x * (1.0f - t * t) * inner);
}

// Of element i of [R, width] the place of its gate in [R, gate | up].
DEVICE u64 gate_place(u64 i, u64 width) {
    Cell cell = cell_of(i, width);
    return cell.row * 2 * width + cell.column;
}

DEVICE float value_of(Pointwise f, float x) {
    switch (f) {
        // Not fmaxf, which would lose a NaN.
        case RELU: return x < 0.0f ? 0.0f : x;
        case GELU: return gelu(x);
        case SIGMOID: return sigmoid(x);
        default: return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    }
}

DEVICE float gradient_of(Pointwise f, float x, float g) {
    switch (f) {
        case RELU: return x > 0.0f ? g : 0.0f;
        case GELU: return gelu_slope(x) * g;
        case SIGMOID: {
            float s = sigmoid(x);
            return g * s * (1.0f - s);
        }
        default: return g * sigmoid(x);
    }
}

// out[i] = f(x[i])
KERNEL(activate, (Any out, ConstAny x, Pointwise f)) {
    EACH(i, out.len) { store(out, i, value_of(f, load(x, i))); }
}

// dx[i] (+)= f'(x[i]) g[i]
KERNEL(activate_back, (Span<float> dx, ConstAny x, Span<const float> g, Pointwise f, u32 accumulate)) {
    EACH(i, dx.len) { set_or_add(dx.data[i], gradient_of(f, load(x, i), g.data[i]), accumulate); }
}

// out [R, width] = silu(gate) up, x being [R, gate | up]
KERNEL(swiglu, (Any out, ConstAny x, u64 width)) {
    EACH(i, out.len) {
        u64 at = gate_place(i, width);
        float a = load(x, at), b = load(x, at + width);
        store(out, i, a * sigmoid(a) * b);
    }
}

// dx [R, gate | up] (+)= the gradient by g [R, width]
KERNEL(swiglu_back, (Span<float> dx, ConstAny x, Span<const float> g, u64 width, u32 accumulate)) {
    EACH(i, g.len) {
        u64 at = gate_place(i, width);
        float a = load(x, at), b = load(x, at + width), slope = g.data[i];
        float s = sigmoid(a);
        set_or_add(dx.data[at], slope * b * s * (1.0f + a * (1.0f - s)), accumulate);
        set_or_add(dx.data[at + width], slope * a * s, accumulate);
    }
}

// The factor on gates within the sigmoid of GPT-OSS's activation.
constexpr float STEEPNESS = 1.702f;

// out [R, width] = a sigmoid(1.702 a) (b + 1), a and b being gate and up of x [R, gate | up], clamped
KERNEL(clamped_swiglu, (Any out, ConstAny x, u64 width, float limit)) {
    EACH(i, out.len) {
        u64 at = gate_place(i, width);
        float a = fminf(load(x, at), limit), b = fminf(fmaxf(load(x, at + width), -limit), limit);
        store(out, i, a * sigmoid(STEEPNESS * a) * (b + 1.0f));
    }
}

// dx [R, gate | up] (+)= the gradient by g [R, width]
KERNEL(clamped_swiglu_back,
       (Span<float> dx, ConstAny x, Span<const float> g, u64 width, float limit, u32 accumulate)) {
    EACH(i, g.len) {
        u64 at = gate_place(i, width);
        float gate = load(x, at), up = load(x, at + width), slope = g.data[i];
        float a = fminf(gate, limit), b = fminf(fmaxf(up, -limit), limit);
        float s = sigmoid(STEEPNESS * a);
        // What is clamped passes nothing; at the limit itself it does.
        float of_gate = gate <= limit ? slope * (b + 1.0f) * s * (1.0f + STEEPNESS * a * (1.0f - s)) : 0.0f;
        float of_up = fabsf(up) <= limit ? slope * a * s : 0.0f;
        set_or_add(dx.data[at], of_gate, accumulate);
        set_or_add(dx.data[at + width], of_up, accumulate);
    }
}
