/* Values by their weights on the matrix unit, PLACES couples of positions at a time.
 *
 * The unit sums up such a group on its own before it adds it to the rest. For a row to have the same bits in a tree as
 * in a sequence, all couples that it sees of the group's places go through together: a group is done once for each path
 * through the tree there, with no weight for lanes that take another one. */
#ifndef OUTRIDER_PATHS_H
#define OUTRIDER_PATHS_H

#include "chunk.h"

/* mix_values of chunk.h, between amx_begin_attention and amx_end. */
void mix_on_amx(const Block *b, int count, float *values);

#endif
