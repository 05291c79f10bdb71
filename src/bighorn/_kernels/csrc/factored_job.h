/* One tensor's step of an optimizer whose second moment is factored into averages of rows and of columns, as factored.c
 * (schedule), factored_shards.c, factored_averages.c and factored_loops.c share it. Symbols follow arXiv:2307.02047v2,
 * Algorithm 2, and Adafactor for the second moment. */
#ifndef BIGHORN_FACTORED_JOB_H
#define BIGHORN_FACTORED_JOB_H

#include "gradient.h"
#include "rounding.h"
#include "run.h"

enum {
    NARROW_COLUMNS = 32,   /* columns: a piece has several shorter rows */
    WIDE_COLUMNS = 8192,   /* columns: longer rows are divided into tiles, which have at most as many */
    WHOLE_COLUMNS = 32768, /* columns: in a matrix of several tiles of rows, only longer rows are divided */
    SUMMED_COLUMNS = 256,  /* columns whose sums are added up at a time */
    INTERLEAVED_ROWS = 4,  /* rows of a wide matrix in one loop */
};

/* What a tile has: whole matrices; rows, several of which are in a piece; or rows of which a piece has a part. */
enum FactoredKind { WHOLE_MATRICES, SHORT_ROWS, LONG_ROWS };

/* How the sum of u^2 becomes known, before clipping. Where the lines of one direction are complete in a tile, one read
 * of the gradient serves its squares, too. */
enum UpdateSum {
    SUM_OF_TILES,    /* another read of each tile, while it is in cache: WHOLE_MATRICES */
    SUM_OF_COLUMNS,  /* rows are complete: q / row is added up for each column */
    SUM_OF_ROWS,     /* columns are complete: q / col is added up for each row */
    SUM_OF_GRADIENT, /* another read of the whole gradient */
};

/* The division of a tensor into tiles, which depends only on the tensor's shape: a tile has one or more whole matrices,
 * or a rectangle of one matrix; only long rows are divided. The order is matrix by matrix, and down before across, so
 * that neighbouring tiles share columns. */
typedef struct {
    int64_t matrices, height, width;
    int64_t per_tile, tiles_down, tiles_across, tiles;
    int64_t tile_columns;
    int64_t group;         /* matrices that are processed together */
    int64_t column_groups; /* groups of SUMMED_COLUMNS columns in a matrix, for adding up the sums of its tiles */
    enum FactoredKind kind;
    enum UpdateSum update_sum;
} FactoredGrid;

/* One number for each row or each column: value <- old * value + scale * (sum over the line) + shift. */
typedef struct {
    float *values; /* NULL: no averages are kept; the factors are 1 */
    double old, scale, shift;
} FactoredLines;

/* A running average of a matrix's row means and column means: average <- beta * average + (1 - beta) * (mean + eps). */
typedef struct {
    FactoredLines row, col;
    const double *means; /* of each matrix's row averages, if this shard does not hold all of them; else NULL */
} FactoredAverage;

/* Values that tiles one below the other share, kept from one tile to the next. */
typedef struct {
    int64_t matrix, across; /* -1: no values yet */
    float root_mean;        /* the root of the mean of all row averages of the matrix */
    double sum;             /* of the factors */
    float *factor;          /* 1 / sqrt(col) */
} FactoredColumns;

/* A tile's sums of rows and columns while they grow. */
typedef struct {
    double rows[PIECE_ELEMS]; /* of the next `lines` rows, from `row` on */
    int64_t row;
    int lines;
    float *elements; /* to which loops add: LONG_ROWS: the sums of columns; else the elements of one piece */
    float *pieces;   /* SHORT_ROWS: the sums of all pieces, by element */
    float *ratios;   /* q / row, like the sums of columns, or like `pieces` */
    double columns[PIECE_ELEMS]; /* WHOLE_MATRICES */
} FactoredTileSums;

/* The buffer of one of the pieces of a gradient that a loop reads together. */
typedef float FactoredGradBuffer[PIECE_ELEMS];

/* A thread's buffers; column buffers are behind this structure. They are in the workspace, because a thread of Python
 * can have a stack of only 64 KB. */
typedef struct {
    FactoredColumns columns;
    FactoredTileSums sums;
    _Alignas(64) FactoredGradBuffer gradients[INTERLEAVED_ROWS];
    float weights[INTERLEAVED_ROWS][PIECE_ELEMS], momenta[INTERLEAVED_ROWS][PIECE_ELEMS];
} FactoredScratch;

/* One tensor's step, without the optimizer's own part. */
typedef struct {
    const FactoredSlot *slot;
    const FactoredShard *shard; /* NULL: the tensor is whole */
    const Gradient *gradient;
    const void *grad;
    FactoredGrid grid;
    float grad_scale;
    double beta2, eps1; /* of an unfactored second moment */
    FactoredAverage square;
    FactoredAverage whole; /* for a shard: `square` without the lines that other shards have elements of */
    FactoredAverage ratio; /* for a shard: q / whole */
    FactoredScratch *scratch;
    double *tile_sums;
    double *means;     /* for a shard that is split: the `means` of its `FactoredAverage` */
    float *row_sums;   /* per tile across the matrix and row; not used if there is one */
    float *col_sums;   /* per tile down the matrix and column; not used if there is one */
    float *ratio_sums; /* SUM_OF_COLUMNS: the same of q / row; SUM_OF_ROWS: like `row_sums`, of q / col */
} FactoredJob;

/* The factor of roots of the ratios q / row and q / col, which can be small if the other average is small, and are at
 * most sqrt(columns / (1 - beta)). */
#define ROOT_SCALE 0x1p32

/* How a shard is split: other shards have other rows or columns of its matrices. */
static inline int is_split(const FactoredShard *shard) { return shard && (shard->split_down || shard->split_across); }
static inline int is_split_both_ways(const FactoredShard *shard) {
    return shard && shard->split_down && shard->split_across;
}

/* The arithmetic of the second moment (factored_loops.c). */
typedef struct {
    /* Adds q = g^2 to the averages of rows and columns, or to partial sums if a line extends over several tiles.
     * Returns the sum of u^2, before clipping, if the tile is a whole matrix and the gradient is read once. */
    double (*squares)(const FactoredJob *job, int64_t tile);
    /* Update the averages from the partial sums of lines that extend over several tiles. If the gradient is read once,
     * they return their share of the sum of u^2. */
    double (*finish_rows)(const FactoredJob *job, const FactoredAverage *average, int64_t matrix, int64_t down);
    double (*finish_columns)(const FactoredJob *job, const FactoredAverage *average, int64_t matrix, int64_t group);
    /* Computes q / whole, by another read of the gradient. */
    void (*ratios)(const FactoredJob *job, int64_t tile, FactoredColumns *columns);
    /* Returns the sum of u^2, before clipping, by another read of the gradient. */
    double (*update_square_sum)(const FactoredJob *job, int64_t tile, FactoredColumns *columns);
    /* Updates the unfactored second moment; returns the sum of u^2. */
    double (*second_moment)(const FactoredJob *job, int64_t tile);
    double (*param_square_sum)(const FactoredJob *job, int64_t tile);
} FactoredLoops;

#endif
