#include "linear.h"

#include "amx.h"

INLINE void fetch_line_pair(const void *weights, int streams, int are_many_rows) {
    fetch_weights(weights, streams, are_many_rows);
    fetch_weights((const char *)weights + 64, streams, are_many_rows);
}

/* R rows through one tile into out [R][32]. Every sum runs over k in one order: adding rows changes nothing. */
typedef void Kernel(const Matrix *w, int streams, const void *tile, const void *x, int stride, float *out);

#if HAS_BF16_DOT
INLINE void bf16_rows(int R, const Matrix *w, int streams, const void *tile, const void *x, int stride, float *out) {
    const char *weights = tile;
    const uint32_t *pairs = x;
    const int row = stride / 2, count = w->k / 2;
    __m512 sums[MAX_ROWS][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int i = 0; i < count; i++, weights += 128) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(weights);
        __m512bh high = (__m512bh)_mm512_loadu_si512(weights + 64);
        fetch_line_pair(weights, streams, R >= 6);
        for (int r = 0; r < R; r++) {
            __m512bh value = (__m512bh)_mm512_set1_epi32((int)pairs[r * row + i]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, value);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, value);
        }
    }
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(out + r * TILE, sums[r][0]);
        _mm512_storeu_ps(out + r * TILE + 16, sums[r][1]);
    }
}
#endif

/* fp32 sums are taken over so many k at a time and then added up: rounding errors grow with the chain's length. */
#define CHAIN 96

INLINE void add_sums(int R, vf sums[MAX_ROWS][2], float *out, int is_first) {
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            float *target = out + r * TILE + half * LANES;
            store(target, is_first ? sums[r][half] : load(target) + sums[r][half]);
        }
}

/* bf16 weights, fp32 activations: the low half of each pair is shifted up, the high half masked. */
INLINE void mixed_rows(int R, const Matrix *w, int streams, const void *tile, const void *x, int stride, float *out) {
    const uint32_t *weights = tile;
    const float *values = x;
    for (int start = 0; start < w->k; start += CHAIN) {
        const int end = start + CHAIN < w->k ? start + CHAIN : w->k;
        vf sums[MAX_ROWS][2];
        for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = splat(0.0f);
        for (int i = start; i < end; i += 2, weights += 32) {
            vu low = *(const vu_any *)weights, high = *(const vu_any *)(weights + 16);
            fetch_line_pair(weights, streams, R >= 3);
            for (int r = 0; r < R; r++) {
                float value = values[r * stride + i];
                sums[r][0] += (vf)(low << 16) * value;
                sums[r][1] += (vf)(high << 16) * value;
            }
            for (int r = 0; r < R; r++) {
                float value = values[r * stride + i + 1];
                sums[r][0] += (vf)(low & 0xffff0000u) * value;
                sums[r][1] += (vf)(high & 0xffff0000u) * value;
            }
        }
        add_sums(R, sums, out, start == 0);
    }
}

INLINE void wide_rows(int R, const Matrix *w, int streams, const void *tile, const void *x, int stride, float *out) {
    const float *weights = tile, *values = x;
    for (int start = 0; start < w->k; start += CHAIN) {
        const int end = start + CHAIN < w->k ? start + CHAIN : w->k;
        vf sums[MAX_ROWS][2];
        for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = splat(0.0f);
        for (int i = start; i < end; i++, weights += TILE) {
            vf low = load(weights), high = load(weights + LANES);
            fetch_line_pair(weights, streams, R >= 6);
            for (int r = 0; r < R; r++) {
                float value = values[r * stride + i];
                sums[r][0] += low * value;
                sums[r][1] += high * value;
            }
        }
        add_sums(R, sums, out, start == 0);
    }
}

#define KERNEL(rows, R) \
    static void rows##R(const Matrix *w, int p, const void *t, const void *x, int s, float *o) { \
        rows(R, w, p, t, x, s, o); \
    }
FOR_EACH_COUNT(KERNEL, mixed_rows)
FOR_EACH_COUNT(KERNEL, wide_rows)
static Kernel *const mixed_kernels[] = {FOR_EACH_COUNT(ENTRY, mixed_rows)};
static Kernel *const wide_kernels[] = {FOR_EACH_COUNT(ENTRY, wide_rows)};
#if HAS_BF16_DOT
FOR_EACH_COUNT(KERNEL, bf16_rows)
static Kernel *const bf16_kernels[] = {FOR_EACH_COUNT(ENTRY, bf16_rows)};
#endif

static Kernel *const *kernels_for(const Matrix *w, Rows x) {
    if (w->format == FP32) return wide_kernels;
#if HAS_BF16_DOT
    if (!x.wide) return bf16_kernels;
#else
    (void)x;
#endif
    return mixed_kernels;
}

/* Unrolled, since numbers that a loop picks by number lie in memory. */
#define EACH_HALF _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++)

/* One row's results to `target`, of which only `columns` are there. */
INLINE void put_row(const vf results[2], const float *bias, float *target, int columns, Finish finish) {
    EACH_HALF {
        const int first = half * LANES;
        if (columns >= first + LANES) {
            const vf value = bias ? results[half] + load(bias + first) : results[half];
            store(target + first, finish == ADD ? load(target + first) + value : value);
            continue;
        }
        float tail[LANES];
        store(tail, results[half]);
        for (int i = first; i < columns; i++) {
            const float value = bias ? tail[i - first] + bias[i] : tail[i - first];
            target[i] = finish == ADD ? target[i] + value : value;
        }
    }
}

void finish_rows(
    const float *out, Scales scales, const Matrix *w, Rows y, int first, int rows, Finish finish, int tile) {
    const int column = tile * TILE;
    for (int r = 0; r < rows; r++, out += TILE) {
        const int64_t start = (int64_t)(first + r) * y.width;
        const float *bias = w->bias ? w->bias + column : NULL;
        vf results[2];
        EACH_HALF {
            results[half] = load(out + half * LANES);
            if (scales.columns) results[half] *= load(scales.columns + half * LANES);
            if (scales.rows) results[half] *= scales.rows[r];
        }
        if (finish == GATED)
            store_as(y.wide, y.data, start + column / 2, silu(results[0]) * results[1]);
        else
            put_row(results, bias, (float *)y.data + start + column, w->n - column, finish);
    }
}

void linear_tile(const Matrix *w, Rows x, Rows y, int num_rows, Finish finish, int tile) {
    _Alignas(64) float out[ROWS_AT_ONCE * TILE];
    Kernel *const *kernels = amx_takes(w, x.wide) ? NULL : kernels_for(w, x);
    const int64_t bytes = (int64_t)w->k * TILE * (w->format == FP32 ? 4 : 2);
    const char *data = (const char *)w->data + tile * bytes;
    const int is_done = !kernels && finish == PLAIN && !w->bias && (tile + 1) * TILE <= w->n; /* by the product itself */
    for (int first = 0; first < num_rows;) {
        const int rows = kernels ? next_rows(num_rows - first) : next_amx_rows(num_rows - first);
        const char *values = (const char *)x.data + (int64_t)first * x.width * (x.wide ? 4 : 2);
        if (kernels)
            kernels[rows - 1](w, streams(w, num_rows), data, values, x.width, out);
        else
            amx_rows(w, data, values, 2 * (int64_t)x.width, rows, ahead_of(data, bytes, first, num_rows),
                     is_done ? (float *)y.data + (int64_t)first * y.width + tile * TILE : out,
                     is_done ? y.width : TILE);
        if (!is_done) finish_rows(out, (Scales){NULL, NULL}, w, y, first, rows, finish, tile);
        first += rows;
    }
}
