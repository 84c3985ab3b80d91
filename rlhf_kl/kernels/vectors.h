/* Vectors of floats as GCC and Clang know them, whatever the processor's own width, and functions of them. */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int64_t i64;
#define INLINE static inline __attribute__((always_inline, unused))
#define LOCAL static __attribute__((unused))
#define AT(p) (*(vec *)(p))
#define SPLAT(x) ((x) - (vec){0}) /* x - 0 is x; 0 + x is not where x is -0, and costs an addition */

LOCAL i64 min64(i64 a, i64 b) { return a < b ? a : b; }
LOCAL i64 max64(i64 a, i64 b) { return a > b ? a : b; }
LOCAL i64 up_to(i64 n, i64 step) { return (n + step - 1) / step * step; }
LOCAL float *room(i64 floats) { return aligned_alloc(64, up_to(4 * floats + 64, 64)); }

/* Sum and largest of a vector's numbers, always in the same order. */
#if defined(__AVX512F__)
INLINE float sum_of(vec x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float largest_of(vec x) { return _mm512_reduce_max_ps((__m512)x); }
#elif defined(__AVX__)
#define HALVED(name, op4, op1) \
    INLINE float name(vec x) { \
        __m128 a = op4(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1)); \
        a = op4(a, _mm_movehl_ps(a, a)); \
        return _mm_cvtss_f32(op1(a, _mm_movehdup_ps(a))); \
    }
HALVED(sum_of, _mm_add_ps, _mm_add_ss)
HALVED(largest_of, _mm_max_ps, _mm_max_ss)
#else
#error "made for AVX"
#endif

INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* exp to about an ulp, between exp(-87) and exp(88); NaN stays NaN. */
INLINE vec exp_of(vec any) {
    vec x = any;
    x = pick(x < SPLAT(-87.0f), SPLAT(-87.0f), x);
    x = pick(x > SPLAT(88.0f), SPLAT(88.0f), x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum's low bits are the rounded number */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = SPLAT(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return pick(any == any, (vec)((ivec)p + ((ivec)shifted << 23)), any);
}

/* 1 / x to about an ulp; a division takes several times as long. */
INLINE vec reciprocal(vec x) {
#if defined(__AVX512F__)
    vec y = (vec)_mm512_rcp14_ps((__m512)x);
    return y * (2.0f - x * y);
#else
    vec y = (vec)_mm256_rcp_ps((__m256)x);
    y = y * (2.0f - x * y);
    return y * (2.0f - x * y);
#endif
}

#define GELU_SCALE 1.5957691216f /* 2 sqrt(2 / pi) */
#define GELU_CUBE 0.044715f
/* GELU in its tanh form, u sigmoid(2 sqrt(2/pi) (u + 0.044715 u^3)), and its derivative. */
INLINE vec gelu(vec u, vec *slope) {
    vec square = u * u;
    vec s = reciprocal(1.0f + exp_of(-GELU_SCALE * u * (1.0f + GELU_CUBE * square)));
    vec y = u * s;
    if (slope) *slope = s + y * (1.0f - s) * (GELU_SCALE + 3.0f * GELU_SCALE * GELU_CUBE * square);
    return y;
}
