/* The arithmetic of a CAME step. Everything is computed in float32, sums over more than a tile in double.
 *
 * The inner loops go over spans of consecutive elements, and take the factor 1 / sqrt(row col / mean(row)) as r * c[i].
 * In a wide matrix a span lies in one row of a tile: r is the row's, c the columns'. Where rows are short a span is
 * many of them, or many matrices: r is 1, and c is their product, written out. */
#include "came.h"

#include <float.h>
#include <math.h>

enum {
    TOGETHER = 4,       /* rows of a wide matrix */
    IN_CACHE = 1 << 16, /* elements that stay in the second-level cache */
};

/* ---- tiles ----------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t matrix, matrices, block, strip;
    int64_t row, rows, column, columns; /* of the first matrix */
} Tile;

static Tile tile_at(const Grid *g, int64_t index) {
    int64_t group = index / (g->strips * g->blocks), rest = index % (g->strips * g->blocks);
    Tile t = {.matrix = group * g->per_tile, .strip = rest / g->blocks, .block = rest % g->blocks};
    t.matrices = g->matrices - t.matrix < g->per_tile ? g->matrices - t.matrix : g->per_tile;
    t.row = share(g->height, t.block, g->blocks);
    t.rows = share(g->height, t.block + 1, g->blocks) - t.row;
    t.column = t.strip * PIECE;
    t.columns = g->strips == 1 ? g->width : g->width - t.column < PIECE ? g->width - t.column : PIECE;
    return t;
}

/* Consecutive elements of a tile, a piece at most: `lines` rows from `row` on, or a part of one. Rows of a wide matrix
 * are taken together from all quarters of a tile: memory serves long streams faster than short ones, and column sums are
 * read and written less often. They are an odd number of rows apart, since a cache confuses addresses that differ by
 * whole pages. */
typedef struct {
    int64_t start, row, column; /* of the first of `count` spans */
    int64_t apart;              /* rows from one span to the next */
    int64_t left;               /* rows of the first span's quarter */
    int count, n, lines;
} Span;

static int is_narrow(const Grid *g) { return g->whole || g->width < NARROW; }

/* Moves on, from zeros to the first, or from a count of 1 if spans are wanted one by one; false after the last. */
static int next_span(const Grid *g, const Tile *t, Span *s) {
    const int64_t rows = t->matrices * t->rows;
    if (is_narrow(g)) {
        const int most = PIECE / (int)g->width;
        s->row += s->lines;
        s->lines = rows - s->row < most ? (int)(rows - s->row) : most;
        s->n = s->lines * (int)g->width;
        s->count = 1;
    } else {
        s->column += s->n;
        if (s->column == t->columns) s->column = 0, s->row++, s->left--;
        if (s->left == 0) {
            s->row += s->apart * (s->count - 1);
            const int64_t rest = rows - s->row;
            s->count = s->count == 1 || rest < TOGETHER ? 1 : TOGETHER;
            s->left = s->apart = s->count == 1 ? rest : (rest / TOGETHER - 1) | 1;
        }
        s->lines = 1;
        s->n = t->columns - s->column < PIECE ? (int)(t->columns - s->column) : PIECE;
    }
    s->start = (t->matrix * g->height + t->row + s->row) * g->width + t->column + s->column;
    return s->row < rows;
}

/* Where span k begins. */
static int64_t start_of(const Grid *g, const Span *s, int k) { return s->start + k * s->apart * g->width; }

/* ---- elements in float32, where they lie or in a buffer -------------------------------------------------- */

/* What spans that are read together need each. */
typedef struct {
    float values[PIECE];
    Mean last;
} Buffer;

/* Nothing is known yet. The values stay as they are: clearing them would take longer than a small tensor's step. */
static void start_buffers(Buffer *buffers, int count) {
    for (int k = 0; k < count; k++) buffers[k].last.first = -1;
}

/* Whether loops take elements of a type as they lie. */
static int is_ready(int type) { return type == FLOAT32 || type == BFLOAT16; }

/* Elements [start, start + n), centred and scaled. */
static const float *grad_at(const Job *job, int64_t start, int n, Buffer *buffer) {
    return load_grad(job->gradient, job->grad, job->grad_scale, start, n, buffer->values, &buffer->last);
}

/* The same where float32 and bfloat16 lie as they are: not scaled, and of the type that `grad_type` tells. */
static const void *grad_in_place(const Job *job, int64_t start, int n, Buffer *buffer) {
    const Gradient *g = job->gradient;
    if (is_plain(g) && is_ready(g->type)) return at(job->grad, g->type, start);
    return centred_grad(g, job->grad, start, n, buffer->values, &buffer->last);
}

static int grad_type(const Job *job) {
    return is_plain(job->gradient) && job->gradient->type == BFLOAT16 ? BFLOAT16 : FLOAT32;
}

static Int8 int8_of(const CameRow *row) { return (Int8){row->exp_avg, row->exp_avg_scale, row->inner}; }

static float *read_m(const CameRow *row, int64_t start, int n, float *buffer) {
    const Int8 data = int8_of(row);
    if (row->state_type != INT8) return widen(row->exp_avg, row->state_type, start, n, buffer);
    decode(&data, start, n, buffer);
    return buffer;
}

/* Leaves m in the buffer as it was stored, rounded. */
static void write_m(const CameRow *row, int64_t start, int n, float *buffer) {
    const Int8 data = int8_of(row);
    if (row->state_type == INT8) encode(&data, start, n, buffer);
    else narrow(buffer, n, row->exp_avg, row->state_type, start);
    read_m(row, start, n, buffer);
}

/* ---- averages -------------------------------------------------------------------------------------------- */

/* What becomes of `n` lines from `first` on. */
static void put_lines(const Lines *lines, int64_t first, int n, const double *restrict sums) {
    if (!lines->values) return;
    const double old = lines->old, scale = lines->scale, shift = lines->shift;
    float *restrict values = lines->values + first;
#pragma omp simd
    for (int i = 0; i < n; i++) /* CAME-row, CAME-col, CAME-res */
        values[i] = (float)((old ? old * values[i] : 0) + (scale * sums[i] + shift));
}

/* The mean of a matrix's row averages; what makes the roots of ratios where an average is of rows or columns alone. */
static double row_mean(const Job *job, const Average *average, int64_t matrix) {
    const int64_t height = job->grid.height;
    const float *row = average->row.values;
    if (!row || !average->col.values) return ROOT_SCALE * ROOT_SCALE;
    if (average->means) return average->means[matrix];
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = matrix * height; i < (matrix + 1) * height; i++) sum += row[i];
    return sum / (double)height;
}

/* A tile's sums of rows and columns as they grow: per element of a span or, in a wide matrix, per column. */
typedef struct {
    double rows[PIECE], columns[PIECE];
    _Alignas(64) float elements[WIDE], ratios[WIDE]; /* ratios: of q / row */
    int64_t row; /* of the first of `lines` that wait in `rows` */
    int lines;
} Sums;

static void begin(const Job *job, const Tile *t, Sums *s) {
    const Grid *g = &job->grid;
    s->row = s->lines = 0;
    if (!is_narrow(g)) memset(s->rows, 0, (size_t)t->rows * sizeof(double));
    memset(s->elements, 0, (size_t)(is_narrow(g) ? PIECE : t->columns) * sizeof(float));
    memset(s->ratios, 0, (size_t)(g->read_once ? t->columns : 0) * sizeof(float));
    if (is_narrow(g)) memset(s->columns, 0, (size_t)(t->matrices * t->columns) * sizeof(double));
}

/* Rows that the tile sees whole go into their averages, others wait for `finish_rows`. */
static void put_rows(const Job *job, const Average *average, const Tile *t, Sums *s) {
    const Grid *g = &job->grid;
    const int64_t first = t->matrix * g->height + t->row + s->row;
    if (g->strips == 1) {
        put_lines(&average->row, first, s->lines, s->rows);
    } else {
        float *out = job->row_sums + t->strip * g->matrices * g->height + first;
        for (int i = 0; i < s->lines; i++) out[i] = (float)s->rows[i];
    }
    memset(s->rows, 0, (size_t)s->lines * sizeof(double));
    s->row += s->lines;
    s->lines = 0;
}

/* The averages of columns [first, first + n) of a matrix from the sums of blocks, which lie `stride` apart; returns the
 * sum of u^2 in them. */
static double put_columns(const Job *job, const Average *average, int64_t matrix, int64_t first, int n, int64_t blocks,
                          int64_t stride, const float *elements, const float *ratios) {
    const Grid *g = &job->grid;
    double sums[COLUMNS] = {0}, sums_of_ratios[COLUMNS] = {0}, total = 0;
    for (int64_t block = 0; block < blocks; block++)
        for (int i = 0; i < n; i++) sums[i] += elements[block * stride + i];
    put_lines(&average->col, matrix * g->width + first, n, sums);
    if (!g->read_once || average != &job->square) return 0;
    for (int64_t block = 0; block < blocks; block++)
        for (int i = 0; i < n; i++) sums_of_ratios[i] += ratios[block * stride + i];
    if (is_split(job->shard)) {
        put_lines(&job->ratio.col, matrix * g->width + first, n, sums_of_ratios);
        return 0;
    }
    const float *restrict col = average->col.values + matrix * g->width + first;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < n; i++) total += sums_of_ratios[i] / col[i];
    return total * row_mean(job, average, matrix) / (ROOT_SCALE * ROOT_SCALE);
}

/* Sums of rows and columns of `matrices` of height x width, one after the other. */
static inline __attribute__((always_inline)) void fold(int matrices, const int height, const int width,
                                                       const float *restrict values, double *restrict rows,
                                                       double *restrict columns) {
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

/* out = r c, of `matrices` one after the other; not infinite, since 0 times infinity would be NaN. */
static inline __attribute__((always_inline)) void expand(int matrices, const int height, const int width,
                                                         const float *restrict r, const float *restrict c,
                                                         float *restrict out) {
    for (int k = 0; k < matrices; k++)
        for (int i = 0; i < height; i++)
            for (int j = 0; j < width; j++) {
                float product = r[k * height + i] * c[k * width + j];
                out[(k * height + i) * width + j] = product > FLT_MAX ? FLT_MAX : product;
            }
}

/* For each row the mean of its matrix's. */
static inline __attribute__((always_inline)) void spread_means(int matrices, const int height, const int width,
                                                               const float *restrict row, double *restrict means) {
    (void)width;
    for (int k = 0; k < matrices; k++) {
        double mean = 0;
        for (int i = 0; i < height; i++) mean += row[k * height + i];
        mean /= height;
        for (int i = 0; i < height; i++) means[k * height + i] = mean;
    }
}

/* Common kernels get loops of their own. */
#define FOR_SHAPE(function, matrices, height, width, ...)                                        \
    ((height) == 1 && (width) == 1   ? function(matrices, 1, 1, __VA_ARGS__)                       \
     : (height) == 3 && (width) == 3 ? function(matrices, 3, 3, __VA_ARGS__)                       \
                                     : function(matrices, (int)(height), (int)(width), __VA_ARGS__))

/* A span was added to `elements`; `row_sums` are what was added for each row. */
static void put_span(const Job *job, const Average *average, const Tile *t, const Span *span, const float *row_sums,
                     Sums *s) {
    const Grid *g = &job->grid;
    if (!is_narrow(g)) {
        for (int k = 0; k < span->count; k++) s->rows[span->row + k * span->apart] += row_sums[k];
        return;
    }
    s->lines = span->lines;
    if (g->whole) FOR_SHAPE(fold, (int)t->matrices, g->height, g->width, s->elements, s->rows, s->columns);
    else FOR_SHAPE(fold, 1, span->lines, g->width, s->elements, s->rows, s->columns);
    memset(s->elements, 0, (size_t)span->n * sizeof(float));
    put_rows(job, average, t, s);
}

/* Returns the sum of u^2, if it is known. */
static double end(const Job *job, const Average *average, const Tile *t, Sums *s) {
    const Grid *g = &job->grid;
    double total = 0;
    if (is_narrow(g)) {
        const int n = (int)(t->matrices * t->columns);
        const int64_t first = t->matrix * g->width + t->column;
        if (g->blocks == 1) {
            put_lines(&average->col, first, n, s->columns);
        } else {
            float *out = job->col_sums + t->block * g->matrices * g->width + first;
            for (int i = 0; i < n; i++) out[i] = (float)s->columns[i];
        }
    } else if (g->blocks == 1) {
        for (int64_t i = 0; i < t->columns; i += COLUMNS) {
            int n = (int)(t->columns - i < COLUMNS ? t->columns - i : COLUMNS);
            total += put_columns(job, average, t->matrix, t->column + i, n, 1, 0, s->elements + i, s->ratios + i);
        }
    } else {
        const int64_t to = (t->block * g->matrices + t->matrix) * g->width + t->column;
        memcpy(job->col_sums + to, s->elements, (size_t)t->columns * sizeof(float));
        if (g->read_once) memcpy(job->ratio_sums + to, s->ratios, (size_t)t->columns * sizeof(float));
    }
    return total;
}

static void finish_rows(const Job *job, const Average *average, int64_t matrix, int64_t block) {
    const Grid *g = &job->grid;
    const int64_t from = share(g->height, block, g->blocks), to = share(g->height, block + 1, g->blocks);
    double sums[PIECE];
    for (int64_t row = from; row < to; row += PIECE) {
        int n = (int)(to - row < PIECE ? to - row : PIECE);
        int64_t first = matrix * g->height + row;
        for (int i = 0; i < n; i++) sums[i] = 0;
        for (int64_t strip = 0; strip < g->strips; strip++)
            for (int i = 0; i < n; i++) sums[i] += job->row_sums[strip * g->matrices * g->height + first + i];
        put_lines(&average->row, first, n, sums);
    }
}

static double finish_columns(const Job *job, const Average *average, int64_t matrix, int64_t piece) {
    const Grid *g = &job->grid;
    const int64_t first = piece * COLUMNS, at = matrix * g->width + first;
    const int n = (int)(g->width - first < COLUMNS ? g->width - first : COLUMNS);
    return put_columns(job, average, matrix, first, n, g->blocks, g->matrices * g->width, job->col_sums + at,
                       job->ratio_sums + at);
}

/* ---- factors --------------------------------------------------------------------------------------------- */

/* The factor of a row: sqrt(mean(row) / row), in double, since a row of zeros beside large ones is a ratio of 1e42. */
static inline float row_factor(double mean, const float *rows, int64_t i) {
    return (float)sqrt(rows ? mean / rows[i] : mean);
}

static inline float column_factor(float col) { return 1 / sqrtf(col); }

static void column_factors(const float *restrict columns, int64_t first, int n, float *restrict out) {
    for (int i = 0; i < n; i++) out[i] = columns ? column_factor(columns[first + i]) : 1;
}

static void set_columns(const Job *job, const Average *average, const Tile *t, Columns *columns) {
    const Grid *g = &job->grid;
    if (g->whole || (columns->matrix == t->matrix && columns->strip == t->strip)) return;
    if (columns->matrix != t->matrix) columns->row_mean = row_mean(job, average, t->matrix);
    columns->matrix = t->matrix;
    columns->strip = t->strip;
    column_factors(average->col.values, t->matrix * g->width + t->column, (int)t->columns, columns->factor);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < t->columns; i++) sum += columns->factor[i];
    columns->sum = sum;
}

/* The factors of a span's elements are r * c[i]; their sum over c is `sum`. */
typedef struct {
    const float *c;
    float r[TOGETHER];
    double sum;
    float buffer[PIECE];
} Factors;

static void set_factors(const Job *job, const Average *average, const Tile *t, const Span *span,
                        const Columns *columns, Factors *f) {
    const Grid *g = &job->grid;
    const float *rows = average->row.values;
    const int64_t first = t->matrix * g->height + t->row + span->row;
    if (!is_narrow(g)) {
        f->c = columns->factor + span->column, f->sum = span->column == 0 ? columns->sum : 0;
        for (int k = 0; k < span->count; k++) f->r[k] = row_factor(columns->row_mean, rows, first + k * span->apart);
        return;
    }
    float r[PIECE], c[PIECE];
    if (!g->whole) {
        for (int i = 0; i < span->lines; i++) r[i] = row_factor(columns->row_mean, rows, first + i);
        FOR_SHAPE(expand, 1, span->lines, g->width, r, columns->factor, f->buffer);
    } else {
        double means[PIECE];
        column_factors(average->col.values, t->matrix * g->width, (int)(t->matrices * g->width), c);
        if (is_split(job->shard))
            for (int i = 0; i < span->lines; i++) means[i] = row_mean(job, average, t->matrix + i / g->height);
        else
            FOR_SHAPE(spread_means, (int)t->matrices, g->height, g->width, rows + first, means);
        for (int i = 0; i < span->lines; i++) r[i] = row_factor(means[i], rows, first + i);
        FOR_SHAPE(expand, (int)t->matrices, g->height, g->width, r, c, f->buffer);
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < span->n; i++) sum += f->buffer[i];
    f->c = f->buffer, f->r[0] = 1, f->sum = sum;
}

/* ---- the passes ------------------------------------------------------------------------------------------ */

static inline float update_of(float g, float r, float c) { return g * r * c; } /* CAME-u */

static inline float averaged(const Job *job, float m, float u) {
    return FMA(job->beta1, m, job->beta1_rest * u); /* CAME-m */
}

static inline float square_of(float a) { return a * a; }

static inline float residual_of(float u, float m) { return square_of(u - m); } /* CAME-res */

static inline float moved(float x, float m, float factor, float step, float decay) {
    return FMA(-step, m * factor, decay * x); /* CAME-x */
}

/* A loop over one span or over TOGETHER, of elements of types that are known when it is compiled; sums of spans that are
 * not there are of this zero, which costs nothing to add. */
static const float NOTHING = -0.0f;

#define FOR_COUNT(loop, count, ...) ((count) == 1 ? loop(1, __VA_ARGS__) : loop(TOGETHER, __VA_ARGS__))
#define FOR_TYPE(loop, count, type, ...)                                    \
    ((type) == BFLOAT16 ? FOR_COUNT(loop, count, BFLOAT16, __VA_ARGS__) \
                        : FOR_COUNT(loop, count, FLOAT32, __VA_ARGS__))
#define FOR_TYPES(loop, count, type, other, ...)                                   \
    ((other) == BFLOAT16 ? FOR_TYPE(loop, count, type, BFLOAT16, __VA_ARGS__) \
                         : FOR_TYPE(loop, count, type, FLOAT32, __VA_ARGS__))

ALWAYS void square_loop(const int count, const int type, int n, const void *const *g, float scale,
                        float *restrict elements, float *restrict sums) {
    const int all = count == TOGETHER;
    const void *restrict a = g[0], *restrict b = g[all ? 1 : 0], *restrict c = g[all ? 2 : 0],
               *restrict d = g[all ? 3 : 0];
    float sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
#pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
    for (int i = 0; i < n; i++) {
        float q_a = square_of(scale * get(type, a, i)), q_b = all ? square_of(scale * get(type, b, i)) : NOTHING;
        float q_c = all ? square_of(scale * get(type, c, i)) : NOTHING;
        float q_d = all ? square_of(scale * get(type, d, i)) : NOTHING;
        sum_a += q_a, sum_b += q_b, sum_c += q_c, sum_d += q_d;
        elements[i] += (q_a + q_b) + (q_c + q_d);
    }
    sums[0] = sum_a;
    if (all) sums[1] = sum_b, sums[2] = sum_c, sums[3] = sum_d;
}

ALWAYS void ratio_loop(const int count, const int type, int n, const void *const *g, const float *r,
                       float *restrict ratios) {
    const int all = count == TOGETHER;
    const void *restrict a = g[0], *restrict b = g[all ? 1 : 0], *restrict c = g[all ? 2 : 0],
               *restrict d = g[all ? 3 : 0];
    const float r_a = r[0], r_b = r[all ? 1 : 0], r_c = r[all ? 2 : 0], r_d = r[all ? 3 : 0];
#pragma omp simd
    for (int i = 0; i < n; i++)
        ratios[i] += (square_of(get(type, a, i) * r_a) + (all ? square_of(get(type, b, i) * r_b) : NOTHING)) +
                     (all ? square_of(get(type, c, i) * r_c) + square_of(get(type, d, i) * r_d) : NOTHING);
}

/* q of a part of tile t, into its sums. */
static void add_squares(const Job *job, const Tile *part, Buffer *buffers, const Tile *t, Sums *sums) {
    for (Span s = {0}; next_span(&job->grid, part, &s);) {
        const void *g[TOGETHER];
        float row_sums[TOGETHER], *elements = sums->elements + s.column;
        for (int k = 0; k < s.count; k++) g[k] = grad_in_place(job, start_of(&job->grid, &s, k), s.n, &buffers[k]);
        FOR_TYPE(square_loop, s.count, grad_type(job), s.n, g, job->grad_scale, elements, row_sums);
        put_span(job, &job->square, t, &s, row_sums, sums);
    }
}

/* q / row of the same part, which the second-level cache still holds. */
static void add_ratios(const Job *job, const Tile *part, Buffer *buffers, Sums *sums) {
    const float *row = job->square.row.values + part->matrix * job->grid.height + part->row;
    float factors[PIECE];
    for (int i = 0; i < part->rows; i++) factors[i] = job->grad_scale * (float)ROOT_SCALE / sqrtf(row[i]);
    for (Span s = {0}; next_span(&job->grid, part, &s);) {
        const void *g[TOGETHER];
        float r[TOGETHER], *ratios = sums->ratios + s.column;
        for (int k = 0; k < s.count; k++) {
            g[k] = grad_in_place(job, start_of(&job->grid, &s, k), s.n, &buffers[k]);
            r[k] = factors[s.row + k * s.apart];
        }
        FOR_TYPE(ratio_loop, s.count, grad_type(job), s.n, g, r, ratios);
    }
}

static double squares(const Job *job, int64_t index) {
    const Grid *g = &job->grid;
    const Tile t = tile_at(g, index);
    Buffer buffers[TOGETHER];
    Sums sums;
    start_buffers(buffers, TOGETHER);
    begin(job, &t, &sums);
    if (is_narrow(g)) {
        add_squares(job, &t, buffers, &t, &sums);
        return end(job, &job->square, &t, &sums);
    }
    const int64_t most = IN_CACHE / t.columns / TOGETHER * TOGETHER;
    Tile part = t;
    for (int64_t row = 0; row < t.rows; row += part.rows) {
        part.row = t.row + row;
        part.rows = t.rows - row < most ? t.rows - row : most;
        add_squares(job, &part, buffers, &t, &sums);
        sums.lines = (int)part.rows;
        put_rows(job, &job->square, &t, &sums);
        if (g->read_once) add_ratios(job, &part, buffers, &sums);
    }
    return end(job, &job->square, &t, &sums);
}

static double update_square_sum(const Job *job, int64_t index, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    Buffer buffer;
    Factors f;
    double total = 0;
    start_buffers(&buffer, 1);
    set_columns(job, &job->square, &t, columns);
    for (Span s = {.count = 1}; next_span(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, &buffer);
        set_factors(job, &job->square, &t, &s, columns, &f);
        const float *restrict c = f.c, r = f.r[0];
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) {
            float u = update_of(g[i], r, c[i]);
            sum += u * u;
        }
        total += sum;
    }
    return total;
}

/* q / known: the size of u without what other shards know. */
static void ratios(const Job *job, int64_t index, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    Buffer buffer;
    Factors f;
    Sums sums;
    start_buffers(&buffer, 1);
    set_columns(job, &job->known, &t, columns);
    begin(job, &t, &sums);
    for (Span s = {.count = 1}; next_span(&job->grid, &t, &s);) {
        const float *g = grad_at(job, s.start, s.n, &buffer);
        float roots[PIECE], row_sum;
        const void *const spans[] = {roots};
        set_factors(job, &job->known, &t, &s, columns, &f);
        for (int i = 0; i < s.n; i++) roots[i] = update_of(g[i], f.r[0], f.c[i]);
        square_loop(1, FLOAT32, s.n, spans, 1, sums.elements + s.column, &row_sum);
        put_span(job, &job->ratio, &t, &s, &row_sum, &sums);
    }
    if (!is_narrow(&job->grid)) {
        sums.lines = (int)t.rows;
        put_rows(job, &job->ratio, &t, &sums);
    }
    end(job, &job->ratio, &t, &sums);
}

/* m in one pass with the residuals. All loads stand before all stores here and in apply_loop: a load would wait for a
 * store to an address that differs by whole pages, as it does in rows of 1,024. */
ALWAYS void momentum_loop(const int count, const int g_type, const int m_type, const Job *job, int n,
                          const void *const *g, const float *r, const float *restrict c, void *const *m,
                          float *restrict elements, float *restrict sums) {
    const int all = count == TOGETHER;
    const Job j = *job;
    const void *restrict g_a = g[0], *restrict g_b = g[all ? 1 : 0], *restrict g_c = g[all ? 2 : 0],
               *restrict g_d = g[all ? 3 : 0];
    void *restrict m_a = m[0], *restrict m_b = m[all ? 1 : 0], *restrict m_c = m[all ? 2 : 0],
         *restrict m_d = m[all ? 3 : 0];
    const float r_a = r[0], r_b = r[all ? 1 : 0], r_c = r[all ? 2 : 0], r_d = r[all ? 3 : 0];
    float sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
#pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
    for (int i = 0; i < n; i++) {
        float u_a = update_of(get(g_type, g_a, i), r_a, c[i]);
        float new_a = rounded(m_type, g_type, averaged(&j, get(m_type, m_a, i), u_a));
        float w_a = residual_of(u_a, new_a), w_b = NOTHING, w_c = NOTHING, w_d = NOTHING;
        if (all) {
            float u_b = update_of(get(g_type, g_b, i), r_b, c[i]);
            float u_c = update_of(get(g_type, g_c, i), r_c, c[i]);
            float u_d = update_of(get(g_type, g_d, i), r_d, c[i]);
            float new_b = rounded(m_type, g_type, averaged(&j, get(m_type, m_b, i), u_b));
            float new_c = rounded(m_type, g_type, averaged(&j, get(m_type, m_c, i), u_c));
            float new_d = rounded(m_type, g_type, averaged(&j, get(m_type, m_d, i), u_d));
            w_b = residual_of(u_b, new_b), w_c = residual_of(u_c, new_c), w_d = residual_of(u_d, new_d);
            put(m_type, m_b, i, new_b), put(m_type, m_c, i, new_c), put(m_type, m_d, i, new_d);
        }
        put(m_type, m_a, i, new_a);
        sum_a += w_a, sum_b += w_b, sum_c += w_c, sum_d += w_d;
        elements[i] += (w_a + w_b) + (w_c + w_d);
    }
    sums[0] = sum_a;
    if (all) sums[1] = sum_b, sums[2] = sum_c, sums[3] = sum_d;
}

/* The same for an m that is rounded as it is stored, between the two. */
static float rounded_momentum_loop(const Job *job, int64_t start, int n, const float *restrict g, float r,
                                   const float *restrict c, int apart, float *restrict elements) {
    float u[PIECE], m[PIECE], sum = 0;
    read_m(job->row, start, n, m);
    for (int i = 0; i < n; i++) u[i] = update_of(g[i], r, c[i]);
    if (!apart) {
        for (int i = 0; i < n; i++) m[i] = averaged(job, m[i], u[i]);
        write_m(job->row, start, n, m);
    }
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) {
        float w = residual_of(u[i], m[i]);
        sum += w;
        elements[i] += w;
    }
    return sum;
}

static void momentum(const Job *job, int64_t index, float clip, int apart, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    const CameRow *row = job->row;
    Buffer buffers[TOGETHER];
    Sums sums;
    Factors f;
    start_buffers(buffers, TOGETHER);
    set_columns(job, &job->square, &t, columns);
    begin(job, &t, &sums);
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        const void *g[TOGETHER];
        void *m[TOGETHER];
        float row_sums[TOGETHER], *elements = sums.elements + s.column;
        set_factors(job, &job->square, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            f.r[k] *= clip;
            if (is_ready(row->state_type)) {
                g[k] = grad_in_place(job, start, s.n, &buffers[k]);
                m[k] = at(row->exp_avg, row->state_type, start);
                f.r[k] *= job->grad_scale;
            } else {
                row_sums[k] = rounded_momentum_loop(job, start, s.n, grad_at(job, start, s.n, &buffers[k]), f.r[k], f.c,
                                                    apart, elements);
            }
        }
        if (is_ready(row->state_type))
            FOR_TYPES(momentum_loop, s.count, grad_type(job), row->state_type, job, s.n, g, f.r, f.c, m, elements,
                      row_sums);
        put_span(job, &job->residual, &t, &s, row_sums, &sums);
    }
    if (!is_narrow(&job->grid)) {
        sums.lines = (int)t.rows;
        put_rows(job, &job->residual, &t, &sums);
    }
    end(job, &job->residual, &t, &sums);
}

/* Where rows of dim 0 hold many matrices, int8 blocks cross their rows. */
static void momentum_apart(const Job *job, float clip, int64_t first, int64_t last) {
    const CameRow *row = job->row;
    const Average *average = &job->square;
    const int64_t height = row->height, width = row->width, per_row = blocks_in_row(row->inner);
    int64_t known = -1; /* the matrix whose mean is known */
    double mean = 0;
    Buffer buffer;
    start_buffers(&buffer, 1);
    for (int64_t block = first; block < last; block++) {
        const int64_t at = block % per_row * CODEC_BLOCK, start = block / per_row * row->inner + at;
        const int n = (int)(row->inner - at < CODEC_BLOCK ? row->inner - at : CODEC_BLOCK);
        float m[PIECE];
        const float *g = grad_at(job, start, n, &buffer);
        read_m(row, start, n, m);
        for (int i = 0; i < n;) {
            const int64_t line = (start + i) / width, matrix = line / height;
            if (matrix != known) mean = row_mean(job, average, matrix), known = matrix;
            const float *col = average->col.values + matrix * width;
            const float r = row_factor(mean, average->row.values, line) * clip;
            for (int64_t j = (start + i) % width; j < width && i < n; i++, j++)
                m[i] = averaged(job, m[i], update_of(g[i], r, column_factor(col[j])));
        }
        write_m(row, start, n, m);
    }
}

ALWAYS void apply_loop(const int count, const int x_type, const int m_type, int n, void *const *x,
                       const void *const *m, const float *r, const float *restrict c, float decay) {
    const int all = count == TOGETHER;
    void *restrict x_a = x[0], *restrict x_b = x[all ? 1 : 0], *restrict x_c = x[all ? 2 : 0],
         *restrict x_d = x[all ? 3 : 0];
    const void *restrict m_a = m[0], *restrict m_b = m[all ? 1 : 0], *restrict m_c = m[all ? 2 : 0],
               *restrict m_d = m[all ? 3 : 0];
    const float r_a = r[0], r_b = r[all ? 1 : 0], r_c = r[all ? 2 : 0], r_d = r[all ? 3 : 0];
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float new_a = moved(get(x_type, x_a, i), get(m_type, m_a, i), c[i], r_a, decay);
        if (all) {
            float new_b = moved(get(x_type, x_b, i), get(m_type, m_b, i), c[i], r_b, decay);
            float new_c = moved(get(x_type, x_c, i), get(m_type, m_c, i), c[i], r_c, decay);
            float new_d = moved(get(x_type, x_d, i), get(m_type, m_d, i), c[i], r_d, decay);
            put(x_type, x_b, i, rounded(x_type, m_type, new_b)), put(x_type, x_c, i, rounded(x_type, m_type, new_c));
            put(x_type, x_d, i, rounded(x_type, m_type, new_d));
        }
        put(x_type, x_a, i, rounded(x_type, m_type, new_a));
    }
}

static double confidence(const Job *job, int64_t index, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    Factors f;
    double total = 0;
    set_columns(job, &job->residual, &t, columns);
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        set_factors(job, &job->residual, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) total += f.r[k] * f.sum;
    }
    return total;
}

static double apply(const Job *job, int64_t index, float step, float decay, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    const CameRow *row = job->row;
    const Weights *w = &row->weights;
    const int x_ready = is_ready(w->type) && w->way == NEAREST, m_ready = is_ready(row->state_type);
    float x_buffers[TOGETHER][PIECE], m_buffers[TOGETHER][PIECE];
    Factors f;
    double total = 0;
    set_columns(job, &job->residual, &t, columns);
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        void *x[TOGETHER];
        const void *m[TOGETHER];
        float r[TOGETHER];
        set_factors(job, &job->residual, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            x[k] = x_ready ? at(w->data, w->type, start) : read_weights(w, start, s.n, x_buffers[k]);
            m[k] = m_ready ? at(row->exp_avg, row->state_type, start) : read_m(row, start, s.n, m_buffers[k]);
            r[k] = f.r[k] * step;
            total += f.r[k] * f.sum;
        }
        FOR_TYPES(apply_loop, s.count, x_ready ? w->type : FLOAT32, m_ready ? row->state_type : FLOAT32, s.n, x, m, r,
                  f.c, decay);
        for (int k = 0; k < s.count && !x_ready; k++)
            write_weights(w, job->draw, start_of(&job->grid, &s, k), s.n, x[k]);
    }
    return total;
}

/* ---- tensors that are not factored ----------------------------------------------------------------------- */

static double second_moment(const Job *job, int64_t index) {
    const Tile t = tile_at(&job->grid, index);
    const float beta2 = (float)job->beta2, rest = (float)(1 - job->beta2), shift = (float)((1 - job->beta2) * job->eps1);
    Buffer buffer;
    double total = 0;
    start_buffers(&buffer, 1);
    for (Span s = {.count = 1}; next_span(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, &buffer);
        float *restrict v = job->row->exp_avg_sq + s.start, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) {
            v[i] = FMA(beta2, v[i], FMA(rest, g[i] * g[i], shift)); /* CAME-v */
            float u = update_of(g[i], 1, column_factor(v[i]));
            sum += u * u;
        }
        total += sum;
    }
    return total;
}

static void momentum_and_apply(const Job *job, int64_t index, float clip, float step, float decay) {
    const Tile t = tile_at(&job->grid, index);
    const CameRow *row = job->row;
    Buffer buffer;
    float m_buffer[PIECE], x_buffer[PIECE];
    start_buffers(&buffer, 1);
    for (Span s = {.count = 1}; next_span(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, &buffer), *restrict v = row->exp_avg_sq + s.start;
        float *restrict m = read_m(row, s.start, s.n, m_buffer);
        for (int i = 0; i < s.n; i++) m[i] = averaged(job, m[i], update_of(g[i], clip, column_factor(v[i])));
        write_m(row, s.start, s.n, m);
        float *restrict x = read_weights(&row->weights, s.start, s.n, x_buffer);
        for (int i = 0; i < s.n; i++) x[i] = moved(x[i], m[i], 1, step, decay);
        write_weights(&row->weights, job->draw, s.start, s.n, x);
    }
}

static double param_square_sum(const Job *job, int64_t index) {
    const Tile t = tile_at(&job->grid, index);
    float buffer[PIECE];
    double total = 0;
    for (Span s = {.count = 1}; next_span(&job->grid, &t, &s);) {
        const float *restrict x = read_weights(&job->row->weights, s.start, s.n, buffer);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) sum += (double)x[i] * x[i];
        total += sum;
    }
    return total;
}

const CameLoops CONCATENATE(came_loops_, ISA) = {
    .squares = squares,
    .finish_rows = finish_rows,
    .finish_columns = finish_columns,
    .ratios = ratios,
    .update_square_sum = update_square_sum,
    .momentum_apart = momentum_apart,
    .momentum = momentum,
    .confidence = confidence,
    .apply = apply,
    .second_moment = second_moment,
    .momentum_and_apply = momentum_and_apply,
    .param_square_sum = param_square_sum,
};
