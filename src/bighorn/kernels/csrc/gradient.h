/* Reads gradients of any floating dtype in any memory order, and scales them if required. */
#ifndef BIGHORN_GRADIENT_H
#define BIGHORN_GRADIENT_H

#include "strided.h"

static inline int64_t elements_of(const Gradient *gradients, int64_t rows) {
    int64_t elements = 0;
    for (int64_t row = 0; row < rows; row++) elements += gradients[row].size;
    return elements;
}

NO_INLINE const real *gather_grad(const Gradient *gradient, const void *data, int64_t start, int n, real *buffer) {
    uint16_t copies[PIECE_ELEMS]; /* of any other dtype */
    const int type = gradient->type;
    void *copy = type == FLOAT32 ? (void *)buffer : copies;
    strided_copy(gradient->layout, (void *)data, type, start, n, copy, STRIDED_GATHER);
    if (type != FLOAT32) widen(copy, type, 0, n, buffer);
    return buffer;
}

/* Returns elements [start, start + n) in the order of the state, in the type of the arithmetic, whatever their order in
 * memory. */
static inline const real *read_grad(const Gradient *gradient, const void *data, int64_t start, int n,
                                    real *restrict buffer) {
    const void *elements = consecutive(gradient->layout, data, gradient->type, start, n);
    return elements ? widen(elements, gradient->type, 0, n, buffer) : gather_grad(gradient, data, start, n, buffer);
}

/* Whether elements can be used in place, apart from their dtype. */
static inline int is_plain(const Gradient *gradient) { return !gradient->layout; }

/* Returns elements [start, start + n), scaled, in the type of the arithmetic. */
static inline const real *load_grad(const Gradient *gradient, const void *data, real scale, int64_t start, int n,
                                    real *buffer) {
    const real *g = read_grad(gradient, data, start, n, buffer);
    if (scale == 1) return g;
    for (int i = 0; i < n; i++) buffer[i] = scale * g[i];
    return buffer;
}

#endif
