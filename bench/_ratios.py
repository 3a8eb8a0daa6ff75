"""From rounds to tables: medians over rounds, and ratios taken within each round, where noise hits both sides alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from bench._figures import Figures, Spread
from bench._systems import Entry

SCHEMA = "outrider.bench.peers/1"


@dataclass(frozen=True)
class Measured:
    """One system in one round: answers to questions under each load, and long prompts under each."""

    decode: list[Figures]
    prefill: list[Figures]


Round = Mapping[str, Measured]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast `system` was as `beside`: the median, least and most over rounds in which both ran."""

    system: str
    beside: str
    figure: str
    streams: int
    median: float
    least: float
    most: float


def decode_speed(measured: Measured, streams: int) -> float | None:
    """Tokens per second: of a stream where there is one, of all together (prompts included) where there are more."""
    for row in measured.decode:
        if row.concurrency == streams:
            return row.decode_tokens_per_s if streams == 1 else row.total_tokens_per_s
    return None


def prefill_speed(measured: Measured, streams: int) -> float | None:
    """Prompt tokens per second of all streams together."""
    return next((row.total_prefill_tokens_per_s for row in measured.prefill if row.concurrency == streams), None)


FIGURES: Mapping[str, Callable[[Measured, int], float | None]] = {"decode": decode_speed, "prefill": prefill_speed}


def ratios(entries: Sequence[Entry], rounds: Sequence[Round]) -> list[Ratio]:
    """Each of our systems beside each other system of the same precision (our own without speculation too)."""
    found: list[Ratio] = []
    for ours in (entry for entry in entries if entry.system.ours):
        for theirs in entries:
            if theirs.system.precision != ours.system.precision or theirs is ours:
                continue
            if theirs.system.ours and not _compared(ours.system.name, theirs.system.name):
                continue
            for figure, speed in FIGURES.items():
                for streams in ours.streams:
                    found += _ratio(ours.system.name, theirs.system.name, figure, streams, speed, rounds)
    return found


def _compared(ours: str, other: str) -> bool:
    """Whether two systems of ours are worth a ratio: drafts beside none, two processes beside one, two of a kind."""
    if ours.partition("#")[0] == other:
        return True
    return ours in (f"{other}-ngram", f"{other}-eagle3") or other == f"{ours}-colocated"


def _ratio(
    ours: str, theirs: str, figure: str, streams: int, speed: Callable[[Measured, int], float | None],
    rounds: Sequence[Round],
) -> list[Ratio]:  # fmt: skip
    quotients: list[float] = []
    for measured in rounds:
        if ours in measured and theirs in measured:
            mine, other = speed(measured[ours], streams), speed(measured[theirs], streams)
            if mine and other:
                quotients.append(mine / other)
    if not quotients:
        return []
    least, middle, most = min(quotients), statistics.median(quotients), max(quotients)
    return [Ratio(ours, theirs, figure, streams, round(middle, 3), round(least, 3), round(most, 3))]


def median_rows(rows: Sequence[Figures]) -> Figures:
    """One load's figures over several rounds, each the median of those that there are."""

    def middle(values: Sequence[float | Spread | None]) -> float | Spread | None:
        present = [value for value in values if value is not None]
        if not present:
            return None
        spreads = [value for value in present if isinstance(value, Spread)]
        if spreads:
            by_part = ([getattr(spread, part.name) for spread in spreads] for part in fields(Spread))
            return Spread(*(statistics.median(values) for values in by_part))
        return statistics.median(value for value in present if not isinstance(value, Spread))

    return Figures(**{part.name: middle([getattr(row, part.name) for row in rows]) for part in fields(Figures)})  # type: ignore[arg-type]


def medians(entries: Sequence[Entry], rounds: Sequence[Round]) -> dict[str, Measured]:
    """Each system's figures over all rounds that it took part in."""
    found: dict[str, Measured] = {}
    for name in (entry.system.name for entry in entries):
        took_part = [measured[name] for measured in rounds if name in measured]
        if took_part:
            found[name] = Measured(
                [median_rows(rows) for rows in zip(*(one.decode for one in took_part), strict=True)],
                [median_rows(rows) for rows in zip(*(one.prefill for one in took_part), strict=True)],
            )
    return found


def speed_table(of_systems: Mapping[str, Measured]) -> str:
    """Markdown: a line for each system and load."""
    lines = [
        "| system | streams | decode tokens/s a stream | tokens/s in all | TTFT ms p50 | between tokens ms p50 / p99 "
        "| prefill tokens/s | accept length |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, measured in of_systems.items():
        for row in measured.decode:
            streams = row.concurrency or 1
            cells = [
                name, str(streams), _number(row.decode_tokens_per_s), _number(row.total_tokens_per_s),
                _number(row.ttft_ms and row.ttft_ms.p50),
                f"{row.inter_token_ms.p50:.1f} / {row.inter_token_ms.p99:.1f}" if row.inter_token_ms else "",
                _number(prefill_speed(measured, streams)), f"{row.accept_length:.2f}" if row.accept_length else "",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratio_table(rows: Sequence[Ratio]) -> str:
    """Markdown: our systems downwards, what they are beside across."""
    columns = list(dict.fromkeys(row.beside for row in rows))
    lines = ["| times as fast as | streams | " + " | ".join(columns) + " |", "|---|---" + "|---" * len(columns) + "|"]
    for key in dict.fromkeys((row.system, row.figure, row.streams) for row in rows):
        system, figure, streams = key
        cells = {row.beside: f"{row.median:.2f}x" for row in rows if (row.system, row.figure, row.streams) == key}
        line = [f"{system}, {figure}", str(streams), *(cells.get(column, "") for column in columns)]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
