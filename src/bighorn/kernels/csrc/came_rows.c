/* All rows of a CAME step: their distribution over threads, and the division of the workspace. */
#include "came_step.h"

#include <stddef.h>

/* All threads share a tensor of more elements than this, and then wait for each other's sums; one thread steps a
 * smaller one. */
enum { SHARED_MIN_ELEMS = 1 << 20 };

static const CameArithmetic *arithmetic_of(const CameRow *row) {
    return row->weights.type == FLOAT64 ? &came_arithmetic_double : &came_arithmetic;
}

/* The doubles of workspace for each thread's buffers, for a tensor that all threads share, and for each thread's small
 * tensors. */
typedef struct {
    int64_t scratch, shared, own;
} CameNeeds;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns the needs of the rows in `order`, or of all if that is NULL. */
static CameNeeds needs_of(const CameRow *rows, const CameShard *shards, const Gradient *gradients, const int64_t *order,
                          int64_t count) {
    CameNeeds needs = {0, 0, 0};
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = order ? order[i] : i;
        const CameArithmetic *arithmetic = arithmetic_of(&rows[row]);
        const CameShard *shard = shards ? &shards[row] : NULL;
        const int64_t need = arithmetic->workspace(&rows[row], shard, &gradients[row]);
        needs.scratch = larger(needs.scratch, arithmetic->scratch(&rows[row], shard, &gradients[row]));
        needs.shared = larger(needs.shared, need);
        if (gradients[row].size <= SHARED_MIN_ELEMS) needs.own = larger(needs.own, need);
    }
    return needs;
}

/* Returns the doubles of workspace that a step of any of these rows needs with this number of threads. */
EXPORT int64_t bighorn_came_workspace(const CameRow *rows, const CameShard *shards, const Gradient *gradients,
                                      int64_t count, int threads) {
    const CameNeeds needs = needs_of(rows, shards, gradients, NULL, count);
    return threads * needs.scratch + needs.shared + (threads > 1 ? threads * needs.own : 0);
}

typedef struct {
    CameStep step;
    CameNeeds needs;
    double *workspace;
    RowQueue queue;
} CameCall;

static void step_row(void *data, int64_t row, const RowShare *share) {
    CameCall *call = data;
    double *scratch = call->workspace + share->thread * call->needs.scratch;
    double *shared = call->workspace + share->team * call->needs.scratch;
    double *own = shared + (share->team > 1 ? call->needs.shared + share->thread * call->needs.own : 0);
    arithmetic_of(&call->step.rows[row])->step(&call->step, row, share, scratch, share->parts > 1 ? shared : own);
}

static void step_rows(int thread, int team, void *data) {
    CameCall *call = data;
    for_each_row(&call->queue, thread, team, step_row, call);
}

/* Makes one CAME step of the `count` rows in `order`, the largest first, without counting it. `beta2s` has one entry
 * per row, since beta2 can depend on the row's step count. If `shards` is not NULL, the call makes only the part of the
 * step before reduction round `round` (0 is the first), or after the last round. The function allocates no memory, so
 * it cannot fail. */
EXPORT void bighorn_came_step(const RunConfig *run, const CameOptions *options, const CameRow *rows,
                              const CameShard *shards, const Gradient *gradients, void *const *grads,
                              const double *beta2s, const int64_t *order, int64_t count, double grad_scale, int round,
                              double *workspace) {
    CameCall call = {
        .step =
            {
                .isa = run->isa,
                .options = options,
                .rows = rows,
                .shards = shards,
                .gradients = gradients,
                .grads = grads,
                .beta2s = beta2s,
                .grad_scale = grad_scale,
                .round = round,
            },
        .needs = needs_of(rows, shards, gradients, order, count),
        .workspace = workspace,
        .queue = {.order = order, .gradients = gradients, .count = count, .shared_min_elems = SHARED_MIN_ELEMS},
    };
    run_parallel(run, elements_in(&call.queue), step_rows, &call);
}
