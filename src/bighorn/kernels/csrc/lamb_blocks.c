/* The arithmetic of a LAMB step whose moments are in blocks of few bits (codec.h): one block after the other is
 * decoded, advanced, encoded, and read back as it is stored, in the first-level cache. */
#include "codec.h"
#include "lamb.h"
#include "lanes.h"

/* One block. What is not a multiple of lanes is copied into buffers, with zeros behind it. */
typedef struct {
    const Row *row;
    int64_t start, scale;
    int n, type; /* of x and g: both lie as they are, in bfloat16, or both are in float32 */
    const void *x, *g;
    float grad_scale;
    void *m_codes, *v_codes;
    float *u, *wanted; /* where it is formed, and where it is to be, if anywhere */
    Scale m_scale, v_scale;
    _Alignas(64) float m[CODEC_BLOCK], v[CODEC_BLOCK]; /* values from `advance` to `encode` */
    float x_buffer[CODEC_BLOCK], g_buffer[CODEC_BLOCK], u_buffer[CODEC_BLOCK];
    float m_buffer[CODEC_BLOCK / 2], v_buffer[CODEC_BLOCK / 2];
} Few;

/* Sums of squares of x and u, lane by lane. */
typedef struct {
    double weight[LANES], update[LANES];
} LaneSums;

/* Forms and types are known where functions are compiled. */
#define FOR_FORMS(few, function, ...)                                                        \
    ((few)->row->state_type == INT8                                                          \
         ? ((few)->type == BFLOAT16 ? function(SIGNED, UNSIGNED, BFLOAT16, few, __VA_ARGS__) \
                                    : function(SIGNED, UNSIGNED, FLOAT32, few, __VA_ARGS__)) \
         : ((few)->type == BFLOAT16 ? function(HALF, HALF_ROOT, BFLOAT16, few, __VA_ARGS__)  \
                                    : function(HALF, HALF_ROOT, FLOAT32, few, __VA_ARGS__)))

static int64_t code_bytes(const Row *row) { return row->state_type == INT8 ? 1 : 2; }

/* ---- lanes ----------------------------------------------------------------------------------------------- */

ALWAYS Lanes load_as(const int type, const void *data, int i) {
    return type == FLOAT32 ? load((const float *)data + i) : load_bfloat16((const uint16_t *)data + i);
}

/* Codes of SIGNED and UNSIGNED are roots of what they stand for, as the bits of floats make them: multiplied by this,
 * so that there is room in their exponents, codes become what they stand for when their bits move up by one or by two.
 */
#define REDUCED(form) ((form) == SIGNED ? 0x1p-70f : 0x1p-103f)

/* What reduced codes stand for, as multiples of the scale's unit. */
ALWAYS Lanes powers(const enum Form form, Lanes reduced) {
    Words bits = (Words)reduced;
    return (Lanes)(form == SIGNED ? bits << 1 | (bits & 0x80000000u) : bits << 2);
}

ALWAYS Lanes load_powers(const enum Form form, const void *codes, int i) {
    if (form == HALF || form == HALF_ROOT) return load_float16((const uint16_t *)codes + i);
    return powers(form, REDUCED(form) * from_ints(load_bytes((const uint8_t *)codes + i, form == SIGNED)));
}

/* Stores the codes of values, and returns what they stand for. UNSIGNED is dithered by `turns` (rounding.h). */
ALWAYS Lanes store_powers(const enum Form form, Lanes value, float factor, Words turns, void *codes, int i) {
    Lanes power = value * factor;
    if (form == HALF || form == HALF_ROOT) {
        Lanes share = form == HALF ? power : square_root(power), size = magnitudes(share);
        Words least = (Words)(size > 0) & 0x33800000u; /* 2^-24: what is not 0 does not become 0 */
        return store_float16((uint16_t *)codes + i, with_sign((Lanes)larger((Words)size, least), share));
    }
    if (form == SIGNED) {
        Lanes root = (Lanes)((Words)((Ints)power >> 1) & 0xbfffffffu); /* but for the sign, which stays */
        Lanes code = fused(root, lanes(1 / REDUCED(SIGNED)), lanes(WHOLE));
        store_bytes((uint8_t *)codes + i, (Words)code);
        return powers(SIGNED, fused(code, lanes(REDUCED(SIGNED)), lanes(-WHOLE * REDUCED(SIGNED))));
    }
    const float in_2_16ths = 0x1p16f / REDUCED(UNSIGNED);
    Words code = (nearest_ints((Lanes)((Words)power >> 2) * in_2_16ths) + (turns >> 16)) >> 16;
    code = larger(code, smaller((Words)value, 1 + (Words){0})); /* what is not 0 does not become 0 */
    store_bytes((uint8_t *)codes + i, code);
    return powers(UNSIGNED, REDUCED(UNSIGNED) * from_ints(code));
}

/* The unit of the roots of v. */
ALWAYS float root_unit(const enum Form second, float unit) { return second == UNSIGNED ? sqrtf(unit) : unit; }

/* u from what codes stand for. */
ALWAYS Lanes updates(const enum Form second, const Factors f, float m_unit, float v_root_unit, Lanes x, Lanes m,
                     Lanes v) {
    Lanes root = fused(second == UNSIGNED ? square_root(v) : v, lanes(v_root_unit), lanes(f.eps));
    return fused(lanes(f.weight_decay), x, m * (f.correction * m_unit) / root); /* LAMB-u */
}

/* ---- one block ------------------------------------------------------------------------------------------- */

static void *padded(void *buffer, const void *data, int64_t bytes, int64_t all) {
    memmove(buffer, data, (size_t)bytes);
    memset((char *)buffer + bytes, 0, (size_t)(all - bytes));
    return buffer;
}

static void take_block(Few *few, const Row *row, Part part, float *u) {
    const int64_t start = part.start, bytes = code_bytes(row);
    few->row = row, few->start = start, few->scale = part.scale, few->n = part.size;
    few->m_codes = (char *)row->exp_avg + start * bytes, few->v_codes = (char *)row->exp_avg_sq + start * bytes;
    few->u = u ? u : few->u_buffer, few->wanted = u;
    if (few->n % LANES) {
        few->m_codes = padded(few->m_buffer, few->m_codes, few->n * bytes, sizeof few->m_buffer);
        few->v_codes = padded(few->v_buffer, few->v_codes, few->n * bytes, sizeof few->v_buffer);
        few->u = few->u_buffer;
    }
}

static void take_weights(Few *few, const int type) {
    const Weights *w = &few->row->weights;
    few->type = few->n % LANES ? FLOAT32 : type;
    if (few->type == BFLOAT16) {
        few->x = (const uint16_t *)w->data + few->start;
        return;
    }
    few->x = read_weights(w, few->start, few->n, few->x_buffer);
    if (few->n % LANES) few->x = padded(few->x_buffer, few->x, few->n * 4, sizeof few->x_buffer);
}

static void take_grad(Few *few, const Block *b, const Factors *f, Mean *last) {
    few->grad_scale = f->grad_scale;
    if (few->type == BFLOAT16) {
        few->g = (const uint16_t *)b->grad + few->start;
        return;
    }
    const float *g = centred_grad(b->gradient, b->grad, few->start, few->n, few->g_buffer, last), *x = few->x;
    if (few->n % LANES) g = padded(few->g_buffer, g, few->n * 4, sizeof few->g_buffer);
    if (f->l2 != 0) {
        few->grad_scale = 1;
        for (int i = 0; i < few->n; i++) few->g_buffer[i] = FMA(f->l2, x[i], f->grad_scale * g[i]);
        g = few->g_buffer;
    }
    few->g = g;
}

/* The moments' values, and the scales of these. */
ALWAYS void advance_as(const enum Form first, const enum Form second, const int type, Few *few, const Factors f) {
    const Row *row = few->row;
    const float scale = few->grad_scale;
    const float m_unit = scale_of(first, row->exp_avg_scale[few->scale]).unit;
    const float v_unit = scale_of(second, row->exp_avg_sq_scale[few->scale]).unit;
    const float beta1 = f.beta1 * m_unit, beta2 = second == HALF_ROOT ? f.beta2 : f.beta2 * v_unit;
    const void *g = few->g, *m_codes = few->m_codes, *v_codes = few->v_codes;
    const int n = few->n;
    Words m_top = {0}, v_top = {0};
    for (int i = 0; i < n; i += LANES) {
        Lanes grad = scale * load_as(type, g, i);
        Lanes m = load_powers(first, m_codes, i), v = load_powers(second, v_codes, i);
        if (second == HALF_ROOT) v *= v_unit, v *= v;
        m = fused(lanes(beta1), m, f.beta3 * grad);          /* LAMB-m */
        v = fused(lanes(beta2), v, f.beta4 * (grad * grad)); /* LAMB-v */
        store(few->m + i, m);
        store(few->v + i, v);
        m_top = larger(m_top, (Words)magnitudes(m));
        v_top = larger(v_top, (Words)v);
    }
    few->m_scale = new_scale(first, largest(m_top));
    few->v_scale = new_scale(second, largest(v_top));
}

/* The moments' codes, and u from what these stand for. */
ALWAYS void encode_as(const enum Form first, const enum Form second, const int type, Few *few, const Factors f,
                      LaneSums *sums) {
    const Scale m_scale = few->m_scale, v_scale = few->v_scale;
    const float v_root_unit = root_unit(second, v_scale.unit);
    void *m_codes = few->m_codes, *v_codes = few->v_codes;
    const void *all_x = few->x;
    float *all_u = few->u;
    const int n = few->n;
    Words turns = counted(f.turns + (uint32_t)few->start * TURN, TURN); /* blocks are of one piece in the whole, too */
    Lanes weight = {0}, update = {0};
    for (int i = 0; i < n; i += LANES) {
        Lanes m = store_powers(first, load(few->m + i), m_scale.factor, turns, m_codes, i);
        Lanes v = store_powers(second, load(few->v + i), v_scale.factor, turns, v_codes, i);
        turns += (uint32_t)LANES * TURN;
        Lanes x = load_as(type, all_x, i), u = updates(second, f, m_scale.unit, v_root_unit, x, m, v);
        store(all_u + i, u);
        weight = fused(x, x, weight);
        update = fused(u, u, update);
    }
    EACH_LANE(lane) sums->weight[lane] += weight[lane], sums->update[lane] += update[lane];
}

/* Stores the moments and forms u. */
static void finish(Few *few, const Factors *f, LaneSums *sums) {
    const Row *row = few->row;
    row->exp_avg_scale[few->scale] = few->m_scale.scale, row->exp_avg_sq_scale[few->scale] = few->v_scale.scale;
    make_ready(few->m, few->n, &few->m_scale);
    make_ready(few->v, few->n, &few->v_scale);
    FOR_FORMS(few, encode_as, *f, sums);
    if (few->n % LANES) {
        const int64_t bytes = code_bytes(row);
        memcpy((char *)row->exp_avg + few->start * bytes, few->m_codes, (size_t)(few->n * bytes));
        memcpy((char *)row->exp_avg_sq + few->start * bytes, few->v_codes, (size_t)(few->n * bytes));
        if (few->wanted) memcpy(few->wanted, few->u, (size_t)few->n * sizeof(float));
    }
}

/* u of the moments as they are stored. */
ALWAYS void update_as(const enum Form first, const enum Form second, const int type, Few *few, const Factors f) {
    const float m_unit = scale_of(first, few->row->exp_avg_scale[few->scale]).unit;
    const float v_root_unit = root_unit(second, scale_of(second, few->row->exp_avg_sq_scale[few->scale]).unit);
    for (int i = 0; i < few->n; i += LANES) {
        Lanes m = load_powers(first, few->m_codes, i), v = load_powers(second, few->v_codes, i);
        store(few->u + i, updates(second, f, m_unit, v_root_unit, load_as(type, few->x, i), m, v));
    }
}

static void move(const Factors *f, float step, Few *few, const float *restrict u) {
    const Weights *w = &few->row->weights;
    if (lies_in_bfloat16(w)) { /* no NaN has low bits here: u is computed from codes */
        uint16_t *restrict x = (uint16_t *)w->data + few->start;
#pragma omp simd
        for (int i = 0; i < few->n; i++)
            put(BFLOAT16, x, i, round_bfloat16(moved(*f, step, get(BFLOAT16, x, i), u[i]), 0));
        return;
    }
    float *restrict x = read_weights(w, few->start, few->n, few->x_buffer);
#pragma omp simd
    for (int i = 0; i < few->n; i++) x[i] = moved(*f, step, x[i], u[i]);
    write_weights(w, f->draw, few->start, few->n, x);
}

/* ---- blocks ---------------------------------------------------------------------------------------------- */

/* The sums again, in double: of squares that leave the range of float32. */
static Sums careful_sums(const Block *b, const Factors *f) {
    Sums sums = {0, 0};
    Few few;
    EACH_PART(part, b->row->inner, b->start, b->start + b->size) {
        take_block(&few, b->row, part, NULL);
        take_weights(&few, FLOAT32);
        FOR_FORMS(&few, update_as, *f);
        for (int i = 0; i < few.n; i++) {
            double x = ((const float *)few.x)[i];
            sums.weight += x * x;
            sums.update += (double)few.u[i] * few.u[i];
        }
    }
    return sums;
}

/* Moments and u, and x if `step` is there. Two blocks in turn, since the codes of one wait for its scales: 4% faster.
 */
static Sums step_block(const Block *b, const Factors *f, const float *step, float *update) {
    const int type = all_in_bfloat16(b) && f->l2 == 0 ? BFLOAT16 : FLOAT32;
    const int64_t inner = b->row->inner, end = b->start + b->size;
    LaneSums lane_sums = {{0}, {0}};
    Mean last = {-1, 0};
    Few few[2];
    for (Part part = first_part(inner, b->start, end); part.size > 0;) {
        int count = 0;
        for (; count < 2 && part.size > 0; part = next_part(inner, part, end)) {
            Few *next = &few[count++];
            take_block(next, b->row, part, update ? update + (part.start - b->start) : NULL);
            take_weights(next, type);
            take_grad(next, b, f, &last);
            FOR_FORMS(next, advance_as, *f);
        }
        for (int i = 0; i < count; i++) {
            finish(&few[i], f, &lane_sums);
            if (step) move(f, *step, &few[i], few[i].u);
        }
    }
    Sums sums = {0, 0};
    EACH_LANE(lane) sums.weight += lane_sums.weight[lane], sums.update += lane_sums.update[lane];
    return step || (in_range(sums.weight) && in_range(sums.update)) ? sums : careful_sums(b, f);
}

static Sums moments(const Block *b, const Factors *f, int second_moment, float *update) {
    (void)second_moment; /* a running maximum is refused, and the others differ by factors alone */
    return step_block(b, f, NULL, update);
}

static Sums moments_and_apply(const Block *b, const Factors *f, int second_moment, float step) {
    (void)second_moment;
    return step_block(b, f, &step, NULL);
}

static void apply(const Block *b, const Factors *f, float step, const float *update) {
    const int type = lies_in_bfloat16(&b->row->weights) ? BFLOAT16 : FLOAT32;
    Few few;
    EACH_PART(part, b->row->inner, b->start, b->start + b->size) {
        take_block(&few, b->row, part, NULL);
        if (!update) {
            take_weights(&few, type);
            FOR_FORMS(&few, update_as, *f);
        }
        move(f, step, &few, update ? update + (part.start - b->start) : few.u);
    }
}

const LambLoops CONCATENATE(lamb_blocks_, ISA) = {moments, apply, moments_and_apply};
