#include "paths.h"

#include "amx.h"

#if HAS_AMX
#include "couples.h"

#define NONE -1

/* One couple for each of a group's places, or NONE, and the lanes that see no others there. */
typedef struct {
    int couples[PLACES];
    uint32_t lanes;
} Path;

/* Where the search for paths stands: couples first..end-1 are of one group, `left` the lanes without a path there. */
typedef struct {
    int first, end;
    uint32_t left;
} Walk;

static uint32_t lanes_of(const Block *b, int couple) { return b->sees[2 * couple] | b->sees[2 * couple + 1]; }

/* A path for some of the lanes. The couple that is taken first at a place keeps all its lanes, as a lane sees one
 * couple of a place: so the path always has a lane. */
static Path find_path(const Block *b, const Walk *walk) {
    Path path = {.lanes = walk->left};
    for (int i = 0; i < PLACES; i++) path.couples[i] = NONE;
    for (int couple = walk->first; couple < walk->end; couple++) {
        const uint32_t seeing = path.lanes & lanes_of(b, couple);
        int *taken = path.couples + b->places[couple] % PLACES;
        if (seeing && *taken == NONE)
            *taken = couple;
        else
            path.lanes &= ~seeing;
    }
    return path;
}

/* The next path, in the order of places; 0: there is none. A couple out of place makes a group of its own. */
static int next_path(const Block *b, int num_couples, Walk *walk, Path *path) {
    if (!walk->left) {
        walk->first = walk->end;
        if (walk->first == num_couples) return 0;
        const int place = b->places[walk->end++];
        while (place != OUT_OF_PLACE && walk->end < num_couples && b->places[walk->end] / PLACES == place / PLACES)
            walk->end++;
        walk->left = EVERYBODY >> (BLOCK_LANES - b->num_lanes);
    }
    *path = find_path(b, walk);
    walk->left &= ~path->lanes;
    return 1;
}

/* 32 dimensions of a couple's values, as amx_add_values takes them, from row `place` on. */
INLINE void lay_values(const Block *b, int couple, int dim, int place, uint32_t *out) {
    const bf16 *first = (const bf16 *)vector_at(b, b->computed.v, b->slots[2 * couple]) + dim;
    const bf16 *second = (const bf16 *)vector_at(b, b->computed.v, b->slots[2 * couple + 1]) + dim;
    __m512bh values[2];
    load_couple(first, second, values);
    _mm512_store_si512(out + place * LANES, (__m512i)values[0]);
    _mm512_store_si512(out + (PLACES + place) * LANES, (__m512i)values[1]);
}

/* Values and weights of a path; lanes that take another one weigh nothing. */
static void lay_path(const Block *b, const Path *path, int dim, uint32_t *values, uint32_t *weights) {
    memset(values, 0, 2 * PLACES * LANES * sizeof *values);
    memset(weights, 0, BLOCK_LANES * PLACES * sizeof *weights);
    for (int i = 0; i < PLACES; i++)
        if (path->couples[i] != NONE) lay_values(b, path->couples[i], dim, i, values);
    for (int l = 0; l < b->num_lanes; l++) {
        const uint32_t *own = (const uint32_t *)(b->scores + l * b->stride);
        for (int i = 0; i < PLACES; i++)
            if (path->lanes >> l & 1 && path->couples[i] != NONE) weights[l * PLACES + i] = own[path->couples[i]];
    }
}

/* The 32 dimensions from `dim` on. */
static void mix_dims(const Block *b, int num_couples, int dim, float *values) {
    const int num_whole = b->num_single / PLACES * PLACES;
    _Alignas(64) uint32_t weights[BLOCK_LANES * PLACES];
    Walk walk = {.end = num_whole};
    Path path;
    amx_begin_values();
    for (int couple = 0; couple < num_whole; couple += PLACES) {
        uint32_t *laid = b->keys + couple / PLACES % 2 * 2 * PLACES * LANES;
        for (int i = 0; i < PLACES; i++) lay_values(b, couple + i, dim, i, laid);
        amx_add_values(b->scores + couple, 4 * b->stride, b->num_lanes, laid);
    }
    while (next_path(b, num_couples, &walk, &path)) {
        lay_path(b, &path, dim, b->keys, weights);
        amx_add_values(weights, 4 * PLACES, b->num_lanes, b->keys);
    }
    amx_store_values(values + dim, b->heads->head_dim, b->num_lanes);
}

void mix_on_amx(const Block *b, int count, float *values) {
    for (int dim = 0; dim < b->heads->head_dim; dim += 2 * LANES) mix_dims(b, count / 2, dim, values);
}
#else
void mix_on_amx(const Block *b, int count, float *values) { (void)b, (void)count, (void)values; }
#endif
