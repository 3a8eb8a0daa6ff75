/* What the C kernels use of AVX-512, byte products and bf16 products included, number by number: for CPUs that have none
 * of it to run that part of the kernels. Compiled with __AVX512F__ and so on defined, and no such instruction allowed. */
#ifndef OUTRIDER_EMULATED_AVX512_H
#define OUTRIDER_EMULATED_AVX512_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64)));
typedef int32_t __m512i __attribute__((vector_size(64)));
typedef uint32_t __m512u __attribute__((vector_size(64)));
typedef uint16_t __m512bh __attribute__((vector_size(64)));
typedef uint16_t __m256bh __attribute__((vector_size(32)));
typedef int64_t __m256i __attribute__((vector_size(32)));
typedef int64_t __m128i __attribute__((vector_size(16)));
typedef uint16_t __mmask16;

#define _CMP_NLT_UQ 5
#define EMULATED static inline __attribute__((always_inline))
#define EACH_OF(count) for (int i = 0; i < (count); i++)

EMULATED __m512i _mm512_loadu_si512(const void *p) { __m512i v; memcpy(&v, p, 64); return v; }
EMULATED void _mm512_store_si512(void *p, __m512i v) { memcpy(p, &v, 64); }
EMULATED void _mm512_storeu_ps(float *p, __m512 v) { memcpy(p, &v, 64); }
EMULATED __m256i _mm256_loadu_si256(const __m256i *p) { __m256i v; memcpy(&v, p, 32); return v; }
EMULATED void _mm256_storeu_si256(__m256i *p, __m256i v) { memcpy(p, &v, 32); }
EMULATED __m128i _mm_loadu_si128(const __m128i *p) { __m128i v; memcpy(&v, p, 16); return v; }
EMULATED __m512 _mm512_setzero_ps(void) { return (__m512){0}; }
EMULATED __m512 _mm512_set1_ps(float x) { __m512 v; EACH_OF(16) v[i] = x; return v; }
EMULATED __m512i _mm512_set1_epi32(int x) { __m512i v; EACH_OF(16) v[i] = x; return v; }
EMULATED __m512i _mm512_set_epi32(int p, int o, int n, int m, int l, int k, int j, int h, int g, int f, int e, int d, int c,
                                  int b, int a, int z) {
    return (__m512i){z, a, b, c, d, e, f, g, h, j, k, l, m, n, o, p};
}
EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i _mm512_slli_epi32(__m512i a, int count) { return (__m512i)((__m512u)a << count); }
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) { EACH_OF(16) a[i] = a[i] > b[i] ? a[i] : b[i]; return a; }
EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) { EACH_OF(16) a[i] = a[i] < b[i] ? a[i] : b[i]; return a; }

EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
    EACH_OF(16) a[i] = mask >> i & 1 ? ldexpf(a[i], (int)floorf(b[i])) : 0.0f;
    return a;
}
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) { return _mm512_maskz_scalef_ps(0xffff, a, b); }

/* Of _CMP_NLT_UQ alone. */
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int comparison) {
    __mmask16 mask = 0;
    (void)comparison;
    EACH_OF(16) mask |= (__mmask16)(!(a[i] < b[i]) << i);
    return mask;
}

EMULATED __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void *p) {
    __m512i v = {0};
    EACH_OF(16) if (mask >> i & 1) {
        int32_t number;
        memcpy(&number, (const char *)p + 4 * i, 4);
        v[i] = number;
    }
    return v;
}

/* ---- Wider numbers, narrower numbers */

EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
    uint16_t narrow[16];
    __m512i v;
    memcpy(narrow, &a, 32);
    EACH_OF(16) v[i] = narrow[i];
    return v;
}

EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
    uint8_t narrow[16];
    __m512i v;
    memcpy(narrow, &a, 16);
    EACH_OF(16) v[i] = narrow[i];
    return v;
}

EMULATED __m256i _mm512_cvtepi32_epi16(__m512i a) {
    uint16_t narrow[16];
    __m256i v;
    EACH_OF(16) narrow[i] = (uint16_t)a[i];
    memcpy(&v, narrow, 32);
    return v;
}

EMULATED __m512i _mm512_cvtepi8_epi16(__m256i a) {
    int8_t narrow[32];
    int16_t wide[32];
    memcpy(narrow, &a, 32);
    EACH_OF(32) wide[i] = narrow[i];
    return _mm512_loadu_si512(wide);
}

EMULATED uint16_t emulated_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
EMULATED float emulated_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a) { __m256bh v; EACH_OF(16) v[i] = emulated_bf16(a[i]); return v; }

/* ---- Products */

EMULATED __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    EACH_OF(16) sums[i] += emulated_float(a[2 * i + 1]) * emulated_float(b[2 * i + 1]);
    EACH_OF(16) sums[i] += emulated_float(a[2 * i]) * emulated_float(b[2 * i]);
    return sums;
}

EMULATED __m512i _mm512_dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
    int16_t x[32], y[32];
    memcpy(x, &a, 64), memcpy(y, &b, 64);
    EACH_OF(32) sums[i / 2] += x[i] * y[i];
    return sums;
}
EMULATED __m512i _mm512_madd_epi16(__m512i a, __m512i b) { return _mm512_dpwssd_epi32((__m512i){0}, a, b); }

EMULATED __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    uint8_t x[64];
    int8_t y[64];
    memcpy(x, &a, 64), memcpy(y, &b, 64);
    EACH_OF(64) sums[i / 4] += x[i] * y[i];
    return sums;
}

/* ---- Lanes that change places; `high`: of each 16 bytes the upper half */

EMULATED __m512i emulated_unpack(__m512i a, __m512i b, int high) {
    __m512i v;
    EACH_OF(16) v[i] = (i % 2 ? b : a)[i / 4 * 4 + 2 * high + i % 4 / 2];
    return v;
}
EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return emulated_unpack(a, b, 0); }
EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return emulated_unpack(a, b, 1); }

EMULATED __m512i emulated_unpack_pairs(__m512i a, __m512i b, int high) {
    __m512i v;
    EACH_OF(16) v[i] = (i % 4 < 2 ? a : b)[i / 4 * 4 + 2 * high + i % 2];
    return v;
}
EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return emulated_unpack_pairs(a, b, 0); }
EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return emulated_unpack_pairs(a, b, 1); }

EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int places) {
    __m512i v;
    EACH_OF(16) v[i] = (i < 8 ? a : b)[(places >> i / 4 * 2 & 3) * 4 + i % 4];
    return v;
}

EMULATED __m512 _mm512_permutex2var_ps(__m512 a, __m512i places, __m512 b) {
    __m512 v;
    EACH_OF(16) v[i] = (places[i] & 16 ? b : a)[places[i] & 15];
    return v;
}

EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i places, __m512i b) {
    uint16_t from[64], at[32], to[32];
    memcpy(from, &a, 64), memcpy(from + 32, &b, 64), memcpy(at, &places, 64);
    EACH_OF(32) to[i] = from[at[i] & 63];
    return _mm512_loadu_si512(to);
}

#endif
