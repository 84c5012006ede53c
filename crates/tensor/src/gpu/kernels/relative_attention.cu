// Causal attention with relative positions (Dai et al. 2019), tile by tile as in attention.cu. The score of query i and
// key j is `((q_i + u) . k_j + (q_i + v) . r_{i-j}) / sqrt(head_dim)`. Along a diagonal of a tile the distance i - j is
// the same, so a tile needs QUERIES + KEYS - 1 vectors r.
//
// Keys before a query's own stretch are *remembered*: their gradient is kept apart. Backward, a block owns a tile of
// queries (dq), a tile of keys (both gradients of keys and values), a stretch of distances, or a head (the gradients of
// u and v).
#include "common.cuh"
#include "tiles.cuh"

// Queries [T, H d], keys and values [T, 2 H d], distances [reach, H d], u and v [H, d], for each token the first
// position of its row that it sees (the last is itself) and the first of its own stretch.
struct RelativeCall {
    RelativeAttentionSizes shape;
    ConstAny q, kv, distances;
    const float *u, *v;
    const u32 *first_key, *own_key;
    u64 rows;
};

DEVICE u64 width_of(const RelativeCall& call) { return call.shape.heads * call.shape.head_dim; }

DEVICE float scale_of(u64 dim) { return 1.0f / sqrtf((float)dim); }

// Place of number 0 of a head of token `t` of a row, in lines of `parts` times the width.
DEVICE u64 place(const RelativeCall& call, u64 row, u64 head, u64 t, u64 parts) {
    return (row * call.shape.seq + t) * parts * width_of(call) + head * call.shape.head_dim;
}

// What a head of a row of the batch is made of, zeros beyond the last token.
struct RelativeHead {
    const RelativeCall& call;
    u64 row, head;

    // q + u or q + v.
    MEMBER float query(u64 t, u64 c, const float* bias) const {
        if (t >= call.shape.seq) return 0.0f;
        return load(call.q, place(call, row, head, t, 1) + c) + bias[head * call.shape.head_dim + c];
    }
    MEMBER float key(u64 t, u64 c) const {
        return t < call.shape.seq ? load(call.kv, place(call, row, head, t, 2) + c) : 0.0f;
    }
    MEMBER float value(u64 t, u64 c) const {
        return t < call.shape.seq ? load(call.kv, place(call, row, head, t, 2) + width_of(call) + c) : 0.0f;
    }
    // Of number `n` of a tile's distances, the first query and key being `i` and `j`; zeros for distances there are
    // none of.
    MEMBER float distance(u64 i, u64 j, u64 n, u64 c) const {
        // Below zero it wraps around to one far beyond the last.
        u64 distance = i + n - (j + KEYS - 1);
        if (distance >= call.shape.reach) return 0.0f;
        return load(call.distances, distance * width_of(call) + head * call.shape.head_dim + c);
    }
    MEMBER Visible seen(u64 t, u64 first_key) const {
        if (t >= call.shape.seq) return {0, 0};
        return visible(call.first_key[row * call.shape.seq + t], t + 1, first_key);
    }
};

// scores = those of queries from `i` on for keys from `j` on, masks aside
DEVICE void tile_scores(const RelativeHead& of, float* scores, float* of_queries, float* of_keys, u64 i, u64 j) {
    u64 dim = of.call.shape.head_dim;
    multiply_lines(
        F32, scores, of_queries, of_keys, dim, [&](u32 r, u64 c) { return of.query(i + r, c, of.call.u); },
        [&](u32 r, u64 c) { return of.key(j + r, c); });
    add_distances(
        scores, of_queries, of_keys, dim, scale_of(dim), [&](u32 r, u64 c) { return of.query(i + r, c, of.call.v); },
        [&](u32 n, u64 c) { return of.distance(i, j, n, c); });
}

// out [T, H d] and lse [T, H]
KERNEL(relative_attention,
       (Span<float> out, Span<float> lse, ConstAny q, ConstAny kv, ConstAny distances, Span<const float> u,
        Span<const float> v, Span<const u32> first_key, Span<const u32> own_key, RelativeAttentionSizes shape)) {
    ATTENDING(at, DIAGONAL_CHUNK);
    RelativeCall call = {shape,  q,      kv,      distances, u.data, v.data, first_key.data, own_key.data,
                         first_key.len / shape.seq};
    u64 tiles = (shape.seq + QUERIES - 1) / QUERIES, heads = shape.heads;
    BLOCKS(task, call.rows * heads * tiles) {
        u64 i = task % tiles * QUERIES, end = least<u64>(i + QUERIES, shape.seq);
        RelativeHead of = {call, task / tiles / heads, task / tiles % heads};
        // First keys do not decrease along a row.
        Range keys = {call.first_key[of.row * shape.seq + i], end};
        attend(
            F32, at, keys, (u32)(end - i), shape.head_dim, {0.0f, 0.0f},
            [&](u64 j) { tile_scores(of, at.scores, at.of_queries, at.of_keys, i, j); },
            [&](u32 r, u64 j) { return of.seen(i + r, j); },
            [&](u64 t, u64 c) { return of.value(t, c); },
            [&](u32 r, u64 c) -> float& { return out.data[place(call, of.row, of.head, i + r, 1) + c]; },
            [&](u32 r, float x) { lse.data[(of.row * shape.seq + i + r) * heads + of.head] = x; });
    }
}

// What the backward reads and writes besides the forward's operands; ddistances [rows, reach, H d], du and dv [rows, H
// d].
struct Backward {
    ConstAny out;
    const float *lse, *g;
    float *dq, *dkv, *remembered, *ddistances, *du, *dv;
};

// The weights and the scores' gradients of queries from `i` on and keys from `j` on.
DEVICE void gradient_tile(const RelativeHead& of, const Backward& back, Workplace at, u64 i, u64 j) {
    u64 dim = of.call.shape.head_dim, seq = of.call.shape.seq;
    auto at_token = [&](u64 t, u64 c) { return place(of.call, of.row, of.head, t, 1) + c; };
    auto slope = [&](u32 r, u64 c) { return i + r < seq ? back.g[at_token(i + r, c)] : 0.0f; };
    inner_products(
        at.inner, at.partial, dim,
        [&](u32 r, u64 c) { return i + r < seq ? load(back.out, at_token(i + r, c)) : 0.0f; }, slope);
    tile_scores(of, at.scores, at.of_queries, at.of_keys, i, j);
    multiply_lines(
        F32, at.slopes, at.of_queries, at.of_keys, dim, slope, [&](u32 r, u64 c) { return of.value(j + r, c); });
    to_score_gradients(
        at.scores, at.slopes, at.inner, scale_of(dim), [&](u32 r) { return of.seen(i + r, j); },
        [&](u32 r) { return back.lse[(of.row * seq + i + r) * of.call.shape.heads + of.head]; });
}

// Whether any of the queries from `i` on sees any of the keys from `j` on.
DEVICE bool sees_any(const RelativeHead& of, u64 i, u64 j) {
    u64 seq = of.call.shape.seq;
    return j < least<u64>(i + QUERIES, seq) && of.call.first_key[of.row * seq + i] < j + KEYS;
}

// Lets put(query, column, sum) have the sums over keys of slopes times distances' vectors.
template <class Put>
DEVICE void sum_over_distances(const RelativeHead& of, Workplace at, u64 i, u64 j, Put put) {
    u64 dim = of.call.shape.head_dim;
    for (u64 first = 0; first < dim; first += CHUNK) {
        THREADS {
            load_chunk(at.of_keys, DIAGONALS, first, dim, [&](u32 n, u64 c) { return of.distance(i, j, n, c); });
        }
        THREADS {
            for (u32 item = thread(); item < QUERIES * CHUNK; item += threads()) {
                u32 query = item / CHUNK, column = item % CHUNK;
                float sum = 0.0f;
                for (u32 key = 0; key < KEYS; key++) {
                    float of_distance = at.of_keys[(query + KEYS - 1 - key) * CHUNK_LINE + column];
                    sum = fmaf(at.slopes[query * SCORE_LINE + key], of_distance, sum);
                }
                if (first + column < dim) put(query, first + column, sum);
            }
        }
    }
}

// dq of a tile of queries
DEVICE void query_gradients(const RelativeHead& of, const Backward& back, Workplace at, u64 i) {
    u64 dim = of.call.shape.head_dim, seq = of.call.shape.seq, end = least<u64>(i + QUERIES, seq);
    auto to = [&](u64 r, u64 c) -> float& { return back.dq[place(of.call, of.row, of.head, i + r, 1) + c]; };
    auto put = [&](u32 r, u64 c, float sum) {
        if (i + r < end) to(r, c) += sum;
    };
    THREADS {
        for (u64 e = thread(); e < (end - i) * dim; e += threads()) to(e / dim, e % dim) = 0.0f;
    }
    for (u64 j = of.call.first_key[of.row * seq + i] / KEYS * KEYS; j < end; j += KEYS) {
        gradient_tile(of, back, at, i, j);
        sum_over_keys(F32, at.slopes, at.of_keys, dim, [&](u32 r, u64 c) { return of.key(j + r, c); }, put);
        sum_over_distances(of, at, i, j, put);
    }
}

// Both gradients of a tile of keys and values: from queries of the same stretch, and from those that remember.
DEVICE void key_gradients(const RelativeHead& of, const Backward& back, Workplace at, u64 j) {
    u64 dim = of.call.shape.head_dim, seq = of.call.shape.seq, end = least<u64>(j + KEYS, seq);
    u64 width = width_of(of.call);
    THREADS {
        for (u64 e = thread(); e < (end - j) * dim; e += threads()) {
            u64 key = place(of.call, of.row, of.head, j + e / dim, 2) + e % dim;
            back.dkv[key] = back.dkv[key + width] = back.remembered[key] = back.remembered[key + width] = 0.0f;
        }
    }
    for (u64 i = j / QUERIES * QUERIES; i < seq; i += QUERIES) {
        if (!sees_any(of, i, j)) continue;
        gradient_tile(of, back, at, i, j);
        for (u32 part = 0; part < 2; part++) {
            float* to = part ? back.remembered : back.dkv;
            // The weights or slopes that belong to this part, as a matrix.
            auto only = [&](const float* x) {
                return [=](u32 r, u32 c) {
                    if (i + r >= seq) return 0.0f;
                    bool remembers = j + c < of.call.own_key[of.row * seq + i + r];
                    return remembers == (part == 1) ? x[r * SCORE_LINE + c] : 0.0f;
                };
            };
            auto put = [&](u64 column) {
                return [=](u32 r, u64 c, float sum) {
                    if (j + r < end) to[place(of.call, of.row, of.head, j + r, 2) + column + c] += sum;
                };
            };
            auto g = [&](u32 r, u64 c) {
                return i + r < seq ? back.g[place(of.call, of.row, of.head, i + r, 1) + c] : 0.0f;
            };
            sum_over_queries(F32, at.of_queries, dim, only(at.scores), g, put(width));
            auto content = [&](u32 r, u64 c) { return of.query(i + r, c, of.call.u); };
            sum_over_queries(F32, at.of_queries, dim, only(at.slopes), content, put(0));
        }
    }
}

// The gradients of DISTANCES distances from `first` on
DEVICE void distance_gradients(const RelativeHead& of, const Backward& back, Workplace at, u64 first) {
    const RelativeAttentionSizes& s = of.call.shape;
    u64 dim = s.head_dim, end = least<u64>(first + DISTANCES, s.reach);
    auto to = [&](u64 n, u64 c) -> float& {
        return back.ddistances[(of.row * s.reach + first + n) * width_of(of.call) + of.head * dim + c];
    };
    THREADS {
        for (u64 e = thread(); e < (end - first) * dim; e += threads()) to(e / dim, e % dim) = 0.0f;
    }
    // A query before `first` has no key so far away.
    for (u64 i = first / QUERIES * QUERIES; i < s.seq; i += QUERIES) {
        // Query i + r and distance first + n make key `i + r - first - n`, which of the last n and r = 0 is the tile's
        // first key. Where that would be before the row's first, the tile begins with the row.
        u64 farthest = first + DISTANCES - 1, lacks = i < farthest ? farthest - i : 0, j = i + lacks - farthest;
        if (!sees_any(of, i, j)) continue;
        gradient_tile(of, back, at, i, j);
        auto along = [&](u32 r, u32 n) {
            // Below zero it wraps around to one far beyond the last.
            u64 column = r + (u64)(DISTANCES - 1) - n - lacks;
            return n < DISTANCES && column < KEYS ? at.slopes[r * SCORE_LINE + column] : 0.0f;
        };
        sum_over_queries(
            F32, at.of_queries, dim, along, [&](u32 r, u64 c) { return of.query(i + r, c, of.call.v); },
            [&](u32 n, u64 c, float sum) {
                if (first + n < end) to(n, c) += sum;
            });
    }
}

// du and dv of a head: sums over keys and distances of what all queries' slopes give them
DEVICE void bias_gradients(const RelativeHead& of, const Backward& back, Workplace at) {
    SHARED(float, of_key, KEYS);
    SHARED(float, of_distance, DIAGONALS);
    const RelativeAttentionSizes& s = of.call.shape;
    u64 to = of.row * width_of(of.call) + of.head * s.head_dim;
    THREADS {
        for (u64 c = thread(); c < s.head_dim; c += threads()) back.du[to + c] = back.dv[to + c] = 0.0f;
    }
    for (u64 i = 0; i < s.seq; i += QUERIES) {
        u64 end = least<u64>(i + QUERIES, s.seq);
        for (u64 j = of.call.first_key[of.row * s.seq + i] / KEYS * KEYS; j < end; j += KEYS) {
            gradient_tile(of, back, at, i, j);
            THREADS {
                for (u32 n = thread(); n < DIAGONALS; n += threads()) {
                    float by_key = 0.0f, by_distance = 0.0f;
                    for (u32 r = 0; r < QUERIES; r++) {
                        u32 key = r + KEYS - 1 - n;
                        if (n < KEYS) by_key += at.slopes[r * SCORE_LINE + n];
                        if (key < KEYS) by_distance += at.slopes[r * SCORE_LINE + key];
                    }
                    if (n < KEYS) of_key[n] = by_key;
                    of_distance[n] = by_distance;
                }
            }
            THREADS {
                for (u64 c = thread(); c < s.head_dim; c += threads()) {
                    float du = 0.0f, dv = 0.0f;
                    for (u32 n = 0; n < KEYS; n++) du = fmaf(of_key[n], of.key(j + n, c), du);
                    for (u32 n = 0; n < DIAGONALS; n++) dv = fmaf(of_distance[n], of.distance(i, j, n, c), dv);
                    back.du[to + c] += du;
                    back.dv[to + c] += dv;
                }
            }
        }
    }
}

// All gradients: tasks of every kind, one after the other. Each row of the batch has a copy of those of what rows
// share.
KERNEL(relative_attention_back,
       (Span<float> dq, Span<float> dkv, Span<float> remembered, Span<float> ddistances, Span<float> du, Span<float> dv,
        ConstAny q, ConstAny kv, ConstAny distances, Span<const float> u, Span<const float> v,
        Span<const u32> first_key, Span<const u32> own_key, ConstAny out, Span<const float> lse, Span<const float> g,
        RelativeAttentionSizes shape)) {
    WORKPLACE(at, DIAGONAL_CHUNK);
    RelativeCall call = {shape,  q,      kv,      distances, u.data, v.data, first_key.data, own_key.data,
                         first_key.len / shape.seq};
    Backward back = {out, lse.data, g.data, dq.data, dkv.data, remembered.data, ddistances.data, du.data, dv.data};
    u64 for_keys = (shape.seq + KEYS - 1) / KEYS, for_queries = (shape.seq + QUERIES - 1) / QUERIES;
    u64 for_distances = (shape.reach + DISTANCES - 1) / DISTANCES, tasks = for_keys + for_queries + for_distances + 1;
    BLOCKS(task, call.rows * shape.heads * tasks) {
        RelativeHead of = {call, task / tasks / shape.heads, task / tasks % shape.heads};
        u64 n = task % tasks;
        if (n < for_keys) {
            key_gradients(of, back, at, n * KEYS);
        } else if ((n -= for_keys) < for_queries) {
            query_gradients(of, back, at, n * QUERIES);
        } else if ((n -= for_queries) < for_distances) {
            distance_gradients(of, back, at, n * DISTANCES);
        } else {
            bias_gradients(of, back, at);
        }
    }
}

// to (+)= the sum of the copies in parts, in their order
KERNEL(sum_copies, (Span<float> to, Span<const float> parts, u32 accumulate)) {
    EACH(i, to.len) {
        float sum = accumulate ? to.data[i] : 0.0f;
        for (u64 at = i; at < parts.len; at += to.len) sum += parts.data[at];
        to.data[i] = sum;
    }
}
