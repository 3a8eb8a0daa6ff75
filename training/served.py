"""Accept length as users get it: questions to `outrider serve` with a head, one at a time, at temperature 0."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from outrider.args import ServeArgs
from outrider.errors import StartupError, Unavailable
from outrider.launcher import Served, serve
from outrider.no_proxy import open_url
from outrider.scrape import Scrape, Span, fetch
from outrider.telemetry import get_logger
from training.accept_length import Rounds
from training.args import EvalArgs
from training.chat_format import Message

_TIMEOUT_S = 600.0
_MOST_ROUNDS = 0.9
_BY_POSITION = "outrider_spec_accepted_tokens_per_position_total"

log = get_logger(__name__)


async def ask_all(
    args: EvalArgs, head: Path, algorithm: str, shape: tuple[int, int, int],
    prompts: Sequence[tuple[str, list[Message]]],
) -> list[tuple[str, Rounds]]:  # fmt: skip
    """Category and rounds of every prompt, with trees of `shape` (steps, topk, nodes), which verify does not trim."""
    found: list[tuple[str, Rounds]] = []
    in_time: list[int] = []

    async def when_ready(served: Served) -> None:
        try:
            await asyncio.to_thread(_ask_each, served, args.answer_tokens, prompts, found, in_time)
        except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError, Unavailable) as error:
            raise StartupError(f"a question to {served.url} failed: {error!r}") from error
        finally:
            served.stop()

    settings = ServeArgs(
        port=0, model_path=args.model_path, revision=args.revision, load_format=args.load_format, dtype=args.dtype,
        device=args.device, threads=args.threads, speculative_algorithm=algorithm,
        speculative_draft_model_path=str(head), speculative_draft_load_format="auto", speculative_num_steps=shape[0],
        speculative_eagle_topk=shape[1], speculative_num_draft_tokens=shape[2], disable_speculation_brake=True,
        max_draft_wait_ms=1000.0,
    )  # fmt: skip
    code = await serve(settings, when_ready)
    if len(found) < len(prompts):
        raise StartupError(f"`outrider serve` ended with {code} after {len(found)} of {len(prompts)} questions")
    rounds, drafted = sum(one.num_rounds for _, one in found), sum(in_time) / (shape[2] - 1)
    if drafted < _MOST_ROUNDS * rounds:
        log.warning(
            "drafts came too late for many rounds: the machine is busy, or drafts save less than waiting costs; "
            "accept length is as served, plain rounds counted",
            rounds=rounds, with_drafts=round(drafted),
        )  # fmt: skip
    return found


def _ask_each(
    served: Served, max_tokens: int, prompts: Sequence[tuple[str, list[Message]]], found: list[tuple[str, Rounds]],
    in_time: list[int],
) -> None:  # fmt: skip
    before = _counted(served)
    for category, messages in tqdm(prompts, desc="Questions", disable=not sys.stderr.isatty()):
        usage = _ask(served, messages, max_tokens)["speculation"]
        steps = usage["verify_steps"]
        committed = round((usage["accept_length"] or 1.0) * steps)
        now = _counted(served)
        found.append((category, Rounds(steps, committed, accepted_between(before, now))))
        before = now
        in_time.append(usage["draft_tokens"])


def _counted(served: Served) -> Scrape:
    return fetch(f"{served.url}/metrics", time.monotonic())


def accepted_between(before: Scrape, now: Scrape) -> list[int]:
    """Rounds' `accepted_by_step` of the answers between two scrapes of a gateway."""
    span = Span(before, now)
    positions = sorted(map(int, now.values("position", _BY_POSITION)))
    counts = (int(span.change(_BY_POSITION, position=str(position))) for position in positions)
    return [count for count in counts if count]  # no position without the one before it


def _ask(served: Served, messages: list[Message], max_tokens: int) -> dict[str, Any]:
    """`usage` of an answer."""
    body = {"model": served.model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with open_url(request, _TIMEOUT_S) as response:
        return json.loads(response.read())["usage"]
