"""One frame of `outrider top`, as lines of text. Pure: it knows neither sockets nor terminals."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from outrider.scrape import Scrape, Span
from outrider.terminal import shown_line

_PHASES = ("forward", "wait", "plan", "tell", "commit", "idle")
_BAR = 30  # characters


def is_verify(scrape: Scrape) -> bool:
    """Whether a verify service said it."""
    return scrape.has("outrider_steps_total")


def is_draft(scrape: Scrape) -> bool:
    """Whether a draft service said it."""
    return scrape.has("outrider_draft_links")


def frame(spans: Mapping[str, Span], failed: Mapping[str, str]) -> list[str]:
    """Lines for each process by its URL: verify services, drafters, then what did not answer."""
    lines: list[str] = []
    verifying = {url: span for url, span in spans.items() if is_verify(span.now)}
    drafting = {url: span for url, span in spans.items() if is_draft(span.now)}
    for url, span in verifying.items():
        lines += [*_verify(url, span), ""]
    for url, span in drafting.items():
        lines += [*_draft(url, span), ""]
    for url in spans.keys() - verifying.keys() - drafting.keys():
        lines += [f"{url}: neither a verify nor a draft service", ""]
    lines += [f"no answer: {reason}" for reason in failed.values()]
    return [shown_line(line) for line in lines]


def fitted(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """A frame cut to a terminal's size: who has most lines gives way, each process its last ones first."""
    blocks = [list(block) for filled, block in itertools.groupby(lines, bool) if filled]
    gaps = len(blocks) - 1
    while sum(map(len, blocks)) + gaps > rows and max(map(len, blocks)) > 1:
        max(blocks, key=len).pop()
    kept = [line[:columns] for block in blocks for line in ["", *block]]
    return kept[1:][: max(rows, 0)]


def _verify(url: str, span: Span) -> list[str]:
    now = span.now
    model = next(iter(now.values("model", "outrider_steps_total")), "?")
    lines = [
        f"verify  {model}  {url}",
        f"  running {now.total('outrider_requests_running'):.0f}, "
        f"waiting {now.total('outrider_requests_waiting'):.0f}, "
        f"pages {100 * now.total('outrider_kv_usage_ratio'):.0f} %, cpu {_cpu(span)}",
        f"  {span.rate('outrider_generation_tokens_total'):.1f} tokens/s, "
        f"{span.rate('outrider_steps_total'):.1f} steps/s, decode step "
        f"{_ms(span.mean_ms('outrider_step_seconds', kind='decode'))}, prefill step "
        f"{_ms(span.mean_ms('outrider_step_seconds', kind='prefill'))}",
        "  " + _phases(span),
        f"  brake: silenced {_total_and_new(span, 'outrider_brake_decisions_total', decision='silence')}, "
        f"probes {_total_and_new(span, 'outrider_brake_decisions_total', decision='probe')}; "
        f"waits {_total_and_new(span, 'outrider_draft_waits_total')}, "
        f"drafts missing {_total_and_new(span, 'outrider_drafts_missing_total')}",
    ]
    names = {*now.values("algorithm", "outrider_spec_verify_calls_total")}
    names |= {*now.values("algorithm", "outrider_drafter_up")}
    rows = [_algorithm(span, name) for name in sorted(names)]
    return [*lines, *_table(_ALGORITHM_COLUMNS, rows)]


_ALGORITHM_COLUMNS = (
    "drafts by",
    "drafters",
    "sessions",
    "silent",
    "ask costs",
    "steps/s",
    "accept",
    "accepted",
    "early",
)


def _algorithm(span: Span, name: str) -> tuple[str, ...]:
    now = span.now
    hits, misses = (span.change("outrider_overlap_total", algorithm=name, result=r) for r in ("hit", "miss"))
    return (
        name,
        f"{now.total('outrider_drafter_up', algorithm=name):.0f}",
        f"{now.total('outrider_drafter_sessions', algorithm=name):.0f}",
        f"{now.total('outrider_brake_silent_sessions', algorithm=name):.0f}",
        _ms(1000 * now.total("outrider_brake_tax_seconds", algorithm=name) or None),
        f"{span.rate('outrider_spec_verify_calls_total', algorithm=name):.1f}",
        _number(span.share("outrider_spec_committed_tokens_total", "outrider_spec_verify_calls_total", algorithm=name)),
        _percent(span.share("outrider_spec_accepted_tokens_total", "outrider_spec_draft_tokens_total", algorithm=name)),
        _percent(hits / (hits + misses) if hits + misses else None),
    )


def _draft(url: str, span: Span) -> list[str]:
    now = span.now
    name = next(iter(now.values("algorithm", "outrider_draft_links")), "?")
    links = ", ".join(
        f"{now.total('outrider_draft_links', state=state):.0f} {state}"
        for state in now.values("state", "outrider_draft_links")
        if now.total("outrider_draft_links", state=state)
    )
    accepted = span.share("outrider_draft_nodes_accepted_total", "outrider_draft_nodes_verified_total")
    lines = [
        f"draft  {name}  {url}",
        f"  links {links or 'none'}; sessions {now.total('outrider_draft_sessions'):.0f}, cpu {_cpu(span)}",
        f"  plan: {_plan(span)}",
        f"  {span.rate('outrider_draft_rounds_total'):.1f} rounds/s; trees "
        f"{_ms(span.mean_ms('outrider_draft_seconds', kind='tree'))} a call, early ones "
        f"{_ms(span.mean_ms('outrider_draft_seconds', kind='early'))}; accepted "
        f"{_percent(accepted)} of nodes",
    ]
    if now.has("outrider_draft_copies_total"):
        copied = span.share("outrider_draft_copied_nodes_accepted_total", "outrider_draft_copied_nodes_total")
        lines.append(
            f"  copies of sessions' own texts {_total_and_new(span, 'outrider_draft_copies_total')}, accepted "
            f"{_percent(copied)} of nodes"
        )
    if now.total("outrider_ngram_capacity_nodes"):
        lines.append(
            f"  trie {now.total('outrider_ngram_nodes'):.0f} of {now.total('outrider_ngram_capacity_nodes'):.0f} nodes"
        )
    return lines


def _plan(span: Span) -> str:
    now = span.now
    if not now.total("outrider_planner_speculates"):
        text = "does not draft: it does not pay"
    elif now.has("outrider_planner_steps"):
        steps, branches, tokens = (
            int(now.total(f"outrider_planner_{name}")) for name in ("steps", "branches", "draft_tokens")
        )
        text = f"{steps} steps, {branches} branch{'es' if branches > 1 else ''}, {tokens} tokens"
        run = span.share("outrider_draft_steps_total", "outrider_draft_seconds_count", kind="tree")
        text += "" if run is None else f", {run:.1f} steps run"
    else:
        text = "trees as flags and requests have them"
    outcomes = int(now.total("outrider_planner_outcomes"))
    text += f"; {outcomes} outcomes ahead" if outcomes else "; no overlap"
    changes = {
        decision: int(now.total("outrider_planner_decisions_total", decision=decision))
        for decision in now.values("decision", "outrider_planner_decisions_total")
    }
    return text + "".join(f"; {decision} {number}" for decision, number in changes.items())


def _phases(span: Span) -> str:
    """Where the engine's time went, as a bar and in percent."""
    spent = {phase: span.change("outrider_step_phase_seconds_total", phase=phase) for phase in _PHASES}
    whole = sum(spent.values())
    if not whole:  # phases are counted when they end
        running = span.now.total("outrider_requests_running")
        return "in one step for longer than since the last look" if running else "idle"
    bar = "".join(phase[0].upper() * round(_BAR * seconds / whole) for phase, seconds in spent.items())
    shares = ", ".join(f"{phase} {100 * seconds / whole:.0f} %" for phase, seconds in spent.items() if seconds)
    return f"[{bar[:_BAR]:<{_BAR}}] {shares}"


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]
    ]


def _total_and_new(span: Span, name: str, **labels: str) -> str:
    return f"{span.now.total(name, **labels):.0f} (+{span.change(name, **labels):.0f})"


def _cpu(span: Span) -> str:
    return _percent(span.rate("process_cpu_seconds_total"))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
