/* Threads are borrowed from the OpenMP runtime that the process has loaded already (torch's), because a second pool
 * would compete with its spinning workers. */
#include "run.h"

#include <stdbool.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(_WIN32) /* without windows.h, which has an INT8 of its own */
__declspec(dllimport) int __stdcall WaitOnAddress(volatile void *, void *, size_t, unsigned long);
__declspec(dllimport) void __stdcall WakeByAddressAll(void *);
#else
#include <sched.h>
#endif

/* ---- the instruction set --------------------------------------------------------------------------------- */

#if defined(ISA_X86)
/* Returns whether the system saves the registers of these bits of XCR0, and the processor has all of these features. */
static bool has(unsigned saved, unsigned features, unsigned extended) {
    unsigned a, b, c, d, xcr0, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || (c & features) != features) return false;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    return (xcr0 & saved) == saved && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & extended) == extended;
}
#endif

/* Returns the highest x86-64 level that the machine supports; 0 elsewhere. __builtin_cpu_supports() finds nothing with
 * Zig's runtime. The processor is asked once: in a virtual machine each question takes tens of microseconds. */
EXPORT int bighorn_isa(void) {
#if defined(ISA_X86)
    enum { AVX = 0x6, AVX512 = 0xe6 };
    static atomic_int level;
    const unsigned v3 = bit_AVX2 | bit_BMI | bit_BMI2;
    const unsigned v4 = bit_AVX512F | bit_AVX512DQ | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL;
    if (!atomic_load(&level))
        atomic_store(&level, has(AVX512, bit_FMA | bit_F16C, v3 | v4) ? 4 : has(AVX, bit_FMA | bit_F16C, v3) ? 3 : 2);
    return atomic_load(&level);
#else
    return 0;
#endif
}

/* ---- threads --------------------------------------------------------------------------------------------- */

static inline void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* The caller's rounding and flush-to-zero modes apply in every thread that works for it. */
static inline uint64_t float_mode(void) {
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

static inline void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ __volatile__("msr fpcr, %0" ::"r"(mode));
#else
    (void)mode;
#endif
}

typedef struct {
    const RunConfig *run;
    RunBody *body;
    void *data;
    uint64_t float_mode;
} RunRegion;

/* The team can be smaller than requested, so its size is read in here. */
static void enter(void *argument) {
    const RunRegion *region = argument;
    uint64_t before = float_mode();
    set_float_mode(region->float_mode);
    region->body(region->run->thread_num(), region->run->num_threads(), region->data);
    set_float_mode(before);
}

/* The entry of a thread in LLVM's and Intel's runtimes. */
static void enter_task(int32_t *thread, int32_t *thread_of_team, void *argument) {
    (void)thread, (void)thread_of_team;
    enter(argument);
}

/* The ident_t of LLVM's and Intel's runtimes, which describes the call. */
static const struct {
    int32_t reserved_1, flags, reserved_2, reserved_3;
    const char *source;
} LOCATION = {.flags = 2, .source = ";bighorn;run_parallel;0;0;;"};

void run_parallel(const RunConfig *run, int64_t elements, RunBody *body, void *data) {
    if (elements < PARALLEL_MIN_ELEMS || run->threads <= 1) {
        body(0, 1, data);
        return;
    }
    RunRegion region = {.run = run, .body = body, .data = data, .float_mode = float_mode()};
    if (run->parallel) {
        run->parallel(enter, &region, (unsigned)run->threads, 0);
    } else {
        run->push_num_threads(&LOCATION, run->global_thread_num(&LOCATION), run->threads);
        run->fork_call(&LOCATION, 1, enter_task, &region);
    }
}

/* Sleeps in the kernel while the value is this one. It can return early; macOS only yields to other threads. */
static inline void sleep_on(atomic_int *value, int present) {
#if defined(__linux__)
    syscall(SYS_futex, value, FUTEX_WAIT_PRIVATE, present, NULL, NULL, 0);
#elif defined(_WIN32)
    WaitOnAddress(value, &present, sizeof present, ~0ul);
#else
    (void)value, (void)present;
    sched_yield();
#endif
}

static inline void wake_sleepers(atomic_int *value) {
#if defined(__linux__)
    syscall(SYS_futex, value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#elif defined(_WIN32)
    WakeByAddressAll(value);
#else
    (void)value;
#endif
}

/* Spins briefly, then sleeps in the kernel: spinning alone is 5 to 46 times slower with more threads than cores. */
void wait_for_all(RunBarrier *barrier, int team) {
    if (team == 1) return;
    int phase = atomic_load(&barrier->phase);
    if (atomic_fetch_add(&barrier->arrived, 1) == team - 1) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->phase, phase + 1);
        if (atomic_load(&barrier->sleepers)) wake_sleepers(&barrier->phase);
        return;
    }
    for (int spin = 0; spin < 4000; spin++) {
        if (atomic_load_explicit(&barrier->phase, memory_order_acquire) != phase) return;
        relax();
    }
    atomic_fetch_add(&barrier->sleepers, 1);
    while (atomic_load(&barrier->phase) == phase) sleep_on(&barrier->phase, phase);
    atomic_fetch_sub(&barrier->sleepers, 1);
}

/* ---- slots ------------------------------------------------------------------------------------------------ */

void for_each_slot(SlotQueue *queue, int thread, int team, SlotFunction *function, void *data) {
    int64_t first = 0,
            rest = elements_in(queue); /* the first of the slots that one thread each steps, and all of them */
    for (; first < queue->count && team > 1; first++) {
        const int64_t slot = queue->order[first], size = queue->gradients[slot].size;
        const bool outlasts_others = size > PARALLEL_MIN_ELEMS && size * team > rest;
        if (size <= queue->shared_min_elems && !outlasts_others) break;
        rest -= size;
        const SlotShare part = {.thread = thread, .team = team, .part = thread, .parts = team, .turn = first};
        function(data, slot, &part);
    }
    const SlotShare whole = {.thread = thread, .team = team, .part = 0, .parts = 1};
    for (;;) {
        const int64_t position = first + atomic_fetch_add(&queue->next, 1);
        if (position >= queue->count) return;
        function(data, queue->order[position], &whole);
    }
}

int64_t elements_in(const SlotQueue *queue) {
    int64_t elements = 0;
    for (int64_t i = 0; i < queue->count; i++) elements += queue->gradients[queue->order[i]].size;
    return elements;
}
