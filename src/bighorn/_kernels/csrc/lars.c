/* LARS: the options, norms and the trust ratio. layerwise.h has the schedule, lars_loops.c the arithmetic on elements.
 */
#include "lars.h"
#include "layer_slots.h"

#include <math.h>

LAYER_OPTIMIZER(Lars, lars)

static LayerInfo prepare(const LayerSlots *s, int64_t slot, void *locals) {
    const LayerSlot *r = &s->slots[slot];
    const LarsOptions *o = options_of(s, r);
    LarsLocals *l = locals;
    l->loops = lars_loops_for(s->isa);
    l->factors = (LarsFactors){
        .grad_scale = o->maximize ? -s->grad_scale : s->grad_scale,
        .weight_decay = o->weight_decay,
        .norm_decay = o->denominator == DENOMINATOR_JOINT ? o->weight_decay : 0,
        .momentum = o->momentum,
        .rng_key = rng_key_at(&r->weights, o->rounding_seed, (int64_t)*r->step + 1),
    };
    /* Nothing is stored between the loops, but the scratch is divided by the bytes of an element. */
    return layer_info(s, slot, 1, true);
}

static LayerSums first(const LayerSlots *s, const LayerChunk *b, const void *locals, void *update) {
    const LarsLocals *l = locals;
    (void)s, (void)update;
    return l->loops->norms(b, &l->factors);
}

/* Makes the same decisions as trust_ratio() in reference/lars.py, which is the specification. */
static double ratio(const LayerSlots *s, int64_t slot, void *locals, LayerSums total, bool writes_norms) {
    const LarsOptions *o = options_of(s, &s->slots[slot]);
    LarsFactors *f = &((LarsLocals *)locals)->factors;
    const double weight_norm = sqrt(total.weight), norm = sqrt(total.update);
    const double update_norm = o->denominator == DENOMINATOR_SUM ? norm + o->weight_decay * weight_norm : norm;
    double q = o->trust_coefficient * weight_norm / (update_norm + o->eps); /* LARS-q */
    if (weight_norm == 0 || norm < LEAST_NORM) q = 1;
    if (o->trust_clip) q = q >= o->lr ? 1 : q / o->lr;
    if (!o->adapt) q = 1;
    const double after = o->lr_in_momentum ? 1 : o->lr;
    f->before = o->lr_in_momentum ? o->lr * q : q;
    f->after_u = o->nesterov ? after : 0, f->after_m = o->nesterov ? after * o->momentum : after;
    float *metrics = s->slots[slot].metrics;
    if (writes_norms) metrics[0] = (float)weight_norm, metrics[1] = (float)update_norm, metrics[2] = (float)q;
    return q;
}

static void second(const LayerSlots *s, const LayerChunk *b, const void *locals, double ratio, const void *update) {
    const LarsLocals *l = locals;
    (void)s, (void)ratio, (void)update; /* the ratio is in the factors */
    l->loops->apply(b, &l->factors);
}

LAYER_STEP(bighorn_lars_step, LarsOptions, second)
