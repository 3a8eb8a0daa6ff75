/* How rows enter a decoder: as embeddings, or as a draft head joins them with states; and what its tasks share. */
#ifndef OUTRIDER_ENTER_H
#define OUTRIDER_ENTER_H

#include "decoder.h"

static inline int block_rows(const Step *s) {
    int rows = (s->num_rows + s->num_threads - 1) / s->num_threads;
    return rows > ROW_BLOCK ? ROW_BLOCK : rows;
}
#define FOR_ROWS_OF(task, s) \
    for (int row = (task) * block_rows(s); row < ((task) + 1) * block_rows(s) && row < (s)->num_rows; row++)

static inline float *row_of(Rows rows, int row) { return (float *)rows.data + (int64_t)row * rows.width; }

static inline void *scratch_of(const Step *s, int thread) { return s->scratch + thread * s->scratch_bytes; }

static inline int wants_highest(const Step *s) { return s->likeliest.ids && !s->likeliest.probabilities; }

/* A thread's own, of each row of logits; where attention worked before. */
static inline Highest *highest_of(const Step *s, int thread) { return scratch_of(s, thread); }

/* A row that `w` is to multiply, coded as it wants it. */
static inline void code_for(const Step *s, const Matrix *w, Rows rows, int width, int row) {
    if (is_quantised(w)) code_row(row_of(rows, row), width, w->format, s->codes, row);
}

static inline void multiply(const Step *s, const Matrix *w, Rows x, Rows y, int num_rows, Finish finish, int tile) {
    product_tile(w, s->codes, x, y, num_rows, finish, tile);
}

/* Tasks of blocks of rows: each fills x, or what the first matrix reads. */
void embed(const void *step, int task, int thread);
void enter_features(const void *step, int task, int thread);
void enter_pair(const void *step, int task, int thread);
void enter_token(const void *step, int task, int thread);
void enter_state(const void *step, int task, int thread);

/* Tasks of tiles. */
void fuse(const void *step, int task, int thread);
void join_first(const void *step, int task, int thread);
void join_second(const void *step, int task, int thread);

#endif
