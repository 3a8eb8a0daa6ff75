"""Puts a server under load, either so many requests at once or so many a second, and collects the answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from bench._prompts import Prompt
from bench._stream import Answer, Asked, ServerRefused, ask, refusal
from outrider.errors import StartupError, Unavailable
from outrider.flags import is_text
from outrider.no_proxy import is_local

_TIMEOUT_S = 600.0


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
        raise first_cause(failed) from failed
    answers = tuple(answer for task in tasks for answer in task.result())
    return Run(load, answers, max(answer.ended for answer in answers) - began)


def first_cause(error: Exception) -> Exception:
    """The cause of which a group of tasks failed."""
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


def open_client(url: str, *, api_key: str | None = None) -> httpx.AsyncClient:
    """A client for any number of streams. `url` may end in /v1, as OpenAI's base URLs do.

    No proxy stands before a local server; its certificate is checked as others' are, by SSL_CERT_FILE or SSL_CERT_DIR
    where they are set. StartupError where these cannot be read.

    Each request opens a connection of its own: servers differ in when they close an idle one, and llama.cpp's does so
    just as the next request is sent.
    """
    try:
        verify = httpx.create_ssl_context()
    except OSError as error:
        raise StartupError(f"certificates cannot be read, of SSL_CERT_FILE or SSL_CERT_DIR: {error}") from error
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        base_url = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise StartupError(f"{url!r} is no URL: {error}") from error
    return httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=_TIMEOUT_S, verify=verify,
        trust_env=not is_local(url),  # `http_proxy` is for the world outside
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )  # fmt: skip


@contextlib.contextmanager
def failures_told(url: str) -> Iterator[None]:
    """StartupError, in words, for what the server at `url` refuses or fails of in the block."""
    try:
        yield
    except (httpx.HTTPError, ServerRefused, Unavailable) as failure:
        raise StartupError(_in_words(url, failure)) from failure


def _in_words(url: str, failure: Exception) -> str:
    if isinstance(failure, httpx.ConnectError):
        return f"no server answers at {url}: {_root(failure)}"
    return f"{url}: {str(failure) or type(failure).__name__}"


def _root(failure: BaseException) -> str:
    """The first words of the system or TLS: layers above it tell that all attempts failed."""
    while (cause := failure.__cause__ or failure.__context__) is not None:
        failure = cause
    if isinstance(failure, BaseExceptionGroup):
        return _root(failure.exceptions[0])
    if isinstance(failure, ConnectionError) and failure.errno:
        return os.strerror(failure.errno)  # asyncio's words are of the address
    return getattr(failure, "strerror", None) or str(failure) or type(failure).__name__


async def model_of(client: httpx.AsyncClient) -> str:
    """The first model that the server says it has. ServerRefused where it says none."""
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise refusal("/v1/models", response.status_code, response.content)
    try:
        name = response.json()["data"][0]["id"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise ServerRefused("/v1/models names no model") from error
    if not isinstance(name, str) or not is_text(name):
        raise ServerRefused(f"/v1/models names a model {name!r}")
    return name
