/* A team of POSIX threads, or the OpenMP team of a runtime for Windows, and a check for the drivers. */
#ifndef BIGHORN_TESTS_TEAM_H
#define BIGHORN_TESTS_TEAM_H

#include "run.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(_WIN32) /* without windows.h, which defines another INT8 */
__declspec(dllimport) void *__stdcall LoadLibraryA(const char *);
__declspec(dllimport) void *__stdcall GetProcAddress(void *, const char *);
#endif

enum { THREADS = 4 };

static _Thread_local int this_thread;

typedef struct {
    void (*body)(void *);
    void *data;
    int thread;
} Start;

static void *start(void *argument) {
    const Start *s = argument;
    this_thread = s->thread;
    s->body(s->data);
    return NULL;
}

static void parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    pthread_t all[THREADS];
    Start starts[THREADS];
    for (unsigned i = 0; i < threads; i++) {
        starts[i] = (Start){.body = body, .data = data, .thread = (int)i};
        if (pthread_create(&all[i], NULL, start, &starts[i])) abort();
    }
    for (unsigned i = 0; i < threads; i++) pthread_join(all[i], NULL);
}

static int thread_num(void) { return this_thread; }
static int num_threads(void) { return THREADS; }

static RunConfig RUN = {
    .parallel = parallel,
    .thread_num = thread_num,
    .num_threads = num_threads,
    .threads = THREADS,
};

static inline void check(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

#if defined(_WIN32)
static void see_team(int thread, int team, void *data) {
    if (thread == THREADS - 1) *(int *)data = team;
}

/* Runs on the threads of LLVM's or Intel's OpenMP in this library, as with torch on Windows. */
static inline void use_runtime(const char *path) {
    void *library = LoadLibraryA(path);
    check(library != NULL, "the runtime loads");
    RUN.parallel = NULL;
    RUN.fork_call = GetProcAddress(library, "__kmpc_fork_call");
    RUN.push_num_threads = GetProcAddress(library, "__kmpc_push_num_threads");
    RUN.global_thread_num = GetProcAddress(library, "__kmpc_global_thread_num");
    RUN.thread_num = GetProcAddress(library, "omp_get_thread_num");
    RUN.num_threads = GetProcAddress(library, "omp_get_num_threads");
    int team = 0;
    run_parallel(&RUN, PARALLEL_MIN_ELEMS, see_team, &team);
    check(team == THREADS, "the runtime gives all threads");
}
#endif

#endif
