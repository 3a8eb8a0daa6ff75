/* Products on the matrix unit of Intel's AMX: sixteen rows through a tile in the time of one. */
#ifndef OUTRIDER_AMX_H
#define OUTRIDER_AMX_H

#include "linear.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

/* Rows taken through a tile together: two registers of sixteen. */
#define AMX_ROWS 32
/* Of any kernel. */
#define ROWS_AT_ONCE AMX_ROWS

static inline int next_amx_rows(int left) { return left < AMX_ROWS ? left : AMX_ROWS; }

/* Whether this process may use it: Linux lends its registers on request. */
int amx_is_lent(void);

/* Whether a matrix goes through the unit, by its format and width alone: few rows and many must come out the same. */
static inline int amx_takes(const Matrix *w, int wide) {
    if (w->format == BF16) return !wide && w->k % 32 == 0 && amx_is_lent();
    return w->format == INT8_DYNAMIC && (w->k + 31) / 32 % 2 == 0 && amx_is_lent();
}

/* At most AMX_ROWS rows through one tile into out [rows][32], fp32 or (INT8_DYNAMIC) whole numbers as floats. tile and x
 * are as the other kernels of the format take them; row_bytes: from one row of x to the next. */
void amx_rows(const Matrix *w, const void *tile, const void *x, int64_t row_bytes, int rows, float *out);

/* Attention scores: LANES queries with LANES keys at a time. */
#define AMX_MOST_DIMS 192

static inline int amx_takes_heads(int head_dim, int wide) {
    return !wide && head_dim % 32 == 0 && head_dim <= AMX_MOST_DIMS && amx_is_lent();
}

/* Takes queries [LANES][head_dim], bf16; until amx_end, this thread only asks for scores. */
void amx_begin_scores(const uint32_t *q, int head_dim);
/* scores [LANES queries][LANES keys], their rows `stride` apart, of keys side by side: bf16 couples
 * [head_dim / 2][LANES]. */
void amx_scores(const uint32_t *keys, int head_dim, float *scores, int64_t stride);
void amx_end(void);

#endif
