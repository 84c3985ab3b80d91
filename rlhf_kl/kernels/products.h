/* Products of matrices, in tiles that stay in registers.

   All matrices are stored by rows. A panel is two vectors of columns; a packed matrix has panel after panel, so that
   a product reads it from front to back. Every element is summed in the order of k, whatever surrounds it. */

#pragma once

#include "vectors.h"

#define TILE (LANES == 16 ? 12 : 6) /* rows of a tile: with two vectors of columns they fill the registers */
#define PANEL (2 * LANES)
#define DEPTH 512 /* of a product between two visits to its result */

/* C (m, w vectors) = init + A (m, depth) B (depth, w vectors), or added to C. A's element (i, k) is a[i * lda + k],
   or across a[i + k * lda]. */
INLINE void tile(const int m, const int w, const int across, i64 depth, const float *a, i64 lda, const float *b,
                 i64 ldb, const float *init, float *c, i64 ldc, int add) {
    vec sum[TILE][2];
#pragma GCC unroll 12
    for (int i = 0; i < m; i++)
#pragma GCC unroll 2
        for (int j = 0; j < w; j++) sum[i][j] = init ? AT(init + j * LANES) : (vec){0};
    for (i64 k = 0; k < depth; k++) {
        vec right[2];
#pragma GCC unroll 2
        for (int j = 0; j < w; j++) right[j] = AT(b + k * ldb + j * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < m; i++) {
            vec left = SPLAT(across ? a[i + k * lda] : a[i * lda + k]);
#pragma GCC unroll 2
            for (int j = 0; j < w; j++) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < m; i++)
#pragma GCC unroll 2
        for (int j = 0; j < w; j++) {
            float *out = c + i * ldc + j * LANES;
            if (add) sum[i][j] += AT(out);
            AT(out) = sum[i][j];
        }
}

#define STRIP_ARGUMENTS \
    i64 m, i64 depth, const float *a, i64 lda, const float *b, i64 ldb, const float *init, float *c, i64 ldc, int add
#define TILE_OF(m) tile(m, w, across, depth, a, lda, b, ldb, init, c, ldc, add)
#define CASE(m) case m: TILE_OF(m); break;
INLINE void strip(const int w, const int across, STRIP_ARGUMENTS) {
    for (; m >= TILE; m -= TILE, a += TILE * (across ? 1 : lda), c += TILE * ldc) TILE_OF(TILE);
    switch (m) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if LANES == 16
        CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
#endif
    }
}
typedef void Strip(STRIP_ARGUMENTS);
#define STRIP(name, w, across) \
    static __attribute__((noinline, unused)) void name(STRIP_ARGUMENTS) { \
        strip(w, across, m, depth, a, lda, b, ldb, init, c, ldc, add); \
    }
STRIP(wide_along, 2, 0)
STRIP(wide_across, 2, 1)
STRIP(slim_along, 1, 0)
STRIP(slim_across, 1, 1)

/* C (m, n) = init + A B, or added to C; n in whole vectors. A's element (i, k) is a[i * row + k * col], where one of
   the two is 1. ldb = 0: B is packed, panel after panel. */
LOCAL void product(i64 m, i64 n, i64 depth, const float *a, i64 row, i64 col, const float *b, i64 ldb,
                    const float *init, float *c, i64 ldc, int add) {
    Strip *wide = col == 1 ? wide_along : wide_across, *slim = col == 1 ? slim_along : slim_across;
    i64 lda = col == 1 ? row : col;
    for (i64 k = 0; k < depth; k += DEPTH) {
        i64 deep = min64(DEPTH, depth - k);
        for (i64 j = 0; j < n; j += PANEL) {
            i64 width = min64(PANEL, n - j), step = ldb ? ldb : width;
            const float *panel = (ldb ? b + j : b + j * depth) + k * step;
            (width == PANEL ? wide : slim)(m, deep, a + k * col, lda, panel, step, init && !k ? init + j : 0, c + j,
                                           ldc, add || k);
        }
    }
}

/* One panel of B (depth, n): columns from j on. B's element (k, j) is w[k * row + j * col], times scale[k] or, where
   by_column, scale[j]. */
LOCAL void pack_panel(i64 j, i64 n, i64 depth, const float *w, i64 row, i64 col, const float *scale, int by_column,
                       float *packed) {
    i64 width = min64(PANEL, n - j);
    float *out = packed + j * depth;
    if (col == 1)
        for (i64 k = 0; k < depth; k++)
            for (i64 i = 0; i < width; i++) {
                float s = scale ? scale[by_column ? j + i : k] : 1.0f;
                out[k * width + i] = s * w[k * row + j + i];
            }
    else
        for (i64 i = 0; i < width; i++) {
            const float *from = w + (j + i) * col;
            float s = scale && by_column ? scale[j + i] : 1.0f;
            for (i64 k = 0; k < depth; k++) out[k * width + i] = (scale && !by_column ? scale[k] : s) * from[k * row];
        }
}

LOCAL i64 panels(i64 n) { return (n + PANEL - 1) / PANEL; }
