/* Tree attention over a paged pool, without gathering: keys are read where they lie.
 *
 * A row's result depends on the keys that it sees and their positions, on nothing else: not on the tree around it, on
 * batch mates, on how many rows a prompt's chunk had. Keys are taken in chunks of CHUNK positions, in order; a masked
 * key adds an exact zero. */
#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include "linear.h"

#define CHUNK 256

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim; /* head_dim a multiple of 16 */
    int32_t wide;                              /* numbers that are computed with, and states: 1 fp32, 0 bf16 */
    int32_t kept;                              /* the pool's numbers (fp8.h) */
    float scale;
    float eps;           /* of norms */
    const float *q_norm; /* [head_dim], or NULL */
    const float *k_norm;
    const float *rope; /* [positions, 2, head_dim / 2]: cosines, sines */
    int32_t window;    /* a row sees the keys less than so many positions back; 0: all */
} Heads;

/* kernels/attention/layout.py says what these are. */
typedef struct {
    const int32_t *slot_table;
    const int32_t *first_rows, *num_rows, *prefix_lens, *table_rows;
    const int32_t *slots, *positions;
    const uint8_t *masks;
    const int64_t *mask_starts;
    int32_t table_width, num_segments;
    /* By segment: rows that were run before and are keys only, first_run[s]..: they follow all others in slots and
     * positions, and come before the segment's own in its mask, [num_rows][num_run + num_rows]. NULL: none. */
    const int32_t *first_run, *num_run;
} Layout;

/* A layer's keys and values, [slots, num_kv_heads, head_dim]. */
typedef struct {
    void *k, *v;
} Pools;

/* The work is cut into blocks: up to 32 pairs of a row and a query head, all of one segment and kv head. */
int attention_blocks(const Heads *heads, const Layout *layout);
/* A thread's workspace for one layout: bytes needed. */
int64_t attention_scratch_bytes(const Heads *heads, const Layout *layout);

/* One block. qkv [rows, width] fp32, rotated; the result goes to out [rows, num_heads * head_dim]. */
void attend(const Heads *heads, const Layout *layout, Rows qkv, Pools pools, Rows out, void *scratch, int block);

/* Blocks can be cut into pieces, a chunk of keys each, for more threads than blocks. Same result, to the bit. */
typedef struct {
    int32_t block, chunk;
} Piece;

typedef struct {
    int32_t num_blocks, num_pieces, longest; /* longest: pieces of one block */
} Cut;

Cut count_pieces(const Heads *heads, const Layout *layout);
/* All num_pieces of them, and each block's first one. */
void list_pieces(const Heads *heads, const Layout *layout, Piece *pieces, int32_t *firsts);
/* Memory for what a piece comes to. */
int64_t part_bytes(const Heads *heads);
void attend_piece(const Heads *heads, const Layout *layout, Rows qkv, Pools pools, void *scratch, Piece piece,
                  float *part);
/* A block's result out of its pieces' parts, which lie part_bytes apart in the pieces' order; first: its first piece. */
void join_pieces(const Heads *heads, const Layout *layout, int first, float *parts, Rows out, void *scratch, int block);

#endif
