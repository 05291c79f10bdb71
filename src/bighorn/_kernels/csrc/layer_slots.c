/* The chunks of the slots of a layer-wise step, for the caller, who allocates their sums. */
#include "layer_slots.h"

EXPORT int64_t bighorn_layer_chunks(const LayerSlot *slots, const Gradient *gradients, const int64_t *order,
                                    int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = order ? order[i] : i, chunks = layer_chunks(&slots[slot], gradients[slot].size);
        most = chunks > most ? chunks : most;
    }
    return most;
}
