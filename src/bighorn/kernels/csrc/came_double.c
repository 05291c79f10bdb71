/* The schedule of a CAME step of float64 weights. */
#define DOUBLE
#include "came.c"
