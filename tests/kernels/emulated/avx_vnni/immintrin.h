/* Byte products in registers of 32 bytes, as CPUs with AVX-VNNI and without AVX-512 have them, for CPUs with AVX2 alone.
 * Compiled with __AVXVNNI__ defined. */
#ifndef OUTRIDER_EMULATED_AVX_VNNI_H
#define OUTRIDER_EMULATED_AVX_VNNI_H

#include_next <immintrin.h>
#include <stdint.h>
#include <string.h>

static inline __m256i emulated_dpbusd(__m256i sums, __m256i a, __m256i b) {
    uint8_t x[32];
    int8_t y[32];
    int32_t totals[8];
    memcpy(x, &a, 32), memcpy(y, &b, 32), memcpy(totals, &sums, 32);
    for (int i = 0; i < 32; i++) totals[i / 4] += x[i] * y[i];
    memcpy(&sums, totals, 32);
    return sums;
}

static inline __m256i emulated_dpwssd(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}

#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd

#endif
