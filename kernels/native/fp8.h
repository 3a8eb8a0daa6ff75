/* Keys and values that the pool keeps in 8 bits (Micikevicius et al., 2022); bf16 holds every such number exactly. */
#ifndef OUTRIDER_FP8_H
#define OUTRIDER_FP8_H

#include "simd.h"

/* What a pool keeps keys and values in. */
enum { AS_COMPUTED, E4M3, E5M2 };

/* Bits of a number's fraction, its exponent's bias, and the largest number. E4M3 has no infinity. */
#define FRACTION(kept) ((kept) == E4M3 ? 3 : 2)
#define BIAS(kept) ((kept) == E4M3 ? 7 : 15)
#define LARGEST(kept) ((kept) == E4M3 ? 448.0f : 57344.0f)
/* Codes from here on are no finite numbers. */
#define BEYOND(kept) ((kept) == E4M3 ? 0x7f : 0x7c)

typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef uint8_t vb_any __attribute__((vector_size(LANES), aligned(1)));

/* LANES bytes, each a number of its own; compilers do it byte by byte if they are not told how. */
INLINE vu load_bytes(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const vb_any *)p, vu);
#endif
}

/* 2^x. */
INLINE float two_to(int x) {
    const uint32_t bits = (uint32_t)(127 + x) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

INLINE vf load_fp8(int kept, const uint8_t *p) {
    const vu code = load_bytes(p);
    const vi size = (vi)((code & 0x7f) << (23 - FRACTION(kept)));
    const vi rebased = size + ((127 - BIAS(kept)) << 23);
    /* The smallest have no leading one: with it, less it. */
    const vf smallest = (vf)(rebased + (1 << 23)) - two_to(1 - BIAS(kept));
    const vu bits = (vu)choose(size < (1 << 23), smallest, (vf)rebased);
    const vu beyond = (vu)(size >= BEYOND(kept) << (23 - FRACTION(kept))) & 0x7f800000;
    return (vf)(bits | beyond | (code & 0x80) << 24);
}

/* Rounds to nearest, ties to even; what is beyond the largest number becomes it, NaN stays NaN. */
INLINE void store_fp8(int kept, uint8_t *p, vf v) {
    const int dropped = 23 - FRACTION(kept);
    const vf size = minimum(splat(LARGEST(kept)), (vf)((vu)v & 0x7fffffff));
    const vf magic = splat(two_to(24 - BIAS(kept) - FRACTION(kept))); /* its last bit is the smallest number */
    const vf smallest = (vf)((vi)(size + magic) - (vi)magic);
    const vu bits = (vu)size;
    const vu rounded = (bits + ((1u << (dropped - 1)) - 1) + (bits >> dropped & 1)) >> dropped;
    const vf rebased = (vf)(rounded - ((127 - BIAS(kept)) << FRACTION(kept)));
    vu code = (vu)choose(size < two_to(1 - BIAS(kept)), smallest, rebased);
    code = (vu)choose(v != v, (vf)(code | 0x7f), (vf)code) & 0x7f;
    *(vb_any *)p = __builtin_convertvector(code | ((vu)v >> 24 & 0x80), vb);
}

#endif
