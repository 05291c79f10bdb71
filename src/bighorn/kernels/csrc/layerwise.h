/* The schedule of a step whose size depends on norms of the whole tensor, as in LAMB or LARS: which thread processes
 * which block, where the threads wait, the two sums, and the ratio. The optimizer supplies two loops over blocks. */
#ifndef BIGHORN_LAYERWISE_H
#define BIGHORN_LAYERWISE_H

#include "run.h"

#include <stdbool.h>

/* Sums of squares of the weights and of the update. */
typedef struct {
    double weight, update;
} LayerSums;

/* A thread has so many bytes for what it computes once per row, before the loops. */
enum { LAYER_LOCALS_BYTES = 128 };

/* What the schedule must know of a row. */
typedef struct {
    int64_t blocks;
    bool needs_ratio; /* else the first loop finishes the row */
} LayerInfo;

/* What an optimizer supplies. `step` is its own data; rows and blocks are indices. A block has at most BLOCK_ELEMS
 * elements, and blocks do not depend on the number of threads. */
typedef struct {
    /* Computes a row's locals, and what the schedule must know of the row. */
    LayerInfo (*prepare)(const void *step, int64_t row, void *locals);
    /* The first loop, over one block: state and update; also the weights where no ratio is needed. `update` is where
     * the update must be stored; where it is NULL, the second loop computes it again. */
    LayerSums (*first)(const void *step, int64_t row, int64_t block, const void *locals, float *update);
    /* The ratio, from the sums over the whole tensor. `writes_norms` is true in one thread, which writes what telemetry
     * shows of the row. */
    double (*ratio)(const void *step, int64_t row, const void *locals, LayerSums total, bool writes_norms);
    /* The second loop, over one block: the weights. */
    void (*second)(const void *step, int64_t row, int64_t block, const void *locals, double ratio, const float *update);
} LayerwiseRule;

/* One call. All fields but `barrier` are inputs. */
typedef struct {
    const LayerwiseRule *rule;
    const void *step; /* what the rule's functions receive */
    RowQueue queue;
    int phase;             /* LayerwisePhase */
    LayerSums *sums;       /* one per row, between two calls that do one phase each; else NULL */
    float *scratch;        /* stored updates; the team divides it evenly */
    int64_t scratch_size;  /* in floats */
    LayerSums *partial[2]; /* one per block of a shared row; two, so that a fast thread can go on to the next row */
    RunBarrier barrier;
} LayerwiseStep;

/* Steps all rows: the tensors that are large are shared by all threads, with one barrier between the loops; the others
 * go to one thread each, so that the second loop finds them in cache. */
void layerwise_step(const RunConfig *run, LayerwiseStep *step);

#endif
