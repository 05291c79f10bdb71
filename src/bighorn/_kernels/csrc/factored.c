/* The schedule of a factored optimizer's step of one tensor, up to its second moment: tiles, the workspace, and sums
 * over the whole tensor. This file has no arithmetic on elements.
 *
 * A step reads the gradient for the averages of its squares, and again for the size of u, if sums of columns do not
 * give it. One thread steps a small tensor, so that every pass but the first finds it in cache. All threads share a
 * large one in static slices, with barriers between the passes; these alternate between forward and backward, to begin
 * with the data that the last pass left in cache. */
#include "factored.h"

#include <math.h>

TABLE_PER_ISA(FactoredLoops, factored_loops)

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
static int64_t shares_of(const FactoredGrid *g) {
    const int64_t by_rows = g->height / SHARE_MIN_ROWS, by_elems = g->height * g->width / SHARE_MIN_ELEMS;
    const int64_t shares = by_rows < by_elems ? by_rows : by_elems, most = MAX_SHARES / g->matrices;
    return shares < most ? shares : most;
}

/* Returns the columns of a tile of long rows: more if the matrix has few rows, since memory serves long streams faster
 * than short ones. */
static int64_t tile_columns_of(const FactoredGrid *g) {
    const int64_t most = TILE_MAX_ELEMS / g->height / PIECE_ELEMS * PIECE_ELEMS;
    if (g->tiles_down > 1 || most < PIECE_ELEMS) return PIECE_ELEMS;
    return most < WIDE_COLUMNS ? most : WIDE_COLUMNS;
}

static enum UpdateSum update_sum_of(const FactoredGrid *g, const FactoredShard *shard) {
    if (g->kind == WHOLE_MATRICES) return SUM_OF_TILES;
    if (g->tiles_across == 1 && !(shard && shard->split_across)) return SUM_OF_COLUMNS;
    if (g->tiles_across > 1 && g->tiles_down == 1 && !is_split(shard)) return SUM_OF_ROWS;
    return SUM_OF_GRADIENT;
}

static FactoredGrid grid_of(const FactoredSlot *slot, const FactoredShard *shard) {
    FactoredGrid g = {
        .matrices = slot->matrices,
        .height = slot->height,
        .width = slot->width,
        .per_tile = 1,
        .group = 1,
        .tiles_down = 1,
        .tiles_across = 1,
        .tile_columns = slot->width,
        .kind = slot->width < NARROW_COLUMNS ? SHORT_ROWS : LONG_ROWS,
    };
    const int64_t size = g.height * g.width;
    if (g.matrices == 0 || size == 0) return g;
    g.group = larger(1, GROUP_ELEMS / size);
    if (size <= PIECE_ELEMS) {
        g.kind = WHOLE_MATRICES;
        g.per_tile = PIECE_ELEMS / size;
        g.group = larger(1, g.group / g.per_tile) * g.per_tile;
    } else {
        const int64_t least = g.width < NARROW_COLUMNS ? NARROW_TILE_MIN_ELEMS : TILE_MIN_ELEMS;
        g.tiles_down = larger(1, g.height / larger(TILE_MIN_ROWS, least / g.width));
        if (g.width <= WIDE_COLUMNS) g.tiles_down = larger(g.tiles_down, shares_of(&g));
        if (g.width > (g.tiles_down > 1 ? WHOLE_COLUMNS : WIDE_COLUMNS)) g.tile_columns = tile_columns_of(&g);
        g.tiles_across = (g.width + g.tile_columns - 1) / g.tile_columns;
    }
    g.tiles = (g.matrices + g.per_tile - 1) / g.per_tile * g.tiles_down * g.tiles_across;
    g.column_groups = (g.width + SUMMED_COLUMNS - 1) / SUMMED_COLUMNS;
    g.update_sum = update_sum_of(&g, shard);
    return g;
}

/* Offsets into the workspace, in doubles: the sums of tiles, of rows and (two sets) of columns, and the extra memory of
 * a shard, one after the other. */
typedef struct {
    int64_t row_sums, col_sums, ratio_sums, means, ratios, end;
} FactoredWorkspace;

static int64_t doubles_of(int64_t floats) { return (floats * (int64_t)sizeof(float) + 7) / 8; }

static FactoredWorkspace places_in(const FactoredGrid *g, const FactoredShard *shard) {
    const int64_t columns = g->tiles_down > 1 ? doubles_of(g->tiles_down * g->matrices * g->width) : 0;
    FactoredWorkspace p = {.row_sums = larger(g->tiles, g->tiles_down > 1 ? g->matrices * g->column_groups : 0)};
    const int64_t rows = g->tiles_across > 1 ? doubles_of(g->tiles_across * g->matrices * g->height) : 0;
    p.col_sums = p.row_sums + rows;
    p.ratio_sums = p.col_sums + columns;
    p.means = p.ratio_sums + (g->update_sum == SUM_OF_COLUMNS ? columns : g->update_sum == SUM_OF_ROWS ? rows : 0);
    p.ratios = p.means + (is_split(shard) ? g->matrices : 0);
    p.end = p.ratios + (is_split(shard) ? doubles_of(g->matrices * larger(g->height, g->width)) : 0);
    return p;
}

int64_t factored_workspace(const FactoredSlot *slot, const FactoredShard *shard) {
    const FactoredGrid grid = grid_of(slot, shard);
    return places_in(&grid, shard).end;
}

enum { SCRATCH_DOUBLES = sizeof(FactoredScratch) / sizeof(double), COLUMN_BUFFERS = 3 };

/* The elements of each of a thread's buffers of columns; a multiple of a cache line. */
static int64_t column_elems_of(const FactoredGrid *g) {
    return (larger(2 * PIECE_ELEMS, g->tile_columns) + 15) / 16 * 16;
}

int64_t factored_scratch(const FactoredSlot *slot, const FactoredShard *shard) {
    const FactoredGrid grid = grid_of(slot, shard);
    return SCRATCH_DOUBLES + doubles_of(COLUMN_BUFFERS * column_elems_of(&grid));
}

/* Places a thread's buffers in its scratch. */
static void begin_scratch(FactoredScratch *scratch, const FactoredGrid *g) {
    const int64_t elems = column_elems_of(g);
    float *columns = (float *)(scratch + 1);
    scratch->columns.matrix = -1;
    scratch->columns.factor = columns;
    scratch->sums.elements = columns + elems;
    scratch->sums.pieces = columns + elems + PIECE_ELEMS;
    scratch->sums.ratios = columns + 2 * elems;
}

/* ---- one tensor ------------------------------------------------------------------------------------------ */

/* The average of lines of `count` elements, of which `local` are in this shard. */
static FactoredLines lines_of(float *values, double beta, double eps, int leads, int64_t local, int64_t count) {
    const double scale = (1 - beta) / (double)count;
    return (FactoredLines){values, leads ? beta : 0, scale, scale * (double)local * eps};
}

FactoredAverage factored_average(const FactoredWork *w, float *rows, float *columns, double beta, double eps) {
    const FactoredSlot *slot = w->job.slot;
    const FactoredShard *h = w->job.shard;
    return (FactoredAverage){
        lines_of(rows, beta, eps, !h || h->leads_across, slot->width, h ? h->width : slot->width),
        lines_of(columns, beta, eps, !h || h->leads_down, slot->height, h ? h->height : slot->height),
        is_split(h) ? w->job.means : NULL,
    };
}

/* Returns the first tile of a matrix, which is the first one of its tile. */
static int64_t first_tile_of(const FactoredGrid *g, int64_t matrix) {
    return matrix < g->matrices ? matrix / g->per_tile * g->tiles_down * g->tiles_across : g->tiles;
}

void factored_select(FactoredWork *w, int64_t from, int64_t to) {
    const int64_t first = first_tile_of(&w->job.grid, from), tiles = first_tile_of(&w->job.grid, to) - first;
    w->from = from;
    w->to = to;
    w->first = first + share_of(tiles, w->thread, w->team);
    w->last = first + share_of(tiles, w->thread + 1, w->team);
}

void factored_begin(FactoredWork *w, FactoredStep *s, int64_t index, double grad_scale, double beta2, double eps1,
                    const SlotShare *share, double *scratch, double *workspace) {
    const FactoredSlot *slot = &s->slots[index];
    const FactoredShard *shard = s->shards ? &s->shards[index] : NULL;
    const FactoredGrid grid = grid_of(slot, shard);
    const FactoredWorkspace p = places_in(&grid, shard);
    const int down = shard && shard->split_down, across = shard && shard->split_across;
    float *ratios = (float *)(workspace + p.ratios);
    w->loops = factored_loops_for(s->isa);
    w->job = (FactoredJob){
        .slot = slot,
        .shard = shard,
        .gradient = &s->gradients[index],
        .grad = s->grads[index],
        .grid = grid,
        .grad_scale = (float)grad_scale,
        .beta2 = beta2,
        .eps1 = eps1,
        .whole = {{.values = across ? NULL : slot->exp_avg_sq_row},
                  {.values = down ? NULL : slot->exp_avg_sq_col},
                  NULL},
        .ratio = {{.values = across ? ratios : NULL, .scale = 1}, {.values = down ? ratios : NULL, .scale = 1}, NULL},
        .scratch = (FactoredScratch *)scratch,
        .tile_sums = workspace,
        .means = workspace + p.means,
        .row_sums = (float *)(workspace + p.row_sums),
        .col_sums = (float *)(workspace + p.col_sums),
        .ratio_sums = (float *)(workspace + p.ratio_sums),
    };
    w->job.square = factored_average(w, slot->exp_avg_sq_row, slot->exp_avg_sq_col, beta2, eps1);
    w->size = (double)w->job.gradient->size;
    if (shard) w->size = (double)shard->matrices * (double)shard->height * (double)shard->width;
    w->barrier = &s->barrier;
    w->thread = share->part;
    w->team = share->parts;
    factored_select(w, 0, grid.matrices);
    w->columns = &w->job.scratch->columns;
    begin_scratch(w->job.scratch, &grid);
}

/* Returns the sum of all threads' sums [first, last), after a barrier. A second barrier must come before they are
 * written again. */
static double total(const FactoredWork *w, int64_t first, int64_t last) {
    double sum = 0;
    factored_wait(w);
    for (int64_t i = first; i < last; i++) sum += w->job.tile_sums[i];
    return sum;
}

double factored_total(const FactoredWork *w) {
    return total(w, first_tile_of(&w->job.grid, w->from), first_tile_of(&w->job.grid, w->to));
}

void factored_finish(const FactoredWork *w, const FactoredAverage *average) {
    const FactoredJob *job = &w->job;
    const FactoredGrid *g = &job->grid;
    const int64_t matrices = w->to - w->from, rows = matrices * g->tiles_down, columns = matrices * g->column_groups;
    factored_wait(w);
    if (g->tiles_across > 1)
        for (int64_t i = share_of(rows, w->thread, w->team); i < share_of(rows, w->thread + 1, w->team); i++) {
            const int64_t matrix = w->from + i / g->tiles_down;
            const double sum = w->loops->finish_rows(job, average, matrix, i % g->tiles_down);
            if (g->update_sum == SUM_OF_ROWS) job->tile_sums[matrix] = sum;
        }
    if (g->tiles_down > 1)
        for (int64_t i = share_of(columns, w->thread, w->team); i < share_of(columns, w->thread + 1, w->team); i++) {
            const int64_t matrix = w->from + i / g->column_groups, group = i % g->column_groups;
            job->tile_sums[matrix * g->column_groups + group] = w->loops->finish_columns(job, average, matrix, group);
        }
}

double factored_param_square_sum(FactoredWork *w) {
    for (int64_t tile = w->first; tile < w->last; tile++)
        w->job.tile_sums[tile] = w->loops->param_square_sum(&w->job, tile);
    double sum = factored_total(w);
    factored_wait(w);
    return sum;
}

double factored_update_square_sum(FactoredWork *w) {
    for (int64_t tile = w->last; tile-- > w->first;)
        w->job.tile_sums[tile] = w->loops->update_square_sum(&w->job, tile, w->columns);
    return factored_total(w);
}

static double unfactored_second_moment(const FactoredWork *w) {
    for (int64_t tile = w->first; tile < w->last; tile++)
        w->job.tile_sums[tile] = w->loops->second_moment(&w->job, tile);
    return factored_total(w);
}

/* Adds up the ratios of a shard, from which the sum of u^2 follows once other shards' are added. */
static void shard_ratios(const FactoredWork *w) {
    factored_wait(w);
    for (int64_t tile = w->last; tile-- > w->first;) w->loops->ratios(&w->job, tile, w->columns);
    factored_finish(w, &w->job.ratio);
}

double factored_second_moment(FactoredWork *w) {
    const FactoredJob *job = &w->job;
    const FactoredGrid *g = &job->grid;
    const int split = is_split(job->shard);
    if (!job->slot->factored) return unfactored_second_moment(w);
    for (int64_t tile = w->first; tile < w->last; tile++) {
        job->tile_sums[tile] = w->loops->squares(job, tile);
        if (g->update_sum == SUM_OF_TILES && !split)
            job->tile_sums[tile] = w->loops->update_square_sum(job, tile, w->columns);
    }
    factored_finish(w, &job->square);
    if (split && !is_split_both_ways(job->shard) && g->update_sum != SUM_OF_COLUMNS) shard_ratios(w);
    switch (split ? SUM_OF_TILES : g->update_sum) {
        case SUM_OF_TILES: break;
        case SUM_OF_COLUMNS:
            if (g->tiles_down > 1) return total(w, 0, g->matrices * g->column_groups);
            break;
        case SUM_OF_ROWS: return total(w, 0, g->matrices);
        case SUM_OF_GRADIENT: factored_wait(w); return factored_update_square_sum(w);
    }
    return factored_total(w);
}

void factored_load_reduced(const FactoredWork *w, const FactoredAverage *average, const FactoredShardSums *from) {
    if (w->thread == 0 && is_split(w->job.shard)) load_reduced_average(&w->job, average, from);
    factored_wait(w);
}
