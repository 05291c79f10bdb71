/* The arithmetic of a LARS step in float64. */
#define DOUBLE
#include "lars_loops.c"
