/* The sum of squares in float64. */
#define DOUBLE
#include "square_sum_loops.c"
