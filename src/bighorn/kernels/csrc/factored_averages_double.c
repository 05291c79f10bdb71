/* The running averages of rows and columns in float64. */
#define DOUBLE
#include "factored_averages.c"
