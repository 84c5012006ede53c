// RMS norm and layer norm, a block a row.
#include "common.cuh"
#include "rows.cuh"

DEVICE float inverse_root(float x) { return 1.0f / sqrtf(x); }

// out [R, D] = x r w with r = 1 / sqrt(mean(x^2) + eps), kept in inverse [R]
KERNEL(rms_norm, (Any out, Span<float> inverse, ConstAny x, Span<const float> w, float eps)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = w.len;
    BLOCKS(row, inverse.len) {
        auto line = [=](u64 i) { return load(x, row * width + i); };
        float squares = block_total(partial, width, [=](u64 i) { return line(i) * line(i); });
        float r = inverse_root(squares / (float)width + eps);
        THREADS {
            if (thread() == 0) inverse.data[row] = r;
            for (u64 i = thread(); i < width; i += threads()) store(out, row * width + i, line(i) * r * w.data[i]);
        }
    }
}

// dx [R, D] (+)= r (w g - x r^2 mean(x w g)), the slope of x r w along x
KERNEL(rms_norm_back, (Span<float> dx, ConstAny x, Span<const float> w, Span<const float> g,
                       Span<const float> inverse, u32 accumulate)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = w.len;
    BLOCKS(row, inverse.len) {
        auto line = [=](u64 i) { return load(x, row * width + i); };
        const float* slopes = g.data + row * width;
        float r = inverse.data[row];
        float along = block_total(partial, width, [=](u64 i) { return line(i) * w.data[i] * slopes[i]; });
        float mean = along / (float)width * r * r;
        THREADS {
            for (u64 i = thread(); i < width; i += threads()) {
                set_or_add(dx.data[row * width + i], r * (w.data[i] * slopes[i] - line(i) * mean), accumulate);
            }
        }
    }
}

// dw [parts, D] = sum over each part of the rows of x r g
KERNEL(rms_norm_back_weight,
       (Span<float> dw, ConstAny x, Span<const float> g, Span<const float> inverse, u64 parts)) {
    u64 width = dw.len / parts;
    sum_columns(dw.data, parts, inverse.len, width, false, [=](u64 row, u64 c) {
        return load(x, row * width + c) * inverse.data[row] * g.data[row * width + c];
    });
}

// out [R] = the sum of x^2 of each row of x [R, D]
KERNEL(square_sums, (Span<float> out, Span<const float> x)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = out.len ? x.len / out.len : 0;
    BLOCKS(row, out.len) {
        const float* line = x.data + row * width;
        float squares = block_total(partial, width, [=](u64 i) { return line[i] * line[i]; });
        THREADS {
            if (thread() == 0) out.data[row] = squares;
        }
    }
}

// dx [R, D] (+)= 2 x g[row]
KERNEL(square_sums_back, (Span<float> dx, Span<const float> x, Span<const float> g, u32 accumulate)) {
    u64 width = g.len ? x.len / g.len : 1;
    EACH(i, dx.len) { set_or_add(dx.data[i], x.data[i] * (2.0f * g.data[cell_of(i, width).row]), accumulate); }
}

// out [R, D] = x r w with r = 1 / sqrt(squares[row] / columns + eps), kept in inverse [R]
KERNEL(rms_norm_of, (Span<float> out, Span<float> inverse, Span<const float> x, Span<const float> squares,
                     Span<const float> w, u64 columns, float eps)) {
    u64 width = w.len;
    BLOCKS(row, inverse.len) {
        float r = inverse_root(squares.data[row] / (float)columns + eps);
        THREADS {
            if (thread() == 0) inverse.data[row] = r;
            for (u64 i = row * width + thread(); i < (row + 1) * width; i += threads()) {
                out.data[i] = x.data[i] * r * w.data[i - row * width];
            }
        }
    }
}

// dx [R, D] (+)= r w g
KERNEL(rms_norm_of_back,
       (Span<float> dx, Span<const float> w, Span<const float> g, Span<const float> inverse, u32 accumulate)) {
    EACH(i, dx.len) {
        Cell cell = cell_of(i, w.len);
        set_or_add(dx.data[i], inverse.data[cell.row] * w.data[cell.column] * g.data[i], accumulate);
    }
}

// ds [R] (+)= -r^3 sum(x w g) / (2 columns), the slope along the squares
KERNEL(rms_norm_of_back_squares, (Span<float> ds, Span<const float> x, Span<const float> w, Span<const float> g,
                                  Span<const float> inverse, u64 columns, u32 accumulate)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = w.len;
    BLOCKS(row, ds.len) {
        const float *line = x.data + row * width, *slopes = g.data + row * width;
        float r = inverse.data[row];
        float along = block_total(partial, width, [=](u64 i) { return line[i] * w.data[i] * slopes[i]; });
        THREADS {
            if (thread() == 0) set_or_add(ds.data[row], along * (-0.5f / (float)columns) * r * r * r, accumulate);
        }
    }
}

// out [R, D] = (x - mean) r w + b; moments [R, 2] are mean and r = 1 / sqrt(variance + eps)
KERNEL(layer_norm, (Any out, Span<float> moments, ConstAny x, Span<const float> w, Span<const float> b,
                    float eps)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = w.len;
    BLOCKS(row, moments.len / 2) {
        auto line = [=](u64 i) { return load(x, row * width + i); };
        float mean = block_total(partial, width, line) / (float)width;
        // In a second pass: the mean of squares less the square of the mean would cancel.
        float squares = block_total(partial, width, [=](u64 i) { return (line(i) - mean) * (line(i) - mean); });
        float r = inverse_root(squares / (float)width + eps);
        THREADS {
            if (thread() == 0) {
                moments.data[2 * row] = mean;
                moments.data[2 * row + 1] = r;
            }
            for (u64 i = thread(); i < width; i += threads()) {
                store(out, row * width + i, (line(i) - mean) * r * w.data[i] + b.data[i]);
            }
        }
    }
}

// dx [R, D] (+)= r (w g - mean(w g) - n mean(w g n)), n being the normalised row
KERNEL(layer_norm_back, (Span<float> dx, ConstAny x, Span<const float> w, Span<const float> g,
                         Span<const float> moments, u32 accumulate)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = w.len;
    BLOCKS(row, moments.len / 2) {
        auto line = [=](u64 i) { return load(x, row * width + i); };
        const float* slopes = g.data + row * width;
        float mean = moments.data[2 * row], r = moments.data[2 * row + 1];
        float plain = block_total(partial, width, [=](u64 i) { return w.data[i] * slopes[i]; }) / (float)width;
        float along = block_total(partial, width, [=](u64 i) { return (line(i) - mean) * w.data[i] * slopes[i]; });
        along = along * r / (float)width;
        THREADS {
            for (u64 i = thread(); i < width; i += threads()) {
                float d = r * (w.data[i] * slopes[i] - plain - (line(i) - mean) * r * along);
                set_or_add(dx.data[row * width + i], d, accumulate);
            }
        }
    }
}

// dw [parts, D] = sum over each part of the rows of (x - mean) r g
KERNEL(layer_norm_back_weight,
       (Span<float> dw, ConstAny x, Span<const float> g, Span<const float> moments, u64 parts)) {
    u64 width = dw.len / parts;
    sum_columns(dw.data, parts, moments.len / 2, width, false, [=](u64 row, u64 c) {
        float mean = moments.data[2 * row], r = moments.data[2 * row + 1];
        return (load(x, row * width + c) - mean) * r * g.data[row * width + c];
    });
}
