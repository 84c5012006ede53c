// NVRTC without NVIDIA, for tests: libnvrtc.so.
//
// What it makes of a source is a line with the name of a library of the host. FAKE_CUDA_KERNELS is the folder in which the
// simulated device's kernels are kept: of the same sources they are the same. Other sources are compiled.

#include "fake_cuda.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

namespace {

enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

const std::set<int> ARCHITECTURES = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Program {
    std::string text, name, log, ptx, cubin;
};

bool read(const std::string& path, std::string& text) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return false;
    std::stringstream all;
    all << file.rdbuf();
    text = all.str();
    return true;
}

std::vector<std::string> files(const std::string& folder) {
    std::vector<std::string> found;
    DIR* open = opendir(folder.c_str());
    if (!open) return found;
    while (dirent* entry = readdir(open)) found.push_back(entry->d_name);
    closedir(open);
    std::sort(found.begin(), found.end());
    return found;
}

bool ends(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

struct Options {
    std::string include;
    int architecture = 0;
    bool is_real = false, has_standard = false, is_unfused = false, is_all_device = false;
};

bool take(const std::string& option, const std::string& name, std::string& value) {
    if (option.compare(0, name.size(), name) != 0) return false;
    value = option.substr(name.size());
    return true;
}

// What the option lacks; nothing if it is well formed.
std::string parse(const std::string& option, Options& options) {
    std::string value;
    struct stat about;
    if (take(option, "--gpu-architecture=", value)) {
        options.is_real = take(value, "sm_", value);
        if (!options.is_real && !take(value, "compute_", value)) return "invalid value";
        bool is_number = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
        options.architecture = is_number ? atoi(value.c_str()) : 0;
        return ARCHITECTURES.count(options.architecture) ? "" : "invalid value";
    }
    if (take(option, "--include-path=", options.include)) {
        bool is_folder = !stat(options.include.c_str(), &about) && S_ISDIR(about.st_mode);
        return is_folder ? "" : "no such folder";
    }
    if (take(option, "--std=", value)) {
        options.has_standard = value == "c++17";
        return options.has_standard ? "" : "invalid value";
    }
    if (option == "--device-as-default-execution-space") {
        options.is_all_device = true;
        return "";
    }
    if (take(option, "--fmad=", value)) {
        options.is_unfused = value == "false";
        return value == "true" || options.is_unfused ? "" : "invalid value";
    }
    return "unrecognized option";
}

// The simulated device's library of the same sources.
std::string find_kept(const Program& program, const std::string& include) {
    std::string cache = fake::setting("KERNELS", "");
    std::string module = program.name.substr(0, program.name.rfind('.'));
    for (const std::string& folder : files(cache)) {
        std::string place = cache + "/" + folder, library = place + "/" + module + ".so", text;
        if (access(library.c_str(), R_OK) || !read(place + "/" + program.name, text) || text != program.text) continue;
        bool is_same = true;
        for (const std::string& header : files(include)) {
            std::string own, other;
            if (!ends(header, ".h") && !ends(header, ".cuh")) continue;
            is_same &= read(include + "/" + header, own) && read(place + "/" + header, other) && own == other;
        }
        if (is_same) return library;
    }
    return "";
}

// A library made by the compiler of the host, which stays in the temporary folder. Without one there is a log.
std::string make(Program& program, const std::string& include) {
    char folder[] = "/tmp/fake-nvrtc-XXXXXX";
    const char* scratch = getenv("TMPDIR");
    std::string place = scratch ? std::string(scratch) + "/fake-nvrtc-XXXXXX" : folder;
    if (!mkdtemp(place.data())) fake::misuse("no temporary folder");
    std::string source = place + "/" + program.name, library = place + "/kernels.so", log = place + "/log";
    std::ofstream(source) << program.text;
    std::string options = " -std=c++17 -O1 -fPIC -shared -ffp-contract=off -w -x c++ -I'" + include + "' ";
    std::string command = "c++" + options + "'" + source + "' -o '" + library + "' 2>'" + log + "'";
    bool is_made = system(command.c_str()) == 0;
    if (!is_made && (!read(log, program.log) || program.log.empty())) program.log = "the compiler does not run";
    return is_made ? library : "";
}

Result copy(const std::string& from, char* to) {
    if (from.empty()) return INVALID_PROGRAM;
    memcpy(to, from.c_str(), from.size() + 1);
    return SUCCESS;
}

}  // namespace

EXPORT Result nvrtcVersion(int* major, int* minor) {
    *major = fake::libraries_version() / 1000;
    *minor = fake::libraries_version() % 1000 / 10;
    return SUCCESS;
}

EXPORT Result nvrtcCreateProgram(Program** program, const char* text, const char* name, int headers, const char**, const char**) {
    if (!text || headers) return INVALID_INPUT;
    *program = new Program{text, name ? name : "default_program", "", "", ""};
    return SUCCESS;
}

EXPORT Result nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

EXPORT Result nvrtcCompileProgram(Program* program, int count, const char** given) {
    Options options;
    for (int i = 0; i < count; i++) {
        std::string wrong = parse(given[i], options);
        if (wrong.empty()) continue;
        program->log = std::string("nvrtc: error: ") + wrong + " for " + given[i] + "\n";
        return INVALID_OPTION;
    }
    // NVRTC's defaults are others, with which kernels are not those that are tested.
    bool says_all = options.is_unfused && options.has_standard && options.is_all_device && options.architecture;
    if (!says_all) fake::misuse("kernels by NVRTC's defaults");
    std::string library = find_kept(*program, options.include);
    if (library.empty()) library = make(*program, options.include);
    if (library.empty()) return COMPILATION;
    std::string rest = " of sm_" + std::to_string(options.architecture) + " by " +
                       std::to_string(fake::libraries_version()) + " in " + library + "\n";
    program->ptx = "fake ptx" + rest;
    if (options.is_real) program->cubin = "fake cubin" + rest;
    return SUCCESS;
}

EXPORT Result nvrtcGetProgramLogSize(Program* program, size_t* size) {
    *size = program->log.size() + 1;
    return SUCCESS;
}

EXPORT Result nvrtcGetProgramLog(Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

EXPORT Result nvrtcGetPTXSize(Program* program, size_t* size) {
    *size = program->ptx.size() + 1;
    return program->ptx.empty() ? INVALID_PROGRAM : SUCCESS;
}

EXPORT Result nvrtcGetPTX(Program* program, char* to) { return copy(program->ptx, to); }

// No zero ends it.
EXPORT Result nvrtcGetCUBINSize(Program* program, size_t* size) {
    *size = program->cubin.size();
    return SUCCESS;
}

EXPORT Result nvrtcGetCUBIN(Program* program, char* to) {
    if (program->cubin.empty()) return INVALID_PROGRAM;
    memcpy(to, program->cubin.data(), program->cubin.size());
    return SUCCESS;
}
