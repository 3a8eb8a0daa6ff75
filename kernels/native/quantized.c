#include "quantized.h"

#include "amx.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef int16_t words __attribute__((vector_size(64)));
typedef uint16_t uwords __attribute__((vector_size(64)));
typedef int8_t half_bytes __attribute__((vector_size(32), aligned(1)));
typedef int16_t half_words __attribute__((vector_size(32), aligned(2)));
typedef uint8_t quarter_bytes __attribute__((vector_size(16), aligned(1)));
typedef uint32_t vu_any1 __attribute__((vector_size(64), aligned(1)));

/* ---- Dot products of lanes */

/* sums + a0 b0 + a1 b1 of each lane's two signed 16-bit numbers. */
INLINE vi dot_words(vi sums, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sums + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    __m256i parts[3][2];
    memcpy(parts[0], &sums, 64), memcpy(parts[1], &a, 64), memcpy(parts[2], &b, 64);
    for (int i = 0; i < 2; i++)
        parts[0][i] = _mm256_add_epi32(parts[0][i], _mm256_madd_epi16(parts[1][i], parts[2][i]));
    memcpy(&sums, parts[0], 64);
    return sums;
#else
    return sums + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* sums + the products of each lane's four bytes: unsigned a, signed b. */
INLINE vi dot_bytes(vi sums, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
    const words even = (words)((uwords)b << 8) >> 8, odd = (words)b >> 8;
    sums = dot_words(sums, (vi)((uwords)a & 0xff), (vi)even);
    return dot_words(sums, (vi)((uwords)a >> 8), (vi)odd);
#endif
}

/* 32 signed bytes as 16-bit numbers. */
INLINE vi widened(const void *bytes) {
#if defined(__AVX512BW__)
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
#else
    return (vi) __builtin_convertvector(*(const half_bytes *)bytes, words);
#endif
}

INLINE vi repeat(uint32_t lane) { return (vi)(lane - (vu){0}); }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi load_ints(const void *p) { return (vi) * (const vu_any1 *)p; }

/* ---- R rows through one tile into out [R][32]; a row is `stride` codes long */

typedef void Kernel(const Matrix *w, int streams, const void *tile, const void *x, const int32_t *group_sums,
                    int stride, float *out);

/* 16-bit codes times 127 at most: so many products of the largest fit a sum of 32 bits. */
#define CHAIN 512

INLINE void int8_rows(
    int R, const Matrix *w, int streams, const void *tile, const void *x, const int32_t *group_sums, int stride,
    float *out) {
    const char *weights = (const char *)tile + 4 * TILE;
    const uint32_t *pairs = x;
    const int row = stride / 2, count = padded(w->k) / 2;
    (void)group_sums;
    for (int start = 0; start < count; start += CHAIN / 2) {
        const int end = start + CHAIN / 2 < count ? start + CHAIN / 2 : count;
        vi sums[MAX_ROWS][2] = {{{0}}};
        for (int i = start; i < end; i++, weights += 2 * TILE) {
            const vi low = widened(weights), high = widened(weights + TILE);
            fetch_weights(weights, streams, R >= 3);
            for (int r = 0; r < R; r++) {
                const vi value = repeat(pairs[r * row + i]);
                sums[r][0] = dot_words(sums[r][0], low, value);
                sums[r][1] = dot_words(sums[r][1], high, value);
            }
        }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) {
                float *target = out + r * TILE + half * LANES;
                store(target, start ? load(target) + to_float(sums[r][half]) : to_float(sums[r][half]));
            }
    }
}

INLINE void dynamic_rows(
    int R, const Matrix *w, int streams, const void *tile, const void *x, const int32_t *group_sums, int stride,
    float *out) {
    const char *weights = (const char *)tile + 4 * TILE;
    const uint32_t *quads = x;
    const int row = stride / 4, count = padded(w->k) / 4;
    vi sums[MAX_ROWS][2];
    (void)group_sums;
    for (int r = 0; r < R; r++) sums[r][0] = load_ints(weights), sums[r][1] = load_ints(weights + 64);
    weights += 4 * TILE;
    for (int i = 0; i < count; i++, weights += 4 * TILE) {
        const vi low = load_ints(weights), high = load_ints(weights + 64);
        fetch_weights(weights, streams, R >= 3), fetch_weights(weights + 64, streams, R >= 3);
        for (int r = 0; r < R; r++) {
            const vi value = repeat(quads[r * row + i]);
            sums[r][0] = dot_bytes(sums[r][0], value, low);
            sums[r][1] = dot_bytes(sums[r][1], value, high);
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) store(out + r * TILE + half * LANES, to_float(sums[r][half]));
}

/* The sum over a group is low * (sum of x's codes) + step * (sum of nibbles times codes). */
INLINE void add_group(int R, vi sums[MAX_ROWS][2], const bf16 *steps, const int32_t *group_sums, int num_groups,
                      int is_first, float *out) {
    for (int half = 0; half < 2; half++) {
        const vf step = load_bf16(steps + half * LANES), low = load_bf16(steps + TILE + half * LANES);
        for (int r = 0; r < R; r++) {
            float *target = out + r * TILE + half * LANES;
            const vf part = to_float(sums[r][half]) * step + low * (float)group_sums[r * num_groups];
            store(target, is_first ? part : load(target) + part);
        }
    }
}

INLINE void int4_rows(
    int R, const Matrix *w, int streams, const void *tile, const void *x, const int32_t *group_sums, int stride,
    float *out) {
    const char *weights = tile;
    const uint32_t *pairs = x;
    const int row = stride / 2, num_groups = stride / GROUP, count = padded(w->k) / GROUP;
    for (int group = 0; group < count; group++) {
        const bf16 *steps = (const bf16 *)weights;
        vi sums[MAX_ROWS][2] = {{{0}}};
        weights += 4 * TILE;
        for (int i = group * GROUP / 2; i < (group + 1) * GROUP / 2; i += 2, weights += 64) {
            const vu nibbles = (vu)load_ints(weights);
            const vi low = (vi)(nibbles & 0x000f000f), high = (vi)(nibbles >> 4 & 0x000f000f);
            const vi next_low = (vi)(nibbles >> 8 & 0x000f000f), next_high = (vi)(nibbles >> 12 & 0x000f000f);
            fetch_weights(weights, streams, R >= 3);
            for (int r = 0; r < R; r++) {
                const vi value = repeat(pairs[r * row + i]), next = repeat(pairs[r * row + i + 1]);
                sums[r][0] = dot_words(dot_words(sums[r][0], low, value), next_low, next);
                sums[r][1] = dot_words(dot_words(sums[r][1], high, value), next_high, next);
            }
        }
        add_group(R, sums, steps, group_sums + group, num_groups, group == 0, out);
    }
}

#define KERNEL(rows, R) \
    static void rows##R(const Matrix *w, int p, const void *t, const void *x, const int32_t *g, int s, float *o) { \
        rows(R, w, p, t, x, g, s, o); \
    }
FOR_EACH_COUNT(KERNEL, int8_rows)
FOR_EACH_COUNT(KERNEL, dynamic_rows)
FOR_EACH_COUNT(KERNEL, int4_rows)
static Kernel *const int8_kernels[] = {FOR_EACH_COUNT(ENTRY, int8_rows)};
static Kernel *const dynamic_kernels[] = {FOR_EACH_COUNT(ENTRY, dynamic_rows)};
static Kernel *const int4_kernels[] = {FOR_EACH_COUNT(ENTRY, int4_rows)};

static int64_t tile_bytes(const Matrix *w) {
    const int64_t k = padded(w->k);
    if (w->format == INT4) return k / GROUP * (4 * TILE + GROUP * TILE / 2);
    return 4 * TILE * (w->format == INT8_DYNAMIC ? 2 : 1) + k * TILE;
}

void quantized_tile(const Matrix *w, Codes x, Rows y, int num_rows, Finish finish, int tile) {
    _Alignas(64) float out[ROWS_AT_ONCE * TILE];
    const int on_amx = amx_takes(w, 1);
    Kernel *const *kernels =
        w->format == INT4 ? int4_kernels : w->format == INT8_DYNAMIC ? dynamic_kernels : int8_kernels;
    const int64_t bytes = tile_bytes(w);
    const char *data = (const char *)w->data + tile * bytes;
    const int code_bytes = w->format == INT8_DYNAMIC ? 1 : 2;
    for (int first = 0; first < num_rows;) {
        const int rows = on_amx ? next_amx_rows(num_rows - first) : next_rows(num_rows - first);
        const char *codes = (const char *)x.data + (int64_t)first * x.width * code_bytes;
        if (on_amx)
            amx_rows(w, data, codes, x.width, rows, ahead_of(data, bytes, first, num_rows), out, TILE);
        else
            kernels[rows - 1](w, streams(w, num_rows), data, codes, x.sums + (int64_t)first * (x.width / GROUP),
                              x.width, out);
        const Scales scales = {w->format == INT4 ? NULL : (const float *)data, x.scales + first};
        finish_rows(out, scales, w, y, first, rows, finish, tile);
        first += rows;
    }
}

/* ---- Coding rows */

static float magnitude(const float *x, int width) {
    vf highest = splat(0.0f), spoilt = splat(0.0f);
    float parts[LANES], result = 0.0f;
    for (int i = 0; i < width; i += LANES) {
        const vf v = load(x + i);
        highest = maximum(maximum(v, -v), highest);
        spoilt += v * 0.0f; /* NaN once there was a number that is not finite */
    }
    store(parts, highest);
    for (int i = 0; i < LANES; i++) result = parts[i] > result ? parts[i] : result;
    return result + sum(spoilt);
}

/* To the nearest whole number, ties to even, below 2^22. */
INLINE vi rounded(vf v) { return __builtin_convertvector((v + 12582912.0f) - 12582912.0f, vi); }

void code_row(const float *x, int width, Format format, Codes codes, int row) {
    const float most = format == INT8_DYNAMIC ? 127.0f : 32767.0f, highest = magnitude(x, width);
    const float inverse = highest > 0.0f ? most / highest : 0.0f;
    const int end = padded(width);
    codes.scales[row] = highest / most;
    if (format == INT8_DYNAMIC) {
        uint8_t *out = (uint8_t *)codes.data + (int64_t)row * codes.width;
        for (int i = 0; i < width; i += LANES) {
            const vi code = rounded(load(x + i) * inverse) + 128;
            *(quarter_bytes *)(out + i) = __builtin_convertvector(code, quarter_bytes);
        }
        memset(out + width, 128, end - width);
        return;
    }
    int16_t *out = (int16_t *)codes.data + (int64_t)row * codes.width;
    for (int i = 0; i < width; i += LANES) {
        const vi code = rounded(load(x + i) * inverse);
        *(half_words *)(out + i) = __builtin_convertvector(code, half_words);
    }
    memset(out + width, 0, 2 * (end - width));
    if (format != INT4) return;
    for (int group = 0; group < end / GROUP; group++) {
        int32_t total = 0;
        for (int i = 0; i < GROUP; i++) total += out[group * GROUP + i];
        codes.sums[(int64_t)row * (codes.width / GROUP) + group] = total;
    }
}
