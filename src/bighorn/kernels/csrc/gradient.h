/* Reads gradients of any floating dtype in any memory order, and scales and centres them if required. */
#ifndef BIGHORN_GRADIENT_H
#define BIGHORN_GRADIENT_H

#include "strided.h"

static inline int64_t elements_of(const Gradient *gradients, int64_t rows) {
    int64_t elements = 0;
    for (int64_t row = 0; row < rows; row++) elements += gradients[row].size;
    return elements;
}

NO_INLINE const real *gather_grad(const Gradient *gradient, const void *data, int64_t start, int n, real *buffer) {
    _Alignas(8) char copies[PIECE_ELEMS * (REAL_TYPE == FLOAT64 ? 4 : 8)]; /* of any other dtype */
    const int type = gradient->type;
    void *copy = type == REAL_TYPE ? (void *)buffer : copies;
    strided_copy(gradient->layout, (void *)data, type, start, n, copy, STRIDED_GATHER);
    if (type != REAL_TYPE) widen(copy, type, 0, n, buffer);
    return buffer;
}

/* Returns elements [start, start + n) in the order of the state, in the type of the arithmetic, whatever their order in
 * memory. */
static inline const real *read_grad(const Gradient *gradient, const void *data, int64_t start, int n,
                                    real *restrict buffer) {
    const void *elements = consecutive(gradient->layout, data, gradient->type, start, n);
    return elements ? widen(elements, gradient->type, 0, n, buffer) : gather_grad(gradient, data, start, n, buffer);
}

enum { SHORT_ROW_ELEMS = 64 }; /* at most in rows whose elements are added up in order */

FORCE_INLINE_TEMPLATE double short_sum(const int64_t size, const real *g) {
    double sum = 0;
    for (int64_t i = 0; i < size; i++) sum += g[i];
    return sum;
}

/* Returns the sum of elements [start, start + size). */
static inline double grad_sum(const Gradient *gradient, const void *data, int64_t start, int64_t size) {
    real buffer[PIECE_ELEMS];
    double total = 0;
    if (size <= SHORT_ROW_ELEMS) return short_sum(size, read_grad(gradient, data, start, (int)size, buffer));
    for (int64_t done = 0; done < size; done += PIECE_ELEMS) {
        int n = (int)(size - done < PIECE_ELEMS ? size - done : PIECE_ELEMS);
        const real *restrict g = read_grad(gradient, data, start + done, n, buffer);
        double piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int i = 0; i < n; i++) piece += g[i];
        total += piece;
    }
    return total;
}

/* The mean that was computed last, since several pieces can need the same one; `row` is -1 at the start. */
typedef struct {
    int64_t row;
    real value;
} GradientMean;

static inline real row_mean(const Gradient *gradient, const void *data, int64_t row, GradientMean *last) {
    const int64_t fan = gradient->fan;
    if (gradient->means) return (real)gradient->means[row];
    if (last->row != row) *last = (GradientMean){row, (real)(grad_sum(gradient, data, row * fan, fan) / (double)fan)};
    return last->value;
}

/* Computes g - mean(g) for short rows, one after the other. */
FORCE_INLINE_TEMPLATE void centre_rows(int64_t rows, const int64_t fan, const real *g, real *out) {
    for (int64_t row = 0; row < rows; row++, g += fan, out += fan) {
        const real mean = (real)(short_sum(fan, g) / (double)fan);
        for (int64_t i = 0; i < fan; i++) out[i] = g[i] - mean;
    }
}

static inline void centre_short_rows(int64_t rows, int64_t fan, const real *g, real *out) {
    switch (fan) { /* the usual lengths get specialized loops */
        case 1: centre_rows(rows, 1, g, out); break;
        case 2: centre_rows(rows, 2, g, out); break;
        case 3: centre_rows(rows, 3, g, out); break;
        case 4: centre_rows(rows, 4, g, out); break;
        case 9: centre_rows(rows, 9, g, out); break;
        default: centre_rows(rows, fan, g, out); break;
    }
}

/* Computes g - mean(g over dims 1..) for elements [start, start + n). */
static inline void centre(const Gradient *gradient, const void *data, int64_t start, int n, const real *g, real *out,
                          GradientMean *last) {
    const int64_t fan = gradient->fan;
    int64_t row = start / fan, next = (row + 1) * fan - start; /* the end of the row, counted from `start` */
    for (int64_t i = 0; i < n; row++, next += fan) {
        const int64_t rows = next - i == fan && !gradient->means && fan <= SHORT_ROW_ELEMS ? (n - i) / fan : 0;
        if (rows) {
            centre_short_rows(rows, fan, g + i, out + i);
            i += rows * fan, row += rows - 1, next += (rows - 1) * fan;
            continue;
        }
        const real mean = row_mean(gradient, data, row, last);
        for (const int64_t end = next < n ? next : n; i < end; i++) out[i] = g[i] - mean;
    }
}

/* Whether elements can be used in place, apart from their dtype. */
static inline int is_plain(const Gradient *gradient) { return !gradient->fan && !gradient->layout; }

/* Returns elements [start, start + n), centred, in the type of the arithmetic. */
static inline const real *centred_grad(const Gradient *gradient, const void *data, int64_t start, int n, real *buffer,
                                       GradientMean *last) {
    const real *g = read_grad(gradient, data, start, n, buffer);
    if (!gradient->fan) return g;
    centre(gradient, data, start, n, g, buffer, last);
    return buffer;
}

/* Returns elements [start, start + n), centred and scaled, in the type of the arithmetic. */
static inline const real *load_grad(const Gradient *gradient, const void *data, real scale, int64_t start, int n,
                                    real *buffer, GradientMean *last) {
    const real *g = centred_grad(gradient, data, start, n, buffer, last);
    if (scale == 1) return g;
    for (int i = 0; i < n; i++) buffer[i] = scale * g[i];
    return buffer;
}

#endif
