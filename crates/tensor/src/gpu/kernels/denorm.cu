// The inverse of a norm, row by row.
#include "common.cuh"
#include "rows.cuh"

// out [R, 2] = mean (0 unless centred) and sqrt(mean((x - mean)^2) + eps) of each row of x [R, width]
KERNEL(row_moments, (Span<float> out, Span<const float> x, u64 width, NormMoments kind, float eps)) {
    SHARED(float, partial, MAX_THREADS);
    BLOCKS(row, out.len / 2) {
        const float* line = x.data + row * width;
        float mean = 0.0f;
        if (kind == CENTRED) mean = block_total(partial, width, [=](u64 i) { return line[i]; }) / (float)width;
        float squares = block_total(partial, width, [=](u64 i) { return (line[i] - mean) * (line[i] - mean); });
        THREADS {
            if (thread() == 0) {
                out.data[2 * row] = mean;
                out.data[2 * row + 1] = sqrtf(squares / (float)width + eps);
            }
        }
    }
}

// dx [R, width] (+)= by the moments' gradients g [R, 2]: d mean / dx is 1 / D, d deviation / dx (x - mean) / (D
// deviation)
KERNEL(row_moments_back, (Span<float> dx, Span<const float> x, Span<const float> moments, Span<const float> g,
                          u64 width, NormMoments kind, u32 accumulate)) {
    EACH(i, dx.len) {
        u64 row = cell_of(i, width).row;
        float mean = moments.data[2 * row], deviation = moments.data[2 * row + 1];
        float of_mean = kind == CENTRED ? g.data[2 * row] / (float)width : 0.0f;
        float of_deviation = g.data[2 * row + 1] / ((float)width * deviation);
        set_or_add(dx.data[i], of_mean + of_deviation * (x.data[i] - mean), accumulate);
    }
}

// out [R, D] = (x - b) / w deviation + mean, moments [R, 2] being mean and deviation
KERNEL(denormalise, (Span<float> out, Span<const float> x, Span<const float> moments, Span<const float> w,
                     Span<const float> b)) {
    EACH(i, out.len) {
        Cell cell = cell_of(i, w.len);
        float mean = moments.data[2 * cell.row], deviation = moments.data[2 * cell.row + 1];
        out.data[i] = (x.data[i] - b.data[cell.column]) / w.data[cell.column] * deviation + mean;
    }
}

// dx [R, D] (+)= g deviation / w
KERNEL(denormalise_back,
       (Span<float> dx, Span<const float> moments, Span<const float> w, Span<const float> g, u32 accumulate)) {
    EACH(i, dx.len) {
        Cell cell = cell_of(i, w.len);
        set_or_add(dx.data[i], g.data[i] * moments.data[2 * cell.row + 1] / w.data[cell.column], accumulate);
    }
}

// dm [R, 2] = sum g, sum g (x - b) / w of each row
KERNEL(denormalise_back_moments, (Span<float> dm, Span<const float> x, Span<const float> w, Span<const float> b,
                                  Span<const float> g)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = w.len;
    BLOCKS(row, dm.len / 2) {
        const float *line = x.data + row * width, *slopes = g.data + row * width;
        float of_mean = block_total(partial, width, [=](u64 i) { return slopes[i]; });
        float of_deviation = block_total(
            partial, width, [=](u64 i) { return slopes[i] * (line[i] - b.data[i]) / w.data[i]; });
        THREADS {
            if (thread() == 0) {
                dm.data[2 * row] = of_mean;
                dm.data[2 * row + 1] = of_deviation;
            }
        }
    }
}

// dw [parts, D] = -sum over each part of the rows of g deviation (x - b) / w^2, db [parts, D] = -sum of g deviation / w
KERNEL(denormalise_back_affine, (Span<float> dw, Span<float> db, Span<const float> x, Span<const float> moments,
                                 Span<const float> w, Span<const float> b, Span<const float> g, u64 parts)) {
    u64 width = w.len, rows = moments.len / 2;
    auto of_shift = [=](u64 row, u64 c) { return -(g.data[row * width + c] * moments.data[2 * row + 1] / w.data[c]); };
    sum_columns(db.data, parts, rows, width, false, of_shift);
    sum_columns(dw.data, parts, rows, width, false, [=](u64 row, u64 c) {
        return of_shift(row, c) * (x.data[row * width + c] - b.data[c]) / w.data[c];
    });
}
