#include "decoder.h"

#include <time.h>

#include "enter.h"

/* ---- Row tasks */

static int row_tasks(const Step *s) { return (s->num_rows + block_rows(s) - 1) / block_rows(s); }

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

static void enter_layer(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    if (s->layer == 0 && m->entry == TOKEN) embed(context, task, thread);
    FOR_ROWS_OF(task, s) {
        keep_entering(s, row);
        norm_row(row_of(s->x, row), m->layers[s->layer].input_norm, m->heads.eps, m->hidden, s->normed, row);
        code_for(s, &m->layers[s->layer].qkv, s->normed, m->hidden, row);
    }
}

static Heads heads_of(const Step *s) {
    Heads heads = s->model->heads;
    heads.q_norm = s->model->layers[s->layer].q_norm;
    heads.k_norm = s->model->layers[s->layer].k_norm;
    heads.window = (int32_t)s->model->layers[s->layer].window;
    return heads;
}

static void rotate(const void *context, int task, int thread) {
    const Step *s = context;
    const Heads heads = heads_of(s);
    (void)thread;
    FOR_ROWS_OF(task, s) rotate_row(&heads, &s->layout, row_of(s->qkv, row), s->model->layers[s->layer].pools, row);
}

static void norm_post(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    (void)thread;
    FOR_ROWS_OF(task, s) {
        norm_row(row_of(s->x, row), m->layers[s->layer].post_norm, m->heads.eps, m->hidden, s->normed, row);
        code_for(s, &m->layers[s->layer].gate_up, s->normed, m->hidden, row);
    }
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
    const float *row = row_of(s->x, s->logit_rows[task]);
    (void)thread;
    norm_row(row, m->final_norm, m->heads.eps, m->hidden, s->normed, task);
    code_for(s, &m->head, s->normed, m->hidden, task);
    if (wants_highest(s))
        for (int i = 0; i < s->num_threads; i++) highest_of(s, i)[task] = NO_HIGHEST;
    if (!s->carried) return;
    const Rows carried = {s->carried, m->hidden, m->heads.wide};
    norm_row(row, m->carry_normed ? m->final_norm : NULL, m->heads.eps, m->hidden, carried, task);
}

static void code_mixed(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    FOR_ROWS_OF(task, s) code_for(s, &s->model->layers[s->layer].output, s->mixed, s->mixed.width, row);
}

static void code_gated(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    FOR_ROWS_OF(task, s) {
        if (s->model->gates_apart) gate_row(row_of(s->gates, row), s->model->ffn, s->gated, row);
        code_for(s, &s->model->layers[s->layer].down, s->gated, s->gated.width, row);
    }
}

/* ---- Products and attention */

static void project_qkv(const void *context, int task, int thread) {
    const Step *s = context;
    const Matrix *w = &s->model->layers[s->layer].qkv;
    (void)thread;
    multiply(s, w, (Rows){s->normed.data, w->k, s->normed.wide}, s->qkv, s->num_rows, PLAIN, task);
}

static void mix(const void *context, int task, int thread) {
    const Step *s = context;
    const Heads heads = heads_of(s);
    attend(&heads, &s->layout, s->qkv, s->model->layers[s->layer].pools, s->mixed, scratch_of(s, thread), task);
}

static void mix_piece(const void *context, int task, int thread) {
    const Step *s = context;
    const Heads heads = heads_of(s);
    attend_piece(&heads, &s->layout, s->qkv, s->model->layers[s->layer].pools, scratch_of(s, thread), s->pieces[task],
                 s->parts + task * part_bytes(&heads) / 4);
}

static void join(const void *context, int task, int thread) {
    const Step *s = context;
    const Heads heads = heads_of(s);
    join_pieces(&heads, &s->layout, s->firsts[task], s->parts, s->mixed, scratch_of(s, thread), task);
}

static void project_output(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    multiply(s, &s->model->layers[s->layer].output, s->mixed, s->x, s->num_rows, ADD, task);
}

static void gate(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    const int apart = s->model->gates_apart;
    multiply(s, &s->model->layers[s->layer].gate_up, s->normed, apart ? s->gates : s->gated, s->num_rows,
             apart ? PLAIN : GATED, task);
}

static void project_down(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    multiply(s, &s->model->layers[s->layer].down, s->gated, s->x, s->num_rows, ADD, task);
}

static void project_head(const void *context, int task, int thread) {
    const Step *s = context;
    /* Logits are the one thing that no step finds in the caches: their lines come while weights are read. */
    for (int row = 0; row < s->num_logits; row++)
        for (int i = 0; i < TILE; i += LANES) __builtin_prefetch(row_of(s->logits, row) + task * TILE + i, 1);
    multiply(s, &s->model->head, s->normed, s->logits, s->num_logits, PLAIN, task);
    if (!wants_highest(s)) return;
    const int first = task * TILE, left = s->likeliest.width - first, count = left < TILE ? left : TILE;
    for (int row = 0; row < s->num_logits; row++)
        take_highest(row_of(s->logits, row) + first, first, count, highest_of(s, thread) + row);
}

static void find_likeliest(const void *context, int task, int thread) {
    const Step *s = context;
    const Likeliest *l = &s->likeliest;
    (void)thread;
    outrider_likeliest(row_of(s->logits, task), s->logits.width, 1, l->width, l->num_top,
                       l->probabilities + (int64_t)task * l->num_top, l->ids + (int64_t)task * l->num_top);
}

/* ---- The step */

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

void decoder_forward(const void *context, Worker *worker) {
    Step step = *(const Step *)context;
    const Model *m = step.model;
    const int rows = row_tasks(&step);
#define PHASE(part, task, count) \
    if (!timed_phase(worker, &step, part, task, count)) return
    step.layer = 0;
    if (step.features) {
        PHASE(NORMS, enter_features, rows);
        PHASE(QKV, fuse, tiles(&m->fuse));
    }
    if (m->entry == PAIR || m->entry == BESIDE) PHASE(NORMS, enter_pair, rows);
    if (m->entry == APART) PHASE(NORMS, enter_token, rows);
    if (m->entry == PAIR || m->entry == APART) PHASE(QKV, join_first, tiles(&m->join[0]));
    if (m->entry == APART) {
        PHASE(NORMS, enter_state, rows);
        PHASE(QKV, join_second, tiles(&m->join[1]));
    }
    for (; step.layer < m->num_layers; step.layer++) {
        const Layer *layer = &m->layers[step.layer];
        if (step.layer || m->entry != BESIDE) PHASE(NORMS, enter_layer, rows);
        PHASE(QKV, project_qkv, tiles(&layer->qkv));
        PHASE(ROTATE, rotate, rows);
        if (step.num_pieces) {
            PHASE(ATTENTION, mix_piece, step.num_pieces);
            PHASE(ATTENTION, join, step.num_blocks);
        } else {
            PHASE(ATTENTION, mix, step.num_blocks);
        }
        if (is_quantised(&layer->output)) PHASE(OUTPUT, code_mixed, rows);
        PHASE(OUTPUT, project_output, tiles(&layer->output));
        PHASE(NORMS, norm_post, rows);
        PHASE(GATE_UP, gate, tiles(&layer->gate_up));
        if (is_quantised(&layer->down) || m->gates_apart) PHASE(DOWN, code_gated, rows);
        PHASE(DOWN, project_down, tiles(&layer->down));
    }
    if (m->last_feature || m->num_aux) PHASE(NORMS, leave_layers, rows);
    if (step.num_logits) {
        PHASE(NORMS, norm_final, step.num_logits);
        PHASE(HEAD, project_head, tiles(&m->head));
        if (step.likeliest.probabilities) PHASE(HEAD, find_likeliest, step.num_logits);
    }
#undef PHASE
}
