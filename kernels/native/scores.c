/* Scores: keys are laid side by side, LANES of them to a vector, and taken through all queries. */
#include "amx.h"
#include "chunk.h"

/* Keys fetched ahead of use: slots are scattered. Into the second cache (locality 2), which takes three times as many
 * outstanding reads as the first: 22 against 7 GB/s of random slots on one Zen 4 core. */
#define AHEAD 64
/* What surely stays in a core's second cache. */
#define CACHE_BYTES (512 * 1024)

/* Whether the keys and values that the block sees are in the caches: just made wide, or from the segment's block
 * before it. */
static int are_near(const Block *b) {
    if (b->heads->kept) return 1;
    return b->lane0 && 2 * b->slot_bytes * b->layout->prefix_lens[b->segment] <= CACHE_BYTES;
}

/* Asks for a slot's vector; for the first kv head, for all heads' where they are small enough to stay until the other
 * heads' turn: fewer and longer reads from memory. */
INLINE void fetch(const Block *b, const void *pool, int32_t slot) {
    const int is_for_all = b->kv_head == 0 && 2 * CHUNK * b->slot_bytes <= CACHE_BYTES;
    const int64_t bytes = is_for_all ? b->slot_bytes : b->vector_bytes;
    const char *vector = vector_at(b, pool, slot);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(vector + at, 0, 2);
}

/* Asks for the keys AHEAD of `first`, and for the values of those at `first`, which are wanted when all are scored. */
INLINE void fetch_ahead(const Block *b, int first, int count) {
    for (int k = 0; k < LANES; k++) fetch(b, b->computed.v, b->slots[first + k]);
    if (first + AHEAD >= count) return;
    for (int k = 0; k < LANES; k++) fetch(b, b->computed.k, b->slots[first + AHEAD + k]);
}

/* ---- Side by side */

/* LANES by `width` words, transposed: out [width][LANES]. Fewer than LANES only of registers of 64 bytes. */
#if defined(__AVX512F__)
INLINE void transpose(const uint32_t *const rows[LANES], int at, int width, uint32_t *out) {
    const __mmask16 mask = (__mmask16)((1u << width) - 1);
    __m512i a[16], t[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + at);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* a[4 r + c]: of rows 4 r on, columns c, 4 + c, 8 + c and 12 + c. */
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        const __m512i below = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        const __m512i above = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(low, below, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(low, below, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(high, above, 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(high, above, 0xdd);
    }
    for (int i = 0; i < width; i++) _mm512_store_si512(out + i * LANES, t[i]);
}
#elif defined(__AVX2__)
INLINE void transpose(const uint32_t *const rows[LANES], int at, int width, uint32_t *out) {
    (void)width;
    for (int half = 0; half < 8; half += 4) { /* four columns, of rows i and 4 + i in a register */
        __m256 a[4];
        for (int i = 0; i < 4; i++)
            a[i] = _mm256_loadu2_m128((const float *)rows[4 + i] + at + half, (const float *)rows[i] + at + half);
        const __m256 low = _mm256_unpacklo_ps(a[0], a[1]), high = _mm256_unpackhi_ps(a[0], a[1]);
        const __m256 below = _mm256_unpacklo_ps(a[2], a[3]), above = _mm256_unpackhi_ps(a[2], a[3]);
        float *target = (float *)out + half * LANES;
        _mm256_storeu_ps(target, _mm256_shuffle_ps(low, below, 0x44));
        _mm256_storeu_ps(target + LANES, _mm256_shuffle_ps(low, below, 0xee));
        _mm256_storeu_ps(target + 2 * LANES, _mm256_shuffle_ps(high, above, 0x44));
        _mm256_storeu_ps(target + 3 * LANES, _mm256_shuffle_ps(high, above, 0xee));
    }
}
#else
INLINE void transpose(const uint32_t *const rows[LANES], int at, int width, uint32_t *out) {
    for (int i = 0; i < width; i++)
        for (int row = 0; row < LANES; row++) out[i * LANES + row] = rows[row][at + i];
}
#endif

/* `width` couples of bf16 as fp32 numbers, each couple's two one after the other. */
INLINE void split_couples(const uint32_t *couples, int width, float *out) {
    for (int i = 0; i < width; i++, out += 2 * LANES) {
        const vu both = *(const vu_any *)(couples + i * LANES);
        store(out, (vf)(both << 16));
        store(out + LANES, (vf)(both & 0xffff0000u));
    }
}

INLINE void lay_words(const Block *b, const uint32_t *const rows[LANES], int at, int width, uint32_t *out) {
    if (b->pairs || b->heads->wide) {
        transpose(rows, at, width, out + at * LANES);
        return;
    }
    uint32_t couples[LANES * LANES] __attribute__((aligned(64)));
    transpose(rows, at, width, couples);
    split_couples(couples, width, (float *)out + 2 * at * LANES);
}

/* LANES keys from `first` on into group `group`. */
static void lay_keys(const Block *b, int first, int group) {
    const uint32_t *rows[LANES];
    uint32_t *out = b->keys + (int64_t)group * b->num_steps * LANES;
    const int words = (int)(b->vector_bytes / 4);
    int at = 0;
    for (int k = 0; k < LANES; k++) rows[k] = vector_at(b, b->computed.k, b->slots[first + k]);
    for (; at + LANES <= words; at += LANES) lay_words(b, rows, at, LANES, out);
    if (LANES == 16 && at < words) lay_words(b, rows, at, 8, out); /* dimensions come 16 at a time */
}

/* ---- Products */

/* L lanes by G groups of keys. */
INLINE void score_lanes(int L, int G, int pairs, const Block *b, int lane, int group, float *scores) {
    const int steps = b->num_steps;
    const uint32_t *q = b->q + lane * steps, *keys = b->keys + (int64_t)group * steps * LANES;
    vf sums[MOST_LANES][KEY_GROUPS];
    for (int l = 0; l < L; l++)
        for (int g = 0; g < G; g++) sums[l][g] = splat(0.0f);
    for (int i = 0; i < steps; i++) {
        vf side[KEY_GROUPS];
        for (int g = 0; g < G; g++) side[g] = load((const float *)keys + (g * steps + i) * LANES);
        for (int l = 0; l < L; l++) {
#if HAS_BF16_DOT
            if (pairs) {
                const __m512bh number = (__m512bh)_mm512_set1_epi32((int)q[l * steps + i]);
                for (int g = 0; g < G; g++)
                    sums[l][g] = (vf)_mm512_dpbf16_ps((__m512)sums[l][g], (__m512bh)side[g], number);
                continue;
            }
#else
            (void)pairs;
#endif
            const vf number = splat(((const float *)q)[l * steps + i]);
            for (int g = 0; g < G; g++) sums[l][g] += side[g] * number;
        }
    }
    for (int l = 0; l < L; l++)
        for (int g = 0; g < G; g++) store(scores + (lane + l) * b->stride + g * LANES, sums[l][g]);
}

#define SCORER(L) \
    INLINE void score##L(int pairs, const Block *b, int lane, int num_groups, float *scores) { \
        int group = 0; \
        for (; group + BESIDE_SCORES(L) <= num_groups; group += BESIDE_SCORES(L)) \
            score_lanes(L, BESIDE_SCORES(L), pairs, b, lane, group, scores + group * LANES); \
        for (; group < num_groups; group++) score_lanes(L, 1, pairs, b, lane, group, scores + group * LANES); \
    } \
    ALONE void score_numbers##L(const Block *b, int lane, int num_groups, float *scores) { \
        score##L(0, b, lane, num_groups, scores); \
    } \
    ALONE void score_couples##L(const Block *b, int lane, int num_groups, float *scores) { \
        score##L(1, b, lane, num_groups, scores); \
    }
SCORER(1)
SCORER(2)
#if MOST_LANES == 6
SCORER(3)
SCORER(4)
SCORER(5)
SCORER(6)
#endif

typedef void Scorer(const Block *b, int lane, int num_groups, float *scores);
static Scorer *const scorers[2][MOST_LANES] = {EACH_COUNT(score_numbers), EACH_COUNT(score_couples)};

/* Those of the groups that were laid out, from key `first` on. */
static void score_groups(const Block *b, int first, int num_groups) {
    for (int lane = 0, lanes; lane < b->num_lanes; lane += lanes) {
        lanes = next_lanes(b->num_lanes - lane);
        scorers[b->pairs][lanes - 1](b, lane, num_groups, b->scores + first);
    }
}

static void score_on_amx(const Block *b, int first, int num_groups) {
    for (int lane = 0; lane < b->num_lanes; lane += LANES)
        amx_scores(b->q + lane * b->num_steps, b->keys, num_groups, b->heads->head_dim,
                   b->scores + lane * b->stride + first, b->stride);
}

void score_keys(const Block *b, int count, int on_amx) {
    const int fetches = !are_near(b);
    for (int i = 0; fetches && i < AHEAD && i < count; i++) fetch(b, b->computed.k, b->slots[i]);
    for (int first = 0; first < count; first += KEY_GROUPS * LANES) {
        const int left = (count - first + LANES - 1) / LANES, num_groups = left < KEY_GROUPS ? left : KEY_GROUPS;
        for (int group = 0; group < num_groups; group++) {
            if (fetches) fetch_ahead(b, first + group * LANES, count);
            lay_keys(b, first + group * LANES, group);
        }
        (on_amx ? score_on_amx : score_groups)(b, first, num_groups);
    }
}
