/* How a call runs: on which instruction set, and on whose threads. */
#ifndef BIGHORN_RUN_H
#define BIGHORN_RUN_H

#include "abi.h"
#include "compiler.h"

#include <stdatomic.h>
#include <stdint.h>

/* Fewer elements than torch shares out, too, stay with the caller: on a busy machine others take long to wake (8 ms for
 * 200 vectors of 16 elements). There is no team in between: libgomp ends threads that a smaller one leaves over. */
enum { PARALLEL_MIN_ELEMS = 1 << 15 };

/* Sums are formed per block and added in block order, so that no result depends on the number of threads. */
enum { BLOCK_ELEMS = 8192 };

static inline int64_t blocks_in(int64_t size) { return (size + BLOCK_ELEMS - 1) / BLOCK_ELEMS; }

typedef void RunBody(int thread, int team, void *data);

/* Runs the body, for so many elements, in every thread of a team, which can be smaller than asked for
 * (OMP_THREAD_LIMIT, OMP_DYNAMIC). */
void run_parallel(const RunConfig *run, int64_t elements, RunBody *body, void *data);

/* Where the threads of a team wait for each other; zeros to begin with. */
typedef struct {
    atomic_int arrived, phase, sleepers;
} RunBarrier;

void wait_for_all(RunBarrier *barrier, int team);

/* The first of `count` items in part `part` of `parts`; the first of the next part ends them. */
static inline int64_t share_of(int64_t count, int64_t part, int64_t parts) { return count * part / parts; }

/* ---- rows ------------------------------------------------------------------------------------------------ */

/* All rows of a call. Zero `next` before it. */
typedef struct {
    const int64_t *order; /* row indices, largest row first */
    const Gradient *gradients;
    int64_t count;
    int64_t shared_min_elems; /* all threads share a row of more elements, and one thread gets any other row */
    atomic_llong next;        /* of the rows that go to one thread each */
} RowQueue;

/* One thread's part of one row. */
typedef struct {
    int thread, team; /* the thread, among those of the call */
    int part, parts;  /* 0 of 1 for a row that goes to one thread */
    int64_t turn;     /* the number of shared rows before: rows can use two sets of memory in turn */
} RowShare;

typedef void RowFunction(void *data, int64_t row, const RowShare *share);

/* Calls the function for each row that this thread has a part in. */
void for_each_row(RowQueue *queue, int thread, int team, RowFunction *function, void *data);

int64_t elements_in(const RowQueue *queue);

#endif
