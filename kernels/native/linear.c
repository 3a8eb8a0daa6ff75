#include "linear.h"

#include "amx.h"

#if HAS_BF16_DOT
/* R rows through a whole tile. */
INLINE void bf16_rows(int R, const Stretch *s, float *out) {
    const char *weights = s->tile;
    const uint32_t *pairs = s->x;
    const int row = s->stride / 2, count = s->w->k / 2;
    const Reading reading = s->reading;
    __m512 sums[MAX_ROWS][2];
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int i = 0; i < count; i++, weights += 128) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(weights);
        __m512bh high = (__m512bh)_mm512_loadu_si512(weights + 64);
        fetch_weights(weights, reading, ASKS(R, 6)), fetch_weights(weights + 64, reading, ASKS(R, 6));
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

INLINE void add_sums(int R, int V, vf sums[MAX_ROWS][VECTORS], float *out, int is_first) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float *target = out + r * TILE + v * LANES;
            store(target, is_first ? sums[r][v] : load(target) + sums[r][v]);
        }
}

/* bf16 weights, fp32 activations: the low half of each pair is shifted up, the high half masked. */
INLINE void mixed_columns(int R, int V, const Stretch *s, int column, float *out) {
    const uint32_t *weights = (const uint32_t *)s->tile + (int64_t)s->start / 2 * TILE;
    const float *values = (const float *)s->x;
    const int stride = s->stride, end = s->end;
    const Reading reading = s->reading;
    Ahead ahead = look_ahead(s, (const char *)weights, 4 * TILE, (end - s->start) / 2, column / (V * LANES), VECTORS / V);
    vf sums[MAX_ROWS][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = splat(0.0f);
    for (int i = s->start; i < end; i += 2, weights += TILE) {
        vu pairs[VECTORS];
        ask_ahead(&ahead, 4 * TILE, VECTORS / V, reading, ASKS(R, 3));
        for (int v = 0; v < V; v++) pairs[v] = *(const vu_any *)(weights + column + v * LANES);
        for (int r = 0; r < R; r++) {
            const vf value = splat(values[r * stride + i]);
            for (int v = 0; v < V; v++) sums[r][v] += (vf)(pairs[v] << 16) * value;
        }
        for (int r = 0; r < R; r++) {
            const vf value = splat(values[r * stride + i + 1]);
            for (int v = 0; v < V; v++) sums[r][v] += (vf)(pairs[v] & 0xffff0000u) * value;
        }
    }
    add_sums(R, V, sums, out + column, s->start == 0);
}

INLINE void wide_columns(int R, int V, const Stretch *s, int column, float *out) {
    const float *weights = (const float *)s->tile + (int64_t)s->start * TILE, *values = s->x;
    const int stride = s->stride, end = s->end;
    const Reading reading = s->reading;
    Ahead ahead = look_ahead(s, (const char *)weights, 4 * TILE, end - s->start, column / (V * LANES), VECTORS / V);
    vf sums[MAX_ROWS][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = splat(0.0f);
    for (int i = s->start; i < end; i++, weights += TILE) {
        vf numbers[VECTORS];
        ask_ahead(&ahead, 4 * TILE, VECTORS / V, reading, ASKS(R, 6));
        for (int v = 0; v < V; v++) numbers[v] = load(weights + column + v * LANES);
        for (int r = 0; r < R; r++) {
            const vf value = splat(values[r * stride + i]);
            for (int v = 0; v < V; v++) sums[r][v] += numbers[v] * value;
        }
    }
    add_sums(R, V, sums, out + column, s->start == 0);
}

FOR_EACH_COUNT(COLUMNS_KERNEL, mixed_columns)
FOR_EACH_COUNT(COLUMNS_KERNEL, wide_columns)
static Kernel *const mixed_kernels[] = {FOR_EACH_COUNT(ENTRY, mixed_columns)};
static Kernel *const wide_kernels[] = {FOR_EACH_COUNT(ENTRY, wide_columns)};
#if HAS_BF16_DOT
FOR_EACH_COUNT(KERNEL, bf16_rows)
static Kernel *const bf16_kernels[] = {FOR_EACH_COUNT(ENTRY, bf16_rows)};
#endif

/* How long even stretches of at most `most` are. */
static int stretch_length(int k, int most) {
    if (!most) return k;
    const int units = (k + STRETCH_UNIT - 1) / STRETCH_UNIT, count = (k + most - 1) / most;
    return (units + count - 1) / count * STRETCH_UNIT;
}

void go_through(Kernel *const *kernels, Stretch s, int k, int most, int rows, int number_bytes, float *out) {
    const int length = stretch_length(k, most), num_parts = parts_of(rows);
    const char *values = s.x;
    const int32_t *sums = s.group_sums;
    s.num_parts = most ? num_parts : 0;
    for (s.start = 0; s.start < k; s.start = s.end) {
        s.end = s.start + length < k ? s.start + length : k;
        int first = 0;
        for (s.part = 0; s.part < num_parts; s.part++) {
            const int count = next_rows(rows - first, num_parts - s.part);
            s.x = values + (int64_t)first * s.stride * number_bytes;
            s.group_sums = sums + first * s.num_groups;
            kernels[count - 1](&s, out + first * TILE);
            first += count;
        }
    }
}

/* Unrolled, since numbers that a loop picks by number lie in memory. */
#define EACH_VECTOR _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)

/* One row's results to `target`, of which only `columns` are there. */
INLINE void put_row(const vf results[VECTORS], const float *bias, float *target, int columns, Finish finish) {
    EACH_VECTOR {
        const int first = v * LANES;
        if (columns >= first + LANES) {
            const vf value = bias ? results[v] + load(bias + first) : results[v];
            store(target + first, finish == ADD ? load(target + first) + value : value);
            continue;
        }
        float tail[LANES];
        store(tail, results[v]);
        for (int i = first; i < columns; i++) {
            const float value = bias ? tail[i - first] + bias[i] : tail[i - first];
            target[i] = finish == ADD ? target[i] + value : value;
        }
    }
}

/* One row's gates and ups to their place. */
INLINE void put_gated(const vf results[VECTORS], Rows y, int64_t start) {
    _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS / 2; v++)
        store_as(y.wide, y.data, start + v * LANES, silu(results[v]) * results[VECTORS / 2 + v]);
}

void finish_rows(
    const float *out, Scales scales, const Matrix *w, Rows y, int first, int rows, Finish finish, int tile) {
    const int column = tile * TILE;
    for (int r = 0; r < rows; r++, out += TILE) {
        const int64_t start = (int64_t)(first + r) * y.width;
        const float *bias = w->bias ? w->bias + column : NULL;
        vf results[VECTORS];
        EACH_VECTOR {
            results[v] = load(out + v * LANES);
            if (scales.columns) results[v] *= load(scales.columns + v * LANES);
            if (scales.rows) results[v] *= scales.rows[r];
        }
        if (finish == GATED)
            put_gated(results, y, start + column / 2);
        else
            put_row(results, bias, (float *)y.data + start + column, w->n - column, finish);
    }
}

/* Up to ROWS_AT_ONCE rows through the tile. */
static void multiply_rows(Stretch s, int wide, int num_rows, int rows, float *out) {
    const int k = s.w->k;
#if HAS_BF16_DOT
    if (s.w->format == BF16 && !wide) {
        s.reading = how_to_read(s.w, num_rows, MAX_ROWS);
        go_through(bf16_kernels, s, k, 0, rows, 2, out);
        return;
    }
#else
    (void)wide;
#endif
    s.reading = how_to_read(s.w, num_rows, ROWS_AT_ONCE);
    go_through(s.w->format == FP32 ? wide_kernels : mixed_kernels, s, k, CHAIN, rows, 4, out);
}

void linear_tile(const Matrix *w, Rows x, Rows y, int num_rows, Finish finish, int tile) {
    _Alignas(64) float out[ROWS_AT_ONCE * TILE];
    const int on_amx = amx_takes(w, x.wide);
    const int64_t bytes = (int64_t)w->k * TILE * (w->format == FP32 ? 4 : 2);
    const char *data = (const char *)w->data + tile * bytes;
    const int is_done = on_amx && finish == PLAIN && !w->bias && (tile + 1) * TILE <= w->n; /* by the product itself */
    for (int first = 0, rows; first < num_rows; first += rows) {
        rows = rows_at_once(num_rows - first);
        const char *values = (const char *)x.data + (int64_t)first * x.width * (x.wide ? 4 : 2);
        if (on_amx)
            amx_rows(w, data, values, 2 * (int64_t)x.width, rows, share_of(data, bytes, first, num_rows),
                     is_done ? (float *)y.data + (int64_t)first * y.width + tile * TILE : out,
                     is_done ? y.width : TILE);
        else
            multiply_rows((Stretch){.w = w, .tile = data, .x = values, .stride = x.width}, x.wide, num_rows, rows, out);
        if (!is_done) finish_rows(out, (Scales){NULL, NULL}, w, y, first, rows, finish, tile);
    }
}
