// Writes down what a program has a GPU do, and when: loaded by the driver into any program that CUDA_INJECTION64_PATH names it
// for (trace.sh). A line for each kernel, copy and call of the driver in the file TRACE_OUT:
//
//     kind start end where name
//
// kind K of a kernel and M of a copy or memset, whose `where` is the stream, D of a call, whose `where` is the thread; times in ns.

#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE* out;
static unsigned long long dropped;

static void ask(CUptiResult result, const char* what) {
    const char* why = "unknown";
    if (result == CUPTI_SUCCESS) return;
    cuptiGetResultString(result, &why);
    fprintf(stderr, "trace.c: %s: %s\n", what, why);
    exit(1);
}

static void give_buffer(uint8_t** buffer, size_t* size, size_t* records) {
    *size = 8 << 20;
    *buffer = aligned_alloc(8, *size);
    *records = 0;
}

static void line(char kind, uint64_t start, uint64_t end, uint32_t where) {
    fprintf(out, "%c\t%llu\t%llu\t%u\t", kind, (unsigned long long)start, (unsigned long long)end, where);
}

static void write_record(const CUpti_Activity* record) {
    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const CUpti_ActivityKernel10* kernel = (const void*)record;
        line('K', kernel->start, kernel->end, kernel->streamId);
        fprintf(out, "%.90s\n", kernel->name);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
        static const char* const ways[] = {"unknown", "to the device", "to the host", "to an array", "from an array", "within arrays",
                                           "array to device", "device to array", "within the device"};
        const CUpti_ActivityMemcpy6* copy = (const void*)record;
        line('M', copy->start, copy->end, copy->streamId);
        fprintf(out, "copy %s, %llu bytes\n", copy->copyKind < 9 ? ways[copy->copyKind] : "elsewhere", (unsigned long long)copy->bytes);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
        const CUpti_ActivityMemset4* set = (const void*)record;
        line('M', set->start, set->end, set->streamId);
        fprintf(out, "memset, %llu bytes\n", (unsigned long long)set->bytes);
        break;
    }
    case CUPTI_ACTIVITY_KIND_DRIVER: {
        const CUpti_ActivityAPI* call = (const void*)record;
        const char* name = "a call";
        cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, call->cbid, &name);
        line('D', call->start, call->end, call->threadId);
        fprintf(out, "%s\n", name);
        break;
    }
    default: break;
    }
}

static void take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid) {
    CUpti_Activity* record = NULL;
    size_t lost = 0;
    (void)size;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) write_record(record);
    if (cuptiActivityGetNumDroppedRecords(context, stream, &lost) == CUPTI_SUCCESS) dropped += lost;
    free(buffer);
}

static void finish(void) {
    if (cuptiActivityFlushAll(1) != CUPTI_SUCCESS) fprintf(stderr, "trace.c: the last records may be missing\n");
    if (dropped) fprintf(stderr, "trace.c: %llu records were dropped: what the file says is too little\n", dropped);
    fflush(out);
}

int InitializeInjection(void) {
    const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_DRIVER};
    const char* path = getenv("TRACE_OUT");
    out = path ? fopen(path, "w") : NULL;
    if (!out) {
        fprintf(stderr, "trace.c: TRACE_OUT names no file that can be written\n");
        return 0;
    }
    ask(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "tracing cannot be begun");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) ask(cuptiActivityEnable(kinds[i]), "a kind of records is refused");
    atexit(finish);
    return 1;
}
