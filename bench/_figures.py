"""Arithmetic from answers to figures: what `bench serve` and `bench peers` write; docs/benchmarking.md defines each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench._load import Run
from bench._stream import Answer

SCHEMA = "outrider.bench.serve/1"


@dataclass(frozen=True)
class Spread:
    """Milliseconds: mean, median and the 99th percentile (nearest rank)."""

    mean: float
    p50: float
    p99: float


def spread_ms(seconds: Iterable[float]) -> Spread | None:
    """Mean, median and 99th percentile in milliseconds; None for no values."""
    values = sorted(value * 1e3 for value in seconds)
    if not values:
        return None
    mean, p50, p99 = statistics.fmean(values), percentile(values, 50), percentile(values, 99)
    return Spread(round(mean, 3), round(p50, 3), round(p99, 3))


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` of a hundred do not exceed."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1]


@dataclass(frozen=True)
class Figures:
    """One load's results. Rates are tokens per second, None where no request gives one."""

    concurrency: int | None
    request_rate: float | None
    num_requests: int
    duration_s: float
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: Spread | None
    inter_token_ms: Spread | None
    inter_chunk_ms: Spread | None
    prefill_tokens_per_s: float | None
    total_prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    decode_tokens_per_s_p50: float | None
    total_tokens_per_s: float
    accept_length: float | None


def figures(run: Run, *, server_accept_length: float | None = None) -> Figures:
    """Sums a run up. `server_accept_length` is taken where the answers tell none."""
    answers = run.answers
    decoding = [answer for answer in answers if answer.completion_tokens > 1 and answer.decode_s > 0]
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    decode_s = sum(answer.decode_s for answer in decoding)
    accept_length = accept_length_of(decoding)
    if any(answer.verify_steps is not None for answer in answers):
        server_accept_length = None  # it counts other loads too
    return Figures(
        concurrency=run.load.concurrency,
        request_rate=run.load.request_rate,
        num_requests=len(answers),
        duration_s=round(run.duration_s, 4),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        ttft_ms=spread_ms(answer.ttft_s for answer in answers),
        inter_token_ms=spread_ms(value for answer in answers for value in answer.inter_token_s),
        inter_chunk_ms=spread_ms(value for answer in answers for value in answer.gaps_s),
        prefill_tokens_per_s=median([answer.prompt_tokens / answer.ttft_s for answer in answers]),
        total_prefill_tokens_per_s=round(prompt_tokens / run.duration_s, 2),
        decode_tokens_per_s=(
            round(sum(answer.completion_tokens - 1 for answer in decoding) / decode_s, 2) if decode_s else None
        ),
        decode_tokens_per_s_p50=median([(answer.completion_tokens - 1) / answer.decode_s for answer in decoding]),
        total_tokens_per_s=round(completion_tokens / run.duration_s, 2),
        accept_length=server_accept_length if accept_length is None else round(accept_length, 3),
    )


def accept_length_of(answers: Iterable[Answer]) -> float | None:
    """Tokens of a verify step, by the answers that tell their steps; None where none does."""
    told = [(answer.completion_tokens - 1, answer.verify_steps) for answer in answers if answer.verify_steps]
    return sum(tokens for tokens, _ in told) / sum(steps for _, steps in told) if told else None


def median(values: Sequence[float]) -> float | None:
    """Rounded to hundredths; None of nothing."""
    return round(statistics.median(values), 2) if values else None


def request_rows(run: Run) -> list[dict[str, Any]]:
    """Each request of a run as it is written out."""
    return [
        {
            "name": answer.prompt.name, "category": answer.prompt.category, "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens, "finish_reason": answer.finish_reason,
            "ttft_ms": round(answer.ttft_s * 1e3, 3), "decode_ms": round(answer.decode_s * 1e3, 3),
            "num_chunks": len(answer.chunk_times), "verify_steps": answer.verify_steps,
        }
        for answer in run.answers
    ]  # fmt: skip


TABLE_HEAD = (
    "| load | requests | TTFT ms p50 / p99 | between tokens ms p50 / p99 | prefill tokens/s "
    "| decode tokens/s a stream | tokens/s in all | accept length |\n|---|---|---|---|---|---|---|---|"
)


def table_row(row: Figures) -> str:
    """One load's line of the table, in Markdown."""
    load = f"{row.concurrency} at once" if row.concurrency else f"{row.request_rate:g}/s"
    cells = [
        load, str(row.num_requests), _pair(row.ttft_ms), _pair(row.inter_token_ms), _cell(row.prefill_tokens_per_s),
        _cell(row.decode_tokens_per_s), _cell(row.total_tokens_per_s), _cell(row.accept_length, 2),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _cell(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _pair(spread: Spread | None) -> str:
    return f"{spread.p50:.1f} / {spread.p99:.1f}" if spread else ""
