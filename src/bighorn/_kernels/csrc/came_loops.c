/* The arithmetic of a CAME step after the second moment: momentum, the residuals' averages, and x. It is in float32;
 * sums over more than a tile are in double. */
#include "came.h"
#include "codec.h"
#include "factored_loops.h"
#include "rounding.h"

/* ---- the momentum in place or in a buffer ---------------------------------------------------------------- */

static CodecData codes_of(const FactoredSlot *slot) {
    return (CodecData){slot->exp_avg, slot->exp_avg_scale, slot->width, slot->weights.layout};
}

static float *read_m(const FactoredSlot *slot, int64_t start, int n, float *buffer) {
    const CodecData data = codes_of(slot);
    if (slot->state_type == INT8) decode(CODEC_LINEAR, &data, start, n, buffer);
    else if (slot->state_type == INT4) decode(CODEC_INT4, &data, start, n, buffer);
    else return widen(slot->exp_avg, slot->state_type, start, n, buffer);
    return buffer;
}

/* Stores m, and replaces the buffer by the values as they are stored, rounded. */
static void write_m(const FactoredSlot *slot, const CameFactors *f, int64_t start, int n, float *buffer) {
    const CodecData data = codes_of(slot);
    if (slot->state_type == INT8) encode(CODEC_LINEAR, &data, start, n, buffer, f->dither);
    else if (slot->state_type == INT4) encode(CODEC_INT4, &data, start, n, buffer, f->dither);
    else {
        narrow(buffer, n, slot->exp_avg, slot->state_type, start);
        widen(slot->exp_avg, slot->state_type, start, n, buffer);
    }
}

/* ---- the passes ------------------------------------------------------------------------------------------ */

static inline float averaged(const CameFactors *f, float m, float u) {
    return FMA(f->beta1, m, f->beta1_rest * u); /* CAME-m */
}

static inline float residual_of(float u, float m) { return square_of(u - m); } /* CAME-res */

static inline float moved(float x, float m, float factor, float step, float decay) {
    return FMA(-step, m * factor, decay * x); /* CAME-x */
}

/* Updates m and the residuals' sums in one pass. */
FORCE_INLINE_TEMPLATE void momentum_lanes(int first, const int lanes, const int count, const int g_type,
                                          const int m_type, const CameFactors *f, const void *const *g, const float *r,
                                          const float *restrict c, void *const *m, float *restrict elements,
                                          RowSums *restrict sums) {
#pragma omp simd
    for (int j = 0; j < lanes; j++) {
        const int i = first + j;
        float total = NOTHING;
        for (int k = 0; k < count; k++) {
            const float u = update_of(load_element(g_type, g[k], i), r[k], c[i]);
            const float new_m = rounded(m_type, g_type, averaged(f, load_element(m_type, m[k], i), u));
            const float w = residual_of(u, new_m);
            store_element(m_type, m[k], i, new_m);
            sums->rows[k][j] += w;
            total += w;
        }
        elements[i] += total;
    }
}

FORCE_INLINE_TEMPLATE void momentum_loop(const int count, const int g_type, const int m_type, const CameFactors *f,
                                         int n, const void *const *g, const float *r, const float *restrict c,
                                         void *const *m, float *restrict elements, float *restrict sums) {
    const CameFactors factors = *f;
    RowSums lanes = {{{0}}};
    FOR_LANES(n, momentum_lanes, count, g_type, m_type, &factors, g, r, c, m, elements, &lanes);
    store_sums(count, &lanes, sums);
}

/* Updates m in codes, and returns u and the m that is stored. */
FORCE_INLINE_TEMPLATE void advance_codes(const enum CodecForm form, const FactoredSlot *slot, const CameFactors *f,
                                         int64_t start, int n, const float *restrict g, float r,
                                         const float *restrict c, float *restrict u, float *restrict m) {
    const CodecData data = codes_of(slot);
    EACH_CODEC_PART(part, data.inner, start, start + n) {
        const float unit = scale_of(form, data.scales[part.scale]).unit;
        int8_t buffer[CODEC_BLOCK_ELEMS + 2];
        const int8_t *restrict codes = codes_at(form, &data, part, buffer);
        uint32_t largest = 0;
        for (int i = 0; i < part.size; i++) {
            u[i] = update_of(g[i], r, c[i]);
            m[i] = averaged(f, codes[i] * unit, u[i]);
            const uint32_t magnitude = magnitude_of((float)m[i]);
            largest = magnitude > largest ? magnitude : largest;
        }
        encode_block(form, &data, part, largest, f->dither, m);
        g += part.size, c += part.size, u += part.size, m += part.size;
    }
}

/* The same as `momentum_loop` for an m that is rounded when it is stored, between the update and the residuals. */
static float rounded_momentum_loop(const FactoredSlot *slot, const CameFactors *f, int64_t start, int n,
                                   const float *restrict g, float r, const float *restrict c,
                                   float *restrict elements) {
    float u[PIECE_ELEMS], m[PIECE_ELEMS], sum = 0;
    if (slot->state_type == INT8) advance_codes(CODEC_LINEAR, slot, f, start, n, g, r, c, u, m);
    else if (slot->state_type == INT4) advance_codes(CODEC_INT4, slot, f, start, n, g, r, c, u, m);
    else {
        read_m(slot, start, n, m);
        for (int i = 0; i < n; i++) {
            u[i] = update_of(g[i], r, c[i]);
            m[i] = averaged(f, m[i], u[i]);
        }
        write_m(slot, f, start, n, m);
    }
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) {
        float w = residual_of(u[i], m[i]);
        sum += w;
        elements[i] += w;
    }
    return sum;
}

static void momentum(const FactoredJob *job, const CameFactors *f, int64_t index, FactoredColumns *columns) {
    const FactoredTile t = tile_at(&job->grid, index);
    const FactoredSlot *slot = job->slot;
    FactoredGradBuffer *buffers = job->scratch->gradients;
    FactoredTileSums *sums = &job->scratch->sums;
    PieceFactors factors;
    factored_set_columns(job, &job->square, &t, columns);
    factored_begin_tile(job, &t, sums);
    for (FactoredPiece s = {0}; next_piece(&job->grid, &t, &s);) {
        const void *g[INTERLEAVED_ROWS];
        void *m[INTERLEAVED_ROWS];
        float row_sums[INTERLEAVED_ROWS], *elements = sums->elements + s.column;
        factored_set_factors(job, &job->square, &t, &s, columns, &factors);
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            factors.r[k] *= f->clip;
            if (is_ready(slot->state_type)) {
                g[k] = grad_in_place(job, start, s.n, &buffers[k]);
                m[k] = at(slot->exp_avg, slot->state_type, start);
                factors.r[k] *= job->grad_scale;
            } else {
                row_sums[k] = rounded_momentum_loop(slot, f, start, s.n, grad_at(job, start, s.n, &buffers[k]),
                                                    factors.r[k], factors.c, elements);
            }
        }
        if (is_ready(slot->state_type))
            FOR_TYPES(momentum_loop, s.count, grad_type(job), slot->state_type, f, s.n, g, factors.r, factors.c, m,
                      elements, row_sums);
        factored_add_piece(job, &f->residual, &t, &s, row_sums, sums);
    }
    factored_end_tile(job, &f->residual, &t, sums);
}

FORCE_INLINE_TEMPLATE void apply_loop(const int count, const int x_type, const int m_type, int n, void *const *x,
                                      const void *const *m, const float *r, const float *restrict c, float decay) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < count; k++) {
            const float new_x = moved(load_element(x_type, x[k], i), load_element(m_type, m[k], i), c[i], r[k], decay);
            store_element(x_type, x[k], i, rounded(x_type, m_type, new_x));
        }
    }
}

static double confidence(const FactoredJob *job, const CameFactors *f, int64_t index, FactoredColumns *columns) {
    const FactoredTile t = tile_at(&job->grid, index);
    PieceFactors factors;
    double total = 0;
    factored_set_columns(job, &f->residual, &t, columns);
    for (FactoredPiece s = {0}; next_piece(&job->grid, &t, &s);) {
        factored_set_factors(job, &f->residual, &t, &s, columns, &factors);
        for (int k = 0; k < s.count; k++) total += factors.r[k] * factors.sum;
    }
    return total;
}

static double apply(const FactoredJob *job, const CameFactors *f, int64_t index, FactoredColumns *columns) {
    const FactoredTile t = tile_at(&job->grid, index);
    const FactoredSlot *slot = job->slot;
    const Weights *w = &slot->weights;
    const int x_ready = is_ready(w->type) && w->rounding == ROUND_NEAREST, m_ready = is_ready(slot->state_type);
    float (*x_buffers)[PIECE_ELEMS] = job->scratch->weights, (*m_buffers)[PIECE_ELEMS] = job->scratch->momenta;
    PieceFactors factors;
    double total = 0;
    factored_set_columns(job, &f->residual, &t, columns);
    for (FactoredPiece s = {0}; next_piece(&job->grid, &t, &s);) {
        void *x[INTERLEAVED_ROWS];
        const void *m[INTERLEAVED_ROWS];
        float r[INTERLEAVED_ROWS];
        factored_set_factors(job, &f->residual, &t, &s, columns, &factors);
        for (int k = 0; k < s.count; k++) {
            const int64_t start = start_of(&job->grid, &s, k);
            x[k] = x_ready ? at(w->data, w->type, start) : read_weights(w, start, s.n, x_buffers[k]);
            m[k] = m_ready ? at(slot->exp_avg, slot->state_type, start) : read_m(slot, start, s.n, m_buffers[k]);
            r[k] = factors.r[k] * f->step;
            total += factors.r[k] * factors.sum;
        }
        FOR_TYPES(apply_loop, s.count, x_ready ? w->type : FLOAT32, m_ready ? slot->state_type : FLOAT32, s.n, x, m, r,
                  factors.c, f->decay);
        for (int k = 0; k < s.count && !x_ready; k++)
            write_weights(w, f->rng_key, start_of(&job->grid, &s, k), s.n, x[k]);
    }
    return total;
}

/* ---- tensors that are not factored ----------------------------------------------------------------------- */

static void momentum_and_apply(const FactoredJob *job, const CameFactors *f, int64_t index) {
    const FactoredTile t = tile_at(&job->grid, index);
    const FactoredSlot *slot = job->slot;
    FactoredGradBuffer buffer;
    float m_buffer[PIECE_ELEMS], x_buffer[PIECE_ELEMS];
    for (FactoredPiece s = {.count = 1}; next_piece(&job->grid, &t, &s);) {
        const float *restrict g = grad_at(job, s.start, s.n, &buffer);
        const float *restrict v = (const float *)slot->exp_avg_sq + s.start;
        float *restrict m = read_m(slot, s.start, s.n, m_buffer);
        for (int i = 0; i < s.n; i++) m[i] = averaged(f, m[i], update_of(g[i], f->clip, column_factor(v[i])));
        write_m(slot, f, s.start, s.n, m);
        float *restrict x = read_weights(&slot->weights, s.start, s.n, x_buffer);
        for (int i = 0; i < s.n; i++) x[i] = moved(x[i], m[i], 1, f->step, f->decay);
        write_weights(&slot->weights, f->rng_key, s.start, s.n, x);
    }
}

const CameLoops PER_ISA(came_loops) = {
    .momentum = momentum,
    .confidence = confidence,
    .apply = apply,
    .momentum_and_apply = momentum_and_apply,
};
