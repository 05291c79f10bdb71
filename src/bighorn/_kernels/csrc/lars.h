/* The interface between lars.c (schedule, trust ratio) and lars_loops.c (arithmetic, once per instruction set). Symbols
 * follow arXiv:1708.03888v3, Algorithm 1. */
#ifndef BIGHORN_LARS_H
#define BIGHORN_LARS_H

#include "layer_loops.h"

/* One tensor's step as plain factors. */
typedef struct {
    double grad_scale, weight_decay; /* u = before * (grad_scale * g + weight_decay * x) */
    double norm_decay;               /* the weight decay in the gradient whose norm is taken */
    double momentum;                 /* m <- momentum * m + u */
    double before, after_u, after_m; /* x <- x - after_u * u - after_m * m, with the new m */
    uint32_t rng_key;
} LarsFactors;

typedef struct {
    LayerSums (*norms)(const LayerChunk *chunk, const LarsFactors *factors);
    void (*apply)(const LayerChunk *chunk, const LarsFactors *factors);
} LarsLoops;

#endif
