/* Factored averages on shards: the sums over all shards that give the values of the whole tensor, as in
 * _kernels/reference/came.py.
 *
 * A shard of whole rows has the averages of its rows, and a part of each column's average; a shard of whole columns,
 * the reverse. An average that is split is added up over the shards. If one dim is split, the sum of u^2 is mean(row)
 * sum_j (sum_i q_ij / row_i) / col_j. Its inner sums are added up in the same round as the averages, and so are the
 * inner sums of the confidence. */
#include "factored_shards.h"

#include <math.h>

static int64_t position(const int64_t *at, int64_t i) { return at ? at[i] : i; }

static void spread(const float *values, int64_t count, const int64_t *at, double *to) {
    for (int64_t i = 0; i < count; i++) to[position(at, i)] = values[i];
}

static void cut(const double *from, int64_t count, const int64_t *at, float *values) {
    for (int64_t i = 0; i < count; i++) values[i] = (float)from[position(at, i)];
}

FactoredShardSums shard_sums_at(const FactoredShard *h, double *at, int64_t inner, double **rest) {
    const int one_way = h->split_down != h->split_across;
    FactoredShardSums s = {0};
    if (one_way) s.inner = at, at += inner;
    if (h->split_across) s.row = at, at += h->matrices * h->height;
    if (h->split_down) s.col = at, at += h->matrices * h->width;
    if (one_way) s.total = at, at += h->matrices;
    *rest = at;
    return s;
}

FactoredShardSums square_shard_sums(const FactoredJob *job) {
    const FactoredShard *h = job->shard;
    double *rest;
    FactoredShardSums s = shard_sums_at(h, h->sums[0], h->matrices * (h->split_down ? h->width : h->height), &rest);
    if (is_split_both_ways(h)) rest = h->sums[1];
    if (!s.inner) s.update = rest++;
    s.param = rest;
    return s;
}

void store_shard_average(const FactoredJob *job, const FactoredAverage *average, const FactoredAverage *ratio,
                         const FactoredShardSums *to) {
    const FactoredSlot *slot = job->slot;
    const FactoredShard *h = job->shard;
    const int64_t rows = slot->matrices * slot->height, columns = slot->matrices * slot->width;
    if (job->gradient->size == 0) return; /* another shard contributes the old averages */
    if (to->row) spread(average->row.values, rows, h->row_at, to->row);
    if (to->col) spread(average->col.values, columns, h->col_at, to->col);
    if (!to->inner) return;
    const int down = h->split_down;
    const float *whole = down ? average->row.values : average->col.values;
    const int64_t count = down ? slot->height : slot->width;
    if (ratio && down) spread(ratio->col.values, columns, h->col_at, to->inner);
    if (ratio && !down) spread(ratio->row.values, rows, h->row_at, to->inner);
    for (int64_t k = 0; k < slot->matrices; k++) {
        double total = 0, roots = 0;
        for (int64_t i = k * count; i < (k + 1) * count; i++) total += whole[i], roots += 1 / sqrt(whole[i]);
        to->total[position(h->matrix_at, k)] = total;
        if (!ratio) to->inner[position(h->matrix_at, k)] = roots;
    }
}

void store_shard_square_sums(const FactoredShardSums *to, FactoredSquareSums sums) {
    if (to->update) *to->update = sums.update;
    *to->param = sums.param;
}

double reduced_row_mean(const FactoredShard *h, const FactoredShardSums *from, int64_t k) {
    if (!from->row) return from->total[k] / (double)h->height;
    double total = 0;
    for (int64_t i = 0; i < h->height; i++) total += from->row[k * h->height + i];
    return total / (double)h->height;
}

void load_reduced_average(const FactoredJob *job, const FactoredAverage *average, const FactoredShardSums *from) {
    const FactoredSlot *slot = job->slot;
    const FactoredShard *h = job->shard;
    if (from->row) cut(from->row, slot->matrices * slot->height, h->row_at, average->row.values);
    if (from->col) cut(from->col, slot->matrices * slot->width, h->col_at, average->col.values);
    for (int64_t k = 0; k < slot->matrices; k++) job->means[k] = reduced_row_mean(h, from, position(h->matrix_at, k));
}

FactoredSquareSums reduced_square_sums(const FactoredJob *job, const FactoredShardSums *from) {
    const FactoredShard *h = job->shard;
    if (from->update) return (FactoredSquareSums){*from->update, *from->param};
    const int64_t count = from->row ? h->height : h->width;
    const double *average = from->row ? from->row : from->col;
    double sum = 0;
    for (int64_t k = 0; k < h->matrices; k++) {
        double ratios = 0;
        for (int64_t i = k * count; i < (k + 1) * count; i++) ratios += from->inner[i] / average[i];
        sum += reduced_row_mean(h, from, k) * ratios;
    }
    return (FactoredSquareSums){sum / (ROOT_SCALE * ROOT_SCALE), *from->param};
}
