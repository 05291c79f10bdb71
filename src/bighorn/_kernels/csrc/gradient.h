/* Reads gradients of any dtype, and scales them if required. */
#ifndef BIGHORN_GRADIENT_H
#define BIGHORN_GRADIENT_H

#include "numbers.h"

static inline int64_t elements_of(const Gradient *gradients, int64_t slots) {
    int64_t elements = 0;
    for (int64_t slot = 0; slot < slots; slot++) elements += gradients[slot].size;
    return elements;
}

/* Returns elements [start, start + n) in float32. */
static inline const float *read_grad(const Gradient *gradient, const void *data, int64_t start, int n,
                                     float *restrict buffer) {
    return widen(data, gradient->type, start, n, buffer);
}

/* Returns elements [start, start + n), scaled, in float32. */
static inline const float *load_grad(const Gradient *gradient, const void *data, float scale, int64_t start, int n,
                                     float *buffer) {
    const float *g = read_grad(gradient, data, start, n, buffer);
    if (scale == 1) return g;
    for (int i = 0; i < n; i++) buffer[i] = scale * g[i];
    return buffer;
}

#endif
