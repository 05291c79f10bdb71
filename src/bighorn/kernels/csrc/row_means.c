/* The means of gradients' rows that are known before a step begins: those of long rows, which the loops would compute
 * again in every chunk, and those of rows that are cut up, which are added up over all shards. */
#include "run.h"
#include "square_sum.h"

TABLE_PER_ISA(SquareSumLoops, square_sum_loops)
TABLE_PER_ISA(SquareSumLoops, square_sum_loops_double)

typedef struct {
    const SquareSumLoops *loops, *loops_double; /* for float64 gradients */
    const Gradient *gradients;
    void *const *data; /* NULL: the row has no gradient */
    int64_t rows;
    double *partial; /* one per unit */
    int64_t units;
} RowMeans;

/* The rows of dim 0 that one thread takes at a time; 0 if threads share a row, chunk by chunk. */
static int64_t rows_at_once(const Gradient *g) { return CHUNK_ELEMS / g->fan; }

static int64_t units_in(const Gradient *g) {
    if (!g->means || !g->fan) return 0;
    const int64_t rows = g->size / g->fan, at_once = rows_at_once(g);
    return at_once ? (rows + at_once - 1) / at_once : rows * chunks_in(g->fan);
}

/* Computes the means of the rows of a unit, or the sum of one chunk of a row. */
static void run_unit(const RowMeans *m, const Gradient *g, const void *data, int64_t unit, double *partial) {
    const SquareSumLoops *loops = g->type == FLOAT64 ? m->loops_double : m->loops;
    const int64_t at_once = rows_at_once(g), chunks = chunks_in(g->fan);
    if (!data) return;
    if (!at_once) {
        const int64_t start = unit % chunks * CHUNK_ELEMS, rest = g->fan - start;
        *partial = loops->sum(g, data, unit / chunks * g->fan + start, rest < CHUNK_ELEMS ? rest : CHUNK_ELEMS);
        return;
    }
    const int64_t rows = g->size / g->fan, end = (unit + 1) * at_once < rows ? (unit + 1) * at_once : rows;
    for (int64_t row = unit * at_once; row < end; row++)
        g->means[row] = loops->sum(g, data, row * g->fan, g->fan) / (double)g->whole_fan;
}

static void run_units(int thread, int team, void *data) {
    const RowMeans *m = data;
    int64_t first = share_of(m->units, thread, team), last = share_of(m->units, thread + 1, team), before = 0;
    for (int64_t row = 0; row < m->rows && before < last; row++) {
        const int64_t count = units_in(&m->gradients[row]);
        for (int64_t unit = first > before ? first - before : 0; unit < count && before + unit < last; unit++)
            run_unit(m, &m->gradients[row], m->data[row], unit, &m->partial[before + unit]);
        before += count;
    }
}

/* Adds up the sums of rows that threads share. */
static void add_up(const Gradient *g, const double *partial) {
    const int64_t chunks = chunks_in(g->fan), rows = g->size / g->fan;
    for (int64_t row = 0; row < rows; row++) {
        double total = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++) total += partial[row * chunks + chunk];
        g->means[row] = total / (double)g->whole_fan;
    }
}

/* The units of work in all gradients, each of which needs a partial sum. */
EXPORT int64_t bighorn_row_means_units(const Gradient *gradients, int64_t rows) {
    int64_t units = 0;
    for (int64_t row = 0; row < rows; row++) units += units_in(&gradients[row]);
    return units;
}

/* Computes the means of all gradients that have memory for them; `data` is NULL for a row without a gradient. For a
 * shard, its share of them, so that the mean is the sum over all shards. */
EXPORT void bighorn_row_means(const RunConfig *run, const Gradient *gradients, void *const *data, int64_t rows,
                              double *partial) {
    RowMeans m = {
        .loops = square_sum_loops_for(run->isa),
        .loops_double = square_sum_loops_double_for(run->isa),
        .gradients = gradients,
        .data = data,
        .rows = rows,
        .partial = partial,
        .units = bighorn_row_means_units(gradients, rows),
    };
    run_parallel(run, elements_of(gradients, rows), run_units, &m);
    for (int64_t row = 0; row < rows; row++) {
        const Gradient *g = &gradients[row];
        const int64_t units = units_in(g);
        if (data[row] && units && !rows_at_once(g)) add_up(g, partial);
        partial += units;
    }
}
