/* One product, by a team of threads: for draft heads, whose layers are put together in Python. */
#include <stdlib.h>

#include "decoder.h"

typedef struct {
    Matrix w; /* by value: a late thread may still look at it when the caller has gone on */
    Rows x, y;
    int num_rows;
    Codes codes;
} Product;

static void code_one(const void *context, int task, int thread) {
    const Product *p = context;
    (void)thread;
    code_row((const float *)p->x.data + (int64_t)task * p->w.k, p->w.k, p->w.format, p->codes, task);
}

static void multiply_tile(const void *context, int task, int thread) {
    const Product *p = context;
    (void)thread;
    if (p->w.format > FP32)
        quantized_tile(&p->w, p->codes, p->y, p->num_rows, PLAIN, task);
    else
        linear_tile(&p->w, p->x, p->y, p->num_rows, PLAIN, task);
}

static void multiply_all(const void *context, Worker *worker) {
    const Product *p = context;
    if (p->w.format > FP32 && !run_phase(worker, code_one, p, p->num_rows)) return;
    run_phase(worker, multiply_tile, p, tiles(&p->w));
}

/* A team for outrider_product. NULL: no memory. */
Team *outrider_product_team(int num_threads) { return outrider_team_create(num_threads, 2); }

/* y [num_rows, n] fp32 = x Wᵀ + b; x [num_rows, k] is fp32 where `wide`, else bf16; quantised matrices take fp32 only.
 * k is a multiple of 16. One call at a time for each team. 1: done, 0: out of memory. */
int outrider_product(Team *team, const Matrix *w, void *x, int wide, int num_rows, float *y) {
    Product product = {.w = *w, .x = {x, w->k, wide}, .y = {y, w->n, 1}, .num_rows = num_rows};
    void *memory = NULL;
    if (w->format > FP32) {
        const int64_t width = padded(w->k), rows = num_rows;
        const int64_t data = (2 * rows * width + 63) / 64 * 64, scales = (4 * rows + 63) / 64 * 64;
        if (posix_memalign(&memory, 64, data + scales + 4 * rows * (width / GROUP))) return 0;
        char *at = memory;
        product.codes = (Codes){(void *)at, (void *)(at + data), (void *)(at + data + scales), (int32_t)width};
    }
    run_job(team, multiply_all, &product, sizeof product);
    free(memory);
    return 1;
}
