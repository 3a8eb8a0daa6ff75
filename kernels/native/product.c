/* Products by a team of threads: for draft heads, whose layers are put together in Python. */
#include <stdlib.h>

#include "decoder.h"
#include "rows.h"

typedef struct {
    Matrix w; /* by value: a late thread may still look at it when the caller has gone on */
    Rows x, y;
    Norms norms; /* done to rows before they are multiplied, where there are weights */
    Rows normed; /* what is multiplied where there are norms */
    float *wide; /* [num_rows, k]: x in fp32 */
    int num_rows;
    Codes codes;
} Product;

static void code_one(const void *context, int task, int thread) {
    const Product *p = context;
    (void)thread;
    code_row((const float *)p->x.data + (int64_t)task * p->w.k, p->w.k, p->w.format, p->codes, task);
}

static void norm_one(const void *context, int task, int thread) {
    const Product *p = context;
    const int k = p->w.k;
    (void)thread;
    norm_parts(p->x, p->norms, p->wide + (int64_t)task * k, p->normed, task);
    if (is_quantised(&p->w))
        code_row((const float *)p->normed.data + (int64_t)task * k, k, p->w.format, p->codes, task);
}

static void multiply_tile(const void *context, int task, int thread) {
    const Product *p = context;
    (void)thread;
    product_tile(&p->w, p->codes, p->norms.weights ? p->normed : p->x, p->y, p->num_rows, PLAIN, task);
}

static void multiply_all(const void *context, Worker *worker) {
    const Product *p = context;
    if (p->norms.weights) {
        if (!run_phase(worker, norm_one, p, p->num_rows)) return;
    } else if (is_quantised(&p->w)) {
        if (!run_phase(worker, code_one, p, p->num_rows)) return;
    }
    run_phase(worker, multiply_tile, p, tiles(&p->w));
}

/* A team for outrider_product. NULL: no memory. */
Team *outrider_product_team(int num_threads) { return outrider_team_create(num_threads, 2); }

/* The next part of a piece of memory, of so many bytes; at NULL it only counts. */
static void *take(char *memory, int64_t *at, int64_t bytes) {
    void *taken = memory ? memory + *at : NULL;
    *at += (bytes + 63) / 64 * 64;
    return taken;
}

static int64_t lay_out(Product *p, char *memory) {
    int64_t at = 0;
    const int64_t rows = p->num_rows;
    if (is_quantised(&p->w)) {
        const int64_t width = padded(p->w.k);
        p->codes.width = (int32_t)width;
        p->codes.data = take(memory, &at, 2 * rows * width);
        p->codes.scales = take(memory, &at, 4 * rows);
        p->codes.sums = take(memory, &at, 4 * rows * (width / GROUP));
    }
    if (p->norms.weights) {
        p->wide = take(memory, &at, 4 * rows * p->w.k);
        p->normed.data = take(memory, &at, 4 * rows * p->w.k);
    }
    return at;
}

/* y [num_rows, n] fp32 = x Wᵀ + b; x [num_rows, k] is fp32 where `wide`, else bf16. Its parts are normed first where
 * there are norms (fp32 [k], num_norms of them); then narrow tells what is multiplied. Without, quantised matrices take
 * fp32 only. k and each norm's width are multiples of 16. One call at a time for each team. 1: done, 0: out of memory. */
int outrider_product(Team *team, const Matrix *w, void *x, int wide, int num_rows, const float *norms, int num_norms,
                     float eps, int narrow, float *y) {
    Product product = {
        .w = *w,
        .x = {x, w->k, wide},
        .y = {y, w->n, 1},
        .norms = {norms, num_norms, eps},
        .normed = {NULL, w->k, !narrow},
        .num_rows = num_rows,
    };
    void *memory = NULL;
    const int64_t bytes = lay_out(&product, NULL);
    if (bytes && posix_memalign(&memory, 64, bytes)) return 0;
    lay_out(&product, memory);
    run_job(team, multiply_all, &product, sizeof product);
    free(memory);
    return 1;
}
