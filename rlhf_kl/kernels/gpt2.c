/* A GPT-2's passes on a CPU in float32: forward, backward, and one decoding step.

   Threads share the rows of a pass, then the (sequence, head) pairs, then the tiles of the weights' gradients. Every
   number is summed by one thread in a fixed order, so results do not depend on how many threads there are. Scale and
   shift of a layer's two norms are folded into the weights behind them: what is kept of a norm is the normalised
   input, and its gradients come out of those weights'. */

#include "attention.h"

#define CHUNK 96 /* rows that one thread takes through a layer at a time: they stay in its cache */
#define GRADIENT_ROWS 144 /* a block of a weight's gradient, which one thread sums ... */
#define GRADIENT_COLUMNS 96
#define GRADIENT_DEPTH 192 /* ... over so many rows of a pass at a time */

typedef struct {
    i64 layers, hidden, inner, heads;
    const float *eps;     /* (1,) */
    const float *scaling; /* (layers,) of the attention's scores */
} Shape;

typedef struct {
    i64 rows, sequences, states;
    const i64 *ids, *positions; /* (rows,) */
    const i64 *starts;          /* (sequences + 1,) first row of each */
    const i64 *at;              /* (states,) the rows that are read, rising */
} Batch;

/* Keys and values of sequences that are being continued, by layer, slot and head. */
typedef struct {
    i64 slots, capacity;
    float *keys;   /* (layers, slots, heads, size, capacity), times the scaling */
    float *values; /* (layers, slots, heads, capacity, size) */
} Cache;

enum { WTE, WPE, LNF_G, LNF_B, FIRST };
enum { LN1_G, LN1_B, QKV, QKV_B, OUT, OUT_B, LN2_G, LN2_B, UP, UP_B, DOWN, DOWN_B, TENSORS };

/* The normalised rows of x (m, size), and one over their standard deviations. */
static void normalise(i64 m, i64 size, float eps, const float *x, float *hat, float *rstd) {
    for (i64 i = 0; i < m; i++, x += size, hat += size) {
        vec total = {0}, square = {0};
        for (i64 j = 0; j < size; j += LANES) total += AT(x + j);
        float mean = sum_of(total) / size;
        for (i64 j = 0; j < size; j += LANES) {
            vec d = AT(x + j) - mean;
            square += d * d;
        }
        rstd[i] = 1.0f / sqrtf(sum_of(square) / size + eps);
        for (i64 j = 0; j < size; j += LANES) AT(hat + j) = (AT(x + j) - mean) * rstd[i];
    }
}

/* Gradient of the input of `normalise` from that of its output, added to `base`; `out` may be `base`. */
static void normalise_back(i64 m, i64 size, const float *grad, const float *hat, const float *rstd, const float *base,
                           float *out) {
    for (i64 i = 0; i < m; i++, grad += size, hat += size, out += size) {
        vec total = {0}, along = {0};
        for (i64 j = 0; j < size; j += LANES) {
            total += AT(grad + j);
            along += AT(grad + j) * AT(hat + j);
        }
        float mean = sum_of(total) / size, part = sum_of(along) / size;
        for (i64 j = 0; j < size; j += LANES) {
            vec d = (AT(grad + j) - mean - AT(hat + j) * part) * rstd[i];
            if (base) d += AT(base + j);
            AT(out + j) = d;
        }
        if (base) base += size;
    }
}

/* ------------------------------------------------------------------ weights of a layer, packed */

typedef struct {
    float *qkv, *out, *up, *down; /* forward: x @ W; backward: dy @ W^T */
    float *qkv_b, *up_b;          /* biases with the norms' shifts in them */
} Packed;

static i64 packed_floats(const Shape *s) {
    i64 h = s->hidden;
    return up_to(4 * h * h + 2 * h * s->inner + 3 * h + s->inner, LANES);
}

static Packed packed_at(const Shape *s, float *at) {
    i64 h = s->hidden;
    Packed p = {.qkv = at};
    p.out = p.qkv + 3 * h * h, p.up = p.out + h * h, p.down = p.up + h * s->inner;
    p.qkv_b = p.down + h * s->inner, p.up_b = p.qkv_b + 3 * h;
    return p;
}

/* bias + shift W for the columns of one panel. */
static void shifted(i64 j, i64 n, i64 depth, const float *w, const float *shift, const float *bias, float *out) {
    for (i64 i = j; i < min64(n, j + PANEL); i++) out[i] = bias[i];
    for (i64 k = 0; k < depth; k++)
        for (i64 i = j; i < min64(n, j + PANEL); i++) out[i] += shift[k] * w[k * n + i];
}

/* One panel of a layer's weights as the forward pass reads them. */
static void pack_forward(const Shape *s, const float *const *w, Packed p, i64 item) {
    i64 h = s->hidden, j = item * PANEL, qkv = up_to(3 * h, PANEL), out = up_to(h, PANEL), up = up_to(s->inner, PANEL);
    if (j < qkv) {
        pack_panel(j, 3 * h, h, w[QKV], 3 * h, 1, w[LN1_G], 0, p.qkv);
        shifted(j, 3 * h, h, w[QKV], w[LN1_B], w[QKV_B], p.qkv_b);
    } else if ((j -= qkv) < up) {
        pack_panel(j, s->inner, h, w[UP], s->inner, 1, w[LN2_G], 0, p.up);
        shifted(j, s->inner, h, w[UP], w[LN2_B], w[UP_B], p.up_b);
    } else if ((j -= up) < out)
        pack_panel(j, h, h, w[OUT], h, 1, 0, 0, p.out);
    else
        pack_panel(j - out, h, s->inner, w[DOWN], h, 1, 0, 0, p.down);
}
static i64 items_forward(const Shape *s) { return panels(3 * s->hidden) + 2 * panels(s->hidden) + panels(s->inner); }

/* One panel of a layer's weights as the backward pass reads them. */
static void pack_backward(const Shape *s, const float *const *w, Packed p, i64 item) {
    i64 h = s->hidden, n = panels(h);
    if (item < n)
        pack_panel(item * PANEL, h, 3 * h, w[QKV], 1, 3 * h, w[LN1_G], 1, p.qkv);
    else if ((item -= n) < n)
        pack_panel(item * PANEL, h, h, w[OUT], 1, h, 0, 0, p.out);
    else if ((item -= n) < n)
        pack_panel(item * PANEL, h, s->inner, w[UP], 1, s->inner, w[LN2_G], 1, p.up);
    else
        pack_panel((item - n) * PANEL, s->inner, h, w[DOWN], 1, h, 0, 0, p.down);
}
static i64 items_backward(const Shape *s) { return 3 * panels(s->hidden) + panels(s->inner); }

/* ------------------------------------------------------------------ what a pass keeps for its backward pass */

typedef struct {
    float *hat1, *qkv, *o, *hat2, *u; /* (rows, .) normalised input, q|k|v, what attention found, ..., before GELU */
    float *rstd1, *rstd2, *lse;       /* (rows,), (rows,), (rows, heads) */
} Kept;

static i64 kept_floats(const Shape *s, i64 rows) {
    return up_to(rows * (6 * s->hidden + s->inner + s->heads + 2), LANES);
}

static Kept kept_at(const Shape *s, i64 rows, float *at) {
    i64 h = rows * s->hidden;
    Kept k = {.hat1 = at, .qkv = at + h, .o = at + 4 * h, .hat2 = at + 5 * h, .u = at + 6 * h};
    k.rstd1 = k.u + rows * s->inner, k.rstd2 = k.rstd1 + rows, k.lse = k.rstd2 + rows;
    return k;
}

/* Floats that `forward` keeps: for a backward pass all layers, and the last layer's rows that are read. */
i64 gpt2_kept(const Shape *s, const Batch *b, int backward) {
    i64 last = b->states * (s->hidden + 1);
    return backward ? s->layers * kept_floats(s, b->rows) + b->states * s->hidden + last : kept_floats(s, b->rows);
}

/* ------------------------------------------------------------------ forward */

static void gather(i64 count, const i64 *at, i64 size, const float *from, float *to) {
    for (i64 i = 0; i < count; i++) memcpy(to + i * size, from + at[i] * size, 4 * size);
}

/* What follows attention in a layer, for m rows: x += o OUT, then x += gelu(hat2 UP) DOWN; `wide` (m, inner). */
static void after_attention(const Shape *s, const float *const *w, Packed p, i64 m, const float *o, float *hat2,
                            float *rstd2, float *u, float *wide, float *x) {
    i64 h = s->hidden, inner = s->inner;
    product(m, h, h, o, h, 1, p.out, 0, w[OUT_B], x, h, 1);
    normalise(m, h, *s->eps, x, hat2, rstd2);
    product(m, inner, h, hat2, h, 1, p.up, 0, p.up_b, u, inner, 0);
    for (i64 i = 0; i < m * inner; i += LANES) AT(wide + i) = gelu(AT(u + i), 0);
    product(m, h, inner, wide, inner, 1, p.down, 0, w[DOWN_B], x, h, 1);
}

static i64 longest(const Batch *b) {
    i64 most = 1;
    for (i64 i = 0; i < b->sequences; i++) most = max64(most, b->starts[i + 1] - b->starts[i]);
    return most;
}

/* What the LM head reads, `hidden` (states, H). `kept`: see gpt2_kept. `cache`: takes keys and values, or is null.
   Returns 0, or 1 where memory ran out. */
int gpt2_forward(const Shape *s, const Batch *b, const float *const *w, float *kept, int backward, Cache *cache,
                 float *hidden, int threads) {
    i64 h = s->hidden, size = h / s->heads, rows = b->rows, step = kept_floats(s, rows), most = longest(b);
    float *x = room(rows * h), *weights = room(packed_floats(s));
    float *last = kept + s->layers * step; /* of a backward pass: o at the states, their hats and rstds */
    int failed = !x || !weights;
    if (!failed)
#pragma omp parallel num_threads(threads)
    {
        Head head = {0};
        float *wide = room(CHUNK * s->inner), *spare = room(CHUNK * h + CHUNK);
        int ready = head_room(&head, size, most, 0) && wide && spare;
        if (!ready)
#pragma omp atomic write
            failed = 1;
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (i64 r = 0; r < rows; r++)
                for (i64 j = 0; j < h; j += LANES)
                    AT(x + r * h + j) = AT(w[WTE] + b->ids[r] * h + j) + AT(w[WPE] + b->positions[r] * h + j);
            for (i64 l = 0; l < s->layers; l++) {
                const float *const *v = w + FIRST + l * TENSORS;
                Packed p = packed_at(s, weights);
                Kept k = kept_at(s, rows, kept + (backward ? l * step : 0));
                int final = l == s->layers - 1;
                i64 count = final ? b->states : rows;
                float *y = final ? hidden : x, *o = final && backward ? last : k.o;
#pragma omp for schedule(dynamic)
                for (i64 i = 0; i < items_forward(s); i++) pack_forward(s, v, p, i);
#pragma omp for schedule(dynamic)
                for (i64 r = 0; r < rows; r += CHUNK) {
                    i64 m = min64(CHUNK, rows - r);
                    normalise(m, h, *s->eps, x + r * h, k.hat1 + r * h, k.rstd1 + r);
                    product(m, 3 * h, h, k.hat1 + r * h, h, 1, p.qkv, 0, p.qkv_b, k.qkv + r * 3 * h, 3 * h, 0);
                }
#pragma omp for schedule(dynamic)
                for (i64 i = 0; i < b->sequences * s->heads; i++) {
                    i64 which = i / s->heads, part = i % s->heads, r = b->starts[which];
                    i64 length = b->starts[which + 1] - r;
                    attend(&head, length, k.qkv + r * 3 * h + part * size, h, s->heads, s->scaling[l],
                           k.o + r * h + part * size, k.lse + r * s->heads + part);
                    if (cache) {
                        i64 place = (l * cache->slots + which) * s->heads + part;
                        float *keys = cache->keys + place * size * cache->capacity;
                        float *values = cache->values + place * size * cache->capacity;
                        for (i64 d = 0; d < size; d++)
                            memcpy(keys + d * cache->capacity, head.kt + d * head.longest, 4 * length);
                        for (i64 t = 0; t < length; t++)
                            memcpy(values + t * size, head.v + t * head.padded, 4 * size);
                    }
                }
#pragma omp for schedule(dynamic)
                for (i64 r = 0; r < count; r += CHUNK) {
                    i64 m = min64(CHUNK, count - r);
                    if (final) {
                        float *at = backward ? last + r * h : spare;
                        gather(m, b->at + r, h, k.o, at);
                        gather(m, b->at + r, h, x, y + r * h);
                        o = at - r * h;
                    }
                    after_attention(s, v, p, m, o + r * h, k.hat2 + r * h, k.rstd2 + r, k.u + r * s->inner, wide,
                                    y + r * h);
                    if (final) {
                        float *hat = backward ? last + (b->states + r) * h : spare;
                        float *rstd = backward ? last + 2 * b->states * h + r : spare + CHUNK * h;
                        normalise(m, h, *s->eps, y + r * h, hat, rstd);
                        for (i64 i = 0; i < m; i++)
                            for (i64 j = 0; j < h; j += LANES)
                                AT(y + (r + i) * h + j) = AT(hat + i * h + j) * AT(w[LNF_G] + j) + AT(w[LNF_B] + j);
                    }
                }
            }
        }
        free(wide), free(spare), free(head.all);
    }
    free(x), free(weights);
    return failed;
}

/* ------------------------------------------------------------------ backward */

/* C (n_in, n_out) = X^T D over all rows, where X (rows, n_in) and D (rows, n_out), and D's column sums. */
typedef struct {
    i64 rows, n_in, n_out;
    const float *x, *d;
    float *c, *bias;
} Gradient;

static i64 blocks(i64 n, i64 size) { return (n + size - 1) / size; }

static i64 gradient_items(const Gradient *g) {
    return blocks(g->n_in, GRADIENT_ROWS) * blocks(g->n_out, GRADIENT_COLUMNS);
}

/* One block of C; those in its first rows also sum their columns of D. `packed` (GRADIENT_DEPTH, GRADIENT_COLUMNS). */
static void gradient_item(const Gradient *g, i64 item, float *packed) {
    i64 across = blocks(g->n_out, GRADIENT_COLUMNS), from = item / across * GRADIENT_ROWS;
    i64 first = item % across * GRADIENT_COLUMNS, high = min64(GRADIENT_ROWS, g->n_in - from);
    i64 wide = min64(GRADIENT_COLUMNS, g->n_out - first);
    float *c = g->c + from * g->n_out + first;
    if (!from) memset(g->bias + first, 0, 4 * wide);
    for (i64 i = 0; !g->rows && i < high; i++) memset(c + i * g->n_out, 0, 4 * wide);
    for (i64 r = 0; r < g->rows; r += GRADIENT_DEPTH) {
        i64 m = min64(GRADIENT_DEPTH, g->rows - r);
        for (i64 j = 0; j < wide; j += PANEL) {
            i64 width = min64(PANEL, wide - j);
            float *panel = packed + j * m;
            for (i64 i = 0; i < m; i++)
                for (i64 k = 0; k < width; k += LANES)
                    AT(panel + i * width + k) = AT(g->d + (r + i) * g->n_out + first + j + k);
            for (i64 k = 0; !from && k < width; k += LANES) {
                vec sum = AT(g->bias + first + j + k);
                for (i64 i = 0; i < m; i++) sum += AT(panel + i * width + k);
                AT(g->bias + first + j + k) = sum;
            }
        }
        product(high, wide, m, g->x + r * g->n_in + from, 1, g->n_in, packed, 0, 0, c, g->n_out, r > 0);
    }
}

/* A row of a weight behind a norm: from the gradient behind the normalised input to those of weight, scale, shift. */
static void unfold(i64 n, float scale, float shift, const float *w, const float *bias, float *grad, float *d_scale,
                   float *d_shift) {
    vec along = {0}, down = {0};
    for (i64 j = 0; j < n; j += LANES) {
        along += AT(grad + j) * AT(w + j);
        down += AT(bias + j) * AT(w + j);
        AT(grad + j) = AT(grad + j) * scale + AT(bias + j) * shift;
    }
    *d_scale = sum_of(along), *d_shift = sum_of(down);
}

/* Gradients `g` of all tensors `w` from that of what `gpt2_forward` gave, dhidden (states, H). Uses up `kept`.
   Returns 0, or 1 where memory ran out. */
int gpt2_backward(const Shape *s, const Batch *b, const float *const *w, float *const *g, float *kept,
                  const float *dhidden, int threads) {
    i64 h = s->hidden, inner = s->inner, size = h / s->heads, rows = b->rows, states = b->states;
    i64 step = kept_floats(s, rows), most = longest(b);
    float *last = kept + s->layers * step;
    float *all = room(rows * (7 * h + inner) + states * h + packed_floats(s));
    int failed = !all;
    if (!failed)
#pragma omp parallel num_threads(threads)
    {
        float *dx = all, *dx1 = dx + rows * h, *dout = dx1 + rows * h, *dqkv = dout + rows * h;
        float *next = dqkv + 3 * rows * h, *du = next + rows * h, *dlast = du + rows * inner;
        float *weights = dlast + states * h;
        Head head = {0};
        float *wide = room(CHUNK * inner), *spare = room(CHUNK * h), *packed = room(GRADIENT_DEPTH * GRADIENT_COLUMNS);
        int ready = head_room(&head, size, most, 1) && wide && spare && packed;
        if (!ready)
#pragma omp atomic write
            failed = 1;
#pragma omp barrier
        if (!failed) {
            float *hat = last + states * h, *rstd = last + 2 * states * h;
#pragma omp for schedule(static) nowait
            for (i64 j = 0; j < h; j += LANES) {
                vec scale = {0}, shift = {0};
                for (i64 i = 0; i < states; i++) {
                    scale += AT(dhidden + i * h + j) * AT(hat + i * h + j);
                    shift += AT(dhidden + i * h + j);
                }
                AT(g[LNF_G] + j) = scale, AT(g[LNF_B] + j) = shift;
            }
#pragma omp for schedule(static)
            for (i64 i = 0; i < states; i++) {
                for (i64 j = 0; j < h; j += LANES) AT(spare + j) = AT(dhidden + i * h + j) * AT(w[LNF_G] + j);
                normalise_back(1, h, spare, hat + i * h, rstd + i, 0, dlast + i * h);
            }
            for (i64 l = s->layers - 1; l >= 0; l--) {
                const float *const *v = w + FIRST + l * TENSORS;
                float *const *gv = g + FIRST + l * TENSORS;
                Packed p = packed_at(s, weights);
                Kept k = kept_at(s, rows, kept + l * step);
                int final = l == s->layers - 1;
                i64 count = final ? states : rows;
                const float *dy = final ? dlast : dx;
#pragma omp for schedule(dynamic)
                for (i64 i = 0; i < items_backward(s); i++) pack_backward(s, v, p, i);
                if (final) {
#pragma omp for schedule(static)
                    for (i64 r = 0; r < rows; r++) {
                        memset(dout + r * h, 0, 4 * h);
                        memset(next + r * h, 0, 4 * h);
                    }
                }
#pragma omp for schedule(dynamic)
                for (i64 r = 0; r < count; r += CHUNK) {
                    i64 m = min64(CHUNK, count - r);
                    float *u = k.u + r * inner, *d = du + r * inner;
                    product(m, inner, h, dy + r * h, h, 1, p.down, 0, 0, d, inner, 0);
                    for (i64 i = 0; i < m * inner; i += LANES) {
                        vec slope;
                        AT(u + i) = gelu(AT(u + i), &slope);
                        AT(d + i) = AT(d + i) * slope;
                    }
                    product(m, h, inner, d, inner, 1, p.up, 0, 0, spare, h, 0);
                    normalise_back(m, h, spare, k.hat2 + r * h, k.rstd2 + r, dy + r * h, dx1 + r * h);
                    float *to = final ? wide : dout + r * h;
                    product(m, h, h, dx1 + r * h, h, 1, p.out, 0, 0, to, h, 0);
                    for (i64 i = 0; final && i < m; i++) {
                        memcpy(dout + b->at[r + i] * h, to + i * h, 4 * h);
                        memcpy(next + b->at[r + i] * h, dx1 + (r + i) * h, 4 * h);
                    }
                }
#pragma omp for schedule(dynamic)
                for (i64 i = 0; i < b->sequences * s->heads; i++) {
                    i64 r = b->starts[i / s->heads], part = i % s->heads;
                    attend_back(&head, b->starts[i / s->heads + 1] - r, k.qkv + r * 3 * h + part * size, h, s->heads,
                                s->scaling[l], k.o + r * h + part * size, k.lse + r * s->heads + part,
                                dout + r * h + part * size, dqkv + r * 3 * h + part * size);
                }
                const float *base = final ? next : dx1, *o = final ? last : k.o;
                Gradient all_four[4] = {
                    {count, inner, h, k.u, dy, gv[DOWN], gv[DOWN_B]},
                    {count, h, inner, k.hat2, du, gv[UP], gv[UP_B]},
                    {count, h, h, o, dx1, gv[OUT], gv[OUT_B]},
                    {rows, h, 3 * h, k.hat1, dqkv, gv[QKV], gv[QKV_B]},
                };
                i64 items = 0;
                for (int i = 0; i < 4; i++) items += gradient_items(all_four + i);
#pragma omp for schedule(dynamic)
                for (i64 i = 0; i < items; i++) {
                    const Gradient *which = all_four;
                    i64 item = i;
                    while (item >= gradient_items(which)) item -= gradient_items(which++);
                    gradient_item(which, item, packed);
                }
                /* behind the gradients, for which dx is still what came in */
#pragma omp for schedule(dynamic) nowait
                for (i64 r = 0; r < rows; r += CHUNK) {
                    i64 m = min64(CHUNK, rows - r);
                    product(m, h, 3 * h, dqkv + r * 3 * h, 3 * h, 1, p.qkv, 0, 0, spare, h, 0);
                    normalise_back(m, h, spare, k.hat1 + r * h, k.rstd1 + r, base + r * h, dx + r * h);
                }
#pragma omp for schedule(static)
                for (i64 i = 0; i < h; i++) {
                    unfold(inner, v[LN2_G][i], v[LN2_B][i], v[UP] + i * inner, gv[UP_B], gv[UP] + i * inner,
                           gv[LN2_G] + i, gv[LN2_B] + i);
                    unfold(3 * h, v[LN1_G][i], v[LN1_B][i], v[QKV] + i * 3 * h, gv[QKV_B], gv[QKV] + i * 3 * h,
                           gv[LN1_G] + i, gv[LN1_B] + i);
                }
            }
            /* Columns to threads: each sum has one owner. g[WTE] and g[WPE] come as zeros. */
#pragma omp for schedule(static)
            for (i64 j = 0; j < h; j += LANES)
                for (i64 r = 0; r < rows; r++) {
                    float *wte = g[WTE] + b->ids[r] * h + j, *wpe = g[WPE] + b->positions[r] * h + j;
                    AT(wte) = AT(wte) + AT(dx + r * h + j);
                    AT(wpe) = AT(wpe) + AT(dx + r * h + j);
                }
        }
        free(wide), free(spare), free(packed), free(head.all);
    }
    free(all);
    return failed;
}

/* ------------------------------------------------------------------ one more token */

/* Floats of all layers' weights as `gpt2_step` reads them. */
i64 gpt2_packed(const Shape *s) { return s->layers * packed_floats(s); }

void gpt2_pack(const Shape *s, const float *const *w, float *packed, int threads) {
    i64 each = items_forward(s);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 i = 0; i < s->layers * each; i++)
        pack_forward(s, w + FIRST + i / each * TENSORS, packed_at(s, packed + i / each * packed_floats(s)), i % each);
}

/* out (n vectors) = sum over k of x[k] times the row b + k * ldb, in two sums that do not wait for
   each other. */
INLINE void weigh(const int n, i64 depth, const float *x, const float *b, i64 ldb, float *out) {
    vec even[4], odd[4];
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) even[j] = odd[j] = (vec){0};
    i64 k = 0;
    for (; k + 2 <= depth; k += 2)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            even[j] += x[k] * AT(b + k * ldb + j * LANES);
            odd[j] += x[k + 1] * AT(b + (k + 1) * ldb + j * LANES);
        }
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
        if (k < depth) even[j] += x[k] * AT(b + k * ldb + j * LANES);
        AT(out + j * LANES) = even[j] + odd[j];
    }
}

/* The same for any number of columns, in whole vectors. */
static void weigh_all(i64 columns, i64 depth, const float *x, const float *b, i64 ldb, float *out) {
    i64 j = 0;
    for (; j + 4 * LANES <= columns; j += 4 * LANES) weigh(4, depth, x, b + j, ldb, out + j);
    switch ((columns - j + LANES - 1) / LANES) {
        case 1: weigh(1, depth, x, b + j, ldb, out + j); break;
        case 2: weigh(2, depth, x, b + j, ldb, out + j); break;
        case 3: weigh(3, depth, x, b + j, ldb, out + j); break;
        case 4: weigh(4, depth, x, b + j, ldb, out + j); break;
    }
}

/* What one query (size,) finds in its slot, the last of `length` tokens. `p` (capacity,), `found` in whole vectors. */
static void look_up(const float *q, i64 size, i64 length, i64 capacity, const float *keys, const float *values,
                    float *p, float *found) {
    i64 whole = up_to(length, LANES);
    vec most = SPLAT(-INFINITY), total = {0};
    weigh_all(whole, size, q, keys, capacity, p);
    for (i64 t = length; t < whole; t++) p[t] = -INFINITY;
    for (i64 t = 0; t < whole; t += LANES) most = pick(AT(p + t) > most, AT(p + t), most);
    float top = largest_of(most);
    for (i64 t = 0; t < whole; t += LANES) AT(p + t) = exp_of(AT(p + t) - top);
    for (i64 t = length; t < whole; t++) p[t] = 0;
    for (i64 t = 0; t < whole; t += LANES) total += AT(p + t);
    float share = 1.0f / sum_of(total);
    for (i64 t = 0; t < whole; t += LANES) AT(p + t) = AT(p + t) * share;
    weigh_all(up_to(size, LANES), length, p, values, size, found);
}

/* Some rows of a step. */
static void step_rows(const Shape *s, const float *const *w, float *packed, const Cache *c, i64 m, const i64 *tokens,
                      const i64 *slots, const i64 *lengths, float *hidden, float *work) {
    i64 h = s->hidden, size = h / s->heads, capacity = c->capacity;
    float *hat = work, *qkv = hat + m * h, *o = qkv + 3 * m * h, *rstd = o + m * h, *u = rstd + m;
    float *wide = u + m * s->inner, *p = wide + m * s->inner, *found = p + capacity;
    for (i64 i = 0; i < m; i++)
        for (i64 j = 0; j < h; j += LANES)
            AT(hidden + i * h + j) = AT(w[WTE] + tokens[i] * h + j) + AT(w[WPE] + lengths[i] * h + j);
    for (i64 l = 0; l < s->layers; l++) {
        Packed weights = packed_at(s, packed + l * packed_floats(s));
        normalise(m, h, *s->eps, hidden, hat, rstd);
        product(m, 3 * h, h, hat, h, 1, weights.qkv, 0, weights.qkv_b, qkv, 3 * h, 0);
        for (i64 i = 0; i < m; i++)
            for (i64 part = 0; part < s->heads; part++) {
                i64 place = (l * c->slots + slots[i]) * s->heads + part;
                float *keys = c->keys + place * size * capacity, *values = c->values + place * size * capacity;
                const float *q = qkv + i * 3 * h + part * size;
                for (i64 d = 0; d < size; d++) keys[d * capacity + lengths[i]] = s->scaling[l] * q[h + d];
                memcpy(values + lengths[i] * size, q + 2 * h, 4 * size);
                look_up(q, size, lengths[i] + 1, capacity, keys, values, p, found);
                memcpy(o + i * h + part * size, found, 4 * size);
            }
        after_attention(s, w + FIRST + l * TENSORS, weights, m, o, hat, rstd, u, wide, hidden);
    }
    normalise(m, h, *s->eps, hidden, hat, rstd);
    for (i64 i = 0; i < m; i++)
        for (i64 j = 0; j < h; j += LANES)
            AT(hidden + i * h + j) = AT(hat + i * h + j) * AT(w[LNF_G] + j) + AT(w[LNF_B] + j);
}

/* One token each (count,) behind the `lengths` (count,) that its slot holds; what the LM head reads, `hidden`
   (count, H). Returns 0, or 1 where memory ran out. */
int gpt2_step(const Shape *s, const float *const *w, float *packed, const Cache *c, i64 count, const i64 *tokens,
              const i64 *slots, const i64 *lengths, float *hidden, int threads) {
    i64 h = s->hidden, rows = min64(CHUNK, up_to((count + threads - 1) / threads, TILE));
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *work = room(rows * (5 * h + 2 * s->inner + 1) + c->capacity + up_to(h, LANES));
        if (!work)
#pragma omp atomic write
            failed = 1;
#pragma omp for schedule(dynamic)
        for (i64 r = 0; r < count; r += rows)
            if (work)
                step_rows(s, w, packed, c, min64(rows, count - r), tokens + r, slots + r, lengths + r, hidden + r * h,
                          work);
        free(work);
    }
    return failed;
}
