// Attention of new tokens to a cache and to themselves, for generation, without gradients. No block waits for another:
// what is not in the cache yet, a block computes for itself, and what it puts there nobody reads in this launch.
#include "common.cuh"
#include "tiles.cuh"
#include "attention.cuh"

// out [n, heads * value_dim] from qkv [n, width], whose keys (turned) and values follow the `cached` lines of keys and
// values
KERNEL(attend_cached,
       (Span<float> out, Span<float> keys, Span<float> values, Span<const float> qkv, Span<const float> cos,
        Span<const float> sin, Span<const float> bias, Span<const float> sinks, AttentionSizes shape, u64 cached,
        u64 window)) {
    ATTENDING(at, KEY_CHUNK);
    AttentionSizes s = shape;
    AttentionCall call = fused_call(s, F32, {nullptr, 0}, cos, sin);
    ConstAny fresh = {qkv.data, qkv.len, F32};
    u64 count = qkv.len / call.q.width, all = cached + count, group = s.heads / s.kv_heads;
    auto key_of = [&](u64 j, u64 kv, u64 c) {
        if (j >= cached) return head_number(call, call.k, fresh, 0, kv, j - cached, c);
        return keys.data[(j * s.kv_heads + kv) * s.head_dim + c];
    };
    auto value_of = [&](u64 j, u64 kv, u64 c) {
        if (j >= cached) return head_number(call, call.v, fresh, 0, kv, j - cached, c);
        return values.data[(j * s.kv_heads + kv) * s.value_dim + c];
    };
    // The first key that token `own` sees.
    auto first_of = [&](u64 own) { return own + 1 > window ? own + 1 - window : 0; };
    u64 distances = bias.len / s.heads, tiles = (count + QUERIES - 1) / QUERIES;
    BLOCKS(task, s.heads * tiles) {
        u64 t = task % tiles * QUERIES, head = task / tiles, kv = head / group, end = least<u64>(t + QUERIES, count);
        auto compute = [&](u64 key) {
            multiply_lines(
                F32, at.scores, at.of_queries, at.of_keys, s.head_dim,
                [&](u32 r, u64 c) { return t + r < end ? head_number(call, call.q, fresh, 0, head, t + r, c) : 0.0f; },
                [&](u32 r, u64 c) { return key + r < all ? key_of(key + r, kv, c) : 0.0f; });
            THREADS {
                for (u32 item = thread(); item < QUERIES * KEYS; item += threads()) {
                    u64 own = cached + t + item / KEYS, j = key + item % KEYS;
                    float& score = at.scores[item / KEYS * SCORE_LINE + item % KEYS];
                    score *= s.scale;
                    // The last distance is 0, and the first as far as tokens see.
                    bool biased = own < all && j <= own && own - j < distances;
                    if (biased) score += bias.data[(distances - 1 + j - own) * s.heads + head];
                }
            }
        };
        Sink sink = {0.0f, 0.0f};
        if (sinks.len > 0) sink = {sinks.data[head], 1.0f};
        attend(
            F32, at, {first_of(cached + t), cached + end}, (u32)(end - t), s.value_dim, sink, compute,
            [&](u32 r, u64 key) {
                if (t + r >= end) return Visible{0, 0};
                return visible(first_of(cached + t + r), cached + t + r + 1, key);
            },
            [&](u64 j, u64 c) { return j < all ? value_of(j, kv, c) : 0.0f; },
            [&](u32 r, u64 c) -> float& { return out.data[((t + r) * s.heads + head) * s.value_dim + c]; },
            [](u32, float) {});
    }
    u64 width = s.kv_heads * s.head_dim, value_width = s.kv_heads * s.value_dim;
    EACH(i, count * width) {
        keys.data[cached * width + i] = key_of(cached + i / width, i % width / s.head_dim, i % s.head_dim);
    }
    EACH(i, count * value_width) {
        values.data[cached * value_width + i] =
            value_of(cached + i / value_width, i % value_width / s.value_dim, i % s.value_dim);
    }
}

// out [n, H d] from q [n, H d] and kv [n, 2 H d], which follow the `cached` lines of keys and values; first_key [cached
// + n]
KERNEL(relative_attend_cached,
       (Span<float> out, Span<float> keys, Span<float> values, Span<const float> q, Span<const float> kv,
        Span<const float> distances, Span<const float> u, Span<const float> v, Span<const u32> first_key,
        RelativeAttentionSizes shape, u64 cached)) {
    ATTENDING(at, DIAGONAL_CHUNK);
    u64 dim = shape.head_dim, width = shape.heads * dim, count = q.len / width, all = cached + count;
    auto key_of = [&](u64 j, u64 c) {
        return j >= cached ? kv.data[(j - cached) * 2 * width + c] : keys.data[j * width + c];
    };
    auto value_of = [&](u64 j, u64 c) {
        return j >= cached ? kv.data[(j - cached) * 2 * width + width + c] : values.data[j * width + c];
    };
    u64 tiles = (count + QUERIES - 1) / QUERIES;
    BLOCKS(task, shape.heads * tiles) {
        u64 t = task % tiles * QUERIES, head = task / tiles * dim, end = least<u64>(t + QUERIES, count);
        auto query_of = [&](u32 r, u64 c, const float* more) {
            return t + r < end ? q.data[(t + r) * width + head + c] + more[head + c] : 0.0f;
        };
        auto compute = [&](u64 key) {
            multiply_lines(
                F32, at.scores, at.of_queries, at.of_keys, dim, [&](u32 r, u64 c) { return query_of(r, c, u.data); },
                [&](u32 r, u64 c) { return key + r < all ? key_of(key + r, head + c) : 0.0f; });
            add_distances(
                at.scores, at.of_queries, at.of_keys, dim, 1.0f / sqrtf((float)dim),
                [&](u32 r, u64 c) { return query_of(r, c, v.data); },
                [&](u32 n, u64 c) {
                    // Below zero it wraps around to one far beyond the last.
                    u64 distance = cached + t + n - (key + KEYS - 1);
                    return distance < distances.len / width ? distances.data[distance * width + head + c] : 0.0f;
                });
        };
        attend(
            F32, at, {first_key.data[cached + t], cached + end}, (u32)(end - t), dim, {0.0f, 0.0f}, compute,
            [&](u32 r, u64 key) {
                if (t + r >= end) return Visible{0, 0};
                return visible(first_key.data[cached + t + r], cached + t + r + 1, key);
            },
            [&](u64 j, u64 c) { return j < all ? value_of(j, head + c) : 0.0f; },
            [&](u32 r, u64 c) -> float& { return out.data[(t + r) * width + head + c]; }, [](u32, float) {});
    }
    EACH(i, count * width) {
        keys.data[cached * width + i] = key_of(cached + i / width, i % width);
        values.data[cached * width + i] = value_of(cached + i / width, i % width);
    }
}
