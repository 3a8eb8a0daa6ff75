#include "chunk.h"

#include "amx.h"

/* Keys scored together, so that their sums hide each other's latency; lanes mixed together. */
#if defined(__AVX512F__)
#define KEYS 8
#define MAX_LANES 6
#else
#define KEYS 4
#define MAX_LANES 2
#endif
/* Keys are listed in whole lots of so many. */
#define LOT (HAS_AMX ? AMX_KEYS : KEYS)
/* Keys fetched ahead of use: slots are scattered. Into the second cache (locality 2), which takes three times as many
 * outstanding reads as the first: 22 against 7 GB/s of random slots on one Zen 4 core. */
#define AHEAD 64
/* What surely stays in a core's second cache. */
#define CACHE_BYTES (512 * 1024)

#define DOT_PAIRS(heads) (HAS_BF16_DOT && !(heads)->wide)

/* ---- Memory */

/* A chunk's keys: at most CHUNK of the prefix, and rows of the segment, several of which may share a position. */
static int num_run(const Layout *layout, int segment) { return layout->num_run ? layout->num_run[segment] : 0; }

static int64_t most_keys(const Layout *layout) {
    int rows = 0;
    for (int s = 0; s < layout->num_segments; s++) {
        const int all = layout->num_rows[s] + num_run(layout, s);
        if (all > rows) rows = all;
    }
    return CHUNK + rows + LOT;
}

int64_t chunk_scratch_bytes(const Heads *heads, const Layout *layout) {
    int64_t keys = most_keys(layout), dims = (int64_t)heads->head_dim * LANES;
    return 4 * (dims + 2 * part_floats(heads) + keys * LANES + keys) + 2 * keys + 64;
}

void lay_out_scratch(Block *b, void *scratch) {
    int64_t keys = most_keys(b->layout), dims = (int64_t)b->heads->head_dim * LANES;
    b->q = (float *)(((uintptr_t)scratch + 63) / 64 * 64);
    b->part = b->q + dims;
    b->total = b->part + part_floats(b->heads);
    b->scores = b->total + part_floats(b->heads);
    b->slots = (int32_t *)(b->scores + keys * LANES);
    b->sees = (uint16_t *)(b->slots + keys);
}

/* Unused lanes are zero. */
void load_queries(Block *b, Rows qkv) {
    const int dims = b->heads->head_dim;
    memset(b->q, 0, sizeof(float) * dims * LANES);
    for (int l = 0; l < b->num_lanes; l++) {
        int row = b->layout->first_rows[b->segment] + b->rows[l];
        const float *q = (const float *)qkv.data + (int64_t)row * qkv.width + lane_head(b, l) * dims;
        if (!DOT_PAIRS(b->heads)) {
            for (int d = 0; d < dims; d++) b->q[d * LANES + l] = q[d];
            continue;
        }
        bf16 narrow[LANES];
        for (int d = 0; d < dims; d += LANES) {
            store_bf16(narrow, load(q + d));
            for (int i = 0; i < LANES; i++) ((bf16 *)b->q)[((d + i) / 2 * LANES + l) * 2 + i % 2] = narrow[i];
        }
    }
}

/* ---- Which keys */

/* Lanes whose row sees row `key` of the segment; those run before have numbers below 0. */
static unsigned lanes_seeing(const Block *b, int key) {
    const Layout *layout = b->layout;
    int64_t start = layout->mask_starts[b->segment];
    const int run = num_run(layout, b->segment), count = run + layout->num_rows[b->segment];
    if (start < 0 && key <= b->rows[0]) return 0xffff;
    unsigned bits = 0;
    for (int l = 0; l < b->num_lanes; l++) {
        int sees = start < 0 ? b->rows[l] >= key : layout->masks[start + (int64_t)b->rows[l] * count + run + key];
        bits |= (unsigned)(sees != 0) << l;
    }
    return bits;
}

static int position_of(const Block *b, int row) {
    return b->layout->positions[b->layout->first_rows[b->segment] + row];
}

/* Lanes whose row has a key at `position` in its window. */
static unsigned lanes_near(const Block *b, int position) {
    if (!b->heads->window) return 0xffff;
    unsigned bits = 0;
    for (int l = 0; l < LANES; l++)
        bits |= (unsigned)(position_of(b, b->rows[l]) - position < b->heads->window) << l;
    return bits;
}

/* The first position that any lane's row still sees. */
static int window_start(const Block *b) {
    int earliest = position_of(b, b->rows[0]);
    for (int l = 1; l < b->num_lanes; l++)
        if (position_of(b, b->rows[l]) < earliest) earliest = position_of(b, b->rows[l]);
    return earliest - b->heads->window + 1;
}

/* Slots of the chunk's keys, prefix first, then the segment's own rows at its positions; returns how many. The list is
 * filled up to whole lots with keys that nobody sees. */
static int list_keys(Block *b, int chunk) {
    const Layout *layout = b->layout;
    const int s = b->segment, prefix_len = layout->prefix_lens[s], begin = chunk * CHUNK;
    const int32_t *table = layout->slot_table + (int64_t)layout->table_rows[s] * layout->table_width;
    int end = begin + CHUNK < prefix_len ? begin + CHUNK : prefix_len, count = 0, position = begin;
    if (b->heads->window && window_start(b) > begin) position = window_start(b);
    for (; position < end; position++, count++) {
        b->slots[count] = table[position];
        b->sees[count] = (uint16_t)lanes_near(b, position);
    }
    if (begin + CHUNK > prefix_len) {
        const int first = layout->first_rows[s];
        int rows = layout->num_rows[s];
        if (layout->mask_starts[s] < 0 && b->rows[LANES - 1] + 1 < rows) rows = b->rows[LANES - 1] + 1;
        const int run = num_run(layout, s);
        for (int row = -run; row < rows; row++) {
            const int at = row < 0 ? layout->first_run[s] + run + row : first + row;
            if (layout->positions[at] / CHUNK != chunk) continue;
            unsigned bits = lanes_seeing(b, row) & lanes_near(b, layout->positions[at]);
            if (!bits) continue;
            b->slots[count] = layout->slots[at];
            b->sees[count++] = (uint16_t)bits;
        }
    }
    for (int i = count; i % LOT; i++) {
        b->slots[i] = b->slots[count - 1];
        b->sees[i] = 0;
    }
    return count;
}

/* ---- Scores, weights, values */

INLINE const void *vector_at(const Block *b, const void *pool, int64_t slot) {
    return (const char *)pool + slot * b->slot_bytes + b->kv_head * b->vector_bytes;
}

/* q . k for all lanes and KEYS keys into scores [KEYS][LANES]; each lane's sum runs over the dimensions in order. */
#if HAS_BF16_DOT
ALONE void score_pairs(const float *q, const void *const keys[KEYS], int num_pairs, float *scores) {
    const uint32_t *k0 = keys[0], *k1 = keys[1], *k2 = keys[2], *k3 = keys[3];
    const uint32_t *k4 = keys[4], *k5 = keys[5], *k6 = keys[6], *k7 = keys[7];
    __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    for (int64_t i = 0; i < num_pairs; i++) {
        __m512bh lanes = (__m512bh)_mm512_loadu_si512(q + i * LANES);
#define ADD_KEY(k, s) s = _mm512_dpbf16_ps(s, lanes, (__m512bh)_mm512_set1_epi32((int)k[i]))
        ADD_KEY(k0, s0), ADD_KEY(k1, s1), ADD_KEY(k2, s2), ADD_KEY(k3, s3);
        ADD_KEY(k4, s4), ADD_KEY(k5, s5), ADD_KEY(k6, s6), ADD_KEY(k7, s7);
#undef ADD_KEY
    }
    __m512 *out = (__m512 *)scores;
    out[0] = s0, out[1] = s1, out[2] = s2, out[3] = s3, out[4] = s4, out[5] = s5, out[6] = s6, out[7] = s7;
}
#endif

ALONE void score_floats(const float *q, const void *const keys[KEYS], int wide, int dims, float *scores) {
    vf sums[KEYS];
    float expanded[KEYS][LANES];
    for (int k = 0; k < KEYS; k++) sums[k] = splat(0.0f);
    for (int d = 0; d < dims; d += LANES) {
        for (int k = 0; k < KEYS; k++) store(expanded[k], load_as(wide, keys[k], d));
        for (int i = 0; i < LANES; i++) {
            vf lanes = load(q + (d + i) * LANES);
            for (int k = 0; k < KEYS; k++) sums[k] += lanes * expanded[k][i];
        }
    }
    for (int k = 0; k < KEYS; k++) store(scores + k * LANES, sums[k]);
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
    for (int k = 0; k < KEYS; k++) fetch(b, b->v_pool, b->slots[first + k]);
    if (first + AHEAD + KEYS > count) return;
    for (int k = 0; k < KEYS; k++) fetch(b, b->k_pool, b->slots[first + AHEAD + k]);
}

static void score_on_amx(const Block *b, int count) {
    const void *keys[AMX_KEYS];
    amx_begin_scores(b->q, b->heads->head_dim);
    for (int first = 0; first < count; first += AMX_KEYS) {
        for (int k = 0; k < AMX_KEYS; k += KEYS) fetch_ahead(b, first + k, count);
        for (int k = 0; k < AMX_KEYS; k++) keys[k] = vector_at(b, b->k_pool, b->slots[first + k]);
        amx_scores(keys, b->heads->head_dim, b->scores + (int64_t)first * LANES);
    }
    amx_end();
}

static void score_keys(const Block *b, int count) {
    const Heads *h = b->heads;
    if (amx_takes_heads(h->head_dim, h->wide)) {
        score_on_amx(b, count);
        return;
    }
    for (int first = 0; first < count; first += KEYS) {
        const void *keys[KEYS];
        float *scores = b->scores + (int64_t)first * LANES;
        fetch_ahead(b, first, count);
        for (int k = 0; k < KEYS; k++) keys[k] = vector_at(b, b->k_pool, b->slots[first + k]);
#if HAS_BF16_DOT
        if (!h->wide) {
            score_pairs(b->q, keys, h->head_dim / 2, scores);
            continue;
        }
#endif
        score_floats(b->q, keys, h->wide, h->head_dim, scores);
    }
}

/* Scores of all keys of the chunk, not yet scaled; returns each lane's highest. */
static vf score_chunk(Block *b, int count) {
    const vi lane_bits = 1 << (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    score_keys(b, count);
    vf highest = splat(LOWEST);
    for (int i = 0; i < count; i++) {
        vf score = load(b->scores + (int64_t)i * LANES);
        if (b->sees[i] != 0xffff) {
            score = choose((lane_bits & (int)b->sees[i]) != 0, score, splat(-INFINITY));
            store(b->scores + (int64_t)i * LANES, score);
        }
        highest = maximum(score, highest);
    }
    return highest;
}

/* Scores to weights e^(scale (score - highest)), in place; returns each lane's sum, taken in the keys' order. */
ALONE vf weigh_chunk(Block *b, int count, vf highest) {
    vf total = splat(0.0f);
    for (int i = 0; i < count; i++) {
        vf weight = exponential((load(b->scores + (int64_t)i * LANES) - highest) * b->heads->scale);
        store(b->scores + (int64_t)i * LANES, weight);
        total += weight;
    }
    return total;
}

/* Weighted sums of the values into [LANES][head_dim], L lanes by D * 16 dimensions at a time, in the keys' order. */
INLINE void mix_values(int L, int D, const Block *b, int count, int lane, int dim, float *values) {
    const Heads *h = b->heads;
    const int64_t stride = (int64_t)h->num_kv_heads * h->head_dim;
    const int64_t start = (int64_t)b->kv_head * h->head_dim + dim;
    vf sums[MAX_LANES][4];
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) sums[l][d] = splat(0.0f);
    for (int i = 0; i < count; i++) {
        const float *weights = b->scores + (int64_t)i * LANES + lane;
        vf value[4];
        for (int d = 0; d < D; d++)
            value[d] = load_as(h->wide, b->v_pool, b->slots[i] * stride + start + d * LANES);
        for (int l = 0; l < L; l++)
            for (int d = 0; d < D; d++) sums[l][d] += value[d] * weights[l];
    }
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) store(values + (lane + l) * h->head_dim + dim + d * LANES, sums[l][d]);
}

ALONE void mix_lanes(const Block *b, int count, int lane, int lanes, int wide_step, int dim, float *values) {
#define CASE(L) \
    case L: \
        if (wide_step) mix_values(L, 4, b, count, lane, dim, values); \
        else mix_values(L, 1, b, count, lane, dim, values); \
        break;
    switch (lanes) {
        CASE(1)
        CASE(2)
#if MAX_LANES == 6
        CASE(3)
        CASE(4)
        CASE(5)
        CASE(6)
#endif
    }
}

static void mix_chunk(const Block *b, int count, float *values) {
    for (int lane = 0; lane < b->num_lanes; lane += MAX_LANES) {
        int lanes = b->num_lanes - lane < MAX_LANES ? b->num_lanes - lane : MAX_LANES;
        for (int dim = 0; dim < b->heads->head_dim;) {
            int wide_step = b->heads->head_dim - dim >= 4 * LANES;
            mix_lanes(b, count, lane, lanes, wide_step, dim, values);
            dim += wide_step ? 4 * LANES : LANES;
        }
    }
}

int attend_chunk(Block *b, int chunk, float *part) {
    int count = list_keys(b, chunk);
    if (!count) return 0;
    for (int i = 0; i < AHEAD && i < count; i++) fetch(b, b->k_pool, b->slots[i]);
    vf highest = score_chunk(b, count);
    store(highest_of(part), highest);
    store(sum_of(part), weigh_chunk(b, count, highest));
    mix_chunk(b, count, values_of(part));
    return 1;
}
