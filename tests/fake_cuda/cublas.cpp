// cuBLAS by loops, for tests: libcublas.so. Products are begun in a stream of the driver beside it.

#include "fake_cuda.h"

#include <dlfcn.h>

#include <memory>
#include <vector>

namespace {

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_16BF = 14 };
enum : int { COMPUTE_32F = 68, TF32 = 3, FULL_REDUCTIONS = 16 };

// Of the driver that the program has loaded.
template <class F> F driver(const char* name) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void* found = library ? dlsym(library, name) : nullptr;
    if (!found) fake::misuse("cuBLAS beside another driver");
    return (F)found;
}

struct Handle {
    void* stream;
    int mode;
};

bool is_bound() {
    static auto is_bound = driver<FakeIsBound>("fake_is_bound");
    return is_bound();
}

void count(const char* name, long long by) {
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

void multiply(const Matrix& a, const Matrix& b, const Matrix& c, int inner, float alpha, float beta, bool is_tf32) {
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
Matrix matrix(const void* data, Type type, int rows, int cols, int stride, bool is_transposed) {
    return Matrix{(void*)data, type, is_transposed ? cols : rows, is_transposed ? rows : cols, stride, is_transposed};
}

}  // namespace

EXPORT Status cublasCreate_v2(Handle** handle) {
    if (!is_bound()) return NOT_INITIALIZED;
    *handle = new Handle{nullptr, 0};
    count("left handles", 1);
    return SUCCESS;
}

EXPORT Status cublasDestroy_v2(Handle* handle) {
    if (!is_bound()) return NOT_INITIALIZED;
    delete handle;
    count("left handles", -1);
    return SUCCESS;
}

EXPORT Status cublasSetStream_v2(Handle* handle, void* stream) {
    handle->stream = stream;
    return SUCCESS;
}

EXPORT Status cublasSetMathMode(Handle* handle, int mode) {
    handle->mode = mode;
    return SUCCESS;
}

EXPORT Status cublasGemmEx(Handle* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                           const void* a, Type a_type, int a_stride, const void* b, Type b_type, int b_stride,
                           const void* beta, void* c, Type c_type, int c_stride, int compute, int) {
    static auto queue = driver<FakeQueue>("fake_queue");
    static auto holds = driver<FakeHolds>("fake_holds");
    static auto fails = driver<FakeFails>("fake_fails");
    if (!is_bound()) return NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || transpose_a / 2 || transpose_b / 2) return INVALID_VALUE;
    if (compute != COMPUTE_32F || a_type != b_type || (c_type != a_type && c_type != R_32F)) return NOT_SUPPORTED;
    Matrix left = matrix(a, a_type, m, k, a_stride, transpose_a), right = matrix(b, b_type, k, n, b_stride, transpose_b);
    Matrix to = matrix(c, c_type, m, n, c_stride, false);
    for (const Matrix* of : {&left, &right, &to}) {
        if (of->stride < std::max(1, of->rows)) return INVALID_VALUE;
        if (of->span() && !holds(of->data, of->span())) fake::misuse("a product goes beyond memory of the device");
    }
    if (fails("product", "")) return EXECUTION_FAILED;
    bool is_tf32 = a_type == R_32F && (handle->mode & 15) == TF32;
    if (!(handle->mode & FULL_REDUCTIONS)) count("products that may sum in less than f32", 1);
    count("products", 1);
    float scale = *(const float*)alpha, keep = *(const float*)beta;
    std::function<void()> work = [=] { multiply(left, right, to, k, scale, keep, is_tf32); };
    return queue(handle->stream, "a product", &work) ? EXECUTION_FAILED : SUCCESS;
}

// Groups of one product each. Pointers are in the device's memory, where they are read when the products are; all else is
// read at the call. Factors and results of two types are refused.
EXPORT Status cublasGemmGroupedBatchedEx(Handle* handle, const int* transpose_a, const int* transpose_b, const int* m,
                                         const int* n, const int* k, const float* alpha, const void* const* a,
                                         Type a_type, const int* a_stride, const void* const* b, Type b_type,
                                         const int* b_stride, const float* beta, void* const* c, Type c_type,
                                         const int* c_stride, int groups, const int* sizes, int compute) {
    static auto queue = driver<FakeQueue>("fake_queue");
    static auto holds = driver<FakeHolds>("fake_holds");
    static auto fails = driver<FakeFails>("fake_fails");
    if (!is_bound()) return NOT_INITIALIZED;
    if (compute != COMPUTE_32F || a_type != b_type || c_type != a_type) return NOT_SUPPORTED;
    for (const void* list : {(const void*)a, (const void*)b, (const void*)c}) {
        if (!holds(list, groups * sizeof(void*))) fake::misuse("pointers to matrices are not in memory of the device");
    }
    struct Group {
        Matrix a, b, c;
        int inner;
        float alpha, beta;
    };
    auto all = std::make_shared<std::vector<Group>>();
    for (int i = 0; i < groups; i++) {
        if (sizes[i] != 1 || m[i] < 0 || n[i] < 0 || k[i] < 0) return INVALID_VALUE;
        Group group = {matrix(nullptr, a_type, m[i], k[i], a_stride[i], transpose_a[i]),
                       matrix(nullptr, b_type, k[i], n[i], b_stride[i], transpose_b[i]),
                       matrix(nullptr, c_type, m[i], n[i], c_stride[i], false), k[i], alpha[i], beta[i]};
        for (const Matrix* of : {&group.a, &group.b, &group.c}) {
            if (of->stride < std::max(1, of->rows)) return INVALID_VALUE;
        }
        all->push_back(group);
    }
    if (fails("product", "")) return EXECUTION_FAILED;
    if (!(handle->mode & FULL_REDUCTIONS)) count("products that may sum in less than f32", 1);
    count("products of groups", groups);
    bool is_tf32 = a_type == R_32F && (handle->mode & 15) == TF32;
    std::function<void()> work = [=] {
        for (size_t i = 0; i < all->size(); i++) {
            Group group = (*all)[i];
            group.a.data = (void*)a[i];
            group.b.data = (void*)b[i];
            group.c.data = c[i];
            multiply(group.a, group.b, group.c, group.inner, group.alpha, group.beta, is_tf32);
        }
    };
    return queue(handle->stream, "products of groups", &work) ? EXECUTION_FAILED : SUCCESS;
}
