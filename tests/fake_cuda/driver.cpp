// A driver without a device, for tests of what asks a driver: libcuda.so.1.
//
// It is as late as a device may be. What a stream is asked for is queued, and done when somebody waits for the stream, for
// an event, or for a stream that waits for it; pinned memory of the host is read and written then. So an order that nobody
// asked for is never there, and a wait that is missing gives wrong numbers each time. Kernels are those of `host.h`.
//
// What a driver would refuse is refused with its codes. What is undefined there ends the program (`misuse`).

#include "fake_cuda.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {

typedef int CUresult;
enum : CUresult {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    UNSUPPORTED_PTX_VERSION = 222,
    FILE_NOT_FOUND = 301,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
};

const std::map<CUresult, std::pair<const char*, const char*>> TEXTS = {
    {SUCCESS, {"CUDA_SUCCESS", "no error"}},
    {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {NO_DEVICE, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {NO_BINARY_FOR_GPU, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
    {UNSUPPORTED_PTX_VERSION,
     {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain"}},
    {FILE_NOT_FOUND, {"CUDA_ERROR_FILE_NOT_FOUND", "file not found"}},
    {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {NOT_READY, {"CUDA_ERROR_NOT_READY", "device not ready"}},
    {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {LAUNCH_OUT_OF_RESOURCES, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
    {CONTEXT_IS_DESTROYED, {"CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"}},
    {HOST_MEMORY_ALREADY_REGISTERED,
     {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"}},
    {HOST_MEMORY_NOT_REGISTERED,
     {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"}},
    {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
};

struct Stream;

struct Operation {
    std::string what;
    std::function<void()> work;
    // Waits for so many operations of another stream instead.
    std::shared_ptr<Stream> other;
    uint64_t up_to = 0;
    // Bytes of the host that it reads or writes when it runs.
    uintptr_t host = 0;
    size_t host_bytes = 0;
    // Done once this is true.
    std::function<bool()> attempt = nullptr;
};

struct Stream {
    struct Context* context;
    std::deque<Operation> queue;
    uint64_t asked = 0, done = 0;
};

struct Event {
    struct Context* context;
    std::shared_ptr<Stream> stream;
    uint64_t up_to = 0;
};

struct Module {
    struct Context* context;
    void* library;
    std::string path;
};

struct Function {
    Module* module;
    std::string name;
    void (*entry)(void**, uint32_t, uint32_t);
    std::vector<uint32_t> sizes;
};

// The primary context of a device.
struct Context {
    int device = 0, retained = 0;
    // What all calls return from then on.
    CUresult lost = SUCCESS;
    std::shared_ptr<Stream> null_stream;
    std::map<Stream*, std::shared_ptr<Stream>> streams;
    std::set<Event*> events;
    std::set<Module*> modules;
    // By address, bytes.
    std::map<uintptr_t, size_t> memory, pinned;
    // Pinned memory that the driver gave, by address, bytes.
    std::map<uintptr_t, size_t> staging;
    size_t held = 0;
};

constexpr int DEVICES_MOST = 8;
// Where addresses come from; each is given out once.
constexpr size_t ARENA = (size_t)1 << 40;
constexpr size_t PAGE = 4096;

std::recursive_mutex mutex;
Context contexts[DEVICES_MOST];
bool is_initialized = false;
thread_local Context* current = nullptr;
std::map<std::string, std::unique_ptr<Function>> functions;
std::map<std::string, long long> counts;
std::map<std::string, long long> asked;
uintptr_t arena = 0, arena_next = 0;
const char* running = "nothing";

typedef std::lock_guard<std::recursive_mutex> Guard;

int device_count() { return (int)std::min<long long>(fake::number("DEVICES", 1), DEVICES_MOST); }
int driver_version() { return (int)fake::number("DRIVER", 13000); }
size_t memory_size() { return (size_t)fake::number("MEMORY", 1 << 30); }
// What other programs leave of it.
size_t room() { return (size_t)fake::number("ROOM", (long long)memory_size()); }

// Of it, what others leave once the program has asked for how much there is.
size_t left() { return (size_t)fake::number("LEFT", (long long)room()); }

// FAKE_CUDA_CAPABILITY has that of every device, with commas between them; the last is also that of those after it.
void capability(int device, int& major, int& minor) {
    std::string set = fake::setting("CAPABILITY", "9.0");
    for (size_t comma; device > 0 && (comma = set.find(',')) != std::string::npos; device--) set = set.substr(comma + 1);
    if (sscanf(set.c_str(), "%d.%d", &major, &minor) != 2) fake::misuse("FAKE_CUDA_CAPABILITY is " + set);
}

// --- what is to fail -------------------------------------------------------------------------------------------------

// FAKE_CUDA_FAIL has `kind:n` and `kind:name:n`, with commas between them: the n-th of its kind, or of its kind and name.
bool fails(const char* kind, const std::string& name) {
    std::string plan = fake::setting("FAIL", "");
    bool is_planned = false;
    std::string any = kind, named = any + ":" + name;
    long long of_kind = ++asked[any], of_name = ++asked[named + ":"];
    for (size_t at = 0; at < plan.size();) {
        size_t end = std::min(plan.find(',', at), plan.size());
        std::string entry = plan.substr(at, end - at);
        is_planned |= entry == any + ":" + std::to_string(of_kind) || entry == named + ":" + std::to_string(of_name);
        at = end + 1;
    }
    return is_planned;
}

// --- the report ------------------------------------------------------------------------------------------------------

void count(const std::string& name, long long by) { counts[name] += by; }

// FAKE_CUDA_REPORT names a file that has all counts, and what of contexts that are gone was never given back.
void report() {
    Guard guard(mutex);
    std::string path = fake::setting("REPORT", "");
    if (path.empty()) return;
    FILE* file = fopen(path.c_str(), "w");
    if (!file) return;
    fprintf(file, "{");
    const char* comma = "";
    long long contexts_left = 0;
    for (Context& context : contexts) contexts_left += context.retained;
    counts["left contexts"] = contexts_left;
    for (auto& [name, value] : counts) {
        fprintf(file, "%s\"%s\": %lld", comma, name.c_str(), value);
        comma = ", ";
    }
    fprintf(file, "}\n");
    fclose(file);
}

struct AtExit {
    ~AtExit() { report(); }
} at_exit;

// --- streams ---------------------------------------------------------------------------------------------------------

// Whether it could: what waits for another rank may not be there yet.
bool run_up_to(Stream& stream, uint64_t up_to) {
    while (stream.done < up_to) {
        Operation& next = stream.queue.front();
        bool is_lost = stream.context->lost;
        // Nothing runs on a device that is lost.
        if (!is_lost && next.other && !run_up_to(*next.other, next.up_to)) return false;
        if (!is_lost && next.attempt && !next.attempt()) return false;
        Operation operation = std::move(next);
        stream.queue.pop_front();
        stream.done++;
        if (is_lost || !operation.work) continue;
        const char* before = running;
        running = operation.what.c_str();
        operation.work();
        running = before;
    }
    return true;
}

bool run_all(Context& context) {
    bool is_done = true;
    auto all = context.streams;
    for (auto& [_, stream] : all) is_done &= run_up_to(*stream, stream->asked);
    return run_up_to(*context.null_stream, context.null_stream->asked) && is_done;
}

void queue(Stream& stream, Operation operation) {
    stream.queue.push_back(std::move(operation));
    stream.asked++;
}

std::shared_ptr<Stream> find_stream(void* handle) {
    if (!handle) return current->null_stream;
    auto found = current->streams.find((Stream*)handle);
    if (found == current->streams.end()) fake::misuse("a stream that is not one of the current context");
    return found->second;
}

// A context that can be asked for something.
CUresult usable() {
    if (!is_initialized) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    if (!current->retained) return CONTEXT_IS_DESTROYED;
    return current->lost;
}

#define BEGIN                                                \
    Guard guard(mutex);                                      \
    if (CUresult error = usable(); error != SUCCESS) return error

// Has the current context wait until `attempt` succeeds, while other threads go on.
template <class F>
CUresult await(F attempt) {
    for (;;) {
        {
            Guard guard(mutex);
            if (CUresult error = usable(); error != SUCCESS) return error;
            if (attempt()) return current->lost;
        }
        usleep(100);
    }
}

// --- memory ----------------------------------------------------------------------------------------------------------

size_t in_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Whether bytes are in one block of memory.
bool holds(const Context& context, const void* address, size_t bytes) {
    uintptr_t first = (uintptr_t)address;
    auto next = context.memory.upper_bound(first);
    if (next == context.memory.begin()) return false;
    auto [start, size] = *--next;
    return first + bytes <= start + size;
}

bool holds(const void* address, size_t bytes) { return current && holds(*current, address, bytes); }

enum Pinned { NOT, PARTLY, WHOLLY };

Pinned pinned(const void* address, size_t bytes) {
    uintptr_t first = (uintptr_t)address, end = first + bytes;
    for (auto& [start, size] : current->pinned) {
        if (start <= first && end <= start + size) return WHOLLY;
        if (first < start + size && start < end) return PARTLY;
    }
    return NOT;
}

void check_copy(uint64_t device, const void* host, size_t bytes, const char* what) {
    if (!bytes) fake::misuse(std::string(what) + " of nothing");
    if (!holds((void*)device, bytes)) fake::misuse(std::string(what) + " goes beyond memory of the device");
    if (holds(host, 1)) fake::misuse(std::string(what) + ": memory of the device for memory of the host");
}

void lose(Context& context, CUresult error) {
    if (!context.lost) context.lost = error;
}

void handle_fault(int, siginfo_t* info, void*) {
    uintptr_t at = (uintptr_t)info->si_addr;
    if (at >= arena && at < arena + ARENA) {
        char text[256];
        int length = snprintf(text, sizeof text, "fake CUDA: %s uses memory of the device that nobody has\n", running);
        if (write(2, text, (size_t)length)) {}
        _exit(fake::MISUSED);
    }
    signal(SIGSEGV, SIG_DFL);
}

}  // namespace

// --- for cuBLAS and NCCL ------------------------------------------------------------------------------------------------------

EXPORT int fake_queue(void* stream, const char* what, const std::function<void()>* work) {
    BEGIN;
    queue(*find_stream(stream), Operation{what, *work, nullptr, 0, 0, 0});
    return SUCCESS;
}
EXPORT int fake_queue_until(void* stream, const char* what, const std::function<bool()>* attempt) {
    BEGIN;
    queue(*find_stream(stream), Operation{what, nullptr, nullptr, 0, 0, 0, *attempt});
    return SUCCESS;
}
// Has streams work up to what waits for other ranks, as devices do by themselves.
EXPORT void fake_progress() {
    Guard guard(mutex);
    for (Context& context : contexts) {
        auto all = context.streams;
        for (auto& [_, stream] : all) {
            uint64_t up_to = stream->asked;
            auto last = stream->queue.rbegin();
            for (; last != stream->queue.rend() && !last->attempt; ++last) up_to--;
            if (last != stream->queue.rend()) run_up_to(*stream, up_to);
        }
    }
}
// The number that the machine gives the current context's device.
EXPORT int fake_device() {
    Guard guard(mutex);
    return current ? current->device + (int)fake::number("FIRST", 0) : -1;
}
EXPORT bool fake_holds(const void* address, size_t bytes) {
    Guard guard(mutex);
    return holds(address, bytes);
}
EXPORT bool fake_is_bound() {
    Guard guard(mutex);
    return usable() == SUCCESS;
}
EXPORT bool fake_fails(const char* kind, const char* name) {
    Guard guard(mutex);
    return fails(kind, name);
}
EXPORT void fake_count(const char* name, long long by) {
    Guard guard(mutex);
    count(name, by);
}

// --- the machine -----------------------------------------------------------------------------------------------------

EXPORT CUresult cuInit(unsigned flags) {
    Guard guard(mutex);
    if (flags) return INVALID_VALUE;
    if (device_count() == 0) return NO_DEVICE;
    if (!is_initialized) {
        void* reserved = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved == MAP_FAILED) fake::misuse("no addresses for memory of the device");
        arena = arena_next = (uintptr_t)reserved;
        struct sigaction action = {};
        action.sa_sigaction = handle_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, nullptr);
        is_initialized = true;
    }
    return SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
    *version = driver_version();
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
    if (!is_initialized) return NOT_INITIALIZED;
    ::count("looks for devices", 1);
    *count = device_count();
    return SUCCESS;
}

EXPORT CUresult cuDeviceGet(int* device, int ordinal) {
    if (!is_initialized) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= device_count()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    memset(uuid, 0, 16);
    // FAKE_CUDA_FIRST is the number that the machine gives the first one that this process sees.
    uuid[15] = (unsigned char)(device + fake::number("FIRST", 0));
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char* name, int length, int) {
    snprintf(name, (size_t)length, "Fake GPU");
    return SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = memory_size();
    return SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
    int major, minor;
    capability(device, major, minor);
    switch (attribute) {
        case 16: *value = 1; return SUCCESS;  // multiprocessors
        case 75: *value = major; return SUCCESS;
        case 76: *value = minor; return SUCCESS;
        case 115: *value = 1; return SUCCESS;  // memory pools
        default: fake::misuse("attribute " + std::to_string(attribute) + ", of which nobody has said what it is");
    }
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
    auto found = TEXTS.find(error);
    if (found == TEXTS.end()) return INVALID_VALUE;
    *text = found->second.second;
    return SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
    auto found = TEXTS.find(error);
    if (found == TEXTS.end()) return INVALID_VALUE;
    *text = found->second.first;
    return SUCCESS;
}

// --- contexts --------------------------------------------------------------------------------------------------------

EXPORT CUresult cuDevicePrimaryCtxRetain(Context** context, int device) {
    Guard guard(mutex);
    if (!is_initialized) return NOT_INITIALIZED;
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    if (fails("context", "")) return OUT_OF_MEMORY;
    Context& found = contexts[device];
    if (!found.retained) {
        found.device = device;
        found.null_stream = std::make_shared<Stream>();
        found.null_stream->context = &found;
    }
    found.retained++;
    *context = &found;
    return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    Guard guard(mutex);
    Context& context = contexts[device];
    if (!context.retained) fake::misuse("a context that nobody retains is released");
    if (--context.retained) return SUCCESS;
    // Of a device that is lost nothing can be given back.
    if (!context.lost) {
        count("left memory", (long long)context.memory.size());
        count("left pinned", (long long)context.pinned.size());
        count("left staging", (long long)context.staging.size());
        count("left streams", (long long)context.streams.size());
        count("left events", (long long)context.events.size());
        count("left modules", (long long)context.modules.size());
    }
    context.memory.clear(), context.pinned.clear(), context.streams.clear(), context.events.clear();
    context.modules.clear(), context.null_stream.reset();
    context.held = 0;
    context.lost = SUCCESS;
    report();
    return SUCCESS;
}

EXPORT CUresult cuCtxEnablePeerAccess(Context* peer, unsigned flags) {
    BEGIN;
    if (flags || !peer || peer == current || !peer->retained) return INVALID_VALUE;
    count("devices that reach another", 1);
    return SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(Context** context) {
    if (!is_initialized) return NOT_INITIALIZED;
    *context = current;
    return SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(Context* context) {
    Guard guard(mutex);
    if (!is_initialized) return NOT_INITIALIZED;
    if (context && !context->retained) return CONTEXT_IS_DESTROYED;
    current = context;
    return SUCCESS;
}

EXPORT CUresult cuCtxSynchronize() {
    return await([] { return run_all(*current); });
}

// --- kernels ---------------------------------------------------------------------------------------------------------

// What the compiler makes is a line: its form, its architecture, its version and a library of the host.
static CUresult load(Module** module, const std::string& image) {
    char form[16], path[4096];
    int architecture, version, major, minor;
    const char* line = "fake %15s of sm_%d by %d in %4095[^\n]";
    if (sscanf(image.c_str(), line, form, &architecture, &version, path) != 4) return INVALID_IMAGE;
    capability(current->device, major, minor);
    if (!strcmp(form, "ptx")) {
        if (version > driver_version()) return UNSUPPORTED_PTX_VERSION;
        if (architecture > major * 10 + minor) return NO_BINARY_FOR_GPU;
    } else {
        if (version / 1000 > driver_version() / 1000) return INVALID_IMAGE;
        if (architecture / 10 != major || architecture % 10 > minor) return NO_BINARY_FOR_GPU;
    }
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return INVALID_IMAGE;
    *module = new Module{current, library, path};
    current->modules.insert(*module);
    count("modules", 1);
    return SUCCESS;
}

EXPORT CUresult cuModuleLoadData(Module** module, const void* image) {
    BEGIN;
    return load(module, (const char*)image);
}

EXPORT CUresult cuModuleLoad(Module** module, const char* path) {
    BEGIN;
    FILE* file = fopen(path, "rb");
    if (!file) return FILE_NOT_FOUND;
    char image[8192] = {};
    size_t read = fread(image, 1, sizeof image - 1, file);
    fclose(file);
    return read ? load(module, image) : INVALID_IMAGE;
}

EXPORT CUresult cuModuleUnload(Module* module) {
    if (CUresult error = await([] { return run_all(*current); }); error != SUCCESS) return error;
    BEGIN;
    if (!current->modules.erase(module)) fake::misuse("a module is unloaded that is not there");
    for (auto at = functions.begin(); at != functions.end();) at = at->second->module == module ? functions.erase(at) : ++at;
    dlclose(module->library);
    delete module;
    return current->lost;
}

EXPORT CUresult cuModuleGetFunction(Function** function, Module* module, const char* name) {
    BEGIN;
    if (!current->modules.count(module)) return INVALID_HANDLE;
    auto entry = (void (*)(void**, uint32_t, uint32_t))dlsym(module->library, (std::string("simulated_") + name).c_str());
    auto sizes = (uint32_t(*)(uint32_t*))dlsym(module->library, (std::string("parameters_of_") + name).c_str());
    if (!entry || !sizes) return NOT_FOUND;
    uint32_t bytes[64];
    uint32_t parameters = sizes(bytes);
    auto& found = functions[std::to_string((uintptr_t)module) + name];
    if (!found) found.reset(new Function{module, name, entry, {bytes, bytes + parameters}});
    *function = found.get();
    return SUCCESS;
}

// Parameters, kept until the kernel runs.
struct Parameters {
    std::vector<std::unique_ptr<uint64_t[]>> held;
    std::vector<void*> pointers;
};

static bool is_known(Function* function) {
    for (auto& [_, known] : functions) {
        if (known.get() == function) return true;
    }
    return false;
}

EXPORT CUresult cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
    BEGIN;
    if (!is_known(function)) return INVALID_HANDLE;
    if (function->module->context != current) return INVALID_CONTEXT;
    if (!gx || !gy || !gz || gx > 0x7fffffff || gy > 65535 || gz > 65535) return INVALID_VALUE;
    if (!bx || !by || !bz || (uint64_t)bx * by * bz > 1024 || bz > 64 || shared > 48 << 10) return INVALID_VALUE;
    if (extra || (!parameters && !function->sizes.empty())) return INVALID_VALUE;
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || bx % 32) fake::misuse("a kernel that host.h does not run");
    if (fails("launch", function->name)) return LAUNCH_OUT_OF_RESOURCES;
    auto kept = std::make_shared<Parameters>();
    for (size_t i = 0; i < function->sizes.size(); i++) {
        size_t bytes = function->sizes[i];
        kept->held.emplace_back(new uint64_t[bytes / 8 + 1]);
        memcpy(kept->held.back().get(), parameters[i], bytes);
        kept->pointers.push_back(kept->held.back().get());
    }
    count("launches", 1);
    count("launches of " + function->name, 1);
    auto entry = function->entry;
    bool is_to_fail = fails("kernel", function->name);
    Context* context = current;
    auto work = [=] {
        if (is_to_fail) lose(*context, ILLEGAL_ADDRESS);
        else entry(kept->pointers.data(), gx, bx);
    };
    queue(*find_stream(stream), Operation{"kernel " + function->name, work, nullptr, 0, 0, 0});
    return SUCCESS;
}

// --- memory ----------------------------------------------------------------------------------------------------------

EXPORT CUresult cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    BEGIN;
    if (!bytes) return INVALID_VALUE;
    size_t pages = in_pages(bytes);
    if (current->held + pages > left() || fails("alloc", "")) return OUT_OF_MEMORY;
    // A page that nobody has lies on either side; the end is as near to it as alignment allows.
    uintptr_t first = arena_next + PAGE;
    arena_next = first + pages;
    if (arena_next + PAGE > arena + ARENA) fake::misuse("no addresses are left");
    if (mprotect((void*)first, pages, PROT_READ | PROT_WRITE)) fake::misuse("the host has no memory");
    memset((void*)first, 0xff, pages);
    uintptr_t given = first + (pages - bytes) / 256 * 256;
    current->memory[given] = bytes;
    current->held += pages;
    count("allocations", 1);
    counts["most memory"] = std::max<long long>(counts["most memory"], (long long)current->held);
    *address = given;
    return SUCCESS;
}

EXPORT CUresult cuMemFree_v2(uint64_t address) {
    if (!address) return SUCCESS;
    // As a driver does, before memory goes.
    if (CUresult error = await([] { return run_all(*current); }); error != SUCCESS) return error;
    BEGIN;
    auto found = current->memory.find(address);
    if (found == current->memory.end()) fake::misuse("memory of the device is freed that is not there");
    size_t pages = in_pages(found->second);
    void* first = (void*)(address / PAGE * PAGE);
    madvise(first, pages, MADV_DONTNEED);
    mprotect(first, pages, PROT_NONE);
    current->held -= pages;
    current->memory.erase(found);
    return current->lost;
}

EXPORT CUresult cuMemGetInfo_v2(size_t* available, size_t* total) {
    BEGIN;
    *total = memory_size();
    *available = room() - current->held;
    return SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
    BEGIN;
    if (!address || !bytes || flags & ~15u) return INVALID_VALUE;
    // By bytes: what shares a page may be registered.
    if (pinned(address, bytes) != NOT) return HOST_MEMORY_ALREADY_REGISTERED;
    if (fails("pin", "")) return OUT_OF_MEMORY;
    // Of every context, or of this one only.
    if (!(flags & 1)) fake::misuse("memory is pinned for one context");
    current->pinned[(uintptr_t)address] = bytes;
    count("pins", 1);
    return SUCCESS;
}

// Nothing that is asked for may still need these bytes of the host.
static void check_unused(uintptr_t first, size_t bytes, const char* what) {
    for (auto& [_, stream] : current->streams) {
        for (Operation& operation : stream->queue) {
            bool is_used = operation.host < first + bytes && first < operation.host + operation.host_bytes;
            if (is_used) fake::misuse(std::string("memory is ") + what + " that " + operation.what + " needs");
        }
    }
}

EXPORT CUresult cuMemHostUnregister(void* address) {
    BEGIN;
    auto found = current->pinned.find((uintptr_t)address);
    if (found == current->pinned.end()) return HOST_MEMORY_NOT_REGISTERED;
    check_unused(found->first, found->second, "unpinned");
    current->pinned.erase(found);
    return SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    BEGIN;
    if (!address || !bytes || flags & ~7u) return INVALID_VALUE;
    if (fails("stage", "")) return OUT_OF_MEMORY;
    *address = mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED) fake::misuse("the host has no memory");
    memset(*address, 0xff, bytes);
    current->staging[(uintptr_t)*address] = bytes;
    return SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void* address) {
    BEGIN;
    auto found = current->staging.find((uintptr_t)address);
    if (found == current->staging.end()) return INVALID_VALUE;
    check_unused(found->first, found->second, "freed");
    munmap(address, in_pages(found->second));
    current->staging.erase(found);
    return SUCCESS;
}

// Whether bytes lie in memory that the driver gave.
static bool is_staging(const void* address, size_t bytes) {
    uintptr_t first = (uintptr_t)address;
    auto next = current->staging.upper_bound(first);
    if (next == current->staging.begin()) return false;
    auto [start, size] = *--next;
    return first + bytes <= start + size;
}

// What fails while it runs takes the device along.
static std::function<void()> copying(const char* kind, std::function<void()> copy) {
    Context* context = current;
    bool is_to_fail = fails(kind, "");
    return [=] { is_to_fail ? lose(*context, LAUNCH_FAILED) : copy(); };
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    BEGIN;
    check_copy(to, from, bytes, "a copy to the device");
    Pinned kind = pinned(from, bytes);
    if (kind == PARTLY) return INVALID_VALUE;
    count(kind == WHOLLY ? "bytes from pinned memory" : "bytes to the device", (long long)bytes);
    auto into = find_stream(stream);
    if (is_staging(from, bytes)) {
        auto work = copying("upload", [=] { memcpy((void*)to, from, bytes); });
        queue(*into, Operation{"a copy to the device", work, nullptr, 0, (uintptr_t)from, bytes});
    } else if (kind == WHOLLY) {
        auto work = copying("fetch", [=] { memcpy((void*)to, from, bytes); });
        queue(*into, Operation{"a copy from pinned memory", work, nullptr, 0, (uintptr_t)from, bytes});
    } else {
        auto staged = std::make_shared<std::string>((const char*)from, bytes);
        auto work = copying("upload", [=] { memcpy((void*)to, staged->data(), bytes); });
        queue(*into, Operation{"a copy to the device", work, nullptr, 0, 0, 0});
    }
    return SUCCESS;
}

static CUresult begin_copy_to_host(void* to, uint64_t from, size_t bytes, void* stream, bool& is_over) {
    BEGIN;
    check_copy(from, to, bytes, "a copy to the host");
    Pinned kind = pinned(to, bytes);
    if (kind == PARTLY) return INVALID_VALUE;
    count(kind == WHOLLY ? "bytes to pinned memory" : "bytes to the host", (long long)bytes);
    auto into = find_stream(stream);
    auto work = copying(kind == WHOLLY ? "keep" : "download", [=] { memcpy(to, (void*)from, bytes); });
    queue(*into, Operation{"a copy to the host", work, nullptr, 0, kind == WHOLLY ? (uintptr_t)to : 0, kind == WHOLLY ? bytes : 0});
    is_over = kind != NOT;
    return current->lost;
}

// Memory that is not pinned has been written when the call returns.
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    bool is_over = true;
    CUresult begun = begin_copy_to_host(to, from, bytes, stream, is_over);
    if (begun != SUCCESS || is_over) return begun;
    return await([=] {
        auto into = find_stream(stream);
        return run_up_to(*into, into->asked);
    });
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    BEGIN;
    if (!holds((void*)to, bytes) || !holds((void*)from, bytes)) fake::misuse("a copy on the device goes beyond its memory");
    count("bytes within devices", (long long)bytes);
    auto work = copying("copy", [=] { memmove((void*)to, (void*)from, bytes); });
    queue(*find_stream(stream), Operation{"a copy on the device", work, nullptr, 0, 0, 0});
    return SUCCESS;
}

EXPORT CUresult cuMemcpyPeerAsync(uint64_t to, Context* own, uint64_t from, Context* peer, size_t bytes, void* stream) {
    BEGIN;
    if (own != current || !peer->retained) return INVALID_CONTEXT;
    bool is_within = holds(*own, (void*)to, bytes) && holds(*peer, (void*)from, bytes);
    if (!is_within) fake::misuse("a copy from another device goes beyond memory");
    count("bytes from other devices", (long long)bytes);
    auto work = copying("copy", [=] { memmove((void*)to, (void*)from, bytes); });
    queue(*find_stream(stream), Operation{"a copy from another device", work, nullptr, 0, 0, 0});
    return SUCCESS;
}

EXPORT CUresult cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
    BEGIN;
    if (!holds((void*)to, bytes)) fake::misuse("memory is set beyond what there is");
    queue(*find_stream(stream), Operation{"a memset", [=] { memset((void*)to, value, bytes); }, nullptr, 0, 0, 0});
    return SUCCESS;
}

// --- order -----------------------------------------------------------------------------------------------------------

EXPORT CUresult cuStreamCreate(Stream** stream, unsigned) {
    BEGIN;
    auto made = std::make_shared<Stream>();
    made->context = current;
    current->streams[made.get()] = made;
    *stream = made.get();
    return SUCCESS;
}

EXPORT CUresult cuStreamDestroy_v2(Stream* stream) {
    CUresult done = await([=] {
        auto found = find_stream(stream);
        return run_up_to(*found, found->asked);
    });
    BEGIN;
    current->streams.erase(stream);
    return done;
}

EXPORT CUresult cuStreamSynchronize(void* stream) {
    fake_count("waits of the host", 1);
    return await([=] {
        auto found = find_stream(stream);
        return run_up_to(*found, found->asked);
    });
}

// A stream may wait for another context's event.
EXPORT CUresult cuStreamWaitEvent(void* stream, Event* event, unsigned) {
    BEGIN;
    bool is_there = false;
    for (Context& context : contexts) is_there |= context.events.count(event) > 0;
    if (!is_there) return INVALID_HANDLE;
    if (event->stream) queue(*find_stream(stream), Operation{"an event", nullptr, event->stream, event->up_to, 0, 0});
    return SUCCESS;
}

EXPORT CUresult cuEventCreate(Event** event, unsigned) {
    BEGIN;
    *event = new Event{current, nullptr, 0};
    current->events.insert(*event);
    return SUCCESS;
}

EXPORT CUresult cuEventRecord(Event* event, void* stream) {
    BEGIN;
    if (!current->events.count(event)) return INVALID_HANDLE;
    event->stream = find_stream(stream);
    event->up_to = event->stream->asked;
    return SUCCESS;
}

EXPORT CUresult cuEventSynchronize(Event* event) {
    {
        BEGIN;
        if (!current->events.count(event)) return INVALID_HANDLE;
    }
    return await([=] { return !event->stream || run_up_to(*event->stream, event->up_to); });
}

EXPORT CUresult cuEventQuery(Event* event) {
    BEGIN;
    if (!current->events.count(event)) return INVALID_HANDLE;
    return event->stream && event->stream->done < event->up_to ? NOT_READY : SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(Event* event) {
    BEGIN;
    if (!current->events.erase(event)) fake::misuse("an event is destroyed that is not there");
    delete event;
    return SUCCESS;
}
