/* The chunks of the rows of a layer-wise step, for the caller, who allocates their sums. */
#include "layer_rows.h"

EXPORT int64_t bighorn_layer_chunks(const LayerRow *rows, const Gradient *gradients, const int64_t *order,
                                    int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = order ? order[i] : i, chunks = layer_chunks(&rows[row], gradients[row].size);
        most = chunks > most ? chunks : most;
    }
    return most;
}
