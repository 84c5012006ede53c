// Sums of a row, of columns over rows, and of the rows that go to one place.

#pragma once

// Where element `i` of a matrix of lines of `width` elements is.
struct Cell {
    u64 row, column;
};

DEVICE Cell cell_of(u64 i, u64 width) {
    // Devices divide numbers of 32 bits several times faster than those of 64, and few matrices have more elements.
    if ((i | width) >> 32 == 0) return {(u32)i / (u32)width, (u32)i % (u32)width};
    return {i / width, i % width};
}

// The sum of `term(i)`, i < n, for all threads; `partial` is shared memory with an element of each thread.
template <class T, class Term> DEVICE T block_total(T* partial, u64 n, Term term) {
    THREADS {
        T sum = 0;
        for (u64 i = thread(); i < n; i += threads()) sum += term(i);
        partial[thread()] = sum;
    }
    return block_sum(partial);
}

// sum += a lane's part of the product of two rows, from `a` and `b` on.
DEVICE void add_products_of_lane(float& sum, u32 lane, u64 width, ConstAny x, u64 a, Span<const float> g, u64 b) {
    auto add = [&](u64 i, auto run) {
        constexpr u32 N = decltype(run)::COUNT;
        Numbers<N> of_x = load_run<N>(x, a + i), of_g = load_run<N>(g, b + i);
        UNROLLED for (u32 n = 0; n < N; n++) sum = fmaf(of_x.of[n], of_g.of[n], sum);
    };
    if (width % RUN == 0) {
        for (u64 i = lane * RUN; i < width; i += 32 * RUN) add(i, RunOf<RUN>());
    } else {
        for (u64 i = lane; i < width; i += 32) add(i, RunOf<1>());
    }
}

// sums[b] = the sum of `term(i)` in f64 over the `length` terms of each of n terms' stretches, a block each
template <class Term> DEVICE void sum_stretches(Span<u32> sums, u64 length, u64 n, Term term) {
    SHARED(double, partial, MAX_THREADS);
    BLOCKS(stretch, sums.len / 2) {
        u64 first = stretch * length;
        double sum = block_total(partial, least(n - first, length), [=](u64 i) { return term(first + i); });
        THREADS {
            if (thread() == 0) store_double(sums, stretch, sum);
        }
    }
}

// The columns that a block sums at once: as many neighbours as one access to memory brings.
constexpr u32 STRIP = 32;

DEVICE u64 strips_of(u64 width) { return (width + least(STRIP, threads()) - 1) / least(STRIP, threads()); }

// `sums[c] (+)= sum over some rows of term(row, c)` for the columns of a strip: the rows in turn by the threads of a
// column, then those threads in order.
template <class Term>
DEVICE void sum_strip(float* sums, u64 strip, Range rows, u64 width, u32 accumulate, Term term) {
    SHARED(float, partial, MAX_THREADS);
    u32 columns = least(STRIP, threads()), lanes = threads() / columns;
    THREADS {
        u64 column = strip * columns + thread() % columns;
        float sum = 0.0f;
        if (column < width) {
            for (u64 row = rows.start + thread() / columns; row < rows.end; row += lanes) sum += term(row, column);
        }
        partial[thread()] = sum;
    }
    THREADS {
        u64 column = strip * columns + thread();
        if (thread() < columns && column < width) {
            float sum = 0.0f;
            for (u32 lane = 0; lane < lanes; lane++) sum += partial[lane * columns + thread()];
            set_or_add(sums[column], sum, accumulate);
        }
    }
}

// `sums[part] [width] (+)= the sums of the columns` over each of as many parts of the rows: a block a strip of a part.
template <class Term>
DEVICE void sum_columns(float* sums, u64 parts, u64 rows, u64 width, u32 accumulate, Term term) {
    u64 strips = strips_of(width);
    BLOCKS(task, parts * strips) {
        u64 part = task / strips;
        Range of_part = {rows * part / parts, rows * (part + 1) / parts};
        sum_strip(sums + part * width, task % strips, of_part, width, accumulate, term);
    }
}

// Sources looked at between two barriers, a thread; columns that a block sums; sources that it takes from a list.
constexpr u32 LOOKS = 8;
constexpr u32 SUMMED = 1024;
constexpr u32 LISTED = 1024;

// Adds to sums the sources of a row that has so many that to look through all is no loss: there are few such rows.
template <class RowOf, class Add>
DEVICE void add_found(float* sums, u64 row, u64 first, u64 columns, u64 sources, RowOf row_of, Add add) {
    SHARED(u32, found, MAX_THREADS * LOOKS);
    SHARED(u32, count, MAX_THREADS);
    SHARED(u32, some, MAX_THREADS / STRIP + 1);
    for (u64 start = 0; start < sources; start += threads() * LOOKS) {
        THREADS {
            if (thread() <= threads() / STRIP) some[thread()] = 0;
        }
        THREADS {
            // Consecutive sources, so that the order of threads is that of sources.
            u32 n = 0;
            for (u32 look = 0; look < LOOKS; look++) {
                u64 source = start + thread() * LOOKS + look;
                if (source >= sources || row_of(source) != row) continue;
                found[thread() * LOOKS + n++] = (u32)(source - start);
            }
            count[thread()] = n;
            // All who write here write the same.
            if (n > 0) some[thread() / STRIP] = 1;
        }
        THREADS {
            for (u32 group = 0; group * STRIP < threads(); group++) {
                if (!some[group]) continue;
                for (u32 t = group * STRIP; t < least((group + 1) * STRIP, threads()); t++) {
                    for (u32 n = 0; n < count[t]; n++) {
                        u64 source = start + found[t * LOOKS + n];
                        for (u64 c = thread(); c < columns; c += threads()) {
                            Numbers<1> sum = {sums[c]};
                            add(sum, source, first + c);
                            sums[c] = sum.of[0];
                        }
                    }
                }
            }
        }
    }
}

// sums += factor x[at ...]
template <u32 N> DEVICE void add_run(Numbers<N>& sums, float factor, ConstAny x, u64 at) {
    Numbers<N> from = load_run<N>(x, at);
    UNROLLED for (u32 n = 0; n < N; n++) sums.of[n] = fmaf(factor, from.of[n], sums.of[n]);
}

// The sources of each row as lists, in whatever order: the first of each row, and what follows each source.
struct SourceLists {
    Span<const u32> heads, next;
};

// Sources of a row that each thread orders by itself: most rows have fewer, and so need no barrier.
constexpr u32 FEW = 8;

// The sources of a list in order, and nowhere after the last; false if there are more than a few.
DEVICE bool few_of(SourceLists lists, u64 row, u32 (&few)[FEW]) {
    u32 count = 0;
    UNROLLED for (u32 i = 0; i < FEW; i++) few[i] = NOWHERE;
    for (u32 source = lists.heads.data[row]; source != NOWHERE && count <= FEW; source = lists.next.data[source]) {
        u32 moving = source;
        UNROLLED for (u32 i = 0; i < FEW; i++) {
            u32 low = least(few[i], moving);
            moving = most(few[i], moving);
            few[i] = low;
        }
        count++;
    }
    return count <= FEW;
}

// to[row] (+)= the sum of a few sources from column `first` on, of columns by as many as N at a time.
template <u32 N, class Add>
DEVICE void sum_few(Any to, u64 start, const u32 (&few)[FEW], u64 first, u64 columns, u32 accumulate, Add add) {
    for (u64 c = (u64)thread() * N; (few[0] != NOWHERE || !accumulate) && c < columns; c += (u64)threads() * N) {
        Numbers<N> sum = {};
        if (accumulate) sum = load_run<N>(to, start + c);
        UNROLLED for (u32 i = 0; i < FEW; i++) {
            if (few[i] != NOWHERE) add(sum, few[i], first + c);
        }
        store_run(to, start + c, sum);
    }
}

// `to[row] (+)= the sum of its sources` for each row of `width` numbers of which there is a list: a block a row takes
// its sources from the list, in order, and lets each thread `add(sums, source, column)` them to the sums of neighbouring
// columns. Every row so has one writer and one order.
template <class RowOf, class Add>
DEVICE void sum_sources(Any to, u64 width, SourceLists lists, u32 accumulate, RowOf row_of, Add add) {
    SHARED(float, sums, SUMMED);
    SHARED(u32, listed, LISTED);
    SHARED(u32, ordered, LISTED);
    SHARED(u32, count, 1);
    u64 pieces = (width + SUMMED - 1) / SUMMED;
    BLOCKS(block, lists.heads.len * pieces) {
        u64 row = block / pieces, first = block % pieces * SUMMED, columns = least<u64>(width - first, SUMMED);
        u32 few[FEW];
        if (few_of(lists, row, few)) {
            THREADS {
                u64 start = row * width + first;
                if (width % RUN == 0) sum_few<RUN>(to, start, few, first, columns, accumulate, add);
                else sum_few<1>(to, start, few, first, columns, accumulate, add);
            }
            continue;
        }
        THREADS {
            if (thread() == 0) {
                u32 n = 0, source = lists.heads.data[row];
                for (; source != NOWHERE && n < LISTED; source = lists.next.data[source]) listed[n++] = source;
                count[0] = source == NOWHERE ? n : NOWHERE;
            }
        }
        u32 n = count[0];
        // Nobody writes the next row's before all have read it.
        barrier();
        if (n == 0 && accumulate) continue;
        THREADS {
            for (u64 c = thread(); c < columns; c += threads()) {
                sums[c] = accumulate ? load(to, row * width + first + c) : 0.0f;
            }
            for (u32 i = thread(); n != NOWHERE && i < n; i += threads()) {
                u32 before = 0;
                for (u32 other = 0; other < n; other++) before += listed[other] < listed[i];
                ordered[before] = listed[i];
            }
        }
        if (n == NOWHERE) add_found(sums, row, first, columns, lists.next.len, row_of, add);
        THREADS {
            for (u64 c = thread(); c < columns; c += threads()) {
                Numbers<1> sum = {sums[c]};
                for (u32 i = 0; n != NOWHERE && i < n; i++) add(sum, ordered[i], first + c);
                store(to, row * width + first + c, sum.of[0]);
            }
        }
    }
}
