"""Drafters: what makes token trees. base.py has their interface.

All kinds:
    base                            their interface
    factory                         from --speculative-algorithm to a drafter
    shape                           steps, branches and nodes, from the flags
    compiled                        numba's compiler, its work kept

N-grams:
    ngram                           the drafter
    corpora, corpus                 texts by scope and id; inserted by a thread
    trie                            many tries in one arena
    trie_rows, trie_nodes           its rows; how it grows and shrinks
    trie_ranks, trie_match          the most frequent children; trees read out of it

Models:
    models                          what drafts: a small language model, or a head
    standalone                      a small language model as a drafter
    eagle, mtp, heads               heads as drafters; from flags to one
    model_drafter                   what drafters with a model share
    session_drafter, roster         drafts for sessions; who they are, and who was given up
    kv, pool_size                   a drafter's own pages; whether there is memory for them
    features                        the target's states on their way to a head
    carrying                        a head's outputs, for rows that go on from there

Growing trees:
    trees                           which to grow, those of one shape together
    growing                         many at a time over a paged cache
    expansion                       EAGLE-2's rules over plain arrays
    growing_native, growing_device  by the C kernels; on a device
    growing_graphs, graphs          whole trees as CUDA graphs; which become graphs

Ahead of the verdict:
    ahead                           drafting for a step that has not ended
    outcomes, paths                 which ends of it are worth that; what is gone along
"""
