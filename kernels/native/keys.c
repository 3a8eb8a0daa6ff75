#include "keys.h"

#define NONE -1

static int num_run(const Layout *layout, int segment) { return layout->num_run ? layout->num_run[segment] : 0; }

/* Whether each row sees all rows before it, and there are no others. */
static int is_causal(const Layout *layout, int segment) {
    return layout->mask_starts[segment] < 0 && !num_run(layout, segment);
}

/* Two positions of a tree make up to a couple for each lane, and one for each key beside the first that a lane sees. */
int64_t most_keys(const Layout *layout) {
    int64_t most = 0;
    for (int s = 0; s < layout->num_segments; s++) {
        const int64_t rows = layout->num_rows[s] + num_run(layout, s);
        const int64_t own = is_causal(layout, s) ? rows : 2 * (BLOCK_LANES + 1) * (rows + 1);
        if (own > most) most = own;
    }
    return (CHUNK + 2 + most + LANES - 1) / LANES * LANES;
}

/* ---- What lanes see */

/* Lanes whose row sees row `key` of the segment; those run before have numbers below 0. */
static unsigned lanes_seeing(const Block *b, int key) {
    const Layout *layout = b->layout;
    int64_t start = layout->mask_starts[b->segment];
    const int run = num_run(layout, b->segment), count = run + layout->num_rows[b->segment];
    if (start < 0 && key <= b->rows[0]) return EVERYBODY;
    unsigned bits = 0;
    for (int l = 0; l < b->num_lanes; l++) {
        int sees = start < 0 ? b->rows[l] >= key : layout->masks[start + (int64_t)b->rows[l] * count + run + key];
        bits |= (unsigned)(sees != 0) << l;
    }
    return bits;
}

static int position_of(const Block *b, int row) {
    return b->layout->positions[b->layout->first_rows[b->segment] + row];
}

/* Lanes whose row has a key at `position` in its window. */
static unsigned lanes_near(const Block *b, int position) {
    if (!b->heads->window) return EVERYBODY;
    unsigned bits = 0;
    for (int l = 0; l < BLOCK_LANES; l++)
        bits |= (unsigned)(position_of(b, b->rows[l]) - position < b->heads->window) << l;
    return bits;
}

/* The first position that any lane's row still sees. */
static int window_start(const Block *b) {
    int earliest = position_of(b, b->rows[0]);
    for (int l = 1; l < b->num_lanes; l++)
        if (position_of(b, b->rows[l]) < earliest) earliest = position_of(b, b->rows[l]);
    return earliest - b->heads->window + 1;
}

/* ---- Lists */

typedef struct {
    int32_t slot;
    unsigned sees;
} Key;

static int put_couple(Block *b, int count, Key earlier, Key later) {
    b->slots[count] = earlier.slot, b->sees[count] = earlier.sees;
    b->slots[count + 1] = later.slot, b->sees[count + 1] = later.sees;
    return count + 2;
}

/* Positions from `first` on, which is even, with one key each: of the prefix, then the segment's rows in order. */
static int list_sequence(Block *b, const int32_t *table, int first, int end) {
    const Layout *layout = b->layout;
    const int prefix_len = layout->prefix_lens[b->segment], first_row = layout->first_rows[b->segment];
    int count = 0, position = first;
    for (; position + 1 < end && position + 1 < prefix_len; position += 2) { /* nearly all, so without a question */
        const int32_t *pair = table + position;
        count = put_couple(b, count, (Key){pair[0], lanes_near(b, position)},
                           (Key){pair[1], lanes_near(b, position + 1)});
    }
    for (; position < end; position += 2) {
        Key keys[2];
        for (int i = 0; i < 2 && position + i < end; i++) {
            const int row = position + i - prefix_len;
            keys[i].slot = row < 0 ? table[position + i] : layout->slots[first_row + row];
            keys[i].sees = (row < 0 ? EVERYBODY : lanes_seeing(b, row)) & lanes_near(b, position + i);
        }
        if (position + 1 == end) keys[1] = (Key){keys[0].slot, 0};
        count = put_couple(b, count, keys[0], keys[1]);
    }
    return count;
}

/* Keys of two neighbouring positions, by lane; NONE: the lane sees none. */
typedef struct {
    int32_t slots[2][BLOCK_LANES];
} Pair;

/* Notes a key for the lanes that see it; those that see another one there already, as in no tree, get it in a couple of
 * its own. */
static int note_key(Block *b, Pair *pair, int later, Key key, int count) {
    unsigned others = 0;
    for (int l = 0; l < b->num_lanes; l++) {
        if (!(key.sees >> l & 1)) continue;
        if (pair->slots[later][l] == NONE)
            pair->slots[later][l] = key.slot;
        else
            others |= 1u << l;
    }
    if (others) b->places[count / 2] = OUT_OF_PLACE;
    return others ? put_couple(b, count, (Key){key.slot, others}, (Key){key.slot, 0}) : count;
}

/* A couple for lane `lane` and all who see no other keys there; they are done with then. */
static int put_shared(Block *b, Pair *pair, int count, int lane) {
    int32_t *earlier = pair->slots[0], *later = pair->slots[1];
    Key even = {earlier[lane], 0}, odd = {later[lane], 0};
    for (int l = 0; l < b->num_lanes; l++) {
        if (earlier[l] != NONE && earlier[l] != even.slot) continue;
        if (later[l] != NONE && later[l] != odd.slot) continue;
        even.sees |= (unsigned)(earlier[l] != NONE) << l;
        odd.sees |= (unsigned)(later[l] != NONE) << l;
        earlier[l] = later[l] = NONE;
    }
    if (even.slot == NONE) even.slot = odd.slot;
    if (odd.slot == NONE) odd.slot = even.slot;
    return put_couple(b, count, even, odd);
}

/* A couple for each two keys that some lane sees together, then for those that are seen alone. */
static int put_pair(Block *b, Pair *pair, int place, int count) {
    const int32_t *earlier = pair->slots[0], *later = pair->slots[1];
    const int first = count;
    for (int l = 0; l < b->num_lanes; l++)
        if (earlier[l] != NONE && later[l] != NONE) count = put_shared(b, pair, count, l);
    for (int l = 0; l < b->num_lanes; l++)
        if (earlier[l] != NONE || later[l] != NONE) count = put_shared(b, pair, count, l);
    for (int i = first; i < count; i += 2) b->places[i / 2] = (uint8_t)place;
    if (b->num_single == place && first == 2 * place && count == first + 2) b->num_single++;
    return count;
}

/* Positions from `first` on, which is even: of the prefix, at most its last one, and the rows of a tree. */
static int list_tree(Block *b, const int32_t *table, int first, int end, int count) {
    const Layout *layout = b->layout;
    const int s = b->segment, run = num_run(layout, s), prefix_len = layout->prefix_lens[s];
    const int place0 = count / 2;
    for (int position = first; position < end; position += 2) {
        Pair pair;
        for (int i = 0; i < 2 * BLOCK_LANES; i++) (&pair.slots[0][0])[i] = NONE;
        if (position < prefix_len)
            count = note_key(b, &pair, 0, (Key){table[position], lanes_near(b, position)}, count);
        for (int row = -run; row < layout->num_rows[s]; row++) {
            const int at = row < 0 ? layout->first_run[s] + run + row : layout->first_rows[s] + row;
            const int later = layout->positions[at] - position;
            if (later != 0 && later != 1) continue;
            const Key key = {layout->slots[at], lanes_seeing(b, row) & lanes_near(b, layout->positions[at])};
            count = note_key(b, &pair, later, key, count);
        }
        count = put_pair(b, &pair, place0 + (position - first) / 2, count);
    }
    return count;
}

/* One past the last position of the segment's rows that may be seen. */
static int rows_end(const Block *b) {
    const Layout *layout = b->layout;
    const int s = b->segment, run = num_run(layout, s);
    if (is_causal(layout, s)) return layout->prefix_lens[s] + b->rows[BLOCK_LANES - 1] + 1;
    int last = 0;
    for (int row = -run; row < layout->num_rows[s]; row++) {
        const int at = row < 0 ? layout->first_run[s] + run + row : layout->first_rows[s] + row;
        if (layout->positions[at] > last) last = layout->positions[at];
    }
    return last + 1;
}

int list_keys(Block *b, int chunk) {
    const Layout *layout = b->layout;
    const int s = b->segment, prefix_len = layout->prefix_lens[s], begin = chunk * CHUNK, stop = begin + CHUNK;
    const int32_t *table = layout->slot_table + (int64_t)layout->table_rows[s] * layout->table_width;
    const int last = rows_end(b), end = last < stop ? last : stop;
    /* Up to here each position has one key. */
    const int single = is_causal(layout, s) ? end : (prefix_len < stop ? prefix_len : stop) & ~1;
    int position = begin;
    if (b->heads->window && window_start(b) > begin) position = window_start(b) & -PLACES * 2;
    int count = list_sequence(b, table, position, single);
    for (int i = 0; i < count / 2; i++) b->places[i] = (uint8_t)i;
    b->num_single = count / 2;
    const int open_end = prefix_len < single ? prefix_len : single;
    b->num_open = b->heads->window || open_end < position ? 0 : open_end - position;
    if (!is_causal(layout, s)) count = list_tree(b, table, single > position ? single : position, end, count);
    for (int i = count; i % LANES; i++) {
        b->slots[i] = b->slots[count - 1];
        b->sees[i] = 0;
    }
    return count;
}
