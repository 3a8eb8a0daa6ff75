/* Keys and values of 8 bits, made wide a chunk at a time: what computes with them sees no others. */
#include "chunk.h"
#include "fp8.h"

/* Keys fetched ahead of use: slots are scattered. */
#define AHEAD 16

INLINE void widen_vector(int kept, const Block *b, const uint8_t *from, void *to) {
    for (int d = 0; d < b->heads->head_dim; d += LANES) {
        const vf numbers = load_fp8(kept, from + d);
        if (b->heads->wide)
            store((float *)to + d, numbers);
        else
            store_high((bf16 *)to + d, numbers);
    }
}

INLINE void widen(int kept, Block *b, int count) {
    const Heads *h = b->heads;
    const int64_t width = (int64_t)h->num_kv_heads * h->head_dim;
    const uint8_t *k = (const uint8_t *)b->pools.k + b->kv_head * h->head_dim;
    const uint8_t *v = (const uint8_t *)b->pools.v + b->kv_head * h->head_dim;
    for (int i = 0; i < count; i++) {
        const int64_t from = b->slots[i] * width, next = b->slots[i + AHEAD < count ? i + AHEAD : i] * width;
        for (int d = 0; d < h->head_dim; d += 64) __builtin_prefetch(k + next + d), __builtin_prefetch(v + next + d);
        widen_vector(kept, b, k + from, (char *)b->computed.k + i * b->vector_bytes);
        widen_vector(kept, b, v + from, (char *)b->computed.v + i * b->vector_bytes);
        b->slots[i] = i;
    }
}

void widen_keys(Block *b, int count) {
    const int laid = (count + LANES - 1) / LANES * LANES; /* keys.h: so far slots are filled up */
    if (b->heads->kept == E4M3)
        widen(E4M3, b, laid);
    else
        widen(E5M2, b, laid);
}
