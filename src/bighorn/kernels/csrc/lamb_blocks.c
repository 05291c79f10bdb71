/* The arithmetic of a LAMB step whose moments are in blocks of few bits (codec.h): one block after the other is decoded,
 * advanced, encoded, and read back as it is stored, in the first-level cache. */
#include "codec.h"
#include "lamb.h"

/* One block. */
typedef struct {
    int64_t start, scale;
    int n;
    float *x;                             /* where it lies, or x_buffer */
    float x_buffer[CODEC_BLOCK];
    float m[CODEC_BLOCK], v[CODEC_BLOCK]; /* codes; values from `advance` to `encode` */
    uint32_t bits[CODEC_BLOCK];           /* random ones */
} Few;

#define FOR_FORMS(row, function, ...)                                                   \
    ((row)->state_type == INT8 ? function(SIGNED, UNSIGNED, __VA_ARGS__) : function(HALF, HALF_ROOT, __VA_ARGS__))

ALWAYS void read_as(const enum Form first, const enum Form second, Few *few, const Row *row) {
    read_codes(first, row->exp_avg, few->start, few->n, few->m);
    read_codes(second, row->exp_avg_sq, few->start, few->n, few->v);
}

static void find_block(Few *few, const Row *row, int64_t start, int64_t size) {
    Part part = first_part(row->inner, start, size);
    few->start = start, few->scale = part.scale, few->n = part.size;
    few->x = read_weights(&row->weights, start, part.size, few->x_buffer);
}

/* The moments' values, and the bits of the largest. */
ALWAYS void advance(const enum Form first, const enum Form second, const Factors f, const Row *row, Few *few,
                    const float *restrict g, uint32_t *largest) {
    const float m_unit = scale_of(first, row->exp_avg_scale[few->scale]).unit;
    const float v_unit = scale_of(second, row->exp_avg_sq_scale[few->scale]).unit;
    const float *restrict x = few->x;
    float *restrict m = few->m, *restrict v = few->v;
    uint32_t m_top = 0, v_top = 0;
#pragma omp simd reduction(max : m_top, v_top)
    for (int i = 0; i < few->n; i++) {
        float grad = FMA(f.l2, x[i], f.grad_scale * g[i]), root = value_of(second, v[i], v_unit);
        m[i] = FMA(f.beta1, value_of(first, m[i], m_unit), f.beta3 * grad); /* LAMB-m */
        v[i] = FMA(f.beta2, root * root, f.beta4 * (grad * grad));          /* LAMB-v */
        uint32_t m_size = magnitude_of(m[i]), v_size = magnitude_of(v[i]);
        m_top = m_size > m_top ? m_size : m_top;
        v_top = v_size > v_top ? v_size : v_top;
    }
    largest[0] = m_top, largest[1] = v_top;
}

ALWAYS float update_at(const enum Form first, const enum Form second, const Factors f, float m_unit, float v_unit,
                       float x, float m, float v) {
    return update_of(f, x, value_of(first, m, m_unit), value_of(second, v, v_unit));
}

/* The moments' codes, and u from what these stand for. */
ALWAYS Sums encode_as(const enum Form first, const enum Form second, const Factors f, const Row *row, Few *few,
                      const uint32_t *largest, float *restrict u) {
    const Scale m_scale = new_scale(first, largest[0]), v_scale = new_scale(second, largest[1]);
    const float *restrict x = few->x;
    const uint32_t *restrict bits = few->bits;
    float *restrict m = few->m, *restrict v = few->v, weight = 0, update = 0;
    row->exp_avg_scale[few->scale] = m_scale.scale, row->exp_avg_sq_scale[few->scale] = v_scale.scale;
    make_ready(m, few->n, &m_scale);
    make_ready(v, few->n, &v_scale);
    /* Three loops, since roots and quotients in one chain would leave the machine waiting for each. */
#pragma omp simd
    for (int i = 0; i < few->n; i++) m[i] = code_of(first, m[i], m_scale, 0);
#pragma omp simd
    for (int i = 0; i < few->n; i++) v[i] = code_of(second, v[i], v_scale, bits[i]);
#pragma omp simd reduction(+ : weight, update)
    for (int i = 0; i < few->n; i++) {
        u[i] = update_at(first, second, f, m_scale.unit, v_scale.unit, x[i], m[i], v[i]);
        weight = FMA(x[i], x[i], weight);
        update = FMA(u[i], u[i], update);
    }
    write_codes(first, m, few->n, row->exp_avg, few->start);
    write_codes(second, v, few->n, row->exp_avg_sq, few->start);
    return (Sums){weight, update};
}

/* The same in double. */
static Sums careful_sums(const Few *few, const float *u) {
    Sums sums = {0, 0};
    for (int i = 0; i < few->n; i++) {
        sums.weight += (double)few->x[i] * few->x[i];
        sums.update += (double)u[i] * u[i];
    }
    return sums;
}

ALWAYS Sums step_as(const enum Form first, const enum Form second, const Factors f, const Row *row, Few *few,
                    const float *g, float *u) {
    uint32_t largest[2];
    read_as(first, second, few, row);
    advance(first, second, f, row, few, g, largest);
    if (second == UNSIGNED) random_bits(&row->weights, f.draw, few->start, few->n, few->bits);
    Sums sums = encode_as(first, second, f, row, few, largest, u);
    return in_range(sums.weight) && in_range(sums.update) ? sums : careful_sums(few, u);
}

/* u of the moments as they are stored. */
ALWAYS void update_as(const enum Form first, const enum Form second, const Factors f, const Row *row, Few *few,
                      float *restrict u) {
    read_as(first, second, few, row);
    const float m_unit = scale_of(first, row->exp_avg_scale[few->scale]).unit;
    const float v_unit = scale_of(second, row->exp_avg_sq_scale[few->scale]).unit;
#pragma omp simd
    for (int i = 0; i < few->n; i++)
        u[i] = update_at(first, second, f, m_unit, v_unit, few->x[i], few->m[i], few->v[i]);
}

static void move(const Factors f, float step, const Few *few, const Row *row, const float *restrict u) {
    float *restrict x = few->x;
#pragma omp simd
    for (int i = 0; i < few->n; i++) x[i] = moved(f, step, x[i], u[i]);
    write_weights(&row->weights, f.draw, few->start, few->n, x);
}

/* Moments and u, and x if `step` is there. */
static Sums step_block(const Block *b, const Factors *f, const float *step, float *update) {
    float buffer[CODEC_BLOCK], own[CODEC_BLOCK];
    Sums sums = {0, 0};
    Mean last = {-1, 0};
    Few few;
    for (int64_t done = 0; done < b->size; done += few.n) {
        float *u = update ? update + done : own;
        find_block(&few, b->row, b->start + done, b->size - done);
        const float *g = centred_grad(b->gradient, b->grad, few.start, few.n, buffer, &last);
        Sums s = FOR_FORMS(b->row, step_as, *f, b->row, &few, g, u);
        if (step) move(*f, *step, &few, b->row, u);
        sums.weight += s.weight;
        sums.update += s.update;
    }
    return sums;
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
    float own[CODEC_BLOCK];
    Few few;
    for (int64_t done = 0; done < b->size; done += few.n) {
        find_block(&few, b->row, b->start + done, b->size - done);
        if (!update) FOR_FORMS(b->row, update_as, *f, b->row, &few, own);
        move(*f, step, &few, b->row, update ? update + done : own);
    }
}

const LambLoops CONCATENATE(lamb_blocks_, ISA) = {moments, apply, moments_and_apply};
