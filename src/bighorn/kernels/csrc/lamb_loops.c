/* The arithmetic of a LAMB step. float32 and bfloat16 are read and written where they lie. */
#include "lamb.h"

#include <math.h>

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

/* One loop per combination of what is constant in it: types, second moment, and what becomes of u. */
static inline __attribute__((always_inline)) Sums step_loop(const Factors f, const int second_moment,
                                                            const enum After after, const int x_type, const int g_type,
                                                            const int state_type, float step, int n,
                                                            const void *restrict g, void *restrict m, void *restrict v,
                                                            void *restrict v_max, void *restrict x, float *restrict u) {
    float weight = 0, update = 0;
#pragma omp simd reduction(+ : weight, update)
    for (int i = 0; i < n; i++) {
        float old_x = get(x_type, x, i), grad = FMA(f.l2, old_x, f.grad_scale * get(g_type, g, i));
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
    int half = is_plain(b->gradient) && b->gradient->type == BFLOAT16 && p.x_type == BFLOAT16;
    const void *g = half ? at((void *)b->grad, BFLOAT16, start)
                         : (const void *)centred_grad(b->gradient, b->grad, start, n, buffer, last);
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

const LambLoops CONCATENATE(lamb_loops_, ISA) = {moments, apply, moments_and_apply};
