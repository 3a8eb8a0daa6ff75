/* Draft trees on a head, from the rows that a verdict brings to the chosen nodes: EAGLE-2's expansion with forward
 * passes between, for all trees that grow together. The rules are those of draft_service/drafters/expansion.py, which
 * stands in where there are no C kernels; tests/draft_service/test_native_growth.py holds the two together. */
#include "grow.h"

#include <stdlib.h>

static int entries_of(const Growth *g) { return g->topk * (g->num_steps - 1); }
static int candidates_of(const Growth *g) { return g->topk + entries_of(g) * g->topk; }

/* ---- What a step runs */

/* Row of `carried` that an entry goes on from. */
static int32_t parent_row(const Growth *g, int tree, int entry) {
    const int step = entry / g->topk; /* steps before the entry's own */
    if (!step) return tree;
    return g->batch * (1 + (step - 1) * g->topk) + tree * g->topk +
           (int32_t)g->entry_parents[(int64_t)tree * entries_of(g) + entry];
}

/* Entry's key: where the step lays it out. */
static void lay_out_key(const Growth *g, int tree, int entry, int at, Rung *rung) {
    rung->slots[at] = g->slots[(int64_t)tree * entries_of(g) + entry];
    rung->positions[at] = g->lengths[tree] + entry / g->topk;
}

/* A chain's rows join its sequence; a tree's belong to none, so that those run before are named. */
static void lay_out_tree(const Growth *g, int step, int tree, Rung *rung) {
    const int topk = g->topk, entries = entries_of(g), run = topk == 1 ? 0 : (step - 1) * topk, count = run + topk;
    const int first = tree * topk, first_entry = (step - 1) * topk;
    rung->first_rows[tree] = first;
    rung->num_rows[tree] = topk;
    rung->prefix_lens[tree] = g->lengths[tree] + (topk == 1 ? step - 1 : 0);
    rung->first_run[tree] = g->batch * topk + tree * run;
    rung->num_run[tree] = run;
    rung->mask_starts[tree] = topk == 1 ? -1 : (int64_t)tree * topk * count;
    for (int entry = 0; entry < run; entry++) lay_out_key(g, tree, entry, rung->first_run[tree] + entry, rung);
    for (int i = 0; i < topk; i++) {
        const int64_t at = (int64_t)tree * entries + first_entry + i;
        rung->tokens[first + i] = g->entry_tokens[at];
        rung->state_rows[first + i] = parent_row(g, tree, first_entry + i);
        rung->logit_rows[first + i] = first + i;
        lay_out_key(g, tree, first_entry + i, first + i, rung);
        if (topk > 1) memcpy(rung->masks + rung->mask_starts[tree] + (int64_t)i * count, g->masks + at * entries, count);
    }
}

/* A step's arrays behind one another in memory; returns the bytes that they take, also where there is none yet. */
static int64_t lay_out_rung(Rung *rung, char *memory, int64_t trees, int64_t rows, int64_t keys, int tips) {
    int64_t at = 0;
#define TAKE(member, count) \
    rung->member = (void *)((uintptr_t)memory + at); \
    at += ((int64_t)(count) * sizeof *rung->member + 63) / 64 * 64
    TAKE(mask_starts, trees);
    TAKE(first_rows, trees);
    TAKE(num_rows, trees);
    TAKE(prefix_lens, trees);
    TAKE(first_run, trees);
    TAKE(num_run, trees);
    TAKE(tokens, rows);
    TAKE(slots, keys);
    TAKE(positions, keys);
    TAKE(state_rows, rows);
    TAKE(logit_rows, rows);
    TAKE(found, rows * tips);
    TAKE(chances, rows * tips);
    TAKE(masks, rows * keys / trees);
#undef TAKE
    return at;
}

/* ---- What it gives */

typedef struct {
    const float *chances; /* [parents][stride], falling */
    const int32_t *ids;   /* likewise; or `words`, the target's ids already */
    const int64_t *words;
    int stride;
} Tips;

static int64_t word_at(const Growth *g, const Tips *tips, int64_t at) {
    if (tips->words) return tips->words[at];
    return g->names ? g->names[tips->ids[at]] : tips->ids[at];
}

/* The likeliest candidate of the step (ids base..base + count - 1) that is not an entry yet; of equals the first. */
static int best_left(const float *scores, const int32_t *taken, int num_taken, int base, int count) {
    int best = -1;
    for (int c = 0; c < count; c++) {
        int is_taken = 0;
        for (int i = 0; i < num_taken; i++) is_taken |= taken[i] == base + c;
        if (!is_taken && (best < 0 || scores[base + c] > scores[base + best])) best = c;
    }
    return best;
}

static void expand(const Growth *g, int step, int tree, const Tips *tips) {
    const int topk = g->topk, entries = entries_of(g), parents = step ? topk : 1;
    const int base = step ? topk + (step - 1) * topk * topk : 0, first = (step - 1) * topk, entry = step * topk;
    float *scores = g->scores + (int64_t)tree * candidates_of(g);
    int32_t *tokens = g->tokens + (int64_t)tree * candidates_of(g);
    int32_t *frontier = g->frontier + (int64_t)tree * entries;
    uint8_t *masks = g->masks + (int64_t)tree * entries * entries;
    for (int parent = 0; parent < parents; parent++)
        for (int k = 0; k < topk; k++) {
            const int64_t at = ((int64_t)tree * parents + parent) * tips->stride + k;
            float p = tips->chances[at];
            p = p > 0.0f ? (p > 1.0f ? 1.0f : p) : 0.0f; /* NaN counts as 0 */
            scores[base + parent * topk + k] = (step ? scores[frontier[first + parent]] : 1.0f) * p;
            tokens[base + parent * topk + k] = (int32_t)word_at(g, tips, at);
        }
    if (entry == entries) return;
    for (int j = 0; j < topk; j++) {
        const int best = step ? best_left(scores, frontier + entry, j, base, parents * topk) : j, at = entry + j;
        frontier[at] = base + best;
        g->entry_tokens[(int64_t)tree * entries + at] = tokens[base + best];
        g->entry_parents[(int64_t)tree * entries + at] = step ? best / topk : 0;
        memset(masks + (int64_t)at * entries, 0, entries);
        if (step) memcpy(masks + (int64_t)at * entries, masks + (int64_t)(first + best / topk) * entries, entry);
        masks[(int64_t)at * entries + at] = 1;
    }
}

/* ---- Steps */

static int are_read(const Growth *g, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= g->num_read) return 0;
    return 1;
}

static Layout layout_of(const Growth *g, const Rung *rung) {
    return (Layout){
        .slot_table = g->slot_table,
        .first_rows = rung->first_rows,
        .num_rows = rung->num_rows,
        .prefix_lens = rung->prefix_lens,
        .table_rows = g->table_rows,
        .slots = rung->slots,
        .positions = rung->positions,
        .masks = rung->masks,
        .mask_starts = rung->mask_starts,
        .table_width = g->table_width,
        .num_segments = g->batch,
        .first_run = rung->first_run,
        .num_run = rung->num_run,
    };
}

static int32_t *row_of_table(const Growth *g, int tree) {
    return g->slot_table + (int64_t)g->table_rows[tree] * g->table_width;
}

/* Lays a sequence's rows that were not run yet out from row `first` on. */
static void lay_out_behind(const Growth *g, int tree, int first, Rung *rung) {
    const int count = g->behind[tree], start = g->lengths[tree] - count;
    rung->first_rows[tree] = first;
    rung->num_rows[tree] = count;
    rung->prefix_lens[tree] = start;
    rung->num_run[tree] = 0;
    rung->mask_starts[tree] = -1;
    rung->logit_rows[tree] = first + count - 1;
    for (int i = 0; i < count; i++) {
        rung->slots[first + i] = row_of_table(g, tree)[start + i];
        rung->positions[first + i] = start + i;
    }
}

/* Gives the tips, and the roots' states. */
static int run_behind(Decoder *decoder, const Growth *g) {
    int rows = 0, first = 0;
    for (int tree = 0; tree < g->batch; tree++) rows += g->behind[tree];
    if (!are_read(g, g->behind_tokens, rows)) return -1;
    Rung rung;
    char *memory = outrider_decoder_memory(decoder, lay_out_rung(&rung, NULL, g->batch, rows, rows, g->num_tips));
    if (!memory) return 0;
    lay_out_rung(&rung, memory, g->batch, rows, rows, g->num_tips);
    for (int tree = 0; tree < g->batch; first += g->behind[tree++]) lay_out_behind(g, tree, first, &rung);
    const Layout layout = layout_of(g, &rung);
    const void *features = g->inputs_are_features ? g->inputs : NULL;
    const Likeliest likeliest = {g->tip_chances, rung.found, g->num_tips, g->num_drafted};
    if (!outrider_decoder_forward(decoder, &layout, g->behind_tokens, g->inputs, features, NULL, rows, rung.logit_rows,
                                  g->batch, g->logits, g->carried, &likeliest, NULL))
        return 0;
    const Tips tips = {.ids = rung.found};
    for (int i = 0; i < g->batch * g->num_tips; i++) g->tip_words[i] = word_at(g, &tips, i);
    return 1;
}

static int take_roots(Decoder *decoder, const Growth *g) {
    const int done = g->inputs ? run_behind(decoder, g) : 1;
    if (done < 1) return done;
    const Tips tips = {.chances = g->tip_chances, .words = g->tip_words, .stride = g->num_tips};
    const int entries = entries_of(g);
    for (int tree = 0; tree < g->batch; tree++) {
        expand(g, 0, tree, &tips);
        if (g->topk == 1) /* a chain's rows are its sequence's while it grows */
            memcpy(row_of_table(g, tree) + g->lengths[tree], g->slots + (int64_t)tree * entries, 4 * entries);
    }
    return 1;
}

static int grow_step(Decoder *decoder, const Growth *g, int step) {
    const int64_t rows = (int64_t)g->batch * g->topk, keys = g->topk == 1 ? rows : rows * step;
    Rung rung;
    char *memory = outrider_decoder_memory(decoder, lay_out_rung(&rung, NULL, g->batch, rows, keys, g->topk));
    if (!memory) return 0;
    lay_out_rung(&rung, memory, g->batch, rows, keys, g->topk);
    for (int tree = 0; tree < g->batch; tree++) lay_out_tree(g, step, tree, &rung);
    if (!are_read(g, rung.tokens, rows)) return -1;
    const Layout layout = layout_of(g, &rung);
    char *carried = (char *)g->carried + (int64_t)g->batch * (1 + (step - 1) * g->topk) * g->state_bytes;
    const Likeliest likeliest = {rung.chances, rung.found, g->topk, g->num_drafted};
    if (!outrider_decoder_forward(decoder, &layout, rung.tokens, g->carried, NULL, rung.state_rows, (int)rows,
                                  rung.logit_rows, (int)rows, g->logits, carried, &likeliest, NULL))
        return 0;
    const Tips tips = {.chances = rung.chances, .ids = rung.found, .stride = g->topk};
    for (int tree = 0; tree < g->batch; tree++) expand(g, step, tree, &tips);
    return 1;
}

/* ---- The nodes */

/* The likeliest candidates, ascending. Scores never rise along a path and ties go to lower ids: a chosen candidate's
 * parent is chosen. room: four numbers for each candidate. */
static void choose_nodes(const Growth *g, int tree, int32_t *room) {
    const int most = candidates_of(g), entries = entries_of(g), run = g->topk * (g->num_run - 1);
    const int found = g->topk + run * g->topk, count = g->counts[tree] < found ? g->counts[tree] : found;
    const int64_t start = (int64_t)tree * most, plane = (int64_t)g->batch * most;
    const int32_t *frontier = g->frontier + (int64_t)tree * entries;
    int32_t *index = room, *entry = room + most, *best = room + 2 * most;
    for (int c = 0; c < found; c++) index[c] = entry[c] = -1;
    for (int e = 0; e < run; e++) entry[frontier[e]] = e;
    find_highest(g->scores + start, found, count, (float *)(room + 3 * most), best);
    for (int i = 0; i < count; i++) index[best[i]] = 0;
    for (int c = 0, node = 0; c < found; c++) {
        if (index[c] < 0) continue;
        int32_t *to = g->nodes + start + node;
        to[0] = g->tokens[start + c];
        to[plane] = c < g->topk ? -1 : index[frontier[c / g->topk - 1]];
        to[2 * plane] = entry[c];
        g->chances[start + node] = g->scores[start + c];
        index[c] = node++;
    }
}

static int choose_all(Decoder *decoder, const Growth *g) {
    int32_t *room = (int32_t *)outrider_decoder_memory(decoder, 16 * (int64_t)candidates_of(g));
    if (!room) return 0;
    for (int tree = 0; tree < g->batch; tree++) choose_nodes(g, tree, room);
    return 1;
}

/* Whether what step `step` would go on from is hardly accepted. */
static int is_too_unlikely(const Growth *g, int step) {
    float reach = 0.0f;
    for (int tree = 0; tree < g->batch; tree++) {
        const float *scores = g->scores + (int64_t)tree * candidates_of(g);
        const int32_t *newest = g->frontier + (int64_t)tree * entries_of(g) + (step - 1) * g->topk;
        for (int i = 0; i < g->topk; i++) reach += scores[newest[i]];
    }
    return reach < g->least_reach * g->batch;
}

int outrider_grow(Decoder *decoder, Growth *g, int first, int end) {
    int step = first;
    for (; step < end && !(step && is_too_unlikely(g, step)); step++) {
        const int done = step ? grow_step(decoder, g, step) : take_roots(decoder, g);
        if (done < 1) return done;
        g->num_run = step + 1;
    }
    return step < end || end == g->num_steps ? choose_all(decoder, g) : 1;
}
