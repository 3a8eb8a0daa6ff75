"""What a step leaves for clients: messages are made when drafters have been told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import common_pb2, verify_pb2
from verify_service.session import Session
from verify_service.work import Work


@dataclass(slots=True)
class Committed:
    """What a step committed for a session, for its client."""

    session: Session
    tokens: list[int]
    accepted: Sequence[int] = ()  # nodes of the draft
    num_drafted: int | None = None
    algorithm: common_pb2.Algorithm | None = None
    finished: bool = False
    tree: verify_pb2.VerifiedTree | None = None
    logprobs: Sequence[verify_pb2.TokenLogprob] = ()
    prompt_logprobs: Sequence[verify_pb2.TokenLogprob] | None = None
    work: Work | None = None  # where the step is to be counted

    def response(self) -> verify_pb2.GenerateResponse:
        """The message."""
        session = self.session
        response = verify_pb2.GenerateResponse(
            choice_index=session.choice_index, tokens=self.tokens, num_accepted=len(self.accepted),
            num_drafted=self.num_drafted, algorithm=self.algorithm, tree=self.tree, logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )  # fmt: skip
        if self.finished:
            response.finish.CopyFrom(
                verify_pb2.GenerateFinish(
                    reason=session.finish,
                    stop_token_id=session.stop_token,
                    prompt_tokens=session.prompt_len,
                    completion_tokens=session.output_len,
                    speculation=session.stats.to_proto(),
                    **session.timings_us(),
                )
            )
        return response


Unsent = Committed | Exception
"""What a client gets: the message of what was committed, or why there is no more."""

Responses = list[tuple[Session, verify_pb2.GenerateResponse | Exception]]
"""Unsent, as messages."""


def responses_of(unsent: Sequence[tuple[Session, Unsent]]) -> Responses:
    """The messages, in order."""
    return [(session, said if isinstance(said, Exception) else said.response()) for session, said in unsent]
