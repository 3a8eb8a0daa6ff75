"""One run of `bench wire`: both services started, streams read, reports gathered."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._process import enlisted, process
from bench._wire_script import PROMPT_LEN, Script, Setting
from gateway.calls import ReplicaCalls
from outrider import rpc
from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids

WARM_SHARE = 0.15  # of the time, at the beginning, that is not measured
_CALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Stream:
    """One session as its client saw it: when tokens came, and how many were there then."""

    key: int
    times_ns: list[int]
    num_tokens: list[int]


@dataclass(frozen=True)
class Played:
    """A finished run: what the clients saw, and what both processes report."""

    setting: Setting
    streams: list[Stream]
    verify: dict[str, Any]
    draft: dict[str, Any]


@dataclass(frozen=True)
class Rate:
    """Over the time in which all sessions ran: tokens, the script's rounds that they make, and the time."""

    tokens: int
    rounds: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sessions together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Tokens per round in the script of the text that was played."""
        return self.tokens / max(1, self.rounds)


async def play(setting: Setting, folder: Path) -> Played:
    """Runs both services and `batch` sessions at once, from prompt to end."""
    name = "overlap" if setting.early else "sequential"
    address = f"unix:{folder}/{name}"
    reports = folder / f"{name}-verify.json", folder / f"{name}-draft.json"
    async with (
        process("bench._wire_verify", address, str(reports[0]), setting.to_json()),
        process("bench._wire_draft", address, str(reports[1]), setting.to_json()),
        rpc.create_channel(address) as channel,
    ):
        stub: verify_pb2_grpc.VerifyServiceAsyncStub = verify_pb2_grpc.VerifyServiceStub(channel)
        await enlisted(stub)
        calls = ReplicaCalls(channel)
        streams = await asyncio.gather(*(_stream(calls, setting, 1 + i) for i in range(setting.batch)))
        calls.retire()
    verify, draft = (json.loads(report.read_text(encoding="utf-8")) for report in reports)
    return Played(setting, list(streams), verify, draft)


async def _stream(calls: ReplicaCalls, setting: Setting, key: int) -> Stream:
    """Read as the gateway reads it: all sessions' answers come on one stream."""
    request = verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids([key] * PROMPT_LEN),
        sampling=common_pb2.SamplingParams(max_tokens=setting.num_tokens, temperature=0.0, ignore_eos=True),
        speculative=common_pb2.SpeculativeParams(
            enabled=True, num_steps=setting.num_steps, topk=setting.topk, num_draft_tokens=setting.num_draft_tokens
        ),
    )  # fmt: skip
    stream = Stream(key, [], [])
    tokens: list[int] = []
    call = calls.begin(request, _CALL_TIMEOUT_S)
    while responses := await call.take():
        for response in responses:
            tokens += response.tokens
        stream.times_ns.append(time.monotonic_ns())
        stream.num_tokens.append(len(tokens))
    expected = Script(setting).text(key).tokens[PROMPT_LEN : PROMPT_LEN + len(tokens)].tolist()
    if tokens != expected:
        raise AssertionError(f"session {key} is not what the script says")
    return stream


def rate(played: Played) -> Rate:
    """Over the time in which all sessions ran, but for its beginning."""
    first = max(stream.times_ns[0] for stream in played.streams)
    last = min(stream.times_ns[-1] for stream in played.streams)
    begin = first + int(WARM_SHARE * (last - first))
    lead = played.streams[0].times_ns
    begin = next(t for t in lead if t >= begin)
    end = max(t for t in lead if t <= last)
    script = Script(played.setting)
    tokens = rounds = 0
    for stream in played.streams:
        before, after = (_tokens_at(stream, t) for t in (begin, end))
        tokens += after - before
        rounds += int(script.text(stream.key).ends[PROMPT_LEN + before : PROMPT_LEN + after].sum())
    return Rate(tokens, rounds, max(end - begin, 1) / 1e9)


def _tokens_at(stream: Stream, time_ns: int) -> int:
    return max((count for t, count in zip(stream.times_ns, stream.num_tokens, strict=True) if t <= time_ns), default=0)


def load_average() -> float:
    """Processes that wanted a core in the last minute."""
    return os.getloadavg()[0]
