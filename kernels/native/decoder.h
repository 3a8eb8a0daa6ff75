/* A Llama-family decoder, or a draft head made of its layers: flat rows in, logits out. The residual stream stays in
 * fp32; products read bf16 or fp32 activations as the model says; keys, values and features go to the pool. */
#ifndef OUTRIDER_DECODER_H
#define OUTRIDER_DECODER_H

#include "attention.h"
#include "likeliest.h"
#include "quantized.h"
#include "rows.h"
#include "team.h"

/* Rows of one task at most. A few rows are one task for each thread: handing out more costs more than the work. */
#define ROW_BLOCK 16

#define PHASES_PER_LAYER 11
#define OTHER_PHASES 10

/* What the first layer reads of a row. A draft head's rows bring a state beside their token. */
typedef enum {
    TOKEN, /* the token's embedding */
    PAIR,  /* join[0] of [embedding, state] */
    APART, /* join[0] of the embedding and join[1] of the state, added */
    BESIDE /* the state; the first layer's q, k and v read [embedding, state] */
} Entry;

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm; /* input_norm: NULL: rows as they are */
    Matrix qkv, output, gate_up, down;
    Pools pools;
    int64_t window; /* as in Heads */
} Layer;

typedef struct {
    int32_t hidden, ffn, num_layers, vocab;
    int32_t wide_activations, wide_embedding; /* activations of a quantised model are wide */
    int32_t last_feature; /* keep the state after the final norm */
    int32_t num_aux, feature_width;
    int32_t gates_apart;       /* gate_up's rows are all gates, then all ups; else as GATED wants them */
    const int32_t *aux_layers; /* keep the states entering these layers */
    Heads heads;               /* norms of q and k, and the window, stand in the layers */
    const Layer *layers;
    const void *embedding;
    const float *final_norm; /* NULL: rows as they are */
    Matrix head;
    void *features; /* [slots, feature_width], of the pool's type; or NULL */
    int32_t entry;
    int32_t residual_normed, carry_normed; /* BESIDE: the state enters normed; rows are carried on after final_norm */
    int32_t num_fuse_norms;
    const float *embedding_norm, *state_norm; /* of PAIR and BESIDE; NULL: as they are */
    Matrix join[2];
    Matrix fuse; /* of a head: makes states of the target's features, after norms of their parts; no data: none */
    const float *fuse_norms;
} Model;

/* What a step's time is told apart by; kernels/native/library.py names them. */
enum { NORMS, QKV, ROTATE, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, NUM_PARTS };

typedef struct {
    const Model *model;
    Layout layout;
    const int32_t *tokens, *logit_rows;
    const void *states;        /* [any number, hidden], of the pool's type; of a head */
    const void *features;      /* [num_rows, fuse.k], likewise: what the rows' states are made of; NULL: states */
    const int32_t *state_rows; /* [num_rows]: which of them each row goes on from; NULL: in order */
    void *carried;             /* [num_logits, hidden], likewise: what rows that follow go on from */
    Likeliest likeliest; /* of the logits; no ids: not asked for */
    int32_t num_rows, num_logits, num_threads, layer;
    int32_t num_blocks, num_pieces; /* of attention; no pieces: whole blocks */
    const Piece *pieces;
    const int32_t *firsts; /* of each block, its first piece */
    float *parts;
    Rows x, qkv, normed, mixed, gates, gated, logits;
    Codes codes; /* of the rows that the next product takes, where its matrix is quantised */
    char *scratch;
    int64_t scratch_bytes;
    double *seconds; /* [NUM_PARTS], or NULL: where the time went, as the calling thread sees it */
} Step;

_Static_assert(sizeof(Step) <= MAX_CONTEXT_BYTES, "a step is copied to every thread");

/* The job of one step: every thread of the team runs it. */
void decoder_forward(const void *step, Worker *worker);

#endif
