/* Values by their weights. */
#include "chunk.h"
#include "couples.h"

/* L lanes by D * 16 dimensions from `dim` on. */
INLINE void mix_numbers(int L, int D, const Block *b, int count, int lane, int dim, float *values) {
    const Heads *h = b->heads;
    const float *weights = b->scores + lane * b->stride;
    vf sums[MOST_LANES][4];
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) sums[l][d] = splat(0.0f);
    for (int i = 0; i < count; i++) {
        const void *vector = vector_at(b, b->v_pool, b->slots[i]);
        vf value[4];
        for (int d = 0; d < D; d++) value[d] = load_as(h->wide, vector, dim + d * LANES);
        for (int l = 0; l < L; l++)
            for (int d = 0; d < D; d++) sums[l][d] += value[d] * weights[l * b->stride + i];
    }
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) store(values + (lane + l) * h->head_dim + dim + d * LANES, sums[l][d]);
}

#if HAS_BF16_DOT
INLINE void mix_couples(int L, int D, const Block *b, int count, int lane, int dim, float *values) {
    const int32_t *weights = (const int32_t *)(b->scores + lane * b->stride);
    __m512 sums[MOST_LANES][4];
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) sums[l][d] = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 2) {
        const bf16 *first = (const bf16 *)vector_at(b, b->v_pool, b->slots[i]) + dim;
        const bf16 *second = (const bf16 *)vector_at(b, b->v_pool, b->slots[i + 1]) + dim;
        __m512bh value[4];
        if (D == 4)
            load_couple(first, second, value), load_couple(first + 32, second + 32, value + 2);
        else
            value[0] = (__m512bh)((vu)load_bf16(first) >> 16 | (vu)load_bf16(second));
        for (int l = 0; l < L; l++) {
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(weights[l * b->stride + i / 2]);
            for (int d = 0; d < D; d++) sums[l][d] = _mm512_dpbf16_ps(sums[l][d], value[d], weight);
        }
    }
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++)
            store(values + (lane + l) * b->heads->head_dim + dim + d * LANES, (vf)sums[l][d]);
}
#endif

INLINE void mix_dims(int L, int D, const Block *b, int count, int lane, int dim, float *values) {
#if HAS_BF16_DOT
    if (b->pairs) {
        mix_couples(L, D, b, count, lane, dim, values);
        return;
    }
#endif
    mix_numbers(L, D, b, count, lane, dim, values);
}

INLINE void mix_all_dims(int L, const Block *b, int count, int lane, float *values) {
    int dim = 0;
    for (; dim + BESIDE_VALUES(L) * LANES <= b->heads->head_dim; dim += BESIDE_VALUES(L) * LANES)
        mix_dims(L, BESIDE_VALUES(L), b, count, lane, dim, values);
    for (; dim < b->heads->head_dim; dim += LANES) mix_dims(L, 1, b, count, lane, dim, values);
}

#define MIXER(L) \
    ALONE void mix##L(const Block *b, int count, int lane, float *values) { mix_all_dims(L, b, count, lane, values); }
MIXER(1)
MIXER(2)
#if MOST_LANES == 6
MIXER(3)
MIXER(4)
MIXER(5)
MIXER(6)
#endif

typedef void Mixer(const Block *b, int count, int lane, float *values);
static Mixer *const mixers[MOST_LANES] = EACH_COUNT(mix);

void mix_values(const Block *b, int count, float *values) {
    for (int lane = 0, lanes; lane < b->num_lanes; lane += lanes) {
        lanes = next_lanes(b->num_lanes - lane);
        mixers[lanes - 1](b, count, lane, values);
    }
}
