/* y = x Wᵀ + b for weights packed in tiles of 32 outputs, and what is done with y before it leaves the core. */
#ifndef OUTRIDER_LINEAR_H
#define OUTRIDER_LINEAR_H

#include "simd.h"

#define TILE 32

/* A packed matrix [n, k], n padded to whole tiles with zeros, k even.
 *   bf16: [tile][k / 2][32 outputs][2 consecutive k]; wide (fp32): [tile][k][32 outputs].
 * kernels/linear.py packs. */
typedef struct {
    const void *data;
    const float *bias; /* [n], or NULL */
    int32_t n, k;
    int32_t wide;
    int32_t reserved;
} Matrix;

/* Rows of activations [rows, width]; wide: fp32, else bf16. */
typedef struct {
    void *data;
    int32_t width;
    int32_t wide;
} Rows;

typedef enum {
    PLAIN, /* y = result, fp32 */
    ADD,   /* y += result, fp32 */
    GATED  /* a tile is 16 gates and their 16 ups: y[16 a tile] = silu(gate) * up, in y's type */
} Finish;

/* One tile of outputs for all rows; tasks 0..tiles(w)-1. A row's result is the same whatever rows go with it. */
void linear_tile(const Matrix *w, Rows x, Rows y, int num_rows, Finish finish, int tile);

static inline int tiles(const Matrix *w) { return (w->n + TILE - 1) / TILE; }

#endif
