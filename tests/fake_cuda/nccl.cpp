// What carries memory of devices between ranks without a device: libnccl.so.2.
//
// A message is a file, so that ranks may be threads or processes of a machine. Nothing is sent before the stream comes to it,
// nothing has come before its sender's stream did, and streams wait meanwhile. A thread has streams work by themselves.

#include "fake_cuda.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

typedef int Code;
enum : Code { SUCCESS = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };

struct Id {
    char bytes[128];
};

struct Settings {
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct Communicator {
    std::string folder;
    int rank, size;
    bool has_joined = false, is_finalized = false;
    // Looks after which what was begun last is under way.
    int looks = 0;
    Code failed = SUCCESS;
    // Shared with what is queued, which may outlive it.
    std::shared_ptr<bool> is_aborted = std::make_shared<bool>(false);
    // Messages to each peer and from it.
    std::vector<uint64_t> sent, received;
};

struct Message {
    Communicator* communicator;
    void* stream;
    bool is_sent;
    char* address;
    size_t bytes;
    int peer;
};

std::recursive_mutex mutex;
typedef std::lock_guard<std::recursive_mutex> Guard;
std::set<Communicator*> communicators;
thread_local int groups = 0;
thread_local std::vector<Message> group;
thread_local std::vector<Communicator*> ended;

template <class F>
F driver(const char* name) {
    void* found = dlsym(RTLD_DEFAULT, name);
    if (!found) {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        found = library ? dlsym(library, name) : nullptr;
    }
    if (!found) fake::misuse("NCCL without the driver");
    return (F)found;
}

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

void write_whole(const std::string& path, const char* bytes, size_t length) {
    std::string draft = path + ".draft";
    FILE* file = fopen(draft.c_str(), "wb");
    if (!file || fwrite(bytes, 1, length, file) != length || fclose(file)) fake::misuse("a message cannot be written");
    if (rename(draft.c_str(), path.c_str())) fake::misuse("a message cannot be sent");
}

std::string read_whole(const std::string& path) {
    FILE* file = fopen(path.c_str(), "rb");
    if (!file) fake::misuse("a message cannot be read");
    std::string all;
    char part[65536];
    for (size_t read; (read = fread(part, 1, sizeof part, file)) > 0;) all.append(part, read);
    fclose(file);
    return all;
}

std::string route(const Communicator& of, int from, int to, uint64_t number) {
    return of.folder + "/" + std::to_string(from) + "_" + std::to_string(to) + "_" + std::to_string(number);
}

std::string seat(const Communicator& of, int rank) { return of.folder + "/rank_" + std::to_string(rank); }

// Joined, not yet, or refused: NCCL takes one rank of a GPU.
Code joined(Communicator& of) {
    // Others may have left since.
    if (of.has_joined) return SUCCESS;
    std::set<std::string> devices;
    for (int rank = 0; rank < of.size; rank++) {
        if (!exists(seat(of, rank))) return IN_PROGRESS;
        if (!devices.insert(read_whole(seat(of, rank))).second) return INVALID_USAGE;
    }
    of.has_joined = true;
    return SUCCESS;
}

// Has streams work up to messages, of whichever context.
void work_on() {
    auto progress = driver<void (*)()>("fake_progress");
    for (;;) {
        usleep(1000);
        progress();
    }
}

bool is_known(Communicator* communicator) { return communicators.count(communicator) > 0; }

}  // namespace

EXPORT Code ncclGetVersion(int* version) {
    *version = (int)fake::number("NCCL", 22809);
    return SUCCESS;
}

EXPORT const char* ncclGetErrorString(Code code) {
    switch (code) {
        case SUCCESS: return "no error";
        case SYSTEM: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case REMOTE: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}

EXPORT const char* ncclGetLastError(Communicator* of) {
    Guard guard(mutex);
    return of && is_known(of) && of->failed == INVALID_USAGE ? "Duplicate GPU detected\n" : "";
}

EXPORT Code ncclGetUniqueId(Id* id) {
    Guard guard(mutex);
    memset(id, 0, sizeof *id);
    std::string base = exists("/dev/shm") ? "/dev/shm" : "/tmp";
    snprintf(id->bytes, sizeof id->bytes, "%s/fake-nccl-XXXXXX", base.c_str());
    return mkdtemp(id->bytes) ? SUCCESS : SYSTEM;
}

EXPORT Code ncclCommInitRankConfig(Communicator** made, int size, Id id, int rank, Settings* settings) {
    Guard guard(mutex);
    if (size < 1 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    if (settings->magic != 0xcafebeef || settings->size < 48 || settings->blocking != 0) return INVALID_ARGUMENT;
    if (!driver<FakeIsBound>("fake_is_bound")()) return INVALID_USAGE;
    if (driver<FakeFails>("fake_fails")("nccl", "init")) return SYSTEM;
    static std::once_flag working;
    std::call_once(working, [] { std::thread(work_on).detach(); });
    Communicator* joining = new Communicator;
    joining->folder = id.bytes, joining->rank = rank, joining->size = size;
    joining->sent.resize(size), joining->received.resize(size);
    communicators.insert(joining);
    std::string device = std::to_string(driver<int (*)()>("fake_device")());
    write_whole(seat(*joining, rank), device.data(), device.size());
    auto count = driver<FakeCount>("fake_count");
    count("left communicators", 1);
    count("communicators", 1);
    *made = joining;
    return IN_PROGRESS;
}

EXPORT Code ncclCommGetAsyncError(Communicator* of, Code* state) {
    Guard guard(mutex);
    if (!is_known(of)) fake::misuse("a communicator is asked that is not there");
    if (!of->failed && driver<FakeFails>("fake_fails")("nccl", "look")) of->failed = REMOTE;
    if (!of->failed && !of->is_finalized) {
        Code code = of->looks > 0 && of->looks-- > 1 ? IN_PROGRESS : joined(*of);
        if (code != SUCCESS && code != IN_PROGRESS) of->failed = code;
        *state = code;
    } else *state = of->failed;
    return SUCCESS;
}

static Code refuse_early(Communicator* of) {
    if (!is_known(of)) fake::misuse("a communicator is used that is not there");
    if (of->failed) return of->failed;
    if (of->is_finalized || of->looks > 0 || joined(*of) != SUCCESS) fake::misuse("a communicator is used that is not ready");
    return SUCCESS;
}

EXPORT Code ncclGroupStart() {
    groups++;
    return SUCCESS;
}

static Code add(Message message, int type) {
    Guard guard(mutex);
    Communicator* of = message.communicator;
    if (Code code = refuse_early(of)) return code;
    if (message.peer < 0 || message.peer >= of->size || message.peer == of->rank) return INVALID_ARGUMENT;
    if (type != 1) fake::misuse("messages of other types than bytes");
    if (!groups) fake::misuse("messages outside of a group");
    if (!driver<FakeHolds>("fake_holds")(message.address, message.bytes)) fake::misuse("a message beyond memory of the device");
    group.push_back(message);
    return SUCCESS;
}

EXPORT Code ncclSend(const void* address, size_t bytes, int type, int peer, Communicator* of, void* stream) {
    return add({of, stream, true, (char*)address, bytes, peer}, type);
}

EXPORT Code ncclRecv(void* address, size_t bytes, int type, int peer, Communicator* of, void* stream) {
    return add({of, stream, false, (char*)address, bytes, peer}, type);
}

static Code end_all();

// A group's messages: what is sent leaves when the stream comes to it, and the stream goes on when all has come.
EXPORT Code ncclGroupEnd() {
    if (--groups) return SUCCESS;
    if (!ended.empty()) return end_all();
    Guard guard(mutex);
    std::vector<Message> all;
    all.swap(group);
    if (all.empty()) return SUCCESS;
    Communicator* of = all[0].communicator;
    if (Code code = refuse_early(of)) return code;
    if (driver<FakeFails>("fake_fails")("nccl", "group")) return of->failed = SYSTEM;
    // A process that ends where others wait for it.
    if (driver<FakeFails>("fake_fails")("nccl", "die")) _exit(9);
    struct Part {
        std::string path;
        Message message;
        bool is_done;
    };
    auto parts = std::make_shared<std::vector<Part>>();
    driver<FakeCount>("fake_count")("groups by NCCL", 1);
    auto count = driver<FakeCount>("fake_count");
    for (Message& message : all) {
        if (message.communicator != of || message.stream != all[0].stream) fake::misuse("a group of several communicators");
        int from = message.is_sent ? of->rank : message.peer, to = message.is_sent ? message.peer : of->rank;
        uint64_t number = (message.is_sent ? of->sent : of->received)[message.peer]++;
        parts->push_back({route(*of, from, to, number), message, false});
        if (message.is_sent) count("bytes by NCCL", (long long)message.bytes);
    }
    // One that is told to leave this rank's messages out stands for a rank that is stopped.
    bool is_stopped = driver<FakeFails>("fake_fails")("nccl", "stop");
    auto is_aborted = of->is_aborted;
    std::function<bool()> attempt = [=] {
        if (*is_aborted) return true;
        if (is_stopped) return false;
        bool is_done = true;
        for (Part& part : *parts) {
            if (part.is_done) continue;
            if (part.message.is_sent) {
                write_whole(part.path, part.message.address, part.message.bytes);
            } else {
                if (!exists(part.path)) {
                    is_done = false;
                    continue;
                }
                std::string came = read_whole(part.path);
                if (came.size() != part.message.bytes) fake::misuse("a message of another length than is received");
                memcpy(part.message.address, came.data(), came.size());
                unlink(part.path.c_str());
            }
            part.is_done = true;
        }
        return is_done;
    };
    typedef int (*Queue)(void*, const char*, const std::function<bool()>*);
    if (driver<Queue>("fake_queue_until")(all[0].stream, "messages by NCCL", &attempt)) return SYSTEM;
    of->looks = 2;
    return IN_PROGRESS;
}

EXPORT Code ncclCommFinalize(Communicator* of) {
    Guard guard(mutex);
    if (Code code = refuse_early(of)) return code;
    of->is_finalized = true;
    return IN_PROGRESS;
}

static void leave(Communicator* of) {
    unlink(seat(*of, of->rank).c_str());
    bool is_last = true;
    for (int rank = 0; rank < of->size; rank++) is_last &= !exists(seat(*of, rank));
    // With what has been sent and nobody has received.
    DIR* folder = is_last ? opendir(of->folder.c_str()) : nullptr;
    while (dirent* entry = folder ? readdir(folder) : nullptr) unlink((of->folder + "/" + entry->d_name).c_str());
    if (folder) closedir(folder);
    rmdir(of->folder.c_str());
    communicators.erase(of);
    driver<FakeCount>("fake_count")("left communicators", -1);
    delete of;
}

static void destroy(Communicator* of) {
    Guard guard(mutex);
    if (!is_known(of) || !of->is_finalized) fake::misuse("a communicator is destroyed that is not finalized");
    DIR* folder = opendir(of->folder.c_str());
    std::string to = "_" + std::to_string(of->rank) + "_";
    while (dirent* entry = folder ? readdir(folder) : nullptr) {
        std::string name = entry->d_name;
        size_t at = name.find('_');
        bool is_message = name.compare(0, 4, "rank") && at != std::string::npos;
        if (is_message && name.compare(at, to.size(), to) == 0) fake::misuse("a communicator is left with messages");
    }
    if (folder) closedir(folder);
    leave(of);
}

EXPORT Code ncclCommDestroy(Communicator* of) {
    destroy(of);
    // So long that whoever looks at communicators comes by meanwhile.
    usleep(70000);
    return SUCCESS;
}

// Ends communicators. As NCCL does, it waits for what their streams do before them: what waits for another communicator, which
// is not ended with these, keeps it for ever.
static Code end_all() {
    std::vector<Communicator*> all;
    all.swap(ended);
    {
        Guard guard(mutex);
        for (Communicator* of : all) *of->is_aborted = true;
        // What succeeds aborts none.
        driver<FakeCount>("fake_count")("left to be aborted", (long long)all.size());
    }
    if (!driver<FakeIsBound>("fake_is_bound")()) fake::misuse("a communicator is aborted without its device");
    driver<int (*)()>("cuCtxSynchronize")();
    Guard guard(mutex);
    for (Communicator* of : all) leave(of);
    return SUCCESS;
}

EXPORT Code ncclCommAbort(Communicator* of) {
    {
        Guard guard(mutex);
        if (!is_known(of)) fake::misuse("a communicator is aborted that is not there");
    }
    ended.push_back(of);
    return groups ? SUCCESS : end_all();
}
