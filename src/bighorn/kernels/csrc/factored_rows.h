/* All rows of a factored optimizer's step: their distribution over threads, and the division of the workspace. */
#ifndef BIGHORN_FACTORED_ROWS_H
#define BIGHORN_FACTORED_ROWS_H

#include "run.h"

/* One call: the first member of an optimizer's step. */
typedef struct {
    int isa;
    const FactoredRow *rows;
    const FactoredShard *shards; /* NULL: all rows are whole */
    const Gradient *gradients;
    void *const *grads;
    int round; /* the reduction round of shards: a call does the work before this round, or after the last one */
    RunBarrier barrier;
} FactoredStep;

/* Return the doubles of a thread's buffers, and of workspace, for one tensor; `shard` is NULL if it is whole. */
int64_t factored_scratch(const FactoredRow *row, const FactoredShard *shard);
int64_t factored_workspace(const FactoredRow *row, const FactoredShard *shard);

/* Steps one row, or one thread's share of it. */
typedef void FactoredStepRow(FactoredStep *s, int64_t row, const RowShare *share, double *scratch, double *workspace);

/* Steps the `count` rows in `order`, the largest first. */
void factored_step_rows(const RunConfig *run, FactoredStep *step, FactoredStepRow *step_row, const int64_t *order,
                        int64_t count, double *workspace);

#endif
