/* The arithmetic of a step, compiled once per instruction set (-DISA=v2|v3|v4|base).
 *
 * Everything is computed in float32. bfloat16 is widened and rounded in registers, other dtypes in a buffer for a piece
 * that stays in the first-level cache; so each line of mathematics stands here once, for all dtypes. */
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

/* Rounds to the nearest, ties to even. A NaN that came from bfloat16 has no low bits that could carry into its sign,
 * so it needs no care (an eighth of the time of an all-bfloat16 step). */
static inline uint16_t to_bfloat16(float value, int any_nan) {
    uint32_t bits = to_bits(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(any_nan && value != value ? 0x7fc0u : rounded);
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
    } else if (type == FLOAT64) {
        for (int i = 0; i < n; i++) buffer[i] = (float)((const double *)data + start)[i];
    } else {
#pragma omp simd
        for (int i = 0; i < n; i++) buffer[i] = from_bits((uint32_t)half[i] << 16);
    }
    return buffer;
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

/* The last mean that was taken, since pieces of one block share theirs. */
typedef struct {
    int64_t first;
    float value;
} Mean;

/* g <- g - mean(g over dims 1..), of which elements [start, start + n) are wanted. */
static void centre(const Block *b, int64_t start, int n, const float *g, float *out, Mean *last) {
    int64_t fan = b->row->fan;
    for (int i = 0; i < n;) {
        int64_t first = (start + i) / fan * fan;
        int end = (int)(first + fan - start < n ? first + fan - start : n);
        if (last->first != first) *last = (Mean){first, mean(b, first, fan)};
        for (; i < end; i++) out[i] = g[i] - last->value;
    }
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

/* A piece of a row: float32 and bfloat16 where they lie, any other dtype widened into a buffer. */
typedef struct {
    void *x, *m, *v, *v_max;
    int x_type, state_type;
    float buffer[PIECE];
} Piece;

static void *at(void *data, int type, int64_t start) { return (char *)data + start * (type == FLOAT32 ? 4 : 2); }

static void take(Piece *p, const Row *row, int64_t start, int n) {
    const int type = row->state_type;
    p->x_type = row->param_type == FLOAT16 ? FLOAT32 : row->param_type;
    p->x = row->param_type == FLOAT16 ? widen(row->param, FLOAT16, start, n, p->buffer)
                                      : at(row->param, row->param_type, start);
    p->state_type = type;
    p->m = at(row->exp_avg, type, start);
    p->v = at(row->exp_avg_sq, type, start);
    p->v_max = row->max_exp_avg_sq ? at(row->max_exp_avg_sq, type, start) : NULL;
}

static void give_back(const Piece *p, const Row *row, int64_t start, int n) {
    if (row->param_type == FLOAT16) narrow_float16(p->buffer, n, (uint16_t *)row->param + start);
}

static inline __attribute__((always_inline)) float get(int type, const void *data, int i) {
    return type == FLOAT32 ? ((const float *)data)[i] : from_bits((uint32_t)((const uint16_t *)data)[i] << 16);
}

/* Stores a value, computed from data of type `from` and of this one, and returns it as stored. */
static inline __attribute__((always_inline)) float put(int type, int from, void *data, int i, float value) {
    if (type == FLOAT32) return ((float *)data)[i] = value;
    uint16_t half = to_bfloat16(value, from != BFLOAT16);
    ((uint16_t *)data)[i] = half;
    return from_bits((uint32_t)half << 16);
}

/* Whether a gradient enters the moments as it lies. */
static int grad_in_place(const Block *b, const Factors *f) {
    return f->grad_scale == 1 && f->l2 == 0 && !b->row->fan && !b->row->grad_layout;
}

/* The gradient as it enters the moments, in float32. */
static const float *load_grad(const Block *b, const Factors *f, int64_t start, int n, const Piece *p, float *buffer,
                              Mean *last) {
    const float *g = read_grad(b, start, n, buffer);
    const float scale = f->grad_scale, l2 = f->l2;
    if (b->row->fan) centre(b, start, n, g, buffer, last), g = buffer;
    if (scale == 1 && l2 == 0) return g;
    for (int i = 0; i < n; i++) buffer[i] = scale * g[i];
    if (l2 != 0)
        for (int i = 0; i < n; i++) buffer[i] = FMA(l2, get(p->x_type, p->x, i), buffer[i]);
    return buffer;
}

/* One loop per combination of what is constant in it: types, second moment, and what becomes of u. */
static inline __attribute__((always_inline)) Sums step_loop(const Factors f, const int second_moment,
                                                            const enum After after, const int x_type, const int g_type,
                                                            const int state_type, float step, int n,
                                                            const void *restrict g, void *restrict m, void *restrict v,
                                                            void *restrict v_max, void *restrict x, float *restrict u) {
    float weight = 0, update = 0;
#pragma omp simd reduction(+ : weight, update)
    for (int i = 0; i < n; i++) {
        float old_x = get(x_type, x, i), grad = get(g_type, g, i);
        float new_m = FMA(f.beta1, get(state_type, m, i), f.beta3 * grad);          /* LAMB-m */
        float new_v = FMA(f.beta2, get(state_type, v, i), f.beta4 * (grad * grad)); /* LAMB-v */
        new_m = put(state_type, g_type, m, i, new_m);
        new_v = put(state_type, g_type, v, i, new_v);
        if (second_moment == AMSGRAD) {
            float old = get(state_type, v_max, i);
            new_v = put(state_type, g_type, v_max, i, new_v > old || new_v != new_v ? new_v : old);
        }
        float new_u = update_of(f, old_x, new_m, new_v);
        weight += old_x * old_x;
        update += new_u * new_u;
        if (after == KEEP) u[i] = new_u;
        if (after == APPLY) put(x_type, state_type, x, i, moved(f, step, old_x, new_u));
    }
    return (Sums){weight, update};
}

/* The sums of a piece whose squares leave the range of float32: formed again in double. */
static Sums careful_sums(const Factors f, const Piece *p, int n) {
    double weight = 0, update = 0;
    for (int i = 0; i < n; i++) {
        float x = get(p->x_type, p->x, i);
        double u = update_of(f, x, get(p->state_type, p->m, i), get(p->state_type, p->v_max ? p->v_max : p->v, i));
        weight += (double)x * x;
        update += u * u;
    }
    return (Sums){weight, update};
}

static inline int in_range(double sum) { return sum > 1e-24 && sum < 1e30; }

#define STEP_LOOP(x_type, g_type, state_type)                                                                       \
    (second_moment == AMSGRAD                                                                                        \
         ? step_loop(*f, AMSGRAD, after, x_type, g_type, state_type, step, n, g, p.m, p.v, p.v_max, p.x, u)          \
         : step_loop(*f, ADAM, after, x_type, g_type, state_type, step, n, g, p.m, p.v, p.v_max, p.x, u))

static inline __attribute__((always_inline)) Sums step_piece(const Block *b, const Factors *f, int second_moment,
                                                             const enum After after, float step, int64_t start, int n,
                                                             float *u, Mean *last) {
    Piece p;
    float buffer[PIECE];
    Sums sums;
    take(&p, b->row, start, n);
    const void *g;
    int half = grad_in_place(b, f) && b->row->grad_type == BFLOAT16 && p.x_type == BFLOAT16;
    if (half) g = at((void *)b->grad, BFLOAT16, start);
    else g = load_grad(b, f, start, n, &p, buffer, last);
    switch (p.x_type << 2 | half << 1 | p.state_type) {
        case FLOAT32 << 2 | 0 << 1 | FLOAT32: sums = STEP_LOOP(FLOAT32, FLOAT32, FLOAT32); break;
        case FLOAT32 << 2 | 0 << 1 | BFLOAT16: sums = STEP_LOOP(FLOAT32, FLOAT32, BFLOAT16); break;
        case BFLOAT16 << 2 | 0 << 1 | FLOAT32: sums = STEP_LOOP(BFLOAT16, FLOAT32, FLOAT32); break;
        case BFLOAT16 << 2 | 0 << 1 | BFLOAT16: sums = STEP_LOOP(BFLOAT16, FLOAT32, BFLOAT16); break;
        case BFLOAT16 << 2 | 1 << 1 | FLOAT32: sums = STEP_LOOP(BFLOAT16, BFLOAT16, FLOAT32); break;
        default: sums = STEP_LOOP(BFLOAT16, BFLOAT16, BFLOAT16); break;
    }
    if (after == APPLY)
        give_back(&p, b->row, start, n);
    else if (!in_range(sums.weight) || !in_range(sums.update))
        sums = careful_sums(*f, &p, n);
    return sums;
}

static inline __attribute__((always_inline)) Sums step_block(const Block *b, const Factors *f, int second_moment,
                                                             const enum After after, float step, float *u) {
    Sums sums = {0, 0};
    Mean last = {-1, 0};
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        float *kept = after == KEEP ? u + done : NULL;
        Sums s = step_piece(b, f, second_moment, after, step, b->start + done, n, kept, &last);
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

static inline __attribute__((always_inline)) void apply_loop(const Factors f, const int x_type, const int state_type,
                                                             float step, int n, const float *restrict u,
                                                             const void *restrict m, const void *restrict v,
                                                             void *restrict x) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float old_x = get(x_type, x, i);
        float new_u = u ? u[i] : update_of(f, old_x, get(state_type, m, i), get(state_type, v, i));
        put(x_type, state_type, x, i, moved(f, step, old_x, new_u));
    }
}

#define APPLY_LOOP(x_type, state_type)                                                                    \
    (u ? apply_loop(*f, x_type, state_type, step, n, u, NULL, NULL, p.x)                                  \
       : apply_loop(*f, x_type, state_type, step, n, NULL, p.m, p.v_max ? p.v_max : p.v, p.x))

static void apply(const Block *b, const Factors *f, float step, const float *update) {
    for (int64_t done = 0; done < b->size; done += PIECE) {
        int n = (int)(b->size - done < PIECE ? b->size - done : PIECE);
        const float *u = update ? update + done : NULL;
        Piece p;
        take(&p, b->row, b->start + done, n);
        switch (p.x_type << 1 | p.state_type) {
            case FLOAT32 << 1 | FLOAT32: APPLY_LOOP(FLOAT32, FLOAT32); break;
            case FLOAT32 << 1 | BFLOAT16: APPLY_LOOP(FLOAT32, BFLOAT16); break;
            case BFLOAT16 << 1 | FLOAT32: APPLY_LOOP(BFLOAT16, FLOAT32); break;
            default: APPLY_LOOP(BFLOAT16, BFLOAT16); break;
        }
        give_back(&p, b->row, b->start + done, n);
    }
}

const Loops CONCATENATE(loops_, ISA) = {moments, apply, moments_and_apply, square_sum};
