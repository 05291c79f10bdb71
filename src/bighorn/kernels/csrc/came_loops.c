/* The arithmetic of a CAME step. Everything is computed in float32, sums over more than a piece in double.
 *
 * The inner loops go over spans of consecutive elements, and take the factor 1 / sqrt(row col / mean(row)) as r * c[i].
 * In a wide matrix a span is one row of a tile: r is the row's, c the columns'. Where rows are short a span is many of
 * them, or many matrices: r is 1, and c is their product, written out. */
#include "came.h"

#include <float.h>
#include <math.h>

enum {
    NARROW = 32,  /* columns: shorter rows go together */
    AHEAD = 2048, /* elements between what is read and what is asked for */
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
    t.columns = g->width - t.column < PIECE ? g->width - t.column : PIECE;
    return t;
}

/* Consecutive elements of a tile: `lines` rows from `row` on, or a part of one. */
typedef struct {
    int64_t start, row;
    int n, lines;
} Span;

static int is_narrow(const Grid *g) { return g->whole || g->width < NARROW; }

static Span span_at(const Grid *g, const Tile *t, int64_t row, int lines) {
    int64_t start = (t->matrix * g->height + t->row + row) * g->width + t->column;
    return (Span){start, row, lines * (int)t->columns, lines};
}

/* Moves on; false after the last. */
static int next_span(const Grid *g, const Tile *t, Span *s) {
    int64_t row = s->row + s->lines, rest = t->matrices * t->rows - row;
    if (rest == 0) return 0;
    int most = is_narrow(g) ? PIECE / (int)g->width : 1;
    int lines = rest < most ? (int)rest : most;
    *s = span_at(g, t, row, lines);
    return 1;
}

/* ---- elements in float32, where they lie or in a buffer -------------------------------------------------- */

static const float *grad_at(const Job *job, int64_t start, int n, float *buffer, Mean *last) {
    return load_grad(job->gradient, job->grad, job->grad_scale, start, n, buffer, last);
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

/* The averages of n lines with `count` elements each; returns the sum of what they become. */
static double put_average(const Average *a, float *restrict lines, int n, const double *restrict sums, double count) {
    const double beta = a->beta, scale = (1 - beta) / count, shift = (1 - beta) * a->eps;
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < n; i++) {
        float value = (float)(beta * lines[i] + (scale * sums[i] + shift)); /* CAME-row, CAME-col, CAME-res */
        lines[i] = value;
        total += value;
    }
    return total;
}

/* A tile's sums of rows and columns as they grow: per element of a span or, in a wide matrix, per column. */
typedef struct {
    double rows[PIECE], columns[PIECE];
    float elements[PIECE];
    int64_t row; /* of the first of `lines` that wait in `rows` */
    int lines;
} Sums;

static void begin(const Job *job, const Average *average, const Tile *t, Sums *s) {
    const Grid *g = &job->grid;
    s->row = s->lines = 0;
    memset(s->elements, 0, sizeof s->elements);
    memset(s->columns, 0, (size_t)(t->matrices * t->columns) * sizeof(double));
    if (!g->whole && g->strips == 1) average->block_sums[t->matrix * g->blocks + t->block] = 0;
}

/* Rows that the tile sees whole go into their averages, others wait for `finish_rows`. */
static void put_rows(const Job *job, const Average *average, const Tile *t, Sums *s) {
    const Grid *g = &job->grid;
    const int64_t first = t->matrix * g->height + t->row + s->row;
    if (g->strips == 1) {
        double sum = put_average(average, average->row + first, s->lines, s->rows, (double)g->width);
        if (!g->whole) average->block_sums[t->matrix * g->blocks + t->block] += sum;
    } else {
        float *out = job->row_sums + t->strip * g->matrices * g->height + first;
        for (int i = 0; i < s->lines; i++) out[i] = (float)s->rows[i];
    }
    s->row += s->lines;
    s->lines = 0;
}

static void put_columns(const Job *job, const Average *average, const Tile *t, Sums *s) {
    const Grid *g = &job->grid;
    const int n = (int)(t->matrices * t->columns);
    const int64_t first = t->matrix * g->width + t->column;
    if (g->blocks == 1) {
        put_average(average, average->col + first, n, s->columns, (double)g->height);
    } else {
        float *out = job->col_sums + t->block * g->matrices * g->width + first;
        for (int i = 0; i < n; i++) out[i] = (float)s->columns[i];
    }
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

/* A span was added to `elements`; `row_sum` is the sum of what was added. */
static void put_span(const Job *job, const Average *average, const Tile *t, const Span *span, double row_sum, Sums *s) {
    const Grid *g = &job->grid;
    if (!is_narrow(g)) {
        s->rows[s->lines++] = row_sum;
        return;
    }
    s->lines = span->lines;
    if (g->whole) FOR_SHAPE(fold, (int)t->matrices, g->height, g->width, s->elements, s->rows, s->columns);
    else FOR_SHAPE(fold, 1, span->lines, g->width, s->elements, s->rows, s->columns);
    memset(s->elements, 0, (size_t)span->n * sizeof(float));
    put_rows(job, average, t, s);
}

static void end(const Job *job, const Average *average, const Tile *t, Sums *s) {
    if (!is_narrow(&job->grid)) {
        put_rows(job, average, t, s);
        for (int i = 0; i < t->columns; i++) s->columns[i] = s->elements[i];
    }
    put_columns(job, average, t, s);
}

static void finish_rows(const Job *job, const Average *average, int64_t matrix, int64_t block) {
    const Grid *g = &job->grid;
    const int64_t from = share(g->height, block, g->blocks), to = share(g->height, block + 1, g->blocks);
    double sums[PIECE], total = 0;
    for (int64_t row = from; row < to; row += PIECE) {
        int n = (int)(to - row < PIECE ? to - row : PIECE);
        int64_t first = matrix * g->height + row;
        for (int i = 0; i < n; i++) sums[i] = 0;
        for (int64_t strip = 0; strip < g->strips; strip++)
            for (int i = 0; i < n; i++) sums[i] += job->row_sums[strip * g->matrices * g->height + first + i];
        total += put_average(average, average->row + first, n, sums, (double)g->width);
    }
    average->block_sums[matrix * g->blocks + block] = total;
}

/* Columns [first, last) of all matrices one after the other. */
static void finish_columns(const Job *job, const Average *average, int64_t first, int64_t last) {
    const Grid *g = &job->grid;
    double sums[PIECE];
    for (; first < last; first += PIECE) {
        int n = (int)(last - first < PIECE ? last - first : PIECE);
        for (int i = 0; i < n; i++) sums[i] = 0;
        for (int64_t block = 0; block < g->blocks; block++)
            for (int i = 0; i < n; i++) sums[i] += job->col_sums[block * g->matrices * g->width + first + i];
        put_average(average, average->col + first, n, sums, (double)g->height);
    }
}

/* ---- factors --------------------------------------------------------------------------------------------- */

/* The factor of a row: sqrt(mean(row) / row), in double, since a row of zeros beside large ones is a ratio of 1e42. */
static inline float row_factor(double mean, float row) { return (float)sqrt(mean / row); }

static inline float column_factor(float col) { return 1 / sqrtf(col); }

static void set_columns(const Job *job, const Average *average, const Tile *t, Columns *columns) {
    const Grid *g = &job->grid;
    if (g->whole || (columns->matrix == t->matrix && columns->strip == t->strip)) return;
    if (columns->matrix != t->matrix) {
        columns->row_mean = 0;
        for (int64_t b = 0; b < g->blocks; b++) columns->row_mean += average->block_sums[t->matrix * g->blocks + b];
        columns->row_mean /= (double)g->height;
    }
    columns->matrix = t->matrix;
    columns->strip = t->strip;
    const float *restrict col = average->col + t->matrix * g->width + t->column;
    float *restrict factor = columns->factor;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < t->columns; i++) {
        factor[i] = column_factor(col[i]);
        sum += factor[i];
    }
    columns->sum = sum;
}

/* The factors of a span's elements are r * c[i]; their sum over c is `sum`. */
typedef struct {
    const float *c;
    float r;
    double sum;
    float buffer[PIECE];
} Factors;

static void set_factors(const Job *job, const Average *average, const Tile *t, const Span *span,
                        const Columns *columns, Factors *f) {
    const Grid *g = &job->grid;
    const float *restrict row = average->row + t->matrix * g->height + t->row + span->row;
    if (!is_narrow(g)) {
        f->c = columns->factor, f->sum = columns->sum, f->r = row_factor(columns->row_mean, *row);
        return;
    }
    float r[PIECE], c[PIECE];
    if (!g->whole) {
        for (int i = 0; i < span->lines; i++) r[i] = row_factor(columns->row_mean, row[i]);
        FOR_SHAPE(expand, 1, span->lines, g->width, r, columns->factor, f->buffer);
    } else {
        const float *restrict col = average->col + t->matrix * g->width;
        double means[PIECE];
        for (int i = 0; i < t->matrices * g->width; i++) c[i] = column_factor(col[i]);
        FOR_SHAPE(spread_means, (int)t->matrices, g->height, g->width, row, means);
        for (int i = 0; i < span->lines; i++) r[i] = row_factor(means[i], row[i]);
        FOR_SHAPE(expand, (int)t->matrices, g->height, g->width, r, c, f->buffer);
    }
    f->c = f->buffer, f->r = 1, f->sum = 0;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < span->n; i++) sum += f->buffer[i];
    f->sum = sum;
}

/* Asks for the elements that come AHEAD from now: a pass that reads one stream alone waits for memory otherwise. */
static inline void prefetch(const void *data, int type, int64_t start, int n) {
    if (type != FLOAT32) return;
    const float *ahead = (const float *)data + start + AHEAD;
    for (int i = 0; i < n; i += 16) __builtin_prefetch(ahead + i);
}

/* ---- the passes ------------------------------------------------------------------------------------------ */

static inline float update_of(float g, float r, float c) { return g * r * c; } /* CAME-u */

static inline float averaged(const Job *job, float m, float u) {
    return FMA(job->beta1, m, job->beta1_rest * u); /* CAME-m */
}

static inline float residual_of(float u, float m) { return (u - m) * (u - m); } /* CAME-res */

static inline float moved(float x, float m, float factor, float step, float decay) {
    return FMA(-step, m * factor, decay * x); /* CAME-x */
}

enum { TOGETHER = 4 };

/* The squares of a span, and the sum of them. */
static float square_loop(int n, const float *restrict g, float *restrict elements) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) {
        float q = g[i] * g[i];
        sum += q;
        elements[i] += q;
    }
    return sum;
}

/* The same for four spans. */
static void square_loop_4(int n, const float *const *g, float *restrict elements, double *const *sums) {
    const float *restrict a = g[0], *restrict b = g[1], *restrict c = g[2], *restrict d = g[3];
    float sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
#pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
    for (int i = 0; i < n; i++) {
        float q_a = a[i] * a[i], q_b = b[i] * b[i], q_c = c[i] * c[i], q_d = d[i] * d[i];
        sum_a += q_a, sum_b += q_b, sum_c += q_c, sum_d += q_d;
        elements[i] += (q_a + q_b) + (q_c + q_d);
    }
    *sums[0] = sum_a, *sums[1] = sum_b, *sums[2] = sum_c, *sums[3] = sum_d;
}

static void squares(const Job *job, int64_t index) {
    const Tile t = tile_at(&job->grid, index);
    Mean last = {-1, 0};
    float buffers[TOGETHER][PIECE];
    Sums sums;
    begin(job, &job->square, &t, &sums);
    /* Rows far apart are read together: memory serves four streams faster than one (a fifth of a step). */
    const int64_t apart = is_narrow(&job->grid) ? 0 : t.rows / TOGETHER;
    for (int64_t row = 0; row < apart; row++) {
        const float *g[TOGETHER];
        double *out[TOGETHER];
        for (int k = 0; k < TOGETHER; k++) {
            const Span s = span_at(&job->grid, &t, row + k * apart, 1);
            g[k] = grad_at(job, s.start, s.n, buffers[k], &last);
            out[k] = &sums.rows[row + k * apart];
        }
        square_loop_4((int)t.columns, g, sums.elements, out);
    }
    sums.lines = (int)(TOGETHER * apart);
    for (Span s = {.row = sums.lines}; next_span(&job->grid, &t, &s);) {
        const float *g = grad_at(job, s.start, s.n, buffers[0], &last);
        put_span(job, &job->square, &t, &s, square_loop(s.n, g, sums.elements), &sums);
    }
    end(job, &job->square, &t, &sums);
}

static double update_square_sum(const Job *job, int64_t index, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    Mean last = {-1, 0};
    float buffer[PIECE];
    Factors f;
    double total = 0;
    set_columns(job, &job->square, &t, columns);
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, buffer, &last);
        set_factors(job, &job->square, &t, &s, columns, &f);
        const float *restrict c = f.c, r = f.r;
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

/* m of a span in one pass with the residuals. */
static float momentum_loop(const Job *job, int n, const float *restrict g, float r, const float *restrict c,
                           float *restrict m, float *restrict elements) {
    const Job j = *job;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) {
        float u = update_of(g[i], r, c[i]), w;
        m[i] = averaged(&j, m[i], u);
        w = residual_of(u, m[i]);
        sum += w;
        elements[i] += w;
    }
    return sum;
}

/* The same for an m that is rounded as it is stored, between the two. */
static float rounded_momentum_loop(const Job *job, const Span *s, const float *restrict g, float r,
                                   const float *restrict c, int apart, float *restrict elements) {
    float u[PIECE], m[PIECE], sum = 0;
    read_m(job->row, s->start, s->n, m);
    for (int i = 0; i < s->n; i++) u[i] = update_of(g[i], r, c[i]);
    if (!apart) {
        for (int i = 0; i < s->n; i++) m[i] = averaged(job, m[i], u[i]);
        write_m(job->row, s->start, s->n, m);
    }
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < s->n; i++) {
        float w = residual_of(u[i], m[i]);
        sum += w;
        elements[i] += w;
    }
    return sum;
}

static void momentum(const Job *job, int64_t index, float clip, int apart, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    Mean last = {-1, 0};
    float buffer[PIECE];
    Sums sums;
    Factors f;
    set_columns(job, &job->square, &t, columns);
    begin(job, &job->residual, &t, &sums);
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        prefetch(job->grad, job->gradient->type, s.start, s.n);
        prefetch(job->row->exp_avg, job->row->state_type, s.start, s.n);
        const float *g = grad_at(job, s.start, s.n, buffer, &last);
        set_factors(job, &job->square, &t, &s, columns, &f);
        float sum = job->row->state_type == FLOAT32
                        ? momentum_loop(job, s.n, g, f.r * clip, f.c, (float *)job->row->exp_avg + s.start,
                                        sums.elements)
                        : rounded_momentum_loop(job, &s, g, f.r * clip, f.c, apart, sums.elements);
        put_span(job, &job->residual, &t, &s, sum, &sums);
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
    Mean centred = {-1, 0};
    for (int64_t block = first; block < last; block++) {
        const int64_t at = block % per_row * CODEC_BLOCK, start = block / per_row * row->inner + at;
        const int n = (int)(row->inner - at < CODEC_BLOCK ? row->inner - at : CODEC_BLOCK);
        float buffer[PIECE], m[PIECE];
        const float *g = grad_at(job, start, n, buffer, &centred);
        read_m(row, start, n, m);
        for (int i = 0; i < n;) {
            const int64_t line = (start + i) / width, matrix = line / height;
            if (matrix != known) {
                mean = 0;
                for (int64_t k = 0; k < height; k++) mean += average->row[matrix * height + k];
                mean /= (double)height, known = matrix;
            }
            const float *col = average->col + matrix * width, r = row_factor(mean, average->row[line]) * clip;
            for (int64_t j = (start + i) % width; j < width && i < n; i++, j++)
                m[i] = averaged(job, m[i], update_of(g[i], r, column_factor(col[j])));
        }
        write_m(row, start, n, m);
    }
}

static double apply(const Job *job, int64_t index, float step, float decay, Columns *columns) {
    const Tile t = tile_at(&job->grid, index);
    const CameRow *row = job->row;
    float x_buffer[PIECE], m_buffer[PIECE];
    Factors f;
    double confidence = 0;
    set_columns(job, &job->residual, &t, columns);
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        prefetch(row->param, row->param_type, s.start, s.n);
        prefetch(row->exp_avg, row->state_type, s.start, s.n);
        set_factors(job, &job->residual, &t, &s, columns, &f);
        float *restrict x = widen(row->param, row->param_type, s.start, s.n, x_buffer);
        const float *restrict m = read_m(row, s.start, s.n, m_buffer), *restrict c = f.c, r = f.r * step;
        for (int i = 0; i < s.n; i++) x[i] = moved(x[i], m[i], c[i], r, decay);
        narrow(x, s.n, row->param, row->param_type, s.start);
        confidence += f.r * f.sum;
    }
    return confidence;
}

/* ---- tensors that are not factored ----------------------------------------------------------------------- */

static double second_moment(const Job *job, int64_t index) {
    const Tile t = tile_at(&job->grid, index);
    const float beta2 = (float)job->square.beta, rest = (float)(1 - job->square.beta);
    const float shift = (float)((1 - job->square.beta) * job->square.eps);
    Mean last = {-1, 0};
    float buffer[PIECE];
    double total = 0;
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, buffer, &last);
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
    Mean last = {-1, 0};
    float g_buffer[PIECE], m_buffer[PIECE], x_buffer[PIECE];
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, g_buffer, &last), *restrict v = row->exp_avg_sq + s.start;
        float *restrict m = read_m(row, s.start, s.n, m_buffer);
        for (int i = 0; i < s.n; i++) m[i] = averaged(job, m[i], update_of(g[i], clip, column_factor(v[i])));
        write_m(row, s.start, s.n, m);
        float *restrict x = widen(row->param, row->param_type, s.start, s.n, x_buffer);
        for (int i = 0; i < s.n; i++) x[i] = moved(x[i], m[i], 1, step, decay);
        narrow(x, s.n, row->param, row->param_type, s.start);
    }
}

static double param_square_sum(const Job *job, int64_t index) {
    const Tile t = tile_at(&job->grid, index);
    float buffer[PIECE];
    double total = 0;
    for (Span s = {0}; next_span(&job->grid, &t, &s);) {
        const float *restrict x = widen(job->row->param, job->row->param_type, s.start, s.n, buffer);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) sum += (double)x[i] * x[i];
        total += sum;
    }
    return total;
}

const CameLoops CONCATENATE(came_loops_, ISA) = {
    squares, finish_rows,    finish_columns,     update_square_sum, momentum_apart, momentum,
    apply,   second_moment, momentum_and_apply, param_square_sum};
