/* The arithmetic of a CAME step in float64. */
#define DOUBLE
#include "came_loops.c"
