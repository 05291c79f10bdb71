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

/* The first of `count` things that fall to a part of `parts`, say a thread of a team; the next part's first ends them.
 */
static inline int64_t share(int64_t count, int64_t part, int64_t parts) { return count * part / parts; }

#endif
