"""Puts a server under load, either so many requests at once or so many a second, and collects the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from bench._prompts import Prompt
from bench._stream import Answer, Asked, ServerRefused, ask, refusal
from outrider.direct import is_local


@dataclass(frozen=True)
class Load:
    """`concurrency` requests at once, the next sent when one ends; or `request_rate` a second, at random moments."""

    concurrency: int | None = None
    request_rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency else f"{self.request_rate:g}/s"


@dataclass(frozen=True)
class Run:
    """The answers under one load, and the seconds from the first request to the end of the last answer."""

    load: Load
    answers: tuple[Answer, ...]
    duration_s: float


async def run(client: httpx.AsyncClient, prompts: Sequence[Prompt], asked: Asked, load: Load, seed: int = 0) -> Run:
    """Asks all prompts.

    Raises the first ServerRefused or httpx.HTTPError: figures without the failed requests would mean nothing.
    """
    began = time.perf_counter()
    at_once = load.concurrency or len(prompts)
    moments = [0.0] * len(prompts) if load.concurrency else poisson_moments(len(prompts), load.request_rate or 1, seed)
    pending = iter(zip(prompts, moments, strict=True))

    async def worker() -> list[Answer]:
        answers: list[Answer] = []
        for prompt, moment in pending:
            await asyncio.sleep(moment)
            answers.append(await ask(client, prompt, asked))
        return answers

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(worker()) for _ in range(min(at_once, len(prompts)))]
    except ExceptionGroup as failed:
        raise _first_cause(failed) from failed
    answers = tuple(answer for task in tasks for answer in task.result())
    return Run(load, answers, max(answer.ended for answer in answers) - began)


def _first_cause(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def poisson_moments(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` independent clients would send, `rate` a second together."""
    source = random.Random(seed)
    moments, now = [], 0.0
    for _ in range(count):
        moments.append(now)
        now += source.expovariate(rate)
    return moments


def open_client(url: str, *, api_key: str | None = None, timeout_s: float = 600) -> httpx.AsyncClient:
    """A client for any number of streams. `url` may end in /v1, as OpenAI's base URLs do.

    Each request opens a connection of its own: servers differ in when they close an idle one, and llama.cpp's does so
    just as the next request is sent.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout_s,
        trust_env=not is_local(url),  # `http_proxy` is for the world outside
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )  # fmt: skip


def failure_at(url: str, failure: Exception) -> str:
    """What failed, in words."""
    if isinstance(failure, httpx.ConnectError):
        return f"no server answers at {url}"
    return f"{url}: {str(failure) or type(failure).__name__}"


async def model_of(client: httpx.AsyncClient) -> str:
    """The first model that the server says it has. ServerRefused where it says none."""
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise refusal("/v1/models", response.status_code, response.content)
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise ServerRefused("/v1/models names no model") from error
