/* The interface between lamb.c (schedule, trust ratio) and lamb_loops.c and lamb_blocks.c (arithmetic, once per
 * instruction set). Symbols follow arXiv:1904.00962v5, Algorithm 2. */
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
    return is_in_bfloat16(&b->slot->weights) && b->gradient->type == BFLOAT16;
}

/* lamb_loops.c has these functions for moments in floats, and lamb_blocks.c for moments in quantization blocks. */
typedef struct {
    /* Updates the moments and computes u, which is stored unless `update` is NULL. */
    LayerSums (*moments)(const LayerChunk *chunk, const LambFactors *factors, void *update);
    /* The same, for a step that needs the inner product of x and u. */
    LayerSums (*moments_on_ball)(const LayerChunk *chunk, const LambFactors *factors, void *update);
    /* Updates x from the u that is stored; if `update` is NULL, u is computed again. */
    void (*apply)(const LayerChunk *chunk, const LambFactors *factors, double step, const void *update);
    /* Does both in one pass, for a step whose size is known beforehand. */
    LayerSums (*moments_and_apply)(const LayerChunk *chunk, const LambFactors *factors, double step);
} LambLoops;

/* ---- arithmetic of both ---------------------------------------------------------------------------------- */

/* The factors in float32, as LambFactors; `scale` is the factor of the gradients that loops read. */
typedef struct {
    float scale, grad_scale, l2, beta1, beta3, beta2, beta4, correction, eps, weight_decay, decay;
    uint32_t rng_key, dither;
} LambFloats;

static inline LambFloats floats_of(const LambFactors *f) {
    return (LambFloats){
        .scale = f->l2 != 0 ? 1 : (float)f->grad_scale, /* 1 after decayed_grad */
        .grad_scale = (float)f->grad_scale,
        .l2 = (float)f->l2,
        .beta1 = (float)f->beta1,
        .beta3 = (float)f->beta3,
        .beta2 = (float)f->beta2,
        .beta4 = (float)f->beta4,
        .correction = (float)f->correction,
        .eps = (float)f->eps,
        .weight_decay = (float)f->weight_decay,
        .decay = (float)f->decay,
        .rng_key = f->rng_key,
        .dither = f->dither,
    };
}

/* Adds the decay to a gradient if there is one. A decay of 0 is not added, so that a weight that is not finite leaves
 * the moments as they are. */
FORCE_INLINE_TEMPLATE const float *decayed_grad(const LambFloats *f, const int x_type, int n, const float *g,
                                                const void *x, float *buffer) {
    if (f->l2 == 0) return g;
    for (int i = 0; i < n; i++) buffer[i] = FMA(f->l2, load_element(x_type, x, i), f->grad_scale * g[i]);
    return buffer;
}

static inline float moved(const LambFloats f, float step, float x, float u) {
    return FMA(-step, u, f.decay * x); /* LAMB-x */
}

#endif
