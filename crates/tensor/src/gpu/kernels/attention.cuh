// What one attention call works on: sizes, masks and positions, and where the heads of its matrices lie.

#pragma once

// Where the heads of queries, keys or values lie: lines of a row of the batch, numbers of a line, the first head's
// column, numbers of a head, and whether they turn with positions.
struct HeadLines {
    u64 seq, width, column, dim;
    bool rotates;
};

struct AttentionCall {
    AttentionSizes shape;
    // What products are of. Numbers are rounded to it before, and sums are f32 all the same.
    Dtype factors;
    HeadLines q, k, v;
    // [T, 2]: the first key of its row that a query sees and the one after the last; neither ever falls within a row.
    Span<const u32> keys;
    // [T, rotary_dim / 2]
    Span<const float> cos, sin;
    // [seq - 1 + key_seq, heads], added to scores by how much farther in its row the key is than the query; may be
    // empty.
    Span<const float> bias;
    // [heads], scores without values; may be empty.
    Span<const float> sinks;
};

// Queries, keys and values side by side in one matrix.
DEVICE AttentionCall fused_call(AttentionSizes s, u32 dtype, Span<const u32> keys, Span<const float> cos,
                                Span<const float> sin) {
    u64 queries = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim, width = queries + kv + s.kv_heads * s.value_dim;
    HeadLines q = {s.seq, width, 0, s.head_dim, true}, k = {s.seq, width, queries, s.head_dim, true};
    HeadLines v = {s.seq, width, queries + kv, s.value_dim, false};
    return {s, (Dtype)dtype, q, k, v, keys, cos, sin, {nullptr, 0}, {nullptr, 0}};
}

// Each in a matrix of its own.
DEVICE AttentionCall apart_call(AttentionSizes s, u32 dtype, Span<const u32> keys, Span<const float> cos,
                                Span<const float> sin, Span<const float> bias, Span<const float> sinks) {
    HeadLines q = {s.seq, s.heads * s.head_dim, 0, s.head_dim, true};
    HeadLines k = {s.key_seq, s.kv_heads * s.head_dim, 0, s.head_dim, true};
    HeadLines v = {s.key_seq, s.kv_heads * s.value_dim, 0, s.value_dim, false};
    return {s, (Dtype)dtype, q, k, v, keys, cos, sin, bias, sinks};
}

// A number and the one that turns with it, as they are among the numbers of a head, and which angle turns them.
struct Turning {
    u64 low, high, angle;
};

// The pair of number `c` of the last `rotary_dim` of a head.
DEVICE Turning turning(const AttentionSizes& shape, u64 c) {
    u64 half = shape.rotary_dim / 2;
    if (shape.pairs == HALVES) return {c % half, c % half + half, c % half};
    return {c / 2 * 2, c / 2 * 2 + 1, c / 2};
}

// Number `c` of a head whose numbers begin at `from`, turned by the angles of token `t`. load(i) is number i of memory.
template <class Load>
DEVICE float turned(const AttentionSizes& shape, Span<const float> cos, Span<const float> sin, u64 t, u64 dim, u64 c,
                    Load load) {
    u64 still = dim - shape.rotary_dim;
    if (c < still) return load(c);
    Turning of = turning(shape, c - still);
    u64 at = t * (shape.rotary_dim / 2) + of.angle;
    float x = load(still + of.low), y = load(still + of.high);
    return c - still == of.low ? x * cos.data[at] - y * sin.data[at] : y * cos.data[at] + x * sin.data[at];
}

// Number `c` of a head of line `t` of a row of the batch, as it is multiplied; 0 beyond the row's last line.
DEVICE float head_number(const AttentionCall& call, const HeadLines& lines, ConstAny from, u64 row, u64 head, u64 t,
                         u64 c) {
    if (t >= lines.seq) return 0.0f;
    u64 token = row * lines.seq + t, first = token * lines.width + lines.column + head * lines.dim;
    if (!lines.rotates || call.shape.rotary_dim == 0) return as_factor(call.factors, load(from, first + c));
    float x = turned(call.shape, call.cos, call.sin, token, lines.dim, c, [=](u64 i) { return load(from, first + i); });
    return as_factor(call.factors, x);
}

// Where number 0 of a head's line is in the matrix.
DEVICE u64 head_place(const HeadLines& lines, u64 row, u64 head, u64 t) {
    return (row * lines.seq + t) * lines.width + lines.column + head * lines.dim;
}

// Turns back lines first to end of a head's gradients, of which this block is the only writer: a thread a pair.
DEVICE void turn_back(const AttentionCall& call, const HeadLines& lines, float* to, u64 row, u64 head, u64 first,
                      u64 end) {
    u64 half = call.shape.rotary_dim / 2, still = lines.dim - call.shape.rotary_dim;
    if (!lines.rotates || half == 0) return;
    THREADS {
        for (u64 item = thread(); item < (end - first) * half; item += threads()) {
            u64 t = first + item / half, angle = item % half;
            Turning of = turning(call.shape, call.shape.pairs == HALVES ? angle : 2 * angle);
            float* line = to + head_place(lines, row, head, t) + still;
            u64 at = (row * lines.seq + t) * half + angle;
            float x = line[of.low], y = line[of.high], cos = call.cos.data[at], sin = -call.sin.data[at];
            line[of.low] = x * cos - y * sin;
            line[of.high] = y * cos + x * sin;
        }
    }
}

// What a query of the row sees, as start and end; nothing beyond the last query.
DEVICE Visible seen_of(const AttentionCall& call, u64 row, u64 query, u64 first_key) {
    if (query >= call.shape.seq) return {0, 0};
    const u32* keys = call.keys.data + 2 * (row * call.shape.seq + query);
    return visible(keys[0], keys[1], first_key);
}

// Keys that any of the queries first to end sees: bounds never fall, so from the first query's first to the last's
// last.
DEVICE Range seen_by_any(const AttentionCall& call, u64 row, u64 first, u64 end) {
    const u32* keys = call.keys.data + 2 * row * call.shape.seq;
    return {keys[2 * first], keys[2 * (end - 1) + 1]};
}
