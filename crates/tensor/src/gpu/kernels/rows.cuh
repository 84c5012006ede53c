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

// `sums[c] (+)= sum over rows of term(row, c)` for the columns of a strip: the rows in turn by the threads of a column,
// then those threads in order.
template <class Term>
DEVICE void sum_strip(float* sums, u64 strip, u64 rows, u64 width, u32 accumulate, Term term) {
    SHARED(float, partial, MAX_THREADS);
    u32 columns = least(STRIP, threads()), lanes = threads() / columns;
    THREADS {
        u64 column = strip * columns + thread() % columns;
        float sum = 0.0f;
        if (column < width) {
            for (u64 row = thread() / columns; row < rows; row += lanes) sum += term(row, column);
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

// The same for all columns, a block a strip.
template <class Term> DEVICE void sum_columns(float* sums, u64 rows, u64 width, u32 accumulate, Term term) {
    BLOCKS(strip, strips_of(width)) sum_strip(sums, strip, rows, width, accumulate, term);
}

// Sources looked at between two barriers, a thread; columns summed while all sources are looked at once.
constexpr u32 LOOKS = 8;
constexpr u32 SUMMED = 4096;

// `to[row] (+)= the sum of its sources` for each of `rows` rows of `width` numbers: a block a row looks through all
// sources for those whose `row_of` it is, and lets each thread `add(sum, source, column)` them in order. Every row so
// has one writer and one order, without an inverse index in memory.
template <class RowOf, class Add>
DEVICE void sum_sources(Any to, u64 rows, u64 width, u64 sources, u32 accumulate, RowOf row_of, Add add) {
    SHARED(float, sums, SUMMED);
    SHARED(u32, found, MAX_THREADS * LOOKS);
    SHARED(u32, count, MAX_THREADS);
    SHARED(u32, some, MAX_THREADS / STRIP + 1);
    u64 pieces = (width + SUMMED - 1) / SUMMED;
    BLOCKS(block, rows * pieces) {
        u64 row = block / pieces, first = block % pieces * SUMMED, columns = least<u64>(width - first, SUMMED);
        THREADS {
            for (u64 c = thread(); c < columns; c += threads()) {
                sums[c] = accumulate ? load(to, row * width + first + c) : 0.0f;
            }
        }
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
                            for (u64 c = thread(); c < columns; c += threads()) add(sums[c], source, first + c);
                        }
                    }
                }
            }
        }
        THREADS {
            for (u64 c = thread(); c < columns; c += threads()) store(to, row * width + first + c, sums[c]);
        }
    }
}
