/* The forward pass of a Llama-family decoder in one call: flat rows in, logits out. The residual stream stays in fp32;
 * products read bf16 or fp32 activations as the model says; keys, values and features go to the pool. */
#include <stdlib.h>
#include <time.h>

#include "attention.h"
#include "team.h"

/* Rows of one task at most. A few rows are one task for each thread: handing out more costs more than the work. */
#define ROW_BLOCK 16
/* Blocks of attention per thread from which on whole blocks keep the threads evenly busy. */
#define FULL_BLOCKS 8

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    Matrix qkv, output, gate_up, down;
    void *k_pool, *v_pool;
} Layer;

typedef struct {
    int32_t hidden, ffn, num_layers, vocab;
    int32_t wide_activations, wide_embedding;
    int32_t last_feature;     /* keep the state after the final norm */
    int32_t num_aux, feature_width;
    int32_t reserved;
    const int32_t *aux_layers; /* keep the states entering these layers */
    Heads heads;               /* norms of q and k stand in the layers */
    const Layer *layers;
    const void *embedding;
    const float *final_norm;
    Matrix head;
    void *features; /* [slots, feature_width], of the pool's type; or NULL */
} Model;

/* A model with its threads and the memory that its rows pass through. */
typedef struct {
    Model model;
    Team *team;
    int num_threads, max_rows;
    float *x, *qkv;
    void *normed, *mixed, *gated;
    char *scratch;
    int64_t scratch_bytes;
    Piece *pieces;
    float *parts;
    int64_t max_pieces;
} Decoder;

/* What a step's time is told apart by; kernels/native/library.py names them. */
enum { NORMS, QKV, ROTATE, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, NUM_PARTS };

typedef struct {
    const Model *model;
    Layout layout;
    const int32_t *tokens, *logit_rows;
    int32_t num_rows, num_logits, num_threads, layer;
    int32_t num_blocks, num_pieces; /* of attention; no pieces: whole blocks */
    const Piece *pieces;
    float *parts;
    Rows x, qkv, normed, mixed, gated, logits;
    char *scratch;
    int64_t scratch_bytes;
    double *seconds; /* [NUM_PARTS], or NULL: where the time went, as the calling thread sees it */
} Step;

_Static_assert(sizeof(Step) <= MAX_CONTEXT_BYTES, "a step is copied to every thread");

/* ---- Row tasks */

static int block_rows(const Step *s) {
    int rows = (s->num_rows + s->num_threads - 1) / s->num_threads;
    return rows > ROW_BLOCK ? ROW_BLOCK : rows;
}
static int row_tasks(const Step *s) { return (s->num_rows + block_rows(s) - 1) / block_rows(s); }

#define FOR_ROWS_OF(task, s) \
    for (int row = (task) * block_rows(s); row < ((task) + 1) * block_rows(s) && row < (s)->num_rows; row++)

static void keep_feature(const Step *s, int row, Rows from, int place) {
    const Model *m = s->model;
    int64_t target = (int64_t)s->layout.slots[row] * m->feature_width + (int64_t)place * m->hidden;
    int64_t source = (int64_t)row * from.width;
    for (int i = 0; i < m->hidden; i += LANES)
        store_as(m->heads.wide, m->features, target + i, load_as(from.wide, from.data, source + i));
}

static void keep_entering(const Step *s, int row) {
    for (int i = 0; i < s->model->num_aux; i++)
        if (s->model->aux_layers[i] == s->layer) keep_feature(s, row, s->x, i);
}

static float *row_of(Rows rows, int row) { return (float *)rows.data + (int64_t)row * rows.width; }

static void embed(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    (void)thread;
    FOR_ROWS_OF(task, s)
    for (int i = 0; i < m->hidden; i += LANES)
        store(row_of(s->x, row) + i, load_as(m->wide_embedding, m->embedding, (int64_t)s->tokens[row] * m->hidden + i));
}

static void enter_layer(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    if (s->layer == 0) embed(context, task, thread);
    FOR_ROWS_OF(task, s) {
        keep_entering(s, row);
        norm_row(row_of(s->x, row), m->layers[s->layer].input_norm, m->heads.eps, m->hidden, s->normed, row);
    }
}

static Heads heads_of(const Step *s) {
    Heads heads = s->model->heads;
    heads.q_norm = s->model->layers[s->layer].q_norm;
    heads.k_norm = s->model->layers[s->layer].k_norm;
    return heads;
}

static void rotate(const void *context, int task, int thread) {
    const Step *s = context;
    const Layer *layer = &s->model->layers[s->layer];
    const Heads heads = heads_of(s);
    (void)thread;
    FOR_ROWS_OF(task, s) rotate_row(&heads, &s->layout, row_of(s->qkv, row), layer->k_pool, layer->v_pool, row);
}

static void norm_post(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    (void)thread;
    FOR_ROWS_OF(task, s)
    norm_row(row_of(s->x, row), m->layers[s->layer].post_norm, m->heads.eps, m->hidden, s->normed, row);
}

/* Features of the layers' end; they concern every row, wanted logits or not. */
static void leave_layers(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    const Rows normed = {s->qkv.data, m->hidden, 1}; /* nobody needs q, k and v any more */
    (void)thread;
    FOR_ROWS_OF(task, s) {
        keep_entering(s, row);
        if (!m->last_feature) continue;
        norm_row(row_of(s->x, row), m->final_norm, m->heads.eps, m->hidden, normed, row);
        keep_feature(s, row, normed, 0);
    }
}

static void norm_final(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    (void)thread;
    norm_row(row_of(s->x, s->logit_rows[task]), m->final_norm, m->heads.eps, m->hidden, s->normed, task);
}

/* ---- Products and attention */

static void project_qkv(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    linear_tile(&s->model->layers[s->layer].qkv, s->normed, s->qkv, s->num_rows, PLAIN, task);
}

static void mix(const void *context, int task, int thread) {
    const Step *s = context;
    const Layer *layer = &s->model->layers[s->layer];
    const Heads heads = heads_of(s);
    attend(&heads, &s->layout, s->qkv, layer->k_pool, layer->v_pool, s->mixed,
           s->scratch + thread * s->scratch_bytes, task);
}

static void mix_piece(const void *context, int task, int thread) {
    const Step *s = context;
    const Layer *layer = &s->model->layers[s->layer];
    const Heads heads = heads_of(s);
    attend_piece(&heads, &s->layout, s->qkv, layer->k_pool, layer->v_pool, s->scratch + thread * s->scratch_bytes,
                 s->pieces[task], s->parts + task * part_bytes(&heads) / 4);
}

static void join(const void *context, int task, int thread) {
    const Step *s = context;
    const Heads heads = heads_of(s);
    join_pieces(&heads, &s->layout, s->pieces, s->num_pieces, s->parts, s->mixed,
                s->scratch + thread * s->scratch_bytes, task);
}

static void project_output(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    linear_tile(&s->model->layers[s->layer].output, s->mixed, s->x, s->num_rows, ADD, task);
}

static void gate(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    linear_tile(&s->model->layers[s->layer].gate_up, s->normed, s->gated, s->num_rows, GATED, task);
}

static void project_down(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    linear_tile(&s->model->layers[s->layer].down, s->gated, s->x, s->num_rows, ADD, task);
}

static void project_head(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    linear_tile(&s->model->head, s->normed, s->logits, s->num_logits, PLAIN, task);
}

#define PHASES_PER_LAYER 9
#define OTHER_PHASES 3

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int timed_phase(Worker *worker, Step *step, int part, Task task, int num_tasks) {
    if (!step->seconds || worker->thread) return run_phase(worker, task, step, num_tasks);
    double start = now();
    int done = run_phase(worker, task, step, num_tasks);
    step->seconds[part] += now() - start;
    return done;
}

static void forward(const void *context, Worker *worker) {
    Step step = *(const Step *)context;
    const Model *m = step.model;
    const int rows = row_tasks(&step);
#define PHASE(part, task, count) \
    if (!timed_phase(worker, &step, part, task, count)) return
    for (step.layer = 0; step.layer < m->num_layers; step.layer++) {
        const Layer *layer = &m->layers[step.layer];
        PHASE(NORMS, enter_layer, rows);
        PHASE(QKV, project_qkv, tiles(&layer->qkv));
        PHASE(ROTATE, rotate, rows);
        if (step.num_pieces) {
            PHASE(ATTENTION, mix_piece, step.num_pieces);
            PHASE(ATTENTION, join, step.num_blocks);
        } else {
            PHASE(ATTENTION, mix, step.num_blocks);
        }
        PHASE(OUTPUT, project_output, tiles(&layer->output));
        PHASE(NORMS, norm_post, rows);
        PHASE(GATE_UP, gate, tiles(&layer->gate_up));
        PHASE(DOWN, project_down, tiles(&layer->down));
    }
    if (m->last_feature || m->num_aux) PHASE(NORMS, leave_layers, rows);
    if (step.num_logits) {
        PHASE(NORMS, norm_final, step.num_logits);
        PHASE(HEAD, project_head, tiles(&m->head));
    }
#undef PHASE
}

/* ---- What Python calls */

static void *grow(void *old, int64_t bytes) {
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
        int64_t widest = m->hidden > q ? m->hidden : q;
        d->max_rows = 0;
        d->x = grow(d->x, 4 * rows * m->hidden);
        d->qkv = grow(d->qkv, 4 * rows * (qkv > m->hidden ? qkv : m->hidden));
        d->normed = grow(d->normed, 4 * rows * m->hidden);
        d->mixed = grow(d->mixed, 4 * rows * widest);
        d->gated = grow(d->gated, 4 * rows * m->ffn);
        if (!d->x || !d->qkv || !d->normed || !d->mixed || !d->gated) return 0;
        d->max_rows = (int)rows;
    }
    int64_t scratch = (attention_scratch_bytes(&m->heads, layout) + 127) / 128 * 128;
    if (scratch > d->scratch_bytes) {
        d->scratch_bytes = 0;
        d->scratch = grow(d->scratch, scratch * d->num_threads);
        if (!d->scratch) return 0;
        d->scratch_bytes = scratch;
    }
    return 1;
}

/* Cuts attention into pieces when there are too few blocks to keep all threads busy; 0: out of memory. */
static int plan_attention(Decoder *d, Step *step) {
    const Heads *heads = &d->model.heads;
    step->num_blocks = attention_blocks(heads, &step->layout);
    if (d->num_threads == 1 || step->num_blocks >= FULL_BLOCKS * d->num_threads) return 1;
    int count = list_pieces(heads, &step->layout, NULL);
    if (count > d->max_pieces) {
        d->max_pieces = 0;
        d->pieces = grow(d->pieces, 2 * count * sizeof *d->pieces);
        d->parts = grow(d->parts, 2 * count * part_bytes(heads));
        if (!d->pieces || !d->parts) return 0;
        d->max_pieces = 2 * count;
    }
    step->num_pieces = list_pieces(heads, &step->layout, d->pieces);
    step->pieces = d->pieces;
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
    free(d->x), free(d->qkv), free(d->normed), free(d->mixed), free(d->gated);
    free(d->scratch), free(d->pieces), free(d->parts);
    free(d);
}

/* One step: logits [num_logits, vocab] fp32; seconds [NUM_PARTS] or NULL is added to. Every index must have been checked.
 * 1: done, 0: out of memory. */
int outrider_decoder_forward(Decoder *d, const Layout *layout, const int32_t *tokens, int num_rows,
                             const int32_t *logit_rows, int num_logits, float *logits, double *seconds) {
    const Model *m = &d->model;
    const int32_t q = m->heads.num_heads * m->heads.head_dim, qkv = q + 2 * m->heads.num_kv_heads * m->heads.head_dim;
    if (!reserve(d, num_rows, layout)) return 0;
    Step step = {
        .model = m,
        .layout = *layout,
        .tokens = tokens,
        .logit_rows = logit_rows,
        .num_rows = num_rows,
        .num_logits = num_logits,
        .num_threads = d->num_threads,
        .x = {d->x, m->hidden, 1},
        .qkv = {d->qkv, qkv, 1},
        .normed = {d->normed, m->hidden, m->wide_activations},
        .mixed = {d->mixed, q, m->wide_activations},
        .gated = {d->gated, m->ffn, m->wide_activations},
        .logits = {logits, m->vocab, 1},
        .scratch = d->scratch,
        .scratch_bytes = d->scratch_bytes,
        .seconds = seconds,
    };
    if (!plan_attention(d, &step)) return 0;
    run_job(d->team, forward, &step, sizeof step);
    return 1;
}

/* Attention alone, on the calling thread: q [rows, num_heads * head_dim] fp32, rotated; k, v already in the pool; out as
 * q. 1: done, 0: out of memory. */
int outrider_attention(const Heads *heads, const Layout *layout, float *q, const void *k_pool, const void *v_pool,
                       float *out) {
    void *scratch = malloc(attention_scratch_bytes(heads, layout));
    if (!scratch) return 0;
    const int width = heads->num_heads * heads->head_dim;
    for (int task = 0; task < attention_blocks(heads, layout); task++)
        attend(heads, layout, (Rows){q, width, 1}, k_pool, v_pool, (Rows){out, width, 1}, scratch, task);
    free(scratch);
    return 1;
}

/* A product alone, on the calling thread: x as the matrix's kernels want it, y [num_rows, n] fp32. */
void outrider_linear(const Matrix *w, void *x, int wide, int num_rows, float *y) {
    for (int tile = 0; tile < tiles(w); tile++)
        linear_tile(w, (Rows){x, w->k, wide}, (Rows){y, w->n, 1}, num_rows, PLAIN, tile);
}

/* The instructions this was compiled for: results differ between them in the last bits. */
const char *outrider_instructions(void) {
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
