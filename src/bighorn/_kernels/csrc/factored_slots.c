/* All slots of a factored optimizer's step: their distribution over threads, and the division of the workspace. */
#include "factored_slots.h"

#include <stddef.h>

/* All threads share a tensor of more elements than this, and then wait for each other's sums; one thread steps a
 * smaller one. */
enum { SHARED_MIN_ELEMS = 1 << 20 };

/* The doubles of workspace for each thread's buffers, for a tensor that all threads share, and for each thread's small
 * tensors. */
typedef struct {
    int64_t scratch, shared, unshared;
} FactoredNeeds;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns the needs of the slots in `order`, or of all if that is NULL. */
static FactoredNeeds needs_of(const FactoredSlot *slots, const FactoredShard *shards, const Gradient *gradients,
                              const int64_t *order, int64_t count) {
    FactoredNeeds needs = {0, 0, 0};
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = order ? order[i] : i;
        const FactoredSlot *slot = &slots[index];
        const FactoredShard *shard = shards ? &shards[index] : NULL;
        const Gradient *gradient = &gradients[index];
        const int64_t need = factored_workspace(slot, shard);
        const int64_t scratch = factored_scratch(slot, shard);
        needs.scratch = larger(needs.scratch, scratch);
        needs.shared = larger(needs.shared, need);
        if (gradient->size <= SHARED_MIN_ELEMS) needs.unshared = larger(needs.unshared, need);
    }
    return needs;
}

/* Returns the doubles of workspace that a step of any selection of slots needs with this number of threads. */
EXPORT int64_t bighorn_factored_workspace(const FactoredSlot *slots, const FactoredShard *shards,
                                          const Gradient *gradients, int64_t count, int threads) {
    const FactoredNeeds needs = needs_of(slots, shards, gradients, NULL, count);
    return threads * needs.scratch + needs.shared + (threads > 1 ? threads * needs.unshared : 0);
}

typedef struct {
    FactoredStep *step;
    FactoredStepSlot *step_slot;
    FactoredNeeds needs;
    double *workspace;
    SlotQueue queue;
} FactoredCall;

static void step_slot(void *data, int64_t slot, const SlotShare *share) {
    FactoredCall *call = data;
    double *scratch = call->workspace + share->thread * call->needs.scratch;
    double *shared = call->workspace + share->team * call->needs.scratch;
    double *unshared = shared + (share->team > 1 ? call->needs.shared + share->thread * call->needs.unshared : 0);
    call->step_slot(call->step, slot, share, scratch, share->parts > 1 ? shared : unshared);
}

static void step_slots(int thread, int team, void *data) {
    FactoredCall *call = data;
    for_each_slot(&call->queue, thread, team, step_slot, call);
}

void factored_step_slots(const RunConfig *run, FactoredStep *step, FactoredStepSlot *step_slot, const int64_t *order,
                         int64_t count, double *workspace) {
    FactoredCall call = {
        .step = step,
        .step_slot = step_slot,
        .needs = needs_of(step->slots, step->shards, step->gradients, order, count),
        .workspace = workspace,
        .queue = {.order = order, .gradients = step->gradients, .count = count, .shared_min_elems = SHARED_MIN_ELEMS},
    };
    run_parallel(run, elements_in(&call.queue), step_slots, &call);
}
