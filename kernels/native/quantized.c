#include "quantized.h"

#include "amx.h"

typedef int8_t bytes_any __attribute__((vector_size(2 * LANES), aligned(1)));
typedef int16_t words __attribute__((vector_size(4 * LANES)));
typedef int16_t words_any __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint8_t codes_any __attribute__((vector_size(LANES), aligned(1)));
typedef uint32_t ints_any __attribute__((vector_size(4 * LANES), aligned(1)));

/* ---- Dot products of lanes */

/* sums + a0 b0 + a1 b1 of each lane's two signed 16-bit numbers. */
INLINE vi dot_words(vi sums, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sums + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
    return sums + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
    sums += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    __asm__("" : "+x"(sums)); /* now: the compiler would multiply ahead, and run out of registers */
    return sums;
#elif defined(__SSE2__)
    return sums + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sums + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if HAS_BYTE_DOT
/* sums + the products of each lane's four bytes: unsigned a, signed b. */
INLINE vi dot_bytes(vi sums, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#endif
}
#endif

INLINE vi repeat(uint32_t lane) { return (vi)(lane - (vu){0}); }

/* sums[v] + dot_words of numbers[v] and the couple at `couple`, V of them. */
INLINE void dot_couple(int V, vi *sums, const words *numbers, const uint32_t *couple) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
    for (int v = 0; v < V; v += 2) {
        vi value, product;
        __asm__("vpbroadcastd %6, %2\n\t"
                "vpmaddwd %2, %4, %3\n\tvpaddd %3, %0, %0\n\t"
                "vpmaddwd %2, %5, %2\n\tvpaddd %2, %1, %1"
                : "+x"(sums[v]), "+x"(sums[v + 1]), "=&x"(value), "=&x"(product)
                : "x"(numbers[v]), "x"(numbers[v + 1]), "m"(*couple));
    }
#else
    const vi value = repeat(*couple);
    for (int v = 0; v < V; v++) sums[v] = dot_words(sums[v], (vi)numbers[v], value);
#endif
}

/* Signed bytes as 16-bit numbers. */
INLINE vi widened(const void *bytes) {
#if defined(__AVX512BW__)
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)bytes));
#else
    return (vi) __builtin_convertvector(*(const bytes_any *)bytes, words);
#endif
}

INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi load_ints(const void *p) { return (vi) * (const ints_any *)p; }

/* ---- R rows, V vectors of outputs: a row is `stride` codes long */

/* Of k in a stretch, which the first cache holds with the next one. 16-bit codes times 127 at most: products of the largest
 * fit a sum of 32 bits. */
#define CHAIN 256
/* As many rows at once as registers of 64 bytes hold take less time for the sums of all k than for finding them again. */
#define TAKES_WHOLE_TILE (HAS_BYTE_DOT && LANES == 16)

INLINE void int8_columns(int R, int V, const Stretch *s, int column, float *out) {
    const char *weights = (const char *)s->tile + 4 * TILE + (int64_t)s->start * TILE;
    const uint32_t *pairs = s->x;
    const int row = s->stride / 2, end = s->end / 2;
    const Reading reading = s->reading;
    Ahead ahead = look_ahead(s, weights, 2 * TILE, end - s->start / 2, column / (V * LANES), VECTORS / V);
    vi sums[MAX_ROWS][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = (vi){0};
    for (int i = s->start / 2; i < end; i++, weights += 2 * TILE) {
        words numbers[VECTORS];
        ask_ahead(&ahead, 2 * TILE, VECTORS / V, reading, ASKS(R, 3));
        for (int v = 0; v < V; v++) numbers[v] = (words)widened(weights + 2 * (column + v * LANES));
        for (int r = 0; r < R; r++) dot_couple(V, sums[r], numbers, pairs + r * row + i);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float *target = out + r * TILE + column + v * LANES;
            store(target, s->start ? load(target) + to_float(sums[r][v]) : to_float(sums[r][v]));
        }
}

/* Of INT8_DYNAMIC, sums before they are floats: what they come to is not exact before the last. */
INLINE void begin_sums(int R, int V, const Stretch *s, int column, const float *out, vi sums[MAX_ROWS][VECTORS]) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            const int at = column + v * LANES;
            if (s->start)
                sums[r][v] = (vi)load(out + r * TILE + at);
            else
                sums[r][v] = HAS_BYTE_DOT ? load_ints((const char *)s->tile + 4 * (TILE + at)) : (vi){0};
        }
}

INLINE void end_sums(int R, int V, const Stretch *s, int column, float *out, vi sums[MAX_ROWS][VECTORS]) {
    const int is_last = s->end == padded(s->w->k);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            store(out + r * TILE + column + v * LANES, is_last ? to_float(sums[r][v]) : (vf)sums[r][v]);
}

/* Keeps the compiler from holding in registers, which are few, what it can read twice. */
INLINE void is_read_again(const char **memory) { __asm__ volatile("" : "+r"(*memory)); }

/* Four k of V vectors of outputs by R rows. Where there is no product of bytes, the even and the odd ones are taken
 * apart, as code_row did with the rows'. */
INLINE void add_four(int R, int V, const char *weights, const uint32_t *codes, int64_t row, vi sums[MAX_ROWS][VECTORS]) {
#if HAS_BYTE_DOT
    vi numbers[VECTORS];
    for (int v = 0; v < V; v++) numbers[v] = load_ints(weights + 4 * v * LANES);
    for (int r = 0; r < R; r++) {
        const vi value = repeat(codes[r * row]);
        for (int v = 0; v < V; v++) sums[r][v] = dot_bytes(sums[r][v], value, numbers[v]);
    }
#else
    words numbers[VECTORS];
    for (int v = 0; v < V; v++) numbers[v] = ((words)load_ints(weights + 4 * v * LANES) << 8) >> 8;
    for (int r = 0; r < R; r++) dot_couple(V, sums[r], numbers, codes + r * row);
    if (V > 2) is_read_again(&weights);
    for (int v = 0; v < V; v++) numbers[v] = (words)load_ints(weights + 4 * v * LANES) >> 8;
    for (int r = 0; r < R; r++) dot_couple(V, sums[r], numbers, codes + r * row + 1);
#endif
}

INLINE void add_dynamic(int R, int V, const char *weights, const uint32_t *codes, int64_t row, int count, Ahead ahead,
                        Reading reading, vi sums[MAX_ROWS][VECTORS]) {
    for (int i = 0; i < count; i++, weights += 4 * TILE, codes += HAS_BYTE_DOT ? 1 : 2) {
        ask_ahead(&ahead, 4 * TILE, VECTORS / V, reading, ASKS(R, 3));
        add_four(R, V, weights, codes, row, sums);
    }
}

INLINE void dynamic_columns(int R, int V, const Stretch *s, int column, float *out) {
    const char *weights = (const char *)s->tile + 8 * TILE + (int64_t)s->start * TILE;
    const int64_t row = s->stride / (HAS_BYTE_DOT ? 4 : 2);
    const uint32_t *codes = (const uint32_t *)s->x + s->start / (HAS_BYTE_DOT ? 4 : 2);
    const int count = (s->end - s->start) / 4;
    const Ahead ahead = look_ahead(s, weights, 4 * TILE, count, column / (V * LANES), VECTORS / V);
    vi sums[MAX_ROWS][VECTORS];
    begin_sums(R, V, s, column, out, sums);
    if (s->reading == STREAMED)
        add_dynamic(R, V, weights + 4 * column, codes, row, count, ahead, STREAMED, sums);
    else
        add_dynamic(R, V, weights + 4 * column, codes, row, count, ahead, KEPT, sums);
    end_sums(R, V, s, column, out, sums);
}

/* The sum over a group is low * (sum of x's codes) + step * (sum of nibbles times codes). */
INLINE void add_group(int R, const vi sums[MAX_ROWS], const bf16 *steps, const Stretch *s, int group, float *out) {
    const vf step = load_bf16(steps), low = load_bf16(steps + TILE);
    for (int r = 0; r < R; r++) {
        float *target = out + r * TILE;
        const vf part = to_float(sums[r]) * step + low * (float)s->group_sums[r * s->num_groups + group];
        store(target, group ? load(target) + part : part);
    }
}

/* The outputs from `column` on, and those half a tile further: nibbles of the same words. */
INLINE void int4_columns(int R, const Stretch *s, int group, int column, float *out) {
    const char *tile = (const char *)s->tile + (int64_t)group * (4 * TILE + GROUP * TILE / 2);
    const char *weights = tile + 4 * TILE + 4 * column;
    const bf16 *steps = (const bf16 *)tile + column;
    const uint32_t *pairs = (const uint32_t *)s->x + group * GROUP / 2;
    const int row = s->stride / 2;
    const Reading reading = s->reading;
    vi sums[2][MAX_ROWS];
    for (int r = 0; r < R; r++) sums[0][r] = sums[1][r] = (vi){0};
    for (int i = 0; i < GROUP / 2; i += 2, weights += 64) {
        const vu nibbles = (vu)load_ints(weights);
        const vi low = (vi)(nibbles & 0x000f000f), high = (vi)(nibbles >> 4 & 0x000f000f);
        const vi next_low = (vi)(nibbles >> 8 & 0x000f000f), next_high = (vi)(nibbles >> 12 & 0x000f000f);
        fetch_weights(weights, reading, ASKS(R, 3));
        for (int r = 0; r < R; r++) {
            const vi value = repeat(pairs[r * row + i]), next = repeat(pairs[r * row + i + 1]);
            sums[0][r] = dot_words(dot_words(sums[0][r], low, value), next_low, next);
            sums[1][r] = dot_words(dot_words(sums[1][r], high, value), next_high, next);
        }
    }
    add_group(R, sums[0], steps, s, group, out + column);
    add_group(R, sums[1], steps + TILE / 2, s, group, out + column + TILE / 2);
}

INLINE void int4_rows(int R, const Stretch *s, float *out) {
    for (int group = s->start / GROUP; group < s->end / GROUP; group++)
        for (int column = 0; column < TILE / 2; column += LANES) int4_columns(R, s, group, column, out);
}

FOR_EACH_COUNT(COLUMNS_KERNEL, int8_columns)
FOR_EACH_COUNT(COLUMNS_KERNEL, dynamic_columns)
FOR_EACH_COUNT(KERNEL, int4_rows)
static Kernel *const int8_kernels[] = {FOR_EACH_COUNT(ENTRY, int8_columns)};
static Kernel *const dynamic_kernels[] = {FOR_EACH_COUNT(ENTRY, dynamic_columns)};
static Kernel *const int4_kernels[] = {FOR_EACH_COUNT(ENTRY, int4_rows)};

static Kernel *const *kernels_for(Format format) {
    return format == INT4 ? int4_kernels : format == INT8_DYNAMIC ? dynamic_kernels : int8_kernels;
}

static int64_t tile_bytes(const Matrix *w) {
    const int64_t k = padded(w->k);
    if (w->format == INT4) return k / GROUP * (4 * TILE + GROUP * TILE / 2);
    return 4 * TILE * (w->format == INT8_DYNAMIC ? 2 : 1) + k * TILE;
}

void quantized_tile(const Matrix *w, Codes x, Rows y, int num_rows, Finish finish, int tile) {
    _Alignas(64) float out[ROWS_AT_ONCE * TILE];
    const int on_amx = amx_takes(w, 1);
    const int64_t bytes = tile_bytes(w);
    const char *data = (const char *)w->data + tile * bytes;
    const int code_bytes = w->format == INT8_DYNAMIC && HAS_BYTE_DOT ? 1 : 2;
    const int k = padded(w->k), is_whole = w->format == INT8_DYNAMIC && TAKES_WHOLE_TILE;
    const Reading reading = how_to_read(w, num_rows, is_whole ? MAX_ROWS : ROWS_AT_ONCE);
    const int num_groups = x.width / GROUP;
    for (int first = 0, rows; first < num_rows; first += rows) {
        rows = rows_at_once(num_rows - first);
        const char *codes = (const char *)x.data + (int64_t)first * x.width * code_bytes;
        const int32_t *sums = x.sums + (int64_t)first * num_groups;
        if (on_amx)
            amx_rows(w, data, codes, x.width, rows, share_of(data, bytes, first, num_rows), out, TILE);
        else
            go_through(kernels_for(w->format), (Stretch){w, data, codes, sums, num_groups, x.width, .reading = reading}, k,
                       is_whole ? 0 : CHAIN, rows, code_bytes, out);
        const Scales scales = {w->format == INT4 ? NULL : (const float *)data, x.scales + first};
        finish_rows(out, scales, w, y, first, rows, finish, tile);
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

/* Of each four codes the two even ones, then the two odd ones. */
static void put_evens_first(int16_t *codes, int count) {
    for (int i = 0; i < count; i += 4) {
        uint64_t four;
        memcpy(&four, codes + i, 8);
        const uint64_t middle = (four ^ four >> 16) & 0xffff0000u;
        four ^= middle ^ middle << 16;
        memcpy(codes + i, &four, 8);
    }
}

void code_row(const float *x, int width, Format format, Codes codes, int row) {
    const float most = format == INT8_DYNAMIC ? 127.0f : 32767.0f, highest = magnitude(x, width);
    const float inverse = highest > 0.0f ? most / highest : 0.0f;
    const int end = padded(width);
    codes.scales[row] = highest / most;
    if (format == INT8_DYNAMIC && HAS_BYTE_DOT) {
        uint8_t *out = (uint8_t *)codes.data + (int64_t)row * codes.width;
        for (int i = 0; i < width; i += LANES) {
            const vi code = rounded(load(x + i) * inverse) + 128;
            *(codes_any *)(out + i) = __builtin_convertvector(code, codes_any);
        }
        memset(out + width, 128, end - width);
        return;
    }
    int16_t *out = (int16_t *)codes.data + (int64_t)row * codes.width;
    for (int i = 0; i < width; i += LANES) {
        const vi code = rounded(load(x + i) * inverse);
        *(words_any *)(out + i) = __builtin_convertvector(code, words_any);
    }
    memset(out + width, 0, 2 * (end - width));
    if (format == INT8_DYNAMIC) put_evens_first(out, end);
    if (format != INT4) return;
    for (int group = 0; group < end / GROUP; group++) {
        int32_t total = 0;
        for (int i = 0; i < GROUP; i++) total += out[group * GROUP + i];
        codes.sums[(int64_t)row * (codes.width / GROUP) + group] = total;
    }
}
