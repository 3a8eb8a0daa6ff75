#include "chunk.h"

#include "amx.h"
#include "keys.h"
#include "paths.h"

/* ---- Memory */

int64_t chunk_scratch_bytes(const Heads *heads, const Layout *layout) {
    const int64_t keys = most_keys(layout), dims = heads->head_dim;
    const int64_t own = BLOCK_LANES * dims + 2 * part_floats(heads) + KEY_GROUPS * LANES * dims;
    const int64_t wide = heads->kept ? 2 * keys * dims * (heads->wide ? 4 : 2) + 64 : 0;
    return 4 * (own + (BLOCK_LANES + 2) * keys) + keys / 2 + 64 + wide;
}

/* The next place where a vector may lie. */
static void *aligned(void *at) { return (void *)(((uintptr_t)at + 63) / 64 * 64); }

void lay_out_scratch(Block *b, void *scratch) {
    const int64_t keys = most_keys(b->layout), dims = b->heads->head_dim;
    b->pairs = HAS_BF16_DOT && !b->heads->wide;
    b->num_steps = b->pairs ? dims / 2 : dims;
    b->stride = keys;
    b->q = aligned(scratch);
    b->part = (float *)(b->q + BLOCK_LANES * dims);
    b->total = b->part + part_floats(b->heads);
    b->keys = (uint32_t *)(b->total + part_floats(b->heads));
    b->scores = (float *)(b->keys + KEY_GROUPS * LANES * dims);
    b->slots = (int32_t *)(b->scores + BLOCK_LANES * keys);
    b->sees = (uint32_t *)(b->slots + keys);
    b->places = (uint8_t *)(b->sees + keys);
    if (!b->heads->kept) return;
    b->computed.k = aligned(b->places + keys / 2);
    b->computed.v = (char *)b->computed.k + keys * b->vector_bytes;
}

/* Unused lanes are zero, up to a multiple of LANES. */
void load_queries(Block *b, Rows qkv) {
    const int dims = b->heads->head_dim, unused = -b->num_lanes & (LANES - 1);
    memset(b->q + b->num_lanes * b->num_steps, 0, sizeof(uint32_t) * unused * b->num_steps);
    for (int l = 0; l < b->num_lanes; l++) {
        int row = b->layout->first_rows[b->segment] + b->rows[l];
        const float *q = (const float *)qkv.data + (int64_t)row * qkv.width + lane_head(b, l) * dims;
        for (int d = 0; d < dims; d += LANES) store_as(!b->pairs, b->q + l * b->num_steps, d, load(q + d));
    }
}

/* ---- Scores to weights */

/* Scores of LANES keys, those that the lane does not see at minus infinity. */
INLINE vf seen_scores(const Block *b, const float *scores, int lane, int key) {
    const vf own = load(scores + key);
    if (key + LANES <= b->num_open) return own;
    const vu sees = *(const vu_any *)(b->sees + key);
    return choose((vi)(sees >> lane & 1) != 0, own, splat(-INFINITY));
}

static float find_highest(const Block *b, const float *scores, int lane, int count) {
    vf best = splat(LOWEST);
    float parts[LANES], highest = LOWEST;
    for (int key = 0; key < count; key += LANES) best = maximum(seen_scores(b, scores, lane, key), best);
    store(parts, best);
    for (int i = 0; i < LANES; i++) highest = parts[i] > highest ? parts[i] : highest;
    return highest;
}

/* Sums of weights are whole numbers of 2^-23, in which order plays no part: a lane sees at most CHUNK keys, none of
 * which weighs more than 1. Of what one weighs no more is lost than an fp32 sum would lose. */
#define UNITS 8388608.0f
#define LOG2_E 1.44269504f

/* Puts weights 2^x where scores were, as they are multiplied; returns them as they are there. */
INLINE vf put_weights(const Block *b, float *scores, int key, vf x) {
#if HAS_BF16_DOT
    if (b->pairs) {
        store_bf16((bf16 *)scores + key, narrow_power(x));
        return load_bf16((bf16 *)scores + key);
    }
#else
    (void)b;
#endif
    const vf weights = power(x);
    store(scores + key, weights);
    return weights;
}

/* Scores to weights e^(scale (score - highest)), in place; returns their sum. */
ALONE float weigh(const Block *b, float *scores, int lane, int count, float highest) {
    const float scale = b->heads->scale * LOG2_E;
    vi total = {0};
    uint32_t parts[LANES], sum = 0;
    for (int key = 0; key < count; key += LANES) {
        const vf weights = put_weights(b, scores, key, (seen_scores(b, scores, lane, key) - highest) * scale);
        total += __builtin_convertvector(weights * UNITS + 0.5f, vi);
    }
    memcpy(parts, &total, sizeof parts);
    for (int i = 0; i < LANES; i++) sum += parts[i];
    return (float)sum / UNITS;
}

int attend_chunk(Block *b, int chunk, float *part) {
    const int count = list_keys(b, chunk);
    if (!count) return 0;
    if (b->heads->kept) widen_keys(b, count);
    const int on_amx = amx_takes_heads(b->heads->head_dim, b->heads->wide);
    if (on_amx) amx_begin_attention();
    score_keys(b, count, on_amx);
    for (int l = 0; l < b->num_lanes; l += LANES) {
        store(highest_of(part) + l, splat(LOWEST));
        store(sum_of(part) + l, splat(0.0f));
    }
    for (int l = 0; l < b->num_lanes; l++) {
        float *scores = b->scores + l * b->stride;
        const float highest = find_highest(b, scores, l, count);
        highest_of(part)[l] = highest;
        sum_of(part)[l] = weigh(b, scores, l, count, highest);
    }
    if (on_amx) {
        mix_on_amx(b, count, values_of(part));
    } else {
        mix_values(b, count, values_of(part));
    }
    return 1;
}
