/* Two neighbouring keys' values side by side, as bf16 dot products take them. */
#ifndef OUTRIDER_COUPLES_H
#define OUTRIDER_COUPLES_H

#include "simd.h"

#if HAS_BF16_DOT
/* 32 dimensions of two keys' values, side by side in two vectors. */
INLINE void load_couple(const bf16 *first, const bf16 *second, __m512bh couple[2]) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    /* Of number i: its place in the first vector below, and in the second above, where places begin at 32. */
    const __m512i low = _mm512_or_si512(_mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16)), _mm512_set1_epi32(0x200000));
    const __m512i high = _mm512_or_si512(low, _mm512_set1_epi32(0x100010));
    const __m512i a = _mm512_loadu_si512(first), c = _mm512_loadu_si512(second);
    couple[0] = (__m512bh)_mm512_permutex2var_epi16(a, low, c);
    couple[1] = (__m512bh)_mm512_permutex2var_epi16(a, high, c);
}
#endif

#endif
