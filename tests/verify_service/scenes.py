"""What tests of the step loop share: a model, ways to draft for it, and checks of whole outputs."""

from __future__ import annotations

import random
from collections.abc import Callable

from outrider.sampling import SamplingParams
from outrider.v1 import verify_pb2
from tests.drafter_view import Policy
from tests.fake_drafters import Truth, declining, early, perfect, random_trees, silent, wrong
from tests.fakes import ToyModel
from tests.verify_service.rig import Rig, expected
from verify_service.session import Session

VOCAB = 16
MODEL = ToyModel(vocab_size=VOCAB, order=3)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=30)

POLICIES: dict[str, Callable[[Truth, random.Random], Policy]] = {
    "silent": lambda truth, rng: silent,
    "declining": lambda truth, rng: declining,
    "perfect": lambda truth, rng: perfect(truth),
    "wrong": lambda truth, rng: wrong(truth, VOCAB),
    "random": lambda truth, rng: random_trees(truth, VOCAB, rng),
    "early": lambda truth, rng: early(truth, VOCAB, rng),
}


def learn(truth: Truth, rig: Rig, *sessions: Session) -> None:
    """Tells drafters what will come."""
    truth.texts += [s.tokens[: s.prompt_len].tolist() + expected(rig, s) for s in sessions]


def check_outputs(rig: Rig, *sessions: Session) -> None:
    """Checks that every session has the output of plain decoding, and counts that fit it."""
    for session in sessions:
        output = expected(rig, session)
        assert rig.output(session) == output
        finish = rig.finishes[session.session_id]
        assert finish.completion_tokens == len(output)
        assert finish.prompt_tokens == session.prompt_len
        stats = finish.speculation
        assert stats.accepted_tokens == sum(r.num_accepted for r in rig.responses[session.session_id])
        assert stats.committed_tokens == stats.accepted_tokens + stats.verify_steps - cut_bonuses(rig, session)
        assert sum(stats.accepted_histogram) == stats.verify_steps
        if finish.reason == verify_pb2.FINISH_REASON_STOP:
            assert output[-1] == finish.stop_token_id
            assert output[-1] in session.stop_ids
        else:
            assert finish.reason == verify_pb2.FINISH_REASON_LENGTH
            assert not finish.HasField("stop_token_id")


def cut_bonuses(rig: Rig, session: Session) -> int:
    """1 when the last step ended on an accepted draft, so that no bonus was committed."""
    last = rig.responses[session.session_id][-1]
    return int(len(last.tokens) == last.num_accepted > 0)
