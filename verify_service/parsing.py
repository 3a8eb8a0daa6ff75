"""Proposals as they come from the wire: every check that needs no session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.errors import InvalidArgument
from outrider.forest import MAX_NODES, grown
from outrider.tree import TokenTree
from outrider.v1 import verify_pb2
from outrider.wire import check_token_ids, unpack_ids
from verify_service.commands import Arrived
from verify_service.proposals import Proposal

_MANY = 4  # proposals from which on it is sooner to check all at once
_NO_BITS = np.empty(0, np.bool_)


def parse_proposals(pbs: Sequence[verify_pb2.Proposal], *, vocab_size: int, max_nodes: int) -> list[Arrived]:
    """The proposals, or what is wrong with the form of each. Costs O(nodes)."""
    parsed = _parsed_together(pbs, vocab_size, max_nodes) if len(pbs) >= _MANY else None
    if parsed is None:
        parsed = [_parsed(pb, vocab_size, max_nodes) for pb in pbs]
    return [
        Arrived(pb.session, pb.generation, pb.proposal_id, proposal)
        for pb, proposal in zip(pbs, parsed, strict=True)
    ]  # fmt: skip


def _parsed_together(pbs: Sequence[verify_pb2.Proposal], vocab_size: int, max_nodes: int) -> list[Proposal] | None:
    """The proposals, in one pass; None where one is malformed, or not of the common form: small trees with scores."""
    tokens, parents = [pb.tokens for pb in pbs], [pb.parents for pb in pbs]
    scores, assumed = [pb.scores for pb in pbs], [pb.assumed for pb in pbs]
    sizes = list(map(len, scores))
    lengths = [4 * size for size in sizes]
    if max(sizes) > min(max_nodes, MAX_NODES) or any(pb.from_prediction for pb in pbs):
        return None
    if list(map(len, tokens)) != lengths or list(map(len, parents)) != lengths:
        return None
    try:
        guesses = unpack_ids(b"".join(assumed), field="assumed")
        check_token_ids(guesses, vocab_size=vocab_size, field="assumed")
    except InvalidArgument:
        return None
    costs = np.frombuffer(bytearray().join(scores), np.uint8)
    words, above = (unpack_ids(b"".join(ids), field="tokens") for ids in (tokens, parents))
    trees = grown(words, above, costs, np.array(sizes), vocab_size=vocab_size)
    if trees is None or any(len(ids) % 4 for ids in assumed):
        return None
    proposals: list[Proposal] = []
    node = guess = 0
    for pb, tree, own in zip(pbs, trees, assumed, strict=True):
        end, last = node + len(tree), guess + len(own) // 4
        proposals.append(
            Proposal(pb.proposal_id, pb.base_len, guesses[guess:last], tree, costs[node:end], _NO_BITS, pb.draft_us)
        )
        node, guess = end, last
    return proposals


def _parsed(pb: verify_pb2.Proposal, vocab_size: int, max_nodes: int) -> Proposal | InvalidArgument:
    try:
        return _checked(pb, vocab_size, max_nodes)
    except InvalidArgument as error:
        return error


def _checked(pb: verify_pb2.Proposal, vocab_size: int, max_nodes: int) -> Proposal:
    tree = TokenTree.checked(
        unpack_ids(pb.tokens, field="tokens"),
        unpack_ids(pb.parents, field="parents"),
        vocab_size=vocab_size,
        max_nodes=max_nodes,
    )
    if pb.scores and len(pb.scores) != len(tree):
        raise InvalidArgument(f"{len(tree)} nodes but {len(pb.scores)} scores", field="scores")
    if pb.from_prediction and len(pb.from_prediction) != -(-len(tree) // 8):
        raise InvalidArgument(
            f"from_prediction has {len(pb.from_prediction)} bytes; {len(tree)} nodes need {-(-len(tree) // 8)}",
            field="from_prediction",
        )
    assumed = unpack_ids(pb.assumed, field="assumed")
    check_token_ids(assumed, vocab_size=vocab_size, field="assumed")
    predicted = _NO_BITS
    if pb.from_prediction:
        bits = np.frombuffer(pb.from_prediction, np.uint8)
        predicted = np.unpackbits(bits, bitorder="little", count=len(tree)).view(np.bool_)
    scores = np.frombuffer(pb.scores, np.uint8)
    scores = tree.raised(scores) if len(scores) else scores
    return Proposal(pb.proposal_id, pb.base_len, assumed, tree, scores, predicted, pb.draft_us)
