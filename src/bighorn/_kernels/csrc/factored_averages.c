/* The running averages of rows and columns: the accumulation of sums, the update of the averages once these are
 * complete, and the factors of u that the averages give. Compiled once per instruction set. */
#include "factored_averages.h"

#include <math.h>

/* ---- averages -------------------------------------------------------------------------------------------- */

/* Updates the averages of `n` lines from `first` on with their sums. */
static void update_averages(const FactoredLines *lines, int64_t first, int n, const double *restrict sums) {
    if (!lines->values) return;
    const double old = lines->old, scale = lines->scale, shift = lines->shift;
    float *restrict values = lines->values + first;
#pragma omp simd
    for (int i = 0; i < n; i++) /* CAME-row, CAME-col, CAME-res */
        values[i] = (float)((old ? old * values[i] : 0) + (scale * sums[i] + shift));
}

/* The averages of columns have the same mean, and in a narrow matrix there are fewer of them. */
double factored_row_mean(const FactoredJob *job, const FactoredAverage *average, int64_t matrix) {
    const FactoredGrid *g = &job->grid;
    if (!average->row.values || !average->col.values) return ROOT_SCALE * ROOT_SCALE;
    if (average->means) return average->means[matrix];
    const int by_columns = g->kind == SHORT_ROWS;
    const float *values = by_columns ? average->col.values : average->row.values;
    const int64_t count = by_columns ? g->width : g->height;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = matrix * count; i < (matrix + 1) * count; i++) sum += values[i];
    return sum / (double)count;
}

static void clear(float *values, int64_t n) { memset(values, 0, (size_t)n * sizeof(float)); }

void factored_begin_tile(const FactoredJob *job, const FactoredTile *t, FactoredTileSums *s) {
    s->row = s->lines = 0;
    switch (job->grid.kind) {
        case LONG_ROWS:
            memset(s->rows, 0, (size_t)t->rows * sizeof(double));
            clear(s->elements, t->columns);
            if (job->grid.update_sum == SUM_OF_COLUMNS) clear(s->ratios, t->columns);
            break;
        case SHORT_ROWS:
            clear(s->elements, PIECE_ELEMS);
            clear(s->pieces, PIECE_ELEMS);
            clear(s->ratios, PIECE_ELEMS);
            break;
        case WHOLE_MATRICES:
            clear(s->elements, PIECE_ELEMS);
            memset(s->columns, 0, (size_t)(t->matrices * t->columns) * sizeof(double));
            break;
    }
}

/* Rows within the tile update their averages; partial sums of other rows are kept for `finish_rows`. */
void factored_flush_rows(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                         FactoredTileSums *s) {
    const FactoredGrid *g = &job->grid;
    const int64_t first = t->matrix * g->height + t->row + s->row;
    if (g->tiles_across == 1) {
        update_averages(&average->row, first, s->lines, s->rows);
    } else {
        float *out = job->row_sums + t->across * g->matrices * g->height + first;
        for (int i = 0; i < s->lines; i++) out[i] = (float)s->rows[i];
    }
    memset(s->rows, 0, (size_t)s->lines * sizeof(double));
    s->row += s->lines;
    s->lines = 0;
}

/* Updates the averages of columns [first, first + n) of a matrix from the sums of its tiles, which are `stride` apart;
 * returns the sum of u^2 in these columns. */
static double update_columns(const FactoredJob *job, const FactoredAverage *average, int64_t matrix, int64_t first,
                             int n, int64_t tiles, int64_t stride, const float *elements, const float *ratios) {
    const FactoredGrid *g = &job->grid;
    double sums[SUMMED_COLUMNS] = {0}, sums_of_ratios[SUMMED_COLUMNS] = {0}, total = 0;
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int i = 0; i < n; i++) sums[i] += elements[tile * stride + i];
    update_averages(&average->col, matrix * g->width + first, n, sums);
    if (g->update_sum != SUM_OF_COLUMNS || average != &job->square) return 0;
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int i = 0; i < n; i++) sums_of_ratios[i] += ratios[tile * stride + i];
    if (is_split(job->shard)) {
        update_averages(&job->ratio.col, matrix * g->width + first, n, sums_of_ratios);
        return 0;
    }
    const float *restrict col = average->col.values + matrix * g->width + first;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < n; i++) total += sums_of_ratios[i] / col[i];
    return total * factored_row_mean(job, average, matrix) / (ROOT_SCALE * ROOT_SCALE);
}

/* Computes the sums of rows and columns of `matrices` of height x width, one after the other. */
FORCE_INLINE_TEMPLATE void fold(int matrices, const int height, const int width, const float *restrict values,
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

/* The usual widths of tall matrices, and 1, to which sums of pairs lead, get specialized loops. */
#define FOR_WIDTH(function, height, width, ...)                   \
    do {                                                          \
        switch (width) {                                          \
            case 1: function(height, 1, __VA_ARGS__); break;      \
            case 2: function(height, 2, __VA_ARGS__); break;      \
            case 3: function(height, 3, __VA_ARGS__); break;      \
            case 4: function(height, 4, __VA_ARGS__); break;      \
            case 6: function(height, 6, __VA_ARGS__); break;      \
            case 8: function(height, 8, __VA_ARGS__); break;      \
            case 9: function(height, 9, __VA_ARGS__); break;      \
            case 12: function(height, 12, __VA_ARGS__); break;    \
            case 16: function(height, 16, __VA_ARGS__); break;    \
            default: function(height, (int)(width), __VA_ARGS__); \
        }                                                         \
    } while (0)

FORCE_INLINE_TEMPLATE void add_rows(int height, const int width, const float *restrict values, double *restrict rows) {
#pragma omp simd
    for (int i = 0; i < height; i++) {
        float sum = values[i * width];
        for (int j = 1; j < width; j++) sum += values[i * width + j];
        rows[i] = sum;
    }
}

/* Computes the sums of the rows of a narrow matrix; the values are at most a piece. Neighbours are added as long as a
 * row has pairs of them, since the sums of short rows one after the other would wait for each addition. */
static void fold_rows(int height, int width, const float *values, double *restrict rows) {
    float halves[2][PIECE_ELEMS / 2];
    for (int k = 0; width % 2 == 0; k = !k) {
        const float *restrict pairs = values;
        float *restrict sums = halves[k];
        width /= 2;
#pragma omp simd
        for (int i = 0; i < height * width; i++) sums[i] = pairs[2 * i] + pairs[2 * i + 1];
        values = sums;
    }
    FOR_WIDTH(add_rows, height, width, values, rows);
}

/* Adds q / row of a narrow matrix, for each element. */
FORCE_INLINE_TEMPLATE void add_ratios(int height, const int width, const float *restrict values,
                                      const float *restrict row, float *restrict ratios) {
    float r[PIECE_ELEMS];
    for (int i = 0; i < height; i++) r[i] = (float)ROOT_SCALE / sqrtf(row[i]);
    for (int i = 0; i < height; i++)
#pragma omp simd
        for (int j = 0; j < width; j++) ratios[i * width + j] += values[i * width + j] * r[i] * r[i];
}

/* Computes out = r c. Infinity is clamped, since 0 times infinity would be NaN. */
FORCE_INLINE_TEMPLATE void expand_rows(int height, const int width, const float *restrict r, const float *restrict c,
                                       float *restrict out) {
    for (int i = 0; i < height; i++)
#pragma omp simd
        for (int j = 0; j < width; j++) {
            float product = r[i] * c[j];
            out[i * width + j] = product > FLT_MAX ? FLT_MAX : product;
        }
}

/* The same for `matrices` one after the other. */
FORCE_INLINE_TEMPLATE void expand(int matrices, const int height, const int width, const float *restrict r,
                                  const float *restrict c, float *restrict out) {
    for (int k = 0; k < matrices; k++)
        expand_rows(height, width, r + k * height, c + k * width, out + k * height * width);
}

/* Computes for each row the root of the mean of its matrix. */
FORCE_INLINE_TEMPLATE void spread_means(int matrices, const int height, const int width, const float *restrict row,
                                        float *restrict root_means) {
    (void)width;
    for (int k = 0; k < matrices; k++) {
        double mean = 0;
        for (int i = 0; i < height; i++) mean += row[k * height + i];
        const float root = (float)sqrt(mean / height);
        for (int i = 0; i < height; i++) root_means[k * height + i] = root;
    }
}

/* The common sizes of convolution kernels get specialized loops. */
#define FOR_SHAPE(function, matrices, height, width, ...)                    \
    ((height) == 1 && (width) == 1   ? function(matrices, 1, 1, __VA_ARGS__) \
     : (height) == 3 && (width) == 3 ? function(matrices, 3, 3, __VA_ARGS__) \
                                     : function(matrices, (int)(height), (int)(width), __VA_ARGS__))

static void add_long_rows(const FactoredPiece *piece, const float *row_sums, FactoredTileSums *s) {
    for (int k = 0; k < piece->count; k++) s->rows[piece->row + k * piece->apart] += row_sums[k];
}

/* The sums of columns grow for each element of the piece, since adding up short columns takes longer. */
static void add_short_rows(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                           const FactoredPiece *piece, FactoredTileSums *s) {
    const FactoredGrid *g = &job->grid;
    const int64_t first = t->matrix * g->height + t->row + s->row;
    float *restrict elements = s->elements, *restrict sums = s->pieces;
    fold_rows(piece->lines, (int)g->width, elements, s->rows);
    s->lines = piece->lines;
    factored_flush_rows(job, average, t, s);
    if (g->update_sum == SUM_OF_COLUMNS && average == &job->square)
        FOR_WIDTH(add_ratios, piece->lines, g->width, elements, average->row.values + first, s->ratios);
#pragma omp simd
    for (int i = 0; i < piece->n; i++) sums[i] += elements[i], elements[i] = 0;
}

static void add_matrices(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                         const FactoredPiece *piece, FactoredTileSums *s) {
    const FactoredGrid *g = &job->grid;
    s->lines = piece->lines;
    FOR_SHAPE(fold, (int)t->matrices, g->height, g->width, s->elements, s->rows, s->columns);
    clear(s->elements, piece->n);
    factored_flush_rows(job, average, t, s);
}

/* Adds the sums of a piece that was added to `elements`; `row_sums` are the sums of its rows. */
void factored_add_piece(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                        const FactoredPiece *piece, const float *row_sums, FactoredTileSums *s) {
    switch (job->grid.kind) {
        case LONG_ROWS: add_long_rows(piece, row_sums, s); break;
        case SHORT_ROWS: add_short_rows(job, average, t, piece, s); break;
        case WHOLE_MATRICES: add_matrices(job, average, t, piece, s); break;
    }
}

/* Adds up the rows of the sums of all pieces, halves at a time, into the first row. */
static void fold_columns(int width, float *sums) {
    for (int height = PIECE_ELEMS / width; height > 1; height -= height / 2) {
        float *restrict first = sums;
        const float *restrict second = sums + (height - height / 2) * width;
#pragma omp simd
        for (int i = 0; i < height / 2 * width; i++) first[i] += second[i];
    }
}

/* Updates the averages of columns, or stores their sums if they extend over several tiles; returns the sum of u^2, if
 * it is known. */
static double end_columns(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                          const float *sums, const float *ratios) {
    const FactoredGrid *g = &job->grid;
    double total = 0;
    if (g->tiles_down > 1) {
        const int64_t to = (t->down * g->matrices + t->matrix) * g->width + t->column;
        memcpy(job->col_sums + to, sums, (size_t)t->columns * sizeof(float));
        if (g->update_sum == SUM_OF_COLUMNS) memcpy(job->ratio_sums + to, ratios, (size_t)t->columns * sizeof(float));
        return 0;
    }
    for (int64_t i = 0; i < t->columns; i += SUMMED_COLUMNS) {
        int n = (int)(t->columns - i < SUMMED_COLUMNS ? t->columns - i : SUMMED_COLUMNS);
        total += update_columns(job, average, t->matrix, t->column + i, n, 1, 0, sums + i, ratios + i);
    }
    return total;
}

/* Stores the remaining sums of a tile; returns the sum of u^2, if it is known. */
double factored_end_tile(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                         FactoredTileSums *s) {
    if (s->row < t->rows) {
        s->lines = (int)(t->rows - s->row);
        factored_flush_rows(job, average, t, s);
    }
    switch (job->grid.kind) {
        case SHORT_ROWS:
            fold_columns((int)t->columns, s->pieces);
            fold_columns((int)t->columns, s->ratios);
            return end_columns(job, average, t, s->pieces, s->ratios);
        case WHOLE_MATRICES:
            update_averages(&average->col, t->matrix * job->grid.width, (int)(t->matrices * t->columns), s->columns);
            return 0;
        default: return end_columns(job, average, t, s->elements, s->ratios);
    }
}

/* Adds up the sums of rows in all tiles across a matrix. */
static void add_tiles_across(const FactoredGrid *g, const float *partial, int n, double *restrict sums) {
    for (int i = 0; i < n; i++) sums[i] = 0;
    for (int64_t across = 0; across < g->tiles_across; across++)
        for (int i = 0; i < n; i++) sums[i] += partial[across * g->matrices * g->height + i];
}

double factored_finish_rows(const FactoredJob *job, const FactoredAverage *average, int64_t matrix, int64_t down) {
    const FactoredGrid *g = &job->grid;
    const int64_t from = share_of(g->height, down, g->tiles_down), to = share_of(g->height, down + 1, g->tiles_down);
    const int has_ratios = g->update_sum == SUM_OF_ROWS && average == &job->square;
    double sums[PIECE_ELEMS], total = 0;
    for (int64_t row = from; row < to; row += PIECE_ELEMS) {
        int n = (int)(to - row < PIECE_ELEMS ? to - row : PIECE_ELEMS);
        int64_t first = matrix * g->height + row;
        add_tiles_across(g, job->row_sums + first, n, sums);
        update_averages(&average->row, first, n, sums);
        if (!has_ratios) continue;
        add_tiles_across(g, job->ratio_sums + first, n, sums);
        for (int i = 0; i < n; i++) total += sums[i] / average->row.values[first + i];
    }
    return has_ratios ? total * factored_row_mean(job, average, matrix) / (ROOT_SCALE * ROOT_SCALE) : 0;
}

double factored_finish_columns(const FactoredJob *job, const FactoredAverage *average, int64_t matrix, int64_t group) {
    const FactoredGrid *g = &job->grid;
    const int64_t first = group * SUMMED_COLUMNS, at = matrix * g->width + first;
    const int n = (int)(g->width - first < SUMMED_COLUMNS ? g->width - first : SUMMED_COLUMNS);
    return update_columns(job, average, matrix, first, n, g->tiles_down, g->matrices * g->width, job->col_sums + at,
                          job->ratio_sums + at);
}

/* ---- factors --------------------------------------------------------------------------------------------- */

/* The factors of columns from `first` on; 1 if `columns` is NULL. */
static void column_factors(const float *restrict columns, int64_t first, int n, float *restrict out) {
    for (int i = 0; i < n; i++) out[i] = columns ? column_factor(columns[first + i]) : 1;
}

void factored_set_columns(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                          FactoredColumns *columns) {
    const FactoredGrid *g = &job->grid;
    if (g->kind == WHOLE_MATRICES || (columns->matrix == t->matrix && columns->across == t->across)) return;
    if (columns->matrix != t->matrix) columns->root_mean = (float)sqrt(factored_row_mean(job, average, t->matrix));
    columns->matrix = t->matrix;
    columns->across = t->across;
    column_factors(average->col.values, t->matrix * g->width + t->column, (int)t->columns, columns->factor);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < t->columns; i++) sum += columns->factor[i];
    columns->sum = sum;
}

void factored_set_factors(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                          const FactoredPiece *piece, const FactoredColumns *columns, PieceFactors *f) {
    const FactoredGrid *g = &job->grid;
    const float *rows = average->row.values;
    const int64_t first = t->matrix * g->height + t->row + piece->row;
    if (g->kind == LONG_ROWS) {
        f->c = columns->factor + piece->column, f->sum = piece->column == 0 ? columns->sum : 0;
        for (int k = 0; k < piece->count; k++) f->r[k] = row_factor(columns->root_mean, rows, first + k * piece->apart);
        return;
    }
    float r[PIECE_ELEMS], c[PIECE_ELEMS];
    if (g->kind == SHORT_ROWS) {
        float sum = 0;
        for (int i = 0; i < piece->lines; i++) r[i] = row_factor(columns->root_mean, rows, first + i);
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < piece->lines; i++) sum += r[i];
        FOR_WIDTH(expand_rows, piece->lines, g->width, r, columns->factor, f->buffer);
        f->c = f->buffer, f->r[0] = 1, f->sum = sum * columns->sum;
        return;
    }
    float root_means[PIECE_ELEMS];
    column_factors(average->col.values, t->matrix * g->width, (int)(t->matrices * g->width), c);
    if (is_split(job->shard))
        for (int i = 0; i < piece->lines; i++)
            root_means[i] = (float)sqrt(factored_row_mean(job, average, t->matrix + i / g->height));
    else FOR_SHAPE(spread_means, (int)t->matrices, g->height, g->width, rows + first, root_means);
    for (int i = 0; i < piece->lines; i++) r[i] = row_factor(root_means[i], rows, first + i);
    FOR_SHAPE(expand, (int)t->matrices, g->height, g->width, r, c, f->buffer);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < piece->n; i++) sum += f->buffer[i];
    f->c = f->buffer, f->r[0] = 1, f->sum = sum;
}
