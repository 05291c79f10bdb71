/* All slots of a factored optimizer's step: their distribution over threads, and the division of the workspace. */
#ifndef BIGHORN_FACTORED_SLOTS_H
#define BIGHORN_FACTORED_SLOTS_H

#include "run.h"

/* One call: the first member of an optimizer's step. */
typedef struct {
    int isa;
    const FactoredSlot *slots;
    const FactoredShard *shards; /* NULL: all slots are whole */
    const Gradient *gradients;
    void *const *grads;
    int round; /* the reduction round of shards: a call does the work before this round, or after the last one */
    RunBarrier barrier;
} FactoredStep;

/* Return the doubles of a thread's buffers, and of workspace, for one tensor; `shard` is NULL if it is whole. */
int64_t factored_scratch(const FactoredSlot *slot, const FactoredShard *shard);
int64_t factored_workspace(const FactoredSlot *slot, const FactoredShard *shard);

/* Steps one slot, or one thread's share of it. */
typedef void FactoredStepSlot(FactoredStep *s, int64_t slot, const SlotShare *share, double *scratch,
                              double *workspace);

/* Steps the `count` slots in `order`, the largest first. */
void factored_step_slots(const RunConfig *run, FactoredStep *step, FactoredStepSlot *step_slot, const int64_t *order,
                         int64_t count, double *workspace);

#endif
