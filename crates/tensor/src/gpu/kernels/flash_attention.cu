// Attention in bf16 by blocks whose warps each have a tile of lines of their own, and share the other lines tile by tile:
// what attention.cu does for heads of any size, with biases and sinks, is done here many times as fast for heads of up to 128
// numbers, without.
//
// Heads are arranged first: turned by position, rounded, filled up with zeros to DIM numbers and whole stages. The backward
// has two kernels, each of which computes the weights again: in one a warp owns queries (dq), in the other keys (dk, dv). No
// two warps write to one place, and sums have one order.
#include "common.cuh"
#include "tiles.cuh"
#include "attention.cuh"
#include "lines.cuh"
#include "rows.cuh"

constexpr float LOG2_E = 1.44269504f;

// Where heads lie: all in one matrix, or each part in its own.
DEVICE AttentionCall places_of(AttentionSizes shape, u32 is_fused) {
    Span<const float> none = {nullptr, 0};
    Span<const u32> all = {nullptr, 0};
    return is_fused ? fused_call(shape, BF16, all, none, none) : apart_call(shape, BF16, all, none, none, none, none);
}

// --- arranging -------------------------------------------------------------------------------------------------------

// lines [rows, heads, length, dim] = the numbers of heads, of which of(token, head, number, run) has `count` of each of `seq`
// tokens of a row; zeros elsewhere. By eights if `are_eights`.
template <class Of>
DEVICE void arrange(Any lines, u64 rows, u64 heads, u64 seq, u64 count, u64 length, u64 dim, bool are_eights, Of of) {
    each_run(rows * length * heads * dim, are_eights ? RUN : 1, [=](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        Cell number = cell_of(i, dim), head = cell_of(number.row, heads), line = cell_of(head.row, length);
        Numbers<N> from = {};
        if (line.column < seq && number.column < count) {
            from = of(line.row * seq + line.column, head.column, number.column, run);
        }
        store_run(lines, ((line.row * heads + head.column) * length + line.column) * dim + number.column, from);
    });
}

// Part 0 are the queries, 1 the keys, 2 the values: of one matrix, or each of its own.
KERNEL(arrange_heads, (Any lines, ConstAny from, Span<const float> cos, Span<const float> sin, AttentionSizes shape, u32 part,
                       u32 is_fused, u64 length, u64 dim)) {
    AttentionCall call = places_of(shape, is_fused);
    HeadLines of = part == 0 ? call.q : part == 1 ? call.k : call.v;
    u64 half = of.rotates ? shape.rotary_dim / 2 : 0, still = of.dim - 2 * half;
    bool are_halves = shape.pairs == HALVES, are_eights = (of.width | of.column | of.dim | still | half) % RUN == 0;
    u64 heads = part == 0 ? shape.heads : shape.kv_heads;
    arrange(lines, shape.rows, heads, of.seq, of.dim, length, dim, are_eights && (are_halves || half == 0),
            [=](u64 token, u64 head, u64 c, auto run) {
                constexpr u32 N = decltype(run)::COUNT;
                u64 first = token * of.width + of.column + head * of.dim;
                Numbers<N> x = load_run<N>(from, first + c);
                if (c < still || half == 0) return x;
                // The numbers that turn with these, on which side of them, and by which angles.
                bool is_low = are_halves ? c - still < half : (c - still) % 2 == 0;
                u64 apart = are_halves ? half : 1, angle = are_halves ? (c - still) % half : (c - still) / 2;
                Numbers<N> y = load_run<N>(from, first + (is_low ? c + apart : c - apart));
                Numbers<N> of_cos = load_run<N>(cos, token * half + angle), of_sin = load_run<N>(sin, token * half + angle);
                UNROLLED for (u32 n = 0; n < N; n++) {
                    float turned = y.of[n] * of_sin.of[n], kept = x.of[n] * of_cos.of[n];
                    x.of[n] = is_low ? kept - turned : kept + turned;
                }
                return x;
            });
}

// The same of the output's gradient [T, heads * value_dim].
KERNEL(arrange_slopes, (Any lines, Span<const float> slopes, AttentionSizes shape, u64 length, u64 dim)) {
    u64 heads = shape.heads, count = shape.value_dim;
    arrange(lines, shape.rows, heads, shape.seq, count, length, dim, count % RUN == 0,
            [=](u64 token, u64 head, u64 c, auto run) {
                return load_run<decltype(run)::COUNT>(slopes, (token * heads + head) * count + c);
            });
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
                sum.of(lane)[0] = 0.0f;
                if (is_there) add_products_of_lane(sum.of(lane)[0], lane, dim, out, token * dim, slopes, token * dim);
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

// --- what kernels have in common --------------------------------------------------------------------------------------

// Heads as they were arranged.
struct ArrangedHeads {
    const u16* lines;
    // Lines of a head, and numbers of a line.
    u64 length, dim;

    MEMBER const u16* of(u64 head) const { return lines + head * length * dim; }
};

DEVICE ArrangedHeads arranged(ConstAny lines, u64 length, u64 dim) { return {(const u16*)lines.data, length, dim}; }

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

// Calls f(first line, head, row) for as many lines of a head as a block's warps have, `lines` each.
template <class F> DEVICE void each_tile(Longest longest, u64 rows, u64 heads, u64 seq, u32 lines, F f) {
    u64 groups = (seq + lines * warps() - 1) / (lines * warps());
    BLOCKS(task, rows * heads * groups) {
        u64 group = task / (rows * heads), head = task % heads, row = task / heads % rows;
        if (longest == LAST_TILES) group = groups - 1 - group;
        f((u32)group * lines * warps(), head, row);
    }
}

// Keys that a warp multiplies its queries with at once.
constexpr u32 KEYS_AT_ONCE = 32;

// A warp's lines of queries of a row, which keys the first and the last of them see.
struct QueryTile {
    u32 first, last;
    SeenKeys low, high;

    MEMBER bool is_empty() const { return first > last; }
    // Whether any, or all, of keys that are multiplied at once are seen by any, or all, of its queries.
    MEMBER bool sees_any(u32 key) const { return !is_empty() && key < high.end && key + KEYS_AT_ONCE > low.first; }
    MEMBER bool sees_all(u32 key) const { return key >= high.first && key + KEYS_AT_ONCE <= low.end; }
};

DEVICE QueryTile query_tile(Span<const u32> keys, const AttentionSizes& s, u64 row, u32 first, u32 lines) {
    if (first >= s.seq) return {1, 0, {0, 0}, {0, 0}};
    u32 last = (u32)least<u64>(first + lines, s.seq) - 1;
    return {first, last, seen_keys(keys, s, row, first), seen_keys(keys, s, row, last)};
}

// What a warp's queries have of keys that they do not see becomes `value`.
template <u32 M>
DEVICE void set_unseen(LineProducts<M, KEYS_AT_ONCE>& products, const QueryTile& tile, Span<const u32> keys,
                       const AttentionSizes& s, u64 row, u32 key, float value) {
    if (tile.sees_all(key)) return;
    EACH_LANE(lane) {
        SeenKeys seen[2 * M];
        UNROLLED for (u32 n = 0; n < 2 * M; n++) seen[n] = seen_keys(keys, s, row, tile.first + 8 * n + lane / 4);
        each_product(products, lane, [&](u32 eight, u32 column, float& product) {
            if (!sees(seen[eight], key + column)) product = value;
        });
    }
}

// Bounds never fall: the keys that any query of a block sees, from whole stages on.
DEVICE Range keys_of_block(Span<const u32> keys, const AttentionSizes& s, u64 row, u32 first, u32 lines, u32 stage) {
    QueryTile tile = query_tile(keys, s, row, first, lines);
    return {tile.low.first / stage * stage, tile.high.end};
}

// For each warp's tile of M times 16 queries of each head: begin(its state, first query, head of queries, row), then
// use(state, row, key, keys, values, line) for whatever keys any of them sees, then finish(state, head, row).
template <class State, u32 DIM, u32 M, u32 STAGE, class Begin, class Use, class Finish>
DEVICE void each_query_tile(const AttentionSizes& s, Span<const u32> seen_by, ArrangedHeads k, ArrangedHeads v, Begin begin,
                            Use use, Finish finish) {
    SHARED(Octet, room_k, 2 * STAGE * DIM / 8);
    SHARED(Octet, room_v, 2 * STAGE * DIM / 8);
    each_tile(LAST_TILES, s.rows, s.heads, s.seq, LEFT_LINES * M, [&](u32 first, u64 head, u64 row) {
        u64 of_q = row * s.heads + head, of_k = row * s.kv_heads + head / (s.heads / s.kv_heads);
        OfWarp<State> of;
        WARPS { begin(of.mine(), first + warp() * LEFT_LINES * M, of_q, row); }
        Range seen = keys_of_block(seen_by, s, row, first, LEFT_LINES * M * warps(), STAGE);
        each_stage<DIM, STAGE>(
            room_k, room_v, k.of(of_k), v.of(of_k), (u32)seen.start, (u32)seen.end,
            [&](u32 key, const Octet* keys, const Octet* values) {
                WARPS {
                    UNROLLED for (u32 line = 0; line < STAGE; line += KEYS_AT_ONCE) {
                        if (!of.mine().tile.sees_any(key + line)) continue;
                        use(of.mine(), row, key + line, keys, values, line);
                    }
                }
            });
        WARPS {
            if (!of.mine().tile.is_empty()) finish(of.mine(), head, row);
        }
    });
}

// --- forward ----------------------------------------------------------------------------------------------------------

// What queries have seen so far, of each line 8 eight + g: the largest product, and the sum of weights relative to it, of
// a lane's keys alone.
template <u32 M> struct RunningSoftmax {
    Lanes<float, 2 * M> top, total;
};

// Products become weights relative to the largest up to here, and earlier sums shrink with it. `scale` is of base 2.
template <u32 DIM, u32 M>
DEVICE void to_running_weights(LineProducts<M, KEYS_AT_ONCE>& products, LineSums<DIM, M>& sums, RunningSoftmax<M>& softmax, float scale) {
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

struct ForwardCall {
    float *out, *lse;
    ArrangedHeads q, k, v;
    Span<const u32> keys;
    AttentionSizes shape;
};

// What a warp has that attends for a tile of queries.
template <u32 DIM, u32 M> struct AttendingWarp {
    QueryTile tile;
    LeftLines<DIM, M> queries;
    LineSums<DIM, M> sums;
    RunningSoftmax<M> softmax;
};

template <u32 DIM, u32 M>
DEVICE void begin_attending(AttendingWarp<DIM, M>& of, const ForwardCall& call, u64 row, u64 of_q, u32 first) {
    of.tile = query_tile(call.keys, call.shape, row, first, LEFT_LINES * M);
    of.queries.load(call.q.of(of_q) + (of.tile.is_empty() ? 0 : first) * DIM);
    of.sums = {};
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < 2 * M; n++) {
            of.softmax.top.of(lane)[n] = -infinity();
            of.softmax.total.of(lane)[n] = 0.0f;
        }
    }
}

// To keys from `key` on, line `line` of a stage.
template <u32 DIM, u32 M>
DEVICE void attend_to(AttendingWarp<DIM, M>& of, const ForwardCall& call, u64 row, u32 key, const Octet* keys,
                      const Octet* values, u32 line) {
    LineProducts<M, KEYS_AT_ONCE> products = {};
    add_products(products, of.queries, keys, line);
    set_unseen(products, of.tile, call.keys, call.shape, row, key, -infinity());
    to_running_weights(products, of.sums, of.softmax, call.shape.scale * LOG2_E);
    add_weighted(of.sums, products, values, line);
}

template <u32 DIM, u32 M>
DEVICE void finish_attending(AttendingWarp<DIM, M>& of, const ForwardCall& call, u64 row, u64 head) {
    const AttentionSizes& s = call.shape;
    sum_over_lanes(of.softmax.total, 4);
    auto token = [&](u32 line) { return (row * s.seq + line) * s.heads + head; };
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < 2 * M; n++) {
            u32 line = of.tile.first + 8 * n + lane / 4;
            float &total = of.softmax.total.of(lane)[n], top = of.softmax.top.of(lane)[n];
            if (lane % 4 == 0 && line <= of.tile.last) {
                call.lse[token(line)] = total > 0.0f ? top * s.scale + logf(total) : -infinity();
            }
            // A query that sees no key gets nothing.
            total = total > 0.0f ? 1.0f / total : 0.0f;
        }
        each_sum(of.sums, lane, [&](u32 eight, u32 c, float& sum) {
            u32 line = of.tile.first + 8 * eight + lane / 4;
            if (line > of.tile.last || c >= s.value_dim) return;
            call.out[token(line) * s.value_dim + c] = sum * of.softmax.total.of(lane)[eight];
        });
    }
}

template <u32 DIM, u32 M, u32 STAGE> DEVICE void attend_all(const ForwardCall& call) {
    typedef AttendingWarp<DIM, M> State;
    each_query_tile<State, DIM, M, STAGE>(
        call.shape, call.keys, call.k, call.v,
        [&](State& of, u32 first, u64 of_q, u64 row) { begin_attending(of, call, row, of_q, first); },
        [&](State& of, u64 row, u32 key, const Octet* keys, const Octet* values, u32 line) {
            attend_to(of, call, row, key, keys, values, line);
        },
        [&](State& of, u64 head, u64 row) { finish_attending(of, call, row, head); });
}

// out [T, heads * value_dim] and lse [T, heads] of arranged heads of DIM numbers, by M times 16 queries a warp.
#define FORWARD(name, DIM, M, STAGE)                                                                           \
    KERNEL(name, (Span<float> out, Span<float> lse, ConstAny q, ConstAny k, ConstAny v, Span<const u32> keys,  \
                  AttentionSizes shape, u64 queries, u64 key_lines)) {                                         \
        attend_all<DIM, M, STAGE>({out.data, lse.data, arranged(q, queries, DIM), arranged(k, key_lines, DIM), \
                                   arranged(v, key_lines, DIM), keys, shape});                                 \
    }

FORWARD(flash_attention_32, 32, 2, 64)
FORWARD(flash_attention_64, 64, 2, 64)
FORWARD(flash_attention_128, 128, 1, 32)

// --- backward ---------------------------------------------------------------------------------------------------------

struct BackwardCall {
    ArrangedHeads q, k, v, slopes;
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

// What a warp has that owns a tile of queries.
template <u32 DIM, u32 M> struct OwnedQueries {
    QueryTile tile;
    LeftLines<DIM, M> queries, slopes;
    Lanes<float, 2 * M> log_sums, inner;
    LineSums<DIM, M> sums;
};

template <u32 DIM, u32 M>
DEVICE void begin_queries(OwnedQueries<DIM, M>& of, const BackwardCall& call, u64 row, u64 of_q, u32 first) {
    of.tile = query_tile(call.keys, call.shape, row, first, LEFT_LINES * M);
    u64 from = of.tile.is_empty() ? 0 : first;
    of.queries.load(call.q.of(of_q) + from * DIM);
    of.slopes.load(call.slopes.of(of_q) + from * DIM);
    of.sums = {};
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < 2 * M; n++) {
            u64 place = of_q * call.q.length + from + 8 * n + lane / 4;
            of.log_sums.of(lane)[n] = call.log_sums[place];
            of.inner.of(lane)[n] = call.inner[place];
        }
    }
}

// By keys from `key` on, line `line` of a stage.
template <u32 DIM, u32 M>
DEVICE void add_to_queries(OwnedQueries<DIM, M>& of, const BackwardCall& call, u64 row, u32 key, const Octet* keys,
                           const Octet* values, u32 line) {
    LineProducts<M, KEYS_AT_ONCE> products = {}, along = {};
    add_products(products, of.queries, keys, line);
    add_products(along, of.slopes, values, line);
    EACH_LANE(lane) {
        UNROLLED for (u32 n = 0; n < M * 16; n++) {
            u32 m = n / 16, t = n / 4 % 4, i = n % 4, eight = 2 * m + i / 2;
            to_slope(products.squares[m][t].of(lane)[i], along.squares[m][t].of(lane)[i], of.log_sums.of(lane)[eight],
                     of.inner.of(lane)[eight], call.shape.scale * LOG2_E);
        }
    }
    set_unseen(along, of.tile, call.keys, call.shape, row, key, 0.0f);
    add_weighted(of.sums, along, keys, line);
}

// dq, not yet turned back.
template <u32 DIM, u32 M, u32 STAGE> DEVICE void query_slopes(const BackwardCall& call, float* dq, HeadLines to) {
    typedef OwnedQueries<DIM, M> State;
    each_query_tile<State, DIM, M, STAGE>(
        call.shape, call.keys, call.k, call.v,
        [&](State& of, u32 first, u64 of_q, u64 row) { begin_queries(of, call, row, of_q, first); },
        [&](State& of, u64 row, u32 key, const Octet* keys, const Octet* values, u32 line) {
            add_to_queries(of, call, row, key, keys, values, line);
        },
        [&](State& of, u64 head, u64 row) {
            EACH_LANE(lane) {
                each_sum(of.sums, lane, [&](u32 eight, u32 c, float& sum) {
                    u32 line = of.tile.first + 8 * eight + lane / 4;
                    if (line > of.tile.last || c >= to.dim) return;
                    dq[head_place(to, row, head, line) + c] = sum * call.shape.scale;
                });
            }
        });
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

// What a warp has that owns a tile of keys.
template <u32 DIM, u32 M> struct OwnedKeys {
    // The last is behind the first where there are none.
    u32 first, last;
    LeftLines<DIM, M> keys, values;
    LineSums<DIM, M> of_keys, of_values;
};

template <u32 DIM, u32 M>
DEVICE void begin_keys(OwnedKeys<DIM, M>& of, const BackwardCall& call, u64 of_k, u32 first) {
    bool is_empty = first >= call.shape.key_seq;
    of.first = is_empty ? 1 : first;
    of.last = is_empty ? 0 : (u32)least<u64>(first + LEFT_LINES * M, call.shape.key_seq) - 1;
    of.keys.load(call.k.of(of_k) + (is_empty ? 0 : first) * DIM);
    of.values.load(call.v.of(of_k) + (is_empty ? 0 : first) * DIM);
    of.of_keys = {};
    of.of_values = {};
}

// By LINES queries from `query` on, line `line` of a stage.
template <u32 DIM, u32 M, u32 LINES>
DEVICE void add_to_keys(OwnedKeys<DIM, M>& of, const BackwardCall& call, u64 row, u64 of_q, u32 query,
                        const Octet* queries, const Octet* slopes, u32 line) {
    const AttentionSizes& s = call.shape;
    if (of.first > of.last) return;
    SeenKeys low = seen_keys(call.keys, s, row, query), high = seen_keys(call.keys, s, row, query + LINES - 1);
    bool is_whole = query + LINES <= s.seq;
    // Later queries' bounds are not lower.
    if (query >= s.seq || (is_whole && high.end <= of.first) || low.first > of.last) return;
    LineProducts<M, LINES> products = {}, along = {};
    add_products(products, of.keys, queries, line);
    add_products(along, of.values, slopes, line);
    EACH_LANE(lane) {
        const float *log_sums = call.log_sums + of_q * call.q.length + query, *inner = call.inner + of_q * call.q.length + query;
        UNROLLED for (u32 t = 0; t < LINES / 8; t++) {
            UNROLLED for (u32 odd = 0; odd < 2; odd++) {
                u32 column = 8 * t + lane % 4 * 2 + odd;
                float log_sum = log_sums[column], of_output = inner[column];
                UNROLLED for (u32 eight = 0; eight < 2 * M; eight++) {
                    u32 m = eight / 2, i = eight % 2 * 2 + odd;
                    to_slope(products.squares[m][t].of(lane)[i], along.squares[m][t].of(lane)[i], log_sum, of_output,
                             s.scale * LOG2_E);
                }
            }
        }
    }
    if (!is_whole || of.first < high.first || of.first + LEFT_LINES * M > low.end) {
        EACH_LANE(lane) {
            UNROLLED for (u32 t = 0; t < LINES / 8; t++) {
                UNROLLED for (u32 odd = 0; odd < 2; odd++) {
                    SeenKeys seen = seen_keys(call.keys, s, row, query + 8 * t + lane % 4 * 2 + odd);
                    UNROLLED for (u32 eight = 0; eight < 2 * M; eight++) {
                        u32 m = eight / 2, i = eight % 2 * 2 + odd;
                        if (sees(seen, of.first + 8 * eight + lane / 4)) continue;
                        products.squares[m][t].of(lane)[i] = along.squares[m][t].of(lane)[i] = 0.0f;
                    }
                }
            }
        }
    }
    add_weighted(of.of_values, products, slopes, line);
    add_weighted(of.of_keys, along, queries, line);
}

// dk and dv, by all queries of all heads that share keys; dk not yet turned back.
template <u32 DIM, u32 M, u32 LINES, u32 STAGE>
DEVICE void key_slopes(const BackwardCall& call, float* dk, HeadLines to_k, float* dv, HeadLines to_v) {
    SHARED(Octet, room_q, 2 * STAGE * DIM / 8);
    SHARED(Octet, room_g, 2 * STAGE * DIM / 8);
    const AttentionSizes& s = call.shape;
    u64 group = s.heads / s.kv_heads;
    each_tile(FIRST_TILES, s.rows, s.kv_heads, s.key_seq, LEFT_LINES * M, [&](u32 first, u64 kv, u64 row) {
        u32 end = (u32)least<u64>(first + LEFT_LINES * M * warps(), s.key_seq);
        u32 begin = first_beyond(call.keys, s, row, 1, first) / STAGE * STAGE;
        u32 behind = first_beyond(call.keys, s, row, 0, end - 1);
        OfWarp<OwnedKeys<DIM, M>> of;
        WARPS { begin_keys(of.mine(), call, row * s.kv_heads + kv, first + warp() * LEFT_LINES * M); }
        ROLLED for (u64 head = kv * group; head < (kv + 1) * group; head++) {
            u64 of_q = row * s.heads + head;
            each_stage<DIM, STAGE>(
                room_q, room_g, call.q.of(of_q), call.slopes.of(of_q), begin, behind,
                [&](u32 query, const Octet* queries, const Octet* slopes) {
                    WARPS {
                        UNROLLED for (u32 line = 0; line < STAGE; line += LINES) {
                            add_to_keys<DIM, M, LINES>(of.mine(), call, row, of_q, query + line, queries, slopes, line);
                        }
                    }
                });
        }
        WARPS {
            EACH_LANE(lane) {
                each_sum(of.mine().of_keys, lane, [&](u32 eight, u32 c, float& sum) {
                    u32 line = of.mine().first + 8 * eight + lane / 4;
                    if (line <= of.mine().last && c < to_k.dim) dk[head_place(to_k, row, kv, line) + c] = sum * s.scale;
                });
                each_sum(of.mine().of_values, lane, [&](u32 eight, u32 c, float& sum) {
                    u32 line = of.mine().first + 8 * eight + lane / 4;
                    if (line <= of.mine().last && c < to_v.dim) dv[head_place(to_v, row, kv, line) + c] = sum;
                });
            }
        }
    });
}

#define BACKWARD_OF_QUERIES(name, DIM, M, STAGE)                                                               \
    KERNEL(name, (Span<float> dq, ConstAny q, ConstAny k, ConstAny v, ConstAny slopes,                         \
                  Span<const float> log_sums, Span<const float> inner, Span<const u32> keys,                   \
                  AttentionSizes shape, u32 is_fused, u64 queries, u64 key_lines)) {                           \
        BackwardCall call = {arranged(q, queries, DIM), arranged(k, key_lines, DIM),                           \
                             arranged(v, key_lines, DIM), arranged(slopes, queries, DIM),                      \
                             log_sums.data, inner.data, keys, shape};                                          \
        query_slopes<DIM, M, STAGE>(call, dq.data, places_of(shape, is_fused).q);                              \
    }

BACKWARD_OF_QUERIES(flash_attention_back_queries_32, 32, 2, 64)
BACKWARD_OF_QUERIES(flash_attention_back_queries_64, 64, 2, 64)
BACKWARD_OF_QUERIES(flash_attention_back_queries_128, 128, 1, 32)

#define BACKWARD_OF_KEYS(name, DIM, M, LINES, STAGE)                                                           \
    KERNEL(name, (Span<float> dk, Span<float> dv, ConstAny q, ConstAny k, ConstAny v, ConstAny slopes,         \
                  Span<const float> log_sums, Span<const float> inner, Span<const u32> keys,                   \
                  AttentionSizes shape, u32 is_fused, u64 queries, u64 key_lines)) {                           \
        BackwardCall call = {arranged(q, queries, DIM), arranged(k, key_lines, DIM),                           \
                             arranged(v, key_lines, DIM), arranged(slopes, queries, DIM),                      \
                             log_sums.data, inner.data, keys, shape};                                          \
        AttentionCall to = places_of(shape, is_fused);                                                         \
        key_slopes<DIM, M, LINES, STAGE>(call, dk.data, to.k, dv.data, to.v);                                  \
    }

BACKWARD_OF_KEYS(flash_attention_back_keys_32, 32, 2, 32, 64)
BACKWARD_OF_KEYS(flash_attention_back_keys_64, 64, 2, 16, 64)
BACKWARD_OF_KEYS(flash_attention_back_keys_128, 128, 1, 16, 32)

// Turns the gradients of queries, part 0, or keys, part 1, back: a thread takes numbers and those that turn with them.
KERNEL(turn_heads_back, (Span<float> to, Span<const float> cos, Span<const float> sin, AttentionSizes shape, u32 part,
                         u32 is_fused)) {
    AttentionCall call = places_of(shape, is_fused);
    HeadLines lines = part == 0 ? call.q : call.k;
    u64 heads = part == 0 ? shape.heads : shape.kv_heads, half = shape.rotary_dim / 2, still = lines.dim - 2 * half;
    bool are_halves = shape.pairs == HALVES;
    bool are_eights = are_halves && (lines.width | lines.column | lines.dim | half) % RUN == 0;
    Any all = {to.data, to.len, F32};
    each_run(shape.rows * lines.seq * heads * half, are_eights ? RUN : 1, [=](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        Cell pair = cell_of(i, half), head = cell_of(pair.row, heads);
        u64 line = head.row * lines.width + lines.column + head.column * lines.dim + still;
        u64 low = line + (are_halves ? pair.column : 2 * pair.column), high = low + (are_halves ? half : 1);
        Numbers<N> x = load_run<N>(all, low), y = load_run<N>(all, high);
        Numbers<N> of_cos = load_run<N>(cos, head.row * half + pair.column);
        Numbers<N> of_sin = load_run<N>(sin, head.row * half + pair.column);
        UNROLLED for (u32 n = 0; n < N; n++) {
            float a = x.of[n], b = y.of[n], c = of_cos.of[n], turn = -of_sin.of[n];
            x.of[n] = a * c - b * turn;
            y.of[n] = b * c + a * turn;
        }
        store_run(all, low, x);
        store_run(all, high, y);
    });
}
