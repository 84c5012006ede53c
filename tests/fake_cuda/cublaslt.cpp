// cuBLASLt by loops, for tests: libcublasLt.so. Products are begun in streams of the driver beside it.
//
// There is one algorithm. It relies on all that it was promised: that pointers are aligned, that nobody else has its workspace.

#include "fake_blas.h"

#include <limits.h>

#include <map>
#include <mutex>

namespace {

// Attributes of products and of preferences.
enum : int { TRANSPOSE_A = 3, TRANSPOSE_B = 4 };
enum : int { MOST_WORKSPACE = 1, REDUCTIONS = 3, ALIGNMENT_A = 5, ALIGNMENT_D = 8 };
// How sums that are taken in parts are put together: in the result, or in workspace, as f32 or with the result's type.
enum : uint32_t { IN_PLACE = 1, IN_F32 = 2, IN_RESULTS_TYPE = 4, ANY_REDUCTION = 7 };

constexpr uint64_t MAGIC = 0x6d68746c61736c62;
constexpr uint64_t WORKSPACE = 1 << 20;

struct Handle {};

struct Layout {
    Type type;
    uint64_t rows, cols;
    int64_t stride;

    bool operator==(const Layout& other) const {
        return type == other.type && rows == other.rows && cols == other.cols && stride == other.stride;
    }
    bool is_known() const { return (type == R_32F || type == R_16BF) && rows <= INT_MAX && cols <= INT_MAX && stride <= INT_MAX; }
    Matrix of(const void* data, bool is_transposed) const {
        return Matrix{(void*)data, type, (int)rows, (int)cols, (int)stride, is_transposed};
    }
};

struct Operation {
    int compute;
    Type scale;
    // A and B.
    int transposed[2];
};

struct Preference {
    uint64_t most_workspace;
    uint32_t reductions;
    // Of A, B, C and D.
    uint32_t alignments[4];
};

// What the program keeps as words that mean nothing to it.
struct Algorithm {
    uint64_t magic, workspace;
    uint32_t alignments[4];
    uint32_t reductions;
    Type factors, result;
    int transposed[2];
    uint32_t none[3];
};
static_assert(sizeof(Algorithm) == 64, "an algorithm is eight words");

struct Found {
    Algorithm algorithm;
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Found) == 96, "a result is as long as the library's");

template <class T> Status create(T** made, T what) {
    if (!made) return INVALID_VALUE;
    *made = new T(what);
    count("left descriptors", 1);
    return SUCCESS;
}

template <class T> Status destroy(T* made) {
    if (!made) return INVALID_VALUE;
    delete made;
    count("left descriptors", -1);
    return SUCCESS;
}

// Whether there is a product of such matrices.
Status check(const Operation& operation, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    if (operation.compute != COMPUTE_32F || operation.scale != R_32F) return NOT_SUPPORTED;
    for (const Layout* of : {&a, &b, &c, &d}) {
        if (!of->is_known()) return NOT_SUPPORTED;
    }
    if (a.type != b.type || (c.type != a.type && c.type != R_32F) || d.type != c.type) return NOT_SUPPORTED;
    for (const Layout* of : {&a, &b, &c, &d}) {
        if (of->stride < (int64_t)std::max<uint64_t>(1, of->rows)) return INVALID_VALUE;
    }
    uint64_t rows = operation.transposed[0] ? a.cols : a.rows, inner = operation.transposed[0] ? a.rows : a.cols;
    uint64_t cols = operation.transposed[1] ? b.rows : b.cols, with = operation.transposed[1] ? b.cols : b.rows;
    bool fits = inner == with && d.rows == rows && d.cols == cols && c.rows == rows && c.cols == cols;
    return fits ? SUCCESS : INVALID_VALUE;
}

bool meet(const void* one, size_t one_bytes, const void* other, size_t other_bytes) {
    return (uintptr_t)one < (uintptr_t)other + other_bytes && (uintptr_t)other < (uintptr_t)one + one_bytes;
}

// Whether bytes of workspace were last those of another stream. Products run whole here, so numbers would not show it.
bool is_shared(void* workspace, size_t bytes, void* stream) {
    struct Lent {
        size_t bytes;
        void* stream;
    };
    static std::mutex mutex;
    static std::map<void*, Lent> lent;
    std::lock_guard<std::mutex> guard(mutex);
    bool is_anothers = false;
    for (auto at = lent.begin(); at != lent.end();) {
        bool is_same = meet(at->first, at->second.bytes, workspace, bytes);
        is_anothers |= is_same && at->second.stream != stream;
        at = is_same ? lent.erase(at) : std::next(at);
    }
    lent[workspace] = Lent{bytes, stream};
    return is_anothers;
}

}  // namespace

EXPORT Status cublasLtCreate(Handle** handle) {
    if (!is_bound()) return NOT_INITIALIZED;
    *handle = new Handle;
    count("left handles", 1);
    return SUCCESS;
}

EXPORT Status cublasLtDestroy(Handle* handle) {
    if (!handle || !is_bound()) return NOT_INITIALIZED;
    delete handle;
    count("left handles", -1);
    return SUCCESS;
}

EXPORT Status cublasLtMatrixLayoutCreate(Layout** layout, Type type, uint64_t rows, uint64_t cols, int64_t stride) {
    return create(layout, Layout{type, rows, cols, stride});
}

EXPORT Status cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout); }

EXPORT Status cublasLtMatmulDescCreate(Operation** operation, int compute, Type scale) {
    return create(operation, Operation{compute, scale, {0, 0}});
}

EXPORT Status cublasLtMatmulDescSetAttribute(Operation* operation, int attribute, const void* value, size_t bytes) {
    if (attribute != TRANSPOSE_A && attribute != TRANSPOSE_B) return NOT_SUPPORTED;
    int set;
    if (!operation || !value || bytes != sizeof set) return INVALID_VALUE;
    memcpy(&set, value, sizeof set);
    if (set != 0 && set != 1) return INVALID_VALUE;
    operation->transposed[attribute - TRANSPOSE_A] = set;
    return SUCCESS;
}

EXPORT Status cublasLtMatmulDescDestroy(Operation* operation) { return destroy(operation); }

EXPORT Status cublasLtMatmulPreferenceCreate(Preference** preference) {
    return create(preference, Preference{0, ANY_REDUCTION, {256, 256, 256, 256}});
}

EXPORT Status cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t bytes) {
    bool is_alignment = attribute >= ALIGNMENT_A && attribute <= ALIGNMENT_D;
    if (attribute != MOST_WORKSPACE && attribute != REDUCTIONS && !is_alignment) return NOT_SUPPORTED;
    if (!preference || !value || bytes != (attribute == MOST_WORKSPACE ? 8 : 4)) return INVALID_VALUE;
    if (attribute == MOST_WORKSPACE) {
        memcpy(&preference->most_workspace, value, bytes);
        return SUCCESS;
    }
    uint32_t set;
    memcpy(&set, value, sizeof set);
    if (is_alignment) {
        if (!set || set & (set - 1)) return INVALID_VALUE;
        preference->alignments[attribute - ALIGNMENT_A] = set;
    } else {
        if (set & ~ANY_REDUCTION) return INVALID_VALUE;
        preference->reductions = set;
    }
    return SUCCESS;
}

EXPORT Status cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference); }

EXPORT Status cublasLtMatmulAlgoGetHeuristic(Handle* handle, const Operation* operation, const Layout* a, const Layout* b,
                                             const Layout* c, const Layout* d, const Preference* preference, int most,
                                             Found* results, int* given) {
    if (!handle || !is_bound()) return NOT_INITIALIZED;
    if (!operation || !a || !b || !c || !d || !preference || most < 1 || !results || !given) return INVALID_VALUE;
    *given = 0;
    if (Status refused = check(*operation, *a, *b, *c, *d); refused != SUCCESS) return refused;
    Algorithm algorithm = {};
    algorithm.magic = MAGIC;
    algorithm.workspace = preference->most_workspace >= WORKSPACE ? WORKSPACE : 0;
    memcpy(algorithm.alignments, preference->alignments, sizeof algorithm.alignments);
    algorithm.reductions = preference->reductions;
    algorithm.factors = a->type, algorithm.result = d->type;
    memcpy(algorithm.transposed, operation->transposed, sizeof algorithm.transposed);
    *results = Found{algorithm, algorithm.workspace, SUCCESS, 1.0f, {}};
    *given = 1;
    count("heuristics", 1);
    return SUCCESS;
}

// All but the matrices is read at the call. C is read where it lies: it is the result, or nothing.
EXPORT Status cublasLtMatmul(Handle* handle, const Operation* operation, const void* alpha, const void* a, const Layout* a_layout,
                             const void* b, const Layout* b_layout, const void* beta, const void* c, const Layout* c_layout,
                             void* d, const Layout* d_layout, const Algorithm* algorithm, void* workspace,
                             size_t workspace_bytes, void* stream) {
    static auto queue = driver<FakeQueue>("fake_queue");
    static auto holds = driver<FakeHolds>("fake_holds");
    static auto fails = driver<FakeFails>("fake_fails");
    if (!handle || !is_bound()) return NOT_INITIALIZED;
    if (!operation || !alpha || !beta || !a_layout || !b_layout || !c_layout || !d_layout) return INVALID_VALUE;
    if (!algorithm || algorithm->magic != MAGIC) fake::misuse("a product by an algorithm that nobody gave");
    float scale = *(const float*)alpha, keep = *(const float*)beta;
    bool is_same = c == d && *c_layout == *d_layout;
    if (keep != 0.0f && !is_same) fake::misuse("a product is added to another matrix than its result");
    bool is_its_own = algorithm->factors == a_layout->type && algorithm->result == d_layout->type &&
                      !memcmp(algorithm->transposed, operation->transposed, sizeof operation->transposed);
    if (!is_its_own) return INVALID_VALUE;
    if (Status refused = check(*operation, *a_layout, *b_layout, *c_layout, *d_layout); refused != SUCCESS) return refused;
    Matrix left = a_layout->of(a, operation->transposed[0]), right = b_layout->of(b, operation->transposed[1]);
    Matrix before = c_layout->of(c, false), to = d_layout->of(d, false);
    int inner = left.is_transposed ? left.rows : left.cols;
    // C that is not read may be nowhere.
    const Matrix* all[] = {&left, &right, c ? &before : &to, &to};
    size_t needed = algorithm->workspace;
    if (needed && workspace_bytes < needed) return INVALID_VALUE;
    if (needed && !holds(workspace, workspace_bytes)) fake::misuse("a product's workspace goes beyond memory of the device");
    for (int i = 0; i < 4; i++) {
        const Matrix& of = *all[i];
        if (!of.span()) continue;
        if (!holds(of.data, of.span())) fake::misuse("a product goes beyond memory of the device");
        bool is_aligned = (uintptr_t)of.data % algorithm->alignments[i] == 0;
        if (!is_aligned && (i != 2 || c)) fake::misuse("a matrix is less aligned than its product's algorithm was promised");
        bool is_covered = needed && meet(workspace, needed, of.data, of.span());
        if (is_covered) fake::misuse("a product's workspace lies over its matrices");
    }
    if (fails("product", "")) return EXECUTION_FAILED;
    bool is_rounded = to.type == R_16BF && algorithm->reductions & (IN_PLACE | IN_RESULTS_TYPE);
    if (is_rounded) count("products that may sum in less than f32", 1);
    if (needed && is_shared(workspace, needed, stream)) count("workspaces of several streams", 1);
    count("products", 1);
    std::function<void()> work = [=] {
        if (needed) memset(workspace, 0xff, needed);
        multiply(left, right, to, inner, scale, keep, false);
    };
    return queue(stream, "a product", &work) ? EXECUTION_FAILED : SUCCESS;
}
