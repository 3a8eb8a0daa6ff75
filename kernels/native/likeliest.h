#ifndef OUTRIDER_LIKELIEST_H
#define OUTRIDER_LIKELIEST_H

#include <math.h>
#include <stdint.h>

/* Of each row x [width], `stride` numbers after the one before, its num_top highest, falling, of equals the lower id
 * first: ids, and their part in a softmax over the row, NaN where that is not defined. Both [num_rows, num_top];
 * num_top is at least 1 and at most width. NaN counts as lowest. */
void outrider_likeliest(const float *logits, int64_t stride, int num_rows, int width, int num_top, float *probabilities,
                        int32_t *ids);

/* Where that of a step's rows goes; width: columns of the logits that count. No probabilities: only the highest logit's
 * id is wanted (num_top 1), -1 where that is not finite or where a logit is NaN. */
typedef struct {
    float *probabilities;
    int32_t *ids;
    int32_t num_top, width;
} Likeliest;

/* The highest of a row whose numbers come in parts; of equals the lower id. id: -1 before the first, and after NaN. */
typedef struct {
    float value;
    int32_t id;
} Highest;

#define NO_HIGHEST ((Highest){-INFINITY, -1})

/* Takes x [count] in, whose first number has this id. */
void take_highest(const float *x, int first, int count, Highest *best);

/* Id of the highest over several threads' parts, as Likeliest wants it. */
int32_t join_highest(const Highest *parts, int64_t stride, int num_parts);

/* The `count` highest of x [width], likewise; x holds no NaN. */
void find_highest(const float *x, int width, int count, float *values, int32_t *ids);

#endif
