#include "square_sum.h"

/* Returns the sum of the squares of elements [start, start + size), not scaled. */
static double square_sum(const Gradient *gradient, const void *data, int64_t start, int64_t size) {
    float buffer[PIECE_ELEMS];
    double total = 0;
    for (int64_t done = 0; done < size; done += PIECE_ELEMS) {
        int n = (int)(size - done < PIECE_ELEMS ? size - done : PIECE_ELEMS);
        const float *restrict g = read_grad(gradient, data, start + done, n, buffer);
        double piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int i = 0; i < n; i++) piece += (double)g[i] * g[i];
        total += piece;
    }
    return total;
}

const SquareSumLoops PER_ISA(square_sum_loops) = {.square_sum = square_sum};
