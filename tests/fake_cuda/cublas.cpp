// cuBLAS by loops, for tests: libcublas.so. Products of groups are begun in a stream of the driver beside it; single ones are
// those of cublaslt.cpp.

#include "fake_blas.h"

#include <memory>

namespace {

enum : int { TF32 = 3, FULL_REDUCTIONS = 16 };

struct Handle {
    void* stream;
    int mode;
};

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
            if (!of->has_stride()) return INVALID_VALUE;
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
