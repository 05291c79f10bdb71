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

static inline float nearest_bfloat16(float value) { return from_bits((uint32_t)to_bfloat16(value) << 16); }

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
    } else if (type == FLOAT64) {
        for (int i = 0; i < n; i++) buffer[i] = (float)((const double *)data + start)[i];
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

static float element(const void *data, int type, int64_t at) {
    switch (type) {
        case FLOAT32: return ((const float *)data)[at];
        case FLOAT64: return (float)((const double *)data)[at];
        case FLOAT16: return from_float16(((const uint16_t *)data)[at]);
        default: return from_bits((uint32_t)((const uint16_t *)data)[at] << 16);
    }
}

/* Gradient elements [start, start + n) in the parameter's order, whatever order they lie in. */
static const float *read_grad(const Block *b, int64_t start, int n, float *restrict buffer) {
    const int64_t *layout = b->row->grad_layout;
    const int type = b->row->grad_type;
    if (!layout) return widen(b->grad, type, start, n, buffer);
    const int64_t last = layout[0] - 1, *sizes = layout + 1, *strides = sizes + last + 1;
    for (int i = 0; i < n;) {
        int64_t inner = (start + i) % sizes[last], rest = (start + i) / sizes[last];
        int64_t offset = inner * strides[last];
        for (int64_t d = last - 1; d >= 0; rest /= sizes[d--]) offset += rest % sizes[d] * strides[d];
        for (; i < n && inner < sizes[last]; i++, inner++, offset += strides[last])
            buffer[i] = element(b->grad, type, offset);
    }
    return buffer;
}

static double square_sum(const Block *b) {
    float buffer[PIECE];
    double total = 0;
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        const float *restrict g = read_grad(b, b->start + done, n, buffer);
        double piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int i = 0; i < n; i++) piece += (double)g[i] * g[i];
        total += piece;
    }
    return total;
}

/* The mean of gradient elements [start, start + size). */
static float mean(const Block *b, int64_t start, int64_t size) {
    float buffer[PIECE];
    double total = 0;
    for (int64_t done = 0; done < size; done += PIECE) {
        int n = (int)(size - done < PIECE ? size - done : PIECE);
        const float *restrict g = read_grad(b, start + done, n, buffer);
        double piece = 0;
#pragma omp simd reduction(+ : piece)
        for (int i = 0; i < n; i++) piece += g[i];
        total += piece;
    }
    return (float)(total / (double)size);
}

/* g <- g - mean(g over dims 1..), of which elements [start, start + n) are wanted. */
static void centre(const Block *b, int64_t start, int n, const float *g, float *out) {
    int64_t fan = b->row->fan;
    for (int i = 0; i < n;) {
        int64_t first = (start + i) / fan * fan;
        int end = (int)(first + fan - start < n ? first + fan - start : n);
        float centre = mean(b, first, fan);
        for (; i < end; i++) out[i] = g[i] - centre;
    }
}

/* The gradient as it enters the moments: read in place where nothing has to be done to it. */
static const float *load_grad(const Block *b, const Factors *f, int64_t start, int n, const float *restrict x,
                              float *buffer) {
    const float *g = read_grad(b, start, n, buffer);
    const float scale = f->grad_scale, l2 = f->l2;
    if (b->row->fan) centre(b, start, n, g, buffer), g = buffer;
    if (scale == 1 && l2 == 0) return g;
    for (int i = 0; i < n; i++) buffer[i] = scale * g[i];
    if (l2 != 0)
        for (int i = 0; i < n; i++) buffer[i] = FMA(l2, x[i], buffer[i]);
    return buffer;
}

/* ---- LAMB ------------------------------------------------------------------------------------------------ */

/* u, the same to the bit wherever it is computed. */
static inline float update_of(const Factors f, float x, float m, float v) {
    return FMA(f.weight_decay, x, f.correction * m / (sqrtf(v) + f.eps)); /* LAMB-u */
}

static inline float moved(const Factors f, float step, float x, float u) {
    return FMA(-step, u, f.decay * x); /* LAMB-x */
}

enum After { FORGET, KEEP, APPLY }; /* what becomes of u */

/* The arguments after `f` are compile-time constants at every call. */
static inline __attribute__((always_inline)) Sums step_loop(const Factors f, const int second_moment,
                                                            const int half_state, const enum After after, float step,
                                                            int n, const float *restrict g, float *restrict m,
                                                            float *restrict v, float *restrict v_max,
                                                            float *restrict x, float *restrict u) {
    float weight = 0, update = 0;
#pragma omp simd reduction(+ : weight, update)
    for (int i = 0; i < n; i++) {
        float new_m = FMA(f.beta1, m[i], f.beta3 * g[i]);          /* LAMB-m */
        float new_v = FMA(f.beta2, v[i], f.beta4 * (g[i] * g[i])); /* LAMB-v */
        if (half_state) new_m = nearest_bfloat16(new_m), new_v = nearest_bfloat16(new_v);
        m[i] = new_m, v[i] = new_v;
        if (second_moment == AMSGRAD) v_max[i] = new_v = new_v > v_max[i] || new_v != new_v ? new_v : v_max[i];
        float new_u = update_of(f, x[i], new_m, new_v);
        weight += x[i] * x[i];
        update += new_u * new_u;
        if (after == KEEP) u[i] = new_u;
        if (after == APPLY) x[i] = moved(f, step, x[i], new_u);
    }
    return (Sums){weight, update};
}

/* The sums of a piece whose squares leave the range of float32: formed again in double. */
static Sums careful_sums(const Factors f, int n, const float *m, const float *v, const float *x) {
    double weight = 0, update = 0;
    for (int i = 0; i < n; i++) {
        double u = update_of(f, x[i], m[i], v[i]);
        weight += (double)x[i] * x[i];
        update += u * u;
    }
    return (Sums){weight, update};
}

static inline int in_range(double sum) { return sum > 1e-24 && sum < 1e30; }

/* A piece of a row, widened to float32. */
typedef struct {
    float *x, *m, *v, *v_max;
    float buffer[4][PIECE];
} Piece;

static void load(Piece *p, const Row *row, int64_t start, int n, int with_moments) {
    p->x = widen(row->param, row->param_type, start, n, p->buffer[0]);
    if (!with_moments) return;
    p->m = widen(row->exp_avg, row->state_type, start, n, p->buffer[1]);
    p->v = widen(row->exp_avg_sq, row->state_type, start, n, p->buffer[2]);
    p->v_max = row->max_exp_avg_sq ? widen(row->max_exp_avg_sq, row->state_type, start, n, p->buffer[3]) : NULL;
}

static void store_moments(const Piece *p, const Row *row, int64_t start, int n) {
    narrow(row->exp_avg, row->state_type, start, n, p->m);
    narrow(row->exp_avg_sq, row->state_type, start, n, p->v);
    if (row->max_exp_avg_sq) narrow(row->max_exp_avg_sq, row->state_type, start, n, p->v_max);
}

#define STEP_LOOP(second_moment, half_state) \
    step_loop(*f, second_moment, half_state, after, step, n, g, p->m, p->v, p->v_max, p->x, u)

static inline __attribute__((always_inline)) Sums step_piece(const Block *b, const Factors *f, int second_moment,
                                                             const enum After after, float step, int64_t start, int n,
                                                             float *u) {
    Piece piece, *p = &piece;
    float buffer[PIECE];
    Sums sums;
    load(p, b->row, start, n, 1);
    const float *g = load_grad(b, f, start, n, p->x, buffer);
    if (b->row->state_type == FLOAT32)
        sums = second_moment == AMSGRAD ? STEP_LOOP(AMSGRAD, 0) : STEP_LOOP(ADAM, 0);
    else
        sums = second_moment == AMSGRAD ? STEP_LOOP(AMSGRAD, 1) : STEP_LOOP(ADAM, 1);
    store_moments(p, b->row, start, n);
    if (after == APPLY)
        narrow(b->row->param, b->row->param_type, start, n, p->x);
    else if (!in_range(sums.weight) || !in_range(sums.update))
        sums = careful_sums(*f, n, p->m, second_moment == AMSGRAD ? p->v_max : p->v, p->x);
    return sums;
}

static inline __attribute__((always_inline)) Sums step_block(const Block *b, const Factors *f, int second_moment,
                                                             const enum After after, float step, float *u) {
    Sums sums = {0, 0};
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        Sums s = step_piece(b, f, second_moment, after, step, b->start + done, n, after == KEEP ? u + done : NULL);
        sums.weight += s.weight;
        sums.update += s.update;
    }
    return sums;
}

static Sums moments(const Block *b, const Factors *f, int second_moment, float *update) {
    return update ? step_block(b, f, second_moment, KEEP, 0, update) : step_block(b, f, second_moment, FORGET, 0, NULL);
}

static Sums moments_and_apply(const Block *b, const Factors *f, int second_moment, float step) {
    return step_block(b, f, second_moment, APPLY, step, NULL);
}

static void apply(const Block *b, const Factors *factors, float step, const float *update) {
    const Factors f = *factors;
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        int64_t start = b->start + done;
        Piece p;
        load(&p, b->row, start, n, !update);
        float *restrict x = p.x;
        if (update) {
            const float *restrict u = update + done;
#pragma omp simd
            for (int i = 0; i < n; i++) x[i] = moved(f, step, x[i], u[i]);
        } else {
            const float *restrict m = p.m, *restrict v = p.v_max ? p.v_max : p.v;
#pragma omp simd
            for (int i = 0; i < n; i++) x[i] = moved(f, step, x[i], update_of(f, x[i], m[i], v[i]));
        }
        narrow(b->row->param, b->row->param_type, start, n, x);
    }
}

const Loops CONCATENATE(loops_, ISA) = {moments, apply, moments_and_apply, square_sum};
