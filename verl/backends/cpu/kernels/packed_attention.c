// Causal attention of packed sequences, forward and backward.
//
// One task is one sequence and one key/value head, whose keys and values are laid out in panels once. Queries come in
// blocks, and of a block's scores only those panels are computed that some token of a tile of rows sees. Memory grows
// with the length of a sequence, not its square.

#include "products.h"

enum { BLOCK = 16 * HEIGHT };

static int64_t longest_sequence(const int64_t *starts, int64_t sequences) {
    int64_t longest = 1;
    for (int64_t i = 0; i < sequences; ++i) longest = at_least(longest, starts[i + 1] - starts[i]);
    return longest;
}

// The first key that query i sees.
static int64_t first_seen(int64_t i, int64_t window) { return window > 0 ? at_least(i + 1 - window, 0) : 0; }

// Panels (rows, WIDTH) of d features, of rows that are `apart` from each other; each panel has room for `room` rows.
static void pack_rows(float *to, int64_t room, const float *from, int64_t apart, int64_t rows, int64_t d) {
    for (int64_t p = 0; p < panels_of(d); ++p) pack_panel(to + p * room * WIDTH, from, apart, 1, rows, d, p);
}

// Panels (d, WIDTH) of n columns, which are `apart` from each other.
static void pack_columns(float *to, const float *from, int64_t apart, int64_t n, int64_t d) {
    for (int64_t p = 0; p < panels_of(n); ++p) pack_panel(to + p * d * WIDTH, from, 1, apart, d, n, p);
}

// s (rows, ...) = a b for panels first to last of b, made by pack_columns; a: from pack_rows, with room for BLOCK rows.
static void scores(float *s, int64_t lds, const float *a, const float *b, int64_t rows, int64_t d, int64_t first, int64_t last) {
    for (int64_t p = first; p <= last; ++p)
        for (int64_t from = 0; from < d; from += WIDTH)
            product(s + p * WIDTH, lds, a + from * BLOCK, WIDTH, 1, b + (p * d + from) * WIDTH, at_most(WIDTH, d - from), rows,
                    WIDTH, from > 0);
}

// Whether j is one of first to last, for loops that are to use SIMD.
INLINE int is_between(int32_t j, int32_t first, int32_t last) { return (uint32_t)(j - first) <= (uint32_t)(last - first); }

typedef int32_t Places __attribute__((vector_size(sizeof(int32_t) * LANES), may_alias));

// a where the mask is all ones, b where it is zeros.
INLINE Lanes chosen(Places mask, Lanes a, Lanes b) { return (Lanes)(((Places)a & mask) | ((Places)b & ~mask)); }

// p[j] = e^(p[j] - largest) for the keys first to last that this row sees, 0 for others of from to `to`, whole panels.
static void exponentials(float *restrict p, int64_t from, int64_t to, int64_t first, int64_t last, float *sum, float *largest) {
    const Lanes own = (Lanes){0} + p[last];
    Lanes most = own;
    Places place = {0};
    for (int x = 0; x < LANES; ++x) place[x] = from + x;
    for (int64_t j = from; j < to; j += LANES, place += LANES) {
        const Lanes value = chosen((place >= (int32_t)first) & (place <= (int32_t)last), *(Lanes *)(p + j), own);
        *(Lanes *)(p + j) = value;
        most = chosen(value > most, value, most);
    }
    float sums[LANES] = {0};
    float top = most[0], all = 0;
    for (int x = 1; x < LANES; ++x) top = most[x] > top ? most[x] : top;
    for (int64_t j = from; j < to; j += LANES)
        for (int x = 0; x < LANES; ++x) {
            p[j + x] = exp_f32(p[j + x] - top) * (is_between(j + x, first, last) ? 1.0f : 0.0f);
            sums[x] += p[j + x];
        }
    for (int x = 0; x < LANES; ++x) all += sums[x];
    *sum = all;
    *largest = top;
}

// q, out (tokens, heads, d); k, v (keys, kv, d); log_sums (tokens, heads), the log of each softmax's denominator;
// starts (sequences + 1) of queries, key_starts of keys: the queries are of the last tokens of their sequence. Returns 0,
// or 1 if there is no memory.
int attention_forward(float *out, float *log_sums, const float *q, const float *k, const float *v,
                      const int64_t *starts, const int64_t *key_starts, int64_t sequences, int64_t heads, int64_t kv,
                      int64_t d, int64_t window, float scale, int threads) {
    const int64_t g = heads / kv, longest = longest_sequence(key_starts, sequences), d_panels = panels_of(d);
    const int64_t lds = apart(padded(longest, WIDTH)), room = padded(longest, WIDTH);
    const int64_t own_space = room * d + d_panels * (longest + BLOCK) * WIDTH + BLOCK * lds;
    float *const space = allocate(threads * padded(own_space, 16));
    if (space == NULL) return 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < sequences * kv; ++task) {
        const int64_t start = starts[task / kv], n = starts[task / kv + 1] - start, h = task % kv;
        const int64_t key_start = key_starts[task / kv], n_keys = key_starts[task / kv + 1] - key_start;
        const int64_t before = n_keys - n;  // position of the first query
        float *next = space + THIS_THREAD * padded(own_space, 16);
        float *const keys = take(&next, room * d), *const values = take(&next, d_panels * longest * WIDTH);
        float *const queries = take(&next, d_panels * BLOCK * WIDTH), *const s = next;
        pack_columns(keys, k + (key_start * kv + h) * d, kv * d, n_keys, d);
        pack_rows(values, longest, v + (key_start * kv + h) * d, kv * d, n_keys, d);
        for (int64_t head = h * g; head < (h + 1) * g; ++head)
            for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
                const int64_t rows = at_most(BLOCK, n - i0), at = ((start + i0) * heads + head) * d;
                pack_rows(queries, BLOCK, q + at, heads * d, rows, d);
                for (int64_t i = 0; i < d_panels * BLOCK * WIDTH; ++i) queries[i] *= scale;
                for (int64_t r0 = 0; r0 < rows; r0 += HEIGHT) {
                    const int64_t height = at_most(HEIGHT, rows - r0), first = before + i0 + r0, last = first + height - 1;
                    const int64_t first_panel = first_seen(first, window) / WIDTH, from = first_panel * WIDTH;
                    float *const tile = s + r0 * lds, *const to = out + at + r0 * heads * d;
                    float sums[HEIGHT];
                    scores(tile, lds, queries + r0 * WIDTH, keys, height, d, first_panel, last / WIDTH);
                    for (int64_t r = 0; r < height; ++r) {
                        const int64_t i = first + r;
                        float largest;
                        exponentials(tile + r * lds, from, padded(last + 1, WIDTH), first_seen(i, window), i, &sums[r], &largest);
                        log_sums[(start + i - before) * heads + head] = largest + logf(sums[r]);
                    }
                    for (int64_t p = 0; p < d_panels; ++p)
                        product(to + p * WIDTH, heads * d, tile + from, lds, 1, values + (p * longest + from) * WIDTH,
                                last + 1 - from, height, at_most(WIDTH, d - p * WIDTH), 0);
                    for (int64_t r = 0; r < height; ++r)
                        for (int64_t x = 0; x < d; ++x) to[r * heads * d + x] *= 1.0f / sums[r];
                }
            }
    }
    free(space);
    return 0;
}

// Gradients of q, k, v from that of out; the others as in attention_forward.
int attention_backward(float *of_q, float *of_k, float *of_v, const float *of_out, const float *out,
                       const float *log_sums, const float *q, const float *k, const float *v, const int64_t *starts,
                       const int64_t *key_starts, int64_t sequences, int64_t heads, int64_t kv, int64_t d, int64_t window, float scale,
                       int threads) {
    const int64_t g = heads / kv, longest = longest_sequence(key_starts, sequences), d_panels = panels_of(d);
    const int64_t lds = apart(padded(longest, WIDTH)), room = padded(longest, WIDTH), wide = d_panels * WIDTH;
    const int64_t own_space = 2 * room * d + wide * (3 * longest + 2 * BLOCK) + 2 * BLOCK * lds;
    float *const space = allocate(threads * padded(own_space, 16));
    if (space == NULL) return 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < sequences * kv; ++task) {
        const int64_t start = starts[task / kv], n = starts[task / kv + 1] - start, h = task % kv;
        const int64_t key_start = key_starts[task / kv], n_keys = key_starts[task / kv + 1] - key_start;
        const int64_t before = n_keys - n;  // position of the first query
        float *next = space + THIS_THREAD * padded(own_space, 16);
        float *const key_columns = take(&next, room * d), *const value_columns = take(&next, room * d);
        float *const keys = take(&next, wide * longest), *const of_keys = take(&next, wide * longest);
        float *const of_values = take(&next, wide * longest), *const queries = take(&next, wide * BLOCK);
        float *const grads = take(&next, wide * BLOCK), *const s = take(&next, BLOCK * lds), *const of_s = next;
        pack_columns(key_columns, k + (key_start * kv + h) * d, kv * d, n_keys, d);
        pack_columns(value_columns, v + (key_start * kv + h) * d, kv * d, n_keys, d);
        pack_rows(keys, longest, k + (key_start * kv + h) * d, kv * d, n_keys, d);
        memset(of_keys, 0, sizeof(float) * n_keys * wide);
        memset(of_values, 0, sizeof(float) * n_keys * wide);
        for (int64_t head = h * g; head < (h + 1) * g; ++head)
            for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
                const int64_t rows = at_most(BLOCK, n - i0), at = ((start + i0) * heads + head) * d;
                const int64_t at_key = before + i0;  // position of the first query of the block
                const int64_t begin = first_seen(at_key, window) / WIDTH * WIDTH, end = padded(at_key + rows, WIDTH);
                pack_rows(queries, BLOCK, q + at, heads * d, rows, d);
                pack_rows(grads, BLOCK, of_out + at, heads * d, rows, d);
                for (int64_t i = 0; i < wide * BLOCK; ++i) queries[i] *= scale;
                for (int64_t r0 = 0; r0 < rows; r0 += HEIGHT) {
                    const int64_t height = at_most(HEIGHT, rows - r0), last = at_key + r0 + height - 1;
                    const int64_t first_panel = first_seen(at_key + r0, window) / WIDTH;
                    const int64_t from = first_panel * WIDTH, to = padded(last + 1, WIDTH);
                    float *const tile = s + r0 * lds, *const of_tile = of_s + r0 * lds, *const of_rows = of_q + at + r0 * heads * d;
                    scores(tile, lds, queries + r0 * WIDTH, key_columns, height, d, first_panel, last / WIDTH);
                    scores(of_tile, lds, grads + r0 * WIDTH, value_columns, height, d, first_panel, last / WIDTH);
                    for (int64_t r = 0; r < height; ++r) {
                        const int64_t i = at_key + r0 + r, first = first_seen(i, window), row = at + (r0 + r) * heads * d;
                        const float log_sum = log_sums[(start + i - before) * heads + head];
                        float *const p = tile + r * lds, *const of_p = of_tile + r * lds, dot = 0;
                        for (int64_t x = 0; x < d; ++x) dot += of_out[row + x] * out[row + x];
                        for (int64_t j = from; j < to; j += LANES)
                            for (int x = 0; x < LANES; ++x) {
                                const float e = exp_f32(p[j + x] - log_sum), of = e * (of_p[j + x] - dot);
                                const int is_seen = is_between(j + x, first, i);
                                p[j + x] = is_seen ? e : 0.0f;
                                of_p[j + x] = is_seen ? of : 0.0f;
                            }
                        memset(p + begin, 0, sizeof(float) * (from - begin));
                        memset(of_p + begin, 0, sizeof(float) * (from - begin));
                        memset(p + to, 0, sizeof(float) * (end - to));
                        memset(of_p + to, 0, sizeof(float) * (end - to));
                    }
                    for (int64_t c = 0; c < d_panels; ++c)
                        product(of_rows + c * WIDTH, heads * d, of_tile + from, lds, 1, keys + (c * longest + from) * WIDTH,
                                last + 1 - from, height, at_most(WIDTH, d - c * WIDTH), 0);
                    for (int64_t r = 0; r < height; ++r)
                        for (int64_t x = 0; x < d; ++x) of_rows[r * heads * d + x] *= scale;
                }
                // `queries` carry the scale, so the gradients of keys do. Rows before key j do not see it.
                for (int64_t j = begin; j < at_key + rows; j += HEIGHT) {
                    const int64_t height = at_most(HEIGHT, at_key + rows - j), r0 = at_least(j - at_key, 0);
                    for (int64_t c = 0; c < d_panels; ++c) {
                        const int64_t b = (c * BLOCK + r0) * WIDTH;
                        product(of_keys + j * wide + c * WIDTH, wide, of_s + r0 * lds + j, 1, lds, queries + b, rows - r0, height,
                                WIDTH, 1);
                        product(of_values + j * wide + c * WIDTH, wide, s + r0 * lds + j, 1, lds, grads + b, rows - r0, height,
                                WIDTH, 1);
                    }
                }
            }
        for (int64_t i = 0; i < n_keys; ++i) {
            memcpy(of_k + ((key_start + i) * kv + h) * d, of_keys + i * wide, sizeof(float) * d);
            memcpy(of_v + ((key_start + i) * kv + h) * d, of_values + i * wide, sizeof(float) * d);
        }
    }
    free(space);
    return 0;
}
