/* LAMB: the options, the chunks of a tensor, norms and the trust ratio. layerwise.h has the
 * schedule, lamb_loops.c and lamb_blocks.c have the arithmetic on elements. */
#include "lamb.h"
#include "codec.h"

#include <math.h>

TABLE_PER_ISA(LambLoops, lamb_loops)
TABLE_PER_ISA(LambLoops, lamb_loops_double)
TABLE_PER_ISA(LambLoops, lamb_blocks)
TABLE_PER_ISA(StridedLoops, strided_loops)

/* All threads share a larger tensor, because their caches together hold more of it; one thread gets a smaller one. */
enum { SHARED_MIN_ELEMS = 1 << 18 };

/* ---- chunks ---------------------------------------------------------------------------------------------- */

/* Returns the first element of a chunk. Quantization blocks are not divided: a chunk has as many of them as fit. */
static int64_t start_of(const LambRow *row, int64_t size, int64_t chunk) {
    int64_t start = chunk * CHUNK_ELEMS;
    if (row->inner) {
        int64_t per_row = blocks_in_row(row->inner);
        int64_t least = row->inner < CODEC_BLOCK_ELEMS ? row->inner : CODEC_BLOCK_ELEMS;
        int64_t first = chunk * (CHUNK_ELEMS / least);
        start = first / per_row * row->inner + first % per_row * CODEC_BLOCK_ELEMS;
    }
    return start < size ? start : size;
}

static int64_t chunks_of(const LambRow *row, int64_t size) {
    if (!row->inner) return chunks_in(size);
    int64_t least = row->inner < CODEC_BLOCK_ELEMS ? row->inner : CODEC_BLOCK_ELEMS, per_chunk = CHUNK_ELEMS / least;
    return (size / row->inner * blocks_in_row(row->inner) + per_chunk - 1) / per_chunk;
}

/* The largest number of chunks in any of the rows in `order`, or in any row if that is NULL. */
EXPORT int64_t bighorn_lamb_chunks(const LambRow *rows, const Gradient *gradients, const int64_t *order,
                                   int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = order ? order[i] : i, chunks = chunks_of(&rows[row], gradients[row].size);
        most = chunks > most ? chunks : most;
    }
    return most;
}

/* ---- one tensor ------------------------------------------------------------------------------------------ */

/* Makes the same decision as trust_ratio() in reference/lamb.py, which is the specification. NaN passes through. */
static double trust_ratio(const LambOptions *o, double weight_norm, double update_norm) { /* LAMB-q */
    if (!o->adapt || weight_norm == 0 || update_norm == 0) return 1;
    double low = o->weight_norm_bounds[0], high = o->weight_norm_bounds[1];
    double phi = weight_norm < low ? low : weight_norm > high ? high : weight_norm;
    double ratio = phi / update_norm;
    low = o->trust_ratio_bounds[0], high = o->trust_ratio_bounds[1];
    return ratio < low ? low : ratio > high ? high : ratio;
}

/* u = correction * m / (sqrt(v) + eps) carries both bias corrections: eps grows by sqrt(1 - beta2^t) instead of v
 * being divided by it. Returns the learning rate that multiplies u. */
static double factors_of(const LambOptions *o, const LambRow *row, double grad_scale, LambFactors *f) {
    int64_t t = (int64_t)*row->step + 1;
    double correction1 = o->bias_correction == BIAS_CORRECTION_NONE ? 1 : one_minus_power(o->betas[0], t);
    double correction2 = o->bias_correction == BIAS_CORRECTION_NONE || o->second_moment == SECOND_MOMENT_ADAGRAD
                             ? 1
                             : one_minus_power(o->betas[1], t);
    double correction = sqrt(correction2) / correction1, root = sqrt(correction2), lr = o->lr;
    if (o->bias_correction == BIAS_CORRECTION_LEARNING_RATE) lr *= correction, correction = root = 1;
    *f = (LambFactors){
        .grad_scale = o->maximize ? -grad_scale : grad_scale,
        .l2 = o->decay_mode == DECAY_L2 ? o->weight_decay : 0,
        .beta1 = o->betas[0],
        .beta3 = o->grad_averaging ? 1 - o->betas[0] : 1,
        .beta2 = o->second_moment == SECOND_MOMENT_ADAGRAD ? 1 : o->betas[1],
        .beta4 = o->second_moment == SECOND_MOMENT_ADAGRAD ? 1 : 1 - o->betas[1],
        .correction = correction,
        .eps = o->eps * root,
        .weight_decay = o->decay_mode == DECAY_RATIO ? o->weight_decay : 0,
        .decay = o->decay_mode == DECAY_DECOUPLED ? 1 - o->lr * o->weight_decay : 1,
        .caution = 1,
        .rng_key = rng_key_at(&row->weights, o->rounding_seed, t),
        .dither = dither_at(&row->weights, o->rounding_seed, t),
        .cautious = o->cautious,
    };
    return lr;
}

/* ---- the rule of layerwise.h ----------------------------------------------------------------------------- */

typedef struct {
    const LambLoops *loops, *loops_double, *blocks; /* for moments in floats, float64 weights, quantization blocks */
    const StridedLoops *strided;
    const LambOptions *options;
    const LambRow *rows;
    const Gradient *gradients;
    void *const *grads;
    double grad_scale;
} LambStep;

/* Values that a thread computes once per row. If a gradient or weights are transposed, the loops use copies of a window
 * of them; the addresses of these copies are NULL otherwise. */
typedef struct {
    const LambLoops *loops;
    LambFactors factors;
    double lr;
    char *grad_copy, *weights_copy;
    LambRow row;
    Gradient gradient;
    const void *grad;
} LambLocals;

_Static_assert(sizeof(LambLocals) <= LAYER_LOCALS_BYTES, "layerwise.h reserves too little");

static const LambOptions *options_of(const LambStep *s, int64_t row) { return &s->options[s->rows[row].options]; }

/* Whether the first pass cannot finish a row, because the size of its step depends on sums over it. */
static bool needs_ratio(const LambOptions *o) { return o->adapt || o->cautious; }

static LambChunk chunk_at(const LambStep *s, const LambLocals *l, int64_t row, int64_t chunk) {
    const int64_t size = s->gradients[row].size, start = start_of(&s->rows[row], size, chunk);
    return (LambChunk){
        .row = l->weights_copy ? &l->row : &s->rows[row],
        .gradient = l->grad_copy ? &l->gradient : &s->gradients[row],
        .grad = l->grad_copy ? l->grad : s->grads[row],
        .start = start,
        .size = start_of(&s->rows[row], size, chunk + 1) - start,
    };
}

/* Reserves memory for copies of a window, if the row is transposed and the scratch has space for them. */
static void plan_copies(const LambStep *s, int64_t row, char *scratch, int64_t bytes, LambLocals *l, LayerInfo *info) {
    const Gradient *g = &s->gradients[row];
    const Weights *w = &s->rows[row].weights;
    const int64_t g_bytes = is_transposed(g->layout) ? dtype_bytes(g->type) : 0;
    const int64_t x_bytes = is_transposed(w->memory) ? dtype_bytes(w->type) : 0;
    l->grad_copy = l->weights_copy = NULL;
    if (!g_bytes && !x_bytes) return;
    int64_t most = (bytes - CACHE_LINE_BYTES) / (g_bytes + x_bytes);
    if (most > STAGED_ELEMS) most = STAGED_ELEMS;
    info->window = most / CHUNK_ELEMS;
    if (info->window <= 0) {
        info->window = 0;
        return;
    }
    const int64_t elements = info->window * CHUNK_ELEMS;
    if (x_bytes) l->weights_copy = scratch;
    if (g_bytes) l->grad_copy = scratch + elements * x_bytes;
    const int64_t used = elements * (x_bytes + g_bytes);
    info->used_bytes = (used + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES * CACHE_LINE_BYTES;
    l->row = s->rows[row];
    l->row.weights.memory = NULL;
    l->gradient = *g;
    l->gradient.layout = NULL;
}

static LayerInfo prepare(const void *step, int64_t row, char *scratch, int64_t bytes, void *locals) {
    const LambStep *s = step;
    const LambOptions *o = options_of(s, row);
    LambLocals *l = locals;
    const LambRow *r = &s->rows[row];
    const bool in_double = r->weights.type == FLOAT64;
    l->loops = in_double ? s->loops_double : r->inner > 0 ? s->blocks : s->loops;
    l->lr = factors_of(o, r, s->grad_scale, &l->factors);
    LayerInfo info = {
        .chunks = chunks_of(r, s->gradients[row].size),
        .update_bytes = in_double ? sizeof(double) : sizeof(float),
        .needs_ratio = needs_ratio(o),
    };
    plan_copies(s, row, scratch, bytes, l, &info);
    return info;
}

static void copy_weights(const LambStep *s, int64_t row, int64_t first, int64_t last, const LambLocals *l,
                         enum StridedCopy direction) {
    const Weights *w = &s->rows[row].weights;
    const int64_t size = s->gradients[row].size, start = start_of(&s->rows[row], size, first);
    s->strided->copy(w->memory, w->data, w->type, start, start_of(&s->rows[row], size, last) - start, l->weights_copy,
                     direction);
}

static void open_window(const void *step, int64_t row, int64_t first, int64_t last, void *locals, bool second) {
    const LambStep *s = step;
    const Gradient *g = &s->gradients[row];
    LambLocals *l = locals;
    const LambReals f = reals_of(&l->factors);
    const int64_t start = start_of(&s->rows[row], g->size, first), end = start_of(&s->rows[row], g->size, last);
    if (l->weights_copy) {
        copy_weights(s, row, first, last, l, STRIDED_GATHER);
        l->row.weights.data = l->weights_copy - start * dtype_bytes(l->row.weights.type);
    }
    if (!l->grad_copy || (second && !reads_grad_again(&f))) return;
    s->strided->copy(g->layout, s->grads[row], g->type, start, end - start, l->grad_copy, STRIDED_GATHER);
    l->grad = l->grad_copy - start * dtype_bytes(g->type);
}

static void close_window(const void *step, int64_t row, int64_t first, int64_t last, const void *locals, bool second) {
    const LambLocals *l = locals;
    if (l->weights_copy && (second || !needs_ratio(options_of(step, row))))
        copy_weights(step, row, first, last, l, STRIDED_SCATTER);
}

static LayerSums first(const void *step, int64_t row, int64_t chunk, const void *locals, void *update) {
    const LambOptions *o = options_of(step, row);
    const LambLocals *l = locals;
    const LambChunk b = chunk_at(step, l, row, chunk);
    return needs_ratio(o) ? l->loops->moments(&b, &l->factors, o->second_moment, update)
                          : l->loops->moments_and_apply(&b, &l->factors, o->second_moment, l->lr);
}

/* Returns the factor that makes up for masked elements. */
static double caution_of(const LambRow *row, double kept) {
    const double share = row->numel ? kept / (double)row->numel : 1;
    return 1 / (share < 1e-3 ? 1e-3 : share);
}

/* Returns the sum of squares of u = caution * r + weight_decay * x, which rounding could make negative. */
static double cautious_square_sum(const LambFactors *f, LayerSums total) {
    const double sum = f->caution * f->caution * total.update + 2 * f->caution * f->weight_decay * total.product +
                       f->weight_decay * f->weight_decay * total.weight;
    return sum < 0 ? 0 : sum;
}

static double ratio(const void *step, int64_t row, void *locals, LayerSums total, bool writes_norms) {
    const LambStep *s = step;
    LambLocals *l = locals;
    if (l->factors.cautious) {
        l->factors.caution = caution_of(&s->rows[row], total.kept);
        total.update = cautious_square_sum(&l->factors, total);
    }
    const double weight_norm = sqrt(total.weight) * fabs(l->factors.decay), update_norm = sqrt(total.update);
    const double ratio = trust_ratio(options_of(s, row), weight_norm, update_norm);
    float *norms = s->rows[row].metrics;
    if (writes_norms) norms[0] = (float)weight_norm, norms[1] = (float)update_norm, norms[2] = (float)ratio;
    return ratio;
}

static void second(const void *step, int64_t row, int64_t chunk, const void *locals, double ratio, const void *update) {
    const LambLocals *l = locals;
    const LambChunk b = chunk_at(step, l, row, chunk);
    l->loops->apply(&b, &l->factors, l->lr * ratio, update);
}

static const LayerwiseRule RULE = {
    .prepare = prepare,
    .open_window = open_window,
    .close_window = close_window,
    .first = first,
    .ratio = ratio,
    .second = second,
};

static void step_row(void *step, int64_t row, const RowShare *share) { layerwise_step_row(RULE, step, row, share); }

static void step_rows(int thread, int team, void *data) {
    LayerwiseStep *step = data;
    for_each_row(&step->queue, thread, team, step_row, step);
}

/* Makes one LAMB step of the `count` rows in `order`, the largest first, without counting it, or one phase of it. If
 * rows are shards, `sums`, one per row, are added up over all ranks between the two phases. `partial` has two entries
 * per chunk of the largest number of chunks in any row; the scratch may have any size. The function allocates no
 * memory, so it cannot fail. */
EXPORT void bighorn_lamb_step(const RunConfig *run, const LambOptions *options, const LambRow *rows,
                              const Gradient *gradients, void *const *grads, const int64_t *order, int64_t count,
                              double grad_scale, LayerSums *partial, void *scratch, int64_t scratch_bytes, int phase,
                              LayerSums *sums) {
    const LambStep lamb = {
        .loops = lamb_loops_for(run->isa),
        .loops_double = lamb_loops_double_for(run->isa),
        .blocks = lamb_blocks_for(run->isa),
        .strided = strided_loops_for(run->isa),
        .options = options,
        .rows = rows,
        .gradients = gradients,
        .grads = grads,
        .grad_scale = grad_scale,
    };
    LayerwiseStep step = {
        .step = &lamb,
        .queue = {.order = order, .gradients = gradients, .count = count, .shared_min_elems = SHARED_MIN_ELEMS},
        .phase = phase,
        .sums = sums,
        .scratch = scratch,
        .scratch_bytes = scratch_bytes,
        .partial = {partial, partial + bighorn_lamb_chunks(rows, gradients, order, count)},
    };
    run_parallel(run, elements_in(&step.queue), step_rows, &step);
}
