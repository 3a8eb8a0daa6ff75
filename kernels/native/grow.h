/* Trees of S steps and K branches that grow together on a draft head. M candidates a tree: K + (S - 1) K²; E entries,
 * the nodes that steps go on from: K (S - 1). Numbers as in draft_service/drafters/expansion.py. */
#ifndef OUTRIDER_GROW_H
#define OUTRIDER_GROW_H

#include "attention.h"
#include "likeliest.h"

typedef struct Decoder Decoder;

typedef struct {
    int32_t batch, num_steps, topk;
    int32_t num_logits, num_drafted; /* columns of the logits; how many of them may be drafted */
    int32_t num_read;                /* tokens that the head has an embedding of */
    int32_t table_width, state_bytes, num_tips;
    int32_t inputs_are_features;         /* else states */
    int32_t *slot_table;                 /* a chain's own slots are put in */
    const int32_t *table_rows, *lengths; /* [B]; rows of the sequence before its tree */
    const int32_t *behind, *behind_tokens; /* [B]: how many of these rows were not run yet; their tokens */
    const void *inputs;                  /* what those rows go on from; NULL: all were run */
    const int32_t *slots;                /* [B][E] */
    const int64_t *names;                /* the target's ids of the head's; NULL: the same */
    float *tip_chances;                  /* [B][num_tips], falling, at least K: what may follow the sequence's rows */
    int64_t *tip_words;                  /* likewise: the target's ids */
    void *carried;                       /* states: [B] roots, then [B][K] of each step */
    float *scores;                       /* [B][M] */
    int32_t *tokens;                     /* [B][M] */
    int32_t *frontier, *entry_tokens;    /* [B][E] */
    int64_t *entry_parents;              /* [B][E] */
    uint8_t *masks;                      /* [B][E][E] */
    float *logits;                       /* [B K][num_logits] */
    const int32_t *counts;               /* [B]: nodes to choose at the end, at most M; of fewer steps there may be fewer */
    int32_t *nodes;                      /* [3][B][M]: their tokens, parents (-1: the root) and entries (-1: not run) */
    double *chances;                     /* [B][M]: of their paths */
    float least_reach;                   /* see outrider_grow */
    int32_t num_run;                     /* steps that were run; fewer than S: it ended early */
} Growth;

/* One step's rows. */
typedef struct {
    int64_t *mask_starts;
    int32_t *first_rows, *num_rows, *prefix_lens, *first_run, *num_run;
    int32_t *tokens, *slots, *positions, *state_rows, *logit_rows, *found;
    float *chances;
    uint8_t *masks;
} Rung;

/* Steps first..end - 1 of 0..S-1. Step 0 runs rows that were not run yet and takes the tips; the others run the newest
 * entries and take what follows them; after the last one the nodes are chosen. No step is run, and the nodes are chosen,
 * where the trees' newest entries are on average less than least_reach likely to be on the path that is accepted.
 * 1: done, 0: out of memory, -1: a token that the head cannot read. */
int outrider_grow(Decoder *decoder, Growth *g, int first, int end);

/* A decoder's own memory, good until the next call with more. NULL: there is none. */
char *outrider_decoder_memory(Decoder *decoder, int64_t bytes);
int outrider_decoder_forward(Decoder *d, const Layout *layout, const int32_t *tokens, const void *states,
                             const void *features, const int32_t *state_rows, int num_rows, const int32_t *logit_rows, int num_logits,
                             float *logits, void *carried, const Likeliest *likeliest, double *seconds);

#endif
