#include "enter.h"

static void read_token(const Step *s, int row, float *to) {
    const Model *m = s->model;
    const int64_t start = (int64_t)s->tokens[row] * m->hidden;
    for (int i = 0; i < m->hidden; i += LANES) store(to + i, load_as(m->wide_embedding, m->embedding, start + i));
}

/* States made of features wait in the room of q, k and v. */
static Rows fused(const Step *s) { return (Rows){s->qkv.data, s->model->hidden, 1}; }

static void read_state(const Step *s, int row, float *to) {
    const Model *m = s->model;
    if (s->features) {
        for (int i = 0; i < m->hidden; i += LANES) {
            float rounded[LANES]; /* as states are kept */
            store_as(m->heads.wide, rounded, 0, load(row_of(fused(s), row) + i));
            store(to + i, load_as(m->heads.wide, rounded, 0));
        }
        return;
    }
    const int64_t start = (int64_t)(s->state_rows ? s->state_rows[row] : row) * m->hidden;
    for (int i = 0; i < m->hidden; i += LANES) store(to + i, load_as(m->heads.wide, s->states, start + i));
}

static Rows normed_features(const Step *s) {
    return (Rows){s->normed.data, s->model->fuse.k, s->normed.wide};
}

void enter_features(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    const Rows features = {(void *)s->features, m->fuse.k, m->heads.wide};
    const Norms norms = {m->fuse_norms, m->num_fuse_norms, m->heads.eps};
    FOR_ROWS_OF(task, s) {
        norm_parts(features, norms, scratch_of(s, thread), normed_features(s), row);
        code_for(s, &m->fuse, normed_features(s), m->fuse.k, row);
    }
}

void embed(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    FOR_ROWS_OF(task, s) read_token(s, row, row_of(s->x, row));
}

/* Part number `place` of the row, `width` wide, that a head's first matrix reads. */
static void enter_part(const Step *s, const float *norm, const float *part, int width, int row, int place) {
    const Model *m = s->model;
    const Rows to = {(char *)s->normed.data + (int64_t)place * m->hidden * (s->normed.wide ? 4 : 2), width,
                     s->normed.wide};
    norm_row(part, norm, m->heads.eps, m->hidden, to, row);
}

/* [embedding, state], for the matrix that joins them or for the first layer's q, k and v. */
void enter_pair(const void *context, int task, int thread) {
    const Step *s = context;
    const Model *m = s->model;
    const Matrix *reader = m->entry == PAIR ? &m->join[0] : &m->layers[0].qkv;
    const Rows pair = {s->normed.data, 2 * m->hidden, s->normed.wide};
    (void)thread;
    FOR_ROWS_OF(task, s) {
        float *x = row_of(s->x, row);
        read_token(s, row, x);
        enter_part(s, m->embedding_norm, x, pair.width, row, 0);
        read_state(s, row, x);
        enter_part(s, m->state_norm, x, pair.width, row, 1);
        if (m->residual_normed) norm_row(x, m->state_norm, m->heads.eps, m->hidden, s->x, row);
        code_for(s, reader, pair, pair.width, row);
    }
}

void enter_token(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    FOR_ROWS_OF(task, s) {
        read_token(s, row, row_of(s->x, row));
        enter_part(s, NULL, row_of(s->x, row), s->model->hidden, row, 0);
        code_for(s, &s->model->join[0], s->normed, s->model->hidden, row);
    }
}

/* The rows' places in x are taken already; the room of q, k and v is free. */
void enter_state(const void *context, int task, int thread) {
    const Step *s = context;
    const Rows states = {s->qkv.data, s->model->hidden, 1};
    (void)thread;
    FOR_ROWS_OF(task, s) {
        read_state(s, row, row_of(states, row));
        enter_part(s, NULL, row_of(states, row), s->model->hidden, row, 0);
        code_for(s, &s->model->join[1], s->normed, s->model->hidden, row);
    }
}

void fuse(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    multiply(s, &s->model->fuse, normed_features(s), fused(s), s->num_rows, PLAIN, task);
}

void join_first(const void *context, int task, int thread) {
    const Step *s = context;
    const Matrix *w = &s->model->join[0];
    (void)thread;
    multiply(s, w, (Rows){s->normed.data, w->k, s->normed.wide}, s->x, s->num_rows, PLAIN, task);
}

void join_second(const void *context, int task, int thread) {
    const Step *s = context;
    (void)thread;
    multiply(s, &s->model->join[1], s->normed, s->x, s->num_rows, ADD, task);
}
