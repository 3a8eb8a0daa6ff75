#include "attention.h"

/* Keys scored together, so that their sums hide each other's latency; keys fetched ahead of use: slots are scattered, and
 * a dozen misses at a time hide memory's latency. */
#if defined(__AVX512F__)
#define KEYS 8
#define MAX_LANES 6
#else
#define KEYS 4
#define MAX_LANES 2
#endif
#define AHEAD 24
/* Below every score; not infinity, whose difference with itself is no number. */
#define LOWEST -1e30f

#define DOT_PAIRS(heads) (HAS_BF16_DOT && !(heads)->wide)

/* A block in the making: up to LANES pairs of a row and a query head, all of one segment and kv head. Lane l is row (lane0 + l) / group of the segment, query head (lane0 + l) % group. */
typedef struct {
    const Heads *heads;
    const void *k_pool, *v_pool;
    int segment, kv_head, lane0, num_lanes, group;
    int64_t vector_bytes, slot_bytes; /* of one head's key, and of all heads' */
    int rows[LANES]; /* each lane's row within the segment */
    float *q;        /* [head_dim][LANES], or bf16 pairs [head_dim / 2][LANES] */
    float *scores;   /* [keys of a chunk][LANES] */
    int32_t *slots;  /* [keys of a chunk] */
    uint16_t *sees;  /* [keys of a chunk]: bit l: lane l sees the key */
    float *values;   /* [LANES][head_dim]: where the chunk's weighted values go */
    float *part;     /* room for a chunk's part of the result, and for the chunks' before it */
    float *total;
} Block;

/* ---- Layout of the work */

static int blocks_of(const Heads *heads, const Layout *layout, int segment) {
    int group = heads->num_heads / heads->num_kv_heads;
    return (layout->num_rows[segment] * group + LANES - 1) / LANES;
}

int attention_blocks(const Heads *heads, const Layout *layout) {
    int count = 0;
    for (int s = 0; s < layout->num_segments; s++) count += blocks_of(heads, layout, s) * heads->num_kv_heads;
    return count;
}

/* A chunk's keys: at most CHUNK, and a tree's rows, several of which share a position. */
static int64_t most_keys(const Layout *layout) {
    int rows = 0;
    for (int s = 0; s < layout->num_segments; s++)
        if (layout->mask_starts[s] >= 0 && layout->num_rows[s] > rows) rows = layout->num_rows[s];
    return CHUNK + rows + KEYS;
}

int64_t attention_scratch_bytes(const Heads *heads, const Layout *layout) {
    int64_t keys = most_keys(layout), dims = (int64_t)heads->head_dim * LANES;
    return 4 * (dims + 2 * (dims + 2 * LANES) + keys * LANES + keys) + 2 * keys + 64;
}

static Block make_block(const Heads *heads, const Layout *layout, const void *k_pool, const void *v_pool, void *scratch,
                        int block) {
    Block b = {.heads = heads, .k_pool = k_pool, .v_pool = v_pool, .group = heads->num_heads / heads->num_kv_heads};
    while (block >= blocks_of(heads, layout, b.segment) * heads->num_kv_heads)
        block -= blocks_of(heads, layout, b.segment++) * heads->num_kv_heads;
    b.vector_bytes = heads->head_dim * (heads->wide ? 4 : 2);
    b.slot_bytes = heads->num_kv_heads * b.vector_bytes;
    int lanes = layout->num_rows[b.segment] * b.group;
    b.kv_head = block % heads->num_kv_heads;
    b.lane0 = block / heads->num_kv_heads * LANES;
    b.num_lanes = lanes - b.lane0 < LANES ? lanes - b.lane0 : LANES;
    for (int l = 0; l < LANES; l++) b.rows[l] = (b.lane0 + (l < b.num_lanes ? l : b.num_lanes - 1)) / b.group;
    if (!scratch) return b;
    int64_t keys = most_keys(layout), dims = (int64_t)heads->head_dim * LANES, part = dims + 2 * LANES;
    b.q = (float *)(((uintptr_t)scratch + 63) / 64 * 64);
    b.part = b.q + dims;
    b.total = b.part + part;
    b.scores = b.total + part;
    b.slots = (int32_t *)(b.scores + keys * LANES);
    b.sees = (uint16_t *)(b.slots + keys);
    return b;
}

static int lane_head(const Block *b, int lane) { return b->kv_head * b->group + (b->lane0 + lane) % b->group; }

/* Queries with their lanes side by side; unused lanes are zero. */
static void load_queries(Block *b, const Layout *layout, Rows qkv) {
    const int dims = b->heads->head_dim;
    memset(b->q, 0, sizeof(float) * dims * LANES);
    for (int l = 0; l < b->num_lanes; l++) {
        int row = layout->first_rows[b->segment] + b->rows[l];
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

/* Lanes whose row sees row `key` of the segment. */
static unsigned lanes_seeing(const Block *b, const Layout *layout, int key) {
    int64_t start = layout->mask_starts[b->segment];
    int count = layout->num_rows[b->segment];
    if (start < 0 && key <= b->rows[0]) return 0xffff;
    unsigned bits = 0;
    for (int l = 0; l < b->num_lanes; l++) {
        int sees = start < 0 ? b->rows[l] >= key : layout->masks[start + (int64_t)b->rows[l] * count + key];
        bits |= (unsigned)(sees != 0) << l;
    }
    return bits;
}

/* Slots of the chunk's keys, prefix first, then the segment's own rows at its positions; returns how many. The list is
 * filled up to a multiple of KEYS with keys that nobody sees. */
static int list_keys(Block *b, const Layout *layout, int chunk) {
    const int s = b->segment, prefix_len = layout->prefix_lens[s], begin = chunk * CHUNK;
    const int32_t *table = layout->slot_table + (int64_t)layout->table_rows[s] * layout->table_width;
    int end = begin + CHUNK < prefix_len ? begin + CHUNK : prefix_len, count = 0;
    for (int position = begin; position < end; position++, count++) {
        b->slots[count] = table[position];
        b->sees[count] = 0xffff;
    }
    if (begin + CHUNK > prefix_len) {
        const int first = layout->first_rows[s];
        int rows = layout->num_rows[s];
        if (layout->mask_starts[s] < 0 && b->rows[LANES - 1] + 1 < rows) rows = b->rows[LANES - 1] + 1;
        for (int row = 0; row < rows; row++) {
            if (layout->positions[first + row] / CHUNK != chunk) continue;
            unsigned bits = lanes_seeing(b, layout, row);
            if (!bits) continue;
            b->slots[count] = layout->slots[first + row];
            b->sees[count++] = (uint16_t)bits;
        }
    }
    for (int i = count; i % KEYS; i++) {
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

INLINE void fetch(const char *vector, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(vector + at);
}

/* Asks for the keys AHEAD of `first`, and for the values of those at `first`, which are wanted when all are scored. */
INLINE void fetch_ahead(const Block *b, int first, int count) {
    for (int k = 0; k < KEYS; k++) fetch(vector_at(b, b->v_pool, b->slots[first + k]), b->vector_bytes);
    if (first + AHEAD + KEYS > count) return;
    for (int k = 0; k < KEYS; k++) fetch(vector_at(b, b->k_pool, b->slots[first + AHEAD + k]), b->vector_bytes);
}

/* Scores of all keys of the chunk, not yet scaled; returns each lane's highest. */
static vf score_chunk(Block *b, int count) {
    const Heads *h = b->heads;
    const vi lane_bits = 1 << (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
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

/* Weighted sums of the values, L lanes by D * 16 dimensions at a time, each in the keys' order. */
INLINE void mix_values(int L, int D, Block *b, int count, int lane, int dim) {
    const Heads *h = b->heads;
    const int64_t stride = (int64_t)h->num_kv_heads * h->head_dim;
    const int64_t start = (int64_t)b->kv_head * h->head_dim + dim;
    vf sums[MAX_LANES][4];
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) sums[l][d] = splat(0.0f);
    for (int i = 0; i < count; i++) {
        const float *weights = b->scores + (int64_t)i * LANES + lane;
        vf values[4];
        for (int d = 0; d < D; d++)
            values[d] = load_as(h->wide, b->v_pool, b->slots[i] * stride + start + d * LANES);
        for (int l = 0; l < L; l++)
            for (int d = 0; d < D; d++) sums[l][d] += values[d] * weights[l];
    }
    for (int l = 0; l < L; l++)
        for (int d = 0; d < D; d++) store(b->values + (lane + l) * h->head_dim + dim + d * LANES, sums[l][d]);
}

ALONE void mix_lanes(Block *b, int count, int lane, int lanes, int wide_step, int dim) {
#define CASE(L) \
    case L: \
        if (wide_step) mix_values(L, 4, b, count, lane, dim); \
        else mix_values(L, 1, b, count, lane, dim); \
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

static void mix_chunk(Block *b, int count) {
    for (int lane = 0; lane < b->num_lanes; lane += MAX_LANES) {
        int lanes = b->num_lanes - lane < MAX_LANES ? b->num_lanes - lane : MAX_LANES;
        for (int dim = 0; dim < b->heads->head_dim;) {
            int wide_step = b->heads->head_dim - dim >= 4 * LANES;
            mix_lanes(b, count, lane, lanes, wide_step, dim);
            dim += wide_step ? 4 * LANES : LANES;
        }
    }
}

/* ---- Chunks together: the softmax of Milakov and Gimelshein, 2018, section 3 */

/* A chunk's part of the result, or several chunks' together: [LANES] highest scores, [LANES] sums of weights, and
 * [LANES][head_dim] weighted values. */
static float *highest_of(float *part) { return part; }
static float *sum_of(float *part) { return part + LANES; }
static float *values_of(float *part) { return part + 2 * LANES; }
static int64_t part_floats(const Heads *heads) { return (int64_t)(heads->head_dim + 2) * LANES; }

static void clear_part(const Heads *heads, float *part) {
    memset(part, 0, sizeof(float) * part_floats(heads));
    store(highest_of(part), splat(LOWEST));
}

static int last_chunk(const Block *b, const Layout *layout) {
    int last = 0;
    for (int l = 0; l < b->num_lanes; l++) {
        int position = layout->positions[layout->first_rows[b->segment] + b->rows[l]];
        if (position > last) last = position;
    }
    return last / CHUNK;
}

static void attend_chunk(Block *b, const Layout *layout, int chunk, float *part) {
    int count = list_keys(b, layout, chunk);
    for (int i = 0; i < AHEAD && i < count; i++) fetch(vector_at(b, b->k_pool, b->slots[i]), b->vector_bytes);
    if (!count) {
        clear_part(b->heads, part);
        return;
    }
    vf highest = score_chunk(b, count);
    store(highest_of(part), highest);
    store(sum_of(part), weigh_chunk(b, count, highest));
    b->values = values_of(part);
    mix_chunk(b, count);
}

/* Adding a part that nobody sees anything of changes nothing, to the bit. */
static void add_part(const Block *b, float *total, float *part) {
    const int dims = b->heads->head_dim;
    vf before = load(highest_of(total)), highest = load(highest_of(part)), together = maximum(before, highest);
    vf keep = exponential((before - together) * b->heads->scale);
    vf take = exponential((highest - together) * b->heads->scale);
    float kept[LANES], taken[LANES];
    store(kept, keep);
    store(taken, take);
    store(highest_of(total), together);
    store(sum_of(total), load(sum_of(total)) * keep + load(sum_of(part)) * take);
    for (int l = 0; l < b->num_lanes; l++)
        for (int d = l * dims; d < (l + 1) * dims; d += LANES)
            store(values_of(total) + d, load(values_of(total) + d) * kept[l] + load(values_of(part) + d) * taken[l]);
}

static void write_result(const Block *b, const Layout *layout, float *total, Rows out) {
    const int dims = b->heads->head_dim;
    for (int l = 0; l < b->num_lanes; l++) {
        int64_t row = layout->first_rows[b->segment] + b->rows[l], start = row * out.width + lane_head(b, l) * dims;
        for (int d = 0; d < dims; d += LANES)
            store_as(out.wide, out.data, start + d, load(values_of(total) + l * dims + d) / sum_of(total)[l]);
    }
}

void attend(const Heads *heads, const Layout *layout, Rows qkv, const void *k_pool, const void *v_pool, Rows out,
            void *scratch, int block) {
    Block b = make_block(heads, layout, k_pool, v_pool, scratch, block);
    load_queries(&b, layout, qkv);
    clear_part(heads, b.total);
    for (int chunk = 0; chunk <= last_chunk(&b, layout); chunk++) {
        attend_chunk(&b, layout, chunk, b.part);
        add_part(&b, b.total, b.part);
    }
    write_result(&b, layout, b.total, out);
}

int64_t part_bytes(const Heads *heads) { return 4 * part_floats(heads); }

int list_pieces(const Heads *heads, const Layout *layout, Piece *pieces) {
    int count = 0;
    for (int block = 0; block < attention_blocks(heads, layout); block++) {
        Block b = make_block(heads, layout, NULL, NULL, NULL, block);
        int last = last_chunk(&b, layout);
        for (int chunk = 0; chunk <= last; chunk++, count++)
            if (pieces) pieces[count] = (Piece){block, chunk};
    }
    return count;
}

void attend_piece(const Heads *heads, const Layout *layout, Rows qkv, const void *k_pool, const void *v_pool,
                  void *scratch, Piece piece, float *part) {
    Block b = make_block(heads, layout, k_pool, v_pool, scratch, piece.block);
    load_queries(&b, layout, qkv);
    attend_chunk(&b, layout, piece.chunk, part);
}

void join_pieces(const Heads *heads, const Layout *layout, const Piece *pieces, int num_pieces, float *parts, Rows out,
                 void *scratch, int block) {
    Block b = make_block(heads, layout, NULL, NULL, scratch, block);
    clear_part(heads, b.total);
    for (int i = 0; i < num_pieces; i++)
        if (pieces[i].block == block) add_part(&b, b.total, parts + i * part_floats(heads));
    write_result(&b, layout, b.total, out);
}

/* ---- Rows: norms and rotary embedding */

void norm_row(const float *x, const float *weight, float eps, int width, Rows out, int row) {
    vf squares = splat(0.0f);
    for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(sum(squares) / width + eps);
    for (int i = 0; i < width; i += LANES)
        store_as(out.wide, out.data, (int64_t)row * out.width + i, load(x + i) * scale * load(weight + i));
}

static void rotate_head(float *x, const float *table, int dims) {
    const float *sines = table + dims / 2;
    float *high = x + dims / 2;
    for (int i = 0; i < dims / 2; i++) {
        float low = x[i];
        x[i] = low * table[i] - high[i] * sines[i];
        high[i] = high[i] * table[i] + low * sines[i];
    }
}

void rotate_row(const Heads *heads, const Layout *layout, float *qkv, void *k_pool, void *v_pool, int row) {
    const int dims = heads->head_dim, rotated = heads->num_heads + heads->num_kv_heads;
    const float *table = heads->rope + (int64_t)layout->positions[row] * dims;
    for (int h = 0; h < rotated; h++) {
        float *x = qkv + h * dims;
        const float *weight = h < heads->num_heads ? heads->q_norm : heads->k_norm;
        if (weight) norm_row(x, weight, heads->eps, dims, (Rows){x, dims, 1}, 0);
        rotate_head(x, table, dims);
    }
    const int width = heads->num_kv_heads * dims;
    const float *k = qkv + heads->num_heads * dims, *v = k + width;
    int64_t start = (int64_t)layout->slots[row] * width;
    for (int i = 0; i < width; i += LANES) {
        store_as(heads->wide, k_pool, start + i, load(k + i));
        store_as(heads->wide, v_pool, start + i, load(v + i));
    }
}
