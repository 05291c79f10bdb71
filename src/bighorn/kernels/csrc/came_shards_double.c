/* CAME on shards of float64 weights. */
#define DOUBLE
#include "came_shards.c"
