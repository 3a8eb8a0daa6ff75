"""One prompt's answer in SGLang's words: text, ids, and `meta_info` with log-probabilities and speculation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gateway.answer import Answer, Collected
from gateway.logprobs import PieceOf, logprobs_cost, sglang_entries, sglang_top
from gateway.plan import Report
from gateway.schemas import GenerateRequest
from outrider.errors import InvalidArgument
from outrider.speculation_count import SpeculationCount
from outrider.v1 import verify_pb2

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Scores:
    """What is wanted of a prompt's log-probabilities. `prompt_from` is the first prompt token told; None: none is."""

    wanted: bool
    prompt_from: int | None
    num_top: int
    with_text: bool

    @property
    def report(self) -> Report:
        """What the plan is asked to report."""
        return Report(
            logprobs=self.wanted, prompt_logprobs=self.prompt_from is not None,
            top_logprobs=self.num_top if self.wanted else 0,
        )  # fmt: skip


def scores_of(body: GenerateRequest, num_prompts: int) -> list[Scores]:
    """What is wanted of each prompt, from one setting for all or a list."""
    wanted = each_of(body.return_logprob, num_prompts, "return_logprob", False)
    starts = each_of(body.logprob_start_len, num_prompts, "logprob_start_len", -1)
    tops = each_of(body.top_logprobs_num, num_prompts, "top_logprobs_num", 0)
    return [
        Scores(want, start if want and start >= 0 else None, top, bool(body.return_text_in_logprobs))
        for want, start, top in zip(wanted, starts, tops, strict=True)
    ]


def each_of(given: ValueT | list[ValueT] | None, num_prompts: int, field: str, default: ValueT) -> list[ValueT]:
    """The setting of each prompt, from one for all or a list. InvalidArgument for a list of another length."""
    if not isinstance(given, list):
        return [default if given is None else given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidArgument(
            f"'{field}' must be one for all prompts, or one for each.", field=field, code="invalid_value"
        )
    return given


@dataclass(slots=True)
class _Lists:
    """A choice's log-probabilities in SGLang's form, which streams repeat: made once for each token, and the prompt's
    encoded once."""

    prompt: dict[str, msgspec.Raw] | None = None
    output: dict[str, list[Any]] = field(default_factory=dict)
    num_pieces: int = 0  # that are in `output`


class Output:
    """One prompt's choices. `began`: when the request came, in monotonic time.

    `empty`: the client asked for no tokens, and the one that was made is not told.
    """

    def __init__(
        self, answer: Answer, id: str, scores: Scores, piece_of: PieceOf, began: float, *, empty: bool
    ) -> None:
        self.answer = answer
        self.choices = [Collected() for _ in answer.choices]
        self._lists = [_Lists() for _ in answer.choices]
        self._id = id
        self._scores = scores
        self._piece_of = piece_of
        self._empty = empty
        self._began = began

    @property
    def logprobs_cost(self) -> int:
        """What `offload` takes it to cost to write the log-probabilities of all choices."""
        return logprobs_cost(self.answer, self._scores.num_top) if self._scores.wanted else 0

    def entry(self, choice: int, *, running: bool = False) -> dict[str, Any]:
        """A choice as it stands."""
        collected, counts = self.choices[choice], self.answer.choices[choice]
        if self._empty:
            collected = Collected(finish_reason="length")
        completion_tokens = 0 if self._empty else counts.completion_tokens
        meta = {
            "id": self._id,
            "finish_reason": None if running else _finish_reason(collected),
            "prompt_tokens": self.answer.prompt_len,
            "completion_tokens": completion_tokens,
            "cached_tokens": counts.cached_tokens,
            "e2e_latency": time.monotonic() - self._began,
            **({} if running else spec_fields(counts.speculation, completion_tokens)),
            **(self._logprobs(choice, collected) if self._scores.wanted else {}),
        }
        return {"text": collected.text, "output_ids": collected.tokens, "meta_info": meta}

    def _logprobs(self, choice: int, collected: Collected) -> dict[str, Any]:
        lists = self._lists[choice]
        if lists.prompt is None:
            first, told = self._scores.prompt_from, self.answer.choices[choice].prompt_logprobs
            prompt = self._written("input", told[first:]) if first is not None else {}
            lists.prompt = {name: msgspec.Raw(msgspec.json.encode(entries)) for name, entries in prompt.items()}
        new = [piece.logprob for piece in collected.pieces[lists.num_pieces :] if piece.logprob is not None]
        lists.num_pieces = len(collected.pieces)
        for name, entries in self._written("output", new).items():
            lists.output.setdefault(name, []).extend(entries)
        return {**lists.output, **lists.prompt}

    def _written(self, side: str, logprobs: Sequence[verify_pb2.TokenLogprob]) -> dict[str, list[Any]]:
        piece_of = self._piece_of if self._scores.with_text else None
        made: dict[str, list[Any]] = {f"{side}_token_logprobs": sglang_entries(logprobs, piece_of)}
        if self._scores.num_top:
            made[f"{side}_top_logprobs"] = sglang_top(logprobs, piece_of)
        return made


def _finish_reason(collected: Collected) -> dict[str, Any]:
    if collected.finish_reason == "length":
        return {"type": "length", "length": len(collected.tokens)}
    return {"type": "stop", "matched": collected.matched}


def spec_fields(count: SpeculationCount, completion_tokens: int) -> dict[str, Any]:
    """meta_info's account of speculation, with the older names beside the newer; empty when nothing was verified.

    The accept length is SGLang's, which has prefill's token too: a little more than that of the steps.
    """
    if not count.verify_steps:
        return {}
    accepted, drafted, histogram = count.accepted_tokens, count.draft_tokens, count.accepted_histogram
    return {
        "spec_accept_rate": accepted / max(drafted, 1),
        "spec_accept_length": completion_tokens / count.verify_steps,
        "spec_verify_ct": count.verify_steps,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": drafted,
        "spec_correct_drafts_histogram": histogram,
        "spec_accepted_drafts": accepted,
        "spec_proposed_drafts": drafted,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": drafted,
        "spec_accept_histogram": histogram,
    }
