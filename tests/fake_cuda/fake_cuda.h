// What the libraries that stand for NVIDIA's share: codes of errors, settings, and the driver's queue.
//
// Nothing here is NVIDIA's. Names and numbers are those of the public interface, as far as the program uses it.

#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <functional>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

// The exit code of a program that did what no driver could save it from.
constexpr int MISUSED = 96;

// For what is undefined on a device: it must not pass for success.
[[noreturn]] inline void misuse(const std::string& what) {
    fprintf(stderr, "fake CUDA: %s\n", what.c_str());
    fflush(stderr);
    _exit(MISUSED);
}

inline std::string setting(const char* name, const char* otherwise) {
    const char* set = getenv((std::string("FAKE_CUDA_") + name).c_str());
    return set ? set : otherwise;
}

inline long long number(const char* name, long long otherwise) {
    std::string set = setting(name, "");
    return set.empty() ? otherwise : strtoll(set.c_str(), nullptr, 10);
}

// The version of CUDA whose libraries these are, as in 13000.
inline int libraries_version() { return (int)number("LIBRARIES", 13000); }

}  // namespace fake

// --- what cuBLAS has of the driver -----------------------------------------------------------------------------------

// Begins work in a stream of the current context. 0, or an error of the driver.
typedef int (*FakeQueue)(void* stream, const char* what, const std::function<void()>* work);
// Whether so many bytes of the device's memory are there from an address on.
typedef bool (*FakeHolds)(const void* address, size_t bytes);
// Whether the calling thread has a context.
typedef bool (*FakeIsBound)();
// Whether the next operation of this kind is one that is to fail.
typedef bool (*FakeFails)(const char* kind, const char* name);
// Adds to a number of the report.
typedef void (*FakeCount)(const char* name, long long by);
