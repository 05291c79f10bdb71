/* The interface between came_rows.c, which distributes the rows of a call over threads, and came.c, which steps one of
 * them. came.c is compiled for each type of the arithmetic. */
#ifndef BIGHORN_CAME_STEP_H
#define BIGHORN_CAME_STEP_H

#include "run.h"

/* One call. */
typedef struct {
    int isa;
    const CameOptions *options;
    const CameRow *rows;
    const CameShard *shards; /* NULL: all rows are whole */
    const Gradient *gradients;
    void *const *grads;
    const double *beta2s;
    double grad_scale;
    int round; /* the reduction round of shards: a call does the work before this round, or after the last one */
    RunBarrier barrier;
} CameStep;

typedef struct {
    /* Return the doubles of a thread's buffers, and those of workspace, for one tensor; `shard` is NULL if it is
     * whole. */
    int64_t (*scratch)(const CameRow *row, const CameShard *shard, const Gradient *gradient);
    int64_t (*workspace)(const CameRow *row, const CameShard *shard, const Gradient *gradient);
    /* Steps one row, or one thread's share of it. */
    void (*step)(CameStep *s, int64_t row, const RowShare *share, double *scratch, double *workspace);
} CameArithmetic;

extern const CameArithmetic came_arithmetic, came_arithmetic_double;

#endif
