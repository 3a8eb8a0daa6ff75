/* Blocks and their chunks put together: the softmax of Milakov and Gimelshein, 2018, section 3. */
#include "attention.h"

#include "chunk.h"

static int blocks_of(const Heads *heads, const Layout *layout, int segment) {
    int group = heads->num_heads / heads->num_kv_heads;
    return (layout->num_rows[segment] * group + BLOCK_LANES - 1) / BLOCK_LANES;
}

int attention_blocks(const Heads *heads, const Layout *layout) {
    int count = 0;
    for (int s = 0; s < layout->num_segments; s++) count += blocks_of(heads, layout, s) * heads->num_kv_heads;
    return count;
}

int64_t attention_scratch_bytes(const Heads *heads, const Layout *layout) { return chunk_scratch_bytes(heads, layout); }

/* Block number `block`, without memory. */
static Block find_block(const Heads *heads, const Layout *layout, int block) {
    Block b = {.heads = heads, .layout = layout, .group = heads->num_heads / heads->num_kv_heads};
    while (block >= blocks_of(heads, layout, b.segment) * heads->num_kv_heads)
        block -= blocks_of(heads, layout, b.segment++) * heads->num_kv_heads;
    b.vector_bytes = heads->head_dim * (heads->wide ? 4 : 2);
    b.slot_bytes = b.vector_bytes * (heads->kept ? 1 : heads->num_kv_heads);
    int lanes = layout->num_rows[b.segment] * b.group;
    b.kv_head = block % heads->num_kv_heads;
    b.head_start = heads->kept ? 0 : b.kv_head * b.vector_bytes;
    b.lane0 = block / heads->num_kv_heads * BLOCK_LANES;
    b.num_lanes = lanes - b.lane0 < BLOCK_LANES ? lanes - b.lane0 : BLOCK_LANES;
    for (int l = 0; l < BLOCK_LANES; l++) b.rows[l] = (b.lane0 + (l < b.num_lanes ? l : b.num_lanes - 1)) / b.group;
    return b;
}

static Block make_block(const Heads *heads, const Layout *layout, Pools pools, void *scratch, int block) {
    Block b = find_block(heads, layout, block);
    b.pools = b.computed = pools;
    lay_out_scratch(&b, scratch);
    return b;
}

static void clear_part(const Heads *heads, float *part) {
    memset(part, 0, sizeof(float) * part_floats(heads));
    for (int l = 0; l < BLOCK_LANES; l += LANES) store(highest_of(part) + l, splat(LOWEST));
}

/* The last chunk that any row of the block sees. */
static int last_chunk(const Block *b) {
    int last = 0;
    for (int l = 0; l < b->num_lanes; l++) {
        int position = b->layout->positions[b->layout->first_rows[b->segment] + b->rows[l]];
        if (position > last) last = position;
    }
    return last / CHUNK;
}

/* Adding a part that a lane sees nothing of changes nothing for it, to the bit. */
static void add_part(const Block *b, float *total, float *part) {
    const int dims = b->heads->head_dim;
    float kept[BLOCK_LANES], taken[BLOCK_LANES];
    for (int l = 0; l < b->num_lanes; l += LANES) {
        vf before = load(highest_of(total) + l), highest = load(highest_of(part) + l);
        vf together = maximum(before, highest);
        vf keep = exponential((before - together) * b->heads->scale);
        vf take = exponential((highest - together) * b->heads->scale);
        store(kept + l, keep);
        store(taken + l, take);
        store(highest_of(total) + l, together);
        store(sum_of(total) + l, load(sum_of(total) + l) * keep + load(sum_of(part) + l) * take);
    }
    for (int l = 0; l < b->num_lanes; l++)
        for (int d = l * dims; d < (l + 1) * dims; d += LANES)
            store(values_of(total) + d, load(values_of(total) + d) * kept[l] + load(values_of(part) + d) * taken[l]);
}

static void write_result(const Block *b, float *total, Rows out) {
    const int dims = b->heads->head_dim;
    for (int l = 0; l < b->num_lanes; l++) {
        int64_t row = b->layout->first_rows[b->segment] + b->rows[l], start = row * out.width + lane_head(b, l) * dims;
        for (int d = 0; d < dims; d += LANES)
            store_as(out.wide, out.data, start + d, load(values_of(total) + l * dims + d) / sum_of(total)[l]);
    }
}

void attend(const Heads *heads, const Layout *layout, Rows qkv, Pools pools, Rows out, void *scratch, int block) {
    Block b = make_block(heads, layout, pools, scratch, block);
    load_queries(&b, qkv);
    clear_part(heads, b.total);
    const int last = last_chunk(&b);
    for (int chunk = 0; chunk <= last; chunk++)
        if (attend_chunk(&b, chunk, b.part)) add_part(&b, b.total, b.part);
    write_result(&b, b.total, out);
}

/* ---- In pieces */

int64_t part_bytes(const Heads *heads) { return 4 * part_floats(heads); }

Cut count_pieces(const Heads *heads, const Layout *layout) {
    Cut cut = {attention_blocks(heads, layout), 0, 0};
    for (int block = 0; block < cut.num_blocks; block++) {
        Block b = find_block(heads, layout, block);
        int chunks = last_chunk(&b) + 1;
        cut.num_pieces += chunks;
        if (chunks > cut.longest) cut.longest = chunks;
    }
    return cut;
}

void list_pieces(const Heads *heads, const Layout *layout, Piece *pieces, int32_t *firsts) {
    const Piece *begin = pieces;
    const int num_blocks = attention_blocks(heads, layout);
    /* Blocks come with one for each kv head in a row: same rows, same chunks. Chunk by chunk, so that a thread finds
     * what it fetched for the first head (scores.c) when it does the others. */
    for (int first = 0; first < num_blocks; first += heads->num_kv_heads) {
        Block b = find_block(heads, layout, first);
        const int last = last_chunk(&b);
        for (int h = 0; h < heads->num_kv_heads; h++) firsts[first + h] = (int32_t)(pieces - begin) + h;
        for (int chunk = 0; chunk <= last; chunk++)
            for (int h = 0; h < heads->num_kv_heads; h++) *pieces++ = (Piece){first + h, chunk};
    }
}

void attend_piece(const Heads *heads, const Layout *layout, Rows qkv, Pools pools, void *scratch, Piece piece,
                  float *part) {
    Block b = make_block(heads, layout, pools, scratch, piece.block);
    load_queries(&b, qkv);
    if (!attend_chunk(&b, piece.chunk, part)) clear_part(heads, part);
}

void join_pieces(const Heads *heads, const Layout *layout, int first, float *parts, Rows out, void *scratch, int block) {
    Block b = make_block(heads, layout, (Pools){NULL, NULL}, scratch, block);
    clear_part(heads, b.total);
    const int last = last_chunk(&b);
    for (int chunk = 0; chunk <= last; chunk++) { /* the kv heads' pieces alternate */
        const int64_t piece = first + (int64_t)chunk * heads->num_kv_heads;
        add_part(&b, b.total, parts + piece * part_floats(heads));
    }
    write_result(&b, b.total, out);
}
