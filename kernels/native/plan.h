/* What the Triton kernels of attention are told of a step in a bucket, as kernels/attention/triton_plan.py's pack has it,
 * to the byte: its hundred numpy calls take longer than a small model's layer. */
#ifndef OUTRIDER_PLAN_H
#define OUTRIDER_PLAN_H

#include "attention.h"

/* A bucket, its tiles, and where its sections start in `data`, all in numbers of int32. */
typedef struct {
    int32_t *data;
    int64_t *order; /* workspace, [num_items] */
    int32_t *items; /* workspace, [num_items][5] */
    int32_t num_segments, rows_per_segment, max_prefix_len, has_masks;
    int32_t rows_per_tile, num_items, num_kv_heads, page_size, min_piece, target_programs;
    int32_t tiles, segments, slots, positions, masks, mask_words, table;
} Plan;

/* Fills data; how many numbers of it are used, 0: the step does not fit the bucket. */
int64_t outrider_plan(const Layout *layout, const Plan *plan);

#endif
