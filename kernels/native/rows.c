#include "rows.h"

#include "fp8.h"

void norm_row(const float *x, const float *weight, float eps, int width, Rows out, int row) {
    const int64_t start = (int64_t)row * out.width;
    if (!weight) {
        for (int i = 0; i < width; i += LANES) store_as(out.wide, out.data, start + i, load(x + i));
        return;
    }
    vf squares = splat(0.0f);
    for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(sum(squares) / width + eps);
    for (int i = 0; i < width; i += LANES)
        store_as(out.wide, out.data, start + i, load(x + i) * scale * load(weight + i));
}

void norm_parts(Rows x, Norms norms, float *room, Rows out, int row) {
    const int64_t start = (int64_t)row * x.width;
    for (int i = 0; i < x.width; i += LANES) store(room + i, load_as(x.wide, x.data, start + i));
    const int width = norms.weights ? x.width / norms.count : x.width;
    for (int part = 0; part < x.width; part += width) {
        const Rows to = {(char *)out.data + (int64_t)part * (out.wide ? 4 : 2), out.width, out.wide};
        norm_row(room + part, norms.weights ? norms.weights + part : NULL, norms.eps, width, to, row);
    }
}

void gate_row(const float *gates, int width, Rows out, int row) {
    for (int i = 0; i < width; i += LANES)
        store_as(out.wide, out.data, (int64_t)row * out.width + i, silu(load(gates + i)) * load(gates + width + i));
}

static void rotate_head(float *x, const float *table, int dims) {
    const float *sines = table + dims / 2;
    float *high = x + dims / 2;
    for (int i = 0; i < dims / 2; i++) {
        float low = x[i];
        x[i] = low * table[i] - high[i] * sines[i];
        high[i] = high[i] * table[i] + low * sines[i];
    }
}

/* LANES numbers of keys or values to the pool. */
static void keep(const Heads *heads, void *pool, int64_t index, vf numbers) {
    if (heads->kept == E4M3)
        store_fp8(E4M3, (uint8_t *)pool + index, numbers);
    else if (heads->kept == E5M2)
        store_fp8(E5M2, (uint8_t *)pool + index, numbers);
    else
        store_as(heads->wide, pool, index, numbers);
}

void rotate_row(const Heads *heads, const Layout *layout, float *qkv, Pools pools, int row) {
    const int dims = heads->head_dim, rotated = heads->num_heads + heads->num_kv_heads;
    const float *table = heads->rope + (int64_t)layout->positions[row] * dims;
    for (int h = 0; h < rotated; h++) {
        float *x = qkv + h * dims;
        const float *weight = h < heads->num_heads ? heads->q_norm : heads->k_norm;
        if (weight) norm_row(x, weight, heads->eps, dims, (Rows){x, dims, 1}, 0);
        rotate_head(x, table, dims);
    }
    const int width = heads->num_kv_heads * dims;
    const float *k = qkv + heads->num_heads * dims, *v = k + width;
    int64_t start = (int64_t)layout->slots[row] * width;
    for (int i = 0; i < width; i += LANES) {
        keep(heads, pools.k, start + i, load(k + i));
        keep(heads, pools.v, start + i, load(v + i));
    }
}
