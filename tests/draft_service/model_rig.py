"""A verify service for model drafters, without sockets: it decodes greedily, walks their trees and tells them verdicts.

And the trees that they ought to draft, grown from the rules in plain Python over whatever gives probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_service.drafters.base import Draft, DraftRequest
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.session import Extension, Session, Wishes
from engine.batch import Segment
from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from outrider.v1 import common_pb2, verify_pb2

MAX_LEN = 256
_uids = count(1)


def session(tokens: Sequence[int], **more: Any) -> Session:
    """An opened session."""
    fields: dict[str, Any] = {
        "uid": next(_uids), "session_id": 1, "generation": 1, "prompt_len": len(tokens), "remaining": 1000,
        "vocabulary": "", "vocab_size": 2**31 - 1, "wishes": Wishes(), "corpus_scope": "",
        "prediction": np.empty(0, np.int32), "tokens": np.array(tokens, np.int32),
    }  # fmt: skip
    return Session(**(fields | more))


def rows(first_pos: int, values: torch.Tensor) -> common_pb2.FeatureRows:
    """Feature rows as they come over the wire."""
    dtypes = {torch.float32: common_pb2.DTYPE_FLOAT32, torch.bfloat16: common_pb2.DTYPE_BFLOAT16}
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    tensor = common_pb2.Tensor(dtype=dtypes[values.dtype], shape=list(values.shape), data=data)
    return common_pb2.FeatureRows(first_pos=first_pos, count=len(values), rows=tensor)


class Target:
    """The target over whole sequences, in fp32."""

    def __init__(self, folder: Path, features: FeatureSpec) -> None:
        self.runner = ModelRunner.load(
            folder, dtype="float32", num_slots=MAX_LEN, max_sessions=1, max_len=MAX_LEN, features=features
        )

    def run(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, vocab] and features [n, width] of every position."""
        slots = np.arange(len(tokens), dtype=np.int32)
        logits = self.runner.forward([Segment(0, 0, np.array(tokens, np.int32), slots, num_logits=len(tokens))])
        features = self.runner.features
        return logits, torch.empty(len(tokens), 0) if features is None else features[: len(tokens)].clone()

    def next(self, tokens: Sequence[int]) -> int:
        """The greedy next token."""
        return int(self.run(tokens)[0][-1].argmax())


class Game:
    """Sessions of one drafter over one target."""

    def __init__(self, drafter: ModelDrafter[Any], target: Target) -> None:
        self.drafter = drafter
        self.target = target
        self.sessions: list[Session] = []

    def open(self, *prompts: Sequence[int], **more: Any) -> list[Session]:
        """Opens sessions; the prompts' rows but the last follow, and the first verdict with the first token."""
        opened = [session(prompt, **more) for prompt in prompts]
        self.sessions += opened
        self.drafter.open(opened)
        self.drafter.add_features([(s, rows(0, self.features(s)[:-1])) for s in opened if len(s.tokens) > 1])
        self.drafter.extend([self.commit(s, []) for s in opened])
        return opened

    def features(self, opened: Session) -> torch.Tensor:
        """Rows of all committed positions."""
        return self.target.run(opened.tokens.tolist())[1]

    def commit(self, opened: Session, accepted: Sequence[int]) -> Extension:
        """Accepted tokens and the target's own after them, told with their rows."""
        base_len = len(opened.tokens)
        known = [*opened.tokens.tolist(), *accepted]
        new = [*accepted, self.target.next(known)]
        opened.commit(np.array(new, np.int32))
        verdict = verify_pb2.Verdict(base_len=base_len, tokens=new)
        features = self.target.run(known)[1]
        if features.shape[1]:
            verdict.features.CopyFrom(rows(base_len - 1, features[base_len - 1 :]))
        return Extension(opened, base_len, verdict)

    def draft(self, num_nodes: int | None = None) -> list[Draft]:
        """A tree for each session."""
        most = self.drafter.num_draft_tokens - 1 if num_nodes is None else num_nodes
        return self.drafter.draft([DraftRequest(s, most) for s in self.sessions])

    def accepted(self, opened: Session, draft: Draft) -> list[int]:
        """Tokens of the path that the target agrees with."""
        found: list[int] = []
        node = -1
        while True:
            child = draft.tree.child(node, self.target.next([*opened.tokens.tolist(), *found]))
            if child is None:
                return found
            found.append(int(draft.tokens[child]))
            node = child

    def round(self) -> list[int]:
        """Draft, verify, tell. Returns the accept lengths, bonus included."""
        accepted = [self.accepted(s, draft) for s, draft in zip(self.sessions, self.draft(), strict=True)]
        self.drafter.extend([self.commit(s, a) for s, a in zip(self.sessions, accepted, strict=True)])
        return [len(a) + 1 for a in accepted]


Probabilities = Callable[[list[int]], dict[int, float]]
"""What a drafter thinks may follow its text and a path: token -> probability."""

Tree = list[tuple[tuple[int, ...], float]]


def grown(probabilities: Probabilities, num_steps: int, topk: int, num_nodes: int) -> Tree:
    """The likeliest nodes, by path from the root, with their paths' probabilities, likeliest first."""

    def best(path: tuple[int, ...]) -> list[tuple[int, float]]:
        return sorted(probabilities(list(path)).items(), key=lambda item: -item[1])[:topk]

    frontier: Tree = [((), 1.0)]
    candidates: Tree = []
    for _ in range(num_steps):
        children = [((*path, token), p * q) for path, p in frontier for token, q in best(path)]
        candidates += children
        frontier = sorted(children, key=lambda item: -item[1])[:topk]
    return sorted(candidates, key=lambda item: -item[1])[:num_nodes]


def nodes(draft: Draft) -> Tree:
    """A draft's nodes by path, likeliest first."""
    tree = draft.tree
    found = [(tuple(tree.tokens[tree.path(i)].tolist()), float(draft.probabilities[i])) for i in range(len(draft))]
    return sorted(found, key=lambda item: -item[1])


def assert_same_tree(draft: Draft, expected: Tree, tolerance: float = 1e-4) -> None:
    """Equal paths and probabilities."""
    found = nodes(draft)
    assert {path for path, _ in found} == {path for path, _ in expected}
    want = dict(expected)
    np.testing.assert_allclose([p for _, p in found], [want[path] for path, _ in found], atol=tolerance)
