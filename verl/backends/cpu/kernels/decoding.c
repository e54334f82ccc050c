// One token more for each row of a batch: its attention to the keys and values that are kept, and, for decoders that
// are made of the parts below, the whole pass from embeddings to logits in one call.

#include "common.h"

// Where the rows keep keys and values; decoding.py has the same struct.
typedef struct {
    const int64_t *slots, *own_lengths, *prompts, *shared_lengths;  // (rows)
    float *own_k, *own_v;                                           // (slots, kv, own_room, d) of the first layer
    const float *shared_k, *shared_v;                               // (prompts, kv, shared_room, d) of it
    int64_t own_apart, shared_apart;                                // from one layer to the next
    int64_t rows, own_room, shared_room;
} Memory;

// How one layer attends.
typedef struct {
    int64_t heads, kv, d, window;    // window: tokens that a token sees, itself included; 0 is all
    float scale, eps, offset;        // eps, offset: of norms of the heads
    const float *q_norm, *k_norm;    // (d), or NULL
    const float *cos, *sin;          // (positions, d / 2), or NULL
} Attention;

// ---- attention -------------------------------------------------------------------------------------------------------

// TILE: tokens whose keys (or values) one query head after the other reads while they are in the first-level cache.
enum { TILE = 16, CACHE_LINE = 16 };

// What is read next is on its way to the cache while what is there is worked on: n rows of d numbers.
INLINE void fetch(const float *next, int64_t n, int d) {
    for (int64_t i = 0; i < n * d; i += CACHE_LINE) __builtin_prefetch(next + i);
}

// s[h][j] = q[h] . k[j] for g query heads and n tokens; rows of s are ld apart. next: the like of k that is read next, or NULL.
INLINE void scores_of(float *restrict s, int64_t ld, const float *restrict q, const float *restrict k, int64_t n, int g,
                      int d, const float *next) {
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t end = start + TILE < n ? start + TILE : n;
        if (next) fetch(next + start * d, end - start, d);
        for (int h = 0; h < g; ++h)
            for (int64_t j = start; j < end; ++j) {
                float sum = 0;
                for (int i = 0; i < d; ++i) sum += q[h * d + i] * k[j * d + i];
                s[h * ld + j] = sum;
            }
    }
}

// out[h] += sum_j p[h][j] v[j]; next: as in scores_of.
INLINE void add_values(float *restrict out, const float *restrict p, int64_t ld, const float *restrict v, int64_t n,
                       int g, int d, const float *next) {
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t end = start + TILE < n ? start + TILE : n;
        if (next) fetch(next + start * d, end - start, d);
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
                   const float *own_k, const float *own_v, int64_t n_own, float scale, int g, int d,
                   const float *next) {
    const int64_t n = n_shared + n_own;
    scores_of(s, n, q, shared_k, n_shared, g, d, NULL);
    scores_of(s + n_shared, n, q, own_k, n_own, g, d, own_v);
    for (int h = 0; h < g; ++h) softmax(s + h * n, n, scale);
    memset(out, 0, sizeof(float) * g * d);
    add_values(out, s, n, shared_v, n_shared, g, d, NULL);
    add_values(out, s + n_shared, n, own_v, n_own, g, d, next);
}

// What happens to a head of a query or key before attention; weight: of an RMS norm over the head, or NULL.
INLINE void prepare_head(float *out, const float *x, const float *weight, const Attention *a, int64_t position) {
    const int64_t d = a->d, half = d / 2;
    if (weight) {
        const float factor = rms_factor(x, d, a->eps);
        for (int64_t i = 0; i < d; ++i) out[i] = (a->offset + weight[i]) * (x[i] * factor);
    } else {
        memcpy(out, x, sizeof(float) * d);
    }
    if (a->cos)
        for (int64_t i = 0; i < half; ++i) {
            const float x = out[i], y = out[half + i], cos = a->cos[position * half + i], sin = a->sin[position * half + i];
            out[i] = x * cos - y * sin;
            out[half + i] = y * cos + x * sin;
        }
}

static int64_t tokens_of(const Memory *m, int64_t r) { return m->shared_lengths[r] + m->own_lengths[r] + 1; }

static int64_t longest_of(const Memory *m) {
    int64_t longest = 0;
    for (int64_t r = 0; r < m->rows; ++r) longest = at_least(longest, tokens_of(m, r));
    return longest;
}

// The first of a thread's tasks, of which there is one for each key/value head and row, in this order: each thread gets
// as many tokens as the others, and neighbouring rows, which find the prompt that they share in its cache.
static int64_t first_task(const Memory *m, int64_t kv, int thread, int threads) {
    int64_t all = 0, r = 0;
    for (int64_t i = 0; i < m->rows; ++i) all += tokens_of(m, i);
    const int64_t wanted = all * kv * thread / threads;
    if (all == 0) return 0;
    for (int64_t rest = wanted % all; rest > 0; ++r) rest -= tokens_of(m, r);
    return wanted / all * m->rows + r;
}

// Floats that one thread needs: the queries ready for use, what comes out, and scores.
static int64_t attention_space(const Attention *a, int64_t longest) { return (longest + 2 * a->d) * (a->heads / a->kv); }

// Where the keys and values of a task's row begin.
static int64_t own_place(const Attention *a, const Memory *m, int64_t layer, int64_t task) {
    return layer * m->own_apart + (m->slots[task % m->rows] * a->kv + task / m->rows) * m->own_room * a->d;
}

// One thread's share of a layer. q, new_k and new_v begin with the first row; the rows are so far apart as q_apart and
// kv_apart say. out (heads * d, rows) comes in panels of so many rows as width says; rows of their own if it is 1.
static void attend_share(const Attention *a, const Memory *m, int64_t layer, const float *q, int64_t q_apart,
                         const float *new_k, const float *new_v, int64_t kv_apart, float *out, int64_t width,
                         float *space, int thread, int threads) {
    const int64_t g = a->heads / a->kv, d = a->d, features = a->heads * d;
    const int64_t first = first_task(m, a->kv, thread, threads), last = first_task(m, a->kv, thread + 1, threads);
    float *ready = space, *sums = ready + g * d, *scores = sums + g * d;
    for (int64_t task = first; task < last; ++task) {
        const int64_t h = task / m->rows, r = task % m->rows, position = tokens_of(m, r) - 1;
        const int64_t n_prompt = m->shared_lengths[r], n_before = m->own_lengths[r];
        const int64_t own = own_place(a, m, layer, task);
        const float *next = m->own_k + own_place(a, m, layer, at_most(task + 1, last - 1));
        float *k = m->own_k + own, *v = m->own_v + own;
        prepare_head(k + n_before * d, new_k + r * kv_apart + h * d, a->k_norm, a, position);
        memcpy(v + n_before * d, new_v + r * kv_apart + h * d, sizeof(float) * d);
        for (int64_t i = 0; i < g; ++i)
            prepare_head(ready + i * d, q + r * q_apart + (h * g + i) * d, a->q_norm, a, position);

        const int64_t unseen = a->window > 0 ? at_least(position + 1 - a->window, 0) : 0;
        const int64_t skip = at_most(unseen, n_prompt), skip_own = unseen - skip;
        const int64_t prompt = layer * m->shared_apart + ((m->prompts[r] * a->kv + h) * m->shared_room + skip) * d;
        const int64_t n_shared = n_prompt - skip, n_own = n_before + 1 - skip_own;
        const float *pk = m->shared_k + prompt, *pv = m->shared_v + prompt;
        k += skip_own * d, v += skip_own * d;
        if (d == 64) attend(sums, scores, ready, pk, pv, n_shared, k, v, n_own, a->scale, g, 64, next);
        else if (d == 128) attend(sums, scores, ready, pk, pv, n_shared, k, v, n_own, a->scale, g, 128, next);
        else attend(sums, scores, ready, pk, pv, n_shared, k, v, n_own, a->scale, g, d, next);
        float *o = out + r / width * width * features + r % width + h * g * d * width;
        for (int64_t i = 0; i < g * d; ++i) o[i * width] = sums[i];
    }
}

// q, out (rows, heads, d); new_k, new_v (rows, kv, d). Returns 0, or 1 if there is no memory for the scores.
int decode_attention(const Attention *a, const Memory *m, float *out, const float *q, const float *new_k,
                     const float *new_v, int threads) {
    const int64_t space = attention_space(a, longest_of(m));
    float *spaces = malloc(sizeof(float) * space * threads);
    if (spaces == NULL) return 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; ++thread)
        attend_share(a, m, 0, q, a->heads * a->d, new_k, new_v, a->kv * a->d, out, 1, spaces + thread * space, thread,
                     threads);
    free(spaces);
    return 0;
}

// ---- matrix products -------------------------------------------------------------------------------------------------
//
// Between the layers of a decoder, rows of the batch are the lanes of registers: a state of k features is kept as
// panels (k, width) of neighbouring rows. A product then reads each weight once, where it lies, and spreads it over the
// lanes; what comes out is the next product's panel. Each number of it is one sum in the order of k, whatever the
// batch, the panel and the thread are, so that no bit of a row depends on the other rows.

enum { PANEL = LANES * VECTORS, CHUNK = 48, DEPTH = 1024 };

// c (FEATURES, width) (+)= w a, with w (FEATURES, k) whose rows are ldw apart and a (k, width), for the first
// VECTORS_WIDE registers of the width. The weights after them are on their way when this returns.
#define DEFINE_TILE(NAME, FEATURES, VECTORS_WIDE)                                                                      \
    static void NAME(float *restrict c, const float *restrict w, int64_t ldw, const float *restrict a, int64_t k,      \
                     int64_t width, int adds) {                                                                        \
        Lanes sum[FEATURES][VECTORS_WIDE];                                                                             \
        for (int i = 0; i < FEATURES; ++i)                                                                             \
            for (int j = 0; j < VECTORS_WIDE; ++j)                                                                     \
                sum[i][j] = adds ? *(const Lanes *)(c + i * width + j * LANES) : (Lanes){0};                           \
        for (int64_t l = 0; l < k; ++l) {                                                                              \
            Lanes x[VECTORS_WIDE];                                                                                     \
            for (int j = 0; j < VECTORS_WIDE; ++j) x[j] = *(const Lanes *)(a + l * width + j * LANES);                 \
            if (l % CACHE_LINE == 0)                                                                                   \
                for (int i = 0; i < FEATURES; ++i) __builtin_prefetch(w + (FEATURES + i) * ldw + l);                   \
            _Pragma("GCC unroll 24") for (int i = 0; i < FEATURES; ++i)                                                \
                _Pragma("GCC unroll 4") for (int j = 0; j < VECTORS_WIDE; ++j) sum[i][j] += w[i * ldw + l] * x[j];     \
        }                                                                                                              \
        for (int i = 0; i < FEATURES; ++i)                                                                             \
            for (int j = 0; j < VECTORS_WIDE; ++j) *(Lanes *)(c + i * width + j * LANES) = sum[i][j];                  \
    }

typedef void Tile(float *restrict, const float *restrict, int64_t, const float *restrict, int64_t, int64_t, int);

DEFINE_TILE(tile_1, SUMS, 1)
DEFINE_TILE(tile_2, SUMS / 2, 2)
DEFINE_TILE(feature_1, 1, 1)
DEFINE_TILE(feature_2, 1, 2)
#if defined(__AVX512F__) || defined(__ARM_NEON)
DEFINE_TILE(tile_3, SUMS / 3, 3)
DEFINE_TILE(tile_4, SUMS / 4, 4)
DEFINE_TILE(feature_3, 1, 3)
DEFINE_TILE(feature_4, 1, 4)
static Tile *const tiles[] = {tile_1, tile_2, tile_3, tile_4}, *const features[] = {feature_1, feature_2, feature_3, feature_4};
#else
static Tile *const tiles[] = {tile_1, tile_2}, *const features[] = {feature_1, feature_2};
#endif

// weight (n, k), bias (n) or NULL; decoding.py has the same struct.
typedef struct {
    const float *weight, *bias;
    int64_t n, k;
} Linear;

// How the features of a chunk lie in tiles: of `height` features each, from `first` on; the last tile begins earlier if
// there are not enough left, and then gives some again.
typedef struct {
    int64_t first, last, height, latest;
} Tiling;

static int64_t tile_start(const Tiling *t, int64_t number) { return at_most(t->first + number * t->height, t->latest); }

// The feature's row in the tiles, which lie one after the other.
static int64_t row_of(const Tiling *t, int64_t feature) {
    const int64_t number = (feature - t->first) / t->height;
    return number * t->height + feature - tile_start(t, number);
}

// c (the tiles' features, width) of the chunk, without bias; a (k, width).
static Tiling multiply_chunk(float *c, const Linear *linear, int64_t first, int64_t last, const float *a, int64_t width,
                             int64_t rows) {
    const int64_t vectors = padded(rows, LANES) / LANES, whole = SUMS / vectors;
    const int is_small = linear->n < whole;
    const Tiling t = {first, last, is_small ? 1 : whole, is_small ? last - 1 : at_least(last - whole, 0)};
    Tile *const tile = (is_small ? features : tiles)[vectors - 1];
    for (int64_t l = 0; l < linear->k; l += DEPTH)  // so much of the panel stays in the second-level cache
        for (int64_t i = 0; t.first + i * t.height < last; ++i)
            tile(c + i * t.height * width, linear->weight + tile_start(&t, i) * linear->k + l, linear->k, a + l * width,
                 at_most(DEPTH, linear->k - l), width, l > 0);
    return t;
}

// What becomes of a product.
typedef enum {
    INTO_ROWS,  // (rows, apart)
    ADDED,      // to panels
    GATED,      // silu(x) or gelu(x) times the product with `up`, as panels
} Use;

typedef struct {
    const Linear *linear, *up;
    float *out;
    int64_t apart;
    Use use;
    int is_gelu;
} Product;

static float bias_of(const Linear *linear, int64_t feature) { return linear->bias ? linear->bias[feature] : 0.0f; }

// Features first to last of one panel, whose rows begin at `row`.
static void use_chunk(const Product *p, const float *c, const float *up, const Tiling *t, int64_t row, int64_t rows,
                      int64_t width) {
    const int64_t lanes = padded(rows, LANES), count = t->last - t->first;
    int64_t at[CHUNK];
    for (int64_t i = 0; i < count; ++i) at[i] = row_of(t, t->first + i) * width;
    if (p->use == INTO_ROWS) {  // row by row: what is a line of the cache there is written at once
        for (int64_t r = 0; r < rows; ++r) {
            float *out = p->out + (row + r) * p->apart + t->first;
            for (int64_t i = 0; i < count; ++i) out[i] = c[at[i] + r];
            if (p->linear->bias)
                for (int64_t i = 0; i < count; ++i) out[i] += p->linear->bias[t->first + i];
        }
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        const float *x = c + at[i], *y = up + at[i], bias = bias_of(p->linear, t->first + i);
        float *panel = p->out + row * p->linear->n + (t->first + i) * width;
        if (p->use == ADDED) {
            for (int64_t r = 0; r < lanes; ++r) panel[r] += x[r] + bias;
        } else {
            const float up_bias = bias_of(p->up, t->first + i);
            for (int64_t r = 0; r < lanes; ++r) panel[r] = activated(x[r] + bias, p->is_gelu) * (y[r] + up_bias);
        }
    }
}

// Features first to last of a product; in: panels (k, width) of the rows.
static void multiply(const Product *p, int64_t first, int64_t last, const float *in, int64_t rows, int64_t width) {
    float gate[CHUNK * PANEL], up[CHUNK * PANEL];
    for (int64_t from = first; from < last; from += CHUNK)
        for (int64_t row = 0; row < rows; row += width) {
            const int64_t to = at_most(from + CHUNK, last), here = at_most(width, rows - row);
            const float *a = in + row * p->linear->k;
            const Tiling t = multiply_chunk(gate, p->linear, from, to, a, width, here);
            if (p->use == GATED) multiply_chunk(up, p->up, from, to, a, width, here);
            use_chunk(p, gate, up, &t, row, here, width);
        }
}

// One thread's share of products of one input: of all their features, one product's after the other's.
static void multiply_share(const Product *products, int count, const float *in, int64_t rows, int64_t width, int thread,
                           int threads) {
    int64_t all = 0, before = 0;
    for (int i = 0; i < count; ++i) all += products[i].linear->n;
    const int64_t first = all * thread / threads, last = all * (thread + 1) / threads;
    for (int i = 0; i < count; before += products[i++].linear->n)
        multiply(&products[i], at_least(first - before, 0), at_most(last - before, products[i].linear->n), in, rows, width);
}

// ---- a whole pass ----------------------------------------------------------------------------------------------------

// decoding.py has the same structs.
typedef struct {
    const float *input_norm, *post_norm;  // (hidden)
    const float *q_norm, *k_norm;         // (d), or NULL
    Linear q, k, v, o, gate, up, down;
    int64_t window;
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm;  // (hidden)
    Linear head;
    const float *cos, *sin;  // (positions, d / 2)
    int64_t count, hidden, heads, kv, d, is_gelu;
    float scale, eps, offset;
} Decoder;

// States of a batch as panels, and a space for each thread's attention.
typedef struct {
    float *hidden, *normed, *attended, *gated;
    float *qkv;  // (rows, heads + 2 kv, d)
    float *attention;
    float *end;
} States;

static int64_t width_of(int64_t rows) { return at_most(padded(at_least(rows, 1), LANES), PANEL); }

static States states_of(const Decoder *d, int64_t rows, int64_t longest, int threads, float *space) {
    const int64_t all = padded(rows, width_of(rows)), heads = d->heads * d->d;
    const Attention a = {.heads = d->heads, .kv = d->kv, .d = d->d};
    States s;
    s.hidden = space, space += d->hidden * all;
    s.normed = space, space += d->hidden * all;
    s.attended = space, space += heads * all;
    s.gated = space, space += d->layers[0].gate.n * all;
    s.qkv = space, space += rows * (heads + 2 * d->kv * d->d);
    s.attention = space, space += threads * attention_space(&a, longest);
    s.end = space;
    return s;
}

// Floats that `space` of decode needs for so many rows, the longest of which has so many tokens.
int64_t decode_space(const Decoder *d, int64_t rows, int64_t longest, int threads) {
    float *const start = 0;
    return states_of(d, rows, longest, threads, start).end - start;
}

// out (n, rows) from in (rows, n); zeros where there is no row.
static void into_panels(float *out, const float *in, int64_t n, int64_t rows, int64_t width, int thread, int threads) {
    for (int64_t first = thread * LANES; first < rows; first += threads * LANES) {
        float *panel = out + first / width * width * n + first % width;
        for (int64_t r = 0; r < LANES; ++r)
            for (int64_t i = 0; i < n; ++i) panel[i * width + r] = first + r < rows ? in[(first + r) * n + i] : 0.0f;
    }
}

// RMS norm of panels (n, rows).
static void norm_panels(float *out, const float *in, const float *weight, int64_t n, float eps, float offset,
                        int64_t rows, int64_t width, int thread, int threads) {
    for (int64_t first = thread * LANES; first < rows; first += threads * LANES) {
        const int64_t at = first / width * width * n + first % width;
        Lanes squares[4] = {{0}}, factor;  // four sums, so that none waits for the one before
        for (int64_t i = 0; i < n; ++i) {
            const Lanes x = *(const Lanes *)(in + at + i * width);
            squares[i % 4] += x * x;
        }
        const Lanes all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        for (int r = 0; r < LANES; ++r) factor[r] = 1.0f / sqrtf(all[r] / n + eps);
        for (int64_t i = 0; i < n; ++i)
            *(Lanes *)(out + at + i * width) = (offset + weight[i]) * (*(const Lanes *)(in + at + i * width) * factor);
    }
}

// embeddings (rows, hidden) of the newest tokens; logits (rows, head.n); space of decode_space floats.
void decode(const Decoder *d, const Memory *m, float *logits, const float *embeddings, float *space, int threads) {
    const int64_t rows = m->rows, width = width_of(rows), h = d->hidden;
    const int64_t q_size = d->heads * d->d, kv_size = d->kv * d->d, qkv_size = q_size + 2 * kv_size;
    const States s = states_of(d, rows, longest_of(m), threads, space);
    memset(s.attended, 0, sizeof(float) * q_size * padded(rows, width));  // where there is no row
#pragma omp parallel num_threads(threads)
    {
        const int thread = THIS_THREAD, team = ALL_THREADS;
        float *own_space = s.attention + (s.end - s.attention) / threads * thread;
        into_panels(s.hidden, embeddings, h, rows, width, thread, team);
        for (const Layer *l = d->layers; l < d->layers + d->count; ++l) {
            const Attention attention = {d->heads, d->kv,     d->d,      l->window, d->scale, d->eps,
                                         d->offset, l->q_norm, l->k_norm, d->cos,    d->sin};
            const Product into_heads[] = {
                {.linear = &l->q, .out = s.qkv, .apart = qkv_size, .use = INTO_ROWS},
                {.linear = &l->k, .out = s.qkv + q_size, .apart = qkv_size, .use = INTO_ROWS},
                {.linear = &l->v, .out = s.qkv + q_size + kv_size, .apart = qkv_size, .use = INTO_ROWS},
            };
            const Product out_of_heads = {.linear = &l->o, .out = s.hidden, .use = ADDED};
            const Product gate = {.linear = &l->gate, .up = &l->up, .out = s.gated, .use = GATED, .is_gelu = d->is_gelu};
            const Product down = {.linear = &l->down, .out = s.hidden, .use = ADDED};
#pragma omp barrier
            norm_panels(s.normed, s.hidden, l->input_norm, h, d->eps, d->offset, rows, width, thread, team);
#pragma omp barrier
            multiply_share(into_heads, 3, s.normed, rows, width, thread, team);
#pragma omp barrier
            attend_share(&attention, m, l - d->layers, s.qkv, qkv_size, s.qkv + q_size, s.qkv + q_size + kv_size, qkv_size,
                         s.attended, width, own_space, thread, team);
#pragma omp barrier
            multiply_share(&out_of_heads, 1, s.attended, rows, width, thread, team);
#pragma omp barrier
            norm_panels(s.normed, s.hidden, l->post_norm, h, d->eps, d->offset, rows, width, thread, team);
#pragma omp barrier
            multiply_share(&gate, 1, s.normed, rows, width, thread, team);
#pragma omp barrier
            multiply_share(&down, 1, s.gated, rows, width, thread, team);
        }
        const Product head = {.linear = &d->head, .out = logits, .apart = d->head.n, .use = INTO_ROWS};
#pragma omp barrier
        norm_panels(s.normed, s.hidden, d->norm, h, d->eps, d->offset, rows, width, thread, team);
#pragma omp barrier
        multiply_share(&head, 1, s.normed, rows, width, thread, team);
    }
}
