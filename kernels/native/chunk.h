/* One chunk of keys for one block of queries: what attention.c puts together. */
#ifndef OUTRIDER_CHUNK_H
#define OUTRIDER_CHUNK_H

#include "attention.h"

/* Below every score; not infinity, whose difference with itself is no number. */
#define LOWEST -1e30f

/* Up to LANES pairs of a row and a query head, all of one segment and kv head. Lane l is row (lane0 + l) / group of the
 * segment, query head (lane0 + l) % group of the kv head's. */
typedef struct {
    const Heads *heads;
    const Layout *layout;
    const void *k_pool, *v_pool;
    int segment, kv_head, lane0, num_lanes, group;
    int64_t vector_bytes, slot_bytes; /* of one head's key, and of all heads' */
    int rows[LANES];                  /* each lane's row within the segment */
    float *q;                         /* [head_dim][LANES], or bf16 pairs [head_dim / 2][LANES] */
    float *scores;                    /* [keys of a chunk][LANES] */
    int32_t *slots;                   /* [keys of a chunk] */
    uint16_t *sees;                   /* [keys of a chunk]: bit l: lane l sees the key */
    float *part, *total;              /* room for a chunk's part of the result, and for the parts before it */
} Block;

/* A chunk's part of the result, or several chunks' together: [LANES] highest scores, [LANES] sums of weights, and
 * [LANES][head_dim] weighted values. */
static inline float *highest_of(float *part) { return part; }
static inline float *sum_of(float *part) { return part + LANES; }
static inline float *values_of(float *part) { return part + 2 * LANES; }
static inline int64_t part_floats(const Heads *heads) { return (int64_t)(heads->head_dim + 2) * LANES; }

/* The block's memory, for any block of the layout; chunk_scratch_bytes are needed. */
void lay_out_scratch(Block *b, void *scratch);
int64_t chunk_scratch_bytes(const Heads *heads, const Layout *layout);

/* The query head of a lane. */
static inline int lane_head(const Block *b, int lane) { return b->kv_head * b->group + (b->lane0 + lane) % b->group; }

/* Puts the block's queries side by side; once before its chunks. */
void load_queries(Block *b, Rows qkv);

/* The part of the keys at positions chunk * CHUNK on; 0: nobody sees any, and the part is not written. */
int attend_chunk(Block *b, int chunk, float *part);

#endif
