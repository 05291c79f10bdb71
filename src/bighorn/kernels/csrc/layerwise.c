#include "layerwise.h"

#include <stddef.h>

/* The second loop goes over so few blocks from the last to the first, some at a time, because the last ones are the
 * likeliest to be in cache. */
enum { CACHED_BLOCKS = 128, REVERSED_BLOCKS = 8 };

/* One thread's part of a row: blocks [first, last). */
typedef struct {
    int64_t row, first, last;
    int64_t stored;     /* the update is stored from this block on, and computed again before it */
    float *scratch;     /* for what is stored */
    LayerSums *partial; /* of a row that all threads share; else NULL */
    int team;
} LayerSlice;

static float *update_of(const LayerSlice *slice, int64_t block) {
    return block < slice->stored ? NULL : slice->scratch + (block - slice->stored) * BLOCK_ELEMS;
}

/* Returns the sums of the whole row, which do not depend on the number of threads: block after block. */
static LayerSums first_phase(LayerwiseStep *s, const LayerSlice *slice, int64_t blocks, const void *locals) {
    LayerSums total = {0, 0}, *partial = slice->partial;
    for (int64_t b = slice->first; b < slice->last; b++) {
        const LayerSums sums = s->rule->first(s->step, slice->row, b, locals, update_of(slice, b));
        if (partial) partial[b] = sums;
        total.weight += sums.weight, total.update += sums.update;
    }
    if (!partial) return total;
    wait_for_all(&s->barrier, slice->team);
    total = (LayerSums){0, 0};
    for (int64_t b = 0; b < blocks; b++) total.weight += partial[b].weight, total.update += partial[b].update;
    return total;
}

static void second_phase(LayerwiseStep *s, const LayerSlice *slice, const void *locals, double ratio) {
    const int64_t count = slice->last - slice->first, group = count > CACHED_BLOCKS ? count : REVERSED_BLOCKS;
    for (int64_t end = slice->last; end > slice->first; end -= group)
        for (int64_t b = end - group > slice->first ? end - group : slice->first; b < end; b++)
            s->rule->second(s->step, slice->row, b, locals, ratio, update_of(slice, b));
}

static void step_row(void *data, int64_t row, const RowShare *share) {
    LayerwiseStep *s = data;
    _Alignas(16) char locals[LAYER_LOCALS_BYTES];
    const LayerInfo info = s->rule->prepare(s->step, row, locals);
    const int64_t room = s->phase == PHASE_BOTH ? s->scratch_size / share->team / BLOCK_ELEMS : 0;
    const bool leads = share->part == 0;
    LayerSlice slice = {
        .row = row,
        .first = share_of(info.blocks, share->part, share->parts),
        .last = share_of(info.blocks, share->part + 1, share->parts),
        .scratch = s->scratch + share->thread * room * BLOCK_ELEMS,
        .partial = share->parts > 1 ? s->partial[share->turn % 2] : NULL,
        .team = share->team,
    };
    slice.stored = slice.last - slice.first < room ? slice.first : slice.last - room;
    const LayerSums total = s->phase == PHASE_SECOND ? s->sums[row] : first_phase(s, &slice, info.blocks, locals);
    if (s->phase == PHASE_FIRST) {
        if (leads) s->sums[row] = total;
        return;
    }
    const double ratio = s->rule->ratio(s->step, row, locals, total, leads);
    if (info.needs_ratio) second_phase(s, &slice, locals, ratio);
}

static void step_rows(int thread, int team, void *data) {
    LayerwiseStep *s = data;
    for_each_row(&s->queue, thread, team, step_row, s);
}

void layerwise_step(const RunConfig *run, LayerwiseStep *step) {
    run_parallel(run, elements_in(&step->queue), step_rows, step);
}
