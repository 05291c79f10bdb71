/* One thread's share of a factored optimizer's step of one tensor: the passes up to the second moment, and the
 * inputs of the passes after it. */
#ifndef BIGHORN_FACTORED_H
#define BIGHORN_FACTORED_H

#include "factored_shards.h"
#include "factored_slots.h"

typedef struct {
    const FactoredLoops *loops;
    FactoredJob job;
    int64_t from, to;    /* the matrices that the threads process now */
    int64_t first, last; /* this thread's share of their tiles */
    double size;         /* of the whole tensor */
    RunBarrier *barrier;
    int thread, team;
    FactoredColumns *columns;
} FactoredWork;

/* Begins a share of row `index`. The second moment is an average with `beta2` of q = (grad_scale g)^2 + eps1. */
void factored_begin(FactoredWork *w, FactoredStep *s, int64_t index, double grad_scale, double beta2, double eps1,
                    const SlotShare *share, double *scratch, double *workspace);

/* Returns an average of rows and columns of the tensor, of which a shard may hold a part. */
FactoredAverage factored_average(const FactoredWork *w, float *rows, float *columns, double beta, double eps);

/* Selects matrices [from, to), and this thread's share of their tiles. */
void factored_select(FactoredWork *w, int64_t from, int64_t to);

static inline void factored_wait(const FactoredWork *w) { wait_for_all(w->barrier, w->team); }

/* Returns the sum of the tile sums of the selected matrices, after a barrier. A second barrier must come before they
 * are written again. */
double factored_total(const FactoredWork *w);

/* Updates the averages of lines that extend over several tiles. */
void factored_finish(const FactoredWork *w, const FactoredAverage *average);

/* Returns the sum of x^2, and ends with a barrier, so that other sums can follow. */
double factored_param_square_sum(FactoredWork *w);

/* Returns the sum of u^2, by another read of the gradient. */
double factored_update_square_sum(FactoredWork *w);

/* Updates the second moment; returns the sum of u^2, which is not known yet for a shard that is split. */
double factored_second_moment(FactoredWork *w);

/* Loads an average that has been added up over all shards, in one thread, while the others wait. */
void factored_load_reduced(const FactoredWork *w, const FactoredAverage *average, const FactoredShardSums *from);

#endif
