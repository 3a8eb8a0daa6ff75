/* Trees of S steps and K branches that grow together on a draft head. M candidates a tree: K + (S - 1) K²; E entries,
 * the nodes that steps go on from: K (S - 1). Numbers as in draft_service/drafters/expansion.py. */
#ifndef OUTRIDER_GROW_H
#define OUTRIDER_GROW_H

#include "attention.h"

typedef struct Decoder Decoder;

typedef struct {
    int32_t batch, num_steps, topk;
    int32_t num_logits, num_drafted; /* columns of the logits; how many of them may be drafted */
    int32_t num_read;                /* tokens that the head has an embedding of */
    int32_t table_width, state_bytes;
    const int32_t *slot_table;
    const int32_t *table_rows, *lengths; /* [B]; rows of the sequence before its tree */
    const int32_t *slots;                /* [B][E]; a chain's stand in the slot table too */
    const int64_t *names;                /* the target's ids of the head's; NULL: the same */
    float *scores;                       /* [B][M] */
    int32_t *tokens;                     /* [B][M] */
    int32_t *frontier, *entry_tokens;    /* [B][E] */
    int64_t *entry_parents;              /* [B][E] */
    uint8_t *masks;                      /* [B][E][E] */
    float *logits;                       /* [B K][num_logits] */
    void *carried;                       /* states: [B] roots, then [B][K] of each step */
} Growth;

/* One step's rows. */
typedef struct {
    int64_t *mask_starts;
    int32_t *first_rows, *num_rows, *prefix_lens, *tokens, *slots, *positions, *state_rows, *logit_rows, *found;
    float *chances;
    uint8_t *masks;
} Rung;

/* Takes what may follow the roots: chances fp32 and the target's ids, [B][stride], falling, at least K of each. */
void outrider_grow_roots(const Growth *g, const float *chances, const int64_t *words, int stride);

/* Step 1..S-1: runs the newest entries and takes what follows them. 1: done, 0: out of memory, -1: the head named a
 * token that it cannot read. */
int outrider_grow_step(Decoder *decoder, const Growth *g, int step);

/* A decoder's own memory, good until the next call with more. NULL: there is none. */
char *outrider_decoder_memory(Decoder *decoder, int64_t bytes);
int outrider_decoder_forward(Decoder *d, const Layout *layout, const int32_t *tokens, const void *states,
                             const int32_t *state_rows, int num_rows, const int32_t *logit_rows, int num_logits,
                             float *logits, void *carried, double *seconds);

#endif
