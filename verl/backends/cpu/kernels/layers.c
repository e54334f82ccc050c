// Norms and gates: rows of numbers, one after the other.

#include "common.h"

// x, out (rows, n); weight (n).
void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t n, float eps, float offset,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const float factor = rms_factor(x + r * n, n, eps);
        for (int64_t i = 0; i < n; ++i) out[r * n + i] = (offset + weight[i]) * (x[r * n + i] * factor);
    }
}

// gate, up, out (n)
void silu_mul(float *out, const float *gate, const float *up, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; ++i) out[i] = times_sigmoid(gate[i], gate[i]) * up[i];
}
