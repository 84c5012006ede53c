// What a noisy gate's losses are made of: the chance of being chosen, and how uneven sums over tokens are.
#include "common.cuh"
#include "rows.cuh"

// A number that orders as floats do by `f32::total_cmp`.
DEVICE int order_of(float x) {
    int bits = (int)bits_of(x);
    return bits ^ (int)((u32)(bits >> 31) >> 1);
}

// against [T, width]: for each element of noisy, counted over the whole matrix, the largest beyond the k that remain
// without it
KERNEL(thresholds, (Span<u32> against, Span<const float> noisy, u64 width, u64 k)) {
    SHARED(u32, places, 2);
    BLOCKS(row, width ? against.len / width : 0) {
        const float* line = noisy.data + row * width;
        THREADS {
            for (u64 e = thread(); e < width; e += threads()) {
                u64 larger = 0;
                for (u64 other = 0; other < width; other++) {
                    int a = order_of(line[other]), b = order_of(line[e]);
                    larger += a > b || (a == b && other < e);
                }
                // The last of the k largest, and the first that is not among them.
                if (larger + 1 == k) places[0] = (u32)e;
                if (larger == k) places[1] = (u32)e;
            }
        }
        THREADS {
            for (u64 e = thread(); e < width; e += threads()) {
                against.data[row * width + e] = (u32)(row * width + places[line[e] > line[places[1]] ? 1 : 0]);
            }
        }
    }
}

// The integral of the normal density up to z, by its series near 0 and its continued fraction beyond: good to 1e-12.
DEVICE double normal_cdf(double z) {
    double density = exp(-0.5 * z * z) / sqrt(2.0 * 3.14159265358979323846);
    if (fabs(z) < 3.0) {
        // Phi = 1/2 + density (z + z^3/3 + z^5/15 + ...).
        double term = z, sum = z, odd = 1.0;
        while (fabs(term) > 1e-16) {
            odd += 2.0;
            term *= z * z / odd;
            sum += term;
        }
        return 0.5 + density * sum;
    }
    double below = fabs(z);
    for (int n = 59; n >= 1; n--) below = fabs(z) + n / below;
    double tail = density / below;
    return z > 0.0 ? 1.0 - tail : tail;
}

// z = (clean - noisy[against]) / sigma, p = Phi(z)
KERNEL(chances, (Span<float> p, Span<float> z, Span<const float> clean, Span<const float> sigma,
                 Span<const float> noisy, Span<const u32> against)) {
    EACH(i, p.len) {
        z.data[i] = (clean.data[i] - noisy.data[against.data[i]]) / sigma.data[i];
        p.data[i] = (float)normal_cdf(z.data[i]);
    }
}

// d Phi(z) / d clean of an element, times its gradient.
DEVICE float chance_slope(float z, float sigma, float g) {
    float density = expf(-0.5f * z * z) / sqrtf(2.0f * 3.14159265f);
    return g * density / sigma;
}

// d (+)= the slopes along clean
KERNEL(chances_back_clean,
       (Span<float> d, Span<const float> z, Span<const float> sigma, Span<const float> g, u32 accumulate)) {
    EACH(i, d.len) { set_or_add(d.data[i], chance_slope(z.data[i], sigma.data[i], g.data[i]), accumulate); }
}

// d (+)= the slopes along sigma
KERNEL(chances_back_sigma,
       (Span<float> d, Span<const float> z, Span<const float> sigma, Span<const float> g, u32 accumulate)) {
    EACH(i, d.len) {
        set_or_add(d.data[i], -chance_slope(z.data[i], sigma.data[i], g.data[i]) * z.data[i], accumulate);
    }
}

// d [T, width] (+)= the slopes along noisy: each element gets those of the elements of its row that are measured
// against it
KERNEL(chances_back_noisy, (Span<float> d, Span<const float> z, Span<const float> sigma, Span<const float> g,
                            Span<const u32> against, u64 width, u32 accumulate)) {
    EACH(i, d.len) {
        float sum = accumulate ? d.data[i] : 0.0f;
        u64 first = cell_of(i, width).row * width;
        for (u64 e = first; e < first + width; e++) {
            if (against.data[e] == i) sum -= chance_slope(z.data[e], sigma.data[e], g.data[e]);
        }
        d.data[i] = sum;
    }
}

// out [T, width]: column j of each row of x [T, k] at column index [T, k], zeros elsewhere
KERNEL(scatter_columns, (Span<float> out, Span<const float> x, Span<const u32> index, u64 k, u64 width)) {
    EACH(i, out.len) {
        Cell cell = cell_of(i, width);
        float found = 0.0f;
        for (u64 route = cell.row * k; route < (cell.row + 1) * k; route++) {
            if (index.data[route] == cell.column) found = x.data[route];
        }
        out.data[i] = found;
    }
}

// d [T, k] (+)= columns index of g [T, width], zeros where there is none
KERNEL(scatter_columns_back,
       (Span<float> d, Span<const float> g, Span<const u32> index, u64 k, u64 width, u32 accumulate)) {
    EACH(route, d.len) {
        u32 column = index.data[route];
        set_or_add(d.data[route], column == NOWHERE ? 0.0f : g.data[route / k * width + column], accumulate);
    }
}

// Keeps the mean of nothing from dividing (Shazeer et al. 2017).
constexpr double TINY = 1e-10;

// The sum of a column over a group's rows, for all threads.
DEVICE double column_sum(double* partial, const float* x, u64 width, RowGroup group, u64 column) {
    double here = block_total(
        partial, group.rows.len, [=](u64 n) { return (double)x[group.rows.data[n] * width + column]; });
    return here + (group.elsewhere.len ? group.elsewhere.data[column] : 0.0);
}

// out[0] = the groups' weighted squared variations, var / (mean^2 + tiny) of their sums by columns, and slopes [groups,
// width] those along each column's sum. By one block; sums are made again where they are needed, so that there may be
// any number of columns.
KERNEL(squared_variation,
       (Span<float> out, Span<float> slopes, Span<const float> x, u64 width, Span<const RowGroup> groups)) {
    SHARED(double, partial, MAX_THREADS);
    BLOCKS(only, 1) {
        double total = 0.0, n = (double)width;
        for (u64 g = 0; g < groups.len; g++) {
            RowGroup group = groups.data[g];
            double mean = 0.0, variance = 0.0;
            for (u64 c = 0; c < width; c++) mean += column_sum(partial, x.data, width, group, c);
            mean /= n;
            for (u64 c = 0; c < width; c++) {
                double s = column_sum(partial, x.data, width, group, c) - mean;
                variance += s * s;
            }
            // One column has no variation.
            variance = width == 1 ? 0.0 : variance / (n - 1.0);
            double scale = mean * mean + TINY;
            for (u64 c = 0; c < width; c++) {
                double s = column_sum(partial, x.data, width, group, c) - mean;
                double by_variance = width == 1 ? 0.0 : 2.0 * s / (n - 1.0) / scale;
                double by_mean = variance / (scale * scale) * 2.0 * mean / n;
                THREADS {
                    if (thread() == 0) slopes.data[g * width + c] = (float)(group.weight * (by_variance - by_mean));
                }
            }
            total += group.share * group.weight * variance / scale;
        }
        THREADS {
            if (thread() == 0) out.data[0] = (float)total;
        }
    }
}

// d [T, width] (+)= g[0] slopes [groups, width] in the rows of each group, by one block: a row may be of several groups
KERNEL(squared_variation_back, (Span<float> d, Span<const float> slopes, Span<const float> g, u64 width,
                                Span<const RowGroup> groups, u32 accumulate)) {
    BLOCKS(only, 1) {
        THREADS {
            for (u64 i = thread(); !accumulate && i < d.len; i += threads()) d.data[i] = 0.0f;
        }
        for (u64 n = 0; n < groups.len; n++) {
            RowGroup group = groups.data[n];
            THREADS {
                // A group may name a row twice: a thread has columns, whatever the row.
                for (u64 c = thread(); c < width; c += threads()) {
                    for (u64 r = 0; r < group.rows.len; r++) {
                        d.data[group.rows.data[r] * width + c] += g.data[0] * slopes.data[n * width + c];
                    }
                }
            }
        }
    }
}
