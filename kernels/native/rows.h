/* What is done to one row at a time: norms, rotary embedding, writing to the pool. */
#ifndef OUTRIDER_ROWS_H
#define OUTRIDER_ROWS_H

#include "attention.h"

/* x / sqrt(mean(x^2) + eps) * weight, into row `row` of out; as it is without a weight. width is a multiple of 16. */
void norm_row(const float *x, const float *weight, float eps, int width, Rows out, int row);

/* A row's `count` parts side by side, each normed with its own weights (NULL: as they are), into row `row` of out;
 * `room`: [x.width] for the row in fp32. A part's width is a multiple of 16. */
typedef struct {
    const float *weights; /* [count][width of a part] */
    int32_t count;
    float eps;
} Norms;
void norm_parts(Rows x, Norms norms, float *room, Rows out, int row);

/* silu of `width` gates times the ups behind them, into row `row` of out. */
void gate_row(const float *gates, int width, Rows out, int row);

/* Norms and rotates one row's q and k in place (qkv: all heads of q, of k, of v, fp32), writes k and v to its slot. */
void rotate_row(const Heads *heads, const Layout *layout, float *qkv, Pools pools, int row);

#endif
