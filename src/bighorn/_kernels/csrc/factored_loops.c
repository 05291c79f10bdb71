/* The arithmetic of a factored second moment: its averages, and the sum of u^2, as in Adafactor and CAME. It is in
 * float32; sums over more than a tile are in double. */
#include "factored_loops.h"

#include "rounding.h"

FORCE_INLINE_TEMPLATE void square_lanes(int first, const int lanes, const int count, const int type,
                                        const void *const *g, float scale, float *restrict elements,
                                        RowSums *restrict sums) {
#pragma omp simd
    for (int j = 0; j < lanes; j++) {
        float total = NOTHING;
        for (int k = 0; k < count; k++) {
            const float q = square_of(scale * load_element(type, g[k], first + j));
            sums->rows[k][j] += q;
            total += q;
        }
        elements[first + j] += total;
    }
}

FORCE_INLINE_TEMPLATE void square_loop(const int count, const int type, int n, const void *const *g, float scale,
                                       float *restrict elements, float *restrict sums) {
    RowSums lanes = {{{0}}};
    FOR_LANES(n, square_lanes, count, type, g, scale, elements, &lanes);
    store_sums(count, &lanes, sums);
}

FORCE_INLINE_TEMPLATE void ratio_loop(const int count, const int type, int n, const void *const *g, const float *r,
                                      float *restrict ratios) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float total = NOTHING;
        for (int k = 0; k < count; k++) total += square_of(load_element(type, g[k], i) * r[k]);
        ratios[i] += total;
    }
}

FORCE_INLINE_TEMPLATE void update_square_lanes(int first, const int lanes, const int count, const int type,
                                               const void *const *g, const float *r, const float *restrict c,
                                               float *restrict sums) {
#pragma omp simd
    for (int j = 0; j < lanes; j++) {
        float total = NOTHING;
        for (int k = 0; k < count; k++)
            total += square_of(update_of(load_element(type, g[k], first + j), r[k], c[first + j]));
        sums[j] += total;
    }
}

/* Returns the sum of u^2, before clipping. */
FORCE_INLINE_TEMPLATE float update_square_loop(const int count, const int type, int n, const void *const *g,
                                               const float *r, const float *restrict c) {
    float lanes[SUM_LANES] = {0};
    FOR_LANES(n, update_square_lanes, count, type, g, r, c, lanes);
    return sum_of_lanes(lanes);
}

/* Adds q of a part of tile t to its sums. */
static void add_squares(const FactoredJob *job, const FactoredTile *part, FactoredGradBuffer *buffers,
                        const FactoredTile *t, FactoredTileSums *sums) {
    for (FactoredPiece s = {0}; next_piece(&job->grid, part, &s);) {
        const void *g[INTERLEAVED_ROWS];
        float row_sums[INTERLEAVED_ROWS], *elements = sums->elements + s.column;
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            g[k] = grad_in_place(job, start, s.n, &buffers[k]);
        }
        FOR_TYPE(square_loop, s.count, grad_type(job), s.n, g, job->grad_scale, elements, row_sums);
        factored_add_piece(job, &job->square, t, &s, row_sums, sums);
    }
}

/* Adds q / row of the same part, which is still in the second-level cache. */
static void add_ratios(const FactoredJob *job, const FactoredTile *part, FactoredGradBuffer *buffers,
                       FactoredTileSums *sums) {
    const float *row = job->square.row.values + part->matrix * job->grid.height + part->row;
    float factors[PIECE_ELEMS];
    for (int i = 0; i < part->rows; i++) factors[i] = job->grad_scale * (float)ROOT_SCALE / sqrtf(row[i]);
    for (FactoredPiece s = {0}; next_piece(&job->grid, part, &s);) {
        const void *g[INTERLEAVED_ROWS];
        float r[INTERLEAVED_ROWS], *ratios = sums->ratios + s.column;
        for (int k = 0; k < s.count; k++) {
            g[k] = grad_in_place(job, start_of(&job->grid, &s, k), s.n, &buffers[k]);
            r[k] = factors[s.row + k * s.apart];
        }
        FOR_TYPE(ratio_loop, s.count, grad_type(job), s.n, g, r, ratios);
    }
}

/* Adds up q / col of each row of a tile that has whole columns, and that is still in the second-level cache. */
static void add_ratios_of_columns(const FactoredJob *job, const FactoredTile *t, FactoredGradBuffer *buffer,
                                  FactoredTileSums *sums) {
    const FactoredGrid *g = &job->grid;
    const float *col = job->square.col.values + t->matrix * g->width + t->column;
    float *restrict factors = sums->ratios, *out = job->ratio_sums + t->across * g->matrices * g->height;
    out += t->matrix * g->height + t->row;
    memset(out, 0, (size_t)t->rows * sizeof(float));
    for (int i = 0; i < t->columns; i++) factors[i] = (float)ROOT_SCALE / sqrtf(col[i]);
    for (FactoredPiece s = {.count = 1}; next_piece(g, t, &s);) {
        const float *restrict values = grad_at(job, s.start, s.n, buffer), *restrict f = factors + s.column;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) sum += square_of(values[i] * f[i]);
        out[s.row] += sum;
    }
}

static double squares(const FactoredJob *job, int64_t index) {
    const FactoredGrid *g = &job->grid;
    const FactoredTile t = tile_at(g, index);
    FactoredGradBuffer *buffers = job->scratch->gradients;
    FactoredTileSums *sums = &job->scratch->sums;
    factored_begin_tile(job, &t, sums);
    if (g->kind != LONG_ROWS) {
        add_squares(job, &t, buffers, &t, sums);
        return factored_end_tile(job, &job->square, &t, sums);
    }
    const int64_t most = L2_CACHE_ELEMS / t.columns / INTERLEAVED_ROWS * INTERLEAVED_ROWS;
    const int64_t rows = most ? most : INTERLEAVED_ROWS;
    FactoredTile part = t;
    for (int64_t row = 0; row < t.rows; row += part.rows) {
        part.row = t.row + row;
        part.rows = t.rows - row < rows ? t.rows - row : rows;
        add_squares(job, &part, buffers, &t, sums);
        sums->lines = (int)part.rows;
        factored_flush_rows(job, &job->square, &t, sums);
        if (g->update_sum == SUM_OF_COLUMNS) add_ratios(job, &part, buffers, sums);
    }
    const double total = factored_end_tile(job, &job->square, &t, sums);
    if (g->update_sum == SUM_OF_ROWS) add_ratios_of_columns(job, &t, buffers, sums);
    return total;
}

static double update_square_sum(const FactoredJob *job, int64_t index, FactoredColumns *columns) {
    const FactoredTile t = tile_at(&job->grid, index);
    FactoredGradBuffer *buffers = job->scratch->gradients;
    PieceFactors f;
    double total = 0;
    factored_set_columns(job, &job->square, &t, columns);
    for (FactoredPiece s = {0}; next_piece(&job->grid, &t, &s);) {
        const void *g[INTERLEAVED_ROWS];
        factored_set_factors(job, &job->square, &t, &s, columns, &f);
        for (int k = 0; k < s.count; k++) {
            g[k] = grad_in_place(job, start_of(&job->grid, &s, k), s.n, &buffers[k]);
            f.r[k] *= job->grad_scale;
        }
        total += FOR_TYPE(update_square_loop, s.count, grad_type(job), s.n, g, f.r, f.c);
    }
    return total;
}

/* Computes q / whole, from which the size of u follows once the other shards' sums are added. */
static void ratios(const FactoredJob *job, int64_t index, FactoredColumns *columns) {
    const FactoredTile t = tile_at(&job->grid, index);
    FactoredGradBuffer buffer;
    PieceFactors f;
    FactoredTileSums *sums = &job->scratch->sums;
    factored_set_columns(job, &job->whole, &t, columns);
    factored_begin_tile(job, &t, sums);
    for (FactoredPiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const float *g = grad_at(job, s.start, s.n, &buffer);
        float roots[PIECE_ELEMS], row_sum;
        const void *const pieces[] = {roots};
        factored_set_factors(job, &job->whole, &t, &s, columns, &f);
        for (int i = 0; i < s.n; i++) roots[i] = update_of(g[i], f.r[0], f.c[i]);
        square_loop(1, FLOAT32, s.n, pieces, 1, sums->elements + s.column, &row_sum);
        factored_add_piece(job, &job->ratio, &t, &s, &row_sum, sums);
    }
    factored_end_tile(job, &job->ratio, &t, sums);
}

/* ---- tensors that are not factored, and all ---------------------------------------------------------------- */

static double second_moment(const FactoredJob *job, int64_t index) {
    const FactoredTile t = tile_at(&job->grid, index);
    const float beta2 = (float)job->beta2, rest = (float)(1 - job->beta2);
    const float shift = (float)((1 - job->beta2) * job->eps1);
    FactoredGradBuffer buffer;
    double total = 0;
    for (FactoredPiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, &buffer);
        float *restrict v = (float *)job->slot->exp_avg_sq + s.start, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) {
            v[i] = FMA(beta2, v[i], FMA(rest, g[i] * g[i], shift)); /* CAME-v */
            sum += g[i] * (g[i] / v[i]);                            /* u^2, without a root */
        }
        total += sum;
    }
    return total;
}

static double param_square_sum(const FactoredJob *job, int64_t index) {
    const FactoredTile t = tile_at(&job->grid, index);
    float buffer[PIECE_ELEMS];
    double total = 0;
    for (FactoredPiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const float *restrict x = read_weights(&job->slot->weights, s.start, s.n, buffer);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.n; i++) sum += (double)x[i] * x[i];
        total += sum;
    }
    return total;
}

const FactoredLoops PER_ISA(factored_loops) = {
    .squares = squares,
    .finish_rows = factored_finish_rows,
    .finish_columns = factored_finish_columns,
    .ratios = ratios,
    .update_square_sum = update_square_sum,
    .second_moment = second_moment,
    .param_square_sum = param_square_sum,
};
