/* The seam between lamb.c (schedule, trust ratio) and lamb_loops.c (arithmetic, once per instruction set),
 * and the C ABI that kernels/cpu mirrors with ctypes. Symbols are those of arXiv:1904.00962v5, Algorithm 2. */
#ifndef BIGHORN_LAMB_H
#define BIGHORN_LAMB_H

#include "gradient.h"
#include "rounding.h"
#include "run.h"

enum SecondMoment { ADAM = 0, AMSGRAD = 1, ADAGRAD = 2 };
enum BiasCorrection { NONE = 0, MOMENTS = 1, LEARNING_RATE = 2 };
enum DecayMode { RATIO = 0, DECOUPLED = 1, L2 = 2 };

/* Moments and sums come first, the trust ratio and x second; with both in one call, x finds its data in cache. */
enum Phase { BOTH = 0, FIRST = 1, SECOND = 2 };

/* What the tensors of one bucket share. Bounds are [0, infinity] where nothing is bounded. */
typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double weight_norm_bounds[2], trust_ratio_bounds[2];
    uint64_t rounding_seed;
    int32_t adapt, bias_correction, grad_averaging, decay_mode, second_moment, maximize;
} Options;

/* One tensor (or one slice of a stacked one), dense in memory, its state in the same order. */
typedef struct {
    Weights weights;
    void *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
    const float *step; /* steps taken so far */
    float *norms;      /* out: weight norm, update norm, trust ratio */
    int32_t state_type, options;
} Row;

/* One tensor's step as plain float32 factors. */
typedef struct {
    float grad_scale, l2;                /* g <- grad_scale * g + l2 * x */
    float beta1, beta3, beta2, beta4;    /* m <- beta1 m + beta3 g;  v <- beta2 v + beta4 g^2 */
    float correction, eps, weight_decay; /* u = correction * m / (sqrt(v) + eps) + weight_decay * x */
    float decay;                         /* x <- decay * x - step * u */
    uint32_t draw;                       /* what random bits start from */
} Factors;

typedef struct {
    double weight, update; /* sums of squares of x and u */
} Sums;

/* A block: elements [start, start + size) of a row. */
typedef struct {
    const Row *row;
    const Gradient *gradient;
    const void *grad;
    int64_t start, size;
} Block;

typedef struct {
    /* Moments, then u; u is stored unless `update` is NULL. */
    Sums (*moments)(const Block *block, const Factors *factors, int second_moment, float *update);
    /* x from a stored u, or from u computed again where `update` is NULL. */
    void (*apply)(const Block *block, const Factors *factors, float step, const float *update);
    /* Both in one pass, for a step that is known beforehand. */
    Sums (*moments_and_apply)(const Block *block, const Factors *factors, int second_moment, float step);
} LambLoops;

#endif
