/* Iteration of a factored optimizer's loops over a tensor: tiles, and the pieces of consecutive elements in them. */
#ifndef BIGHORN_FACTORED_TILES_H
#define BIGHORN_FACTORED_TILES_H

#include "factored_job.h"
#include "run.h"

typedef struct {
    int64_t matrix, matrices, down, across;
    int64_t row, rows, column, columns; /* in the first matrix */
} FactoredTile;

static inline FactoredTile tile_at(const FactoredGrid *g, int64_t index) {
    int64_t group = index / (g->tiles_across * g->tiles_down), rest = index % (g->tiles_across * g->tiles_down);
    FactoredTile t = {.matrix = group * g->per_tile, .across = rest / g->tiles_down, .down = rest % g->tiles_down};
    t.matrices = g->matrices - t.matrix < g->per_tile ? g->matrices - t.matrix : g->per_tile;
    t.row = share_of(g->height, t.down, g->tiles_down);
    t.rows = share_of(g->height, t.down + 1, g->tiles_down) - t.row;
    t.column = t.across * g->tile_columns;
    t.columns = g->width - t.column < g->tile_columns ? g->width - t.column : g->tile_columns;
    return t;
}

/* Consecutive elements of a tile, at most a piece: `lines` rows from `row` on, or a part of one row. In a wide matrix,
 * a loop takes one row from each quarter of a tile together: memory serves long streams faster than short ones, and
 * column sums are read and written less often. The rows are an odd number of rows apart, since addresses that differ by
 * whole pages conflict in a cache. */
typedef struct {
    int64_t start, row, column; /* of the first of `count` pieces */
    int64_t apart;              /* rows from one piece to the next */
    int64_t left;               /* remaining rows of the first piece's quarter */
    int count, n, lines;
} FactoredPiece;

/* Advances to the next piece. A zeroed piece advances to the first one; with a count of 1, pieces come one at a time.
 * Returns false after the last one. */
static inline int next_piece(const FactoredGrid *g, const FactoredTile *t, FactoredPiece *s) {
    const int64_t rows = t->matrices * t->rows;
    if (g->kind != LONG_ROWS) {
        const int most = PIECE_ELEMS / (int)g->width;
        s->row += s->lines;
        s->lines = rows - s->row < most ? (int)(rows - s->row) : most;
        s->n = s->lines * (int)g->width;
        s->count = 1;
    } else {
        s->column += s->n;
        if (s->column == t->columns) s->column = 0, s->row++, s->left--;
        if (s->left == 0) {
            s->row += s->apart * (s->count - 1);
            const int64_t rest = rows - s->row;
            s->count = s->count == 1 || rest < INTERLEAVED_ROWS ? 1 : INTERLEAVED_ROWS;
            s->left = s->apart = s->count == 1 ? rest : (rest / INTERLEAVED_ROWS - 1) | 1;
        }
        s->lines = 1;
        s->n = t->columns - s->column < PIECE_ELEMS ? (int)(t->columns - s->column) : PIECE_ELEMS;
    }
    s->start = (t->matrix * g->height + t->row + s->row) * g->width + t->column + s->column;
    return s->row < rows;
}

/* Returns the offset of piece k. */
static inline int64_t start_of(const FactoredGrid *g, const FactoredPiece *s, int k) {
    return s->start + k * s->apart * g->width;
}

#endif
