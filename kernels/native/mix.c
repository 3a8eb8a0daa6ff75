/* Values by their weights. */
#include "chunk.h"
#include "couples.h"

/* Keys whose values go into all lanes and dimensions before the next ones' do: they stay in the first cache where not
 * all dimensions fit the registers at once. Each sum goes on where it was: their order does not change. */
#define AT_ONCE 64

/* Some of a chunk's keys, and where their values lie. */
typedef struct {
    int first, count;
    const char *values[AT_ONCE];
} Some;

/* Four vectors of bf16 values at once have the even ones of 32 dimensions in a vector, the odd ones in the next, and so
 * have their sums until put_in_order: two operations of 32 dimensions on the ports that multiply, where keeping their
 * order takes four. */
#if defined(__AVX512F__)
#define SPLITS(h, D) (!(h)->wide && (D) == 4)

INLINE void load_split(const void *values, int dim, vf split[4]) {
    for (int half = 0; half < 4; half += 2) {
        const vu both = *(const vu_any *)((const bf16 *)values + dim + half * LANES);
        split[half] = (vf)(both << 16);
        split[half + 1] = (vf)(both & 0xffff0000u);
    }
}

INLINE void put_in_order(float *sums) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_or_si512(low, _mm512_set1_epi32(8));
    const __m512 even = (__m512)load(sums), odd = (__m512)load(sums + LANES);
    store(sums, (vf)_mm512_permutex2var_ps(even, low, odd));
    store(sums + LANES, (vf)_mm512_permutex2var_ps(even, high, odd));
}
#else
#define SPLITS(h, D) 0
INLINE void load_split(const void *values, int dim, vf split[4]) { (void)values, (void)dim, (void)split; }
INLINE void put_in_order(float *sums) { (void)sums; }
#endif

/* L lanes by D vectors of dimensions from `dim` on. */
INLINE void mix_numbers(int L, int D, const Block *b, const Some *keys, int lane, int dim, float *values) {
    const Heads *h = b->heads;
    const float *weights = b->scores + lane * b->stride + keys->first;
    const int64_t stride = b->stride;
    float *target = values + lane * h->head_dim + dim;
    vf sums[MOST_LANES][4];
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) sums[l][d] = keys->first ? load(target + l * h->head_dim + d * LANES) : splat(0.0f);
    for (int i = 0; i < keys->count; i++) {
        vf value[4];
        if (SPLITS(h, D))
            load_split(keys->values[i], dim, value);
        else
            for (int d = 0; d < D; d++) value[d] = load_as(h->wide, keys->values[i], dim + d * LANES);
        for (int l = 0; l < L; l++)
            for (int d = 0; d < D; d++) sums[l][d] += value[d] * weights[l * stride + i];
    }
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) store(target + l * h->head_dim + d * LANES, sums[l][d]);
}

#if HAS_BF16_DOT
INLINE void mix_couples(int L, int D, const Block *b, int count, int lane, int dim, float *values) {
    const int32_t *weights = (const int32_t *)(b->scores + lane * b->stride);
    __m512 sums[MOST_LANES][4];
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) sums[l][d] = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 2) {
        const bf16 *first = (const bf16 *)vector_at(b, b->computed.v, b->slots[i]) + dim;
        const bf16 *second = (const bf16 *)vector_at(b, b->computed.v, b->slots[i + 1]) + dim;
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

/* L lanes by all dimensions. keys: NULL for all `count` couples' keys. */
INLINE void mix_lanes(int L, const Block *b, const Some *keys, int count, int lane, float *values) {
    const int dims = b->heads->head_dim;
    int dim = 0;
#if HAS_BF16_DOT
    if (!keys) {
        for (; dim + 4 * LANES <= dims; dim += 4 * LANES) mix_couples(L, 4, b, count, lane, dim, values);
        for (; dim < dims; dim += LANES) mix_couples(L, 1, b, count, lane, dim, values);
        return;
    }
#else
    (void)count;
#endif
    const int step = BESIDE_VALUES(L) * LANES;
    for (; dim + step <= dims; dim += step) mix_numbers(L, BESIDE_VALUES(L), b, keys, lane, dim, values);
    for (; dim < dims; dim += LANES) mix_numbers(L, 1, b, keys, lane, dim, values);
}

#define MIXER(L) \
    ALONE void mix##L(const Block *b, const Some *keys, int count, int lane, float *values) { \
        mix_lanes(L, b, keys, count, lane, values); \
    }
MIXER(1)
MIXER(2)
#if MOST_LANES == 6
MIXER(3)
MIXER(4)
MIXER(5)
MIXER(6)
#endif

typedef void Mixer(const Block *b, const Some *keys, int count, int lane, float *values);
static Mixer *const mixers[MOST_LANES] = EACH_COUNT(mix);

static void mix_keys(const Block *b, const Some *keys, int count, float *values) {
    for (int lane = 0, lanes; lane < b->num_lanes; lane += lanes) {
        lanes = next_lanes(b->num_lanes - lane);
        mixers[lanes - 1](b, keys, count, lane, values);
    }
}

void mix_values(const Block *b, int count, float *values) {
    if (b->pairs) {
        mix_keys(b, NULL, count, values);
        return;
    }
    Some keys;
    for (keys.first = 0; keys.first < count; keys.first += AT_ONCE) {
        keys.count = count - keys.first < AT_ONCE ? count - keys.first : AT_ONCE;
        for (int i = 0; i < keys.count; i++) { /* all are asked for first: the sums would wait for one after another */
            keys.values[i] = vector_at(b, b->computed.v, b->slots[keys.first + i]);
            for (int64_t at = 0; at < b->vector_bytes; at += 64) __builtin_prefetch(keys.values[i] + at, 0, 3);
        }
        mix_keys(b, &keys, keys.count, values);
    }
    const int dims = b->heads->head_dim, split = SPLITS(b->heads, 4) ? dims / (4 * LANES) * (4 * LANES) : 0;
    for (int l = 0; l < b->num_lanes; l++)
        for (int dim = 0; dim < split; dim += 2 * LANES) put_in_order(values + l * dims + dim);
}
