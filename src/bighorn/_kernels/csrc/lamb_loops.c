/* The arithmetic of a LAMB step whose moments are floats, in float32. Data of float32 and bfloat16 are
 * read and written in place. */
#define Value float
#define MULTIPLY_ADD FMA
#define EACH(factor) (factor)
#include "lamb_rule.h"

/* The use of u: none but its square, or it is stored, or it is applied; on a ball, its product with x as well. */
enum LambUpdateUse { UPDATE_FORGET, UPDATE_KEEP, UPDATE_APPLY, UPDATE_FORGET_ON_BALL, UPDATE_KEEP_ON_BALL };

FORCE_INLINE_TEMPLATE int keeps(const enum LambUpdateUse after) {
    return after == UPDATE_KEEP || after == UPDATE_KEEP_ON_BALL;
}

FORCE_INLINE_TEMPLATE int on_ball(const enum LambUpdateUse after) {
    return after == UPDATE_FORGET_ON_BALL || after == UPDATE_KEEP_ON_BALL;
}

/* Whether bfloat16 gradients are used in place: with weights of the same type, or with float32 masters. The loop for
 * masters adds up squares in another order than the loop for float32 gradients, so it is used only if x does not
 * depend on the sums. */
static int has_bfloat16_grads(const LayerChunk *b, const LambFloats *f, const enum LambUpdateUse after) {
    const Weights *w = &b->slot->weights;
    const int has_masters =
        w->type == FLOAT32 && used_in_place(w) && b->slot->state_type == FLOAT32 && b->gradient->type == BFLOAT16;
    return f->l2 == 0 && ((has_masters && after == UPDATE_APPLY) || all_in_bfloat16(b));
}

/* Returns the elements of a piece: all of a chunk if no data are copied. */
static int piece_of(const LayerChunk *b, const LambFloats *f, const enum LambUpdateUse after) {
    return has_bfloat16_grads(b, f, after) ? CHUNK_ELEMS : f->l2 == 0 ? layer_piece(b) : PIECE_ELEMS;
}

/* Returns the gradient of a piece, with the decay, in float32. */
FORCE_INLINE const float *decayed_piece(const LambFloats *f, const LayerPiece *p) {
    const float *g = piece_grad(p);
    return p->x_type == FLOAT32 ? decayed_grad(f, FLOAT32, p->n, g, p->x, p->buffers->g)
                                : decayed_grad(f, BFLOAT16, p->n, g, p->x, p->buffers->g);
}

/* Updates the moments of one element, and returns u. */
FORCE_INLINE_TEMPLATE float step_one(const LambFloats f, const int g_type, const int state_type, float g, float x,
                                     float *m, float *v) {
    float grad = f.scale * g;
    *m = rounded(state_type, g_type, next_m(f, *m, grad));
    *v = rounded(state_type, g_type, next_v(f, *v, grad));
    return update_of(f, x, *m, sqrtf(*v), 1);
}

#define STEP_ON_BALL 0
#include "lamb_step.h"
#undef STEP_ON_BALL
#define STEP_ON_BALL 1
#include "lamb_step.h"

/* Computes the sums of a piece again in double, if squares leave the range of float32. */
static LayerSums careful_sums(const LambFloats f, const LayerPiece *p) {
    LayerSums sums = {0};
    for (int i = 0; i < p->n; i++) {
        const float x = load_element(p->x_type, p->x, i), m = load_element(p->state_type, p->m, i);
        const double u = update_of(f, x, m, sqrtf(load_element(p->state_type, p->v, i)), 1);
        add_sums(&sums, (LayerSums){(double)x * x, u * u, x * u});
    }
    return sums;
}

#define STEP_LOOP(x_type, g_type, state_type)                                                                \
    (on_ball(after)                                                                                          \
         ? step_loop_on_ball(*f, after, x_type, g_type, state_type, step, p->n, g, p->m, p->v, p->x, stored) \
         : step_loop(*f, after, x_type, g_type, state_type, step, p->n, g, p->m, p->v, p->x, stored))
#define STEP_PAIRS(g_type)                                                                           \
    (on_ball(after) ? step_pairs_on_ball(*f, after, g_type, step, p->n, g, p->m, p->v, p->x, stored) \
                    : step_pairs(*f, after, g_type, step, p->n, g, p->m, p->v, p->x, stored))

FORCE_INLINE_TEMPLATE LayerSums step_piece(const LayerPiece *p, const LambFloats *f, const enum LambUpdateUse after,
                                           float step, float *stored) {
    const LayerChunk *b = p->chunk;
    const int half = has_bfloat16_grads(b, f, after);
    const void *g = half ? at((void *)b->grad, BFLOAT16, p->start) : (const void *)decayed_piece(f, p);
    LayerSums sums;
    switch (p->x_type << 2 | half << 1 | p->state_type) {
        case FLOAT32 << 2 | 0 << 1 | FLOAT32: sums = STEP_LOOP(FLOAT32, FLOAT32, FLOAT32); break;
        case FLOAT32 << 2 | 0 << 1 | BFLOAT16: sums = STEP_LOOP(FLOAT32, FLOAT32, BFLOAT16); break;
        case FLOAT32 << 2 | 1 << 1 | FLOAT32:
            if (after == UPDATE_APPLY) sums = STEP_LOOP(FLOAT32, BFLOAT16, FLOAT32);
            break;
        case BFLOAT16 << 2 | 0 << 1 | FLOAT32: sums = STEP_LOOP(BFLOAT16, FLOAT32, FLOAT32); break;
        case BFLOAT16 << 2 | 0 << 1 | BFLOAT16: sums = STEP_PAIRS(FLOAT32); break;
        case BFLOAT16 << 2 | 1 << 1 | FLOAT32: sums = STEP_LOOP(BFLOAT16, BFLOAT16, FLOAT32); break;
        default: sums = STEP_PAIRS(BFLOAT16); break;
    }
    if (after == UPDATE_APPLY) store_piece(p, f->rng_key);
    else if (!in_range(sums.weight) || !in_range(sums.update)) sums = careful_sums(*f, p);
    return sums;
}

FORCE_INLINE_TEMPLATE LayerSums step_chunk(const LayerChunk *b, const LambFloats *f, const enum LambUpdateUse after,
                                           float step, float *update) {
    LayerSums sums = {0};
    LayerBuffers buffers;
    EACH_PIECE(p, b, piece_of(b, f, after), &buffers) {
        float *stored = keeps(after) ? update + (p.start - b->start) : NULL;
        add_sums(&sums, step_piece(&p, f, after, step, stored));
    }
    return sums;
}

static LayerSums moments(const LayerChunk *b, const LambFactors *factors, void *update) {
    const LambFloats f = floats_of(factors);
    return update ? step_chunk(b, &f, UPDATE_KEEP, 0, update) : step_chunk(b, &f, UPDATE_FORGET, 0, NULL);
}

static LayerSums moments_on_ball(const LayerChunk *b, const LambFactors *factors, void *update) {
    const LambFloats f = floats_of(factors);
    return update ? step_chunk(b, &f, UPDATE_KEEP_ON_BALL, 0, update)
                  : step_chunk(b, &f, UPDATE_FORGET_ON_BALL, 0, NULL);
}

static LayerSums moments_and_apply(const LayerChunk *b, const LambFactors *factors, double step) {
    const LambFloats f = floats_of(factors);
    return step_chunk(b, &f, UPDATE_APPLY, (float)step, NULL);
}

/* Returns u: what is stored, or computed from the moments. */
FORCE_INLINE_TEMPLATE float update_again(const LambFloats f, const float *stored, int i, float x, float m, float v) {
    return stored ? stored[i] : update_of(f, x, m, sqrtf(v), 1);
}

FORCE_INLINE_TEMPLATE void apply_loop(const LambFloats f, const int x_type, const int state_type, float step, int n,
                                      const float *restrict stored, const void *restrict m, const void *restrict v,
                                      void *restrict x) {
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float old_x = load_element(x_type, x, i);
        float old_m = stored ? 0 : load_element(state_type, m, i), old_v = stored ? 0 : load_element(state_type, v, i);
        float u = update_again(f, stored, i, old_x, old_m, old_v);
        store_element(x_type, x, i, rounded(x_type, state_type, moved(f, step, old_x, u)));
    }
}

/* The same for pairs of bfloat16, with `stored` in the order of `step_pairs`. */
FORCE_INLINE_TEMPLATE void apply_pairs(const LambFloats f, float step, int n, const float *restrict stored,
                                       const Bfloat16Pair *restrict m, const Bfloat16Pair *restrict v,
                                       Bfloat16Pair *restrict x) {
    const int half = n / 2;
#pragma omp simd
    for (int i = 0; i < half; i++) {
        const Bfloat16Pair old_m = stored ? 0 : m[i], old_v = stored ? 0 : v[i];
        float x1 = low(x[i]), u1 = update_again(f, stored, i, x1, low(old_m), low(old_v));
        float x2 = high(x[i]), u2 = update_again(f, stored, half + i, x2, high(old_m), high(old_v));
        x[i] = pair_of(round_bfloat16(moved(f, step, x1, u1), 0), round_bfloat16(moved(f, step, x2, u2), 0));
    }
    if (n % 2) apply_loop(f, BFLOAT16, BFLOAT16, step, 1, stored ? stored + n - 1 : NULL, m + half, v + half, x + half);
}

#define APPLY_LOOP(x_type, state_type)                                                     \
    (stored ? apply_loop(f, x_type, state_type, (float)step, p.n, stored, NULL, NULL, p.x) \
            : apply_loop(f, x_type, state_type, (float)step, p.n, NULL, p.m, p.v, p.x))
#define APPLY_PAIRS(x_type, state_type)                                 \
    (stored ? apply_pairs(f, (float)step, p.n, stored, NULL, NULL, p.x) \
            : apply_pairs(f, (float)step, p.n, NULL, p.m, p.v, p.x))

static void apply(const LayerChunk *b, const LambFactors *factors, double step, const void *update) {
    const LambFloats f = floats_of(factors);
    LayerBuffers buffers;
    EACH_PIECE(p, b, piece_of(b, &f, UPDATE_FORGET), &buffers) {
        const float *stored = update ? (const float *)update + (p.start - b->start) : NULL;
        FOR_LAYER_TYPES(p, APPLY_LOOP, APPLY_PAIRS);
        store_piece(&p, f.rng_key);
    }
}

const LambLoops PER_ISA(lamb_loops) = {
    .moments = moments,
    .moments_on_ball = moments_on_ball,
    .apply = apply,
    .moments_and_apply = moments_and_apply,
};
