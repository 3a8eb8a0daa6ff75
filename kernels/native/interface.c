/* What Python calls. */
#include <stdlib.h>

#include "amx.h"
#include "enter.h"
#include "grow.h"

/* A model with its threads and the memory that its rows pass through. */
struct Decoder {
    Model model;
    Team *team;
    int num_threads, max_rows;
    float *x, *qkv;
    float *gates;
    void *normed, *mixed, *gated;
    Codes codes;
    char *scratch;
    int64_t scratch_bytes;
    Piece *pieces;
    int32_t *firsts; /* room as for pieces: there are at least as many as blocks */
    float *parts;
    int64_t max_pieces;
    char *step; /* what a step is laid out in that the caller does not lay out itself */
    int64_t step_bytes;
};

static void *renewed(void *old, int64_t bytes) {
    free(old);
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes) ? NULL : memory;
}

/* Memory for num_rows rows and the layout's attention; 0: out of memory. */
static int reserve(Decoder *d, int num_rows, const Layout *layout) {
    const Model *m = &d->model;
    if (num_rows > d->max_rows) {
        int64_t rows = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK, q = m->heads.num_heads * m->heads.head_dim;
        int64_t qkv = q + 2 * m->heads.num_kv_heads * m->heads.head_dim;
        int64_t entering = m->entry == TOKEN ? m->hidden : 2 * m->hidden;
        if (m->fuse.k > entering) entering = m->fuse.k;
        int64_t widest = entering > q ? entering : q;
        d->max_rows = 0;
        d->x = renewed(d->x, 4 * rows * m->hidden);
        d->qkv = renewed(d->qkv, 4 * rows * (qkv > m->hidden ? qkv : m->hidden));
        d->normed = renewed(d->normed, 4 * rows * entering);
        d->mixed = renewed(d->mixed, 4 * rows * q);
        d->gated = renewed(d->gated, 4 * rows * m->ffn);
        d->gates = renewed(d->gates, m->gates_apart ? 8 * rows * m->ffn : 64);
        const int32_t width = padded(widest > m->ffn ? (int)widest : m->ffn);
        d->codes.width = width;
        d->codes.data = renewed(d->codes.data, 2 * rows * width);
        d->codes.scales = renewed(d->codes.scales, 4 * rows);
        d->codes.sums = renewed(d->codes.sums, 4 * rows * (width / GROUP));
        if (!d->codes.data || !d->codes.scales || !d->codes.sums) return 0;
        if (!d->x || !d->qkv || !d->normed || !d->mixed || !d->gated || !d->gates) return 0;
        d->max_rows = (int)rows;
    }
    const int64_t of_features = 4 * (int64_t)m->fuse.k, of_attention = attention_scratch_bytes(&m->heads, layout);
    int64_t scratch = sizeof(Highest) * (int64_t)num_rows;
    if (of_features > scratch) scratch = of_features;
    if (of_attention > scratch) scratch = of_attention;
    scratch = (scratch + 127) / 128 * 128;
    if (scratch > d->scratch_bytes) {
        d->scratch_bytes = 0;
        d->scratch = renewed(d->scratch, scratch * d->num_threads);
        if (!d->scratch) return 0;
        d->scratch_bytes = scratch;
    }
    return 1;
}

/* Cuts attention into pieces where whole blocks would not keep all threads evenly busy; 0: out of memory. */
static int plan_attention(Decoder *d, Step *step) {
    const Heads *heads = &d->model.heads;
    const Cut cut = count_pieces(heads, &step->layout);
    step->num_blocks = cut.num_blocks;
    if (d->num_threads == 1 || (int64_t)cut.longest * 2 * d->num_threads <= cut.num_pieces) return 1;
    if (cut.num_pieces > d->max_pieces) {
        const int64_t room = cut.num_pieces + cut.num_pieces / 4;
        d->max_pieces = 0;
        d->pieces = renewed(d->pieces, room * sizeof *d->pieces);
        d->firsts = renewed(d->firsts, room * sizeof *d->firsts);
        d->parts = renewed(d->parts, room * part_bytes(heads));
        if (!d->pieces || !d->firsts || !d->parts) return 0;
        d->max_pieces = room;
    }
    list_pieces(heads, &step->layout, d->pieces, d->firsts);
    step->num_pieces = cut.num_pieces;
    step->pieces = d->pieces;
    step->firsts = d->firsts;
    step->parts = d->parts;
    return 1;
}

/* A decoder over a model description, which is copied; what it points to must outlive the decoder. NULL: no memory. */
Decoder *outrider_decoder_create(const Model *model, int num_threads) {
    Decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder) return NULL;
    decoder->model = *model;
    decoder->num_threads = num_threads;
    decoder->team = outrider_team_create(num_threads, model->num_layers * PHASES_PER_LAYER + OTHER_PHASES);
    if (decoder->team) return decoder;
    free(decoder);
    return NULL;
}

void outrider_decoder_destroy(Decoder *d) {
    outrider_team_destroy(d->team);
    free(d->x), free(d->qkv), free(d->normed), free(d->mixed), free(d->gates), free(d->gated);
    free(d->codes.data), free(d->codes.scales), free(d->codes.sums);
    free(d->scratch), free(d->pieces), free(d->firsts), free(d->parts), free(d->step);
    free(d);
}

char *outrider_decoder_memory(Decoder *d, int64_t bytes) {
    if (bytes > d->step_bytes) {
        d->step_bytes = 0;
        d->step = renewed(d->step, bytes);
        if (d->step) d->step_bytes = bytes;
    }
    return d->step;
}

/* One step: logits [num_logits, vocab] fp32; states or features, state_rows (NULL: in order) and carried of a head,
 * else NULL; likeliest: NULL: not wanted; seconds [NUM_PARTS] or NULL is added to. Every index must have been checked.
 * 1: done, 0: out of memory. */
int outrider_decoder_forward(Decoder *d, const Layout *layout, const int32_t *tokens, const void *states,
                             const void *features, const int32_t *state_rows, int num_rows, const int32_t *logit_rows, int num_logits,
                             float *logits, void *carried, const Likeliest *likeliest, double *seconds) {
    const Model *m = &d->model;
    const int32_t q = m->heads.num_heads * m->heads.head_dim, qkv = q + 2 * m->heads.num_kv_heads * m->heads.head_dim;
    if (!reserve(d, num_rows, layout)) return 0;
    Step step = {
        .model = m,
        .layout = *layout,
        .tokens = tokens,
        .states = states,
        .features = features,
        .state_rows = state_rows,
        .carried = carried,
        .logit_rows = logit_rows,
        .likeliest = likeliest ? *likeliest : (Likeliest){0},
        .num_rows = num_rows,
        .num_logits = num_logits,
        .num_threads = d->num_threads,
        .x = {d->x, m->hidden, 1},
        .qkv = {d->qkv, qkv, 1},
        .normed = {d->normed, m->hidden, m->wide_activations},
        .mixed = {d->mixed, q, m->wide_activations},
        .gates = {d->gates, 2 * m->ffn, 1},
        .gated = {d->gated, m->ffn, m->wide_activations},
        .logits = {logits, m->vocab, 1},
        .codes = d->codes,
        .scratch = d->scratch,
        .scratch_bytes = d->scratch_bytes,
        .seconds = seconds,
    };
    if (!plan_attention(d, &step)) return 0;
    run_job(d->team, decoder_forward, &step, sizeof step);
    if (wants_highest(&step))
        for (int row = 0; row < num_logits; row++)
            likeliest->ids[row] = join_highest(highest_of(&step, 0) + row, d->scratch_bytes / (int64_t)sizeof(Highest), d->num_threads);
    return 1;
}

/* Attention alone, on the calling thread: q and out [rows, num_heads * head_dim] fp32, q rotated; k and v are in the
 * pool. 1: done, 0: out of memory. */
int outrider_attention(const Heads *heads, const Layout *layout, float *q, void *k_pool, void *v_pool, float *out) {
    void *scratch = malloc(attention_scratch_bytes(heads, layout));
    if (!scratch) return 0;
    const int width = heads->num_heads * heads->head_dim;
    const int num_blocks = attention_blocks(heads, layout);
    for (int block = 0; block < num_blocks; block++)
        attend(heads, layout, (Rows){q, width, 1}, (Pools){k_pool, v_pool}, (Rows){out, width, 1}, scratch, block);
    amx_end();
    free(scratch);
    return 1;
}

/* The instructions this was compiled for: results differ between them in the last bits. */
const char *outrider_instructions(void) {
    if (amx_is_lent()) return "amx";
#if HAS_BF16_DOT
    return "avx512-bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#elif defined(__aarch64__)
    return "neon";
#else
    return "scalar";
#endif
}

/* Whether bf16 activations can be multiplied as they are; otherwise activations are fp32. */
int outrider_has_bf16_dot(void) { return HAS_BF16_DOT; }
