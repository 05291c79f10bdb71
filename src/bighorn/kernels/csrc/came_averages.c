/* The running averages of rows and columns in a CAME step: the accumulation of sums, the update of the averages once
 * these are complete, and the factors of u that the averages give. Compiled once per instruction set. */
#include "came_averages.h"

#include "came_shards.h"

#include <math.h>

/* ---- averages -------------------------------------------------------------------------------------------- */

/* Updates the averages of `n` lines from `first` on with their sums. */
static void update_averages(const CameLines *lines, int64_t first, int n, const double *restrict sums) {
    if (!lines->values) return;
    const double old = lines->old, scale = lines->scale, shift = lines->shift;
    real *restrict values = lines->values + first;
#pragma omp simd
    for (int i = 0; i < n; i++) /* CAME-row, CAME-col, CAME-res */
        values[i] = (real)((old ? old * values[i] : 0) + (scale * sums[i] + shift));
}

/* Returns the mean of a matrix's row averages; if only rows or only columns have averages, the square of ROOT_SCALE. */
double came_row_mean(const CameJob *job, const CameAverage *average, int64_t matrix) {
    const int64_t height = job->grid.height;
    const real *row = average->row.values;
    if (!row || !average->col.values) return ROOT_SCALE * ROOT_SCALE;
    if (average->means) return average->means[matrix];
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = matrix * height; i < (matrix + 1) * height; i++) sum += row[i];
    return sum / (double)height;
}

void came_begin_tile(const CameJob *job, const CameTile *t, CameTileSums *s) {
    const CameGrid *g = &job->grid;
    s->row = s->lines = 0;
    if (!is_narrow(g)) memset(s->rows, 0, (size_t)t->rows * sizeof(double));
    memset(s->elements, 0, (size_t)(is_narrow(g) ? PIECE_ELEMS : t->columns) * sizeof(real));
    memset(s->ratios, 0, (size_t)(g->read_once ? t->columns : 0) * sizeof(real));
    if (is_narrow(g)) memset(s->columns, 0, (size_t)(t->matrices * t->columns) * sizeof(double));
}

/* Rows within the tile update their averages; partial sums of other rows are kept for `finish_rows`. */
void came_flush_rows(const CameJob *job, const CameAverage *average, const CameTile *t, CameTileSums *s) {
    const CameGrid *g = &job->grid;
    const int64_t first = t->matrix * g->height + t->row + s->row;
    if (g->strips == 1) {
        update_averages(&average->row, first, s->lines, s->rows);
    } else {
        real *out = job->row_sums + t->strip * g->matrices * g->height + first;
        for (int i = 0; i < s->lines; i++) out[i] = (real)s->rows[i];
    }
    memset(s->rows, 0, (size_t)s->lines * sizeof(double));
    s->row += s->lines;
    s->lines = 0;
}

/* Updates the averages of columns [first, first + n) of a matrix from the sums of its tiles, which are `stride` apart;
 * returns the sum of u^2 in these columns. */
static double update_columns(const CameJob *job, const CameAverage *average, int64_t matrix, int64_t first, int n,
                             int64_t blocks, int64_t stride, const real *elements, const real *ratios) {
    const CameGrid *g = &job->grid;
    double sums[SUMMED_COLUMNS] = {0}, sums_of_ratios[SUMMED_COLUMNS] = {0}, total = 0;
    for (int64_t block = 0; block < blocks; block++)
        for (int i = 0; i < n; i++) sums[i] += elements[block * stride + i];
    update_averages(&average->col, matrix * g->width + first, n, sums);
    if (!g->read_once || average != &job->square) return 0;
    for (int64_t block = 0; block < blocks; block++)
        for (int i = 0; i < n; i++) sums_of_ratios[i] += ratios[block * stride + i];
    if (is_split(job->shard)) {
        update_averages(&job->ratio.col, matrix * g->width + first, n, sums_of_ratios);
        return 0;
    }
    const real *restrict col = average->col.values + matrix * g->width + first;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < n; i++) total += sums_of_ratios[i] / col[i];
    return total * came_row_mean(job, average, matrix) / (ROOT_SCALE * ROOT_SCALE);
}

/* Computes the sums of rows and columns of `matrices` of height x width, one after the other. */
FORCE_INLINE_TEMPLATE void fold(int matrices, const int height, const int width, const real *restrict values,
                                double *restrict rows, double *restrict columns) {
    for (int k = 0; k < matrices; k++)
        for (int i = 0; i < height; i++) {
            double sum = 0;
            for (int j = 0; j < width; j++) {
                double value = values[(k * height + i) * width + j];
                sum += value;
                columns[k * width + j] += value;
            }
            rows[k * height + i] = sum;
        }
}

/* Computes out = r c for `matrices` one after the other. Infinity is clamped, since 0 times infinity would be NaN. */
FORCE_INLINE_TEMPLATE void expand(int matrices, const int height, const int width, const real *restrict r,
                                  const real *restrict c, real *restrict out) {
    for (int k = 0; k < matrices; k++)
        for (int i = 0; i < height; i++)
            for (int j = 0; j < width; j++) {
                real product = r[k * height + i] * c[k * width + j];
                out[(k * height + i) * width + j] = product > REAL_MAX ? REAL_MAX : product;
            }
}

/* Computes for each row the mean of its matrix. */
FORCE_INLINE_TEMPLATE void spread_means(int matrices, const int height, const int width, const real *restrict row,
                                        double *restrict means) {
    (void)width;
    for (int k = 0; k < matrices; k++) {
        double mean = 0;
        for (int i = 0; i < height; i++) mean += row[k * height + i];
        mean /= height;
        for (int i = 0; i < height; i++) means[k * height + i] = mean;
    }
}

/* The common sizes of convolution kernels get specialized loops. */
#define FOR_SHAPE(function, matrices, height, width, ...)                    \
    ((height) == 1 && (width) == 1   ? function(matrices, 1, 1, __VA_ARGS__) \
     : (height) == 3 && (width) == 3 ? function(matrices, 3, 3, __VA_ARGS__) \
                                     : function(matrices, (int)(height), (int)(width), __VA_ARGS__))

/* Adds the sums of a span that was added to `elements`; `row_sums` are the sums of its rows. */
void came_add_span(const CameJob *job, const CameAverage *average, const CameTile *t, const CameSpan *span,
                   const real *row_sums, CameTileSums *s) {
    const CameGrid *g = &job->grid;
    if (!is_narrow(g)) {
        for (int k = 0; k < span->count; k++) s->rows[span->row + k * span->apart] += row_sums[k];
        return;
    }
    s->lines = span->lines;
    if (g->whole) {
        FOR_SHAPE(fold, (int)t->matrices, g->height, g->width, s->elements, s->rows, s->columns);
    } else { /* first added up over the span, since a sum of fewer terms is rounded less */
        double columns[NARROW_COLUMNS] = {0};
        FOR_SHAPE(fold, 1, span->lines, g->width, s->elements, s->rows, columns);
        for (int64_t i = 0; i < g->width; i++) s->columns[i] += columns[i];
    }
    memset(s->elements, 0, (size_t)span->n * sizeof(real));
    came_flush_rows(job, average, t, s);
}

/* Stores the remaining sums of a tile; returns the sum of u^2, if it is known. */
double came_end_tile(const CameJob *job, const CameAverage *average, const CameTile *t, CameTileSums *s) {
    const CameGrid *g = &job->grid;
    double total = 0;
    if (s->row < t->rows) {
        s->lines = (int)(t->rows - s->row);
        came_flush_rows(job, average, t, s);
    }
    if (is_narrow(g)) {
        const int n = (int)(t->matrices * t->columns);
        const int64_t first = t->matrix * g->width + t->column;
        if (g->blocks == 1) {
            update_averages(&average->col, first, n, s->columns);
        } else {
            real *out = job->col_sums + t->block * g->matrices * g->width + first;
            for (int i = 0; i < n; i++) out[i] = (real)s->columns[i];
        }
    } else if (g->blocks == 1) {
        for (int64_t i = 0; i < t->columns; i += SUMMED_COLUMNS) {
            int n = (int)(t->columns - i < SUMMED_COLUMNS ? t->columns - i : SUMMED_COLUMNS);
            total += update_columns(job, average, t->matrix, t->column + i, n, 1, 0, s->elements + i, s->ratios + i);
        }
    } else {
        const int64_t to = (t->block * g->matrices + t->matrix) * g->width + t->column;
        memcpy(job->col_sums + to, s->elements, (size_t)t->columns * sizeof(real));
        if (g->read_once) memcpy(job->ratio_sums + to, s->ratios, (size_t)t->columns * sizeof(real));
    }
    return total;
}

void came_finish_rows(const CameJob *job, const CameAverage *average, int64_t matrix, int64_t block) {
    const CameGrid *g = &job->grid;
    const int64_t from = share_of(g->height, block, g->blocks), to = share_of(g->height, block + 1, g->blocks);
    double sums[PIECE_ELEMS];
    for (int64_t row = from; row < to; row += PIECE_ELEMS) {
        int n = (int)(to - row < PIECE_ELEMS ? to - row : PIECE_ELEMS);
        int64_t first = matrix * g->height + row;
        for (int i = 0; i < n; i++) sums[i] = 0;
        for (int64_t strip = 0; strip < g->strips; strip++)
            for (int i = 0; i < n; i++) sums[i] += job->row_sums[strip * g->matrices * g->height + first + i];
        update_averages(&average->row, first, n, sums);
    }
}

double came_finish_columns(const CameJob *job, const CameAverage *average, int64_t matrix, int64_t piece) {
    const CameGrid *g = &job->grid;
    const int64_t first = piece * SUMMED_COLUMNS, at = matrix * g->width + first;
    const int n = (int)(g->width - first < SUMMED_COLUMNS ? g->width - first : SUMMED_COLUMNS);
    return update_columns(job, average, matrix, first, n, g->blocks, g->matrices * g->width, job->col_sums + at,
                          job->ratio_sums + at);
}

/* ---- factors --------------------------------------------------------------------------------------------- */

/* The factors of columns from `first` on; 1 if `columns` is NULL. */
static void column_factors(const real *restrict columns, int64_t first, int n, real *restrict out) {
    for (int i = 0; i < n; i++) out[i] = columns ? column_factor(columns[first + i]) : 1;
}

void came_set_columns(const CameJob *job, const CameAverage *average, const CameTile *t, CameColumns *columns) {
    const CameGrid *g = &job->grid;
    if (g->whole || (columns->matrix == t->matrix && columns->strip == t->strip)) return;
    if (columns->matrix != t->matrix) columns->row_mean = came_row_mean(job, average, t->matrix);
    columns->matrix = t->matrix;
    columns->strip = t->strip;
    column_factors(average->col.values, t->matrix * g->width + t->column, (int)t->columns, columns->factor);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < t->columns; i++) sum += columns->factor[i];
    columns->sum = sum;
}

void came_set_factors(const CameJob *job, const CameAverage *average, const CameTile *t, const CameSpan *span,
                      const CameColumns *columns, CameFactors *f) {
    const CameGrid *g = &job->grid;
    const real *rows = average->row.values;
    const int64_t first = t->matrix * g->height + t->row + span->row;
    if (!is_narrow(g)) {
        f->c = columns->factor + span->column, f->sum = span->column == 0 ? columns->sum : 0;
        for (int k = 0; k < span->count; k++) f->r[k] = row_factor(columns->row_mean, rows, first + k * span->apart);
        return;
    }
    real r[PIECE_ELEMS], c[PIECE_ELEMS];
    if (!g->whole) {
        for (int i = 0; i < span->lines; i++) r[i] = row_factor(columns->row_mean, rows, first + i);
        FOR_SHAPE(expand, 1, span->lines, g->width, r, columns->factor, f->buffer);
    } else {
        double means[PIECE_ELEMS];
        column_factors(average->col.values, t->matrix * g->width, (int)(t->matrices * g->width), c);
        if (is_split(job->shard))
            for (int i = 0; i < span->lines; i++) means[i] = came_row_mean(job, average, t->matrix + i / g->height);
        else FOR_SHAPE(spread_means, (int)t->matrices, g->height, g->width, rows + first, means);
        for (int i = 0; i < span->lines; i++) r[i] = row_factor(means[i], rows, first + i);
        FOR_SHAPE(expand, (int)t->matrices, g->height, g->width, r, c, f->buffer);
    }
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < span->n; i++) sum += f->buffer[i];
    f->c = f->buffer, f->r[0] = 1, f->sum = sum;
}
