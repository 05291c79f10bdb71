/* One tensor's CAME step, as came.c (schedule), came_shards.c and came_averages.c share it, and the arithmetic that is
 * compiled once per instruction set. Symbols are those of arXiv:2307.02047v2, Algorithm 2. */
#ifndef BIGHORN_CAME_JOB_H
#define BIGHORN_CAME_JOB_H

#include "gradient.h"
#include "rounding.h"
#include "run.h"

enum {
    NARROW_COLUMNS = 32,  /* columns: shorter rows go together */
    WIDE_COLUMNS = 8192,  /* columns: longer rows are cut into strips of a piece */
    SUMMED_COLUMNS = 256, /* added up at once */
    INTERLEAVED_ROWS = 4, /* rows of a wide matrix */
};

/* A tensor is cut into tiles, by its shape alone: several whole matrices, or one matrix's block of rows, perhaps in a
 * strip of columns. Tiles lie matrix by matrix, strip by strip, so that neighbours share columns. */
typedef struct {
    int64_t matrices, height, width;
    int64_t per_tile, blocks, strips, tiles;
    int64_t pieces; /* of a matrix's columns, when the sums of blocks are added up */
    int whole;      /* tiles of whole matrices */
    int read_once;  /* the gradient, for its squares and for the size of u */
} CameGrid;

/* One number for each row or each column: value <- old * value + scale * (sum over the line) + shift. */
typedef struct {
    float *values; /* NULL: not wanted; as a factor, 1 */
    double old, scale, shift;
} CameLines;

/* A running average of a matrix's row means and column means: average <- beta * average + (1 - beta) * (mean + eps). */
typedef struct {
    CameLines row, col;
    const double *means; /* of each matrix's row averages, where not all of them are here; else NULL */
} CameAverage;

/* What a strip's tiles share, kept from one tile to the next. */
typedef struct {
    int64_t matrix, strip;                   /* -1: nothing yet */
    double row_mean;                         /* of the whole matrix */
    double sum;                              /* of the factors */
    _Alignas(64) float factor[WIDE_COLUMNS]; /* 1 / sqrt(col) */
} CameColumns;

/* A tile's sums of rows and columns as they grow: per element of a span or, in a wide matrix, per column. */
typedef struct {
    double rows[PIECE_ELEMS], columns[PIECE_ELEMS];
    _Alignas(64) float elements[WIDE_COLUMNS], ratios[WIDE_COLUMNS]; /* ratios: of q / row */
    int64_t row;                                                     /* of the first of `lines` that wait in `rows` */
    int lines;
} CameTileSums;

/* What spans of a gradient that are read together need each. */
typedef struct {
    float values[PIECE_ELEMS];
    GradientMean last;
} CameGradBuffer;

/* What a thread computes in. It is part of the workspace, since a thread of Python's may have a stack of 64 KB. */
typedef struct {
    CameColumns columns;
    CameTileSums sums;
    CameGradBuffer gradients[INTERLEAVED_ROWS];
    float weights[INTERLEAVED_ROWS][PIECE_ELEMS], momenta[INTERLEAVED_ROWS][PIECE_ELEMS];
} CameScratch;

/* One tensor's step. */
typedef struct {
    const CameRow *row;
    const CameShard *shard; /* NULL: it is whole */
    const Gradient *gradient;
    const void *grad;
    CameGrid grid;
    float grad_scale, beta1, beta1_rest; /* m <- beta1 m + beta1_rest u */
    double beta2, eps1;                  /* of a second moment that is not factored */
    uint32_t rng_key;                    /* what random bits start from */
    CameAverage square, residual;
    CameAverage known; /* of a shard: `square` without the lines that other shards have parts of */
    CameAverage ratio; /* of a shard: q / known */
    CameScratch *scratch;
    double *tile_sums;
    double *means;     /* of a shard that is split: what `Average` has there */
    float *row_sums;   /* per strip and row; not used where one strip is the whole matrix */
    float *col_sums;   /* per block and column; not used where one block is the whole matrix */
    float *ratio_sums; /* the same of q / row, where the gradient is read once */
} CameJob;

/* Roots of the ratios q / row and q / col come multiplied with this: they can be small where the other average is, and
 * are sqrt(columns / (1 - beta)) at most. */
#define ROOT_SCALE 0x1p32

typedef struct {
    /* q = g^2 into the averages of rows and columns, or into partial sums where a tile does not see all of a line.
     * Returns the sum of u^2, before clipping, of a tile that is all of a matrix whose gradient is read once. */
    double (*squares)(const CameJob *job, int64_t tile);
    /* What `squares`, `ratios` and `momentum` left as partial sums goes into the averages; the columns' part of the sum
     * of u^2, if the gradient is read once. */
    void (*finish_rows)(const CameJob *job, const CameAverage *average, int64_t matrix, int64_t block);
    double (*finish_columns)(const CameJob *job, const CameAverage *average, int64_t matrix, int64_t piece);
    /* q / known, by another look at the gradient. */
    void (*ratios)(const CameJob *job, int64_t tile, CameColumns *columns);
    /* The sum of u^2, before clipping, by another look at the gradient. */
    double (*update_square_sum)(const CameJob *job, int64_t tile, CameColumns *columns);
    /* m, for int8 blocks [first, last) that do not lie in tiles. */
    void (*momentum_apart)(const CameJob *job, float clip, int64_t first, int64_t last);
    /* m (unless it is done already), and the residuals' averages or partial sums. */
    void (*momentum)(const CameJob *job, int64_t tile, float clip, int apart, CameColumns *columns);
    /* The sum of the confidence. */
    double (*confidence)(const CameJob *job, int64_t tile, CameColumns *columns);
    /* x; returns the sum of the confidence. */
    double (*apply)(const CameJob *job, int64_t tile, float step, float decay, CameColumns *columns);
    /* The unfactored second moment; returns the sum of u^2. Then m and x. */
    double (*second_moment)(const CameJob *job, int64_t tile);
    void (*momentum_and_apply)(const CameJob *job, int64_t tile, float clip, float step, float decay);
    double (*param_square_sum)(const CameJob *job, int64_t tile);
} CameLoops;

#endif
