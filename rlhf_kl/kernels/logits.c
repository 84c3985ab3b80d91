/* Logits from hidden states, and log-probabilities from logits, with their gradients, in float32. */

#include "products.h"

#define ROWS 96  /* of a gradient that one thread makes at a time */
#define DEEP 192 /* summed over so many at a time */

i64 lanes(void) { return LANES; }

#define HEAD_ROWS 480 /* of logits that one thread makes at a time, a panel wide */

/* Logits (rows, vocabulary) = x (rows, hidden) W^T for W (vocabulary, hidden). Returns 0, or 1 where memory ran out. */
int head_forward(i64 rows, i64 hidden, i64 vocabulary, const float *x, const float *w, float *logits, int threads) {
    i64 blocks = (rows + HEAD_ROWS - 1) / HEAD_ROWS;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *packed = room(PANEL * hidden), *part = room(TILE * PANEL);
        if (!packed || !part)
#pragma omp atomic write
            failed = 1;
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < blocks * panels(vocabulary); item++) {
            i64 j = item / blocks * PANEL, width = min64(PANEL, vocabulary - j), from = item % blocks * HEAD_ROWS;
            i64 to = min64(rows, from + HEAD_ROWS);
            if (!packed || !part) continue;
            for (i64 i = 0; i < PANEL; i++)
                for (i64 k = 0; k < hidden; k++) packed[k * PANEL + i] = i < width ? w[(j + i) * hidden + k] : 0;
            if (width == PANEL) {
                product(to - from, PANEL, hidden, x + from * hidden, hidden, 1, packed, PANEL, 0,
                        logits + from * vocabulary + j, vocabulary, 0);
                continue;
            }
            for (i64 r = from; r < to; r += TILE) {
                i64 m = min64(TILE, to - r);
                product(m, PANEL, hidden, x + r * hidden, hidden, 1, packed, PANEL, 0, part, PANEL, 0);
                for (i64 i = 0; i < m; i++) memcpy(logits + (r + i) * vocabulary + j, part + i * PANEL, 4 * width);
            }
        }
        free(packed), free(part);
    }
    return failed;
}

/* Gradients of `head_forward`'s x (rows, hidden) and W (vocabulary, hidden) from that of the logits.
   Returns 0, or 1 where memory ran out. */
int head_backward(i64 rows, i64 hidden, i64 vocabulary, const float *x, const float *w, const float *dlogits, float *dx,
                  float *dw, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *part = room(DEEP * ROWS);
        if (!part)
#pragma omp atomic write
            failed = 1;
#pragma omp for schedule(dynamic) nowait
        for (i64 r = 0; r < rows; r += ROWS)
            product(min64(ROWS, rows - r), hidden, vocabulary, dlogits + r * vocabulary, vocabulary, 1, w, hidden, 0,
                    dx + r * hidden, hidden, 0);
#pragma omp for schedule(dynamic)
        for (i64 v = 0; v < vocabulary; v += ROWS) {
            i64 wide = min64(ROWS, vocabulary - v);
            if (!rows) memset(dw + v * hidden, 0, 4 * wide * hidden);
            for (i64 r = 0; part && r < rows; r += DEEP) {
                i64 m = min64(DEEP, rows - r);
                for (i64 i = 0; i < m; i++) memcpy(part + i * ROWS, dlogits + (r + i) * vocabulary + v, 4 * wide);
                product(wide, hidden, m, part, 1, ROWS, x + r * hidden, hidden, 0, dw + v * hidden, hidden, r > 0);
            }
        }
        free(part);
    }
    return failed;
}

/* The next whole vector of a row of `left` numbers; -inf behind its end. */
INLINE vec next(const float *x, i64 left) {
    if (left >= LANES) return AT(x);
    vec rest = SPLAT(-INFINITY);
    for (i64 i = 0; i < left; i++) rest[i] = x[i];
    return rest;
}

/* The largest number of a row of scale * x, and the log of the sum of exp(scale * x - largest): apart, since their sum
   would round the smaller one away. */
static void normaliser(i64 size, const float *x, float scale, float *largest, float *log_sum) {
    vec most = SPLAT(-INFINITY), total = {0};
    for (i64 j = 0; j < size; j += LANES) {
        vec y = scale * next(x + j, size - j);
        most = pick(y > most, y, most);
    }
    *largest = largest_of(most);
    for (i64 j = 0; j < size; j += LANES) total += exp_of(scale * next(x + j, size - j) - *largest);
    *log_sum = logf(sum_of(total));
}

/* log softmax(scale * logits)[id] of each row of logits (rows, size), and what `chosen_backward` wants to know of it:
   norms (rows, 2). */
void chosen_forward(i64 rows, i64 size, const float *logits, const i64 *ids, float scale, float *logprobs,
                    float *norms, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 r = 0; r < rows; r++) {
        normaliser(size, logits + r * size, scale, norms + 2 * r, norms + 2 * r + 1);
        logprobs[r] = scale * logits[r * size + ids[r]] - norms[2 * r] - norms[2 * r + 1];
    }
}

/* Gradient of the logits from that of the log-probabilities, `grad` (rows,). */
void chosen_backward(i64 rows, i64 size, const float *logits, const i64 *ids, float scale, const float *norms,
                     const float *grad, float *dlogits, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (i64 r = 0; r < rows; r++) {
        const float *x = logits + r * size;
        float *out = dlogits + r * size, weight = -scale * grad[r], largest = norms[2 * r], log_sum = norms[2 * r + 1];
        i64 j = 0;
        for (; j + LANES <= size; j += LANES)
            AT(out + j) = weight * exp_of(scale * AT(x + j) - largest - log_sum);
        vec tail = weight * exp_of(scale * next(x + j, size - j) - largest - log_sum);
        for (i64 i = 0; j + i < size; i++) out[j + i] = tail[i];
        out[ids[r]] += scale * grad[r];
    }
}

/* Inverse-CDF sampling: in each row of logits (rows, size) the first token whose cumulative probability under
   softmax(scale * logits) is above uniform (rows,). Returns 0, or 1 where memory ran out. */
int pick_forward(i64 rows, i64 size, const float *logits, const double *uniform, float scale, i64 *ids, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *p = room(up_to(size, LANES));
        if (!p)
#pragma omp atomic write
            failed = 1;
#pragma omp for schedule(static)
        for (i64 r = 0; r < rows; r++) {
            if (!p) continue;
            const float *x = logits + r * size;
            vec most = SPLAT(-INFINITY);
            for (i64 j = 0; j < size; j += LANES) {
                vec y = scale * next(x + j, size - j);
                most = pick(y > most, y, most);
            }
            float largest = largest_of(most);
            double total = 0, before = 0;
            for (i64 j = 0; j < size; j += LANES) {
                vec y = scale * next(x + j, size - j);
                /* what is forbidden must not have the smallest number that exp knows */
                AT(p + j) = pick(y > SPLAT(-INFINITY), exp_of(y - largest), (vec){0});
                total += sum_of(AT(p + j));
            }
            i64 j = 0, end;
            double threshold = uniform[r] * total;
            for (; j + LANES < size && before + sum_of(AT(p + j)) <= threshold; j += LANES)
                before += sum_of(AT(p + j));
            for (end = min64(size, j + LANES); j < end && (before += p[j]) <= threshold;) j++;
            /* Sums of another order round otherwise: then it is the last that can be drawn. */
            for (j = min64(j, end - 1); j > 0 && !(p[j] > 0);) j--;
            ids[r] = j;
        }
        free(p);
    }
    return failed;
}
