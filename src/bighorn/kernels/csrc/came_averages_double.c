/* The averages of a CAME step in float64. */
#define DOUBLE
#include "came_averages.c"
