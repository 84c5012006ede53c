// What the libraries of products share: types, the driver beside them, a product by loops.

#pragma once
#include "fake_cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <vector>

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type : int { R_32F = 0, R_16BF = 14 };
enum : int { COMPUTE_32F = 68 };

// Of the driver that the program has loaded.
template <class F> F driver(const char* name) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void* found = library ? dlsym(library, name) : nullptr;
    if (!found) fake::misuse("a library of products beside another driver");
    return (F)found;
}

inline bool is_bound() {
    static auto is_bound = driver<FakeIsBound>("fake_is_bound");
    return is_bound();
}

inline void count(const char* name, long long by) {
    static auto count = driver<FakeCount>("fake_count");
    count(name, by);
}

// A matrix as cuBLAS reads it: columns one after the other.
struct Matrix {
    void* data;
    Type type;
    int rows, cols, stride;
    bool is_transposed;

    size_t bytes() const { return type == R_16BF ? 2 : 4; }
    bool has_stride() const { return stride >= std::max(1, rows); }
    size_t span() const { return rows && cols ? ((size_t)stride * (cols - 1) + rows) * bytes() : 0; }

    float at(size_t i) const {
        if (type == R_32F) return ((const float*)data)[i];
        uint32_t bits = (uint32_t)((const uint16_t*)data)[i] << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }

    void set(size_t i, float x) const {
        if (type == R_32F) {
            ((float*)data)[i] = x;
            return;
        }
        uint32_t bits;
        memcpy(&bits, &x, sizeof x);
        bool is_nan = x != x;
        ((uint16_t*)data)[i] = (uint16_t)(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }

    // Its elements as they are read, [cols, rows], in TF32 if that is asked for.
    std::vector<float> read(bool is_rounded) const {
        std::vector<float> all((size_t)rows * cols);
        for (int col = 0; col < cols; col++) {
            for (int row = 0; row < rows; row++) {
                float x = at((size_t)col * stride + row);
                if (is_rounded) {
                    uint32_t bits;
                    memcpy(&bits, &x, sizeof x);
                    bits &= ~0x1fffu;
                    memcpy(&x, &bits, sizeof x);
                }
                all[is_transposed ? (size_t)row * cols + col : (size_t)col * rows + row] = x;
            }
        }
        return all;
    }
};

inline void multiply(const Matrix& a, const Matrix& b, const Matrix& c, int inner, float alpha, float beta, bool is_tf32) {
    std::vector<float> left = a.read(is_tf32), right = b.read(is_tf32), sums((size_t)c.rows);
    for (int col = 0; col < c.cols; col++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int k = 0; k < inner; k++) {
            float factor = right[(size_t)col * inner + k];
            const float* column = &left[(size_t)k * c.rows];
            for (int row = 0; row < c.rows; row++) sums[row] += column[row] * factor;
        }
        for (int row = 0; row < c.rows; row++) {
            size_t i = (size_t)col * c.stride + row;
            // What is multiplied by zero is not read: it may be NaN.
            c.set(i, alpha * sums[row] + (beta == 0.0f ? 0.0f : beta * c.at(i)));
        }
    }
}

// As it is stored, from its dims as it is read.
inline Matrix matrix(const void* data, Type type, int rows, int cols, int stride, bool is_transposed) {
    return Matrix{(void*)data, type, is_transposed ? cols : rows, is_transposed ? rows : cols, stride, is_transposed};
}

}  // namespace
