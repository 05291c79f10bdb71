/* The arithmetic of a factored second moment in float64. */
#define DOUBLE
#include "factored_loops.c"
