/* Rotary embedding and tree attention over a paged pool, without gathering: keys are read where they lie.
 *
 * A row's result depends on the keys that it sees and their positions, on nothing else: not on the tree around it, on
 * batch mates, on how many rows a prompt's chunk had. Keys are taken in chunks of CHUNK positions, in order; a masked key
 * adds an exact zero. */
#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include "linear.h"

#define CHUNK 256

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim; /* head_dim a multiple of 16 */
    int32_t wide;                              /* the pool's numbers: 1 fp32, 0 bf16 */
    float scale;
    float eps;           /* of the q and k norms */
    const float *q_norm; /* [head_dim], or NULL */
    const float *k_norm;
    const float *rope; /* [positions, 2, head_dim / 2]: cosines, sines */
} Heads;

/* kernels/attention/layout.py says what these are. */
typedef struct {
    const int32_t *slot_table;
    const int32_t *first_rows, *num_rows, *prefix_lens, *table_rows;
    const int32_t *slots, *positions;
    const uint8_t *masks;
    const int64_t *mask_starts;
    int32_t table_width, num_segments;
} Layout;

/* The work is cut into blocks: up to 16 pairs of a row and a query head of one segment and kv head. */
int attention_blocks(const Heads *heads, const Layout *layout);
/* A thread's workspace for one layout: bytes needed. */
int64_t attention_scratch_bytes(const Heads *heads, const Layout *layout);

/* Norms and rotates one row's q and k in place (qkv: all heads of q, of k, of v, fp32), writes k and v to its slot. */
void rotate_row(const Heads *heads, const Layout *layout, float *qkv, void *k_pool, void *v_pool, int row);

/* One block. qkv [rows, width] fp32, rotated; the result goes to out [rows, num_heads * head_dim]. */
void attend(const Heads *heads, const Layout *layout, Rows qkv, const void *k_pool, const void *v_pool, Rows out,
            void *scratch, int block);

/* A block in pieces, chunk by chunk, for when there are few blocks and many threads. Same result, to the bit. */
typedef struct {
    int32_t block, chunk;
} Piece;

/* The pieces of all blocks, in order; NULL: only how many. */
int list_pieces(const Heads *heads, const Layout *layout, Piece *pieces);
/* Memory for what a piece comes to. */
int64_t part_bytes(const Heads *heads);
void attend_piece(const Heads *heads, const Layout *layout, Rows qkv, const void *k_pool, const void *v_pool,
                  void *scratch, Piece piece, float *part);
/* A block's result out of its pieces; parts in the pieces' order, part_bytes each. */
void join_pieces(const Heads *heads, const Layout *layout, const Piece *pieces, int num_pieces, float *parts, Rows out,
                 void *scratch, int block);

/* x / sqrt(mean(x^2) + eps) * weight */
void norm_row(const float *x, const float *weight, float eps, int width, Rows out, int row);

#endif
