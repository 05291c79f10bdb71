/* How a call runs: on which instruction set, and on which threads. */
#ifndef BIGHORN_RUN_H
#define BIGHORN_RUN_H

#include "abi.h"
#include "compiler.h"

#include <stdatomic.h>
#include <stdint.h>

/* The caller runs fewer elements by itself, as torch does: on a busy machine other threads take long to wake (8 ms for
 * 200 vectors of 16 elements). A team has all threads or one, because libgomp ends the threads that a smaller team does
 * not use. */
enum { PARALLEL_MIN_ELEMS = 1 << 15 };

/* The elements of a chunk. Sums are formed per chunk and added in the order of chunks, so that no result depends on the
 * number of threads. */
enum { CHUNK_ELEMS = 8192 };

static inline int64_t chunks_in(int64_t size) { return (size + CHUNK_ELEMS - 1) / CHUNK_ELEMS; }

typedef void RunBody(int thread, int team, void *data);

/* Runs the body, for this number of elements, in every thread of a team, which can be smaller than requested
 * (OMP_THREAD_LIMIT, OMP_DYNAMIC). */
void run_parallel(const RunConfig *run, int64_t elements, RunBody *body, void *data);

/* A barrier for the threads of a team. It must be zeroed before the first use. */
typedef struct {
    atomic_int arrived, phase, sleepers;
} RunBarrier;

void wait_for_all(RunBarrier *barrier, int team);

/* Returns the first of `count` items in part `part` of `parts`; it ends at the first item of the next part. */
static inline int64_t share_of(int64_t count, int64_t part, int64_t parts) { return count * part / parts; }

/* ---- rows ------------------------------------------------------------------------------------------------ */

/* The rows of a call. `next` must be 0 before it. */
typedef struct {
    const int64_t *order; /* the indices of the rows that take part, largest row first */
    const Gradient *gradients;
    int64_t count; /* of rows in `order` */
    /* All threads share a row of more elements than this, or one that would keep a thread busy when the others have
     * finished all that follow it; one thread gets any other row. */
    int64_t shared_min_elems;
    atomic_llong next; /* the next of the rows that one thread each steps */
} RowQueue;

/* One thread's share of one row. */
typedef struct {
    int thread, team; /* the thread's index, and the number of threads */
    int part, parts;  /* 0 of 1 for a row that one thread steps */
    int64_t turn;     /* the number of shared rows before: rows can alternate between two sets of memory */
} RowShare;

typedef void RowFunction(void *data, int64_t row, const RowShare *share);

/* Calls the function for each row that this thread has a share in. */
void for_each_row(RowQueue *queue, int thread, int team, RowFunction *function, void *data);

int64_t elements_in(const RowQueue *queue);

#endif
