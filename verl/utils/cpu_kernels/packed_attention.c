// Causal attention of packed sequences, forward and backward.
//
// One task is one sequence and one key/value head. Its keys and values are copied into buffers whose rows are padded
// with zeros to whole registers; queries come in blocks. Memory grows with the length of a sequence, not its square.

#include "common.h"

enum { BLOCK = 32, LANES = 32, ROWS = 4 };

// c (m, n) (+)= a b, with b (k, n); a[i][l] = a[i * a_row + l * a_col]. m is a multiple of ROWS, n of LANES.
static void product(float *restrict c, int64_t ldc, const float *restrict a, int64_t a_row, int64_t a_col,
                    const float *restrict b, int64_t ldb, int64_t m, int64_t n, int64_t k, int adds) {
    for (int64_t j = 0; j < n; j += LANES)
        for (int64_t i = 0; i < m; i += ROWS) {
            float sum[ROWS][LANES];
            for (int r = 0; r < ROWS; ++r)
                for (int x = 0; x < LANES; ++x) sum[r][x] = adds ? c[(i + r) * ldc + j + x] : 0.0f;
            for (int64_t l = 0; l < k; ++l)
                for (int r = 0; r < ROWS; ++r) {
                    const float factor = a[(i + r) * a_row + l * a_col];
                    for (int x = 0; x < LANES; ++x) sum[r][x] += factor * b[l * ldb + j + x];
                }
            for (int r = 0; r < ROWS; ++r)
                for (int x = 0; x < LANES; ++x) c[(i + r) * ldc + j + x] = sum[r][x];
        }
}

// to (n, ld) from rows of d numbers that are `apart` from each other, times a factor; what is beyond stays.
static void gather(float *to, int64_t ld, const float *from, int64_t apart, int64_t n, int64_t d, float factor) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t x = 0; x < d; ++x) to[i * ld + x] = from[i * apart + x] * factor;
}

static void gather_transposed(float *to, int64_t ld, const float *from, int64_t apart, int64_t n, int64_t d) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t x = 0; x < d; ++x) to[x * ld + i] = from[i * apart + x];
}

// The first key that query i sees.
static int64_t first_seen(int64_t i, int64_t window) { return window > 0 ? at_least(i + 1 - window, 0) : 0; }

// q, out (tokens, heads, d); k, v (tokens, kv, d); log_sums (tokens, heads), the log of each softmax's denominator;
// starts (sequences + 1). Returns 0, or 1 if there is no memory.
int attention_forward(float *out, float *log_sums, const float *q, const float *k, const float *v,
                      const int64_t *starts, int64_t sequences, int64_t heads, int64_t kv, int64_t d, int64_t window,
                      float scale, int threads) {
    const int64_t g = heads / kv, dp = padded(d, LANES);
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < sequences * kv; ++task) {
        const int64_t start = starts[task / kv], n = starts[task / kv + 1] - start, h = task % kv;
        const int64_t np = padded(n, LANES);
        float *space = calloc(2 * np * dp + BLOCK * (2 * dp + np), sizeof(float));
        if (space == NULL) {
            failed = 1;
            continue;
        }
        float *kt = space, *values = kt + np * dp, *queries = values + np * dp, *o = queries + BLOCK * dp, *s = o + BLOCK * dp;
        gather_transposed(kt, np, k + (start * kv + h) * d, kv * d, n, d);
        gather(values, dp, v + (start * kv + h) * d, kv * d, n, d, 1.0f);
        for (int64_t head = h * g; head < (h + 1) * g; ++head)
            for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
                const int64_t rows = at_most(BLOCK, n - i0), seen = padded(i0 + rows, LANES);
                const int64_t skip = first_seen(i0, window) / LANES * LANES;
                gather(queries, dp, q + ((start + i0) * heads + head) * d, heads * d, rows, d, scale);
                product(s + skip, np, queries, dp, 1, kt + skip, np, BLOCK, seen - skip, d, 0);
                for (int64_t r = 0; r < rows; ++r) {
                    float *p = s + r * np, largest = p[i0 + r], sum = 0;
                    const int64_t first = first_seen(i0 + r, window);
                    for (int64_t j = first; j < i0 + r; ++j) largest = p[j] > largest ? p[j] : largest;
                    for (int64_t j = skip; j < first; ++j) p[j] = 0;
                    for (int64_t j = first; j <= i0 + r; ++j) {
                        p[j] = exp_f32(p[j] - largest);
                        sum += p[j];
                    }
                    for (int64_t j = i0 + r + 1; j < seen; ++j) p[j] = 0;
                    for (int64_t j = first; j <= i0 + r; ++j) p[j] /= sum;
                    log_sums[(start + i0 + r) * heads + head] = largest + logf(sum);
                }
                product(o, dp, s + skip, np, 1, values + skip * dp, dp, BLOCK, dp, at_most(seen, n) - skip, 0);
                for (int64_t r = 0; r < rows; ++r)
                    memcpy(out + ((start + i0 + r) * heads + head) * d, o + r * dp, sizeof(float) * d);
            }
        free(space);
    }
    return failed;
}

// Gradients of q, k, v from that of out; the others as in attention_forward.
int attention_backward(float *of_q, float *of_k, float *of_v, const float *of_out, const float *out,
                       const float *log_sums, const float *q, const float *k, const float *v, const int64_t *starts,
                       int64_t sequences, int64_t heads, int64_t kv, int64_t d, int64_t window, float scale,
                       int threads) {
    const int64_t g = heads / kv, dp = padded(d, LANES);
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < sequences * kv; ++task) {
        const int64_t start = starts[task / kv], n = starts[task / kv + 1] - start, h = task % kv;
        const int64_t np = padded(n, LANES);
        float *space = calloc(5 * np * dp + BLOCK * (3 * dp + 2 * np), sizeof(float));
        if (space == NULL) {
            failed = 1;
            continue;
        }
        float *keys = space, *kt = keys + np * dp, *vt = kt + np * dp, *gk = vt + np * dp, *gv = gk + np * dp;
        float *queries = gv + np * dp, *go = queries + BLOCK * dp, *gq = go + BLOCK * dp, *p = gq + BLOCK * dp, *gs = p + BLOCK * np;
        gather(keys, dp, k + (start * kv + h) * d, kv * d, n, d, 1.0f);
        gather_transposed(kt, np, k + (start * kv + h) * d, kv * d, n, d);
        gather_transposed(vt, np, v + (start * kv + h) * d, kv * d, n, d);
        for (int64_t head = h * g; head < (h + 1) * g; ++head)
            for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
                const int64_t rows = at_most(BLOCK, n - i0), seen = padded(i0 + rows, LANES);
                const int64_t skip = first_seen(i0, window) / LANES * LANES, width = at_most(seen, n) - skip;
                const int64_t at = ((start + i0) * heads + head) * d;
                gather(queries, dp, q + at, heads * d, rows, d, scale);
                gather(go, dp, of_out + at, heads * d, rows, d, 1.0f);
                product(p + skip, np, queries, dp, 1, kt + skip, np, BLOCK, seen - skip, d, 0);
                product(gs + skip, np, go, dp, 1, vt + skip, np, BLOCK, seen - skip, d, 0);
                for (int64_t r = 0; r < BLOCK; ++r) {
                    float *row = p + r * np, *g_row = gs + r * np, dot = 0;
                    const int64_t first = r < rows ? first_seen(i0 + r, window) : seen, last = r < rows ? i0 + r : seen - 1;
                    const float log_sum = r < rows ? log_sums[(start + i0 + r) * heads + head] : 0;
                    if (r < rows)
                        for (int64_t x = 0; x < d; ++x) dot += go[r * dp + x] * out[at + r * heads * d + x];
                    for (int64_t j = skip; j < at_most(first, seen); ++j) row[j] = g_row[j] = 0;
                    for (int64_t j = first; j <= last; ++j) {
                        row[j] = exp_f32(row[j] - log_sum);
                        g_row[j] = row[j] * (g_row[j] - dot);
                    }
                    for (int64_t j = last + 1; j < seen; ++j) row[j] = g_row[j] = 0;
                }
                // `queries` carry the scale, so the gradients of keys do; those of queries get it at the end.
                product(gq, dp, gs + skip, np, 1, keys + skip * dp, dp, BLOCK, dp, width, 0);
                product(gk + skip * dp, dp, gs + skip, 1, np, queries, dp, seen - skip, dp, rows, 1);
                product(gv + skip * dp, dp, p + skip, 1, np, go, dp, seen - skip, dp, rows, 1);
                for (int64_t r = 0; r < rows; ++r)
                    for (int64_t x = 0; x < d; ++x) of_q[at + r * heads * d + x] = gq[r * dp + x] * scale;
            }
        for (int64_t i = 0; i < n; ++i) {
            memcpy(of_k + ((start + i) * kv + h) * d, gk + i * dp, sizeof(float) * d);
            memcpy(of_v + ((start + i) * kv + h) * d, gv + i * dp, sizeof(float) * d);
        }
        free(space);
    }
    return failed;
}
