/* Which keys of a chunk a block's lanes see, and in which order they are added up. */
#ifndef OUTRIDER_KEYS_H
#define OUTRIDER_KEYS_H

#include "chunk.h"

/* Room for the keys of any chunk of the layout. */
int64_t most_keys(const Layout *layout);

/* Lists the chunk's keys in b->slots and b->sees, and their couples' places; returns how many keys, an even number.
 *
 * They come in couples: of two positions 2i and 2i + 1 the earlier one's key, then the later one's. A lane sees at most
 * one key of a position, and finds both of its own in one couple, whatever couples the rest of a tree makes: so its
 * sums take the same course in every batch. Where a couple lacks a key, one that nobody sees stands in. The list is
 * filled up to a multiple of LANES, past the end, with such.
 *
 * Places count a chunk's couples of positions from where its list begins, at a position that is a multiple of
 * 2 PLACES: so the places that paths.h takes together are the same in every batch. A key that a lane sees beside another of
 * the same position is OUT_OF_PLACE: no tree makes such. */
int list_keys(Block *b, int chunk);

#endif
