// What PyTorch has no fast CPU operation for. Tensors are fp32 and contiguous in the order that each comment gives;
// verl/utils/cpu_kernels/__init__.py says what each function computes.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

// Tokens whose keys (or values) one query head after the other reads while they are in the first-level cache.
enum { TILE = 64 };

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

// s[h][j] = q[h] . k[j] for g query heads and n tokens; rows of s are ld apart.
INLINE void scores_of(float *restrict s, int64_t ld, const float *restrict q, const float *restrict k, int64_t n, int g,
                      int d) {
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t end = start + TILE < n ? start + TILE : n;
        for (int h = 0; h < g; ++h)
            for (int64_t j = start; j < end; ++j) {
                float sum = 0;
                for (int i = 0; i < d; ++i) sum += q[h * d + i] * k[j * d + i];
                s[h * ld + j] = sum;
            }
    }
}

// out[h] += sum_j p[h][j] v[j]
INLINE void add_values(float *restrict out, const float *restrict p, int64_t ld, const float *restrict v, int64_t n,
                       int g, int d) {
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t end = start + TILE < n ? start + TILE : n;
        for (int h = 0; h < g; ++h) {
            float sum[d];  // stays in registers where d is known to the compiler
            memcpy(sum, out + h * d, sizeof(float) * d);
            for (int64_t j = start; j < end; ++j)
                for (int i = 0; i < d; ++i) sum[i] += p[h * ld + j] * v[j * d + i];
            memcpy(out + h * d, sum, sizeof(float) * d);
        }
    }
}

INLINE void softmax(float *p, int64_t n, float scale) {
    float largest = p[0], sum = 0;
    for (int64_t j = 1; j < n; ++j) largest = p[j] > largest ? p[j] : largest;
    for (int64_t j = 0; j < n; ++j) {
        p[j] = exp_f32((p[j] - largest) * scale);
        sum += p[j];
    }
    const float factor = 1 / sum;
    for (int64_t j = 0; j < n; ++j) p[j] *= factor;
}

// One row and one key/value head: g query heads over n_shared tokens of the prompt and n_own of the response.
INLINE void attend(float *out, float *s, const float *q, const float *shared_k, const float *shared_v, int64_t n_shared,
                   const float *own_k, const float *own_v, int64_t n_own, float scale, int g, int d) {
    const int64_t n = n_shared + n_own;
    scores_of(s, n, q, shared_k, n_shared, g, d);
    scores_of(s + n_shared, n, q, own_k, n_own, g, d);
    for (int h = 0; h < g; ++h) softmax(s + h * n, n, scale);
    memset(out, 0, sizeof(float) * g * d);
    add_values(out, s, n, shared_v, n_shared, g, d);
    add_values(out, s + n_shared, n, own_v, n_own, g, d);
}

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

// 1 / sqrt(mean(x^2) + eps)
INLINE float rms_factor(const float *x, int64_t n, float eps) {
    float squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / n + eps);
}

// What happens to a head of a query or key before attention. weight: of an RMS norm over the head, or NULL;
// cos, sin: of its position, (d), or NULL.
INLINE void prepare_head(float *out, const float *x, const float *weight, float eps, float offset, const float *cos,
                         const float *sin, int d) {
    if (weight) {
        const float factor = rms_factor(x, d, eps);
        for (int i = 0; i < d; ++i) out[i] = (offset + weight[i]) * (x[i] * factor);
    } else {
        memcpy(out, x, sizeof(float) * d);
    }
    if (cos)
        for (int i = 0, j = d / 2; i < d / 2; ++i, ++j) {
            const float a = out[i], b = out[j];
            out[i] = a * cos[i] - b * sin[i];
            out[j] = b * cos[j] + a * sin[j];
        }
}

// q, out (rows, heads, d); new_k, new_v (rows, kv, d); q_weight, k_weight (d) and cos, sin (rows, d) as for
// prepare_head; own_k, own_v (slots, kv, own_room, d); shared_k, shared_v (prompts, kv, shared_room, d); the four
// after them (rows). Returns 0, or 1 if there is no memory for the scores.
int decode_attention(float *out, const float *q, const float *new_k, const float *new_v, const float *q_weight,
                     const float *k_weight, const float *cos, const float *sin, float *own_k, float *own_v,
                     const float *shared_k, const float *shared_v, const int64_t *slots, const int64_t *own_lengths,
                     const int64_t *prompts, const int64_t *shared_lengths, int64_t rows, int64_t heads, int64_t kv,
                     int64_t d, int64_t own_room, int64_t shared_room, int64_t window, float scale, float eps,
                     float offset, int threads) {
    const int64_t g = heads / kv;
    int64_t longest = 0;
    for (int64_t r = 0; r < rows; ++r) longest = at_least(longest, shared_lengths[r] + own_lengths[r] + 1);
    const int64_t workspace = (longest + d) * g;  // scores, and the queries ready for use
    float *space = malloc(sizeof(float) * workspace * threads);
    if (space == NULL) return 1;
    // Each thread takes neighbouring rows of one head: siblings find their prompt in its cache.
    const int64_t tasks = rows * kv, share = (tasks + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static, share)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t h = task / rows, r = task % rows;
        const float *own_cos = cos ? cos + r * d : NULL, *own_sin = sin ? sin + r * d : NULL;
        float *ready = space + task / share * workspace, *scores = ready + g * d;
        float *k = own_k + (slots[r] * kv + h) * own_room * d, *v = own_v + (slots[r] * kv + h) * own_room * d;
        prepare_head(k + own_lengths[r] * d, new_k + (r * kv + h) * d, k_weight, eps, offset, own_cos, own_sin, d);
        memcpy(v + own_lengths[r] * d, new_v + (r * kv + h) * d, sizeof(float) * d);
        for (int64_t i = 0; i < g; ++i)
            prepare_head(ready + i * d, q + (r * heads + h * g + i) * d, q_weight, eps, offset, own_cos, own_sin, d);

        const int64_t unseen = window > 0 ? at_least(shared_lengths[r] + own_lengths[r] + 1 - window, 0) : 0;
        const int64_t skip = at_most(unseen, shared_lengths[r]), skip_own = unseen - skip;
        const int64_t prompt = (prompts[r] * kv + h) * shared_room + skip;
        const int64_t n_shared = shared_lengths[r] - skip, n_own = own_lengths[r] + 1 - skip_own;
        const float *pk = shared_k + prompt * d, *pv = shared_v + prompt * d;
        float *o = out + (r * heads + h * g) * d;
        k += skip_own * d, v += skip_own * d;
        if (d == 64) attend(o, scores, ready, pk, pv, n_shared, k, v, n_own, scale, g, 64);
        else if (d == 128) attend(o, scores, ready, pk, pv, n_shared, k, v, n_own, scale, g, 128);
        else attend(o, scores, ready, pk, pv, n_shared, k, v, n_own, scale, g, d);
    }
    free(space);
    return 0;
}

// x, out (rows, n); weight (n); added (rows, n) is first added to x in place, unless it is NULL.
void rms_norm(float *out, float *x, const float *added, const float *weight, int64_t rows, int64_t n, float eps,
              float offset, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        float *row = x + r * n;
        if (added)
            for (int64_t i = 0; i < n; ++i) row[i] += added[r * n + i];
        const float factor = rms_factor(row, n, eps);
        for (int64_t i = 0; i < n; ++i) out[r * n + i] = (offset + weight[i]) * (row[i] * factor);
    }
}

// gate, up, out (n)
void silu_mul(float *out, const float *gate, const float *up, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const float x = gate[i], e = exp_f32(x < 0 ? x : -x);  // of a number that is not positive: no overflow
        out[i] = x * (x < 0 ? e : 1.0f) / (1.0f + e) * up[i];
    }
}

// ---- causal attention of packed sequences, forward and backward ------------------------------------------------------
//
// One task is one sequence and one key/value head. Its keys and values are copied into buffers whose rows are padded
// with zeros to whole registers; queries come in blocks. Memory grows with the length of a sequence, not its square.

enum { BLOCK = 32, LANES = 32, ROWS = 4 };

static int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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
