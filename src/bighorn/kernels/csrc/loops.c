/* The arithmetic of a step, compiled once per instruction set (-DISA=v2|v3|v4|base).
 *
 * Everything is computed in float32 on pieces that stay in the first-level cache: other dtypes are widened into a
 * buffer before and rounded back after, so each line of mathematics stands here once, for all dtypes. */
#include "lamb.h"

#include <math.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

/* A fused multiply-add where the instruction set has one; the build contracts nothing by itself. */
#if defined(__FMA__) || defined(__aarch64__)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)

enum { PIECE = 1024 };

/* ---- dtypes ---------------------------------------------------------------------------------------------- */

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* nearest, ties to even */
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* float16 without hardware help: scaling by powers of two lets the float unit do subnormals and rounding. */
static inline float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t magnitude = rest >= 0x0f800000u ? rest + 0x70000000u : to_bits(from_bits(rest + 0x38800000u) - 0x1p-14f);
    uint32_t normal = rest >= 0x00800000u && rest < 0x0f800000u ? rest + 0x38000000u : magnitude;
    return from_bits(sign | normal);
}

static inline uint16_t to_float16(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t normal = (rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u) >> 13; /* nearest, ties to even */
    uint32_t subnormal = to_bits(from_bits(rest) + 0.5f) - 0x3f000000u;
    uint32_t half = rest < 0x38800000u ? subnormal : rest >= 0x477ff000u ? 0x7c00u : normal;
    return (uint16_t)(sign | (rest > 0x7f800000u ? 0x7e00u : half));
}

static void widen_float16(const uint16_t *restrict in, int n, float *restrict out) {
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < n; i++) out[i] = from_float16(in[i]);
}

static void narrow_float16(const float *restrict in, int n, uint16_t *restrict out) {
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) out[i] = to_float16(in[i]);
}

/* float32 data is used where it lies; any other dtype is copied into the buffer. */
static float *widen(const void *data, int type, int64_t start, int n, float *restrict buffer) {
    const uint16_t *half = (const uint16_t *)data + start;
    if (type == FLOAT32) return (float *)data + start;
    if (type == FLOAT16) {
        widen_float16(half, n, buffer);
    } else {
#pragma omp simd
        for (int i = 0; i < n; i++) buffer[i] = from_bits((uint32_t)half[i] << 16);
    }
    return buffer;
}

static void narrow(void *data, int type, int64_t start, int n, const float *restrict buffer) {
    uint16_t *restrict half = (uint16_t *)data + start;
    if (type == FLOAT32) return;
    if (type == FLOAT16) {
        narrow_float16(buffer, n, half);
    } else {
#pragma omp simd
        for (int i = 0; i < n; i++) half[i] = to_bfloat16(buffer[i]);
    }
}

/* ---- gradients ------------------------------------------------------------------------------------------- */

/* Sums are in double: no overflow or underflow of squares, and no error worth a word. */
static double sum(const float *restrict x, int n) {
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (int i = 0; i < n; i++) total += x[i];
    return total;
}

static double square_sum(const void *grad, int type, int64_t start, int64_t size) {
    float buffer[PIECE];
    double total = 0;
    for (int64_t done = 0; done < size; done += PIECE) {
        int n = (int)(size - done < PIECE ? size - done : PIECE);
        const float *restrict g = widen(grad, type, start + done, n, buffer);
        double piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int i = 0; i < n; i++) piece += (double)g[i] * g[i];
        total += piece;
    }
    return total;
}

/* The mean of gradient elements [start, start + size). */
static float mean(const void *grad, int type, int64_t start, int64_t size) {
    float buffer[PIECE];
    double total = 0;
    for (int64_t done = 0; done < size; done += PIECE) {
        int n = (int)(size - done < PIECE ? size - done : PIECE);
        total += sum(widen(grad, type, start + done, n, buffer), n);
    }
    return (float)(total / (double)size);
}

/* g <- g - mean(g over dims 1..), of which elements [start, start + n) are wanted. */
static void centre(const Block *b, int64_t start, int n, const float *g, float *out) {
    int64_t fan = b->row->fan;
    for (int i = 0; i < n;) {
        int64_t first = (start + i) / fan * fan;
        int end = (int)(first + fan - start < n ? first + fan - start : n);
        float centre = mean(b->grad, b->row->grad_type, first, fan);
        for (; i < end; i++) out[i] = g[i] - centre;
    }
}

/* The gradient as it enters the moments: read in place where nothing has to be done to it. */
static const float *load_grad(const Block *b, const Factors *f, int64_t start, int n, const float *restrict x,
                              float *buffer) {
    const float *g = widen(b->grad, b->row->grad_type, start, n, buffer);
    const float scale = f->grad_scale, l2 = f->l2;
    if (b->row->fan) centre(b, start, n, g, buffer), g = buffer;
    if (scale == 1 && l2 == 0) return g;
    for (int i = 0; i < n; i++) buffer[i] = scale * g[i];
    if (l2 != 0)
        for (int i = 0; i < n; i++) buffer[i] = FMA(l2, x[i], buffer[i]);
    return buffer;
}

/* ---- LAMB ------------------------------------------------------------------------------------------------ */

static void moments_loop(const Factors *f, int second_moment, int n, const float *restrict g, float *restrict m,
                         float *restrict v, float *restrict v_max) {
    const float beta1 = f->beta1, beta3 = f->beta3, beta2 = f->beta2, beta4 = f->beta4;
#pragma omp simd
    for (int i = 0; i < n; i++) {
        m[i] = FMA(beta1, m[i], beta3 * g[i]);          /* LAMB-m */
        v[i] = FMA(beta2, v[i], beta4 * (g[i] * g[i])); /* LAMB-v */
    }
    if (second_moment == AMSGRAD)
#pragma omp simd
        for (int i = 0; i < n; i++) v_max[i] = v[i] > v_max[i] || v[i] != v[i] ? v[i] : v_max[i];
}

static Sums update_loop(const Factors *f, int n, const float *restrict x, const float *restrict m,
                        const float *restrict v, float *restrict u) {
    const float correction = f->correction, eps = f->eps, weight_decay = f->weight_decay;
    double weight = 0, update = 0;
#pragma omp simd reduction(+ : weight, update)
    for (int i = 0; i < n; i++) {
        u[i] = FMA(weight_decay, x[i], correction * m[i] / (sqrtf(v[i]) + eps)); /* LAMB-u */
        weight += (double)x[i] * x[i];
        update += (double)u[i] * u[i];
    }
    return (Sums){weight, update};
}

static void apply_loop(float decay, float step, int n, const float *restrict u, float *restrict x) {
#pragma omp simd
    for (int i = 0; i < n; i++) x[i] = FMA(-step, u[i], decay * x[i]); /* LAMB-x */
}

/* The pieces of a block, widened: one row's arrays at one offset. */
typedef struct {
    float *x, *m, *v, *v_max;
    float buffer[4][PIECE];
} Piece;

static void load_param(Piece *p, const Row *row, int64_t start, int n) {
    p->x = widen(row->param, row->param_type, start, n, p->buffer[0]);
}

static void load_moments(Piece *p, const Row *row, int64_t start, int n) {
    p->m = widen(row->exp_avg, row->state_type, start, n, p->buffer[1]);
    p->v = widen(row->exp_avg_sq, row->state_type, start, n, p->buffer[2]);
    p->v_max = row->max_exp_avg_sq ? widen(row->max_exp_avg_sq, row->state_type, start, n, p->buffer[3]) : p->v;
}

static void store_moments(const Piece *p, const Row *row, int64_t start, int n) {
    narrow(row->exp_avg, row->state_type, start, n, p->m);
    narrow(row->exp_avg_sq, row->state_type, start, n, p->v);
    if (row->max_exp_avg_sq) narrow(row->max_exp_avg_sq, row->state_type, start, n, p->v_max);
}

/* One piece up to its update u, which is computed from the moments as stored: so u computed again later is equal. */
static Sums piece_moments(const Block *b, const Factors *f, int second_moment, int64_t start, int n, Piece *p,
                          float *u) {
    float buffer[PIECE];
    load_param(p, b->row, start, n);
    const float *g = load_grad(b, f, start, n, p->x, buffer);
    load_moments(p, b->row, start, n);
    moments_loop(f, second_moment, n, g, p->m, p->v, p->v_max);
    if (b->row->state_type != FLOAT32) {
        store_moments(p, b->row, start, n);
        load_moments(p, b->row, start, n);
    }
    return update_loop(f, n, p->x, p->m, p->v_max, u);
}

static void piece_apply(const Row *row, const Factors *f, float step, int64_t start, int n, const Piece *p,
                        const float *u) {
    apply_loop(f->decay, step, n, u, p->x);
    narrow(row->param, row->param_type, start, n, p->x);
}

static Sums moments(const Block *b, const Factors *f, int second_moment, float *update) {
    Piece piece;
    float buffer[PIECE];
    Sums sums = {0, 0};
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        Sums s = piece_moments(b, f, second_moment, b->start + done, n, &piece, update ? update + done : buffer);
        sums.weight += s.weight;
        sums.update += s.update;
    }
    return sums;
}

static void apply(const Block *b, const Factors *f, float step, const float *update) {
    Piece piece;
    float buffer[PIECE];
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        load_param(&piece, b->row, b->start + done, n);
        if (!update) {
            load_moments(&piece, b->row, b->start + done, n);
            update_loop(f, n, piece.x, piece.m, piece.v_max, buffer);
        }
        piece_apply(b->row, f, step, b->start + done, n, &piece, update ? update + done : buffer);
    }
}

static Sums moments_and_apply(const Block *b, const Factors *f, int second_moment, float step) {
    Piece piece;
    float buffer[PIECE];
    Sums sums = {0, 0};
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        Sums s = piece_moments(b, f, second_moment, b->start + done, n, &piece, buffer);
        piece_apply(b->row, f, step, b->start + done, n, &piece, buffer);
        sums.weight += s.weight;
        sums.update += s.update;
    }
    return sums;
}

const Loops CONCATENATE(loops_, ISA) = {moments, apply, moments_and_apply, square_sum};
