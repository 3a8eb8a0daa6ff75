"""Frames of proposals: parsed together and one by one, with the same outcome."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outrider.errors import InvalidArgument
from outrider.v1 import verify_pb2
from outrider.wire import pack_ids
from verify_service.commands import Arrived
from verify_service.parsing import parse_proposals

VOCAB, MAX_NODES = 50, 12

BROKEN: dict[str, dict[str, Any]] = {
    "token": {"tokens": pack_ids([1, VOCAB]), "parents": pack_ids([-1, 0]), "scores": b"\1\2"},
    "parents": {"tokens": pack_ids([1, 2]), "parents": pack_ids([-1]), "scores": b"\1\2"},
    "scores": {"tokens": pack_ids([1, 2]), "parents": pack_ids([-1, 0]), "scores": b"\1"},
    "bytes": {"tokens": b"\1\0\0", "parents": b"\1\0\0", "scores": b""},
    "assumed": {"assumed": pack_ids([VOCAB])},
    "half": {"assumed": b"\1\0"},
    "many": {"tokens": pack_ids(range(13)), "parents": pack_ids(range(-1, 12)), "scores": bytes(13)},
    "bits": {"from_prediction": b"\1"},
}
GOOD: dict[str, dict[str, Any]] = {
    "unscored": {"tokens": pack_ids([1, 2]), "parents": pack_ids([-1, 0])},
    "declines": {"assumed": pack_ids([3])},
    "predicted": {"tokens": pack_ids([1]), "parents": pack_ids([-1]), "scores": b"\1", "from_prediction": b"\1"},
}


def proposals(count: int) -> list[verify_pb2.Proposal]:
    rng = random.Random(count)
    found: list[verify_pb2.Proposal] = []
    for number in range(count):
        size = rng.randrange(MAX_NODES + 1)
        parents = [rng.randrange(-1, node) if node else -1 for node in range(size)]
        found.append(
            verify_pb2.Proposal(
                session=number, generation=1, proposal_id=number + 7, base_len=number, draft_us=3,
                assumed=pack_ids([rng.randrange(VOCAB) for _ in range(rng.randrange(3))]),
                tokens=pack_ids(rng.sample(range(VOCAB), size)), parents=pack_ids(parents), scores=rng.randbytes(size),
            )
        )  # fmt: skip
    return found


def shown(arrived: Arrived) -> tuple[object, ...]:
    of = arrived.session, arrived.generation, arrived.proposal_id
    found = arrived.proposal
    if isinstance(found, InvalidArgument):
        return *of, found.field, found.message
    assert found is not None
    arrays = found.assumed, found.tree.tokens, found.tree.parents, found.tree.depths, found.tree.ancestor_mask()
    lists = [array.tolist() for array in (*arrays, found.scores, found.from_prediction)]
    return *of, found.proposal_id, found.base_len, found.draft_us, lists


def parse(pbs: list[verify_pb2.Proposal]) -> list[tuple[object, ...]]:
    return [shown(arrived) for arrived in parse_proposals(pbs, vocab_size=VOCAB, max_nodes=MAX_NODES)]


@pytest.mark.parametrize("odd", [None, *BROKEN, *GOOD])
def test_a_frame_is_parsed_as_each_of_its_proposals_alone(odd: str | None) -> None:
    pbs = proposals(9)
    if odd is not None:
        pbs.insert(4, verify_pb2.Proposal(session=99, generation=2, proposal_id=1, **(BROKEN | GOOD)[odd]))
    together = parse(pbs)
    assert together == [shown for pb in pbs for shown in parse([pb])]
    assert sum(len(one) == 5 for one in together) == (odd in BROKEN)
