// Attention tile by tile (Dao et al. 2022): the forward keeps one number per query, the log-sum-exp of its scores; the
// backward computes each tile of weights again from it. No matrix of queries by keys is ever in memory.
//
// No two blocks write to one place. Forward, a block owns a tile of queries of a head. Backward, a block owns either a
// tile of queries (dq), or a tile of keys of a key head and all query heads that share it (dk and dv), or a stretch of
// distances (the gradient of biases), or a head (that of its sink). Each computes the weights that it needs for itself.
#include "common.cuh"
#include "tiles.cuh"
#include "attention.cuh"

// Added to scores, which `scores` has as plain products.
DEVICE void scale_scores(const AttentionCall& call, float* scores, u64 head, u64 query, u64 key) {
    const AttentionSizes& s = call.shape;
    THREADS {
        for (u32 item = thread(); item < QUERIES * KEYS; item += threads()) {
            u64 i = query + item / KEYS, j = key + item % KEYS;
            float& score = scores[item / KEYS * SCORE_LINE + item % KEYS];
            score *= s.scale;
            if (call.bias.len > 0 && i < s.seq && j < s.key_seq) {
                score += call.bias.data[(s.seq - 1 - i + j) * s.heads + head];
            }
        }
    }
}

// scores = those of queries from `query` on for keys from `key` on, masks aside
DEVICE void tile_scores(const AttentionCall& call, float* scores, float* of_queries, float* of_keys, ConstAny q,
                        ConstAny k, u64 row, u64 head, u64 query, u64 key) {
    const AttentionSizes& s = call.shape;
    u64 kv = head / (s.heads / s.kv_heads);
    multiply_lines(
        call.factors, scores, of_queries, of_keys, s.head_dim,
        [&](u32 r, u64 c) { return head_number(call, call.q, q, row, head, query + r, c); },
        [&](u32 r, u64 c) { return head_number(call, call.k, k, row, kv, key + r, c); });
    scale_scores(call, scores, head, query, key);
}

// out [T, heads * value_dim] and lse [T, heads]
DEVICE void forward(const AttentionCall& call, float* out, float* lse, ConstAny q, ConstAny k, ConstAny v) {
    ATTENDING(at, KEY_CHUNK);
    const AttentionSizes& s = call.shape;
    u64 tiles = (s.seq + QUERIES - 1) / QUERIES;
    BLOCKS(task, s.rows * s.heads * tiles) {
        u64 query = task % tiles * QUERIES, head = task / tiles % s.heads, row = task / tiles / s.heads;
        u64 kv = head / (s.heads / s.kv_heads), end = least<u64>(query + QUERIES, s.seq);
        auto place = [&](u32 r) { return (row * s.seq + query + r) * s.heads + head; };
        Sink sink = {0.0f, 0.0f};
        if (call.sinks.len > 0) sink = {call.sinks.data[head], 1.0f};
        attend(
            call.factors, at, seen_by_any(call, row, query, end), (u32)(end - query), s.value_dim, sink,
            [&](u64 key) { tile_scores(call, at.scores, at.of_queries, at.of_keys, q, k, row, head, query, key); },
            [&](u32 r, u64 key) { return seen_of(call, row, query + r, key); },
            [&](u64 t, u64 c) { return head_number(call, call.v, v, row, kv, t, c); },
            [&](u32 r, u64 c) -> float& { return out[place(r) * s.value_dim + c]; },
            [&](u32 r, float x) { lse[place(r)] = x; });
    }
}

KERNEL(attention, (Span<float> out, Span<float> lse, ConstAny qkv, Span<const u32> keys, Span<const float> cos,
                   Span<const float> sin, AttentionSizes shape)) {
    forward(fused_call(shape, qkv.dtype, keys, cos, sin), out.data, lse.data, qkv, qkv, qkv);
}

// From queries, keys and values in matrices of their own, with biases and sinks
KERNEL(attention_apart,
       (Span<float> out, Span<float> lse, ConstAny q, ConstAny k, ConstAny v, Span<const u32> keys,
        Span<const float> cos, Span<const float> sin, Span<const float> bias, Span<const float> sinks,
        AttentionSizes shape)) {
    forward(apart_call(shape, q.dtype, keys, cos, sin, bias, sinks), out.data, lse.data, q, k, v);
}

// What the backward reads and writes besides sizes and masks.
struct Backward {
    ConstAny q, k, v, out;
    const float *lse, *dout;
    float *dq, *dk, *dv, *dbias, *dsinks;
};

// The weights and the scores' gradients of queries from `query` on and keys from `key` on; `inner` of the queries too.
DEVICE void gradient_tile(const AttentionCall& call, const Backward& of, Workplace at, u64 row, u64 head, u64 query,
                          u64 key) {
    const AttentionSizes& s = call.shape;
    u64 kv = head / (s.heads / s.kv_heads), dim = s.value_dim;
    auto place = [&](u32 r) { return (row * s.seq + query + r) * s.heads + head; };
    inner_products(
        at.inner, at.partial, dim,
        [&](u32 r, u64 c) { return query + r < s.seq ? load(of.out, place(r) * dim + c) : 0.0f; },
        [&](u32 r, u64 c) { return query + r < s.seq ? of.dout[place(r) * dim + c] : 0.0f; });
    tile_scores(call, at.scores, at.of_queries, at.of_keys, of.q, of.k, row, head, query, key);
    multiply_lines(
        call.factors, at.slopes, at.of_queries, at.of_keys, dim,
        [&](u32 r, u64 c) { return query + r < s.seq ? as_factor(call.factors, of.dout[place(r) * dim + c]) : 0.0f; },
        [&](u32 r, u64 c) { return head_number(call, call.v, of.v, row, kv, key + r, c); });
    to_score_gradients(
        at.scores, at.slopes, at.inner, s.scale, [&](u32 r) { return seen_of(call, row, query + r, key); },
        [&](u32 r) { return of.lse[place(r)]; });
}

// Products take both as factors.
DEVICE void round_tile(const AttentionCall& call, float* tile) {
    if (call.factors == F32) return;
    THREADS {
        for (u32 e = thread(); e < QUERIES * KEYS; e += threads()) {
            float& x = tile[e / KEYS * SCORE_LINE + e % KEYS];
            x = as_factor(call.factors, x);
        }
    }
}

// dq of a tile of queries of a head. Sums lie in memory until they are turned back.
DEVICE void query_gradients(const AttentionCall& call, const Backward& of, Workplace at, u64 row, u64 head, u64 query) {
    const AttentionSizes& s = call.shape;
    u64 kv = head / (s.heads / s.kv_heads), dim = s.head_dim, end = least<u64>(query + QUERIES, s.seq);
    auto place = [&](u64 r, u64 c) { return head_place(call.q, row, head, query + r) + c; };
    THREADS {
        for (u64 e = thread(); e < (end - query) * dim; e += threads()) of.dq[place(e / dim, e % dim)] = 0.0f;
    }
    Range seen = seen_by_any(call, row, query, end);
    for (u64 key = seen.start / KEYS * KEYS; key < seen.end; key += KEYS) {
        gradient_tile(call, of, at, row, head, query, key);
        round_tile(call, at.slopes);
        sum_over_keys(
            call.factors, at.slopes, at.of_keys, dim,
            [&](u32 r, u64 c) { return head_number(call, call.k, of.k, row, kv, key + r, c); },
            [&](u32 r, u64 c, float sum) {
                if (query + r < end) of.dq[place(r, c)] += sum;
            });
    }
    turn_back(call, call.q, of.dq, row, head, query, end);
}

// dk and dv of a tile of keys, by all queries of all heads that share them.
DEVICE void key_gradients(const AttentionCall& call, const Backward& of, Workplace at, u64 row, u64 kv, u64 key) {
    const AttentionSizes& s = call.shape;
    u64 group = s.heads / s.kv_heads, end = least<u64>(key + KEYS, s.key_seq);
    auto put = [&](float* to, const HeadLines& lines) {
        return [=, &lines](u32 r, u64 c, float sum) {
            if (key + r < end) to[head_place(lines, row, kv, key + r) + c] += sum;
        };
    };
    auto put_k = put(of.dk, call.k), put_v = put(of.dv, call.v);
    THREADS {
        for (u64 e = thread(); e < (end - key) * s.head_dim; e += threads()) {
            of.dk[head_place(call.k, row, kv, key + e / s.head_dim) + e % s.head_dim] = 0.0f;
        }
        for (u64 e = thread(); e < (end - key) * s.value_dim; e += threads()) {
            of.dv[head_place(call.v, row, kv, key + e / s.value_dim) + e % s.value_dim] = 0.0f;
        }
    }
    for (u64 task = 0; task < group * ((s.seq + QUERIES - 1) / QUERIES); task++) {
        u64 head = kv * group + task % group, query = task / group * QUERIES;
        Range seen = seen_by_any(call, row, query, least<u64>(query + QUERIES, s.seq));
        if (seen.end <= key || seen.start >= end) continue;
        gradient_tile(call, of, at, row, head, query, key);
        round_tile(call, at.scores);
        round_tile(call, at.slopes);
        auto dout = [&](u32 r, u64 c) {
            u64 line = (row * s.seq + query + r) * s.heads + head;
            return query + r < s.seq ? as_factor(call.factors, of.dout[line * s.value_dim + c]) : 0.0f;
        };
        auto q = [&](u32 r, u64 c) { return head_number(call, call.q, of.q, row, head, query + r, c); };
        auto weight = [&](u32 r, u32 c) { return at.scores[r * SCORE_LINE + c]; };
        auto slope = [&](u32 r, u32 c) { return at.slopes[r * SCORE_LINE + c]; };
        sum_over_queries(call.factors, at.of_queries, s.value_dim, weight, dout, put_v);
        sum_over_queries(call.factors, at.of_queries, s.head_dim, slope, q, put_k);
    }
    turn_back(call, call.k, of.dk, row, kv, key, end);
}

// Gradients of DISTANCES biases of a head from `first` on, by one row of the batch: [rows, seq - 1 + key_seq, heads].
DEVICE void bias_gradients(const AttentionCall& call, const Backward& of, Workplace at, u64 row, u64 head, u64 first) {
    SHARED(float, sums, DISTANCES);
    const AttentionSizes& s = call.shape;
    u64 all = s.seq - 1 + s.key_seq, count = least<u64>(DISTANCES, all - first);
    THREADS {
        for (u32 n = thread(); n < DISTANCES; n += threads()) sums[n] = 0.0f;
    }
    for (u64 query = 0; query < s.seq; query += QUERIES) {
        // Pair (query + r, key + c) is of distance `first + c - r`; a key may be before the row's first.
        u64 shifted = query + first, before = s.seq - 1;
        if (shifted + KEYS <= before || shifted >= before + s.key_seq) continue;
        // Whole tiles begin within the row: where this one does not, what it lacks is at its end.
        u64 lacks = shifted < before ? before - shifted : 0, key = shifted + lacks - before;
        Range seen = seen_by_any(call, row, query, least<u64>(query + QUERIES, s.seq));
        if (seen.end <= key || seen.start >= key + KEYS) continue;
        gradient_tile(call, of, at, row, head, query, key);
        THREADS {
            for (u32 n = thread(); n < count; n += threads()) {
                float sum = 0.0f;
                for (u32 r = 0; r < QUERIES; r++) {
                    if (n + r >= lacks) sum += at.slopes[r * SCORE_LINE + n + r - lacks] / s.scale;
                }
                sums[n] += sum;
            }
        }
    }
    THREADS {
        for (u32 n = thread(); n < count; n += threads()) of.dbias[(row * all + first + n) * s.heads + head] = sums[n];
    }
}

// The gradient of a head's sink by one row of the batch: that of a key whose value is zero.
DEVICE void sink_gradient(const AttentionCall& call, const Backward& of, Workplace at, u64 row, u64 head) {
    SHARED(float, partial, MAX_THREADS);
    const AttentionSizes& s = call.shape;
    float sink = call.sinks.data[head];
    THREADS { partial[thread()] = 0.0f; }
    for (u64 query = 0; query < s.seq; query += QUERIES) {
        auto token = [&](u32 r) { return (row * s.seq + query + r) * s.heads + head; };
        inner_products(
            at.inner, at.partial, s.value_dim,
            [&](u32 r, u64 c) { return query + r < s.seq ? load(of.out, token(r) * s.value_dim + c) : 0.0f; },
            [&](u32 r, u64 c) { return query + r < s.seq ? of.dout[token(r) * s.value_dim + c] : 0.0f; });
        THREADS {
            for (u32 r = thread(); r < QUERIES && query + r < s.seq; r += threads()) {
                partial[thread()] -= expf(sink - of.lse[token(r)]) * at.inner[r];
            }
        }
    }
    float sum = block_sum(partial);
    THREADS {
        if (thread() == 0) of.dsinks[row * s.heads + head] = sum;
    }
}

// All gradients: tasks of every kind, one after the other.
DEVICE void backward(const AttentionCall& call, const Backward& of) {
    WORKPLACE(at, KEY_CHUNK);
    const AttentionSizes& s = call.shape;
    u64 of_keys_tiles = (s.key_seq + KEYS - 1) / KEYS, of_query_tiles = (s.seq + QUERIES - 1) / QUERIES;
    u64 stretches = call.bias.len > 0 ? (s.seq - 1 + s.key_seq + DISTANCES - 1) / DISTANCES : 0;
    u64 for_keys = s.kv_heads * of_keys_tiles, for_queries = s.heads * of_query_tiles, for_bias = s.heads * stretches;
    u64 for_sinks = call.sinks.len > 0 ? s.heads : 0, tasks = for_keys + for_queries + for_bias + for_sinks;
    BLOCKS(task, s.rows * tasks) {
        u64 row = task / tasks, n = task % tasks;
        if (n < for_keys) {
            key_gradients(call, of, at, row, n / of_keys_tiles, n % of_keys_tiles * KEYS);
        } else if ((n -= for_keys) < for_queries) {
            query_gradients(call, of, at, row, n / of_query_tiles, n % of_query_tiles * QUERIES);
        } else if ((n -= for_queries) < for_bias) {
            bias_gradients(call, of, at, row, n / stretches, n % stretches * DISTANCES);
        } else {
            sink_gradient(call, of, at, row, n - for_bias);
        }
    }
}

// dqkv [T, width] from the forward's inputs and outputs and g [T, heads * value_dim]
KERNEL(attention_back,
       (Span<float> dqkv, ConstAny qkv, ConstAny out, Span<const float> lse, Span<const float> g, Span<const u32> keys,
        Span<const float> cos, Span<const float> sin, AttentionSizes shape)) {
    float* to = dqkv.data;
    backward(fused_call(shape, qkv.dtype, keys, cos, sin),
             {qkv, qkv, qkv, out, lse.data, g.data, to, to, to, nullptr, nullptr});
}

// The same apart; dbias [rows, seq - 1 + key_seq, heads] and dsinks [rows, heads] have a copy for each row of the batch
KERNEL(attention_apart_back,
       (Span<float> dq, Span<float> dk, Span<float> dv, Span<float> dbias, Span<float> dsinks, ConstAny q, ConstAny k,
        ConstAny v, ConstAny out, Span<const float> lse, Span<const float> g, Span<const u32> keys,
        Span<const float> cos, Span<const float> sin, Span<const float> bias, Span<const float> sinks,
        AttentionSizes shape)) {
    backward(apart_call(shape, q.dtype, keys, cos, sin, bias, sinks),
             {q, k, v, out, lse.data, g.data, dq.data, dk.data, dv.data, dbias.data, dsinks.data});
}
