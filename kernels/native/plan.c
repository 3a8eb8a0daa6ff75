/* Plans of steps for the Triton kernels of attention, on the calling thread. */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

#define ALIGNED 4 /* sections and the whole end at multiples of so many numbers */
/* Numbers of one each. */
#define ITEM 5
#define TILE_OF_ROWS 4
#define SEGMENT 5

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int fits(const Layout *step, const Plan *plan) {
    if (step->num_segments > plan->num_segments) return 0;
    for (int s = 0; s < step->num_segments; s++)
        if (step->num_rows[s] > plan->rows_per_segment || step->prefix_lens[s] > plan->max_prefix_len ||
            (step->mask_starts[s] >= 0 && !plan->has_masks))
            return 0;
    return 1;
}

/* Keys in a piece: kernels/attention/triton_blocks.py's piece_len of the keys of all tiles. */
static int64_t piece_len(const Layout *step, const Plan *plan) {
    int64_t num_keys = 0;
    for (int s = 0; s < step->num_segments; s++)
        num_keys += ceil_div(step->num_rows[s], plan->rows_per_tile) * step->prefix_lens[s];
    int64_t piece = ceil_div(ceil_div(num_keys * plan->num_kv_heads, plan->target_programs), 64) * 64;
    return piece > plan->min_piece ? piece : plan->min_piece;
}

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Pieces of tiles, those with most keys first, of equals as they come; and the tiles that were cut. */
static void cut(const Layout *step, const Plan *plan) {
    int64_t piece = piece_len(step, plan), num_items = 0;
    int32_t num_parts = 0, *tile = plan->data + plan->tiles;
    for (int s = 0; s < step->num_segments; s++) {
        int64_t prefix = step->prefix_lens[s], pieces = ceil_div(prefix, piece);
        if (!pieces) pieces = 1;
        for (int row = 0; row < step->num_rows[s]; row += plan->rows_per_tile) {
            int rows = step->num_rows[s] - row < plan->rows_per_tile ? step->num_rows[s] - row : plan->rows_per_tile;
            if (pieces > 1) {
                int32_t whole[TILE_OF_ROWS] = {step->first_rows[s] + row, rows, num_parts, pieces};
                memcpy(tile, whole, sizeof whole);
                tile += TILE_OF_ROWS;
            }
            for (int64_t nth = 0; nth < pieces; nth++, num_items++) {
                int64_t start = nth * piece, end = start + piece < prefix ? start + piece : prefix;
                int32_t item[ITEM] = {s, row, start, end, pieces > 1 ? num_parts++ : -1};
                memcpy(plan->items + num_items * ITEM, item, sizeof item);
                int64_t num_keys = end - start + (end == prefix ? row + rows : 0);
                plan->order[num_items] = (INT32_MAX - num_keys) << 32 | num_items;
            }
        }
    }
    qsort(plan->order, num_items, sizeof *plan->order, compare);
    for (int64_t i = 0; i < num_items; i++)
        memcpy(plan->data + i * ITEM, plan->items + (plan->order[i] & UINT32_MAX) * ITEM, ITEM * sizeof(int32_t));
}

static void set_mask_bits(const uint8_t *mask, int count, int words, int32_t *bits) {
    for (int row = 0; row < count; row++, bits += 2 * words)
        for (int column = 0; column < count; column++) {
            uint32_t bit = (uint32_t)(mask[(int64_t)row * count + column] != 0) << column % 32;
            bits[column / 32] = (int32_t)((uint32_t)bits[column / 32] | bit);
        }
}

/* The segments, their masks and their pages; where those end. */
static int32_t *describe(const Layout *step, const Plan *plan) {
    int32_t *segment = plan->data + plan->segments, *table = plan->data + plan->table, *page = table;
    int32_t mask_row = 0;
    for (int s = 0; s < step->num_segments; s++, segment += SEGMENT) {
        int32_t prefix = step->prefix_lens[s], is_tree = step->mask_starts[s] >= 0;
        int32_t columns[SEGMENT] = {
            step->first_rows[s], step->num_rows[s], prefix, (int32_t)(page - table), is_tree ? mask_row : -1,
        };
        memcpy(segment, columns, sizeof columns);
        if (is_tree) {
            int32_t *bits = plan->data + plan->masks + (int64_t)mask_row * 2 * plan->mask_words;
            set_mask_bits(step->masks + step->mask_starts[s], step->num_rows[s], plan->mask_words, bits);
            mask_row += step->num_rows[s];
        }
        const int32_t *slots = step->slot_table + (int64_t)step->table_rows[s] * step->table_width;
        if (plan->page_size == 1) {
            memcpy(page, slots, prefix * sizeof(int32_t));
            page += prefix;
            continue;
        }
        for (int position = 0; position < prefix; position += plan->page_size)
            *page++ = slots[position] / plan->page_size;
    }
    return page;
}

int64_t outrider_plan(const Layout *step, const Plan *plan) {
    if (!fits(step, plan)) return 0;
    memset(plan->data, 0xff, plan->tiles * sizeof(int32_t)); /* items without work are -1 */
    memset(plan->data + plan->tiles, 0, (plan->table - plan->tiles) * sizeof(int32_t));
    cut(step, plan);
    int32_t *end = describe(step, plan);
    while ((end - plan->data) % ALIGNED) *end++ = 0;
    int64_t num_rows = 0;
    for (int s = 0; s < step->num_segments; s++) num_rows += step->num_rows[s];
    memcpy(plan->data + plan->slots, step->slots, num_rows * sizeof(int32_t));
    memcpy(plan->data + plan->positions, step->positions, num_rows * sizeof(int32_t));
    return end - plan->data;
}
