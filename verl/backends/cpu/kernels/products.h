// Matrix products of a training pass. One factor lies in panels (k, WIDTH) of neighbouring columns, made by
// pack_panels; a tile of HEIGHT x WIDTH sums stays in registers. Each number is one sum in the order of k, wherever its
// row stands, so that no bit of a row depends on the other rows.

#ifndef VERL_PRODUCTS_H
#define VERL_PRODUCTS_H

#include "common.h"

enum { WIDTH = LANES * VECTORS, HEIGHT = SUMS / VECTORS };

// c (ROWS, WIDTH) (+)= a b, with b (k, WIDTH); a[i][l] = a[i * a_row + l * a_col].
#define EACH(I, N) _Pragma("GCC unroll 24") for (int I = 0; I < N; ++I)
#define DEFINE_PRODUCT_TILE(NAME, ROWS)                                                                                \
    static void NAME(float *restrict c, int64_t ldc, const float *restrict a, int64_t a_row, int64_t a_col,            \
                     const float *restrict b, int64_t k, int adds) {                                                   \
        Lanes sum[ROWS][VECTORS];                                                                                      \
        EACH(i, ROWS) EACH(j, VECTORS) sum[i][j] = adds ? *(const Lanes *)(c + i * ldc + j * LANES) : (Lanes){0};      \
        for (int64_t l = 0; l < k; ++l) {                                                                              \
            Lanes x[VECTORS];                                                                                          \
            EACH(j, VECTORS) x[j] = *(const Lanes *)(b + l * WIDTH + j * LANES);                                       \
            EACH(i, ROWS) EACH(j, VECTORS) sum[i][j] += a[i * a_row + l * a_col] * x[j];                               \
        }                                                                                                              \
        EACH(i, ROWS) EACH(j, VECTORS) *(Lanes *)(c + i * ldc + j * LANES) = sum[i][j];                                \
    }

DEFINE_PRODUCT_TILE(tile_of_many, HEIGHT)
DEFINE_PRODUCT_TILE(tile_of_one, 1)

// As the tiles, for any number of rows, and for as many columns as c has of the panel.
static void product(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t k,
                    int64_t rows, int64_t columns, int adds) {
    float part[HEIGHT * WIDTH];
    for (int64_t i = 0, height; i < rows; i += height) {
        height = rows - i < HEIGHT ? 1 : HEIGHT;
        float *const to = columns < WIDTH ? part : c + i * ldc;
        const int64_t apart = columns < WIDTH ? WIDTH : ldc;
        if (columns < WIDTH && adds)
            for (int64_t r = 0; r < height; ++r) memcpy(part + r * WIDTH, c + (i + r) * ldc, sizeof(float) * columns);
        (height == 1 ? tile_of_one : tile_of_many)(to, apart, a + i * a_row, a_row, a_col, b, k, adds);
        if (columns < WIDTH)
            for (int64_t r = 0; r < height; ++r) memcpy(c + (i + r) * ldc, part + r * WIDTH, sizeof(float) * columns);
    }
}

// From one row of n numbers to the next: an odd number of lines of the cache, so that columns do not meet in one set.
static int64_t apart(int64_t n) { return ((padded(n, 16) / 16) | 1) * 16; }

static float *allocate(int64_t n) { return aligned_alloc(64, sizeof(float) * padded(at_least(n, 16), 16)); }

static float *take(float **space, int64_t n) {
    float *const found = *space;
    *space += padded(n, 16);
    return found;
}

static int64_t panels_of(int64_t n) { return (n + WIDTH - 1) / WIDTH; }

// Panel `number` of b (k, n), with b[l][j] = b[l * b_row + j * b_col]; zeros where there is no column.
static void pack_panel(float *to, const float *b, int64_t b_row, int64_t b_col, int64_t k, int64_t n, int64_t number) {
    const int64_t first = number * WIDTH, columns = at_most(WIDTH, n - first);
    b += first * b_col;
    if (columns < WIDTH) memset(to, 0, sizeof(float) * k * WIDTH);
    if (b_col == 1) {
        for (int64_t l = 0; l < k; ++l) memcpy(to + l * WIDTH, b + l * b_row, sizeof(float) * columns);
        return;
    }
    for (int64_t from = 0; from < k; from += LANES)  // a line of the cache at a time
        for (int64_t j = 0; j < columns; ++j)
            for (int64_t l = from; l < at_most(from + LANES, k); ++l) to[l * WIDTH + j] = b[l * b_row + j * b_col];
}

#endif
