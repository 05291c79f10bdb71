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
enum { LARGE = 1 << 18 };

/* A slice of so few blocks is applied from its end, some at a time, since the last are the likeliest to be in cache. */
enum { CACHED = 128, GROUP = 8 };

/* ---- blocks ---------------------------------------------------------------------------------------------- */

/* Where a block begins. Moments in blocks of few bits are not cut: as many of these make one as fit. */
static int64_t start_of(const Row *row, int64_t size, int64_t block) {
    int64_t start = block * BLOCK;
    if (row->inner) {
        int64_t per_row = blocks_in_row(row->inner), least = row->inner < CODEC_BLOCK ? row->inner : CODEC_BLOCK;
        int64_t first = block * (BLOCK / least);
        start = first / per_row * row->inner + first % per_row * CODEC_BLOCK;
    }
    return start < size ? start : size;
}

static int64_t blocks_of(const Row *row, int64_t size) {
    if (!row->inner) return blocks_in(size);
    int64_t least = row->inner < CODEC_BLOCK ? row->inner : CODEC_BLOCK, per_block = BLOCK / least;
    return (size / row->inner * blocks_in_row(row->inner) + per_block - 1) / per_block;
}

/* Of the row that has the most. */
EXPORT int64_t bighorn_lamb_blocks(const Row *rows, const Gradient *gradients, int64_t rows_count) {
    int64_t most = 0;
    for (int64_t i = 0; i < rows_count; i++) {
        int64_t count = blocks_of(&rows[i], gradients[i].size);
        most = count > most ? count : most;
    }
    return most;
}

/* ---- one tensor ------------------------------------------------------------------------------------------ */

/* The same decision as trust_ratio() in reference/lamb.py, which is the specification. NaN passes through. */
static double trust_ratio(const Options *o, double weight_norm, double update_norm) { /* LAMB-q */
    if (!o->adapt || weight_norm == 0 || update_norm == 0) return 1;
    double low = o->weight_norm_bounds[0], high = o->weight_norm_bounds[1];
    double phi = weight_norm < low ? low : weight_norm > high ? high : weight_norm;
    double ratio = phi / update_norm;
    low = o->trust_ratio_bounds[0], high = o->trust_ratio_bounds[1];
    return ratio < low ? low : ratio > high ? high : ratio;
}

/* u = correction * m / (sqrt(v) + eps) carries both bias corrections: eps grows by sqrt(1 - beta2^t) instead of v
 * being divided by it. Returns the learning rate that multiplies u. */
static double prepare(const Options *o, const Row *row, double grad_scale, Factors *f) {
    int64_t t = (int64_t)*row->step + 1;
    double correction1 = o->bias_correction == NONE ? 1 : 1 - power(o->beta1, t);
    double correction2 = o->bias_correction == NONE || o->second_moment == ADAGRAD ? 1 : 1 - power(o->beta2, t);
    double correction = sqrt(correction2) / correction1, root = sqrt(correction2), lr = o->lr;
    if (o->bias_correction == LEARNING_RATE) lr *= correction, correction = root = 1;
    *f = (Factors){
        .grad_scale = (float)(o->maximize ? -grad_scale : grad_scale),
        .l2 = o->decay_mode == L2 ? (float)o->weight_decay : 0,
        .beta1 = (float)o->beta1,
        .beta3 = o->grad_averaging ? (float)(1 - o->beta1) : 1,
        .beta2 = o->second_moment == ADAGRAD ? 1 : (float)o->beta2,
        .beta4 = o->second_moment == ADAGRAD ? 1 : (float)(1 - o->beta2),
        .correction = (float)correction,
        .eps = (float)(o->eps * root),
        .weight_decay = o->decay_mode == RATIO ? (float)o->weight_decay : 0,
        .decay = o->decay_mode == DECOUPLED ? (float)(1 - o->lr * o->weight_decay) : 1,
        .draw = draw_at(&row->weights, o->rounding_seed, t),
        .turns = turns_at(&row->weights, o->rounding_seed, t),
    };
    return lr;
}

/* ---- all tensors ----------------------------------------------------------------------------------------- */

typedef struct {
    const LambLoops *loops[2]; /* for moments as they are, and in blocks */
    const Options *options;
    const Row *rows;
    const Gradient *gradients;
    void *const *grads;
    const int64_t *order; /* rows, largest first */
    int64_t rows_count;
    double grad_scale;
    int phase;
    Sums *sums;           /* per row, for a phase by itself */
    float *scratch;       /* shared out evenly to the team */
    int64_t scratch_size; /* floats */
    Sums *partial[2];     /* per block of a large row; two, so that a fast thread can go on to the next row */
    atomic_llong next;    /* small rows are handed out in order */
    Barrier barrier;
} Step;

static Block block_at(const Step *s, int64_t row, int64_t block) {
    int64_t size = s->gradients[row].size, start = start_of(&s->rows[row], size, block);
    int64_t end = start_of(&s->rows[row], size, block + 1);
    return (Block){
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
    Sums *partial;
    int thread, team;
} Slice;

static float *update_at(const Slice *slice, int64_t b) {
    return b < slice->kept ? NULL : slice->scratch + (b - slice->kept) * BLOCK;
}

/* The moments of a slice, and x where nothing adapts. Returns the sums of the whole row. */
static Sums first_phase(Step *s, const Slice *slice, const Options *o, const Factors *f, double lr) {
    int64_t count = blocks_of(&s->rows[slice->index], s->gradients[slice->index].size);
    Sums total = {0, 0}, *partial = slice->partial;
    for (int64_t b = slice->first; b < slice->last; b++) {
        Block block = block_at(s, slice->index, b);
        Sums sums = o->adapt ? slice->loops->moments(&block, f, o->second_moment, update_at(slice, b))
                             : slice->loops->moments_and_apply(&block, f, o->second_moment, (float)lr);
        if (partial) partial[b] = sums;
        total.weight += sums.weight, total.update += sums.update;
    }
    if (!partial) return total;
    wait_for_all(&s->barrier, slice->team);
    total = (Sums){0, 0};
    for (int64_t b = 0; b < count; b++) total.weight += partial[b].weight, total.update += partial[b].update;
    return total;
}

/* The decision on a row, and x of a slice where it adapts. */
static void second_phase(Step *s, const Slice *slice, const Options *o, const Factors *f, double lr, Sums total) {
    const Row *row = &s->rows[slice->index];
    double weight_norm = sqrt(total.weight) * fabs(f->decay), update_norm = sqrt(total.update);
    double ratio = trust_ratio(o, weight_norm, update_norm);
    if (!slice->partial || slice->thread == 0)
        row->norms[0] = (float)weight_norm, row->norms[1] = (float)update_norm, row->norms[2] = (float)ratio;
    if (!o->adapt) return;
    const int64_t count = slice->last - slice->first, group = count > CACHED ? count : GROUP;
    for (int64_t end = slice->last; end > slice->first; end -= group)
        for (int64_t b = end - group > slice->first ? end - group : slice->first; b < end; b++) {
            Block block = block_at(s, slice->index, b);
            slice->loops->apply(&block, f, (float)(lr * ratio), update_at(slice, b));
        }
}

static void step_slice(Step *s, int64_t index, int64_t first, int64_t last, Sums *partial, int thread, int team) {
    const Row *row = &s->rows[index];
    const Options *o = &s->options[row->options];
    int64_t room = s->phase == BOTH ? s->scratch_size / team / BLOCK : 0;
    int64_t kept = last - first < room ? first : last - room;
    Slice slice = {
        .index = index,
        .first = first,
        .last = last,
        .loops = s->loops[row->inner > 0],
        .kept = kept,
        .scratch = s->scratch + thread * room * BLOCK,
        .partial = partial,
        .thread = thread,
        .team = team,
    };
    Factors f;
    double lr = prepare(o, row, s->grad_scale, &f);

    Sums total = s->phase == SECOND ? s->sums[index] : first_phase(s, &slice, o, &f, lr);
    if (s->phase != FIRST) second_phase(s, &slice, o, &f, lr, total);
    else if (!partial || thread == 0) s->sums[index] = total;
}

static void step_body(int thread, int team, void *data) {
    Step *s = data;
    int64_t large = 0;
    for (; large < s->rows_count && team > 1 && s->gradients[s->order[large]].size > LARGE; large++) {
        int64_t index = s->order[large], count = blocks_of(&s->rows[index], s->gradients[index].size);
        int64_t first = share(count, thread, team), last = share(count, thread + 1, team);
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
EXPORT void bighorn_lamb_step(const Run *run, const Options *options, const Row *rows, const Gradient *gradients,
                              void *const *grads, const int64_t *order, int64_t rows_count, double grad_scale,
                              Sums *partial, float *scratch, int64_t scratch_size, int phase, Sums *sums) {
    int64_t most = bighorn_lamb_blocks(rows, gradients, rows_count);
    Step s = {
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
