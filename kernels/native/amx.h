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
#define AMX_ROWS ROWS_AT_ONCE

/* Whether this process may use it: Linux lends its registers on request. */
int amx_is_lent(void);

/* Gives this thread's registers back, at the end of a job: the system need not keep them, and others set up their own. */
void amx_end(void);

/* Whether a matrix goes through the unit, by its format and width alone: few rows and many must come out the same. */
static inline int amx_takes(const Matrix *w, int wide) {
    if (w->format == BF16) return !wide && w->k % 32 == 0 && amx_is_lent();
    return w->format == INT8_DYNAMIC && (w->k + 31) / 32 % 2 == 0 && amx_is_lent();
}

/* Memory to ask for while rows go through a tile, bit by bit; no bytes: what comes next in the tile itself. */
typedef struct {
    const char *from;
    int64_t bytes;
} Share;

/* While the rows from `first` on go through a tile of so many bytes. Where they go through it in several parts, each
 * asks for its part of the tile that follows, which this thread most likely takes next: else memory would have nothing
 * to do while the later parts find the tile in the caches (64 rows of a large matrix took a fifth longer). */
static inline Share share_of(const void *tile, int64_t bytes, int first, int num_rows) {
    const int parts = (num_rows + AMX_ROWS - 1) / AMX_ROWS;
    if (parts == 1) return (Share){NULL, 0};
    return (Share){(const char *)tile + bytes + first / AMX_ROWS * (bytes / parts), bytes / parts};
}

/* At most AMX_ROWS rows through one tile into out [rows][32], its rows `stride` numbers apart: fp32 or (INT8_DYNAMIC)
 * whole numbers as floats. tile and x are as the other kernels of the format take them; row_bytes: from one row of x to
 * the next. */
void amx_rows(const Matrix *w, const void *tile, const void *x, int64_t row_bytes, int rows, Share ahead, float *out,
              int64_t stride);

/* ---- Attention: LANES queries with LANES keys at a time, weights of 32 keys with their values */

#define AMX_MOST_DIMS 192

static inline int amx_takes_heads(int head_dim, int wide) {
    return !wide && head_dim % 32 == 0 && head_dim <= AMX_MOST_DIMS && amx_is_lent();
}

/* Until this thread multiplies rows again. */
void amx_begin_attention(void);

/* scores [LANES queries][num_groups * LANES keys], their rows `stride` apart, of queries [LANES][head_dim] and groups of
 * keys side by side, [num_groups][head_dim / 2][LANES], all as bf16 couples. */
void amx_scores(const uint32_t *q, const uint32_t *keys, int num_groups, int head_dim, float *scores, int64_t stride);

/* Sums of weighted values, 32 dimensions of up to 32 lanes, begin at zero. */
void amx_begin_values(void);
/* Adds 16 couples of keys: weights [lanes][16], their rows row_bytes apart, by values [2][16 couples][16 dimensions],
 * both as bf16 couples. Rows of weights are read up to a multiple of 16 lanes. */
void amx_add_values(const void *weights, int64_t row_bytes, int lanes, const uint32_t *values);
/* The sums to out [lanes up to a multiple of 16][32], their rows `stride` numbers apart. */
void amx_store_values(float *out, int64_t stride, int lanes);

#endif
