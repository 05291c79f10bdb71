/* The schedule of a factored optimizer's step of float64 weights. */
#define DOUBLE
#include "factored.c"
