/* LAMB: the options, the chunks of a tensor, norms and the trust ratio. layerwise.h has the
 * schedule, lamb_loops.c and lamb_blocks.c have the arithmetic on elements. */
#include "lamb.h"
#include "layer_slots.h"

#include <math.h>

LAYER_OPTIMIZER(Lamb, lamb)
TABLE_PER_ISA(LambLoops, lamb_blocks)

/* ---- one tensor ------------------------------------------------------------------------------------------ */

/* Makes the same decision as trust_ratio() in reference/lamb.py, which is the specification. NaN passes through. */
static double trust_ratio(const LambOptions *o, double weight_norm, double update_norm) { /* LAMB-q */
    if (!o->adapt || weight_norm == 0 || update_norm < LEAST_NORM) return 1;
    double low = o->weight_norm_bounds[0], high = o->weight_norm_bounds[1];
    double phi = weight_norm < low ? low : weight_norm > high ? high : weight_norm;
    double ratio = phi / update_norm;
    low = o->trust_ratio_bounds[0], high = o->trust_ratio_bounds[1];
    return ratio < low ? low : ratio > high ? high : ratio;
}

/* The step on the ball of a tensor's first norm, as in reference/lamb.py: returns the ratio, and the factor of x. */
static double ball_step(double radius, double lr, LayerSums total, double *factor) {
    const double update_norm = sqrt(total.update), p = lr * radius / update_norm;
    const double square = total.weight - 2 * p * total.inner + p * p * total.update,
                 norm = sqrt(square < 0 ? 0 : square);
    if (update_norm < LEAST_NORM || norm == 0) return 0; /* x stays */
    *factor = radius / norm;                             /* LAMB-ball */
    return *factor * radius / update_norm;
}

/* u = correction * m / (sqrt(v) + eps) carries both bias corrections: eps grows by sqrt(1 - beta2^t) instead of v
 * being divided by it. */
static LambFactors factors_of(const LambOptions *o, const LayerSlot *slot, double grad_scale) {
    int64_t t = (int64_t)*slot->step + 1;
    double correction1 = o->bias_correction == BIAS_CORRECTION_FALSE ? 1 : one_minus_power(o->betas[0], t);
    double correction2 = o->bias_correction == BIAS_CORRECTION_FALSE || o->second_moment == SECOND_MOMENT_ADAGRAD
                             ? 1
                             : one_minus_power(o->betas[1], t);
    double correction = sqrt(correction2) / correction1, root = sqrt(correction2), lr = o->lr;
    if (o->bias_correction == BIAS_CORRECTION_LR) lr *= correction, correction = root = 1;
    return (LambFactors){
        .lr = lr,
        .grad_scale = o->maximize ? -grad_scale : grad_scale,
        .l2 = o->decay_mode == DECAY_MODE_L2 ? o->weight_decay : 0,
        .beta1 = o->betas[0],
        .beta3 = o->grad_averaging ? 1 - o->betas[0] : 1,
        .beta2 = o->second_moment == SECOND_MOMENT_ADAGRAD ? 1 : o->betas[1],
        .beta4 = o->second_moment == SECOND_MOMENT_ADAGRAD ? 1 : 1 - o->betas[1],
        .correction = correction,
        .eps = o->eps * root,
        .weight_decay = o->decay_mode == DECAY_MODE_RATIO ? o->weight_decay : 0,
        .decay = o->decay_mode == DECAY_MODE_DECOUPLED ? 1 - o->lr * o->weight_decay : 1,
        .rng_key = rng_key_at(&slot->weights, o->rounding_seed, t),
        .dither = dither_at(&slot->weights, o->rounding_seed, t),
    };
}

/* Returns the norm that a tensor keeps, its first one; one thread stores it, while others may read it. */
static float radius_of(const LayerSlot *slot, float weight_norm, bool stores) {
    float radius;
    __atomic_load(slot->radius, &radius, __ATOMIC_RELAXED);
    if (radius != 0) return radius;
    if (stores) __atomic_store(slot->radius, &weight_norm, __ATOMIC_RELAXED);
    return weight_norm;
}

/* ---- the rule of layerwise.h ----------------------------------------------------------------------------- */

static LayerInfo prepare(const LayerSlots *s, int64_t slot, void *locals) {
    const LayerSlot *r = &s->slots[slot];
    const LambOptions *o = options_of(s, r);
    LambLocals *l = locals;
    l->loops = r->inner > 0 ? lamb_blocks_for(s->isa) : lamb_loops_for(s->isa);
    l->factors = factors_of(o, r, s->grad_scale);
    return layer_info(s, slot, sizeof(float), o->adapt);
}

static LayerSums first(const LayerSlots *s, const LayerChunk *b, const void *locals, void *update) {
    const LambLocals *l = locals;
    const LambOptions *o = options_of(s, b->slot);
    if (o->hyperball) return l->loops->moments_on_ball(b, &l->factors, update);
    return o->adapt ? l->loops->moments(b, &l->factors, update)
                    : l->loops->moments_and_apply(b, &l->factors, l->factors.lr);
}

static double ratio(const LayerSlots *s, int64_t slot, void *locals, LayerSums total, bool writes_norms) {
    LambLocals *l = locals;
    const LambOptions *o = options_of(s, &s->slots[slot]);
    const double weight_norm = sqrt(total.weight) * fabs(l->factors.decay), update_norm = sqrt(total.update);
    double ratio;
    if (o->hyperball) {
        const float radius = radius_of(&s->slots[slot], (float)weight_norm, writes_norms);
        ratio = ball_step(radius, l->factors.lr, total, &l->factors.decay);
    } else {
        ratio = trust_ratio(o, weight_norm, update_norm);
    }
    float *norms = s->slots[slot].metrics;
    if (writes_norms) norms[0] = (float)weight_norm, norms[1] = (float)update_norm, norms[2] = (float)ratio;
    return ratio;
}

static void second(const LayerSlots *s, const LayerChunk *b, const void *locals, double ratio, const void *update) {
    const LambLocals *l = locals;
    (void)s;
    l->loops->apply(b, &l->factors, l->factors.lr * ratio, update);
}

LAYER_STEP(bighorn_lamb_step, LambOptions, second)
