/* The interface between square_sum.c (threads) and square_sum_loops.c (arithmetic, once per instruction set). */
#ifndef BIGHORN_SQUARE_SUM_H
#define BIGHORN_SQUARE_SUM_H

#include "gradient.h"

typedef struct {
    double (*square_sum)(const Gradient *gradient, const void *data, int64_t start, int64_t size);
} SquareSumLoops;

#endif
