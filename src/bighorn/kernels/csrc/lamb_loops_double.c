/* The arithmetic of a LAMB step in float64. */
#define DOUBLE
#include "lamb_loops.c"
