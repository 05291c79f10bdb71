/* The seam between driver.c (threads, schedule, trust ratio) and loops.c (arithmetic, once per instruction set),
 * and the C ABI that kernels/cpu mirrors with ctypes. Symbols are those of arXiv:1904.00962v5, Algorithm 2. */
#ifndef BIGHORN_LAMB_H
#define BIGHORN_LAMB_H

#include <stdint.h>

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 }; /* float64: gradients only */
enum SecondMoment { ADAM = 0, AMSGRAD = 1, ADAGRAD = 2 };
enum BiasCorrection { NONE = 0, MOMENTS = 1, LEARNING_RATE = 2 };
enum DecayMode { RATIO = 0, DECOUPLED = 1, L2 = 2 };

/* Sums are formed per block and added in block order, so that no result depends on the number of threads. */
enum { BLOCK = 8192 };

/* What the tensors of one bucket share. Bounds are [0, infinity] where nothing is bounded. */
typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double weight_norm_bounds[2], trust_ratio_bounds[2];
    int32_t adapt, bias_correction, grad_averaging, decay_mode, second_moment, maximize;
} Options;

/* One tensor (or one slice of a stacked one), dense in memory, its state in the same order. */
typedef struct {
    void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
    const float *step;          /* steps taken so far */
    float *norms;               /* out: weight norm, update norm, trust ratio */
    const int64_t *grad_layout; /* NULL: the parameter's. Else: dims, sizes, strides; in the parameter's order, */
                                /* outermost dimension first */
    int64_t size;
    int64_t fan; /* consecutive gradient elements that are centred on their mean; 0: none are */
    int32_t param_type, grad_type, state_type, options;
} Row;

/* How to run: the instruction set, and the OpenMP runtime that the process already has. */
typedef struct {
    void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
    int (*thread_num)(void);
    int (*num_threads)(void);
    int32_t threads, isa;
} Run;

/* One tensor's step as plain float32 factors. */
typedef struct {
    float grad_scale, l2;                /* g <- grad_scale * g + l2 * x */
    float beta1, beta3, beta2, beta4;    /* m <- beta1 m + beta3 g;  v <- beta2 v + beta4 g^2 */
    float correction, eps, weight_decay; /* u = correction * m / (sqrt(v) + eps) + weight_decay * x */
    float decay;                         /* x <- decay * x - step * u */
} Factors;

typedef struct {
    double weight, update; /* sums of squares of x and u */
} Sums;

/* A block: elements [start, start + size) of a row. */
typedef struct {
    const Row *row;
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
    double (*square_sum)(const Block *block); /* of the gradient */
} Loops;

#endif
