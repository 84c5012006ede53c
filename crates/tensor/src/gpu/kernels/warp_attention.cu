// Attention in bf16 tile by tile, each tile by a warp that needs nobody else: what attention.cu does for heads of any size,
// with biases and sinks, is done here several times as fast for heads of up to 128 numbers, without.
//
// Heads are arranged first: turned by position, rounded, filled up with zeros to DIM numbers and whole tiles, line by line
// and, for products that sum over lines, column by column. The backward has two kernels, each of which computes the weights
// again: one owns queries (dq), one owns keys (dk, dv). No two warps write to one place, and sums have one order.
#include "common.cuh"
#include "tiles.cuh"
#include "attention.cuh"
#include "octets.cuh"

constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.693147181f;

// Where heads lie: all in one matrix, or each part in its own.
DEVICE AttentionCall places_of(AttentionSizes shape, u32 is_fused) {
    Span<const float> none = {nullptr, 0};
    Span<const u32> all = {nullptr, 0};
    return is_fused ? fused_call(shape, BF16, all, none, none) : apart_call(shape, BF16, all, none, none, none, none);
}

// --- arranging -------------------------------------------------------------------------------------------------------

// The most numbers of a head.
constexpr u32 MOST_NUMBERS = 128;

// lines [rows, heads, length, dim] and columns [rows, heads, length / 32, dim, 32] = the numbers of heads, of which
// of(token, head, number) has `count` of each of `seq` tokens of a row; zeros elsewhere. Either may be empty. A word of two
// numbers at a time.
template <class Of>
DEVICE void arrange(Any lines, Any columns, u64 rows, u32 heads, u64 seq, u32 count, u64 length, u32 dim, Of of) {
    constexpr u32 WORDS = MOST_NUMBERS / 2 + 1;
    SHARED(u32, tile, RIGHT_LINES * WORDS);
    u64 tiles = length / RIGHT_LINES;
    BLOCKS(task, rows * heads * tiles) {
        // Heads of a tile's tokens lie side by side.
        u32 head = (u32)(task % heads);
        u64 first = task / heads % tiles * RIGHT_LINES, row = task / heads / tiles;
        u64 place = (row * heads + head) * length * dim + first * dim;
        THREADS {
            u32* to = (u32*)((u16*)lines.data + place);
            for (u32 e = thread(); e < RIGHT_LINES * dim / 2; e += threads()) {
                u32 line = e / (dim / 2), c = e % (dim / 2) * 2;
                u64 token = row * seq + first + line;
                bool is_there = first + line < seq;
                float x = is_there && c < count ? of(token, head, c) : 0.0f;
                float y = is_there && c + 1 < count ? of(token, head, c + 1) : 0.0f;
                u32 pair = rounded_pair(x, y);
                if (lines.len > 0) to[e] = pair;
                tile[line * WORDS + c / 2] = pair;
            }
        }
        THREADS {
            u32* to = (u32*)((u16*)columns.data + place);
            for (u32 e = thread(); columns.len > 0 && e < RIGHT_LINES * dim / 2; e += threads()) {
                u32 c = e / (RIGHT_LINES / 2), line = e % (RIGHT_LINES / 2) * 2, behind = c % 2 * 16;
                u32 upper = tile[line * WORDS + c / 2] >> behind, lower = tile[(line + 1) * WORDS + c / 2] >> behind;
                to[e] = (upper & 0xffff) | lower << 16;
            }
        }
    }
}

// Part 0 are the queries, 1 the keys, 2 the values: of one matrix, or each of its own.
KERNEL(arrange_heads,
       (Any lines, Any columns, ConstAny from, Span<const float> cos, Span<const float> sin, AttentionSizes shape,
        u32 part, u32 is_fused, u64 length, u64 dim)) {
    AttentionCall call = places_of(shape, is_fused);
    HeadLines of = part == 0 ? call.q : part == 1 ? call.k : call.v;
    u64 heads = part == 0 ? shape.heads : shape.kv_heads;
    u32 half = of.rotates ? (u32)shape.rotary_dim / 2 : 0, still = (u32)(of.dim - 2 * half);
    arrange(lines, columns, shape.rows, (u32)heads, of.seq, (u32)of.dim, length, (u32)dim, [&](u64 token, u32 head, u32 c) {
        u64 first = token * of.width + of.column + head * of.dim;
        if (c < still || half == 0) return load(from, first + c);
        // The number that turns with it, on which side of it, and by which angle.
        bool is_low = shape.pairs == HALVES ? c - still < half : (c - still) % 2 == 0;
        u32 apart = shape.pairs == HALVES ? half : 1, other = is_low ? c + apart : c - apart;
        u64 at = token * half + (shape.pairs == HALVES ? (c - still) % half : (c - still) / 2);
        float x = load(from, first + c), y = load(from, first + other), turn = sin.data[at];
        return is_low ? x * cos.data[at] - y * turn : x * cos.data[at] + y * turn;
    });
}

// The same of the output's gradient [T, heads * value_dim].
KERNEL(arrange_slopes, (Any lines, Any columns, Span<const float> slopes, AttentionSizes shape, u64 length, u64 dim)) {
    arrange(lines, columns, shape.rows, (u32)shape.heads, shape.seq, (u32)shape.value_dim, length, (u32)dim,
            [&](u64 token, u32 head, u32 c) { return slopes.data[(token * shape.heads + head) * shape.value_dim + c]; });
}

// For each query of each head, [rows, heads, length]: the log-sum-exp of scores, to base 2, and the product of the output
// with its gradient.
KERNEL(arrange_sums, (Span<float> log_sums, Span<float> inner, ConstAny out, Span<const float> lse,
                      Span<const float> slopes, AttentionSizes shape, u64 length)) {
    u64 dim = shape.value_dim, places = shape.rows * shape.heads * length;
    BLOCKS(group, (places + warps() - 1) / warps()) {
        WARPS {
            // Heads of a query lie side by side.
            u64 n = group * warps() + warp(), head = n % shape.heads, query = n / shape.heads % length;
            u64 row = n / shape.heads / length, token = (row * shape.seq + query) * shape.heads + head;
            bool is_there = n < places && query < shape.seq;
            Lanes<float, 1> sum;
            EACH_LANE(lane) {
                float of_lane = 0.0f;
                for (u64 c = lane; is_there && c < dim; c += 32) {
                    of_lane = fmaf(load(out, token * dim + c), slopes.data[token * dim + c], of_lane);
                }
                sum.of(lane)[0] = of_lane;
            }
            sum_over_lanes(sum, 32);
            EACH_LANE(lane) {
                u64 place = (row * shape.heads + head) * length + query;
                if (lane == 0 && n < places) {
                    log_sums.data[place] = is_there ? lse.data[token] * LOG2_E : 0.0f;
                    inner.data[place] = sum.of(lane)[0];
                }
            }
        }
    }
}

// --- what a warp needs ------------------------------------------------------------------------------------------------

// Heads as they were arranged.
template <u32 DIM> struct ArrangedHeads {
    const u16 *lines, *columns;
    // Lines of a head.
    u64 length;

    // Where line `i` of a head lies; `i` is the first of 32 where columns are asked for.
    MEMBER const u16* lines_of(u64 head, u64 i) const { return lines + (head * length + i) * DIM; }
    MEMBER const u16* columns_of(u64 head, u64 i) const { return columns + (head * length + i) * DIM; }
};

template <u32 DIM> DEVICE ArrangedHeads<DIM> arranged(ConstAny lines, ConstAny columns, u64 length) {
    return {(const u16*)lines.data, (const u16*)columns.data, length};
}

// Which keys a query of a row sees.
struct SeenKeys {
    u32 first, end;
};

DEVICE SeenKeys seen_keys(Span<const u32> keys, const AttentionSizes& s, u64 row, u64 query) {
    if (query >= s.seq) return {0, 0};
    const u32* of = keys.data + 2 * (row * s.seq + query);
    return {of[0], of[1]};
}

DEVICE bool sees(SeenKeys keys, u32 key) { return key >= keys.first && key < keys.end; }

// Which tiles have most to do, and so come first: later queries see more keys, earlier keys are seen by more queries.
enum Longest { LAST_TILES, FIRST_TILES };

// Calls f(first line, head, row) for every tile of `lines` lines of each head, a warp each. Warps of a block have neighbours
// of one head, which read the same.
template <class F> DEVICE void each_tile(Longest longest, u64 rows, u64 heads, u64 seq, u32 lines, F f) {
    u64 groups = (seq + lines * warps() - 1) / (lines * warps());
    BLOCKS(task, rows * heads * groups) {
        u64 group = task / (rows * heads), head = task % heads, row = task / heads % rows;
        if (longest == LAST_TILES) group = groups - 1 - group;
        WARPS {
            u64 first = (group * warps() + warp()) * lines;
            if (first < seq) f(first, head, row);
        }
    }
}

// --- forward ----------------------------------------------------------------------------------------------------------

// What queries have seen so far, of each line 8 eight + g: the largest product, and the sum of weights relative to it, of
// a lane's keys alone.
template <u32 M> struct RunningSoftmax {
    Lanes<float, 2 * M> top, total;
};

// Products become weights relative to the largest up to here, and earlier sums shrink with it. `scale` is of base 2.
template <u32 DIM, u32 M>
DEVICE void to_running_weights(LineProducts<M>& products, LineSums<DIM, M>& sums, RunningSoftmax<M>& softmax, float scale) {
    Lanes<float, 2 * M> top, shrink;
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < 2 * M; n++) top.of(lane)[n] = softmax.top.of(lane)[n];
        each_product(products, lane, [&](u32 eight, u32, float& product) {
            top.of(lane)[eight] = fmaxf(top.of(lane)[eight], product);
        });
    }
    max_over_lanes(top, 4);
    Lanes<bool, 1> rises;
    EACH_LANE(lane) {
        rises.of(lane)[0] = false;
        UNROLLED for (u32 n = 0; n < 2 * M; n++) {
            // Of no key yet both are infinite, and their difference is not a number.
            float risen = top.of(lane)[n], &before = softmax.top.of(lane)[n];
            float base = risen == -infinity() ? 0.0f : risen * scale;
            shrink.of(lane)[n] = power_of_2(before == -infinity() ? before : before * scale - base);
            rises.of(lane)[0] |= before != risen;
            before = risen;
            top.of(lane)[n] = base;
            softmax.total.of(lane)[n] *= shrink.of(lane)[n];
        }
        each_product(products, lane, [&](u32 eight, u32, float& product) {
            product = power_of_2(fmaf(product, scale, -top.of(lane)[eight]));
            softmax.total.of(lane)[eight] += product;
        });
    }
    if (!any_of_lanes(rises)) return;
    EACH_LANE(lane) {
        each_sum(sums, lane, [&](u32 eight, u32, float& sum) { sum *= shrink.of(lane)[eight]; });
    }
}

template <u32 DIM> struct ForwardCall {
    float *out, *lse;
    ArrangedHeads<DIM> q, k, v;
    Span<const u32> keys;
    AttentionSizes shape;
};

// A warp's tile of queries.
template <u32 DIM, u32 M, bool IS_HELD> DEVICE void attend_tile(const ForwardCall<DIM>& call, u64 query, u64 head, u64 row) {
    const AttentionSizes& s = call.shape;
    u64 of_q = row * s.heads + head, of_k = row * s.kv_heads + head / (s.heads / s.kv_heads);
    u64 last = least<u64>(query + LEFT_LINES * M, s.seq) - 1;
    SeenKeys low = seen_keys(call.keys, s, row, query), high = seen_keys(call.keys, s, row, last);
    LeftLines<DIM, M, IS_HELD> queries;
    queries.load(call.q.lines_of(of_q, query));
    LineSums<DIM, M> sums = {};
    RunningSoftmax<M> softmax;
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < 2 * M; n++) {
            softmax.top.of(lane)[n] = -infinity();
            softmax.total.of(lane)[n] = 0.0f;
        }
    }
    ROLLED for (u32 key = low.first / RIGHT_LINES * RIGHT_LINES; key < high.end; key += RIGHT_LINES) {
        LineProducts<M> products = {};
        add_products(products, queries, call.k.lines_of(of_k, key));
        if (key < high.first || key + RIGHT_LINES > low.end) {
            EACH_LANE(lane) {
                Lanes<SeenKeys, 2 * M> seen;
                UNROLLED for (u32 n = 0; n < 2 * M; n++) {
                    seen.of(lane)[n] = seen_keys(call.keys, s, row, query + 8 * n + lane / 4);
                }
                each_product(products, lane, [&](u32 eight, u32 column, float& product) {
                    if (!sees(seen.of(lane)[eight], key + column)) product = -infinity();
                });
            }
        }
        to_running_weights(products, sums, softmax, s.scale * LOG2_E);
        add_weighted(sums, products, call.v.columns_of(of_k, key));
    }
    sum_over_lanes(softmax.total, 4);
    auto token = [&](u32 line) { return (row * s.seq + query + line) * s.heads + head; };
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < 2 * M; n++) {
            u32 line = 8 * n + lane / 4;
            float &total = softmax.total.of(lane)[n], top = softmax.top.of(lane)[n];
            if (lane % 4 == 0 && query + line <= last) {
                call.lse[token(line)] = total > 0.0f ? top * s.scale + logf(total) : -infinity();
            }
            // A query that sees no key gets nothing.
            total = total > 0.0f ? 1.0f / total : 0.0f;
        }
        each_sum(sums, lane, [&](u32 eight, u32 c, float& sum) {
            u32 line = 8 * eight + lane / 4;
            if (query + line > last || c >= s.value_dim) return;
            call.out[token(line) * s.value_dim + c] = sum * softmax.total.of(lane)[eight];
        });
    }
}

// out [T, heads * value_dim] and lse [T, heads] of arranged heads of DIM numbers, by M times 16 queries a warp.
#define FORWARD(name, DIM, M, IS_HELD)                                                                         \
    KERNEL(name, (Span<float> out, Span<float> lse, ConstAny q, ConstAny k, ConstAny v, Span<const u32> keys,  \
                  AttentionSizes shape, u64 queries, u64 key_lines)) {                                         \
        ConstAny none = {nullptr, 0, BF16};                                                                    \
        ForwardCall<DIM> call = {out.data, lse.data, arranged<DIM>(q, none, queries),                          \
                                 arranged<DIM>(k, none, key_lines), arranged<DIM>(none, v, key_lines), keys, shape}; \
        each_tile(LAST_TILES, shape.rows, shape.heads, shape.seq, LEFT_LINES * M, [&](u64 query, u64 head, u64 row) { \
            attend_tile<DIM, M, IS_HELD>(call, query, head, row);                                              \
        });                                                                                                    \
    }

FORWARD(warp_attention_32, 32, 2, true)
FORWARD(warp_attention_64, 64, 2, true)
FORWARD(warp_attention_128, 128, 1, true)

// --- backward ---------------------------------------------------------------------------------------------------------

template <u32 DIM> struct BackwardCall {
    ArrangedHeads<DIM> q, k, v, slopes;
    // [rows, heads, length] of `q`
    const float *log_sums, *inner;
    Span<const u32> keys;
    AttentionSizes shape;
};

// A product becomes a weight, and the slope along the weight the slope along the score.
DEVICE void to_slope(float& product, float& slope, float log_sum, float inner, float scale) {
    product = power_of_2(fmaf(product, scale, -log_sum));
    slope = product * (slope - inner);
}

// dq of a warp's tile of queries, not yet turned back.
template <u32 DIM, u32 M, bool IS_HELD>
DEVICE void query_slopes(const BackwardCall<DIM>& call, float* dq, HeadLines to, u64 query, u64 head, u64 row) {
    const AttentionSizes& s = call.shape;
    u64 of_q = row * s.heads + head, of_k = row * s.kv_heads + head / (s.heads / s.kv_heads);
    u64 last = least<u64>(query + LEFT_LINES * M, s.seq) - 1;
    SeenKeys low = seen_keys(call.keys, s, row, query), high = seen_keys(call.keys, s, row, last);
    Lanes<float, 2 * M> log_sums, inner;
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < 2 * M; n++) {
            u64 place = of_q * call.q.length + query + 8 * n + lane / 4;
            log_sums.of(lane)[n] = call.log_sums[place];
            inner.of(lane)[n] = call.inner[place];
        }
    }
    LeftLines<DIM, M, IS_HELD> queries, slopes;
    queries.load(call.q.lines_of(of_q, query));
    slopes.load(call.slopes.lines_of(of_q, query));
    LineSums<DIM, M> sums = {};
    ROLLED for (u32 key = low.first / RIGHT_LINES * RIGHT_LINES; key < high.end; key += RIGHT_LINES) {
        LineProducts<M> products = {}, along = {};
        add_products(products, queries, call.k.lines_of(of_k, key));
        add_products(along, slopes, call.v.lines_of(of_k, key));
        EACH_LANE(lane) {
            UNROLLED for (u32 n = 0; n < M * 16; n++) {
                u32 m = n / 16, t = n / 4 % 4, i = n % 4, eight = 2 * m + i / 2;
                to_slope(products.squares[m][t].of(lane)[i], along.squares[m][t].of(lane)[i], log_sums.of(lane)[eight],
                         inner.of(lane)[eight], s.scale * LOG2_E);
            }
        }
        if (key < high.first || key + RIGHT_LINES > low.end) {
            EACH_LANE(lane) {
                Lanes<SeenKeys, 2 * M> seen;
                UNROLLED for (u32 n = 0; n < 2 * M; n++) {
                    seen.of(lane)[n] = seen_keys(call.keys, s, row, query + 8 * n + lane / 4);
                }
                each_product(along, lane, [&](u32 eight, u32 column, float& slope) {
                    if (!sees(seen.of(lane)[eight], key + column)) slope = 0.0f;
                });
            }
        }
        add_weighted(sums, along, call.k.columns_of(of_k, key));
    }
    EACH_LANE(lane) {
        each_sum(sums, lane, [&](u32 eight, u32 c, float& sum) {
            u64 line = query + 8 * eight + lane / 4;
            if (line <= last && c < to.dim) dq[head_place(to, row, head, line) + c] = sum * s.scale;
        });
    }
}

// The first query of a row of which bound 0, its first key, or 1, the key behind its last, is larger than `key`: bounds
// never fall.
DEVICE u32 first_beyond(Span<const u32> keys, const AttentionSizes& s, u64 row, u32 bound, u64 key) {
    u32 low = 0, high = (u32)s.seq;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (keys.data[2 * (row * s.seq + middle) + bound] > key) high = middle;
        else low = middle + 1;
    }
    return low;
}

// dk and dv of a warp's keys, by all queries of all heads that share them; dk not yet turned back.
template <u32 DIM, u32 M, bool IS_HELD>
DEVICE void key_slopes(const BackwardCall<DIM>& call, float* dk, HeadLines to_k, float* dv, HeadLines to_v, u32 key, u64 kv,
                       u64 row) {
    const AttentionSizes& s = call.shape;
    u64 group = s.heads / s.kv_heads, of_k = row * s.kv_heads + kv;
    u32 last = (u32)least<u64>(key + LEFT_LINES * M, s.key_seq) - 1;
    u32 begin = first_beyond(call.keys, s, row, 1, key), end = first_beyond(call.keys, s, row, 0, last);
    LineSums<DIM, M> of_keys = {}, of_values = {};
    LeftLines<DIM, M, IS_HELD> keys, values;
    keys.load(call.k.lines_of(of_k, key));
    values.load(call.v.lines_of(of_k, key));
    ROLLED for (u64 head = kv * group; head < (kv + 1) * group; head++) {
        u64 of_q = row * s.heads + head;
        ROLLED for (u32 query = begin / RIGHT_LINES * RIGHT_LINES; query < end; query += RIGHT_LINES) {
            LineProducts<M> products = {}, along = {};
            add_products(products, keys, call.q.lines_of(of_q, query));
            add_products(along, values, call.slopes.lines_of(of_q, query));
            EACH_LANE(lane) {
                u64 place = of_q * call.q.length + query + lane % 4 * 8;
                Eight log_sums = *(const Eight*)(call.log_sums + place), inner = *(const Eight*)(call.inner + place);
                UNROLLED for (u32 n = 0; n < M * 16; n++) {
                    u32 m = n / 16, t = n / 4 % 4, i = n % 4, query_of_lane = 2 * t + i % 2;
                    to_slope(products.squares[m][t].of(lane)[i], along.squares[m][t].of(lane)[i],
                             log_sums.of[query_of_lane], inner.of[query_of_lane], s.scale * LOG2_E);
                }
            }
            SeenKeys low = seen_keys(call.keys, s, row, query);
            SeenKeys high = seen_keys(call.keys, s, row, query + RIGHT_LINES - 1);
            if (query + RIGHT_LINES > s.seq || key < high.first || key + LEFT_LINES * M > low.end) {
                EACH_LANE(lane) {
                    ROLLED for (u32 n = 0; n < 8; n++) {
                        SeenKeys seen = seen_keys(call.keys, s, row, query + lane % 4 * 8 + n);
                        UNROLLED for (u32 at = 0; at < M * 16; at++) {
                            u32 m = at / 16, t = at / 4 % 4, i = at % 4, of_lane = key + 16 * m + i / 2 * 8 + lane / 4;
                            bool is_seen = 2 * t + i % 2 != n || sees(seen, of_lane);
                            if (!is_seen) products.squares[m][t].of(lane)[i] = along.squares[m][t].of(lane)[i] = 0.0f;
                        }
                    }
                }
            }
            add_weighted(of_values, products, call.slopes.columns_of(of_q, query));
            add_weighted(of_keys, along, call.q.columns_of(of_q, query));
        }
    }
    EACH_LANE(lane) {
        each_sum(of_keys, lane, [&](u32 eight, u32 c, float& sum) {
            u32 line = key + 8 * eight + lane / 4;
            if (line <= last && c < to_k.dim) dk[head_place(to_k, row, kv, line) + c] = sum * s.scale;
        });
        each_sum(of_values, lane, [&](u32 eight, u32 c, float& sum) {
            u32 line = key + 8 * eight + lane / 4;
            if (line <= last && c < to_v.dim) dv[head_place(to_v, row, kv, line) + c] = sum;
        });
    }
}

#define BACKWARD_OF_QUERIES(name, DIM, M, IS_HELD)                                                             \
    KERNEL(name, (Span<float> dq, ConstAny q, ConstAny k, ConstAny k_columns, ConstAny v, ConstAny slopes,     \
                  Span<const float> log_sums, Span<const float> inner, Span<const u32> keys,                   \
                  AttentionSizes shape, u32 is_fused, u64 queries, u64 key_lines)) {                           \
        ConstAny none = {nullptr, 0, BF16};                                                                    \
        BackwardCall<DIM> call = {arranged<DIM>(q, none, queries), arranged<DIM>(k, k_columns, key_lines),     \
                                  arranged<DIM>(v, none, key_lines), arranged<DIM>(slopes, none, queries),     \
                                  log_sums.data, inner.data, keys, shape};                                     \
        HeadLines to = places_of(shape, is_fused).q;                                                           \
        each_tile(LAST_TILES, shape.rows, shape.heads, shape.seq, LEFT_LINES * M, [&](u64 query, u64 head, u64 row) { \
            query_slopes<DIM, M, IS_HELD>(call, dq.data, to, query, head, row);                                \
        });                                                                                                    \
    }

BACKWARD_OF_QUERIES(warp_attention_back_queries_32, 32, 2, true)
BACKWARD_OF_QUERIES(warp_attention_back_queries_64, 64, 2, true)
BACKWARD_OF_QUERIES(warp_attention_back_queries_128, 128, 1, true)

#define BACKWARD_OF_KEYS(name, DIM, M, IS_HELD)                                                                \
    KERNEL(name, (Span<float> dk, Span<float> dv, ConstAny q, ConstAny q_columns, ConstAny k, ConstAny v,      \
                  ConstAny slopes, ConstAny slope_columns, Span<const float> log_sums,                         \
                  Span<const float> inner, Span<const u32> keys, AttentionSizes shape, u32 is_fused,           \
                  u64 queries, u64 key_lines)) {                                                               \
        ConstAny none = {nullptr, 0, BF16};                                                                    \
        BackwardCall<DIM> call = {arranged<DIM>(q, q_columns, queries), arranged<DIM>(k, none, key_lines),     \
                                  arranged<DIM>(v, none, key_lines), arranged<DIM>(slopes, slope_columns, queries), \
                                  log_sums.data, inner.data, keys, shape};                                     \
        AttentionCall to = places_of(shape, is_fused);                                                         \
        each_tile(FIRST_TILES, shape.rows, shape.kv_heads, shape.key_seq, LEFT_LINES * M,                      \
                  [&](u64 key, u64 kv, u64 row) {                                                              \
            key_slopes<DIM, M, IS_HELD>(call, dk.data, to.k, dv.data, to.v, (u32)key, kv, row);                \
        });                                                                                                    \
    }

BACKWARD_OF_KEYS(warp_attention_back_keys_32, 32, 1, true)
BACKWARD_OF_KEYS(warp_attention_back_keys_64, 64, 1, true)
BACKWARD_OF_KEYS(warp_attention_back_keys_128, 128, 1, false)

// Turns the gradients of queries, part 0, or keys, part 1, back: a thread a pair.
KERNEL(turn_heads_back, (Span<float> to, Span<const float> cos, Span<const float> sin, AttentionSizes shape, u32 part,
                         u32 is_fused)) {
    AttentionCall call = places_of(shape, is_fused);
    HeadLines lines = part == 0 ? call.q : call.k;
    u32 heads = part == 0 ? (u32)shape.heads : (u32)shape.kv_heads, half = (u32)shape.rotary_dim / 2;
    BLOCKS(token, shape.rows * lines.seq) {
        THREADS {
            for (u32 i = thread(); i < heads * half; i += threads()) {
                u32 angle = i % half;
                Turning of = turning(shape, shape.pairs == HALVES ? angle : 2 * angle);
                float* line = to.data + token * lines.width + lines.column + i / half * lines.dim + lines.dim - 2 * half;
                float x = line[of.low], y = line[of.high], c = cos.data[token * half + angle];
                float turn = -sin.data[token * half + angle];
                line[of.low] = x * c - y * turn;
                line[of.high] = y * c + x * turn;
            }
        }
    }
}
