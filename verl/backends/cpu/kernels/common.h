// What the kernels share. Tensors are fp32 and contiguous in the order that each comment gives;
// verl/backends/cpu/kernels says what each function computes.

#ifndef VERL_COMMON_H
#define VERL_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#define THIS_THREAD omp_get_thread_num()
#define ALL_THREADS omp_get_num_threads()
#else
#define THIS_THREAD 0
#define ALL_THREADS 1
#endif

#define INLINE static inline __attribute__((always_inline))

// The sums of a matrix product that are in registers at once are SUMS registers, in rows of at most VECTORS.
#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4, SUMS = 24 };  // of 32 registers
#elif defined(__ARM_NEON)
enum { LANES = 4, VECTORS = 4, SUMS = 24 };
#elif defined(__AVX__)
enum { LANES = 8, VECTORS = 2, SUMS = 12 };  // of 16
#else
enum { LANES = 4, VECTORS = 2, SUMS = 12 };
#endif

typedef float Lanes __attribute__((vector_size(sizeof(float) * LANES), aligned(sizeof(float)), may_alias));

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// e^x to about 2 ulp for x <= 0 (and up to 88): 2^n times a polynomial in x - n ln 2, which compilers turn into SIMD code.
INLINE float exp_f32(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = rintf(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, so that little is lost
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return p * power.value;
}

// value / (1 + e^-x); the e^ below is of a number that is not positive, so nothing overflows.
INLINE float times_sigmoid(float value, float x) {
    const float e = exp_f32(x < 0 ? x : -x);
    return value * (x < 0 ? e : 1.0f) / (1.0f + e);
}

// gelu by its formula with tanh is x sigmoid(GELU_SLOPE (x + GELU_CUBE x^3)), GELU_SLOPE = 2 sqrt(2 / pi).
#define GELU_SLOPE 1.5957691216f
#define GELU_CUBE 0.044715f

// x sigmoid(x), or gelu.
INLINE float activated(float x, int is_gelu) {
    return times_sigmoid(x, is_gelu ? GELU_SLOPE * (x + GELU_CUBE * x * x * x) : x);
}

// 1 / sqrt(mean(x^2) + eps)
INLINE float rms_factor(const float *x, int64_t n, float eps) {
    float squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / n + eps);
}

#endif
