/* The interface between lamb.c (schedule, trust ratio) and lamb_loops.c and lamb_blocks.c (arithmetic, once per
 * instruction set). Symbols are those of arXiv:1904.00962v5, Algorithm 2. */
#ifndef BIGHORN_LAMB_H
#define BIGHORN_LAMB_H

#include "layer_loops.h"

/* One tensor's step as plain factors. */
typedef struct {
    double grad_scale, l2;                /* g <- grad_scale * g + l2 * x */
    double beta1, beta3, beta2, beta4;    /* m <- beta1 m + beta3 g;  v <- beta2 v + beta4 g^2 */
    double correction, eps, weight_decay; /* r = correction * m / (sqrt(v) + eps);  u = r + weight_decay * x */
    double lr;                            /* for lamb.c, which passes step = lr * ratio to the loops */
    double decay;                         /* x <- decay * x - step * u */
    uint32_t rng_key, dither;             /* the key of the random bits, and the dither phase */
} LambFactors;

/* Whether weights and gradients are bfloat16 that can be used in place. */
static inline int all_in_bfloat16(const LayerChunk *b) {
    return is_in_bfloat16(&b->row->weights) && b->gradient->type == BFLOAT16;
}

/* lamb_loops.c has these functions for moments in floats, and lamb_blocks.c for moments in quantization blocks. */
typedef struct {
    /* Updates the moments and computes u, which is stored unless `update` is NULL. */
    LayerSums (*moments)(const LayerChunk *chunk, const LambFactors *factors, void *update);
    /* Updates x from the u that is stored; if `update` is NULL, u is computed again. */
    void (*apply)(const LayerChunk *chunk, const LambFactors *factors, double step, const void *update);
    /* Does both in one pass, for a step whose size is known beforehand. */
    LayerSums (*moments_and_apply)(const LayerChunk *chunk, const LambFactors *factors, double step);
} LambLoops;

/* ---- arithmetic of both ---------------------------------------------------------------------------------- */

/* The factors in the type of the arithmetic, as LambFactors; `scale` is the factor of the gradients that loops read. */
typedef struct {
    real scale, grad_scale, l2, beta1, beta3, beta2, beta4, correction, eps, weight_decay, decay;
    uint32_t rng_key, dither;
} LambReals;

static inline LambReals reals_of(const LambFactors *f) {
    return (LambReals){
        .scale = f->l2 != 0 ? 1 : (real)f->grad_scale, /* 1 after decayed_grad */
        .grad_scale = (real)f->grad_scale,
        .l2 = (real)f->l2,
        .beta1 = (real)f->beta1,
        .beta3 = (real)f->beta3,
        .beta2 = (real)f->beta2,
        .beta4 = (real)f->beta4,
        .correction = (real)f->correction,
        .eps = (real)f->eps,
        .weight_decay = (real)f->weight_decay,
        .decay = (real)f->decay,
        .rng_key = f->rng_key,
        .dither = f->dither,
    };
}

/* Adds the decay to a gradient if there is one. A decay of 0 is not added, so that a weight that is not finite leaves
 * the moments as they are. */
FORCE_INLINE_TEMPLATE const real *decayed_grad(const LambReals *f, const int x_type, int n, const real *g,
                                               const void *x, real *buffer) {
    if (f->l2 == 0) return g;
    for (int i = 0; i < n; i++) buffer[i] = FMA(f->l2, load_element(x_type, x, i), f->grad_scale * g[i]);
    return buffer;
}

static inline real moved(const LambReals f, real step, real x, real u) {
    return FMA(-step, u, f.decay * x); /* LAMB-x */
}

#endif
