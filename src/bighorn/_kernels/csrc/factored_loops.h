/* Shared by the loops of factored optimizers, which are compiled once per instruction set.
 *
 * The inner loops process pieces of consecutive elements, and compute the factor 1 / sqrt(row col / mean(row)) as r *
 * c[i]. In a wide matrix a piece is within one row of a tile: r is the row's factor, c the columns' factors. If rows
 * are short, a piece has several rows or several matrices: r is 1, and c is the product of both factors for each
 * element. */
#ifndef BIGHORN_FACTORED_LOOPS_H
#define BIGHORN_FACTORED_LOOPS_H

#include "factored_averages.h"

enum { L2_CACHE_ELEMS = (1 << 18) / sizeof(float) }; /* elements that stay in the second-level cache */

/* ---- elements in place or in a buffer -------------------------------------------------------------------- */

/* Whether loops read elements of a type in place. */
static inline int is_ready(int type) { return type == FLOAT32 || type == BFLOAT16; }

/* Returns elements [start, start + n), scaled. */
static inline const float *grad_at(const FactoredJob *job, int64_t start, int n, FactoredGradBuffer *buffer) {
    return load_grad(job->gradient, job->grad, job->grad_scale, start, n, *buffer);
}

NO_INLINE const void *grad_in_buffer(const FactoredJob *job, int64_t start, int n, FactoredGradBuffer *buffer) {
    return read_grad(job->gradient, job->grad, start, n, *buffer);
}

/* As `grad_at`, but types that are ready are returned in place: not scaled, and of the type that `grad_type` returns.
 */
FORCE_INLINE const void *grad_in_place(const FactoredJob *job, int64_t start, int n, FactoredGradBuffer *buffer) {
    const Gradient *g = job->gradient;
    return is_ready(g->type) ? at(job->grad, g->type, start) : grad_in_buffer(job, start, n, buffer);
}

static inline int grad_type(const FactoredJob *job) { return job->gradient->type == BFLOAT16 ? BFLOAT16 : FLOAT32; }

/* ---- several rows in one loop ---------------------------------------------------------------------------- */

/* The start of a sum: GCC removes an addition to -0, and not one to 0. */
static const float NOTHING = -0.0f;

/* FOR_* run a loop over one piece or over INTERLEAVED_ROWS pieces, for element types that are compile-time constants.
 */
#define FOR_COUNT(loop, count, ...) ((count) == 1 ? loop(1, __VA_ARGS__) : loop(INTERLEAVED_ROWS, __VA_ARGS__))
#define FOR_TYPE(loop, count, type, ...) \
    ((type) == BFLOAT16 ? FOR_COUNT(loop, count, BFLOAT16, __VA_ARGS__) : FOR_COUNT(loop, count, FLOAT32, __VA_ARGS__))
#define FOR_TYPES(loop, count, type, other, ...)                              \
    ((other) == BFLOAT16 ? FOR_TYPE(loop, count, type, BFLOAT16, __VA_ARGS__) \
                         : FOR_TYPE(loop, count, type, FLOAT32, __VA_ARGS__))

/* The sums of the rows that a loop reads together. */
typedef struct {
    float rows[INTERLEAVED_ROWS][SUM_LANES];
} RowSums;

FORCE_INLINE_TEMPLATE void store_sums(const int count, const RowSums *from, float *sums) {
    for (int k = 0; k < count; k++) sums[k] = sum_of_lanes(from->rows[k]);
}

/* ---- arithmetic of both ---------------------------------------------------------------------------------- */

static inline float square_of(float a) { return a * a; }

static inline float update_of(float g, float r, float c) { return g * r * c; } /* CAME-u */

#endif
