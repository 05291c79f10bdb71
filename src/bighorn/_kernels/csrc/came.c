/* The schedule of one tensor's CAME step after its second moment (factored.c): clipping, the momentum, the residuals'
 * averages, and x. This file has no arithmetic on elements.
 *
 * A step reads the gradient again for m and the residuals' averages, and then writes x. */
#include "came.h"

#include "factored.h"

#include <math.h>

TABLE_PER_ISA(CameLoops, came_loops)

/* One call. */
typedef struct {
    FactoredStep step;
    const CameOptions *options;
    const double *beta2s; /* one per row, since it can depend on the row's step count */
    double grad_scale;
} CameStep;

/* One thread's share of a tensor's step. */
typedef struct {
    FactoredWork work;
    const CameLoops *loops;
    const CameOptions *options;
    CameFactors factors;
} CameWork;

static void begin(CameWork *c, CameStep *s, int64_t index, const SlotShare *share, double *scratch, double *workspace) {
    FactoredWork *w = &c->work;
    const FactoredSlot *slot = &s->step.slots[index];
    const CameOptions *o = &s->options[slot->options];
    factored_begin(w, &s->step, index, o->maximize ? -s->grad_scale : s->grad_scale, s->beta2s[index], o->eps[0], share,
                   scratch, workspace);
    c->loops = came_loops_for(s->step.isa);
    c->options = o;
    c->factors = (CameFactors){
        .beta1 = (float)o->betas[0],
        .beta1_rest = (float)(1 - o->betas[0]),
        .rng_key = rng_key_at(&slot->weights, o->rounding_seed, (int64_t)*slot->step + 1),
        .dither = dither_at(&slot->weights, o->rounding_seed, (int64_t)*slot->step + 1),
        .residual = factored_average(w, slot->exp_avg_res_row, slot->exp_avg_res_col, o->betas[2], o->eps[1]),
    };
}

/* Returns the sum of x^2 if the learning rate depends on it. */
static double param_square_sum(CameWork *c) {
    return c->options->scale_parameter ? factored_param_square_sum(&c->work) : 0;
}

/* Sets the factor of u, from the sum of its squares. */
static void set_clip(CameWork *c, double update_sum) {
    const FactoredWork *w = &c->work;
    double rms = sqrt(update_sum / w->size), excess = rms / c->options->clip_threshold; /* CAME-clip */
    if (excess < 1) excess = 1;
    if (w->thread == 0) w->job.slot->metrics[0] = (float)rms, w->job.slot->metrics[1] = (float)(1 / excess);
    c->factors.clip = (float)(1 / excess);
}

/* The bias correction of the residuals' averages, which start at 0. */
static double correction(const CameWork *c) {
    const CameOptions *o = c->options;
    return o->bias_correction ? sqrt(one_minus_power(o->betas[2], (int64_t)*c->work.job.slot->step + 1)) : 1;
}

/* Sets the factors of m and of x in the new x, from the sum of x^2. */
static void set_step(CameWork *c, double param_sum, double factor) {
    const CameOptions *o = c->options;
    const double rms = sqrt(param_sum / c->work.size);
    const double lr = !o->scale_parameter ? o->lr : o->lr * (rms < o->scale_eps ? o->scale_eps : rms);
    c->factors.step = (float)(lr * factor), c->factors.decay = (float)(1 - lr * o->weight_decay);
}

/* Updates m and x, if the second moment is not factored. */
static void momentum_and_apply(CameWork *c, FactoredSquareSums sums) {
    FactoredWork *w = &c->work;
    set_clip(c, sums.update);
    set_step(c, sums.param, 1);
    for (int64_t tile = w->first; tile < w->last; tile++) {
        c->loops->momentum_and_apply(&w->job, &c->factors, tile);
    }
    if (w->thread == 0) w->job.slot->metrics[2] = 1;
}

/* Updates m and the residuals' averages of the selected matrices. */
static void momentum(CameWork *c) {
    FactoredWork *w = &c->work;
    w->columns->matrix = -1;
    for (int64_t tile = w->last; tile-- > w->first;) c->loops->momentum(&w->job, &c->factors, tile, w->columns);
    factored_finish(w, &c->factors.residual);
    factored_wait(w);
    w->columns->matrix = -1;
}

/* Returns the sum of the confidence before bias correction. */
static double confidence(CameWork *c) {
    FactoredWork *w = &c->work;
    for (int64_t tile = w->first; tile < w->last; tile++)
        w->job.tile_sums[tile] = c->loops->confidence(&w->job, &c->factors, tile, w->columns);
    return factored_total(w);
}

/* Updates x of the selected matrices; returns the sum of their confidence. */
static double apply(CameWork *c) {
    FactoredWork *w = &c->work;
    for (int64_t tile = w->first; tile < w->last; tile++) {
        w->job.tile_sums[tile] = c->loops->apply(&w->job, &c->factors, tile, w->columns);
    }
    return factored_total(w);
}

static void store_confidence(const CameWork *c, double sum) {
    const FactoredWork *w = &c->work;
    if (w->thread == 0) w->job.slot->metrics[2] = (float)(correction(c) * sum / w->size);
}

/* Updates m, the residuals' averages and x, if the second moment is factored. A matrix's m and averages give its x, so
 * that a group of matrices is complete, while it is in cache, before the next group begins. */
static void momentum_then_apply(CameWork *c, FactoredSquareSums sums) {
    const FactoredGrid *g = &c->work.job.grid;
    double confidence = 0;
    set_clip(c, sums.update);
    set_step(c, sums.param, correction(c));
    for (int64_t from, to = g->matrices; to > 0; to = from) {
        from = (to - 1) / g->group * g->group;
        factored_select(&c->work, from, to);
        momentum(c);
        confidence += apply(c);
    }
    store_confidence(c, confidence);
}

static void step_whole(CameWork *c) {
    FactoredSquareSums sums = {.param = param_square_sum(c)};
    sums.update = factored_second_moment(&c->work);
    if (c->work.job.slot->factored) momentum_then_apply(c, sums);
    else momentum_and_apply(c, sums);
}

/* Returns where the sums of the residuals' averages and of the confidence are added up. */
static FactoredShardSums residual_shard_sums(const FactoredJob *job) {
    const FactoredShard *h = job->shard;
    double *rest;
    FactoredShardSums s = shard_sums_at(h, h->sums[is_split_both_ways(h) ? 2 : 1], h->matrices, &rest);
    if (!is_split(h)) s.confidence = rest;
    return s;
}

static double roots(const double *averages, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += 1 / sqrt(averages[i]);
    return sum;
}

/* Returns the sum of the confidence over the whole tensor, from sums that have been added up. */
static double reduced_confidence(const FactoredJob *job, const FactoredShardSums *from) {
    const FactoredShard *h = job->shard;
    double sum = 0;
    if (from->confidence) return *from->confidence;
    for (int64_t k = 0; k < h->matrices; k++)
        sum += sqrt(reduced_row_mean(h, from, k)) *
               (from->row ? roots(from->row + k * h->height, h->height) : from->inner[k]) *
               (from->col ? roots(from->col + k * h->width, h->width) : from->inner[k]);
    return sum;
}

/* The stages of a shard's step. Each but the last ends with sums that are added up over all shards. */
typedef enum { SECOND_MOMENT, SIZE_OF_UPDATE, MOMENTUM, APPLY } CameStage;

/* Returns the stage after `round` reduction rounds. Only for a shard that is split both ways, no sums of lines give the
 * size of u; for others SIZE_OF_UPDATE is left out, and APPLY comes a round sooner. */
static CameStage stage_after(const FactoredShard *shard, int round) {
    return (CameStage)(round > 0 && !is_split_both_ways(shard) ? round + 1 : round);
}

static void shard_second_moment(CameWork *c, const FactoredShardSums *to) {
    FactoredWork *w = &c->work;
    const FactoredJob *job = &w->job;
    const int has_sizes = !is_split_both_ways(job->shard);
    const double param = has_sizes ? param_square_sum(c) : 0, update = factored_second_moment(w);
    if (w->thread > 0) return;
    store_shard_average(job, &job->square, &job->ratio, to);
    if (has_sizes) store_shard_square_sums(to, (FactoredSquareSums){update, param});
}

static void shard_size_of_update(CameWork *c, const FactoredShardSums *to) {
    const double param = param_square_sum(c), update = factored_update_square_sum(&c->work);
    if (c->work.thread == 0) store_shard_square_sums(to, (FactoredSquareSums){update, param});
}

static void shard_momentum(CameWork *c, FactoredSquareSums sums, const FactoredShardSums *to) {
    const FactoredWork *w = &c->work;
    if (!w->job.slot->factored) {
        momentum_and_apply(c, sums);
        return;
    }
    set_clip(c, sums.update);
    momentum(c);
    const double of_shard = to->confidence ? confidence(c) : 0;
    if (w->thread > 0) return;
    store_shard_average(&w->job, &c->factors.residual, NULL, to);
    if (to->confidence) *to->confidence = of_shard;
}

static void shard_apply(CameWork *c, double param_sum, const FactoredShardSums *residuals) {
    if (!c->work.job.slot->factored) return; /* its momentum has moved x */
    factored_load_reduced(&c->work, &c->factors.residual, residuals);
    set_step(c, param_sum, correction(c));
    apply(c);
    store_confidence(c, reduced_confidence(&c->work.job, residuals));
}

/* Does the part of a shard's step before a reduction round, or after the last one. */
static void step_shard(CameWork *c, int round) {
    FactoredWork *w = &c->work;
    const FactoredJob *job = &w->job;
    const FactoredShardSums squares = square_shard_sums(job), residuals = residual_shard_sums(job);
    const CameStage stage = stage_after(job->shard, round);
    if (stage == SIZE_OF_UPDATE || stage == MOMENTUM) factored_load_reduced(w, &job->square, &squares);
    switch (stage) {
        case SECOND_MOMENT: shard_second_moment(c, &squares); break;
        case SIZE_OF_UPDATE: shard_size_of_update(c, &squares); break;
        case MOMENTUM: shard_momentum(c, reduced_square_sums(job, &squares), &residuals); break;
        case APPLY: shard_apply(c, *squares.param, &residuals); break;
        default: /* the remaining rounds exist only for shards that are split both ways */ break;
    }
}

static void step_slot(FactoredStep *step, int64_t slot, const SlotShare *share, double *scratch, double *workspace) {
    CameStep *s = (CameStep *)step; /* of which it is the first member */
    CameWork c;
    begin(&c, s, slot, share, scratch, workspace);
    if (c.work.size == 0) {
        float *metrics = step->slots[slot].metrics;
        if (share->part == 0) metrics[0] = 0, metrics[1] = metrics[2] = 1;
        return;
    }
    if (step->shards) step_shard(&c, step->round);
    else step_whole(&c);
    factored_wait(&c.work); /* the workspace can be used again */
}

/* Makes one CAME step of the `count` rows in `order`, the largest first, without counting it. If `shards` is not NULL,
 * the call makes only the part of the step before reduction round `round` (0 is the first), or after the last round.
 * The function allocates no memory, so it cannot fail. */
EXPORT void bighorn_came_step(const RunConfig *run, const CameOptions *options, const FactoredSlot *slots,
                              const FactoredShard *shards, const Gradient *gradients, void *const *grads,
                              const double *beta2s, const int64_t *order, int64_t count, double grad_scale, int round,
                              double *workspace) {
    CameStep s = {
        .step =
            {.isa = run->isa, .slots = slots, .shards = shards, .gradients = gradients, .grads = grads, .round = round},
        .options = options,
        .beta2s = beta2s,
        .grad_scale = grad_scale,
    };
    factored_step_slots(run, &s.step, step_slot, order, count, workspace);
}
