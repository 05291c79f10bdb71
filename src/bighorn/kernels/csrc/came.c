/* The schedule of one tensor's CAME step: the order of the passes, clipping, and the sums over the whole tensor. This
 * file has no arithmetic on elements.
 *
 * A step reads the gradient for the averages of its squares (and again for the size of u, if sums of columns do not
 * give it), again for m and the residuals' averages, and then writes x. One thread steps a small tensor, so that every
 * pass but the first finds it in cache. All threads share a large one in static slices, with barriers between the
 * passes; these alternate between forward and backward, to begin with the data that the last pass left in cache. */
#include "came_copies.h"
#include "came_shards.h"
#include "came_step.h"
#include "codec.h"

#include <math.h>

TABLE_PER_ISA(CameLoops, PER_TYPE(came_loops))
TABLE_PER_ISA(StridedLoops, strided_loops)
#define loops_for CONCATENATE(PER_TYPE(came_loops), _for)

/* ---- tiles and workspace --------------------------------------------------------------------------------- */

/* A tile has at least this many rows and elements, so that its column sums are few compared with its elements. In a
 * narrow matrix it has more elements: the first ones of a tile are not fetched ahead. A tile of long rows has at most
 * TILE_MAX_ELEMS: it stays in the second-level cache. */
enum { TILE_MIN_ROWS = 128, TILE_MIN_ELEMS = 8192, NARROW_TILE_MIN_ELEMS = 65536, TILE_MAX_ELEMS = 65536 };

/* A matrix of fewer rows than TILE_MIN_ROWS per thread is divided nevertheless, so that a tensor has up to MAX_SHARES
 * tiles. */
enum { SHARE_MIN_ROWS = 32, SHARE_MIN_ELEMS = 65536, MAX_SHARES = 8 };

/* Elements of matrices whose m, x and gradient stay in the last cache. */
enum { GROUP_ELEMS = 1 << 20 };

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns the number of tiles of a matrix that has few rows, for as many threads. */
static int64_t shares_of(const CameGrid *g) {
    const int64_t by_rows = g->height / SHARE_MIN_ROWS, by_elems = g->height * g->width / SHARE_MIN_ELEMS;
    const int64_t shares = by_rows < by_elems ? by_rows : by_elems, most = MAX_SHARES / g->matrices;
    return shares < most ? shares : most;
}

/* Returns the columns of a tile of long rows: more if the matrix has few rows, since memory serves long streams faster
 * than short ones. */
static int64_t tile_columns_of(const CameGrid *g) {
    const int64_t most = TILE_MAX_ELEMS / g->height / PIECE_ELEMS * PIECE_ELEMS;
    if (g->tiles_down > 1 || most < PIECE_ELEMS) return PIECE_ELEMS;
    return most < WIDE_COLUMNS ? most : WIDE_COLUMNS;
}

static CameGrid grid_of(const CameRow *row, const CameShard *shard, const Gradient *gradient) {
    CameGrid g = {
        .matrices = row->matrices,
        .height = row->height,
        .width = row->width,
        .per_tile = 1,
        .group = 1,
        .tiles_down = 1,
        .tiles_across = 1,
        .tile_columns = row->width,
    };
    const int64_t size = g.height * g.width;
    if (g.matrices == 0 || size == 0) return g;
    g.whole = size <= PIECE_ELEMS;
    g.group = larger(1, GROUP_ELEMS / size);
    if (g.whole) {
        g.per_tile = PIECE_ELEMS / size;
        g.group = larger(1, g.group / g.per_tile) * g.per_tile;
    } else {
        const int64_t least = g.width < NARROW_COLUMNS ? NARROW_TILE_MIN_ELEMS : TILE_MIN_ELEMS;
        g.tiles_down = larger(1, g.height / larger(TILE_MIN_ROWS, least / g.width));
        if (g.width <= WIDE_COLUMNS) g.tiles_down = larger(g.tiles_down, shares_of(&g));
        if (g.width > (g.tiles_down > 1 ? WHOLE_COLUMNS : WIDE_COLUMNS)) g.tile_columns = tile_columns_of(&g);
        g.tiles_across = (g.width + g.tile_columns - 1) / g.tile_columns;
        const int64_t most = STAGED_ELEMS / g.width; /* rows of a copy */
        if (is_copied(row, gradient) && g.tiles_across == 1)
            g.tiles_down = larger(g.tiles_down, (g.height + most - 1) / most);
    }
    g.tiles = (g.matrices + g.per_tile - 1) / g.per_tile * g.tiles_down * g.tiles_across;
    g.column_groups = (g.width + SUMMED_COLUMNS - 1) / SUMMED_COLUMNS;
    g.read_once = !g.whole && g.tiles_across == 1 && !(shard && shard->split_across);
    g.ratios_of_columns = g.tiles_across > 1 && g.tiles_down == 1 && !is_split(shard);
    return g;
}

/* Offsets into the workspace, in doubles: the sums of tiles, of rows and (two sets) of columns, and the extra memory of
 * a shard, one after the other. */
typedef struct {
    int64_t row_sums, col_sums, ratio_sums, means, ratios, end;
} CameWorkspace;

static int64_t doubles_of(int64_t reals) { return (reals * (int64_t)sizeof(real) + 7) / 8; }

static CameWorkspace places_in(const CameGrid *g, const CameShard *shard) {
    const int64_t columns = g->tiles_down > 1 ? doubles_of(g->tiles_down * g->matrices * g->width) : 0;
    CameWorkspace p = {.row_sums = larger(g->tiles, g->tiles_down > 1 ? g->matrices * g->column_groups : 0)};
    const int64_t rows = g->tiles_across > 1 ? doubles_of(g->tiles_across * g->matrices * g->height) : 0;
    p.col_sums = p.row_sums + rows;
    p.ratio_sums = p.col_sums + columns;
    p.means = p.ratio_sums + (g->read_once ? columns : g->ratios_of_columns ? rows : 0);
    p.ratios = p.means + (is_split(shard) ? g->matrices : 0);
    p.end = p.ratios + (is_split(shard) ? doubles_of(g->matrices * larger(g->height, g->width)) : 0);
    return p;
}

static int64_t workspace_of(const CameRow *row, const CameShard *shard, const Gradient *gradient) {
    const CameGrid grid = grid_of(row, shard, gradient);
    return places_in(&grid, shard).end;
}

enum { SCRATCH_DOUBLES = sizeof(CameScratch) / sizeof(double), COLUMN_BUFFERS = 3 };

/* The elements of each of a thread's buffers of columns; a multiple of a cache line. */
static int64_t column_elems_of(const CameGrid *g) { return (larger(2 * PIECE_ELEMS, g->tile_columns) + 15) / 16 * 16; }

static int64_t scratch_of(const CameRow *row, const CameShard *shard, const Gradient *gradient) {
    const CameGrid grid = grid_of(row, shard, gradient);
    return SCRATCH_DOUBLES + doubles_of(COLUMN_BUFFERS * column_elems_of(&grid)) +
           came_copied_bytes(&grid, row, gradient) / (int64_t)sizeof(double);
}

/* Places a thread's buffers in its scratch; returns the memory for copies of tiles. */
static char *begin_scratch(CameScratch *scratch, const CameGrid *g) {
    const int64_t elems = column_elems_of(g);
    real *columns = (real *)(scratch + 1);
    scratch->columns.matrix = -1;
    scratch->columns.factor = columns;
    scratch->sums.elements = columns + elems;
    scratch->sums.ratios = columns + 2 * elems;
    return (char *)(columns + COLUMN_BUFFERS * elems);
}

/* ---- one tensor ------------------------------------------------------------------------------------------ */

/* One thread's share of a tensor's step. */
typedef struct {
    const CameLoops *loops;
    const CameOptions *options;
    CameJob job;
    int64_t from, to;    /* the matrices that the threads process now */
    int64_t first, last; /* this thread's share of their tiles */
    double size;         /* of the whole tensor */
    RunBarrier *barrier;
    int thread, team;
    CameColumns *columns;
    CameCopies copies;
} CameWork;

/* The average of lines of `count` elements, of which `here` are in this shard. */
static CameLines lines_of(real *values, double beta, double eps, int leads, int64_t here, int64_t count) {
    const double scale = (1 - beta) / (double)count;
    return (CameLines){values, leads ? beta : 0, scale, scale * (double)here * eps};
}

static CameAverage average_of(const CameRow *row, const CameShard *h, real *rows, real *columns, double beta,
                              double eps, const double *means) {
    return (CameAverage){
        lines_of(rows, beta, eps, !h || h->leads_across, row->width, h ? h->width : row->width),
        lines_of(columns, beta, eps, !h || h->leads_down, row->height, h ? h->height : row->height),
        is_split(h) ? means : NULL,
    };
}

/* Returns the first tile of a matrix, which is the first one of its tile. */
static int64_t first_tile_of(const CameGrid *g, int64_t matrix) {
    return matrix < g->matrices ? matrix / g->per_tile * g->tiles_down * g->tiles_across : g->tiles;
}

static void select_matrices(CameWork *w, int64_t from, int64_t to) {
    const int64_t first = first_tile_of(&w->job.grid, from), tiles = first_tile_of(&w->job.grid, to) - first;
    w->from = from;
    w->to = to;
    w->first = first + share_of(tiles, w->thread, w->team);
    w->last = first + share_of(tiles, w->thread + 1, w->team);
}

static void begin_work(CameWork *w, CameStep *s, int64_t index, double *scratch, double *workspace, int thread,
                       int team) {
    const CameRow *row = &s->rows[index];
    const CameShard *shard = s->shards ? &s->shards[index] : NULL;
    const CameOptions *o = &s->options[row->options];
    const CameGrid grid = grid_of(row, shard, &s->gradients[index]);
    const CameWorkspace p = places_in(&grid, shard);
    const int down = shard && shard->split_down, across = shard && shard->split_across;
    double *means = workspace + p.means;
    real *ratios = (real *)(workspace + p.ratios);
    w->loops = loops_for(s->isa);
    w->options = o;
    w->job = (CameJob){
        .row = row,
        .shard = shard,
        .gradient = &s->gradients[index],
        .grad = s->grads[index],
        .grid = grid,
        .grad_scale = (real)(o->maximize ? -s->grad_scale : s->grad_scale),
        .beta1 = (real)o->betas[0],
        .beta1_rest = (real)(1 - o->betas[0]),
        .beta2 = s->beta2s[index],
        .eps1 = o->eps[0],
        .rng_key = rng_key_at(&row->weights, o->rounding_seed, (int64_t)*row->step + 1),
        .square = average_of(row, shard, row->exp_avg_sq_row, row->exp_avg_sq_col, s->beta2s[index], o->eps[0], means),
        .residual = average_of(row, shard, row->exp_avg_res_row, row->exp_avg_res_col, o->betas[2], o->eps[1], means),
        .known = {{.values = across ? NULL : row->exp_avg_sq_row}, {.values = down ? NULL : row->exp_avg_sq_col}, NULL},
        .ratio = {{.values = across ? ratios : NULL, .scale = 1}, {.values = down ? ratios : NULL, .scale = 1}, NULL},
        .scratch = (CameScratch *)scratch,
        .tile_sums = workspace,
        .means = means,
        .row_sums = (real *)(workspace + p.row_sums),
        .col_sums = (real *)(workspace + p.col_sums),
        .ratio_sums = (real *)(workspace + p.ratio_sums),
    };
    w->size = (double)w->job.gradient->size;
    if (shard) w->size = (double)shard->matrices * (double)shard->height * (double)shard->width;
    w->barrier = &s->barrier;
    w->thread = thread;
    w->team = team;
    select_matrices(w, 0, grid.matrices);
    w->columns = &w->job.scratch->columns;
    came_begin_copies(&w->copies, &w->job, strided_loops_for(s->isa), begin_scratch(w->job.scratch, &grid));
}

static void wait(const CameWork *w) { wait_for_all(w->barrier, w->team); }

/* Returns the sum of all threads' sums [first, last), after a barrier. A second barrier must come before they are
 * written again. */
static double total(const CameWork *w, int64_t first, int64_t last) {
    double sum = 0;
    wait(w);
    for (int64_t i = first; i < last; i++) sum += w->job.tile_sums[i];
    return sum;
}

/* Returns the sum of the tile sums of the selected matrices. */
static double total_of_tiles(const CameWork *w) {
    return total(w, first_tile_of(&w->job.grid, w->from), first_tile_of(&w->job.grid, w->to));
}

/* Updates the averages of lines that extend over several tiles. */
static void finish(const CameWork *w, const CameAverage *average) {
    const CameJob *job = &w->job;
    const CameGrid *g = &job->grid;
    const int64_t matrices = w->to - w->from, rows = matrices * g->tiles_down, columns = matrices * g->column_groups;
    wait(w);
    if (g->tiles_across > 1)
        for (int64_t i = share_of(rows, w->thread, w->team); i < share_of(rows, w->thread + 1, w->team); i++) {
            const int64_t matrix = w->from + i / g->tiles_down;
            const double sum = w->loops->finish_rows(job, average, matrix, i % g->tiles_down);
            if (g->ratios_of_columns) job->tile_sums[matrix] = sum;
        }
    if (g->tiles_down > 1)
        for (int64_t i = share_of(columns, w->thread, w->team); i < share_of(columns, w->thread + 1, w->team); i++) {
            const int64_t matrix = w->from + i / g->column_groups, group = i % g->column_groups;
            job->tile_sums[matrix * g->column_groups + group] = w->loops->finish_columns(job, average, matrix, group);
        }
}

/* Returns the sum of x^2 if the learning rate depends on it. The function ends with a barrier, so that other sums can
 * follow. */
static double param_square_sum(CameWork *w) {
    if (!w->options->scale_parameter) return 0;
    for (int64_t tile = w->first; tile < w->last; tile++)
        w->job.tile_sums[tile] = w->loops->param_square_sum(came_with_weights(&w->copies, &w->job, tile), tile);
    double sum = total_of_tiles(w);
    wait(w);
    return sum;
}

static double update_square_sum(CameWork *w) {
    for (int64_t tile = w->last; tile-- > w->first;)
        w->job.tile_sums[tile] =
            w->loops->update_square_sum(came_with_grad(&w->copies, &w->job, tile), tile, w->columns);
    return total_of_tiles(w);
}

/* Updates the second moment; returns the sum of u^2, which is not known yet for a shard that is split. */
static double second_moment(CameWork *w) {
    const CameLoops *loops = w->loops;
    const CameJob *job = &w->job;
    const CameGrid *g = &job->grid;
    const int split = is_split(job->shard);
    if (!job->row->factored) {
        for (int64_t tile = w->first; tile < w->last; tile++)
            job->tile_sums[tile] = loops->second_moment(came_with_grad(&w->copies, &w->job, tile), tile);
        return total_of_tiles(w);
    }
    for (int64_t tile = w->first; tile < w->last; tile++) {
        const CameJob *here = came_with_grad(&w->copies, &w->job, tile);
        job->tile_sums[tile] = loops->squares(here, tile);
        if (g->whole && !split) job->tile_sums[tile] = loops->update_square_sum(here, tile, w->columns);
    }
    finish(w, &job->square);
    if (!split && !g->whole && !g->read_once && !g->ratios_of_columns) {
        wait(w);
        return update_square_sum(w);
    }
    if (split && !is_split_both_ways(job->shard) && !g->read_once) {
        wait(w);
        for (int64_t tile = w->last; tile-- > w->first;)
            loops->ratios(came_with_grad(&w->copies, &w->job, tile), tile, w->columns);
        finish(w, &job->ratio);
    }
    if (g->ratios_of_columns) return total(w, 0, g->matrices);
    if (g->read_once && g->tiles_down > 1) return total(w, 0, g->matrices * g->column_groups);
    return total_of_tiles(w);
}

/* Returns the factor of u, from the sum of its squares. */
static double clip_factor(const CameWork *w, double update_sum) { /* CAME-clip */
    double rms = sqrt(update_sum / w->size), excess = rms / w->options->clip_threshold;
    if (excess < 1) excess = 1;
    if (w->thread == 0) w->job.row->metrics[0] = (float)rms, w->job.row->metrics[1] = (float)(1 / excess);
    return 1 / excess;
}

static double learning_rate(const CameWork *w, double param_sum) {
    const CameOptions *o = w->options;
    if (!o->scale_parameter) return o->lr;
    double rms = sqrt(param_sum / w->size);
    return o->lr * (rms < o->scale_eps ? o->scale_eps : rms);
}

/* The bias correction of the residuals' averages, which start at 0. */
static double correction(const CameWork *w) {
    const CameOptions *o = w->options;
    return o->bias_correction ? sqrt(one_minus_power(o->betas[2], (int64_t)*w->job.row->step + 1)) : 1;
}

/* Updates m and x, if the second moment is not factored. */
static void momentum_and_apply(CameWork *w, CameSquareSums sums) {
    const real clip = (real)clip_factor(w, sums.update);
    const double lr = learning_rate(w, sums.param);
    for (int64_t tile = w->first; tile < w->last; tile++) {
        came_with_weights(&w->copies, &w->job, tile);
        w->loops->momentum_and_apply(came_with_grad(&w->copies, &w->job, tile), tile, clip, (real)lr,
                                     (real)(1 - lr * w->options->weight_decay));
        came_store_weights(&w->copies, &w->job, tile);
    }
    if (w->thread == 0) w->job.row->metrics[2] = 1;
}

/* Whether m has int8 blocks that cross the rows of the matrices, so that a loop of its own updates it. */
static int is_apart(const CameRow *row) { return row->state_type == INT8 && row->inner != row->width; }

static void momentum_apart(CameWork *w, real clip) {
    const CameJob *job = &w->job;
    if (!is_apart(job->row) || job->gradient->size == 0) return;
    const int64_t blocks = job->gradient->size / job->row->inner * blocks_in_row(job->row->inner);
    w->loops->momentum_apart(job, clip, share_of(blocks, w->thread, w->team), share_of(blocks, w->thread + 1, w->team));
    wait(w);
}

/* Updates m and the residuals' averages of the selected matrices. */
static void momentum(CameWork *w, real clip) {
    const int apart = is_apart(w->job.row);
    w->columns->matrix = -1;
    for (int64_t tile = w->last; tile-- > w->first;)
        w->loops->momentum(came_with_grad(&w->copies, &w->job, tile), tile, clip, apart, w->columns);
    finish(w, &w->job.residual);
    wait(w);
    w->columns->matrix = -1;
}

/* Returns the sum of the confidence before bias correction. */
static double confidence(CameWork *w) {
    for (int64_t tile = w->first; tile < w->last; tile++)
        w->job.tile_sums[tile] = w->loops->confidence(&w->job, tile, w->columns);
    return total_of_tiles(w);
}

/* Updates x of the selected matrices; returns the sum of their confidence. */
static double apply(CameWork *w, double param_sum) {
    const double lr = learning_rate(w, param_sum);
    const real step = (real)(lr * correction(w)), decay = (real)(1 - lr * w->options->weight_decay);
    for (int64_t tile = w->first; tile < w->last; tile++) {
        w->job.tile_sums[tile] =
            w->loops->apply(came_with_weights(&w->copies, &w->job, tile), tile, step, decay, w->columns);
        came_store_weights(&w->copies, &w->job, tile);
    }
    return total_of_tiles(w);
}

static void store_confidence(const CameWork *w, double sum) {
    if (w->thread == 0) w->job.row->metrics[2] = (float)(correction(w) * sum / w->size);
}

/* Updates m, the residuals' averages and x, if the second moment is factored. A matrix's m and averages give its x, so
 * that a group of matrices is complete, while it is in cache, before the next group begins. */
static void momentum_then_apply(CameWork *w, CameSquareSums sums) {
    const CameGrid *g = &w->job.grid;
    const real clip = (real)clip_factor(w, sums.update);
    double confidence = 0;
    momentum_apart(w, clip);
    for (int64_t from, to = g->matrices; to > 0; to = from) {
        from = (to - 1) / g->group * g->group;
        select_matrices(w, from, to);
        momentum(w, clip);
        confidence += apply(w, sums.param);
    }
    store_confidence(w, confidence);
}

static void step_whole(CameWork *w) {
    CameSquareSums sums = {.param = param_square_sum(w)};
    sums.update = second_moment(w);
    if (w->job.row->factored) momentum_then_apply(w, sums);
    else momentum_and_apply(w, sums);
}

static void load_reduced_together(const CameWork *w, const CameAverage *average, const CameShardSums *from) {
    if (w->thread == 0 && is_split(w->job.shard)) load_reduced_average(&w->job, average, from);
    wait(w);
}

/* Does the part of a shard's step before a reduction round, or after the last one. */
static void step_shard(CameWork *w, int round) {
    const CameJob *job = &w->job;
    const int both_ways = is_split_both_ways(job->shard), factored = job->row->factored, stores = w->thread == 0;
    const CameShardSums squares = square_shard_sums(job), residuals = residual_shard_sums(job);
    CameSquareSums sums;
    switch (round > 0 && !both_ways ? round + 1 : round) {
        case 0:
            sums.param = both_ways ? 0 : param_square_sum(w);
            sums.update = second_moment(w);
            if (stores) store_shard_average(job, &job->square, &job->ratio, &squares);
            if (stores && !both_ways) store_shard_square_sums(&squares, sums);
            break;
        case 1: /* the shard is split both ways, so that no sums of lines give the size of u */
            load_reduced_together(w, &job->square, &squares);
            sums.param = param_square_sum(w);
            sums.update = update_square_sum(w);
            if (stores) store_shard_square_sums(&squares, sums);
            break;
        case 2: {
            load_reduced_together(w, &job->square, &squares);
            sums = reduced_square_sums(job, &squares);
            if (!factored) {
                momentum_and_apply(w, sums);
                break;
            }
            const real clip = (real)clip_factor(w, sums.update);
            momentum_apart(w, clip);
            momentum(w, clip);
            double here = residuals.confidence ? confidence(w) : 0;
            if (stores) store_shard_average(job, &job->residual, NULL, &residuals);
            if (stores && residuals.confidence) *residuals.confidence = here;
            break;
        }
        case 3:
            if (!factored) break;
            load_reduced_together(w, &job->residual, &residuals);
            apply(w, *squares.param);
            store_confidence(w, reduced_confidence(job, &residuals));
            break;
        default: /* the remaining rounds exist only for shards that are split both ways */ break;
    }
}

static void step(CameStep *s, int64_t row, const RowShare *share, double *scratch, double *workspace) {
    CameWork w;
    begin_work(&w, s, row, scratch, workspace, share->part, share->parts);
    if (w.size == 0) {
        float *norms = s->rows[row].metrics;
        if (share->part == 0) norms[0] = 0, norms[1] = norms[2] = 1;
        return;
    }
    if (s->shards) step_shard(&w, s->round);
    else step_whole(&w);
    wait(&w); /* the workspace can be used again */
}

const CameArithmetic PER_TYPE(came_arithmetic) = {
    .scratch = scratch_of,
    .workspace = workspace_of,
    .step = step,
};
