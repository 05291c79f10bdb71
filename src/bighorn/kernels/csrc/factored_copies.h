/* Copies of a tile's gradient and weights for the loops of factored optimizers, if these are transposed: a loop along a
 * row would use a few bytes of each cache line, and the lines would be gone when the next row needs them. */
#ifndef BIGHORN_FACTORED_COPIES_H
#define BIGHORN_FACTORED_COPIES_H

#include "factored_tiles.h"

_Static_assert((int)STAGED_ELEMS >= (int)WHOLE_COLUMNS, "a copy of a tile holds at least one whole row");

static inline int is_copied(const FactoredRow *row, const Gradient *gradient) {
    return is_transposed(gradient->layout) || is_transposed(row->weights.memory);
}

static inline int copies_grad(const FactoredGrid *g, const Gradient *gradient) {
    return is_transposed(gradient->layout) && g->tiles_across == 1;
}

static inline int copies_weights(const FactoredGrid *g, const FactoredRow *row) {
    return is_transposed(row->weights.memory) && g->tiles_across == 1;
}

/* The bytes that a thread needs for its copies of a tile. */
static inline int64_t factored_copied_bytes(const FactoredGrid *g, const FactoredRow *row, const Gradient *gradient) {
    return STAGED_ELEMS * ((copies_grad(g, gradient) ? dtype_bytes(gradient->type) : 0) +
                           (copies_weights(g, row) ? dtype_bytes(row->weights.type) : 0));
}

/* A thread's copies for one tensor. */
typedef struct {
    const StridedLoops *strided;
    char *grad, *weights; /* NULL: the loops use the originals */
    FactoredJob job;      /* the job that uses the copies */
    FactoredRow row;
    Gradient gradient;
} FactoredCopies;

static inline void factored_begin_copies(FactoredCopies *c, const FactoredJob *job, const StridedLoops *strided,
                                         char *memory) {
    c->strided = strided;
    c->grad = copies_grad(&job->grid, job->gradient) ? memory : NULL;
    if (c->grad) memory += STAGED_ELEMS * dtype_bytes(job->gradient->type);
    c->weights = copies_weights(&job->grid, job->row) ? memory : NULL;
    if (!c->grad && !c->weights) return;
    c->job = *job;
    if (c->grad) {
        c->gradient = *job->gradient;
        c->gradient.layout = NULL;
        c->job.gradient = &c->gradient;
    }
    if (c->weights) {
        c->row = *job->row;
        c->row.weights.memory = NULL;
        c->job.row = &c->row;
    }
}

/* The elements of a tile, which has whole rows. */
typedef struct {
    int64_t start, count;
} FactoredRange;

static inline FactoredRange range_of(const FactoredGrid *g, int64_t index) {
    const FactoredTile t = tile_at(g, index);
    return (FactoredRange){(t.matrix * g->height + t.row) * g->width, t.matrices * t.rows * g->width};
}

/* Returns a job for loops over the gradient of this tile. */
static inline const FactoredJob *factored_with_grad(FactoredCopies *c, const FactoredJob *job, int64_t tile) {
    const Gradient *g = job->gradient;
    if (c->grad) {
        const FactoredRange r = range_of(&job->grid, tile);
        c->strided->copy(g->layout, (void *)job->grad, g->type, r.start, r.count, c->grad, STRIDED_GATHER);
        c->job.grad = c->grad - r.start * dtype_bytes(g->type);
    }
    return c->grad || c->weights ? &c->job : job;
}

/* Returns a job for loops over the weights of this tile. */
static inline const FactoredJob *factored_with_weights(FactoredCopies *c, const FactoredJob *job, int64_t tile) {
    const Weights *w = &job->row->weights;
    if (c->weights) {
        const FactoredRange r = range_of(&job->grid, tile);
        c->strided->copy(w->memory, w->data, w->type, r.start, r.count, c->weights, STRIDED_GATHER);
        c->row.weights.data = c->weights - r.start * dtype_bytes(w->type);
    }
    return c->grad || c->weights ? &c->job : job;
}

static inline void factored_store_weights(const FactoredCopies *c, const FactoredJob *job, int64_t tile) {
    const Weights *w = &job->row->weights;
    const FactoredRange r = range_of(&job->grid, tile);
    if (c->weights) c->strided->copy(w->memory, w->data, w->type, r.start, r.count, c->weights, STRIDED_SCATTER);
}

#endif
