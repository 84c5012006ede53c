// Products of a tile of queries with a tile of keys, through shared memory, by whatever threads a block has. Sums are
// f32, of one order. Factors are f32, or all are numbers of bf16: tensor cores multiply those.

#pragma once
#include "tensor_cores.cuh"

// Queries and keys of a tile. Keys are as many as in the host's kernels, which round weights relative to the largest
// score up to the tile's end: the same tiles make the same weights.
constexpr u32 QUERIES = 32;
constexpr u32 KEYS = 64;
// Columns in shared memory at a time, and the length of a line there: one more, so that a column is spread over all
// banks.
constexpr u32 CHUNK = 32;
constexpr u32 CHUNK_LINE = CHUNK + 1;
// The same of bf16, two of which share a word. Lanes of a warp read four words of eight lines at once, or of every
// other line of eight: all are in different banks.
constexpr u32 PAIRS_CHUNK = 2 * CHUNK;
constexpr u32 PAIRS_LINE = CHUNK + 4;
// Of a tile [QUERIES, KEYS] of scores. Where lanes of a warp read eight numbers of every other line of eight, all are
// in different banks.
constexpr u32 SCORE_LINE = KEYS + 4;
// Sums that a thread makes at once: each number that it reads for one serves all of them.
constexpr u32 SUMS = 8;

constexpr u32 SCORES = QUERIES * SCORE_LINE;
constexpr u32 QUERY_CHUNK = QUERIES * PAIRS_LINE;
constexpr u32 KEY_CHUNK = KEYS * PAIRS_LINE;

// A number as it is multiplied.
DEVICE float as_factor(Dtype factors, float x) { return factors == BF16 ? widen(round_to_bf16(x)) : x; }

// Columns first to first + CHUNK of `of(line, column)` for `lines` lines, zeros beyond `dim`. Code of one thread.
template <class Of> DEVICE void load_chunk(float* chunk, u32 lines, u64 first, u64 dim, Of of) {
    for (u32 e = thread(); e < lines * CHUNK; e += threads()) {
        u32 line = e / CHUNK, column = e % CHUNK;
        chunk[line * CHUNK_LINE + column] = first + column < dim ? of(line, first + column) : 0.0f;
    }
}

// The same of PAIRS_CHUNK columns, `of` being numbers of bf16. A word of two of them lies in place of a float.
template <class Of> DEVICE void load_pairs(float* chunk, u32 lines, u64 first, u64 dim, Of of) {
    for (u32 e = thread(); e < lines * CHUNK; e += threads()) {
        u32 line = e / CHUNK, word = e % CHUNK;
        u64 column = first + 2 * word;
        float even = column < dim ? of(line, column) : 0.0f, odd = column + 1 < dim ? of(line, column + 1) : 0.0f;
        chunk[line * PAIRS_LINE + word] = float_of(pair_of(even, odd));
    }
}

// Of a line, an even column and the next.
DEVICE u32 pair_of_columns(const float* chunk, u32 line, u32 column) {
    return bits_of(chunk[line * PAIRS_LINE + column / 2]);
}

// Of a column, a line and the next.
DEVICE u32 pair_of_lines(const float* chunk, u32 line, u32 column) {
    u32 behind = column % 2 * 16, first = pair_of_columns(chunk, line, column) >> behind;
    u32 second = pair_of_columns(chunk, line + 1, column) >> behind;
    return (first & 0xffff) | second << 16;
}

// Columns from `first` on that are multiplied together: those of a chunk, and zeros beyond `dim` up to a whole square.
DEVICE u32 pairs_columns(u64 first, u64 dim) { return (u32)whole_squares(least<u64>(dim - first, PAIRS_CHUNK)); }

// `multiply_lines` of bf16.
template <class A, class B>
DEVICE void multiply_lines_of_pairs(float* scores, float* a_chunk, float* b_chunk, u64 dim, A a, B b) {
    for (u64 first = 0; first < dim; first += PAIRS_CHUNK) {
        THREADS {
            load_pairs(a_chunk, QUERIES, first, dim, a);
            load_pairs(b_chunk, KEYS, first, dim, b);
        }
        multiply_pairs(
            QUERIES, KEYS, pairs_columns(first, dim),
            [&](u32 query, u32 column) { return pair_of_columns(a_chunk, query, column); },
            [&](u32 column, u32 key) { return pair_of_columns(b_chunk, key, column); },
            [&](u32 query, u32 key, float sum) {
                float& score = scores[query * SCORE_LINE + key];
                score = first > 0 ? score + sum : sum;
            });
    }
}

// scores [QUERIES, KEYS] = a b^T, a(query, column) and b(key, column) being their elements, `dim` columns
template <class A, class B>
DEVICE void multiply_lines(Dtype factors, float* scores, float* a_chunk, float* b_chunk, u64 dim, A a, B b) {
    if (factors == BF16) return multiply_lines_of_pairs(scores, a_chunk, b_chunk, dim, a, b);
    for (u64 first = 0; first < dim; first += CHUNK) {
        THREADS {
            load_chunk(a_chunk, QUERIES, first, dim, a);
            load_chunk(b_chunk, KEYS, first, dim, b);
        }
        THREADS {
            for (u32 item = thread(); item < KEYS * (QUERIES / SUMS); item += threads()) {
                u32 key = item % KEYS, query = item / KEYS * SUMS;
                float sums[SUMS];
                for (u32 n = 0; n < SUMS; n++) sums[n] = first > 0 ? scores[(query + n) * SCORE_LINE + key] : 0.0f;
                for (u32 c = 0; c < CHUNK; c++) {
                    float of_key = b_chunk[key * CHUNK_LINE + c];
                    for (u32 n = 0; n < SUMS; n++) {
                        sums[n] = fmaf(a_chunk[(query + n) * CHUNK_LINE + c], of_key, sums[n]);
                    }
                }
                for (u32 n = 0; n < SUMS; n++) scores[(query + n) * SCORE_LINE + key] = sums[n];
            }
        }
    }
}

// `sum_over_lines` of bf16.
template <u32 LINES, u32 RESULTS, class W, class Of, class Put>
DEVICE void sum_over_lines_of_pairs(float* chunk, u64 dim, W w, Of of, Put put) {
    for (u64 first = 0; first < dim; first += PAIRS_CHUNK) {
        THREADS { load_pairs(chunk, LINES, first, dim, of); }
        multiply_pairs(
            RESULTS, pairs_columns(first, dim), LINES,
            [&](u32 result, u32 line) { return pair_of(w(result, line), w(result, line + 1)); },
            [&](u32 line, u32 column) { return pair_of_lines(chunk, line, column); },
            [&](u32 result, u32 column, float sum) {
                if (first + column < dim) put(result, first + column, sum);
            });
    }
}

// Lets put(result, column, sum) have the sums over LINES lines of w(result, line) times of(line, column), of `dim` columns,
// for RESULTS results, of which a thread makes EACH_SUMS at once.
template <u32 LINES, u32 RESULTS, u32 EACH_SUMS, class W, class Of, class Put>
DEVICE void sum_over_lines(Dtype factors, float* chunk, u64 dim, W w, Of of, Put put) {
    if (factors == BF16) return sum_over_lines_of_pairs<LINES, RESULTS>(chunk, dim, w, of, put);
    for (u64 first = 0; first < dim; first += CHUNK) {
        THREADS { load_chunk(chunk, LINES, first, dim, of); }
        THREADS {
            for (u32 item = thread(); item < CHUNK * (RESULTS / EACH_SUMS); item += threads()) {
                u32 column = item % CHUNK, result = item / CHUNK * EACH_SUMS;
                float sums[EACH_SUMS] = {};
                for (u32 line = 0; line < LINES; line++) {
                    float of_line = chunk[line * CHUNK_LINE + column];
                    for (u32 n = 0; n < EACH_SUMS; n++) sums[n] = fmaf(w(result + n, line), of_line, sums[n]);
                }
                if (first + column >= dim) continue;
                for (u32 n = 0; n < EACH_SUMS; n++) put(result + n, first + column, sums[n]);
            }
        }
    }
}

// Lets put(query, column, sum) have the elements of w b, w being [QUERIES, KEYS] in shared memory and b(key, column) of
// `dim` columns.
template <class B, class Put>
DEVICE void sum_over_keys(Dtype factors, const float* w, float* b_chunk, u64 dim, B b, Put put) {
    auto weight = [=](u32 query, u32 key) { return w[query * SCORE_LINE + key]; };
    sum_over_lines<KEYS, QUERIES, SUMS / 2>(factors, b_chunk, dim, weight, b, put);
}

// Lets put(key, column, sum) have the elements of w^T a, w(query, key) being weights and a(query, column) of `dim`
// columns.
template <class W, class A, class Put>
DEVICE void sum_over_queries(Dtype factors, float* a_chunk, u64 dim, W w, A a, Put put) {
    auto weight = [&](u32 key, u32 query) { return w(query, key); };
    sum_over_lines<QUERIES, KEYS, SUMS>(factors, a_chunk, dim, weight, a, put);
}

// Vectors of distances that a tile needs, one for each diagonal: number `query - key + KEYS - 1` is of that pair.
constexpr u32 DIAGONALS = QUERIES + KEYS - 1;
constexpr u32 DIAGONAL_CHUNK = DIAGONALS * CHUNK_LINE;

// scores = (scores + a r) scale, a(query, column) and r(diagonal, column) being of `dim` columns
template <class A, class R>
DEVICE void add_distances(float* scores, float* a_chunk, float* r_chunk, u64 dim, float scale, A a, R r) {
    for (u64 first = 0; first < dim; first += CHUNK) {
        THREADS {
            load_chunk(a_chunk, QUERIES, first, dim, a);
            load_chunk(r_chunk, DIAGONALS, first, dim, r);
        }
        THREADS {
            for (u32 item = thread(); item < QUERIES * KEYS; item += threads()) {
                u32 query = item / KEYS, key = item % KEYS;
                const float* of_query = a_chunk + query * CHUNK_LINE;
                const float* of_distance = r_chunk + (query + KEYS - 1 - key) * CHUNK_LINE;
                float sum = scores[query * SCORE_LINE + key];
                for (u32 c = 0; c < CHUNK; c++) sum = fmaf(of_query[c], of_distance[c], sum);
                scores[query * SCORE_LINE + key] = first + CHUNK < dim ? sum : sum * scale;
            }
        }
    }
}

// --- softmax as keys come, tile by tile (Milakov and Gimelshein 2018) ------------------------------------------------

// Threads that share a query's line.
constexpr u32 LANES = 8;

// Keys `from` to `to` of a tile; none if they are equal.
struct Visible {
    u32 from, to;
};

// Which keys of the tile from `first` on lie in start..end.
DEVICE Visible visible(u64 start, u64 end, u64 first) {
    u64 from = start > first ? least<u64>(start - first, KEYS) : 0;
    u64 to = end > first ? least<u64>(end - first, KEYS) : 0;
    return {(u32)from, (u32)most(from, to)};
}

// What is known of each query's scores so far, in shared memory.
struct Softmax {
    // The largest score, the sum of exp(score - top), and the factor on earlier sums since the top has risen.
    float *top, *total, *shrink;
    // An element of each lane of each query.
    float* partial;
};

// Scores become weights exp(score - top), zero where a query does not see the key, as they are multiplied;
// `seen(query)` is what a query sees of the tile.
template <class Seen> DEVICE void to_weights(Dtype factors, float* scores, Softmax of, Seen seen) {
    THREADS {
        for (u32 item = thread(); item < QUERIES * LANES; item += threads()) {
            Visible keys = seen(item / LANES);
            float top = -infinity();
            for (u32 key = keys.from + item % LANES; key < keys.to; key += LANES) {
                top = fmaxf(top, scores[item / LANES * SCORE_LINE + key]);
            }
            of.partial[item] = top;
        }
    }
    THREADS {
        for (u32 query = thread(); query < QUERIES; query += threads()) {
            float old = of.top[query], top = old;
            for (u32 lane = 0; lane < LANES; lane++) top = fmaxf(top, of.partial[query * LANES + lane]);
            // Of no key yet both are infinite, and their difference is not a number.
            of.shrink[query] = old == top ? 1.0f : expf(old - top);
            of.top[query] = top;
        }
    }
    THREADS {
        for (u32 item = thread(); item < QUERIES * LANES; item += threads()) {
            u32 query = item / LANES;
            Visible keys = seen(query);
            float sum = 0.0f;
            for (u32 key = item % LANES; key < KEYS; key += LANES) {
                float& score = scores[query * SCORE_LINE + key];
                float weight = key >= keys.from && key < keys.to ? expf(score - of.top[query]) : 0.0f;
                sum += weight;
                score = as_factor(factors, weight);
            }
            of.partial[item] = sum;
        }
    }
    THREADS {
        for (u32 query = thread(); query < QUERIES; query += threads()) {
            float sum = 0.0f;
            for (u32 lane = 0; lane < LANES; lane++) sum += of.partial[query * LANES + lane];
            of.total[query] = of.total[query] * of.shrink[query] + sum;
        }
    }
}

// What a block works with that attends for a tile of queries, in shared memory.
struct Attending {
    float *scores, *of_queries, *of_keys;
    Softmax softmax;
};

// An `Attending` of this name, with room for so many numbers of keys.
#define ATTENDING(at, key_chunk)                                                                               \
    SHARED(float, at##_scores, SCORES);                                                                        \
    SHARED(float, at##_queries, QUERY_CHUNK);                                                                  \
    SHARED(float, at##_keys, key_chunk);                                                                       \
    SHARED(float, at##_rows, 3 * QUERIES);                                                                     \
    SHARED(float, at##_partial, QUERIES * LANES);                                                              \
    Softmax at##_softmax = {at##_rows, at##_rows + QUERIES, at##_rows + 2 * QUERIES, at##_partial};            \
    Attending at = {at##_scores, at##_queries, at##_keys, at##_softmax}

// A score that takes part in each query's softmax and has no value; of factor 0 there is none.
struct Sink {
    float score, factor;
};

// Attention of `queries` queries to the keys of a range, of which seen(query, first) are visible from `first` on;
// compute(first) fills the scores of a tile, value(key, column) are `dim` numbers, already rounded to `factors`. The
// results go to to(query, column), where their sums lie before, and the log-sum-exp of scores to put_lse.
template <class Compute, class Seen, class Value, class To, class PutLse>
DEVICE void attend(Dtype factors, Attending at, Range keys, u32 queries, u64 dim, Sink sink, Compute compute, Seen seen,
                   Value value, To to, PutLse put_lse) {
    THREADS {
        for (u32 query = thread(); query < QUERIES; query += threads()) {
            // The sink counts like a key of its own: it is the first that is seen.
            at.softmax.top[query] = sink.factor > 0.0f ? sink.score : -infinity();
            at.softmax.total[query] = sink.factor;
        }
        for (u64 e = thread(); e < queries * dim; e += threads()) to((u32)(e / dim), e % dim) = 0.0f;
    }
    for (u64 first = keys.start / KEYS * KEYS; first < keys.end; first += KEYS) {
        compute(first);
        to_weights(factors, at.scores, at.softmax, [&](u32 query) { return seen(query, first); });
        sum_over_keys(
            factors, at.scores, at.of_keys, dim, [&](u32 key, u64 c) { return value(first + key, c); },
            [&](u32 query, u64 c, float sum) {
                if (query < queries) to(query, c) = to(query, c) * at.softmax.shrink[query] + sum;
            });
    }
    THREADS {
        for (u64 e = thread(); e < queries * dim; e += threads()) {
            // A query that sees no key gets nothing.
            float total = at.softmax.total[e / dim], inverse = total > 0.0f ? 1.0f / total : 0.0f;
            to((u32)(e / dim), e % dim) *= inverse;
        }
        for (u32 query = thread(); query < queries; query += threads()) {
            put_lse(query, at.softmax.top[query] + logf(at.softmax.total[query]));
        }
    }
}

// --- backward --------------------------------------------------------------------------------------------------------

// Distances whose pairs of a tile of queries lie within one tile of keys.
constexpr u32 DISTANCES = KEYS - QUERIES + 1;

// What a backward's block works with, in shared memory.
struct Workplace {
    float *scores, *slopes, *of_queries, *of_keys, *inner, *partial;
};

// A `Workplace` of this name, with room for so many numbers of keys.
#define WORKPLACE(at, key_chunk)                                                                               \
    SHARED(float, at##_scores, SCORES);                                                                        \
    SHARED(float, at##_slopes, SCORES);                                                                        \
    SHARED(float, at##_queries, QUERY_CHUNK);                                                                  \
    SHARED(float, at##_keys, key_chunk);                                                                       \
    SHARED(float, at##_inner, QUERIES);                                                                        \
    SHARED(float, at##_partial, QUERIES * LANES);                                                              \
    Workplace at = {at##_scores, at##_slopes, at##_queries, at##_keys, at##_inner, at##_partial}

// Scores become weights exp(score - lse), and products of values with the output's gradient, in `slopes`, the scores'
// gradients; zeros where a query does not see the key. `inner` and `lse` are of a query.
template <class Seen, class Lse>
DEVICE void to_score_gradients(float* scores, float* slopes, const float* inner, float scale, Seen seen, Lse lse) {
    THREADS {
        for (u32 item = thread(); item < QUERIES * KEYS; item += threads()) {
            u32 query = item / KEYS, key = item % KEYS, at = query * SCORE_LINE + key;
            Visible keys = seen(query);
            bool sees = key >= keys.from && key < keys.to;
            float weight = sees ? expf(scores[at] - lse(query)) : 0.0f;
            scores[at] = weight;
            slopes[at] = sees ? weight * (slopes[at] - inner[query]) * scale : 0.0f;
        }
    }
}

// inner [QUERIES] = sum over `dim` columns of a(query, column) b(query, column)
template <class A, class B> DEVICE void inner_products(float* inner, float* partial, u64 dim, A a, B b) {
    THREADS {
        for (u32 item = thread(); item < QUERIES * LANES; item += threads()) {
            float sum = 0.0f;
            for (u64 c = item % LANES; c < dim; c += LANES) sum = fmaf(a(item / LANES, c), b(item / LANES, c), sum);
            partial[item] = sum;
        }
    }
    THREADS {
        for (u32 query = thread(); query < QUERIES; query += threads()) {
            float sum = 0.0f;
            for (u32 lane = 0; lane < LANES; lane++) sum += partial[query * LANES + lane];
            inner[query] = sum;
        }
    }
}
