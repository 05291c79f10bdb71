/* LAMB: who does what, and when: schedule, norms and the trust ratio. No arithmetic on elements here.
 *
 * Small tensors go to threads whole, so that the second phase finds them in cache. Large ones are shared by all
 * threads in static slices with one barrier between the phases. */
#include "lamb.h"
#include "codec.h"

#include <math.h>

TABLE_PER_ISA(LambLoops, lamb_loops)
TABLE_PER_ISA(LambLoops, lamb_blocks)

/* From so many elements on a tensor is shared by all threads, whose caches then hold more of it; below, it goes to one
 * of them whole. */
enum { SHARED_MIN_ELEMS = 1 << 18 };

/* A slice of so few blocks is applied from its end, some at a time, since the last are the likeliest to be in cache. */
enum { CACHED_BLOCKS = 128, REVERSED_BLOCKS = 8 };

/* ---- blocks ---------------------------------------------------------------------------------------------- */

/* Where a block begins. Moments in blocks of few bits are not cut: as many of these make one as fit. */
static int64_t start_of(const LambRow *row, int64_t size, int64_t block) {
    int64_t start = block * BLOCK_ELEMS;
    if (row->inner) {
        int64_t per_row = blocks_in_row(row->inner),
                least = row->inner < CODEC_BLOCK_ELEMS ? row->inner : CODEC_BLOCK_ELEMS;
        int64_t first = block * (BLOCK_ELEMS / least);
        start = first / per_row * row->inner + first % per_row * CODEC_BLOCK_ELEMS;
    }
    return start < size ? start : size;
}

static int64_t blocks_of(const LambRow *row, int64_t size) {
    if (!row->inner) return blocks_in(size);
    int64_t least = row->inner < CODEC_BLOCK_ELEMS ? row->inner : CODEC_BLOCK_ELEMS, per_block = BLOCK_ELEMS / least;
    return (size / row->inner * blocks_in_row(row->inner) + per_block - 1) / per_block;
}

/* Of the row that has the most. */
EXPORT int64_t bighorn_lamb_blocks(const LambRow *rows, const Gradient *gradients, int64_t rows_count) {
    int64_t most = 0;
    for (int64_t i = 0; i < rows_count; i++) {
        int64_t count = blocks_of(&rows[i], gradients[i].size);
        most = count > most ? count : most;
    }
    return most;
}

/* ---- one tensor ------------------------------------------------------------------------------------------ */

/* The same decision as trust_ratio() in reference/lamb.py, which is the specification. NaN passes through. */
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
static double prepare(const LambOptions *o, const LambRow *row, double grad_scale, LambFactors *f) {
    int64_t t = (int64_t)*row->step + 1;
    double correction1 = o->bias_correction == BIAS_CORRECTION_NONE ? 1 : 1 - power(o->beta1, t);
    double correction2 = o->bias_correction == BIAS_CORRECTION_NONE || o->second_moment == SECOND_MOMENT_ADAGRAD
                             ? 1
                             : 1 - power(o->beta2, t);
    double correction = sqrt(correction2) / correction1, root = sqrt(correction2), lr = o->lr;
    if (o->bias_correction == BIAS_CORRECTION_LEARNING_RATE) lr *= correction, correction = root = 1;
    *f = (LambFactors){
        .grad_scale = (float)(o->maximize ? -grad_scale : grad_scale),
        .l2 = o->decay_mode == DECAY_L2 ? (float)o->weight_decay : 0,
        .beta1 = (float)o->beta1,
        .beta3 = o->grad_averaging ? (float)(1 - o->beta1) : 1,
        .beta2 = o->second_moment == SECOND_MOMENT_ADAGRAD ? 1 : (float)o->beta2,
        .beta4 = o->second_moment == SECOND_MOMENT_ADAGRAD ? 1 : (float)(1 - o->beta2),
        .correction = (float)correction,
        .eps = (float)(o->eps * root),
        .weight_decay = o->decay_mode == DECAY_RATIO ? (float)o->weight_decay : 0,
        .decay = o->decay_mode == DECAY_DECOUPLED ? (float)(1 - o->lr * o->weight_decay) : 1,
        .rng_key = rng_key_at(&row->weights, o->rounding_seed, t),
        .dither = dither_at(&row->weights, o->rounding_seed, t),
    };
    return lr;
}

/* ---- all tensors ----------------------------------------------------------------------------------------- */

typedef struct {
    const LambLoops *loops[2]; /* for moments as they are, and in blocks */
    const LambOptions *options;
    const LambRow *rows;
    const Gradient *gradients;
    void *const *grads;
    const int64_t *order; /* rows, largest first */
    int64_t rows_count;
    double grad_scale;
    int phase;
    LambSums *sums;       /* per row, for a phase by itself */
    float *scratch;       /* shared out evenly to the team */
    int64_t scratch_size; /* floats */
    LambSums *partial[2]; /* per block of a large row; two, so that a fast thread can go on to the next row */
    atomic_llong next;    /* small rows are handed out in order */
    RunBarrier barrier;
} LambStep;

static LambBlock block_at(const LambStep *s, int64_t row, int64_t block) {
    int64_t size = s->gradients[row].size, start = start_of(&s->rows[row], size, block);
    int64_t end = start_of(&s->rows[row], size, block + 1);
    return (LambBlock){
        .row = &s->rows[row],
        .gradient = &s->gradients[row],
        .grad = s->grads[row],
        .start = start,
        .size = end - start,
    };
}

/* What falls to one thread of a row: blocks [first, last). `partial` is for a row that all threads share. */
typedef struct {
    int64_t index, first, last;
    const LambLoops *loops;
    int64_t kept;   /* from this block on u is kept, before it is computed again */
    float *scratch; /* for what is kept */
    LambSums *partial;
    int thread, team;
} LambSlice;

static float *update_at(const LambSlice *slice, int64_t b) {
    return b < slice->kept ? NULL : slice->scratch + (b - slice->kept) * BLOCK_ELEMS;
}

/* The moments of a slice, and x where nothing adapts. Returns the sums of the whole row. */
static LambSums first_phase(LambStep *s, const LambSlice *slice, const LambOptions *o, const LambFactors *f,
                            double lr) {
    int64_t count = blocks_of(&s->rows[slice->index], s->gradients[slice->index].size);
    LambSums total = {0, 0}, *partial = slice->partial;
    for (int64_t b = slice->first; b < slice->last; b++) {
        LambBlock block = block_at(s, slice->index, b);
        LambSums sums = o->adapt ? slice->loops->moments(&block, f, o->second_moment, update_at(slice, b))
                                 : slice->loops->moments_and_apply(&block, f, o->second_moment, (float)lr);
        if (partial) partial[b] = sums;
        total.weight += sums.weight, total.update += sums.update;
    }
    if (!partial) return total;
    wait_for_all(&s->barrier, slice->team);
    total = (LambSums){0, 0};
    for (int64_t b = 0; b < count; b++) total.weight += partial[b].weight, total.update += partial[b].update;
    return total;
}

/* The decision on a row, and x of a slice where it adapts. */
static void second_phase(LambStep *s, const LambSlice *slice, const LambOptions *o, const LambFactors *f, double lr,
                         LambSums total) {
    const LambRow *row = &s->rows[slice->index];
    double weight_norm = sqrt(total.weight) * fabs(f->decay), update_norm = sqrt(total.update);
    double ratio = trust_ratio(o, weight_norm, update_norm);
    if (!slice->partial || slice->thread == 0)
        row->norms[0] = (float)weight_norm, row->norms[1] = (float)update_norm, row->norms[2] = (float)ratio;
    if (!o->adapt) return;
    const int64_t count = slice->last - slice->first, group = count > CACHED_BLOCKS ? count : REVERSED_BLOCKS;
    for (int64_t end = slice->last; end > slice->first; end -= group)
        for (int64_t b = end - group > slice->first ? end - group : slice->first; b < end; b++) {
            LambBlock block = block_at(s, slice->index, b);
            slice->loops->apply(&block, f, (float)(lr * ratio), update_at(slice, b));
        }
}

static void step_slice(LambStep *s, int64_t index, int64_t first, int64_t last, LambSums *partial, int thread,
                       int team) {
    const LambRow *row = &s->rows[index];
    const LambOptions *o = &s->options[row->options];
    int64_t room = s->phase == PHASE_BOTH ? s->scratch_size / team / BLOCK_ELEMS : 0;
    int64_t kept = last - first < room ? first : last - room;
    LambSlice slice = {
        .index = index,
        .first = first,
        .last = last,
        .loops = s->loops[row->inner > 0],
        .kept = kept,
        .scratch = s->scratch + thread * room * BLOCK_ELEMS,
        .partial = partial,
        .thread = thread,
        .team = team,
    };
    LambFactors f;
    double lr = prepare(o, row, s->grad_scale, &f);

    LambSums total = s->phase == PHASE_SECOND ? s->sums[index] : first_phase(s, &slice, o, &f, lr);
    if (s->phase != PHASE_FIRST) second_phase(s, &slice, o, &f, lr, total);
    else if (!partial || thread == 0) s->sums[index] = total;
}

static void step_body(int thread, int team, void *data) {
    LambStep *s = data;
    int64_t large = 0;
    for (; large < s->rows_count && team > 1 && s->gradients[s->order[large]].size > SHARED_MIN_ELEMS; large++) {
        int64_t index = s->order[large], count = blocks_of(&s->rows[index], s->gradients[index].size);
        int64_t first = share_of(count, thread, team), last = share_of(count, thread + 1, team);
        step_slice(s, index, first, last, s->partial[large % 2], thread, team);
    }
    for (;;) {
        int64_t position = large + atomic_fetch_add(&s->next, 1);
        if (position >= s->rows_count) return;
        int64_t index = s->order[position];
        step_slice(s, index, 0, blocks_of(&s->rows[index], s->gradients[index].size), NULL, thread, team);
    }
}

/* One LAMB step of every row, without counting it, or one phase of it: between the two, whose rows are shards adds up
 * `sums` over all of these. `partial` has room for two entries per block of the
 * row that has the most; the scratch may be of any
 * size. Nothing is allocated here, so nothing can fail. */
EXPORT void bighorn_lamb_step(const RunConfig *run, const LambOptions *options, const LambRow *rows,
                              const Gradient *gradients, void *const *grads, const int64_t *order, int64_t rows_count,
                              double grad_scale, LambSums *partial, float *scratch, int64_t scratch_size, int phase,
                              LambSums *sums) {
    int64_t most = bighorn_lamb_blocks(rows, gradients, rows_count);
    LambStep s = {
        .loops = {lamb_loops_for(run->isa), lamb_blocks_for(run->isa)},
        .options = options,
        .rows = rows,
        .gradients = gradients,
        .grads = grads,
        .order = order,
        .rows_count = rows_count,
        .grad_scale = grad_scale,
        .phase = phase,
        .sums = sums,
        .scratch = scratch,
        .scratch_size = scratch_size,
        .partial = {partial, partial + most},
    };
    run_parallel(run, elements_of(gradients, rows_count), step_body, &s);
}
