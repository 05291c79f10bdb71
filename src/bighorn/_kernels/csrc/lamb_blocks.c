/* The arithmetic of a LAMB step whose moments are in quantization blocks (codec.h). Each block is decoded, updated,
 * encoded, and read back as it is stored, in the first-level cache. */
#include "codec.h"
#include "lanes.h"

#define Value Lanes
#define MULTIPLY_ADD fused
#define EACH lanes
#include "lamb_rule.h"

/* One block. If the number of elements is not a multiple of LANES, data are copied into buffers and padded with
 * zeros. */
typedef struct {
    const LayerSlot *slot;
    int64_t start, scale;
    int n, type; /* the type of x and g: bfloat16 if both are used in place, else float32 */
    const void *x, *g;
    void *m_codes, *v_codes;
    float *u, *wanted; /* u: where u is written; wanted: its final address, or NULL */
    CodecScale m_scale, v_scale;
    _Alignas(64) float m[CODEC_BLOCK_ELEMS], v[CODEC_BLOCK_ELEMS]; /* values between `advance_as` and `encode_as` */
    float x_buffer[CODEC_BLOCK_ELEMS], g_buffer[CODEC_BLOCK_ELEMS], u_buffer[CODEC_BLOCK_ELEMS];
    uint8_t m_buffer[CODEC_BLOCK_ELEMS], v_buffer[CODEC_BLOCK_ELEMS];
} LambQuantBlock;

/* As LayerSums, one per lane. */
typedef struct {
    double weight[LANES], update[LANES], inner[LANES];
} LambLaneSums;

/* The form of the first moment and types are compile-time constants of each function; the second moment is always in
 * CODEC_UNSIGNED. */
#define FOR_TYPE(form, block, function, ...)                                  \
    ((block)->type == BFLOAT16 ? function(form, BFLOAT16, block, __VA_ARGS__) \
                               : function(form, FLOAT32, block, __VA_ARGS__))
#define FOR_FORMS(block, function, ...)                                                       \
    ((block)->slot->state_type == INT8 ? FOR_TYPE(CODEC_SIGNED, block, function, __VA_ARGS__) \
                                       : FOR_TYPE(CODEC_INT4, block, function, __VA_ARGS__))

/* ---- lanes ----------------------------------------------------------------------------------------------- */

FORCE_INLINE_TEMPLATE Lanes load_as(const int type, const void *data, int i) {
    return type == FLOAT32 ? load((const float *)data + i) : load_bfloat16((const uint16_t *)data + i);
}

/* Codes of CODEC_SIGNED and CODEC_UNSIGNED are roots of the numbers that they stand for, computed by shifting the bits
 * of floats. A code is multiplied by this factor, which makes room in its exponent, and its bits are then shifted left
 * by one or by two, which gives the number that it stands for. */
#define REDUCED(form) ((form) == CODEC_SIGNED ? 0x1p-70f : 0x1p-103f)

/* Returns the numbers that reduced codes stand for, as multiples of the scale's unit. */
FORCE_INLINE_TEMPLATE Lanes powers(const enum CodecForm form, Lanes reduced) {
    LaneWords bits = (LaneWords)reduced;
    return (Lanes)(form == CODEC_SIGNED ? bits << 1 | (bits & 0x80000000u) : bits << 2);
}

FORCE_INLINE_TEMPLATE Lanes load_powers(const enum CodecForm form, const void *codes, int i) {
    if (form == CODEC_INT4) return from_ints(load_bytes((const uint8_t *)codes + i, 1));
    return powers(form, REDUCED(form) * from_ints(load_bytes((const uint8_t *)codes + i, form == CODEC_SIGNED)));
}

/* Stores the codes of values, of CODEC_INT4 in a byte each, and returns the numbers that they stand for. They are
 * dithered by `dither` (rounding.h). */
FORCE_INLINE_TEMPLATE Lanes store_powers(const enum CodecForm form, Lanes value, float factor, LaneWords dither,
                                         void *codes, int i) {
    Lanes power = value * factor;
    if (form != CODEC_UNSIGNED) {
        const float in_2_16ths = form == CODEC_SIGNED ? 0x1p16f / REDUCED(CODEC_SIGNED) : 0x1p16f;
        LaneWords size = (LaneWords)magnitudes(power);
        if (form == CODEC_SIGNED) size >>= 1;
        Lanes code = from_ints((nearest_ints((Lanes)size * in_2_16ths) + (dither >> 16)) >> 16);
        code = with_sign(code, power);
        store_bytes((uint8_t *)codes + i, nearest_ints(code));
        return form == CODEC_SIGNED ? powers(CODEC_SIGNED, REDUCED(CODEC_SIGNED) * code) : code;
    }
    const float in_2_16ths = 0x1p16f / REDUCED(CODEC_UNSIGNED);
    LaneWords code = (nearest_ints((Lanes)((LaneWords)power >> 2) * in_2_16ths) + (dither >> 16)) >> 16;
    code = larger(code, smaller((LaneWords)value, 1 + (LaneWords){0})); /* a nonzero value keeps a nonzero code */
    store_bytes((uint8_t *)codes + i, code);
    return powers(CODEC_UNSIGNED, REDUCED(CODEC_UNSIGNED) * from_ints(code));
}

/* Computes u from the numbers that codes stand for. CODEC_INT4 is m relative to the root of v. */
FORCE_INLINE_TEMPLATE Lanes updates(const enum CodecForm form, LambFloats f, float m_unit, float v_root_unit, Lanes x,
                                    Lanes m, Lanes v) {
    const Lanes root = square_root(v);
    f.correction *= m_unit;
    return update_of(f, x, form == CODEC_INT4 ? m * (root * v_root_unit) : m, root, v_root_unit);
}

/* ---- one block ------------------------------------------------------------------------------------------- */

static void *padded(void *buffer, const void *data, int64_t bytes, int64_t all) {
    memmove(buffer, data, (size_t)bytes);
    memset((char *)buffer + bytes, 0, (size_t)(all - bytes));
    return buffer;
}

static void place_block(LambQuantBlock *block, const LayerSlot *slot, CodecPart part, float *u) {
    block->slot = slot, block->start = part.start, block->scale = part.scale, block->n = part.size;
    block->u = u && block->n % LANES == 0 ? u : block->u_buffer, block->wanted = u;
}

static void load_block_codes(LambQuantBlock *block) {
    const LayerSlot *slot = block->slot;
    const int64_t start = block->start;
    block->m_codes = (uint8_t *)slot->exp_avg + start, block->v_codes = (uint8_t *)slot->exp_avg_sq + start;
    if (slot->state_type == INT4) {
        unpack_int4((const int8_t *)slot->exp_avg + start / 2, block->n, (int8_t *)block->m_buffer);
        block->m_codes = block->m_buffer;
    }
    if (block->n % LANES) {
        block->m_codes = padded(block->m_buffer, block->m_codes, block->n, sizeof block->m_buffer);
        block->v_codes = padded(block->v_buffer, block->v_codes, block->n, sizeof block->v_buffer);
    }
}

static void load_block_weights(LambQuantBlock *block, const int type) {
    const Weights *w = &block->slot->weights;
    block->type = block->n % LANES ? FLOAT32 : type;
    if (block->type == BFLOAT16) {
        block->x = (const uint16_t *)w->data + block->start;
        return;
    }
    block->x = read_weights(w, block->start, block->n, block->x_buffer);
    if (block->n % LANES) block->x = padded(block->x_buffer, block->x, block->n * 4, sizeof block->x_buffer);
}

FORCE_INLINE void load_block_grad(LambQuantBlock *block, const LayerChunk *b, const LambFloats *f) {
    if (block->type == BFLOAT16) {
        block->g = (const uint16_t *)b->grad + block->start;
        return;
    }
    const float *g = read_grad(b->gradient, b->grad, block->start, block->n, block->g_buffer);
    if (block->n % LANES) g = padded(block->g_buffer, g, block->n * 4, sizeof block->g_buffer);
    block->g = decayed_grad(f, FLOAT32, block->n, g, block->x, block->g_buffer);
}

/* Updates the moments, whose values stay in the buffers, and computes their scales. */
FORCE_INLINE_TEMPLATE void advance_as(const enum CodecForm form, const int type, LambQuantBlock *block, LambFloats f) {
    const LayerSlot *slot = block->slot;
    const float m_unit = scale_of(form, slot->exp_avg_scale[block->scale]).unit;
    const float v_unit = scale_of(CODEC_UNSIGNED, slot->exp_avg_sq_scale[block->scale]).unit;
    const float v_root_unit = form == CODEC_INT4 ? sqrtf(v_unit) : 1;
    const void *g = block->g, *m_codes = block->m_codes, *v_codes = block->v_codes;
    const int n = block->n;
    LaneWords m_top = {0}, v_top = {0};
    f.beta1 *= m_unit, f.beta2 *= v_unit;
    for (int i = 0; i < n; i += LANES) {
        Lanes grad = f.scale * load_as(type, g, i);
        Lanes m = load_powers(form, m_codes, i), v = load_powers(CODEC_UNSIGNED, v_codes, i);
        if (form == CODEC_INT4) m *= square_root(v) * v_root_unit;
        m = next_m(f, m, grad), v = next_v(f, v, grad);
        store(block->m + i, m);
        store(block->v + i, v);
        m_top = larger(m_top, (LaneWords)magnitudes(m));
        v_top = larger(v_top, (LaneWords)v);
    }
    block->m_scale = new_scale(form, largest(m_top));
    block->v_scale = new_scale(CODEC_UNSIGNED, largest(v_top));
}

/* The dither of a block's elements, which are consecutive in the whole tensor, too. */
static inline LaneWords block_dither(const LambQuantBlock *block, const LambFloats f) {
    return counted(f.dither + (uint32_t)block->start * DITHER_STRIDE, DITHER_STRIDE);
}

/* Stores the codes of v, replaces v by the numbers that they stand for, and m by its ratio to the root of v. */
static void divide(LambQuantBlock *block, const LambFloats f) {
    const float v_root_unit = sqrtf(block->v_scale.unit);
    LaneWords dither = block_dither(block, f), top = {0};
    for (int i = 0; i < block->n; i += LANES) {
        Lanes v = store_powers(CODEC_UNSIGNED, load(block->v + i), block->v_scale.factor, dither, block->v_codes, i);
        Lanes root = square_root(v) * v_root_unit;
        Lanes m = (Lanes)((LaneWords)(load(block->m + i) / root) & (LaneWords)(root != 0));
        dither += (uint32_t)LANES * DITHER_STRIDE;
        store(block->v + i, v);
        store(block->m + i, m);
        top = larger(top, (LaneWords)magnitudes(m));
    }
    block->m_scale = new_scale(CODEC_INT4, largest(top));
}

/* Stores the moments' codes, and computes u from the numbers that they stand for. */
FORCE_INLINE_TEMPLATE void encode_as(const enum CodecForm form, const int type, LambQuantBlock *block,
                                     const LambFloats f, LambLaneSums *sums) {
    const CodecScale m_scale = block->m_scale, v_scale = block->v_scale;
    const float v_root_unit = sqrtf(v_scale.unit);
    void *m_codes = block->m_codes, *v_codes = block->v_codes;
    const void *all_x = block->x;
    float *all_u = block->u;
    const int n = block->n;
    LaneWords dither = block_dither(block, f);
    Lanes weight = {0}, update = {0}, inner = {0};
    for (int i = 0; i < n; i += LANES) {
        Lanes m = store_powers(form, load(block->m + i), m_scale.factor, dither, m_codes, i);
        Lanes v = load(block->v + i);
        if (form != CODEC_INT4) v = store_powers(CODEC_UNSIGNED, v, v_scale.factor, dither, v_codes, i);
        dither += (uint32_t)LANES * DITHER_STRIDE;
        Lanes x = load_as(type, all_x, i), u = updates(form, f, m_scale.unit, v_root_unit, x, m, v);
        store(all_u + i, u);
        weight = fused(x, x, weight);
        update = fused(u, u, update);
        inner = fused(x, u, inner);
    }
    EACH_LANE(lane) {
        sums->weight[lane] += weight[lane], sums->update[lane] += update[lane], sums->inner[lane] += inner[lane];
    }
}

/* Stores the moments and computes u. */
static void store_moments(LambQuantBlock *block, const LambFloats *f, LambLaneSums *sums) {
    const LayerSlot *slot = block->slot;
    make_ready(block->v, block->n, &block->v_scale);
    if (slot->state_type == INT4) divide(block, *f);
    make_ready(block->m, block->n, &block->m_scale);
    slot->exp_avg_scale[block->scale] = block->m_scale.scale,
    slot->exp_avg_sq_scale[block->scale] = block->v_scale.scale;
    FOR_FORMS(block, encode_as, *f, sums);
    if (slot->state_type == INT4) pack_int4(block->m_codes, block->n, (int8_t *)slot->exp_avg + block->start / 2);
    else if (block->n % LANES) memcpy((uint8_t *)slot->exp_avg + block->start, block->m_codes, (size_t)block->n);
    if (block->n % LANES) {
        memcpy((uint8_t *)slot->exp_avg_sq + block->start, block->v_codes, (size_t)block->n);
        if (block->wanted) memcpy(block->wanted, block->u, (size_t)block->n * sizeof(float));
    }
}

/* Computes u from the stored moments. */
FORCE_INLINE_TEMPLATE void update_as(const enum CodecForm form, const int type, LambQuantBlock *block,
                                     const LambFloats f) {
    const float m_unit = scale_of(form, block->slot->exp_avg_scale[block->scale]).unit;
    const float v_root_unit = sqrtf(scale_of(CODEC_UNSIGNED, block->slot->exp_avg_sq_scale[block->scale]).unit);
    for (int i = 0; i < block->n; i += LANES) {
        Lanes m = load_powers(form, block->m_codes, i), v = load_powers(CODEC_UNSIGNED, block->v_codes, i);
        store(block->u + i, updates(form, f, m_unit, v_root_unit, load_as(type, block->x, i), m, v));
    }
}

/* Updates x from u. */
static void apply_update(const LambFloats f, float step, LambQuantBlock *block, const float *restrict stored) {
    const Weights *w = &block->slot->weights;
    if (is_in_bfloat16(w)) { /* no NaN has low bits here, since u is computed from codes */
        uint16_t *restrict x = (uint16_t *)w->data + block->start;
#pragma omp simd
        for (int i = 0; i < block->n; i++) {
            const float new_x = moved(f, step, load_element(BFLOAT16, x, i), stored[i]);
            store_element(BFLOAT16, x, i, round_bfloat16(new_x, 0));
        }
        return;
    }
    float *restrict x = read_weights(w, block->start, block->n, block->x_buffer);
#pragma omp simd
    for (int i = 0; i < block->n; i++) x[i] = moved(f, step, x[i], stored[i]);
    write_weights(w, f.rng_key, block->start, block->n, x);
}

/* ---- chunks ---------------------------------------------------------------------------------------------- */

/* The type of x and g in a block, as `LambQuantBlock.type`. */
static int type_of(const LayerChunk *b, const LambFloats *f) {
    return all_in_bfloat16(b) && f->l2 == 0 ? BFLOAT16 : FLOAT32;
}

/* Computes the u of a block again, from weights that have not changed. */
static void load_block_update(LambQuantBlock *block, const LambFloats *f, const int type) {
    load_block_codes(block);
    load_block_weights(block, type);
    FOR_FORMS(block, update_as, *f);
}

/* Computes the sums again in double, if squares leave the range of float32. */
static LayerSums careful_sums(const LayerChunk *b, const LambFloats *f) {
    LayerSums sums = {0};
    LambQuantBlock block;
    EACH_CODEC_PART(part, b->slot->inner, b->start, b->start + b->size) {
        place_block(&block, b->slot, part, NULL);
        load_block_update(&block, f, FLOAT32);
        for (int i = 0; i < block.n; i++) {
            const double x = ((const float *)block.x)[i], u = block.u[i];
            add_sums(&sums, (LayerSums){x * x, u * u, x * u});
        }
    }
    return sums;
}

/* Updates the moments and computes u, and updates x if `step` is not NULL. */
static LayerSums step_block(const LayerChunk *b, const LambFloats *f, const float *step, float *update) {
    const int type = type_of(b, f);
    LambLaneSums lane_sums = {{0}, {0}, {0}};
    LambQuantBlock block;
    EACH_CODEC_PART(part, b->slot->inner, b->start, b->start + b->size) {
        place_block(&block, b->slot, part, update ? update + (part.start - b->start) : NULL);
        load_block_codes(&block);
        load_block_weights(&block, type);
        load_block_grad(&block, b, f);
        FOR_FORMS(&block, advance_as, *f);
        store_moments(&block, f, &lane_sums);
        if (step) apply_update(*f, *step, &block, block.u);
    }
    LayerSums sums = {0};
    EACH_LANE(lane) add_sums(&sums, (LayerSums){lane_sums.weight[lane], lane_sums.update[lane], lane_sums.inner[lane]});
    return step || (in_range(sums.weight) && in_range(sums.update)) ? sums : careful_sums(b, f);
}

static LayerSums moments(const LayerChunk *b, const LambFactors *factors, void *update) {
    const LambFloats f = floats_of(factors);
    return step_block(b, &f, NULL, update);
}

static LayerSums moments_and_apply(const LayerChunk *b, const LambFactors *factors, double step) {
    const LambFloats f = floats_of(factors);
    const float size = (float)step;
    return step_block(b, &f, &size, NULL);
}

static void apply(const LayerChunk *b, const LambFactors *factors, double step, const void *update) {
    const LambFloats f = floats_of(factors);
    const float *stored = update;
    const int type = is_in_bfloat16(&b->slot->weights) ? BFLOAT16 : FLOAT32; /* gradients are not read */
    LambQuantBlock block;
    EACH_CODEC_PART(part, b->slot->inner, b->start, b->start + b->size) {
        place_block(&block, b->slot, part, NULL);
        if (!stored) load_block_update(&block, &f, type);
        apply_update(f, (float)step, &block, stored ? stored + (part.start - b->start) : block.u);
    }
}

const LambLoops PER_ISA(lamb_blocks) = {
    .moments = moments,
    .moments_on_ball = moments, /* which adds up the inner product in any case */
    .apply = apply,
    .moments_and_apply = moments_and_apply,
};
