// Columns chosen per row, and what is made of the chosen values among themselves.
#include "common.cuh"

// Keeps a sum of nothing from dividing: far below what rounding leaves of a sum of probabilities.
constexpr float TINY = 1e-20f;

DEVICE void normalise(float* y, u64 k) {
    float sum = 0.0f;
    for (u64 j = 0; j < k; j++) sum += y[j];
    sum += TINY;
    for (u64 j = 0; j < k; j++) y[j] /= sum;
}

// Softmax of those that were chosen, zeros for the others.
DEVICE void softmax_of_chosen(float* y, const u32* index, u64 k) {
    float top = -infinity(), sum = 0.0f;
    for (u64 j = 0; j < k; j++) {
        if (index[j] != NOWHERE) top = fmaxf(top, y[j]);
    }
    for (u64 j = 0; j < k; j++) {
        y[j] = index[j] == NOWHERE ? 0.0f : expf(y[j] - top);
        sum += y[j];
    }
    if (sum > 0.0f) {
        for (u64 j = 0; j < k; j++) y[j] /= sum;
    }
}

DEVICE float comparable(float x) { return x != x ? -infinity() : x; }

// chosen [T, k] = the columns of the k largest of each row of scores [T, width], of equal ones the first; NaN is least.
// Each moves forward past what is less.
KERNEL(top_k, (Span<u32> chosen, Span<const float> scores, u64 k, u64 width)) {
    EACH(row, k ? chosen.len / k : 0) {
        const float* x = scores.data + row * width;
        u32* best = chosen.data + row * k;
        u64 found = 0;
        for (u64 column = 0; column < width; column++) {
            float score = comparable(x[column]);
            if (found == k && !(comparable(x[best[k - 1]]) < score)) continue;
            u64 place = found < k ? found++ : k - 1;
            for (; place > 0 && comparable(x[best[place - 1]]) < score; place--) best[place] = best[place - 1];
            best[place] = (u32)column;
        }
        for (; found < k; found++) best[found] = NOWHERE;
    }
}

// chosen [T, k] = columns index [T, k] of x [T, width], 0 where there is none; y [T, k] what `among` makes of them. k
// is small: a thread does a row.
KERNEL(select, (Span<float> chosen, Span<float> y, Span<const float> x, Span<const u32> index, u64 k, u64 width,
                Among among)) {
    EACH(row, k ? chosen.len / k : 0) {
        for (u64 route = row * k; route < (row + 1) * k; route++) {
            u32 column = index.data[route];
            y.data[route] = chosen.data[route] = column == NOWHERE ? 0.0f : x.data[row * width + column];
        }
        if (among == NORMALISED) normalise(y.data + row * k, k);
        if (among == SOFTMAX) softmax_of_chosen(y.data + row * k, index.data + row * k, k);
    }
}

// dx [T, width] (+)= at columns index [T, k] the gradients of the chosen values by g [T, k]
KERNEL(select_back, (Span<float> dx, Span<const float> chosen, Span<const float> y, Span<const float> g,
                     Span<const u32> index, u64 k, u64 width, Among among, u32 accumulate)) {
    BLOCKS(row, width ? dx.len / width : 0) {
        u64 first = row * k;
        float sum = 0.0f, inner = 0.0f;
        for (u64 j = first; j < first + k; j++) {
            sum += chosen.data[j];
            inner += y.data[j] * g.data[j];
        }
        sum += TINY;
        THREADS {
            for (u64 column = thread(); column < width; column += threads()) {
                float to = accumulate ? dx.data[row * width + column] : 0.0f;
                for (u64 j = first; j < first + k; j++) {
                    if (index.data[j] != column) continue;
                    if (among == PLAIN) to += g.data[j];
                    if (among == NORMALISED) to += (g.data[j] - inner) / sum;
                    if (among == SOFTMAX) to += y.data[j] * (g.data[j] - inner);
                }
                dx.data[row * width + column] = to;
            }
        }
    }
}
