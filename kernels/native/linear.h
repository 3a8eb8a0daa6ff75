/* y = x Wᵀ + b for weights packed in tiles of 32 outputs, and what is done with y before it leaves the core. */
#ifndef OUTRIDER_LINEAR_H
#define OUTRIDER_LINEAR_H

#include "simd.h"

#define TILE 32

/* How a matrix is stored; those after FP32 are quantised, and quantized.h multiplies them. */
typedef enum { BF16, FP32, INT8, INT8_DYNAMIC, INT4 } Format;

/* A packed matrix [n, k], n padded to whole tiles with zeros, k even.
 *   BF16: [tile][k / 2][32 outputs][2 consecutive k]; FP32: [tile][k][32 outputs].
 * kernels/linear.py packs; kernels/quantize.py the quantised ones. */
typedef struct {
    const void *data;
    const float *bias; /* [n], or NULL */
    int32_t n, k;
    int32_t format;
    int32_t streams; /* of a model larger than the caches: what it reads is not to drive out what lies there */
} Matrix;

static inline int is_quantised(const Matrix *w) { return w->format > FP32; }

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

/* What a tile's results are multiplied by: [32] and [rows], NULL where there is nothing. */
typedef struct {
    const float *columns, *rows;
} Scales;

/* A tile's results [rows][32] where they belong in y, whose row `first` is theirs. */
void finish_rows(
    const float *out, Scales scales, const Matrix *w, Rows y, int first, int rows, Finish finish, int tile);

/* Rows whose results of a tile are gathered before they are finished. */
#define ROWS_AT_ONCE 32
static inline int rows_at_once(int left) { return left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE; }
/* Rows taken through a tile together, and vectors of its outputs beside each other: as many as keep all sums in
 * registers. Few rows take the whole tile, which is read in one go then. */
#define VECTORS (TILE / LANES)
#if defined(__AVX512F__)
#define MAX_ROWS 12
#define BESIDE(rows) VECTORS
#elif defined(__AVX2__)
#define MAX_ROWS 5
#define BESIDE(rows) ((rows) <= 2 ? VECTORS : 2)
#elif defined(__aarch64__)
#define MAX_ROWS 6
#define BESIDE(rows) ((rows) <= 3 ? VECTORS : VECTORS / 2)
#else
#define MAX_ROWS 4
#define BESIDE(rows) ((rows) <= 1 ? VECTORS : 2)
#endif

/* How many parts rows go in, and the next one of `left` rows in so many, all about even: 13 go in 7 and 6 rather than in
 * 12 and a rest. */
static inline int parts_of(int rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
static inline int next_rows(int left, int parts) { return (left + parts - 1) / parts; }

/* A tile is one stream, which the hardware follows. Left to that, few rows are done as fast as memory delivers; asking
 * for lines as well made them slower. With more rows the stream pauses while a line is worked on, the hardware stays
 * close by, and asking early for what is to come, into the second cache, made 8 rows 25 % faster (AMD Zen 4).
 *
 * A model that streams goes through the first cache only, past the others: what is read after a step (the scheduler,
 * the drafter's head, attention) finds its memory where it was, in a fifth of the time, and the step itself is up to a
 * tenth faster (AMD Zen 5). On Zen 4 it drives out what lay there all the same, and 7 and more rows take a tenth longer:
 * which way is taken is measured (streaming.py). */
#define WEIGHTS_AHEAD 8192
#define STREAM_AHEAD 4096
typedef enum { KEPT, STREAMED } Reading;
INLINE void fetch_line(const char *line, Reading reading, int asks) {
    if (reading == STREAMED)
        __builtin_prefetch(line, 0, 0);
    else if (asks)
        __builtin_prefetch(line, 0, 2);
}
/* What comes as far behind `weights`. */
INLINE void fetch_weights(const char *weights, Reading reading, int asks) {
    fetch_line(weights + (reading == STREAMED ? STREAM_AHEAD : WEIGHTS_AHEAD), reading, asks);
}

/* Whether to ask for lines with so many rows: from `many` on where registers are wide. With narrow ones a line is worked
 * on for longer, and asking made one row, too, 5 to 10 % faster (AMD Zen 3). */
#define ASKS(rows, many) (LANES < 16 || (rows) >= (many))

/* How to read a tile that so many rows at most find in the first cache, where the first of them had it from memory. */
static inline Reading how_to_read(const Matrix *w, int num_rows, int most) {
    return w->streams && num_rows <= most ? STREAMED : KEPT;
}

/* A stretch of a tile, k from `start` to `end`, and rows that go through it, `stride` numbers apart: part number `part`
 * of num_parts, which find it in the first cache one after the other. num_parts 0: each has it from further away. */
typedef struct {
    const Matrix *w;
    const void *tile, *x;
    const int32_t *group_sums; /* [rows, num_groups], of INT4's rows */
    int num_groups;
    int stride, start, end;
    int part, num_parts;
    Reading reading;
} Stretch;

/* What a pass over a stretch asks for on its way: its share of the stretch that follows. All passes of all parts ask for
 * as much: memory has something to do while the later ones find theirs in the first cache. */
typedef struct {
    const char *at;
    int step; /* bytes, of an iteration */
} Ahead;

/* Of pass number `pass` of the part's; begin: the stretch's weights, each iteration over `bytes` of them. */
INLINE Ahead look_ahead(const Stretch *s, const char *begin, int bytes, int iterations, int pass, int passes) {
    if (!s->num_parts) return (Ahead){begin + (s->reading == STREAMED ? STREAM_AHEAD : WEIGHTS_AHEAD), bytes};
    const int step = (int)((unsigned)bytes / (unsigned)(s->num_parts * passes));
    return (Ahead){begin + (int64_t)iterations * (bytes + step * (s->part * passes + pass)), step};
}

/* For an iteration of one of `passes` passes. */
INLINE void ask_ahead(Ahead *ahead, int bytes, int passes, Reading reading, int asks) {
    for (int line = 0; line < bytes / passes; line += 64) fetch_line(ahead->at + line, reading, asks);
    ahead->at += ahead->step;
}

/* Some rows through a stretch, added to out [rows][32] unless it is the first one. */
typedef void Kernel(const Stretch *s, float *out);

/* Up to ROWS_AT_ONCE rows through a tile in even stretches of at most `most` of its k, a multiple of STRETCH_UNIT, which
 * the first cache holds: MAX_ROWS rows have one out of memory, the others find it there. most 0: the whole tile at once.
 * kernels: by row count; k as the tile has it. */
#define STRETCH_UNIT 32
void go_through(Kernel *const *kernels, Stretch s, int k, int most, int rows, int number_bytes, float *out);

/* A table of kernels by row count, each with its count as a constant; `kernel` is a function with the count first. */
#if MAX_ROWS == 12
#define FOR_EACH_COUNT(M, kernel) \
    M(kernel, 1) M(kernel, 2) M(kernel, 3) M(kernel, 4) M(kernel, 5) M(kernel, 6) \
    M(kernel, 7) M(kernel, 8) M(kernel, 9) M(kernel, 10) M(kernel, 11) M(kernel, 12)
#elif MAX_ROWS == 6
#define FOR_EACH_COUNT(M, kernel) \
    M(kernel, 1) M(kernel, 2) M(kernel, 3) M(kernel, 4) M(kernel, 5) M(kernel, 6)
#elif MAX_ROWS == 5
#define FOR_EACH_COUNT(M, kernel) M(kernel, 1) M(kernel, 2) M(kernel, 3) M(kernel, 4) M(kernel, 5)
#else
#define FOR_EACH_COUNT(M, kernel) M(kernel, 1) M(kernel, 2) M(kernel, 3) M(kernel, 4)
#endif
#define KERNEL(rows, R) \
    static void rows##R(const Stretch *s, float *out) { rows(R, s, out); }
/* The same of a function that takes BESIDE(R) vectors of outputs from a column on. */
#define COLUMNS_KERNEL(columns, R) \
    static void columns##R(const Stretch *s, float *out) { \
        for (int column = 0; column < TILE; column += BESIDE(R) * LANES) columns(R, BESIDE(R), s, column, out); \
    }
#define ENTRY(kernel, R) kernel##R,

static inline int tiles(const Matrix *w) { return (w->n + TILE - 1) / TILE; }

#endif
