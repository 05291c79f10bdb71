/* A team of POSIX threads that replaces OpenMP's, and a check for the drivers. */
#ifndef BIGHORN_TESTS_TEAM_H
#define BIGHORN_TESTS_TEAM_H

#include "run.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

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

#endif
