/* Factored averages on shards of float64 weights. */
#define DOUBLE
#include "factored_shards.c"
