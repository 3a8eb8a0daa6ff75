/* A register of fp32 lanes and the little that is done with it, in the compiler's own vector types: AVX-512, AVX2, NEON
 * or plain C come out of the same source. Lanes are as many as a register of the CPU has: wider vectors would live in
 * memory, where the compiler keeps what no register holds. */
#ifndef OUTRIDER_SIMD_H
#define OUTRIDER_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512VL__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))
/* A hot loop on its own, so that it has all registers. */
#define ALONE static __attribute__((noinline))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
/* The same where memory is not aligned to the vector. */
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t vu_any __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t vh_any __attribute__((vector_size(2 * LANES), aligned(2)));

typedef uint16_t bf16;

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vf splat(float v) { return v - (vf){0}; }

/* a where the mask is set, else b. */
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* Of both: b where either is no number. */
INLINE vf maximum(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE vf minimum(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

INLINE vf load_bf16(const bf16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vu wide = __builtin_convertvector(*(const vh_any *)p, vu);
    return (vf)(wide << 16);
#endif
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE void store_bf16(bf16 *p, vf v) {
#if HAS_BF16_DOT
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &narrow, 32);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu quiet = (bits >> 16) | 0x40;
    vi is_nan = v != v;
    vu result = ((vu)is_nan & quiet) | (~(vu)is_nan & rounded);
    *(vh_any *)p = __builtin_convertvector(result, vh);
#endif
}

/* Of numbers that bf16 holds exactly. */
INLINE void store_high(bf16 *p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)((vu)v >> 16)));
#elif defined(__AVX2__)
    const __m256i high = _mm256_srli_epi32((__m256i)v, 16), packed = _mm256_packus_epi32(high, high);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    *(vh_any *)p = __builtin_convertvector((vu)v >> 16, vh);
#endif
}

INLINE float sum(vf v) {
    float parts[LANES];
    memcpy(parts, &v, sizeof parts);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

/* e^x to about 1 ulp for x up to 88, where it stays; 0 from -104 down, -infinity included. After Cephes: with
 * x = n ln 2 + r, a polynomial in r, times 2^n. */
INLINE vf exponential(vf x) {
    x = minimum(splat(88.0f), maximum(splat(-120.0f), x));
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    /* In two factors: 2^n alone may be too small to write down. */
    vi half = __builtin_convertvector(n, vi) >> 1, rest = __builtin_convertvector(n, vi) - half;
    return p * (vf)((half + 127) << 23) * (vf)((rest + 127) << 23);
#endif
}

/* 2^x for x up to 0, to about 1 ulp, and 0 below 2^-126: 2^n times a polynomial of degree 6 in the rest of x. NaN stays. */
INLINE vf power(vf x) {
    const vf n = (x + 12582912.0f) - 12582912.0f;
    const vf r = x - n;
    vf p = splat(1.5353362e-4f);
    p = p * r + 1.3398875e-3f;
    p = p * r + 9.6184369e-3f;
    p = p * r + 5.5503324e-2f;
    p = p * r + 2.4022648e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
    const vi exponent = ((vi)(x + 12582912.0f) + 127) << 23; /* the magic number's last bits are n */
    return (vf)(~(vi)(x < -126.0f) & (vi)(p * (vf)exponent));
#endif
}

#if HAS_BF16_DOT
/* 2^x for x up to 0, to the precision that bf16 keeps, and 0 below 2^-120: 2^n times a polynomial of degree 3 in the
 * rest of x. */
INLINE vf narrow_power(vf x) {
    vf n = (x + 12582912.0f) - 12582912.0f;
    vf r = x - n;
    vf p = ((r * 0.05500861f + 0.24221022f) * r + 0.69328288f) * r + 1.0f;
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)n, _mm512_set1_ps(-120.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
}
#endif

INLINE vf silu(vf x) { return x / (1.0f + exponential(-x)); }

/* bf16 or fp32 memory behind one pair of calls; `wide` is a constant wherever it matters. */
INLINE vf load_as(int wide, const void *p, int64_t index) {
    return wide ? load((const float *)p + index) : load_bf16((const bf16 *)p + index);
}
INLINE void store_as(int wide, void *p, int64_t index, vf v) {
    if (wide)
        store((float *)p + index, v);
    else
        store_bf16((bf16 *)p + index, v);
}

#endif
