#define _GNU_SOURCE
#include "amx.h"

#if HAS_AMX
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* Bytes of a register's row, and its rows: of weights 16 times k / 2 or k / 4, as tiles are packed for the dot products
 * of AVX-512. A packed line is two registers wide. */
#define ROW_BYTES 64
#define ROWS 16
#define LINE_BYTES (2 * ROW_BYTES)

/* Registers. Of more than ROWS rows: sums 0 to 3 as [block of rows][half of the tile], rows 4 and 5, weights 6 and 7. Of
 * fewer: sums 0 and 1, and by turns rows 4 and weights 6 and 7, or rows 5 and weights 2 and 3: a load into registers
 * that are in use would wait. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Registers;

int amx_is_lent(void) {
    static _Atomic int answer; /* 0: not asked yet, 1: no, 2: yes */
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!known) {
        known = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? 1 : 2;
        atomic_store_explicit(&answer, known, memory_order_relaxed);
    }
    return known == 2;
}

/* The compiler's own functions do not say that they read this memory. */
INLINE void is_read(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

INLINE void configure(const Registers *all) {
    is_read(all);
    _tile_loadconfig(all);
}

/* How this thread's registers are set up: for products of so many rows, for ATTENTION, or, 0, not at all. Setting them
 * up takes as long as a tenth of a small tile's product. */
#define ATTENTION -1
static _Thread_local int setup;

static void set_up(int rows) {
    if (setup == rows) return;
    setup = rows;
    Registers all = {.palette = 1};
    const int first = rows < ROWS ? rows : ROWS, second = rows > ROWS ? rows - ROWS : 0;
    const int sums = second ? second : ROWS, counts[8] = {first, first, sums, sums, first, second ? second : first, ROWS, ROWS};
    for (int i = 0; i < 8; i++) all.rows[i] = (uint8_t)counts[i], all.row_bytes[i] = ROW_BYTES;
    configure(&all);
}

/* Bytes of a tile asked for ahead of use, and into the first cache: the hardware stays close by. */
#define AHEAD 4096

/* 64 bytes of each row. */
#define STEP(product, rows_in, low, high) \
    if (share) \
        for (const char *end = ahead.from + share; ahead.from < end; ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2); \
    else \
        for (int at = 0; at < ROWS * LINE_BYTES; at += 64) __builtin_prefetch(weights + AHEAD + at, 0, 3); \
    _tile_loadd(low, weights, LINE_BYTES); \
    _tile_loadd(high, weights + ROW_BYTES, LINE_BYTES); \
    _tile_loadd(rows_in, values, row_bytes); \
    product(0, rows_in, low); \
    product(1, rows_in, high);
#define GO_ON weights += ROWS * LINE_BYTES, values += ROW_BYTES;

/* Sums over all of k, from BEGIN on. */
#define SUM(product, BEGIN) \
    int i = 0; \
    BEGIN(0, 0) \
    BEGIN(1, ROW_BYTES) \
    if (rows > ROWS) { \
        BEGIN(2, 0) \
        BEGIN(3, ROW_BYTES) \
        for (; i < steps; i++) { \
            STEP(product, 4, 6, 7) \
            _tile_loadd(5, values + ROWS * row_bytes, row_bytes); \
            product(2, 5, 6); \
            product(3, 5, 7); \
            GO_ON \
        } \
    } \
    for (; i + 1 < steps; i += 2) { \
        STEP(product, 4, 6, 7) \
        GO_ON \
        STEP(product, 5, 2, 3) \
        GO_ON \
    } \
    if (i < steps) { \
        STEP(product, 4, 6, 7) \
    }
#define AT_ZERO(register, at) _tile_zero(register);
#define AT_START(register, at) _tile_loadd(register, start + (at), 0); /* two rows of 16 that every row begins with */

void amx_rows(const Matrix *w, const void *tile, const void *x, int64_t row_bytes, int rows, Share ahead, float *out,
              int64_t stride) {
    const char *weights = tile, *values = x;
    const int steps = w->format == BF16 ? w->k / 32 : (w->k + 63) / 64;
    const int64_t share = (ahead.bytes / steps + 63) / 64 * 64; /* of a step */
    set_up(rows);
    if (w->format == BF16) {
        SUM(_tile_dpbf16ps, AT_ZERO)
    } else {
        const char *start = weights + 4 * TILE;
        weights += 8 * TILE;
        SUM(_tile_dpbusd, AT_START)
    }
    _tile_stored(0, out, 4 * stride);
    _tile_stored(1, out + LANES, 4 * stride);
    if (rows > ROWS) {
        _tile_stored(2, out + ROWS * stride, 4 * stride);
        _tile_stored(3, out + ROWS * stride + LANES, 4 * stride);
    }
    if (w->format == BF16) return;
    for (int row = 0; row < rows; row++, out += stride)
        for (int i = 0; i < TILE; i += LANES)
            store(out + i, __builtin_convertvector((vi) * (const vu_any *)(out + i), vf));
}

/* ---- Attention */

void amx_begin_attention(void) {
    if (setup == ATTENTION) return;
    setup = ATTENTION;
    Registers all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.rows[i] = ROWS, all.row_bytes[i] = ROW_BYTES;
    configure(&all);
}

void amx_end(void) {
    if (setup) _tile_release();
    setup = 0;
}

/* Of scores: sums in register 0, keys in 1, queries 32 dimensions each from 2 on. */
void amx_scores(const uint32_t *q, const uint32_t *keys, int num_groups, int head_dim, float *scores, int64_t stride) {
    const int64_t row_bytes = 2 * head_dim;
    is_read(q);
    is_read(keys);
#define EACH_PART(DO) DO(0, 2) DO(1, 3) DO(2, 4) DO(3, 5) DO(4, 6) DO(5, 7)
#define TAKE(i, register) \
    if (head_dim > 32 * i) _tile_loadd(register, (const char *)q + i * ROW_BYTES, row_bytes);
#define ADD(i, register) \
    if (head_dim > 32 * i) { \
        _tile_loadd(1, keys + i * ROWS * LANES, ROW_BYTES); \
        _tile_dpbf16ps(0, register, 1); \
    }
    EACH_PART(TAKE)
    for (int group = 0; group < num_groups; group++, keys += head_dim / 2 * LANES, scores += LANES) {
        _tile_zero(0);
        EACH_PART(ADD)
        _tile_stored(0, scores, 4 * stride);
    }
#undef EACH_PART
#undef TAKE
#undef ADD
}

/* Of values: sums in registers 0 to 3 as [16 lanes][16 dimensions], weights in 4 and 5, values in 6 and 7. */
void amx_begin_values(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

void amx_add_values(const void *weights, int64_t row_bytes, int lanes, const uint32_t *values) {
    is_read(weights);
    _tile_loadd(6, values, ROW_BYTES);
    _tile_loadd(7, values + ROWS * LANES, ROW_BYTES);
    _tile_loadd(4, weights, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (lanes <= ROWS) return;
    _tile_loadd(5, (const char *)weights + ROWS * row_bytes, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

void amx_store_values(float *out, int64_t stride, int lanes) {
    _tile_stored(0, out, 4 * stride);
    _tile_stored(1, out + LANES, 4 * stride);
    if (lanes <= ROWS) return;
    _tile_stored(2, out + ROWS * stride, 4 * stride);
    _tile_stored(3, out + ROWS * stride + LANES, 4 * stride);
}
#else
int amx_is_lent(void) { return 0; }
void amx_begin_attention(void) {}
void amx_end(void) {}
void amx_scores(const uint32_t *q, const uint32_t *keys, int num_groups, int head_dim, float *scores, int64_t stride) {
    (void)q, (void)keys, (void)num_groups, (void)head_dim, (void)scores, (void)stride;
}
void amx_begin_values(void) {}
void amx_add_values(const void *weights, int64_t row_bytes, int lanes, const uint32_t *values) {
    (void)weights, (void)row_bytes, (void)lanes, (void)values;
}
void amx_store_values(float *out, int64_t stride, int lanes) { (void)out, (void)stride, (void)lanes; }
void amx_rows(const Matrix *w, const void *tile, const void *x, int64_t row_bytes, int rows, Share ahead, float *out,
              int64_t stride) {
    (void)w, (void)tile, (void)x, (void)row_bytes, (void)rows, (void)ahead, (void)out, (void)stride;
}
#endif
