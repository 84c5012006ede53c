// Products of a tile of queries with a tile of keys, through shared memory, by whatever threads a block has. Sums are
// f32, of one order.

#pragma once

// Queries and keys of a tile. Keys are as many as in the host's kernels, which round weights relative to the largest
// score up to the tile's end: the same tiles make the same weights.
constexpr u32 QUERIES = 32;
constexpr u32 KEYS = 64;
// Columns in shared memory at a time, and the length of a line there: one more, so that a column is spread over all
// banks.
constexpr u32 CHUNK = 32;
constexpr u32 CHUNK_LINE = CHUNK + 1;
// Of a tile [QUERIES, KEYS] of scores.
constexpr u32 SCORE_LINE = KEYS + 1;
// Sums that a thread makes at once: each number that it reads for one serves all of them.
constexpr u32 SUMS = 8;

constexpr u32 SCORES = QUERIES * SCORE_LINE;
constexpr u32 QUERY_CHUNK = QUERIES * CHUNK_LINE;
constexpr u32 KEY_CHUNK = KEYS * CHUNK_LINE;

// Columns first to first + CHUNK of `of(line, column)` for `lines` lines, zeros beyond `dim`. Code of one thread.
template <class Of> DEVICE void load_chunk(float* chunk, u32 lines, u64 first, u64 dim, Of of) {
    for (u32 e = thread(); e < lines * CHUNK; e += threads()) {
        u32 line = e / CHUNK, column = e % CHUNK;
        chunk[line * CHUNK_LINE + column] = first + column < dim ? of(line, first + column) : 0.0f;
    }
}

// scores [QUERIES, KEYS] = a b^T, a(query, column) and b(key, column) being their elements, `dim` columns
template <class A, class B>
DEVICE void multiply_lines(float* scores, float* a_chunk, float* b_chunk, u64 dim, A a, B b) {
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

// Lets put(result, column, sum) have the sums over LINES lines of w(result, line) times of(line, column), of `dim` columns,
// for RESULTS results, of which a thread makes EACH_SUMS at once.
template <u32 LINES, u32 RESULTS, u32 EACH_SUMS, class W, class Of, class Put>
DEVICE void sum_over_lines(float* chunk, u64 dim, W w, Of of, Put put) {
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
DEVICE void sum_over_keys(const float* w, float* b_chunk, u64 dim, B b, Put put) {
    auto weight = [=](u32 query, u32 key) { return w[query * SCORE_LINE + key]; };
    sum_over_lines<KEYS, QUERIES, SUMS / 2>(b_chunk, dim, weight, b, put);
}

// Lets put(key, column, sum) have the elements of w^T a, w(query, key) being weights and a(query, column) of `dim`
// columns.
template <class W, class A, class Put>
DEVICE void sum_over_queries(float* a_chunk, u64 dim, W w, A a, Put put) {
    sum_over_lines<QUERIES, KEYS, SUMS>(a_chunk, dim, [&](u32 key, u32 query) { return w(query, key); }, a, put);
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

// Scores become weights exp(score - top), zero where a query does not see the key; `round` is what weights are
// multiplied as, `seen(query)` what a query sees of the tile.
template <class Seen, class Round> DEVICE void to_weights(float* scores, Softmax of, Seen seen, Round round) {
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
                score = round(weight);
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
// compute(first) fills the scores of a tile, value(key, column) are `dim` numbers, round(weight) what they are
// multiplied with. The results go to to(query, column), where their sums lie before, and the log-sum-exp of scores to
// put_lse.
template <class Compute, class Seen, class Round, class Value, class To, class PutLse>
DEVICE void attend(Attending at, Range keys, u32 queries, u64 dim, Sink sink, Compute compute, Seen seen, Round round,
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
        to_weights(at.scores, at.softmax, [&](u32 query) { return seen(query, first); }, round);
        sum_over_keys(
            at.scores, at.of_keys, dim, [&](u32 key, u64 c) { return value(first + key, c); },
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
