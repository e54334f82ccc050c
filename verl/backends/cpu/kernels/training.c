// The parts of a decoder's layer in training, forward and backward, each one pass over the tokens: a thread takes a few
// rows through norm, products, activation or rotation while they are in its cache.
//
// Gradients of weights are sums over all rows. They are taken over SPAN rows at a time, which all threads prepare
// together, and each thread then adds up features of its own: no thread needs a copy of the gradient.

#include "products.h"

enum { ROWS = 96, CHUNKS_AT_ONCE = 4 };

// weight: of an RMS norm whose factor is offset + weight; NULL is no norm. training.py has the same structs.
typedef struct {
    const float *weight;
    float eps, offset;
} Norm;

typedef struct {
    Norm norm;
    const float *gate, *up, *down;  // (inner, hidden) twice, (hidden, inner)
    int64_t rows, hidden, inner, is_gelu, adds;  // adds: the result is added to x
} FeedForward;

typedef struct {
    Norm norm, q_norm, k_norm;
    const float *weights[3], *biases[3];  // of q (heads d, hidden), of k and v (kv d, hidden); biases or NULL
    const float *cos, *sin;               // (rows, d / 2)
    int64_t rows, hidden, heads, kv, d;
} Heads;

typedef struct {
    const float *weight, *bias;  // (outputs, inputs); (outputs), or NULL
    int64_t rows, inputs, outputs;
} Projection;

// ---- space and shares --------------------------------------------------------------------------------------------------

static int64_t chunks_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

// Chunks that are prepared together, a multiple of the threads; 4 with 1, 2 or 4 threads, so that these give the same bits.
static int64_t chunks_at_once(int threads) { return (CHUNKS_AT_ONCE + threads - 1) / threads * threads; }

// to (n) = the sum over threads of from (n), which are `apart` from each other.
static void sum_of_threads(float *to, const float *from, int64_t n, int64_t apart, int team) {
    if (to == NULL) return;
    memset(to, 0, sizeof(float) * n);
    for (int t = 0; t < team; ++t)
        for (int64_t i = 0; i < n; ++i) to[i] += from[t * apart + i];
}

// One thread's share of the gradient of a weight: c (features, columns) (+)= aT b, with a (k, features) whose rows are
// lda apart and b in panels that are b_apart from each other.
static void weight_gradient(float *c, int64_t features, int64_t columns, const float *a, int64_t lda, const float *b,
                            int64_t b_apart, int64_t k, int adds, int thread, int threads) {
    enum { SOME = 16 * HEIGHT };
    const int64_t blocks = (features + SOME - 1) / SOME, tasks = blocks * panels_of(columns);
    for (int64_t task = tasks * thread / threads; task < tasks * (thread + 1) / threads; ++task) {
        const int64_t panel = features < columns ? task / blocks : task % panels_of(columns);  // the larger factor is read once
        const int64_t first = (features < columns ? task % blocks : task / panels_of(columns)) * SOME;
        product(c + first * columns + panel * WIDTH, columns, a + first, 1, lda, b + panel * b_apart, k,
                at_most(SOME, features - first), at_most(WIDTH, columns - panel * WIDTH), adds);
    }
}

// ---- norms and activations ---------------------------------------------------------------------------------------------

INLINE void norm_row(float *restrict out, const float *restrict x, const Norm *norm, int64_t n) {
    if (norm->weight == NULL) {
        memcpy(out, x, sizeof(float) * n);
        return;
    }
    const float factor = rms_factor(x, n, norm->eps);
    for (int64_t i = 0; i < n; ++i) out[i] = (norm->offset + norm->weight[i]) * (x[i] * factor);
}

// With y = x r f, r = 1 / sqrt(mean x^2 + eps) and g the gradient by y: that by x is (g f - x r mean(g f x r)) r, to
// which `other` is added unless it is NULL; that by f is the sum over rows of g x r.
INLINE void norm_row_backward(float *restrict of_x, float *restrict of_weight, const float *restrict g,
                              const float *restrict x, const float *restrict other, const Norm *norm, int64_t n) {
    if (norm->weight == NULL) {
        for (int64_t i = 0; i < n; ++i) of_x[i] = g[i] + (other ? other[i] : 0.0f);
        return;
    }
    const float factor = rms_factor(x, n, norm->eps);
    float dot = 0;
    for (int64_t i = 0; i < n; ++i) dot += g[i] * (norm->offset + norm->weight[i]) * x[i];
    const float mean = dot * factor / n * factor;
    for (int64_t i = 0; i < n; ++i) {
        of_x[i] = (g[i] * (norm->offset + norm->weight[i]) - x[i] * mean) * factor + (other ? other[i] : 0.0f);
        of_weight[i] += g[i] * (x[i] * factor);
    }
}

// hidden[r] = act(gate[r]) up[r]; gate, up (rows, WIDTH).
INLINE void gate_rows(float *restrict hidden, int64_t ld, const float *restrict gate, const float *restrict up, int64_t rows,
                      int is_gelu) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < WIDTH; ++i)
            hidden[r * ld + i] = activated(gate[r * WIDTH + i], is_gelu) * up[r * WIDTH + i];
}

// From the gradient g of `hidden` (rows, WIDTH), which becomes hidden itself, those of gate and up.
// act(a) = a s with s = sigmoid(z(a)), so act'(a) = s + a s (1 - s) z'(a).
INLINE void gate_rows_backward(float *restrict of_gate, float *restrict of_up, int64_t ld, float *restrict g,
                               const float *restrict gate, const float *restrict up, int64_t rows, int is_gelu) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < WIDTH; ++i) {
            const float a = gate[r * WIDTH + i], b = up[r * WIDTH + i], of_hidden = g[r * WIDTH + i];
            const float s = times_sigmoid(1.0f, is_gelu ? GELU_SLOPE * (a + GELU_CUBE * a * a * a) : a);
            const float slope = is_gelu ? GELU_SLOPE * (1.0f + 3.0f * GELU_CUBE * a * a) : 1.0f;
            const float active = a * s;
            of_gate[r * ld + i] = of_hidden * b * (s + active * (1.0f - s) * slope);
            of_up[r * ld + i] = of_hidden * active;
            g[r * WIDTH + i] = active * b;
        }
}

// ---- feed-forward ------------------------------------------------------------------------------------------------------

// Floats in `halves`: gate and up of each chunk of rows and panel of features, (chunks, panels, 2, ROWS, WIDTH).
int64_t feed_forward_kept(const FeedForward *f) { return chunks_of(f->rows) * panels_of(f->inner) * 2 * ROWS * WIDTH; }

// y, x (rows, hidden); halves: what the backward pass needs, or NULL. Returns 0, or 1 if there is no memory.
int feed_forward(const FeedForward *f, float *y, float *halves, const float *x, int threads) {
    const int64_t h = f->hidden, inner = f->inner, panels = panels_of(inner), out_panels = panels_of(h);
    const int64_t normed_apart = apart(h), hidden_apart = apart(panels * WIDTH);
    const int64_t own_space = ROWS * (normed_apart + hidden_apart + 2 * WIDTH);
    float *const space = allocate(2 * panels * h * WIDTH + out_panels * inner * WIDTH + threads * own_space);
    if (space == NULL) return 1;
    float *const gate = space, *const up = gate + panels * h * WIDTH, *const down = up + panels * h * WIDTH;
    float *const spaces = down + out_panels * inner * WIDTH;
#pragma omp parallel num_threads(threads)
    {
        const int thread = THIS_THREAD, team = ALL_THREADS;
        for (int64_t p = thread; p < panels; p += team) {
            pack_panel(gate + p * h * WIDTH, f->gate, 1, h, h, inner, p);
            pack_panel(up + p * h * WIDTH, f->up, 1, h, h, inner, p);
        }
        for (int64_t p = thread; p < out_panels; p += team) pack_panel(down + p * inner * WIDTH, f->down, 1, inner, inner, h, p);
#pragma omp barrier
        float *const normed = spaces + thread * own_space, *const hidden = normed + ROWS * normed_apart;
        const int64_t chunks = chunks_of(f->rows);
        for (int64_t chunk = chunks * thread / team; chunk < chunks * (thread + 1) / team; ++chunk) {
            const int64_t first = chunk * ROWS, rows = at_most(ROWS, f->rows - first);
            for (int64_t r = 0; r < rows; ++r) norm_row(normed + r * normed_apart, x + (first + r) * h, &f->norm, h);
            for (int64_t p = 0; p < panels; ++p) {
                float *const a = halves ? halves + (chunk * panels + p) * 2 * ROWS * WIDTH : hidden + ROWS * hidden_apart;
                float *const b = a + ROWS * WIDTH;
                product(a, WIDTH, normed, normed_apart, 1, gate + p * h * WIDTH, h, rows, WIDTH, 0);
                product(b, WIDTH, normed, normed_apart, 1, up + p * h * WIDTH, h, rows, WIDTH, 0);
                if (f->is_gelu) gate_rows(hidden + p * WIDTH, hidden_apart, a, b, rows, 1);
                else gate_rows(hidden + p * WIDTH, hidden_apart, a, b, rows, 0);
            }
            float *const to = y + first * h;
            if (f->adds) memcpy(to, x + first * h, sizeof(float) * rows * h);
            for (int64_t p = 0; p < out_panels; ++p)
                product(to + p * WIDTH, h, hidden, hidden_apart, 1, down + p * inner * WIDTH, inner, rows,
                        at_most(WIDTH, h - p * WIDTH), f->adds != 0);
        }
    }
    free(space);
    return 0;
}

// Gradients from that of y, `of_y`. of_gate and of_up, of_down, of_norm: may be NULL.
int feed_forward_backward(const FeedForward *f, float *of_x, float *of_norm, float *of_gate, float *of_up, float *of_down,
                          const float *of_y, const float *x, const float *halves, int threads) {
    const int64_t h = f->hidden, inner = f->inner, panels = panels_of(inner), out_panels = panels_of(h);
    const int64_t wide = panels * WIDTH, at_once = chunks_at_once(threads), span = at_once * ROWS;
    const int64_t grad_apart = apart(h), both_apart = apart(2 * wide);
    const int64_t own_space = ROWS * (WIDTH + grad_apart) + padded(h, 16);
    const int64_t needed = panels * h * WIDTH + out_panels * 2 * wide * WIDTH + span * (grad_apart + both_apart) +
                           span * WIDTH * (panels + out_panels) + threads * own_space;
    float *const space = allocate(needed);
    if (space == NULL) return 1;
    float *next = space;
    float *const down = take(&next, panels * h * WIDTH), *const fused = take(&next, out_panels * 2 * wide * WIDTH);
    float *const grads = take(&next, span * grad_apart), *const of_both = take(&next, span * both_apart);
    float *const hidden = take(&next, panels * span * WIDTH), *const normed = take(&next, out_panels * span * WIDTH);
#pragma omp parallel num_threads(threads)
    {
        const int thread = THIS_THREAD, team = ALL_THREADS;
        float *const tile = next + thread * own_space, *const of_normed = tile + ROWS * WIDTH;
        float *const own_norm = of_normed + ROWS * grad_apart;
        memset(own_norm, 0, sizeof(float) * h);
        for (int64_t p = thread; p < panels; p += team) pack_panel(down + p * h * WIDTH, f->down, inner, 1, h, inner, p);
        for (int64_t p = thread; p < out_panels; p += team) {
            float *const to = fused + p * 2 * wide * WIDTH;
            memset(to, 0, sizeof(float) * 2 * wide * WIDTH);
            pack_panel(to, f->gate, h, 1, inner, h, p);
            pack_panel(to + wide * WIDTH, f->up, h, 1, inner, h, p);
        }
#pragma omp barrier
        for (int64_t start = 0; start < f->rows; start += span) {
            const int64_t here = at_most(span, f->rows - start);
            for (int64_t c = thread; c < chunks_of(here); c += team) {
                const int64_t at = c * ROWS, first = start + at, rows = at_most(ROWS, f->rows - first);
                float *const g = grads + at * grad_apart, *const both = of_both + at * both_apart;
                for (int64_t r = 0; r < rows; ++r) {
                    memcpy(g + r * grad_apart, of_y + (first + r) * h, sizeof(float) * h);
                    norm_row(of_normed, x + (first + r) * h, &f->norm, h);
                    for (int64_t p = 0; p < out_panels; ++p)
                        memcpy(normed + (p * span + at + r) * WIDTH, of_normed + p * WIDTH,
                               sizeof(float) * at_most(WIDTH, h - p * WIDTH));
                }
                for (int64_t p = 0; p < panels; ++p) {
                    const float *const a = halves + (first / ROWS * panels + p) * 2 * ROWS * WIDTH, *const b = a + ROWS * WIDTH;
                    float *const active = hidden + (p * span + at) * WIDTH;
                    product(active, WIDTH, g, grad_apart, 1, down + p * h * WIDTH, h, rows, WIDTH, 0);
                    float *const to = both + p * WIDTH;
                    if (f->is_gelu) gate_rows_backward(to, to + wide, both_apart, active, a, b, rows, 1);
                    else gate_rows_backward(to, to + wide, both_apart, active, a, b, rows, 0);
                }
                for (int64_t p = 0; p < out_panels; ++p)
                    product(of_normed + p * WIDTH, grad_apart, both, both_apart, 1, fused + p * 2 * wide * WIDTH, 2 * wide,
                            rows, at_most(WIDTH, h - p * WIDTH), 0);
                for (int64_t r = 0; r < rows; ++r)
                    norm_row_backward(of_x + (first + r) * h, own_norm, of_normed + r * grad_apart, x + (first + r) * h,
                                      f->adds ? g + r * grad_apart : NULL, &f->norm, h);
            }
#pragma omp barrier
            const int adds = start > 0;
            if (of_down) weight_gradient(of_down, h, inner, grads, grad_apart, hidden, span * WIDTH, here, adds, thread, team);
            if (of_gate) {
                weight_gradient(of_gate, inner, h, of_both, both_apart, normed, span * WIDTH, here, adds, thread, team);
                weight_gradient(of_up, inner, h, of_both + wide, both_apart, normed, span * WIDTH, here, adds, thread, team);
            }
#pragma omp barrier
        }
#pragma omp single
        sum_of_threads(of_norm, next + (own_norm - tile), h, own_space, team);
    }
    free(space);
    return 0;
}

// ---- queries, keys and values ------------------------------------------------------------------------------------------

// The halves (a, b) of a head become (a cos - b sin, b cos + a sin), after an RMS norm if there is one.
INLINE void turn(float *restrict out, const float *restrict x, const Norm *norm, const float *restrict cos,
                 const float *restrict sin, int64_t d) {
    const int64_t half = d / 2;
    norm_row(out, x, norm, d);
    for (int64_t i = 0; i < half; ++i) {
        const float a = out[i], b = out[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

// Rotates g back, then of_x from it.
INLINE void turn_backward(float *restrict of_x, float *restrict of_weight, float *restrict turned,
                          const float *restrict g, const float *restrict x, const Norm *norm,
                          const float *restrict cos, const float *restrict sin, int64_t d) {
    const int64_t half = d / 2;
    for (int64_t i = 0; i < half; ++i) {
        turned[i] = g[i] * cos[i] + g[half + i] * sin[i];
        turned[half + i] = g[half + i] * cos[i] - g[i] * sin[i];
    }
    norm_row_backward(of_x, of_weight, turned, x, NULL, norm, d);
}

// The same with sizes that the compiler knows, for the usual ones.
static void prepare_head(float *out, const float *x, const Norm *norm, const float *cos, const float *sin, int64_t d) {
    if (d == 64) turn(out, x, norm, cos, sin, 64);
    else if (d == 128) turn(out, x, norm, cos, sin, 128);
    else turn(out, x, norm, cos, sin, d);
}

static void prepare_head_backward(float *of_x, float *of_weight, float *turned, const float *g, const float *x,
                                  const Norm *norm, const float *cos, const float *sin, int64_t d) {
    if (d == 64) turn_backward(of_x, of_weight, turned, g, x, norm, cos, sin, 64);
    else if (d == 128) turn_backward(of_x, of_weight, turned, g, x, norm, cos, sin, 128);
    else turn_backward(of_x, of_weight, turned, g, x, norm, cos, sin, d);
}

// q (rows, heads, d), k, v (rows, kv, d); before (rows, heads + kv, d): the heads before their norms, or NULL; x (rows,
// hidden). Returns 0, or 1 if there is no memory.
int project_heads(const Heads *s, float *q, float *k, float *v, float *before, const float *x, int threads) {
    const int64_t h = s->hidden, d = s->d, sizes[3] = {s->heads * d, s->kv * d, s->kv * d};
    const int64_t turned = sizes[0] + sizes[1], all = turned + sizes[2];
    const int64_t normed_apart = apart(h), found_apart = apart(all), own_space = ROWS * (normed_apart + found_apart);
    const int64_t counts[3] = {panels_of(sizes[0]), panels_of(sizes[1]), panels_of(sizes[2])};
    float *const space = allocate((counts[0] + counts[1] + counts[2]) * h * WIDTH + threads * own_space);
    if (space == NULL) return 1;
    float *packed[3] = {space, space + counts[0] * h * WIDTH, space + (counts[0] + counts[1]) * h * WIDTH};
    float *const spaces = packed[2] + counts[2] * h * WIDTH;
#pragma omp parallel num_threads(threads)
    {
        const int thread = THIS_THREAD, team = ALL_THREADS;
        for (int w = 0; w < 3; ++w)
            for (int64_t p = thread; p < counts[w]; p += team)
                pack_panel(packed[w] + p * h * WIDTH, s->weights[w], 1, h, h, sizes[w], p);
#pragma omp barrier
        float *const normed = spaces + thread * own_space, *const found = normed + ROWS * normed_apart;
        const int64_t chunks = chunks_of(s->rows);
        for (int64_t chunk = chunks * thread / team; chunk < chunks * (thread + 1) / team; ++chunk) {
            const int64_t first = chunk * ROWS, rows = at_most(ROWS, s->rows - first);
            for (int64_t r = 0; r < rows; ++r) norm_row(normed + r * normed_apart, x + (first + r) * h, &s->norm, h);
            for (int64_t w = 0, from = 0; w < 3; from += sizes[w++]) {
                if (s->biases[w])
                    for (int64_t r = 0; r < rows; ++r) memcpy(found + r * found_apart + from, s->biases[w], sizeof(float) * sizes[w]);
                for (int64_t p = 0; p < counts[w]; ++p)
                    product(found + from + p * WIDTH, found_apart, normed, normed_apart, 1, packed[w] + p * h * WIDTH, h, rows,
                            at_most(WIDTH, sizes[w] - p * WIDTH), s->biases[w] != NULL);
            }
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t row = first + r;
                const float *const y = found + r * found_apart, *const cos = s->cos + row * d / 2, *const sin = s->sin + row * d / 2;
                for (int64_t i = 0; i < s->heads; ++i)
                    prepare_head(q + row * sizes[0] + i * d, y + i * d, &s->q_norm, cos, sin, d);
                for (int64_t i = 0; i < s->kv; ++i)
                    prepare_head(k + row * sizes[1] + i * d, y + sizes[0] + i * d, &s->k_norm, cos, sin, d);
                memcpy(v + row * sizes[2], y + turned, sizeof(float) * sizes[2]);
                if (before) memcpy(before + row * turned, y, sizeof(float) * turned);
            }
        }
    }
    free(space);
    return 0;
}

// Gradients from those of q, k and v; `other` is added to that of x unless it is NULL. of_weights (3): all there, or all
// NULL; of_biases (3), of_norm, of_q_norm and of_k_norm: may be NULL.
int project_heads_backward(const Heads *s, float *of_x, float *of_norm, float *of_q_norm, float *of_k_norm,
                           float *const *of_weights, float *const *of_biases, const float *of_q, const float *of_k,
                           const float *of_v, const float *other, const float *x, const float *before, int threads) {
    const int64_t h = s->hidden, d = s->d, sizes[3] = {s->heads * d, s->kv * d, s->kv * d};
    const int64_t turned = sizes[0] + sizes[1], all = turned + sizes[2], panels = panels_of(h);
    const int64_t at_once = chunks_at_once(threads), span = at_once * ROWS;
    const int64_t grad_apart = apart(h), found_apart = apart(all);
    const int64_t own_sums = padded(h + 2 * d + all, 16), own_space = ROWS * grad_apart + padded(d, 16) + own_sums;
    float *const space = allocate(panels * all * WIDTH + span * found_apart + panels * span * WIDTH + threads * own_space);
    if (space == NULL) return 1;
    float *next = space;
    float *const fused = take(&next, panels * all * WIDTH), *const of_found = take(&next, span * found_apart);
    float *const normed = take(&next, panels * span * WIDTH);
#pragma omp parallel num_threads(threads)
    {
        const int thread = THIS_THREAD, team = ALL_THREADS;
        float *const of_normed = next + thread * own_space, *const head = of_normed + ROWS * grad_apart;
        float *const sums = head + padded(d, 16), *const bias_sums = sums + h + 2 * d;
        memset(sums, 0, sizeof(float) * own_sums);
        for (int64_t p = thread; p < panels; p += team)
            for (int64_t w = 0, from = 0; w < 3; from += sizes[w++])
                pack_panel(fused + (p * all + from) * WIDTH, s->weights[w], h, 1, sizes[w], h, p);
#pragma omp barrier
        for (int64_t start = 0; start < s->rows; start += span) {
            const int64_t here = at_most(span, s->rows - start);
            for (int64_t c = thread; c < chunks_of(here); c += team) {
                const int64_t at = c * ROWS, first = start + at, rows = at_most(ROWS, s->rows - first);
                float *const g = of_found + at * found_apart;
                for (int64_t r = 0; r < rows; ++r) {
                    const int64_t row = first + r;
                    float *const to = g + r * found_apart;
                    const float *const cos = s->cos + row * d / 2, *const sin = s->sin + row * d / 2;
                    const float *const y = before ? before + row * turned : NULL;
                    for (int64_t i = 0; i < s->heads; ++i)
                        prepare_head_backward(to + i * d, sums + h, head, of_q + row * sizes[0] + i * d, y ? y + i * d : NULL,
                                              &s->q_norm, cos, sin, d);
                    for (int64_t i = 0; i < s->kv; ++i)
                        prepare_head_backward(to + sizes[0] + i * d, sums + h + d, head, of_k + row * sizes[1] + i * d,
                                              y ? y + sizes[0] + i * d : NULL, &s->k_norm, cos, sin, d);
                    memcpy(to + turned, of_v + row * sizes[2], sizeof(float) * sizes[2]);
                    if (of_biases[0])
                        for (int64_t i = 0; i < all; ++i) bias_sums[i] += to[i];
                    norm_row(of_normed, x + row * h, &s->norm, h);
                    for (int64_t p = 0; p < panels; ++p)
                        memcpy(normed + (p * span + at + r) * WIDTH, of_normed + p * WIDTH,
                               sizeof(float) * at_most(WIDTH, h - p * WIDTH));
                }
                for (int64_t p = 0; p < panels; ++p)
                    product(of_normed + p * WIDTH, grad_apart, g, found_apart, 1, fused + p * all * WIDTH, all, rows,
                            at_most(WIDTH, h - p * WIDTH), 0);
                for (int64_t r = 0; r < rows; ++r)
                    norm_row_backward(of_x + (first + r) * h, sums, of_normed + r * grad_apart, x + (first + r) * h,
                                      other ? other + (first + r) * h : NULL, &s->norm, h);
            }
#pragma omp barrier
            for (int64_t w = 0, from = 0; w < 3 && of_weights[0]; from += sizes[w++])
                weight_gradient(of_weights[w], sizes[w], h, of_found + from, found_apart, normed, span * WIDTH, here, start > 0,
                                thread, team);
#pragma omp barrier
        }
#pragma omp single
        {
            const float *const all_sums = next + (sums - of_normed);
            sum_of_threads(of_norm, all_sums, h, own_space, team);
            sum_of_threads(of_q_norm, all_sums + h, d, own_space, team);
            sum_of_threads(of_k_norm, all_sums + h + d, d, own_space, team);
            for (int64_t w = 0, from = h + 2 * d; w < 3; from += sizes[w++])
                sum_of_threads(of_biases[w], all_sums + from, sizes[w], own_space, team);
        }
    }
    free(space);
    return 0;
}

// ---- one product -------------------------------------------------------------------------------------------------------

// y (rows, outputs) = x weightT + bias + other; x (rows, inputs); other (rows, outputs), or NULL.
int project(const Projection *s, float *y, const float *x, const float *other, int threads) {
    const int64_t k = s->inputs, n = s->outputs, panels = panels_of(n), x_apart = apart(k), own_space = ROWS * x_apart;
    float *const space = allocate(panels * k * WIDTH + threads * own_space);
    if (space == NULL) return 1;
#pragma omp parallel num_threads(threads)
    {
        const int thread = THIS_THREAD, team = ALL_THREADS;
        for (int64_t p = thread; p < panels; p += team) pack_panel(space + p * k * WIDTH, s->weight, 1, k, k, n, p);
#pragma omp barrier
        float *const own = space + panels * k * WIDTH + thread * own_space;
        const int64_t chunks = chunks_of(s->rows);
        for (int64_t chunk = chunks * thread / team; chunk < chunks * (thread + 1) / team; ++chunk) {
            const int64_t first = chunk * ROWS, rows = at_most(ROWS, s->rows - first);
            float *const to = y + first * n;
            for (int64_t r = 0; r < rows; ++r) {
                memcpy(own + r * x_apart, x + (first + r) * k, sizeof(float) * k);
                for (int64_t i = 0; i < n && (other || s->bias); ++i)
                    to[r * n + i] = (other ? other[(first + r) * n + i] : 0.0f) + (s->bias ? s->bias[i] : 0.0f);
            }
            for (int64_t p = 0; p < panels; ++p)
                product(to + p * WIDTH, n, own, x_apart, 1, space + p * k * WIDTH, k, rows, at_most(WIDTH, n - p * WIDTH),
                        other || s->bias);
        }
    }
    free(space);
    return 0;
}

// Gradients from that of y; each may be NULL.
int project_backward(const Projection *s, float *of_x, float *of_weight, float *of_bias, const float *of_y, const float *x,
                     int threads) {
    const int64_t k = s->inputs, n = s->outputs, panels = panels_of(k), at_once = chunks_at_once(threads), span = at_once * ROWS;
    const int64_t grad_apart = apart(n), own_sums = padded(n, 16);
    float *const space = allocate(panels * n * WIDTH + span * grad_apart + panels * span * WIDTH + threads * own_sums);
    if (space == NULL) return 1;
    float *next = space;
    float *const packed = take(&next, panels * n * WIDTH), *const grads = take(&next, span * grad_apart);
    float *const inputs = take(&next, panels * span * WIDTH);
#pragma omp parallel num_threads(threads)
    {
        const int thread = THIS_THREAD, team = ALL_THREADS;
        float *const sums = next + thread * own_sums;
        memset(sums, 0, sizeof(float) * own_sums);
        for (int64_t p = thread; p < panels && of_x; p += team) pack_panel(packed + p * n * WIDTH, s->weight, k, 1, n, k, p);
#pragma omp barrier
        for (int64_t start = 0; start < s->rows; start += span) {
            const int64_t here = at_most(span, s->rows - start);
            for (int64_t c = thread; c < chunks_of(here); c += team) {
                const int64_t at = c * ROWS, first = start + at, rows = at_most(ROWS, s->rows - first);
                float *const g = grads + at * grad_apart;
                for (int64_t r = 0; r < rows; ++r) {
                    memcpy(g + r * grad_apart, of_y + (first + r) * n, sizeof(float) * n);
                    for (int64_t i = 0; i < n && of_bias; ++i) sums[i] += g[r * grad_apart + i];
                    for (int64_t p = 0; p < panels && of_weight; ++p)
                        memcpy(inputs + (p * span + at + r) * WIDTH, x + (first + r) * k + p * WIDTH,
                               sizeof(float) * at_most(WIDTH, k - p * WIDTH));
                }
                for (int64_t p = 0; p < panels && of_x; ++p)
                    product(of_x + first * k + p * WIDTH, k, g, grad_apart, 1, packed + p * n * WIDTH, n, rows,
                            at_most(WIDTH, k - p * WIDTH), 0);
            }
#pragma omp barrier
            if (of_weight) weight_gradient(of_weight, n, k, grads, grad_apart, inputs, span * WIDTH, here, start > 0, thread, team);
#pragma omp barrier
        }
#pragma omp single
        sum_of_threads(of_bias, next, n, own_sums, team);
    }
    free(space);
    return 0;
}

// ---- a norm alone ------------------------------------------------------------------------------------------------------

// Gradients by x (rows, n) and by the weight from g (rows, n).
int rms_norm_backward(const Norm *norm, float *of_x, float *of_weight, const float *g, const float *x, int64_t rows, int64_t n,
                      int threads) {
    const int64_t own_space = padded(n, 16);
    float *const space = allocate(threads * own_space);
    if (space == NULL) return 1;
    memset(space, 0, sizeof(float) * threads * own_space);
#pragma omp parallel num_threads(threads)
    {
        float *const own = space + THIS_THREAD * own_space;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) norm_row_backward(of_x + r * n, own, g + r * n, x + r * n, NULL, norm, n);
    }
    sum_of_threads(of_weight, space, n, own_space, threads);
    free(space);
    return 0;
}
