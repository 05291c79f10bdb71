/* The running averages of rows and columns in a CAME step, for the loops of the same instruction set and type. */
#ifndef BIGHORN_CAME_AVERAGES_H
#define BIGHORN_CAME_AVERAGES_H

#include "came_tiles.h"

#include <math.h>

/* Every instruction set and type has separate functions. */
#define came_row_mean PER_ISA(came_row_mean)
#define came_begin_tile PER_ISA(came_begin_tile)
#define came_flush_rows PER_ISA(came_flush_rows)
#define came_add_piece PER_ISA(came_add_piece)
#define came_end_tile PER_ISA(came_end_tile)
#define came_finish_rows PER_ISA(came_finish_rows)
#define came_finish_columns PER_ISA(came_finish_columns)
#define came_set_columns PER_ISA(came_set_columns)
#define came_set_factors PER_ISA(came_set_factors)

/* ---- averages -------------------------------------------------------------------------------------------- */

/* Returns the mean of a matrix's row averages; if only rows or only columns have averages, the square of ROOT_SCALE. */
double came_row_mean(const CameJob *job, const CameAverage *average, int64_t matrix);

void came_begin_tile(const CameJob *job, const CameTile *t, CameTileSums *s);

/* Rows within the tile update their averages; partial sums of other rows are kept for `finish_rows`. */
void came_flush_rows(const CameJob *job, const CameAverage *average, const CameTile *t, CameTileSums *s);

/* Adds the sums of a piece that was added to `elements`; `row_sums` are the sums of its rows. */
void came_add_piece(const CameJob *job, const CameAverage *average, const CameTile *t, const CamePiece *piece,
                    const real *row_sums, CameTileSums *s);

/* Stores the remaining sums of a tile; returns the sum of u^2, if it is known. */
double came_end_tile(const CameJob *job, const CameAverage *average, const CameTile *t, CameTileSums *s);

/* Adds up partial sums of the rows of a tile, or of some columns, for lines that extend over several tiles
 * (CameLoops). */
double came_finish_rows(const CameJob *job, const CameAverage *average, int64_t matrix, int64_t down);
double came_finish_columns(const CameJob *job, const CameAverage *average, int64_t matrix, int64_t group);

/* ---- factors --------------------------------------------------------------------------------------------- */

/* The factors of a piece's elements are r * c[i]; `sum` is the sum of c. */
typedef struct {
    const real *c;
    real r[INTERLEAVED_ROWS];
    double sum;
    real buffer[PIECE_ELEMS];
} CameFactors;

/* The factor of a row: sqrt(mean(row) / row), as a quotient of roots, since for a row of zeros beside large ones the
 * ratio is 1e42. */
static inline real row_factor(real root_mean, const real *rows, int64_t i) {
    return rows ? root_mean / square_root_of(rows[i]) : root_mean;
}

static inline real column_factor(real col) { return 1 / square_root_of(col); }

void came_set_columns(const CameJob *job, const CameAverage *average, const CameTile *t, CameColumns *columns);

void came_set_factors(const CameJob *job, const CameAverage *average, const CameTile *t, const CamePiece *piece,
                      const CameColumns *columns, CameFactors *f);

#endif
