// From logits to losses and their gradients, block by block of rows. Of each row a part of the classes knows its own
// top, sum and target's logit; joined over the parts, they give every part its share of the softmax.
#include "common.cuh"
#include "rows.cuh"

// Targets that do not count.
constexpr u32 IGNORE = 0xffffffffu;

// Largest logit, sum of exp(logit - top), and the target's logit or 0 where the target is another part's.
struct Statistics {
    float top, sum, target;
};

DEVICE Statistics statistics_at(const float* rows, u64 row) {
    return {rows[3 * row], rows[3 * row + 1], rows[3 * row + 2]};
}

DEVICE void put_statistics(float* rows, u64 row, Statistics of) {
    rows[3 * row] = of.top;
    rows[3 * row + 1] = of.sum;
    rows[3 * row + 2] = of.target;
}

// The sum of exp(logit - top) for another top.
DEVICE float sum_below(Statistics of, float top) { return of.sum == 0.0f ? 0.0f : of.sum * expf(of.top - top); }

DEVICE Statistics join(Statistics a, Statistics b) {
    float top = fmaxf(a.top, b.top);
    return {top, sum_below(a, top) + sum_below(b, top), a.target + b.target};
}

// block [rows, classes]: logits become exp(logit - top), but for rows that do not count; statistics [rows, 3] are
// theirs
KERNEL(to_exponentials,
       (Span<float> block, Span<float> statistics, Span<const u32> targets, Range rows, Range classes)) {
    SHARED(float, partial, MAX_THREADS);
    u64 width = classes.end - classes.start;
    BLOCKS(row, rows.end - rows.start) {
        u32 target = targets.data[rows.start + row];
        // None of the classes are seen of a row that does not count.
        u64 seen = target == IGNORE ? 0 : width;
        float* line = block.data + row * width;
        THREADS {
            float top = -infinity();
            for (u64 i = thread(); i < seen; i += threads()) top = fmaxf(top, line[i]);
            partial[thread()] = top;
        }
        float top = block_max(partial);
        u64 place = target - classes.start;
        // Read before it is overwritten.
        float logit = place < seen ? line[place] : 0.0f;
        barrier();
        THREADS {
            float sum = 0.0f;
            for (u64 i = thread(); i < seen; i += threads()) {
                line[i] = expf(line[i] - top);
                sum += line[i];
            }
            partial[thread()] = sum;
        }
        float sum = block_sum(partial);
        THREADS {
            if (thread() == 0) put_statistics(statistics.data, row, {top, sum, logit});
        }
    }
}

// joined [R, 3] = the statistics of parts [parts, R, 3], in the order of parts
KERNEL(join_statistics, (Span<float> joined, Span<const float> parts)) {
    u64 rows = joined.len / 3, all = parts.len / 3;
    EACH(row, rows) {
        Statistics of = statistics_at(parts.data, row);
        for (u64 at = row + rows; at < all; at += rows) of = join(of, statistics_at(parts.data, at));
        put_statistics(joined.data, row, of);
    }
}

// losses[rows] = ln sum exp - target's logit by joined [rows, 3], 0 for rows that do not count
KERNEL(row_losses, (Span<float> losses, Span<const float> joined, Span<const u32> targets, Range rows)) {
    EACH(row, rows.end - rows.start) {
        Statistics of = statistics_at(joined.data, row);
        // The difference first: both may be large.
        float loss = logf(of.sum) + (of.top - of.target);
        losses.data[rows.start + row] = targets.data[rows.start + row] == IGNORE ? 0.0f : loss;
    }
}

// block [rows, classes]: exponentials become softmax - (1 at the target), zeros for rows that do not count
KERNEL(to_gradients, (Span<float> block, Span<const float> own, Span<const float> joined, Span<const u32> targets,
                      Range rows, Range classes)) {
    u64 width = classes.end - classes.start;
    BLOCKS(row, rows.end - rows.start) {
        u32 target = targets.data[rows.start + row];
        Statistics all = statistics_at(joined.data, row);
        float factor = 1.0f / all.sum * expf(own.data[3 * row] - all.top);
        u64 place = target - classes.start;
        float* line = block.data + row * width;
        THREADS {
            for (u64 i = thread(); i < width; i += threads()) {
                line[i] = target == IGNORE ? 0.0f : line[i] * factor - (i == place ? 1.0f : 0.0f);
            }
        }
    }
}

// sums [S] = the sum of each of S equal stretches of losses, in f64
KERNEL(stretch_sums, (Span<float> sums, Span<const float> losses)) {
    SHARED(double, partial, MAX_THREADS);
    u64 length = sums.len ? losses.len / sums.len : 0;
    BLOCKS(stretch, sums.len) {
        const float* from = losses.data + stretch * length;
        double sum = block_total(partial, length, [=](u64 i) { return (double)from[i]; });
        THREADS {
            if (thread() == 0) sums.data[stretch] = (float)sum;
        }
    }
}

// sums: those of losses, in f64, over `length` rows each
KERNEL(loss_sums, (Span<u32> sums, Span<const float> losses, u64 length)) {
    sum_stretches(sums, length, losses.len, [=](u64 i) { return (double)losses.data[i]; });
}
