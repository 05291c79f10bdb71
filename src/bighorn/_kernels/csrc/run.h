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

/* ---- slots ------------------------------------------------------------------------------------------------ */

/* The slots of a call. `next` must be 0 before it. */
typedef struct {
    const int64_t *order; /* the indices of the slots that take part, largest slot first */
    const Gradient *gradients;
    int64_t count; /* of slots in `order` */
    /* All threads share a slot of more elements than this, or one that would keep a thread busy when the others have
     * finished all that follow it; one thread gets any other slot. */
    int64_t shared_min_elems;
    atomic_llong next; /* the next of the slots that one thread each steps */
} SlotQueue;

/* One thread's share of one slot. */
typedef struct {
    int thread, team; /* the thread's index, and the number of threads */
    int part, parts;  /* 0 of 1 for a slot that one thread steps */
    int64_t turn;     /* the number of shared slots before: slots can alternate between two sets of memory */
} SlotShare;

typedef void SlotFunction(void *data, int64_t slot, const SlotShare *share);

/* Calls the function for each slot that this thread has a share in. */
void for_each_slot(SlotQueue *queue, int thread, int team, SlotFunction *function, void *data);

int64_t elements_in(const SlotQueue *queue);

#endif
