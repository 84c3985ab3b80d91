/* Causal attention of one head to its sequence, forward and backward. */

#pragma once

#include "products.h"

#define QUERIES 24 /* taken through it at a time */

typedef struct {
    i64 size, padded, longest; /* of a head; in whole vectors; keys in whole panels */
    float *kt, *vt;            /* (size, longest) transposed keys, times the scaling, and values */
    float *q, *k, *v, *dout;   /* (longest, padded) */
    float *dq, *dk, *dv;       /* (longest, padded) */
    float *p, *ds;             /* (QUERIES, longest) */
    float *all;
} Head;

static int head_room(Head *h, i64 size, i64 length, int backward) {
    h->size = size, h->padded = up_to(size, LANES), h->longest = up_to(length, PANEL);
    i64 wide = h->longest * h->padded, deep = size * h->longest, block = QUERIES * h->longest;
    float *at = h->all = room(wide + deep + block + (backward ? 6 * wide + deep + block : 0));
    if (!at) return 0;
    h->kt = at, at += deep, h->v = at, at += wide, h->p = at, at += block;
    if (backward) {
        h->vt = at, at += deep, h->ds = at, at += block;
        h->q = at, at += wide, h->k = at, at += wide, h->dout = at, at += wide;
        h->dq = at, at += wide, h->dk = at, at += wide, h->dv = at;
    }
    return 1;
}

/* Rows of a head's columns, in whole vectors with zeros behind. */
static void lay_out(const Head *h, i64 length, const float *from, i64 stride, float *to) {
    for (i64 t = 0; t < length; t++, from += stride, to += h->padded) {
        memcpy(to, from, 4 * h->size);
        memset(to + h->size, 0, 4 * (h->padded - h->size));
    }
}

static void transpose(const Head *h, i64 length, const float *from, i64 stride, float scale, float *to) {
    i64 whole = up_to(length, PANEL);
    for (i64 d = 0; d < h->size; d++) {
        float *row = to + d * h->longest;
        for (i64 t = 0; t < length; t++) row[t] = scale * from[t * stride + d];
        memset(row + length, 0, 4 * (whole - length));
    }
}

/* o (length, size) and lse (length,) = log sum exp of each query's scores; rows of qkv and o `3 hidden`, `hidden`
   apart. */
static void attend(Head *h, i64 length, const float *qkv, i64 hidden, i64 heads, float scale, float *o, float *lse) {
    i64 stride = 3 * hidden, ld = h->longest;
    float found[QUERIES * h->padded];
    transpose(h, length, qkv + hidden, stride, scale, h->kt);
    lay_out(h, length, qkv + 2 * hidden, stride, h->v);
    for (i64 first = 0; first < length; first += QUERIES) {
        i64 m = min64(QUERIES, length - first), end = first + m, whole = up_to(end, LANES);
        product(m, up_to(end, PANEL), h->size, qkv + first * stride, stride, 1, h->kt, ld, 0, h->p, ld, 0);
        for (i64 i = 0; i < m; i++) {
            float *p = h->p + i * ld;
            i64 seen = first + i + 1;
            for (i64 j = seen; j < whole; j++) p[j] = -INFINITY;
            vec most = SPLAT(-INFINITY), total = {0};
            for (i64 j = 0; j < whole; j += LANES) most = pick(AT(p + j) > most, AT(p + j), most);
            float top = largest_of(most);
            for (i64 j = 0; j < whole; j += LANES) AT(p + j) = exp_of(AT(p + j) - top);
            for (i64 j = seen; j < whole; j++) p[j] = 0;
            for (i64 j = 0; j < whole; j += LANES) total += AT(p + j);
            float sum = sum_of(total);
            for (i64 j = 0; j < whole; j += LANES) AT(p + j) = AT(p + j) * (1.0f / sum);
            if (lse) lse[(first + i) * heads] = top + logf(sum);
        }
        product(m, h->padded, end, h->p, ld, 1, h->v, h->padded, 0, found, h->padded, 0);
        for (i64 i = 0; i < m; i++) memcpy(o + (first + i) * hidden, found + i * h->padded, 4 * h->size);
    }
}

/* dqkv from dout. A query whose gradient is zero throughout adds nothing; blocks of them are left out. */
static void attend_back(Head *h, i64 length, const float *qkv, i64 hidden, i64 heads, float scale, const float *o,
                        const float *lse, const float *dout, float *dqkv) {
    i64 stride = 3 * hidden, ld = h->longest, pad = h->padded;
    float delta[QUERIES];
    transpose(h, length, qkv + hidden, stride, scale, h->kt);
    transpose(h, length, qkv + 2 * hidden, stride, 1, h->vt);
    lay_out(h, length, qkv, stride, h->q);
    lay_out(h, length, qkv + hidden, stride, h->k);
    lay_out(h, length, dout, hidden, h->dout);
    memset(h->dq, 0, 4 * length * pad);
    memset(h->dk, 0, 4 * length * pad);
    memset(h->dv, 0, 4 * length * pad);
    for (i64 first = 0; first < length; first += QUERIES) {
        i64 m = min64(QUERIES, length - first), end = first + m, whole = up_to(end, LANES);
        int any = 0;
        for (i64 i = 0; i < m; i++) {
            const float *d = h->dout + (first + i) * pad, *y = o + (first + i) * hidden;
            delta[i] = 0;
            for (i64 j = 0; j < h->size; j++) {
                delta[i] += d[j] * y[j];
                any |= d[j] != 0;
            }
        }
        if (!any) continue;
        product(m, up_to(end, PANEL), h->size, h->q + first * pad, pad, 1, h->kt, ld, 0, h->p, ld, 0);
        product(m, up_to(end, PANEL), h->size, h->dout + first * pad, pad, 1, h->vt, ld, 0, h->ds, ld, 0);
        for (i64 i = 0; i < m; i++) {
            float *p = h->p + i * ld, *ds = h->ds + i * ld, norm = lse[(first + i) * heads];
            for (i64 j = 0; j < whole; j += LANES) AT(p + j) = exp_of(AT(p + j) - norm);
            for (i64 j = first + i + 1; j < whole; j++) p[j] = 0;
            for (i64 j = 0; j < whole; j += LANES) AT(ds + j) = AT(p + j) * (AT(ds + j) - delta[i]) * scale;
        }
        product(m, pad, end, h->ds, ld, 1, h->k, pad, 0, h->dq + first * pad, pad, 0);
        product(end, pad, m, h->p, 1, ld, h->dout + first * pad, pad, 0, h->dv, pad, 1);
        product(end, pad, m, h->ds, 1, ld, h->q + first * pad, pad, 0, h->dk, pad, 1);
    }
    for (i64 t = 0; t < length; t++, dqkv += stride) {
        memcpy(dqkv, h->dq + t * pad, 4 * h->size);
        memcpy(dqkv + hidden, h->dk + t * pad, 4 * h->size);
        memcpy(dqkv + 2 * hidden, h->dv + t * pad, 4 * h->size);
    }
}
