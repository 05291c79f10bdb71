/* The running averages of rows and columns, for the loops of the same instruction set and type. */
#ifndef BIGHORN_FACTORED_AVERAGES_H
#define BIGHORN_FACTORED_AVERAGES_H

#include "factored_tiles.h"

#include <math.h>

/* Every instruction set has separate functions. */
#define factored_row_mean PER_ISA(factored_row_mean)
#define factored_begin_tile PER_ISA(factored_begin_tile)
#define factored_flush_rows PER_ISA(factored_flush_rows)
#define factored_add_piece PER_ISA(factored_add_piece)
#define factored_end_tile PER_ISA(factored_end_tile)
#define factored_finish_rows PER_ISA(factored_finish_rows)
#define factored_finish_columns PER_ISA(factored_finish_columns)
#define factored_set_columns PER_ISA(factored_set_columns)
#define factored_set_factors PER_ISA(factored_set_factors)

/* ---- averages -------------------------------------------------------------------------------------------- */

/* Returns the mean of a matrix's row averages; if only rows or only columns have averages, the square of ROOT_SCALE. */
double factored_row_mean(const FactoredJob *job, const FactoredAverage *average, int64_t matrix);

void factored_begin_tile(const FactoredJob *job, const FactoredTile *t, FactoredTileSums *s);

/* Rows within the tile update their averages; partial sums of other rows are kept for `finish_rows`. */
void factored_flush_rows(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                         FactoredTileSums *s);

/* Adds the sums of a piece that was added to `elements`; `row_sums` are the sums of its rows. */
void factored_add_piece(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                        const FactoredPiece *piece, const float *row_sums, FactoredTileSums *s);

/* Stores the remaining sums of a tile; returns the sum of u^2, if it is known. */
double factored_end_tile(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                         FactoredTileSums *s);

/* Adds up partial sums of the rows of a tile, or of some columns, for lines that extend over several tiles
 * (FactoredLoops). */
double factored_finish_rows(const FactoredJob *job, const FactoredAverage *average, int64_t matrix, int64_t down);
double factored_finish_columns(const FactoredJob *job, const FactoredAverage *average, int64_t matrix, int64_t group);

/* ---- factors --------------------------------------------------------------------------------------------- */

/* The factors of a piece's elements are r * c[i]; `sum` is the sum of c. */
typedef struct {
    const float *c;
    float r[INTERLEAVED_ROWS];
    double sum;
    float buffer[PIECE_ELEMS];
} PieceFactors;

/* The factor of a row: sqrt(mean(row) / row), as a quotient of roots, since for a row of zeros beside large ones the
 * ratio is 1e42. */
static inline float row_factor(float root_mean, const float *rows, int64_t i) {
    return rows ? root_mean / sqrtf(rows[i]) : root_mean;
}

static inline float column_factor(float col) { return 1 / sqrtf(col); }

void factored_set_columns(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                          FactoredColumns *columns);

void factored_set_factors(const FactoredJob *job, const FactoredAverage *average, const FactoredTile *t,
                          const FactoredPiece *piece, const FactoredColumns *columns, PieceFactors *f);

#endif
