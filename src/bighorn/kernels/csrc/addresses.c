/* Where tensors lie, asked through functions of Python and torch that kernels/addresses.py names: nothing of either is
 * known here. The caller holds the interpreter's lock, and hands over nothing but lists of what their names say: an error
 * of these functions could not be passed on. */
#include "run.h"

typedef struct {
    void *(*item)(void *list, intptr_t index);
    int (*next)(void *dict, intptr_t *position, void **key, void **value);
    void *(*address)(void *tensor);
} Objects;

EXPORT void bighorn_addresses(const Objects *objects, void *tensors, int64_t count, void **addresses) {
    for (int64_t i = 0; i < count; i++) addresses[i] = objects->address(objects->item(tensors, i));
}

EXPORT int64_t bighorn_without_address(const Objects *objects, void *tensors, int64_t count) {
    int64_t without = 0;
    for (int64_t i = 0; i < count; i++) without += !objects->address(objects->item(tensors, i));
    return without;
}

/* Tensors that there were, and where they lay. */
typedef struct {
    void *const *tensors, *const *addresses;
    int64_t count;
} Known;

static int is_next(const Objects *objects, const Known *known, int64_t at, void *tensor) {
    return at < known->count && known->tensors[at] == tensor && known->addresses[at] == objects->address(tensor);
}

/* Whether they are still those of a list, followed by the values of dicts, and lie where they lay. */
EXPORT int bighorn_unmoved(const Objects *objects, const Known *known, void *tensors, int64_t count, void *dicts,
                           int64_t dicts_count) {
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++)
        if (!is_next(objects, known, at++, objects->item(tensors, i))) return 0;
    for (int64_t i = 0; i < dicts_count; i++) {
        void *dict = objects->item(dicts, i), *key, *value;
        for (intptr_t position = 0; objects->next(dict, &position, &key, &value);)
            if (!is_next(objects, known, at++, value)) return 0;
    }
    return at == known->count;
}
