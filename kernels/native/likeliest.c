/* The likeliest tokens of a row of logits, and their probabilities, in one pass over memory: for drafters. */
#include "likeliest.h"

#include "simd.h"

/* Numbers that stay in the first cache between finding their maximum and summing their exponentials. */
#define BLOCK 2048
/* Numbers that are looked at together. */
#define STRIDE (4 * LANES)

/* The best so far, falling; of equals the one that came first. */
typedef struct {
    float *values;
    int32_t *ids;
    int count, most;
} Best;

static void insert(Best *best, float value, int32_t id) {
    if (best->count < best->most)
        best->count++;
    else if (!(value > best->values[best->most - 1]))
        return;
    int at = best->count - 1;
    for (; at && value > best->values[at - 1]; at--) {
        best->values[at] = best->values[at - 1];
        best->ids[at] = best->ids[at - 1];
    }
    best->values[at] = value;
    best->ids[at] = id;
}

static float number_or_least(float x) { return x == x ? x : -INFINITY; }

/* Whether a lane is set. */
INLINE int any(vi mask) {
    int64_t parts[LANES / 2], found = 0;
    memcpy(parts, &mask, sizeof parts);
    for (int i = 0; i < LANES / 2; i++) found |= parts[i];
    return found != 0;
}

static void search(const float *x, int first, int end, Best *best) {
    int i = first;
    for (; i < end && best->count < best->most; i++) insert(best, number_or_least(x[i]), i);
    for (; i + STRIDE <= end; i += STRIDE) {
        vf least = splat(best->values[best->most - 1]);
        vi higher = load(x + i) > least;
        for (int part = LANES; part < STRIDE; part += LANES) higher |= load(x + i + part) > least;
        if (any(higher))
            for (int j = i; j < i + STRIDE; j++) insert(best, number_or_least(x[j]), j);
    }
    for (; i < end; i++) insert(best, number_or_least(x[i]), i);
}

void find_highest(const float *x, int width, int count, float *values, int32_t *ids) {
    Best best = {values, ids, 0, count};
    if (count > 0) search(x, 0, width, &best);
}

/* NaN counts as infinite and stays: nothing is higher. */
static void consider(Highest *best, float value, int32_t id) {
    if (value != value)
        *best = (Highest){INFINITY, -1};
    else if (value > best->value || (value == best->value && id < best->id))
        *best = (Highest){value, id};
}

void take_highest(const float *x, int first, int count, Highest *best) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        if (!any(~(load(x + i) < splat(best->value)))) continue;
        for (int j = i; j < i + LANES; j++) consider(best, x[j], first + j);
    }
    for (; i < count; i++) consider(best, x[i], first + i);
}

int32_t join_highest(const Highest *parts, int64_t stride, int num_parts) {
    Highest best = NO_HIGHEST;
    for (int part = 0; part < num_parts; part++) {
        const Highest own = parts[part * stride];
        if (own.value > best.value || (own.value == best.value && own.id < best.id)) best = own;
    }
    return isfinite(best.value) ? best.id : -1;
}

/* Of e^(x - shift). */
static double sum_exponentials(const float *x, int first, int end, float shift) {
    vf sums = splat(0.0f);
    int i = first;
    for (; i + LANES <= end; i += LANES) sums += exponential(load(x + i) - shift);
    if (i < end) {
        float rest[LANES];
        for (int lane = 0; lane < LANES; lane++) rest[lane] = i + lane < end ? x[i + lane] : -INFINITY;
        sums += exponential(load(rest) - shift);
    }
    return sum(sums);
}

void outrider_likeliest(const float *logits, int64_t stride, int num_rows, int width, int num_top, float *probabilities,
                        int32_t *ids) {
    for (int row = 0; row < num_rows; row++) {
        const float *x = logits + row * stride;
        Best best = {probabilities + (int64_t)row * num_top, ids + (int64_t)row * num_top, 0, num_top};
        float highest = -INFINITY;
        double total = 0.0;
        for (int first = 0; first < width; first += BLOCK) {
            int end = first + BLOCK < width ? first + BLOCK : width;
            search(x, first, end, &best);
            if (best.values[0] > highest) {
                total *= exp((double)highest - best.values[0]);
                highest = best.values[0];
            }
            total += sum_exponentials(x, first, end, highest > -INFINITY ? highest : 0.0f);
        }
        for (int i = 0; i < num_top; i++) best.values[i] = (float)(exp((double)best.values[i] - highest) / total);
    }
}
