/* One chunk of keys for one block of queries: what attention.c puts together. */
#ifndef OUTRIDER_CHUNK_H
#define OUTRIDER_CHUNK_H

#include "attention.h"

/* Below every score; not infinity, whose difference with itself is no number. */
#define LOWEST -1e30f
#define EVERYBODY 0xffffffffu
/* Of a block; a key's `sees` has a bit for each. */
#define BLOCK_LANES 32
/* Neighbouring places whose couples are mixed together on a matrix unit. */
#define PLACES 16
#define OUT_OF_PLACE 255

/* Up to BLOCK_LANES pairs of a row and a query head, all of one segment and kv head. Lane l is row (lane0 + l) / group
 * of the segment, query head (lane0 + l) % group of the kv head's.
 *
 * Where products are of bf16 numbers they are done two at a time, and `pairs` is set: numbers of queries and keys are
 * couples of dimensions then, and weights couples of keys; else they are fp32. */
typedef struct {
    const Heads *heads;
    const Layout *layout;
    Pools pools;       /* as they are kept */
    Pools computed;    /* as they are computed with: the same, or a chunk of them made wide (widen.c) */
    int segment, kv_head, lane0, num_lanes, group;
    int pairs, num_steps;             /* num_steps: numbers of a query */
    int64_t vector_bytes, slot_bytes; /* of one head's key as computed with, and from one slot's to the next */
    int64_t head_start;               /* of the head's within a slot's bytes */
    int rows[BLOCK_LANES];            /* each lane's row within the segment */
    uint32_t *q;                      /* [BLOCK_LANES][num_steps] */
    uint32_t *keys;                   /* [KEY_GROUPS][num_steps][LANES]: side by side, those that are being scored */
    float *scores;                    /* [BLOCK_LANES][stride], by key; their weights later, couples in half the room */
    int32_t *slots;                   /* [keys of a chunk], in `computed` */
    uint32_t *sees;                   /* [keys of a chunk]: bit l: lane l sees the key */
    uint8_t *places;                  /* [couples of a chunk]: which positions of the list a couple is of (keys.h) */
    int num_single;                   /* couples at the beginning that have their places alone */
    int num_open;                     /* keys at the beginning that every lane sees */
    int64_t stride;
    float *part, *total; /* room for a chunk's part of the result, and for the parts before it */
} Block;

/* Groups of LANES keys that are scored together. */
#define KEY_GROUPS 4
/* Lanes scored or mixed together, and vectors of keys or dimensions beside them: as many as leave their sums in
 * registers. */
#if defined(__AVX512F__)
#define MOST_LANES 6
#define BESIDE_SCORES(lanes) ((lanes) <= 3 ? 4 : 2)
#define BESIDE_VALUES(lanes) 4
#elif defined(__AVX2__) || defined(__aarch64__)
#define MOST_LANES 6
#define BESIDE_SCORES(lanes) ((lanes) <= 3 ? 4 : 2)
#define BESIDE_VALUES(lanes) ((lanes) <= 3 ? 4 : 2)
#else
#define MOST_LANES 2
#define BESIDE_SCORES(lanes) 2
#define BESIDE_VALUES(lanes) 4
#endif

/* A table of functions by how many lanes they take. */
#if MOST_LANES == 6
#define EACH_COUNT(name) {name##1, name##2, name##3, name##4, name##5, name##6}
#else
#define EACH_COUNT(name) {name##1, name##2}
#endif

/* The next part of `left` lanes, all parts about even. */
static inline int next_lanes(int left) {
    const int parts = (left + MOST_LANES - 1) / MOST_LANES;
    return (left + parts - 1) / parts;
}

static inline const void *vector_at(const Block *b, const void *pool, int64_t slot) {
    return (const char *)pool + slot * b->slot_bytes + b->head_start;
}

/* A chunk's part of the result, or several chunks' together: [BLOCK_LANES] highest scores and sums of
 * weights, and [BLOCK_LANES][head_dim] weighted values. */
static inline float *highest_of(float *part) { return part; }
static inline float *sum_of(float *part) { return part + BLOCK_LANES; }
static inline float *values_of(float *part) { return part + 2 * BLOCK_LANES; }
static inline int64_t part_floats(const Heads *heads) { return (int64_t)(heads->head_dim + 2) * BLOCK_LANES; }

/* The block's memory, for any block of the layout; chunk_scratch_bytes are needed. */
void lay_out_scratch(Block *b, void *scratch);
int64_t chunk_scratch_bytes(const Heads *heads, const Layout *layout);

/* The query head of a lane. */
static inline int lane_head(const Block *b, int lane) { return b->kv_head * b->group + (b->lane0 + lane) % b->group; }

/* Takes the block's queries; once before its chunks. */
void load_queries(Block *b, Rows qkv);

/* Makes the chunk's keys and values wide where the pool keeps them in 8 bits, one after the other, and slots so. */
void widen_keys(Block *b, int count);

/* q . k of every lane and key, not scaled; each sum runs over the dimensions in order (scores.c). */
void score_keys(const Block *b, int count, int on_amx);

/* Weighted sums of the values into [BLOCK_LANES][head_dim], in the keys' order (mix.c). */
void mix_values(const Block *b, int count, float *values);

/* The part of the keys at positions chunk * CHUNK on; 0: nobody sees any, and the part is not written. */
int attend_chunk(Block *b, int chunk, float *part);

#endif
