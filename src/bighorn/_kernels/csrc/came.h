/* The interface between came.c (schedule) and came_loops.c (arithmetic, once per instruction set). Symbols follow
 * arXiv:2307.02047v2, Algorithm 2. */
#ifndef BIGHORN_CAME_H
#define BIGHORN_CAME_H

#include "factored_job.h"

/* CAME's additions to a FactoredJob. */
typedef struct {
    float beta1, beta1_rest; /* m <- beta1 m + beta1_rest u */
    float clip;              /* the factor of u */
    float step, decay;       /* x <- decay x - step m / sqrt(S) */
    uint32_t rng_key;        /* the key of the random bits */
    uint32_t dither;         /* the dither phase */
    FactoredAverage residual;
} CameFactors;

typedef struct {
    /* Updates m, and the residuals' averages or partial sums. */
    void (*momentum)(const FactoredJob *job, const CameFactors *f, int64_t tile, FactoredColumns *columns);
    /* Returns the sum of the confidence. */
    double (*confidence)(const FactoredJob *job, const CameFactors *f, int64_t tile, FactoredColumns *columns);
    /* Updates x; returns the sum of the confidence. */
    double (*apply)(const FactoredJob *job, const CameFactors *f, int64_t tile, FactoredColumns *columns);
    /* Updates m and x, if the second moment is not factored. */
    void (*momentum_and_apply)(const FactoredJob *job, const CameFactors *f, int64_t tile);
} CameLoops;

#endif
