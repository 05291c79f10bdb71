/* The arithmetic of a CAME step. It is in float32, and in came_loops_double.c in float64; sums over more than a tile
 * are in double.
 *
 * The inner loops process pieces of consecutive elements, and compute the factor 1 / sqrt(row col / mean(row)) as r *
 * c[i]. In a wide matrix a piece is within one row of a tile: r is the row's factor, c the columns' factors. If rows
 * are short, a piece has several rows or several matrices: r is 1, and c is the product of both factors for each
 * element. */
#include "came_averages.h"
#include "codec.h"
#include "rounding.h"

enum { L2_CACHE_ELEMS = (1 << 18) / sizeof(real) }; /* elements that stay in the second-level cache */

/* ---- elements in place or in a buffer -------------------------------------------------------------------- */

/* Whether loops read elements of a type in place: the type of the arithmetic and, in float32, bfloat16. */
#define IS_BFLOAT16(type) (REAL_TYPE == FLOAT32 && (type) == BFLOAT16)
static int is_ready(int type) { return type == REAL_TYPE || IS_BFLOAT16(type); }

/* Returns elements [start, start + n), scaled. */
static const real *grad_at(const CameJob *job, int64_t start, int n, CameGradBuffer *buffer) {
    return load_grad(job->gradient, job->grad, job->grad_scale, start, n, *buffer);
}

NO_INLINE const void *grad_in_buffer(const CameJob *job, int64_t start, int n, CameGradBuffer *buffer) {
    return read_grad(job->gradient, job->grad, start, n, *buffer);
}

/* As `grad_at`, but types that are ready are returned in place: not scaled, and of the type that `grad_type` returns.
 */
FORCE_INLINE const void *grad_in_place(const CameJob *job, int64_t start, int n, CameGradBuffer *buffer) {
    const Gradient *g = job->gradient;
    return is_plain(g) && is_ready(g->type) ? at(job->grad, g->type, start) : grad_in_buffer(job, start, n, buffer);
}

static int grad_type(const CameJob *job) {
    return is_plain(job->gradient) && IS_BFLOAT16(job->gradient->type) ? BFLOAT16 : REAL_TYPE;
}

static CodecInt8 int8_of(const CameRow *row) { return (CodecInt8){row->exp_avg, row->exp_avg_scale, row->inner}; }

static real *read_m(const CameRow *row, int64_t start, int n, real *buffer) {
    const CodecInt8 data = int8_of(row);
    if (row->state_type != INT8) return widen(row->exp_avg, row->state_type, start, n, buffer);
    decode(&data, start, n, buffer);
    return buffer;
}

/* Stores m, and replaces the buffer by the values as they are stored, rounded. */
static void write_m(const CameRow *row, int64_t start, int n, real *buffer) {
    const CodecInt8 data = int8_of(row);
    if (row->state_type == INT8) encode(&data, start, n, buffer);
    else narrow(buffer, n, row->exp_avg, row->state_type, start);
    read_m(row, start, n, buffer);
}

/* ---- the passes ------------------------------------------------------------------------------------------ */

static inline real update_of(real g, real r, real c) { return g * r * c; } /* CAME-u */

static inline real averaged(const CameJob *job, real m, real u) {
    return FMA(job->beta1, m, job->beta1_rest * u); /* CAME-m */
}

static inline real square_of(real a) { return a * a; }

static inline real residual_of(real u, real m) { return square_of(u - m); } /* CAME-res */

static inline real moved(real x, real m, real factor, real step, real decay) {
    return FMA(-step, m * factor, decay * x); /* CAME-x */
}

/* FOR_* run a loop over one piece or over INTERLEAVED_ROWS pieces, for element types that are compile-time constants.
 * Loops add this zero for pieces that do not exist, which costs nothing. */
static const real NOTHING = -0.0f;

#define FOR_COUNT(loop, count, ...) ((count) == 1 ? loop(1, __VA_ARGS__) : loop(INTERLEAVED_ROWS, __VA_ARGS__))
#define FOR_TYPE(loop, count, type, ...) \
    (IS_BFLOAT16(type) ? FOR_COUNT(loop, count, BFLOAT16, __VA_ARGS__) : FOR_COUNT(loop, count, REAL_TYPE, __VA_ARGS__))
#define FOR_TYPES(loop, count, type, other, ...)                             \
    (IS_BFLOAT16(other) ? FOR_TYPE(loop, count, type, BFLOAT16, __VA_ARGS__) \
                        : FOR_TYPE(loop, count, type, REAL_TYPE, __VA_ARGS__))

/* The sums of the rows that a loop reads together. */
typedef struct {
    real a[SUM_LANES], b[SUM_LANES], c[SUM_LANES], d[SUM_LANES];
} RowSums;

FORCE_INLINE_TEMPLATE void store_sums(const int count, const RowSums *from, real *sums) {
    sums[0] = sum_of_lanes(from->a);
    if (count == INTERLEAVED_ROWS)
        sums[1] = sum_of_lanes(from->b), sums[2] = sum_of_lanes(from->c), sums[3] = sum_of_lanes(from->d);
}

FORCE_INLINE_TEMPLATE void square_lanes(int first, const int lanes, const int count, const int type,
                                        const void *const *g, real scale, real *restrict elements,
                                        RowSums *restrict sums) {
    const int all = count == INTERLEAVED_ROWS;
    const void *restrict a = g[0], *restrict b = g[all ? 1 : 0];
    const void *restrict c = g[all ? 2 : 0], *restrict d = g[all ? 3 : 0];
#pragma omp simd
    for (int j = 0; j < lanes; j++) {
        const int i = first + j;
        real q_a = square_of(scale * load_element(type, a, i)),
             q_b = all ? square_of(scale * load_element(type, b, i)) : NOTHING;
        real q_c = all ? square_of(scale * load_element(type, c, i)) : NOTHING;
        real q_d = all ? square_of(scale * load_element(type, d, i)) : NOTHING;
        sums->a[j] += q_a, sums->b[j] += q_b, sums->c[j] += q_c, sums->d[j] += q_d;
        elements[i] += (q_a + q_b) + (q_c + q_d);
    }
}

FORCE_INLINE_TEMPLATE void square_loop(const int count, const int type, int n, const void *const *g, real scale,
                                       real *restrict elements, real *restrict sums) {
    RowSums lanes = {{0}, {0}, {0}, {0}};
    FOR_LANES(n, square_lanes, count, type, g, scale, elements, &lanes);
    store_sums(count, &lanes, sums);
}

FORCE_INLINE_TEMPLATE void ratio_loop(const int count, const int type, int n, const void *const *g, const real *r,
                                      real *restrict ratios) {
    const int all = count == INTERLEAVED_ROWS;
    const void *restrict a = g[0], *restrict b = g[all ? 1 : 0];
    const void *restrict c = g[all ? 2 : 0], *restrict d = g[all ? 3 : 0];
    const real r_a = r[0], r_b = r[all ? 1 : 0], r_c = r[all ? 2 : 0], r_d = r[all ? 3 : 0];
#pragma omp simd
    for (int i = 0; i < n; i++)
        ratios[i] +=
            (square_of(load_element(type, a, i) * r_a) + (all ? square_of(load_element(type, b, i) * r_b) : NOTHING)) +
            (all ? square_of(load_element(type, c, i) * r_c) + square_of(load_element(type, d, i) * r_d) : NOTHING);
}

FORCE_INLINE_TEMPLATE void update_square_lanes(int first, const int lanes, const int count, const int type,
                                               const void *const *g, const real *r, const real *restrict c,
                                               real *restrict sums) {
    const int all = count == INTERLEAVED_ROWS;
    const void *restrict g_a = g[0], *restrict g_b = g[all ? 1 : 0];
    const void *restrict g_c = g[all ? 2 : 0], *restrict g_d = g[all ? 3 : 0];
    const real r_a = r[0], r_b = r[all ? 1 : 0], r_c = r[all ? 2 : 0], r_d = r[all ? 3 : 0];
#pragma omp simd
    for (int j = 0; j < lanes; j++) {
        const int i = first + j;
        real w_a = square_of(update_of(load_element(type, g_a, i), r_a, c[i]));
        real w_b = all ? square_of(update_of(load_element(type, g_b, i), r_b, c[i])) : NOTHING;
        real w_c = all ? square_of(update_of(load_element(type, g_c, i), r_c, c[i])) : NOTHING;
        real w_d = all ? square_of(update_of(load_element(type, g_d, i), r_d, c[i])) : NOTHING;
        sums[j] += (w_a + w_b) + (w_c + w_d);
    }
}

/* Returns the sum of u^2, before clipping. */
FORCE_INLINE_TEMPLATE real update_square_loop(const int count, const int type, int n, const void *const *g,
                                              const real *r, const real *restrict c) {
    real lanes[SUM_LANES] = {0};
    FOR_LANES(n, update_square_lanes, count, type, g, r, c, lanes);
    return sum_of_lanes(lanes);
}

/* Begins to load what the next pass over a small tensor reads: a processor's own prefetching begins anew with each page
 * of a tensor, so that a pass over 16 KB would mostly wait for memory. GCC 12 removes calls of this function unless it
 * is inlined, because it has no result. */
FORCE_INLINE void fetch_for_next_pass(const CameJob *job, const void *data, int type, int64_t start, int n) {
    if (job->gradient->size > L2_CACHE_ELEMS) return;
    const int64_t bytes = type == INT8 ? 1 : dtype_bytes(type);
    const char *first = (const char *)data + start * bytes;
    for (int64_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(first + i, 1, 2);
}

/* Adds q of a part of tile t to its sums. */
static void add_squares(const CameJob *job, const CameTile *part, CameGradBuffer *buffers, const CameTile *t,
                        CameTileSums *sums) {
    for (CamePiece s = {0}; next_piece(&job->grid, part, &s);) {
        const void *g[INTERLEAVED_ROWS];
        real row_sums[INTERLEAVED_ROWS], *elements = sums->elements + s.column;
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            g[k] = grad_in_place(job, start, s.n, &buffers[k]);
            fetch_for_next_pass(job, job->row->exp_avg, job->row->state_type, start, s.n);
        }
        FOR_TYPE(square_loop, s.count, grad_type(job), s.n, g, job->grad_scale, elements, row_sums);
        came_add_piece(job, &job->square, t, &s, row_sums, sums);
    }
}

/* Adds q / row of the same part, which is still in the second-level cache. */
static void add_ratios(const CameJob *job, const CameTile *part, CameGradBuffer *buffers, CameTileSums *sums) {
    const real *row = job->square.row.values + part->matrix * job->grid.height + part->row;
    real factors[PIECE_ELEMS];
    for (int i = 0; i < part->rows; i++) factors[i] = job->grad_scale * (real)ROOT_SCALE / square_root_of(row[i]);
    for (CamePiece s = {0}; next_piece(&job->grid, part, &s);) {
        const void *g[INTERLEAVED_ROWS];
        real r[INTERLEAVED_ROWS], *ratios = sums->ratios + s.column;
        for (int k = 0; k < s.count; k++) {
            g[k] = grad_in_place(job, start_of(&job->grid, &s, k), s.n, &buffers[k]);
            r[k] = factors[s.row + k * s.apart];
        }
        FOR_TYPE(ratio_loop, s.count, grad_type(job), s.n, g, r, ratios);
    }
}

/* Adds up q / col of each row of a tile that has whole columns, and that is still in the second-level cache. */
static void add_ratios_of_columns(const CameJob *job, const CameTile *t, CameGradBuffer *buffer, CameTileSums *sums) {
    const CameGrid *g = &job->grid;
    const real *col = job->square.col.values + t->matrix * g->width + t->column;
    real *restrict factors = sums->ratios, *out = job->ratio_sums + t->across * g->matrices * g->height;
    out += t->matrix * g->height + t->row;
    memset(out, 0, (size_t)t->rows * sizeof(real));
    for (int i = 0; i < t->columns; i++) factors[i] = (real)ROOT_SCALE / square_root_of(col[i]);
    for (CamePiece s = {.count = 1}; next_piece(g, t, &s);) {
        const real *restrict values = grad_at(job, s.start, s.n, buffer), *restrict f = factors + s.column;
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) sum += square_of(values[i] * f[i]);
        out[s.row] += sum;
    }
}

static double squares(const CameJob *job, int64_t index) {
    const CameGrid *g = &job->grid;
    const CameTile t = tile_at(g, index);
    CameGradBuffer *buffers = job->scratch->gradients;
    CameTileSums *sums = &job->scratch->sums;
    came_begin_tile(job, &t, sums);
    if (is_narrow(g)) {
        add_squares(job, &t, buffers, &t, sums);
        return came_end_tile(job, &job->square, &t, sums);
    }
    const int64_t most = L2_CACHE_ELEMS / t.columns / INTERLEAVED_ROWS * INTERLEAVED_ROWS;
    const int64_t rows = most ? most : INTERLEAVED_ROWS;
    CameTile part = t;
    for (int64_t row = 0; row < t.rows; row += part.rows) {
        part.row = t.row + row;
        part.rows = t.rows - row < rows ? t.rows - row : rows;
        add_squares(job, &part, buffers, &t, sums);
        sums->lines = (int)part.rows;
        came_flush_rows(job, &job->square, &t, sums);
        if (g->read_once) add_ratios(job, &part, buffers, sums);
    }
    const double total = came_end_tile(job, &job->square, &t, sums);
    if (g->ratios_of_columns) add_ratios_of_columns(job, &t, buffers, sums);
    return total;
}

static double update_square_sum(const CameJob *job, int64_t index, CameColumns *columns) {
    const CameTile t = tile_at(&job->grid, index);
    CameGradBuffer *buffers = job->scratch->gradients;
    CameFactors f;
    double total = 0;
    came_set_columns(job, &job->square, &t, columns);
    for (CamePiece s = {0}; next_piece(&job->grid, &t, &s);) {
        const void *g[INTERLEAVED_ROWS];
        came_set_factors(job, &job->square, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) {
            g[k] = grad_in_place(job, start_of(&job->grid, &s, k), s.n, &buffers[k]);
            f.r[k] *= job->grad_scale;
        }
        total += FOR_TYPE(update_square_loop, s.count, grad_type(job), s.n, g, f.r, f.c);
    }
    return total;
}

/* Computes q / known, from which the size of u follows once the other shards' sums are added. */
static void ratios(const CameJob *job, int64_t index, CameColumns *columns) {
    const CameTile t = tile_at(&job->grid, index);
    CameGradBuffer buffer;
    CameFactors f;
    CameTileSums *sums = &job->scratch->sums;
    came_set_columns(job, &job->known, &t, columns);
    came_begin_tile(job, &t, sums);
    for (CamePiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const real *g = grad_at(job, s.start, s.n, &buffer);
        real roots[PIECE_ELEMS], row_sum;
        const void *const pieces[] = {roots};
        came_set_factors(job, &job->known, &t, &s, columns, &f);
        for (int i = 0; i < s.n; i++) roots[i] = update_of(g[i], f.r[0], f.c[i]);
        square_loop(1, REAL_TYPE, s.n, pieces, 1, sums->elements + s.column, &row_sum);
        came_add_piece(job, &job->ratio, &t, &s, &row_sum, sums);
    }
    came_end_tile(job, &job->ratio, &t, sums);
}

/* Updates m and the residuals' sums in one pass. All loads come before all stores here and in apply_loop: a load would
 * wait for a store to an address that differs by whole pages, as addresses do in rows of 1,024. */
FORCE_INLINE_TEMPLATE void momentum_lanes(int first, const int lanes, const int count, const int g_type,
                                          const int m_type, const CameJob *job, const void *const *g, const real *r,
                                          const real *restrict c, void *const *m, real *restrict elements,
                                          RowSums *restrict sums) {
    const int all = count == INTERLEAVED_ROWS;
    const void *restrict g_a = g[0], *restrict g_b = g[all ? 1 : 0];
    const void *restrict g_c = g[all ? 2 : 0], *restrict g_d = g[all ? 3 : 0];
    void *restrict m_a = m[0], *restrict m_b = m[all ? 1 : 0];
    void *restrict m_c = m[all ? 2 : 0], *restrict m_d = m[all ? 3 : 0];
    const real r_a = r[0], r_b = r[all ? 1 : 0], r_c = r[all ? 2 : 0], r_d = r[all ? 3 : 0];
#pragma omp simd
    for (int j = 0; j < lanes; j++) {
        const int i = first + j;
        real u_a = update_of(load_element(g_type, g_a, i), r_a, c[i]);
        real new_a = rounded(m_type, g_type, averaged(job, load_element(m_type, m_a, i), u_a));
        real w_a = residual_of(u_a, new_a), w_b = NOTHING, w_c = NOTHING, w_d = NOTHING;
        if (all) {
            real u_b = update_of(load_element(g_type, g_b, i), r_b, c[i]);
            real u_c = update_of(load_element(g_type, g_c, i), r_c, c[i]);
            real u_d = update_of(load_element(g_type, g_d, i), r_d, c[i]);
            real new_b = rounded(m_type, g_type, averaged(job, load_element(m_type, m_b, i), u_b));
            real new_c = rounded(m_type, g_type, averaged(job, load_element(m_type, m_c, i), u_c));
            real new_d = rounded(m_type, g_type, averaged(job, load_element(m_type, m_d, i), u_d));
            w_b = residual_of(u_b, new_b), w_c = residual_of(u_c, new_c), w_d = residual_of(u_d, new_d);
            store_element(m_type, m_b, i, new_b), store_element(m_type, m_c, i, new_c),
                store_element(m_type, m_d, i, new_d);
        }
        store_element(m_type, m_a, i, new_a);
        sums->a[j] += w_a, sums->b[j] += w_b, sums->c[j] += w_c, sums->d[j] += w_d;
        elements[i] += (w_a + w_b) + (w_c + w_d);
    }
}

FORCE_INLINE_TEMPLATE void momentum_loop(const int count, const int g_type, const int m_type, const CameJob *job, int n,
                                         const void *const *g, const real *r, const real *restrict c, void *const *m,
                                         real *restrict elements, real *restrict sums) {
    const CameJob own = *job;
    RowSums lanes = {{0}, {0}, {0}, {0}};
    FOR_LANES(n, momentum_lanes, count, g_type, m_type, &own, g, r, c, m, elements, &lanes);
    store_sums(count, &lanes, sums);
}

/* The same for an m that is rounded when it is stored, between the update and the residuals. */
static real rounded_momentum_loop(const CameJob *job, int64_t start, int n, const real *restrict g, real r,
                                  const real *restrict c, int apart, real *restrict elements) {
    real u[PIECE_ELEMS], m[PIECE_ELEMS], sum = 0;
    read_m(job->row, start, n, m);
    for (int i = 0; i < n; i++) u[i] = update_of(g[i], r, c[i]);
    if (!apart) {
        for (int i = 0; i < n; i++) m[i] = averaged(job, m[i], u[i]);
        write_m(job->row, start, n, m);
    }
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) {
        real w = residual_of(u[i], m[i]);
        sum += w;
        elements[i] += w;
    }
    return sum;
}

static void momentum(const CameJob *job, int64_t index, real clip, int apart, CameColumns *columns) {
    const CameTile t = tile_at(&job->grid, index);
    const CameRow *row = job->row;
    CameGradBuffer *buffers = job->scratch->gradients;
    CameTileSums *sums = &job->scratch->sums;
    CameFactors f;
    came_set_columns(job, &job->square, &t, columns);
    came_begin_tile(job, &t, sums);
    for (CamePiece s = {0}; next_piece(&job->grid, &t, &s);) {
        const void *g[INTERLEAVED_ROWS];
        void *m[INTERLEAVED_ROWS];
        real row_sums[INTERLEAVED_ROWS], *elements = sums->elements + s.column;
        came_set_factors(job, &job->square, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            f.r[k] *= clip;
            if (!row->weights.memory) fetch_for_next_pass(job, row->weights.data, row->weights.type, start, s.n);
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
        came_add_piece(job, &job->residual, &t, &s, row_sums, sums);
    }
    came_end_tile(job, &job->residual, &t, sums);
}

/* Updates m if rows of dim 0 hold several matrix rows, so that int8 blocks cross the rows of the matrices. */
static void momentum_apart(const CameJob *job, real clip, int64_t first, int64_t last) {
    const CameRow *row = job->row;
    const CameAverage *average = &job->square;
    const int64_t height = row->height, width = row->width, per_row = blocks_in_row(row->inner);
    int64_t known = -1; /* the matrix of `root_mean` */
    real root_mean = 0;
    CameGradBuffer buffer;
    for (int64_t block = first; block < last; block++) {
        const int64_t at = block % per_row * CODEC_BLOCK_ELEMS, start = block / per_row * row->inner + at;
        const int n = (int)(row->inner - at < CODEC_BLOCK_ELEMS ? row->inner - at : CODEC_BLOCK_ELEMS);
        real m[PIECE_ELEMS];
        const real *g = grad_at(job, start, n, &buffer);
        read_m(row, start, n, m);
        for (int i = 0; i < n;) {
            const int64_t line = (start + i) / width, matrix = line / height;
            if (matrix != known) root_mean = (real)sqrt(came_row_mean(job, average, matrix)), known = matrix;
            const real *col = average->col.values + matrix * width;
            const real r = row_factor(root_mean, average->row.values, line) * clip;
            for (int64_t j = (start + i) % width; j < width && i < n; i++, j++)
                m[i] = averaged(job, m[i], update_of(g[i], r, column_factor(col[j])));
        }
        write_m(row, start, n, m);
    }
}

FORCE_INLINE_TEMPLATE void apply_loop(const int count, const int x_type, const int m_type, int n, void *const *x,
                                      const void *const *m, const real *r, const real *restrict c, real decay) {
    const int all = count == INTERLEAVED_ROWS;
    void *restrict x_a = x[0], *restrict x_b = x[all ? 1 : 0];
    void *restrict x_c = x[all ? 2 : 0], *restrict x_d = x[all ? 3 : 0];
    const void *restrict m_a = m[0], *restrict m_b = m[all ? 1 : 0];
    const void *restrict m_c = m[all ? 2 : 0], *restrict m_d = m[all ? 3 : 0];
    const real r_a = r[0], r_b = r[all ? 1 : 0], r_c = r[all ? 2 : 0], r_d = r[all ? 3 : 0];
#pragma omp simd
    for (int i = 0; i < n; i++) {
        real new_a = moved(load_element(x_type, x_a, i), load_element(m_type, m_a, i), c[i], r_a, decay);
        if (all) {
            real new_b = moved(load_element(x_type, x_b, i), load_element(m_type, m_b, i), c[i], r_b, decay);
            real new_c = moved(load_element(x_type, x_c, i), load_element(m_type, m_c, i), c[i], r_c, decay);
            real new_d = moved(load_element(x_type, x_d, i), load_element(m_type, m_d, i), c[i], r_d, decay);
            store_element(x_type, x_b, i, rounded(x_type, m_type, new_b)),
                store_element(x_type, x_c, i, rounded(x_type, m_type, new_c));
            store_element(x_type, x_d, i, rounded(x_type, m_type, new_d));
        }
        store_element(x_type, x_a, i, rounded(x_type, m_type, new_a));
    }
}

static double confidence(const CameJob *job, int64_t index, CameColumns *columns) {
    const CameTile t = tile_at(&job->grid, index);
    CameFactors f;
    double total = 0;
    came_set_columns(job, &job->residual, &t, columns);
    for (CamePiece s = {0}; next_piece(&job->grid, &t, &s);) {
        came_set_factors(job, &job->residual, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) total += f.r[k] * f.sum;
    }
    return total;
}

static double apply(const CameJob *job, int64_t index, real step, real decay, CameColumns *columns) {
    const CameTile t = tile_at(&job->grid, index);
    const CameRow *row = job->row;
    const Weights *w = &row->weights;
    const int x_ready = is_ready(w->type) && w->rounding == ROUND_NEAREST && !w->memory,
              m_ready = is_ready(row->state_type);
    real(*x_buffers)[PIECE_ELEMS] = job->scratch->weights, (*m_buffers)[PIECE_ELEMS] = job->scratch->momenta;
    CameFactors f;
    double total = 0;
    came_set_columns(job, &job->residual, &t, columns);
    for (CamePiece s = {0}; next_piece(&job->grid, &t, &s);) {
        void *x[INTERLEAVED_ROWS];
        const void *m[INTERLEAVED_ROWS];
        real r[INTERLEAVED_ROWS];
        came_set_factors(job, &job->residual, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            x[k] = x_ready ? at(w->data, w->type, start) : read_weights(w, start, s.n, x_buffers[k]);
            m[k] = m_ready ? at(row->exp_avg, row->state_type, start) : read_m(row, start, s.n, m_buffers[k]);
            r[k] = f.r[k] * step;
            total += f.r[k] * f.sum;
        }
        FOR_TYPES(apply_loop, s.count, x_ready ? w->type : REAL_TYPE, m_ready ? row->state_type : REAL_TYPE, s.n, x, m,
                  r, f.c, decay);
        for (int k = 0; k < s.count && !x_ready; k++)
            write_weights(w, job->rng_key, start_of(&job->grid, &s, k), s.n, x[k]);
    }
    return total;
}

/* ---- tensors that are not factored ----------------------------------------------------------------------- */

static double second_moment(const CameJob *job, int64_t index) {
    const CameTile t = tile_at(&job->grid, index);
    const real beta2 = (real)job->beta2, rest = (real)(1 - job->beta2);
    const real shift = (real)((1 - job->beta2) * job->eps1);
    CameGradBuffer buffer;
    double total = 0;
    for (CamePiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const real *restrict g = grad_at(job, s.start, s.n, &buffer);
        real *restrict v = (real *)job->row->exp_avg_sq + s.start, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) {
            v[i] = FMA(beta2, v[i], FMA(rest, g[i] * g[i], shift)); /* CAME-v */
            sum += g[i] * (g[i] / v[i]);                            /* u^2, without a root */
        }
        total += sum;
    }
    return total;
}

static void momentum_and_apply(const CameJob *job, int64_t index, real clip, real step, real decay) {
    const CameTile t = tile_at(&job->grid, index);
    const CameRow *row = job->row;
    CameGradBuffer buffer;
    real m_buffer[PIECE_ELEMS], x_buffer[PIECE_ELEMS];
    for (CamePiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const real *restrict g = grad_at(job, s.start, s.n, &buffer);
        const real *restrict v = (const real *)row->exp_avg_sq + s.start;
        real *restrict m = read_m(row, s.start, s.n, m_buffer);
        for (int i = 0; i < s.n; i++) m[i] = averaged(job, m[i], update_of(g[i], clip, column_factor(v[i])));
        write_m(row, s.start, s.n, m);
        real *restrict x = read_weights(&row->weights, s.start, s.n, x_buffer);
        for (int i = 0; i < s.n; i++) x[i] = moved(x[i], m[i], 1, step, decay);
        write_weights(&row->weights, job->rng_key, s.start, s.n, x);
    }
}

static double param_square_sum(const CameJob *job, int64_t index) {
    const CameTile t = tile_at(&job->grid, index);
    real buffer[PIECE_ELEMS];
    double total = 0;
    for (CamePiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const real *restrict x = read_weights(&job->row->weights, s.start, s.n, buffer);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) sum += (double)x[i] * x[i];
        total += sum;
    }
    return total;
}

const CameLoops PER_ISA(came_loops) = {
    .squares = squares,
    .finish_rows = came_finish_rows,
    .finish_columns = came_finish_columns,
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
