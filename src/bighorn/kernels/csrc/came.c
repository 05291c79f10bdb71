/* CAME: who does what, and when: schedule, clipping, what is known of whole tensors. No arithmetic on elements here.
 *
 * A step reads the gradient for the averages of its squares (and again for the size of u, where it cannot be had from
 * sums of columns), again for m and the residuals' averages, and then writes x. Small tensors go to threads whole, so
 * that all but the first pass find them in cache. Large ones are shared by all threads in static slices with barriers
 * between the passes; these go forward and backward in turn, to begin with what the last one left in cache. */
#include "came.h"

#include <math.h>

TABLE_PER_ISA(CameLoops, came_loops)

/* ---- tiles and workspace --------------------------------------------------------------------------------- */

/* A block has so many rows and elements at least, so that sums of its columns are few beside its elements. */
enum { LEAST_ROWS = 128, LEAST_ELEMENTS = 8192 };

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static Grid grid_of(const CameRow *row) {
    Grid g = {row->matrices, row->height, row->width, .per_tile = 1, .blocks = 1, .strips = 1};
    const int64_t size = g.height * g.width;
    if (g.matrices == 0 || size == 0) return g;
    g.whole = size <= PIECE;
    if (g.whole) {
        g.per_tile = PIECE / size;
    } else {
        g.blocks = larger(1, g.height / larger(LEAST_ROWS, LEAST_ELEMENTS / g.width));
        g.strips = g.width <= WIDE ? 1 : (g.width + PIECE - 1) / PIECE;
    }
    g.tiles = (g.matrices + g.per_tile - 1) / g.per_tile * g.blocks * g.strips;
    g.pieces = (g.width + COLUMNS - 1) / COLUMNS;
    g.read_once = !g.whole && g.strips == 1 && g.width >= NARROW;
    return g;
}

/* In doubles: sums of tiles, twice of blocks, of rows and of columns, one after the other. */
typedef struct {
    int64_t square_sums, residual_sums, row_sums, col_sums, ratio_sums, end;
} Places;

static Places places_in(const Grid *g) {
    const int64_t blocks = g->whole ? 0 : g->matrices * g->blocks;
    const int64_t columns = g->blocks > 1 ? (g->blocks * g->matrices * g->width + 1) / 2 : 0;
    Places p = {.square_sums = larger(g->tiles, g->blocks > 1 ? g->matrices * g->pieces : 0)};
    p.residual_sums = p.square_sums + blocks;
    p.row_sums = p.residual_sums + blocks;
    p.col_sums = p.row_sums + (g->strips > 1 ? (g->strips * g->matrices * g->height + 1) / 2 : 0);
    p.ratio_sums = p.col_sums + columns;
    p.end = p.ratio_sums + (g->read_once ? columns : 0);
    return p;
}

/* What a tensor shared by all threads needs, and what each thread needs for its small ones; in doubles. */
typedef struct {
    int64_t shared, own;
} Needs;

static Needs needs_of(const CameRow *rows, const Gradient *gradients, int64_t count) {
    Needs needs = {0, 0};
    for (int64_t i = 0; i < count; i++) {
        Grid grid = grid_of(&rows[i]);
        int64_t need = places_in(&grid).end;
        needs.shared = larger(needs.shared, need);
        if (gradients[i].size <= LARGE) needs.own = larger(needs.own, need);
    }
    return needs;
}

/* How many doubles of workspace a step needs with so many threads. */
EXPORT int64_t bighorn_came_workspace(const CameRow *rows, const Gradient *gradients, int64_t count, int threads) {
    Needs needs = needs_of(rows, gradients, count);
    return needs.shared + (threads > 1 ? threads * needs.own : 0);
}

/* ---- one tensor ------------------------------------------------------------------------------------------ */

typedef struct {
    const CameLoops *loops;
    const CameOptions *options;
    const CameRow *rows;
    const Gradient *gradients;
    void *const *grads;
    const double *beta2s;
    const int64_t *order; /* rows, largest first */
    int64_t rows_count;
    double grad_scale;
    double *workspace;
    Needs needs;
    atomic_llong next; /* small rows are handed out in order */
    Barrier barrier;
} Step;

static Job make_job(const Step *s, int64_t index, double *workspace) {
    const CameRow *row = &s->rows[index];
    const CameOptions *o = &s->options[row->options];
    Grid grid = grid_of(row);
    Places p = places_in(&grid);
    return (Job){
        .row = row,
        .gradient = &s->gradients[index],
        .grad = s->grads[index],
        .grid = grid,
        .grad_scale = (float)(o->maximize ? -s->grad_scale : s->grad_scale),
        .beta1 = (float)o->beta1,
        .beta1_rest = (float)(1 - o->beta1),
        .square = {row->sq_row, row->sq_col, s->beta2s[index], o->eps1, workspace + p.square_sums},
        .residual = {row->res_row, row->res_col, o->beta3, o->eps2, workspace + p.residual_sums},
        .tile_sums = workspace,
        .row_sums = (float *)(workspace + p.row_sums),
        .col_sums = (float *)(workspace + p.col_sums),
        .ratio_sums = (float *)(workspace + p.ratio_sums),
    };
}

static double total(const double *sums, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += sums[i];
    return sum;
}

static double rms(const Job *job, int64_t count) {
    return sqrt(total(job->tile_sums, count) / (double)job->gradient->size);
}

/* Averages of the lines that no tile saw whole. */
static void finish(const CameLoops *loops, const Job *job, const Average *average, int thread, int team) {
    const Grid *g = &job->grid;
    const int64_t blocks = g->matrices * g->blocks, pieces = g->matrices * g->pieces;
    if (g->strips > 1)
        for (int64_t i = share(blocks, thread, team); i < share(blocks, thread + 1, team); i++)
            loops->finish_rows(job, average, i / g->blocks, i % g->blocks);
    if (g->blocks > 1)
        for (int64_t i = share(pieces, thread, team); i < share(pieces, thread + 1, team); i++)
            job->tile_sums[i] = loops->finish_columns(job, average, i / g->pieces, i % g->pieces);
}

/* All of a tensor by one thread, or a thread's share of it. */
static void step_row(Step *s, int64_t index, double *workspace, int thread, int team) {
    const CameLoops *loops = s->loops;
    const Job job = make_job(s, index, workspace);
    const CameOptions *o = &s->options[job.row->options];
    float *norms = job.row->norms;
    if (job.gradient->size == 0) {
        if (thread == 0) norms[0] = 0, norms[1] = norms[2] = 1;
        return;
    }
    const int factored = !job.row->exp_avg_sq;
    const Grid *g = &job.grid;
    const int64_t first = share(g->tiles, thread, team), last = share(g->tiles, thread + 1, team);
    const int64_t sums = g->read_once && g->blocks > 1 ? g->matrices * g->pieces : g->tiles; /* of u^2 */
    Columns columns; /* not cleared, which would take longer than a small tensor's step */
    columns.matrix = -1;

    double lr = o->lr;
    if (o->scale_parameter) {
        for (int64_t tile = first; tile < last; tile++) job.tile_sums[tile] = loops->param_square_sum(&job, tile);
        wait_for_all(&s->barrier, team);
        double size = rms(&job, job.grid.tiles);
        lr *= size < o->scale_eps ? o->scale_eps : size;
        wait_for_all(&s->barrier, team);
    }

    if (factored) {
        for (int64_t tile = first; tile < last; tile++) {
            job.tile_sums[tile] = loops->squares(&job, tile);
            if (g->whole) job.tile_sums[tile] = loops->update_square_sum(&job, tile, &columns);
        }
        wait_for_all(&s->barrier, team);
        finish(loops, &job, &job.square, thread, team);
        if (!g->whole && !g->read_once) {
            wait_for_all(&s->barrier, team);
            for (int64_t tile = last; tile-- > first;)
                job.tile_sums[tile] = loops->update_square_sum(&job, tile, &columns);
        }
    } else {
        for (int64_t tile = first; tile < last; tile++) job.tile_sums[tile] = loops->second_moment(&job, tile);
    }
    wait_for_all(&s->barrier, team);
    double rms_u = rms(&job, factored ? sums : g->tiles), excess = rms_u / o->clip_threshold;
    if (excess < 1) excess = 1; /* CAME-clip */
    float clip = (float)(1 / excess), decay = (float)(1 - lr * o->weight_decay);
    double confidence = 1;

    if (factored) {
        const int apart = job.row->state_type == INT8 && job.row->inner != job.row->width;
        if (apart) {
            int64_t blocks = job.gradient->size / job.row->inner * blocks_in_row(job.row->inner);
            loops->momentum_apart(&job, clip, share(blocks, thread, team), share(blocks, thread + 1, team));
            wait_for_all(&s->barrier, team);
        }
        for (int64_t tile = last; tile-- > first;) loops->momentum(&job, tile, clip, apart, &columns);
        wait_for_all(&s->barrier, team);
        finish(loops, &job, &job.residual, thread, team);
        wait_for_all(&s->barrier, team);
        double correction = o->bias_correction ? sqrt(1 - power(o->beta3, (int64_t)*job.row->step + 1)) : 1;
        columns.matrix = -1;
        for (int64_t tile = first; tile < last; tile++)
            job.tile_sums[tile] = loops->apply(&job, tile, (float)(lr * correction), decay, &columns);
        wait_for_all(&s->barrier, team);
        confidence = correction * total(job.tile_sums, g->tiles) / (double)job.gradient->size;
    } else {
        for (int64_t tile = first; tile < last; tile++)
            loops->momentum_and_apply(&job, tile, clip, (float)lr, decay);
    }
    if (thread == 0) norms[0] = (float)rms_u, norms[1] = (float)(1 / excess), norms[2] = (float)confidence;
    wait_for_all(&s->barrier, team); /* the workspace is free again */
}

/* ---- all tensors ----------------------------------------------------------------------------------------- */

static void step_body(int thread, int team, void *data) {
    Step *s = data;
    int64_t large = 0;
    for (; large < s->rows_count && team > 1 && s->gradients[s->order[large]].size > LARGE; large++)
        step_row(s, s->order[large], s->workspace, thread, team);
    double *own = s->workspace + (team > 1 ? s->needs.shared + thread * s->needs.own : 0);
    for (;;) {
        int64_t position = large + atomic_fetch_add(&s->next, 1);
        if (position >= s->rows_count) return;
        step_row(s, s->order[position], own, 0, 1);
    }
}

/* One CAME step of every row, without counting it. `beta2s` has one entry per row, since beta2 can depend on its
 * count of steps. Nothing is allocated here, so nothing can fail. */
EXPORT void bighorn_came_step(const Run *run, const CameOptions *options, const CameRow *rows,
                              const Gradient *gradients, void *const *grads, const double *beta2s,
                              const int64_t *order, int64_t rows_count, double grad_scale, double *workspace) {
    Step s = {came_loops_for(run->isa), options, rows, gradients, grads, beta2s, order, rows_count, grad_scale,
              workspace, needs_of(rows, gradients, rows_count), 0, {0, 0, 0}};
    run_parallel(run, step_body, &s);
}
