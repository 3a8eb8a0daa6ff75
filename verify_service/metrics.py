"""What a verify process tells Prometheus; docs/metrics.md explains the names.

Everything is read from numbers that the engine's loop and the rpc handlers keep anyway.
"""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry

from outrider.algorithms import algorithm_name
from outrider.metrics import Families, Family, Reading, new_registry, reached
from verify_service.call_totals import CallTotals
from verify_service.counting import PHASES
from verify_service.proposals import Refusal
from verify_service.step_loop import StepLoop

FAMILIES = (
    Family("outrider_requests_running", "gauge", "Sessions in the batch."),
    Family("outrider_requests_waiting", "gauge", "Sessions waiting."),
    Family("outrider_commands_waiting", "gauge", "Commands that the engine has not taken yet."),
    Family("outrider_sessions_total", "counter", "Sessions that ended.", ("finish_reason",)),
    Family("outrider_prompt_tokens_total", "counter", "Prompt tokens of sessions that began."),
    Family("outrider_generation_tokens_total", "counter", "Tokens generated."),
    Family("outrider_prefix_cache_query_tokens_total", "counter", "Prompt tokens looked up in the prefix cache."),
    Family("outrider_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    Family("outrider_preemptions_total", "counter", "Sessions sent back to the queue."),
    Family("outrider_kv_pages", "gauge", "Pages of the KV pool.", ("state",)),
    Family("outrider_kv_usage_ratio", "gauge", "Pages in use, of all."),
    Family("outrider_stage_seconds", "histogram", "Time that sessions spent in a stage.", ("stage",)),
    Family("outrider_steps_total", "counter", "Steps of the engine."),
    Family("outrider_step_seconds", "histogram", "Forward pass and sampling of one step.", ("kind",)),
    Family("outrider_step_phase_seconds_total", "counter", "Time that the engine's loop spent in a phase.", ("phase",)),
    Family("outrider_spec_verify_calls_total", "counter", "Steps of sessions, plain ones (NONE) too.", ("algorithm",)),
    Family("outrider_spec_drafts_total", "counter", "Steps of sessions that verified a tree.", ("algorithm",)),
    Family("outrider_spec_draft_tokens_total", "counter", "Draft tokens verified.", ("algorithm",)),
    Family("outrider_spec_accepted_tokens_total", "counter", "Draft tokens accepted.", ("algorithm",)),
    Family("outrider_spec_committed_tokens_total", "counter", "Tokens committed: accepted and bonus.", ("algorithm",)),
    Family(
        "outrider_spec_accepted_tokens_per_position_total", "counter",
        "Draft tokens accepted at a depth of the tree.", ("algorithm", "position"),
    ),
    Family("outrider_grammar_total", "counter", "Requests' grammars: compiled, cached, refused.", ("result",)),
    Family("outrider_grammar_compilation_time_seconds", "histogram", "Time that compiling a grammar took."),
    Family("outrider_drafter_up", "gauge", "Drafters that are enlisted.", ("algorithm",)),
    Family("outrider_drafter_sessions", "gauge", "Sessions that drafters have.", ("algorithm",)),
    Family("outrider_drafter_outbox_bytes", "gauge", "Bytes that drafters have yet to read.", ("algorithm",)),
    Family("outrider_proposals_total", "counter", "Proposals by what became of them.", ("algorithm", "result")),
    Family("outrider_proposed_tokens_total", "counter", "Nodes of the proposals that were kept.", ("algorithm",)),
    Family(
        "outrider_proposal_age_seconds", "histogram",
        "From a drafter's being told of a length to its proposal for it.", ("algorithm",),
    ),
    Family(
        "outrider_overlap_total", "counter",
        "Trees verified; hit: drafted before the token that they hang below was known.", ("algorithm", "result"),
    ),
    Family(
        "outrider_overlap_accepted_tokens_total", "counter",
        "Draft tokens accepted of trees that were drafted early (hit) and of others.",
        ("algorithm", "result"),
    ),
    Family("outrider_draft_waits_total", "counter", "Waits of the engine for drafts."),
    Family("outrider_drafts_missing_total", "counter", "Sessions that ran plainly because a draft had not come."),
    Family("outrider_steps_parted_total", "counter", "Steps that left out sessions whose drafts or turn were to come."),
    Family("outrider_brake_decisions_total", "counter", "Sessions silenced, and tried again.", ("decision",)),
    Family("outrider_brake_silent_sessions", "gauge", "Sessions whose drafters are silenced now.", ("algorithm",)),
    Family(
        "outrider_brake_tax_seconds", "gauge",
        "What asking a drafter about one session adds to a step, beside nodes and waits.", ("algorithm",),
    ),
)  # fmt: skip

_RESULTS = ("used", *(refusal.value for refusal in Refusal))


def make_registry(engine: StepLoop, calls: CallTotals, model: str) -> CollectorRegistry:
    """All metrics of the process, labelled with the model's name."""

    def read(reading: Reading) -> None:
        _read_requests(reading, engine, calls)
        _read_steps(reading, engine)
        _read_speculation(reading, engine)
        _read_drafters(reading, engine)

    registry = new_registry()
    registry.register(Families(FAMILIES, read, [("model", model)]))
    return registry


def _read_requests(reading: Reading, engine: StepLoop, calls: CallTotals) -> None:
    scheduler = engine.scheduler
    reading.add("outrider_requests_running", len(scheduler.running))
    reading.add("outrider_requests_waiting", len(scheduler.waiting) + len(scheduler.parked))
    reading.add("outrider_commands_waiting", engine.inbox.num_waiting)
    for reason, number in list(calls.finished.items()):
        reading.add("outrider_sessions_total", number, reason)
    reading.add("outrider_prompt_tokens_total", calls.prompt_tokens)
    reading.add("outrider_generation_tokens_total", engine.counters.output_tokens)
    reading.add("outrider_prefix_cache_query_tokens_total", calls.queried_tokens)
    reading.add("outrider_prefix_cache_hit_tokens_total", calls.cached_tokens)
    reading.add("outrider_preemptions_total", scheduler.num_preemptions)
    grammars = calls.grammars
    counts = {"compiled": grammars.compiled, "cached": grammars.cache_hits, "refused": grammars.refused}
    for result, number in counts.items():
        reading.add("outrider_grammar_total", number, result)
    reading.add_buckets("outrider_grammar_compilation_time_seconds", grammars.compile_s)
    total, free = scheduler.pages.pool.num_pages, scheduler.pages.pool.num_free
    cached = max(0, scheduler.pages.num_available - free)
    used = max(0, total - free - cached)
    for state, number in (("used", used), ("cached", cached), ("free", free)):
        reading.add("outrider_kv_pages", number, state)
    reading.add("outrider_kv_usage_ratio", used / max(1, total))
    for stage, buckets in calls.stages_s.items():
        reading.add_buckets("outrider_stage_seconds", buckets, stage)


def _read_steps(reading: Reading, engine: StepLoop) -> None:
    counters = engine.counters
    reading.add("outrider_steps_total", counters.steps)
    reading.add_buckets("outrider_step_seconds", counters.decode_s, "decode")
    reading.add_buckets("outrider_step_seconds", counters.prefill_s, "prefill")
    for phase, spent_ns in zip(PHASES, counters.spent_ns(), strict=True):
        reading.add("outrider_step_phase_seconds_total", spent_ns / 1e9, phase)
    reading.add("outrider_draft_waits_total", counters.waits)
    reading.add("outrider_drafts_missing_total", counters.missing)
    reading.add("outrider_steps_parted_total", engine.halves.num_parted)
    reading.add("outrider_brake_decisions_total", counters.silenced, "silence")
    reading.add("outrider_brake_decisions_total", counters.probes, "probe")


def _read_speculation(reading: Reading, engine: StepLoop) -> None:
    for algorithm, stats in list(engine.counters.by_algorithm.items()):
        name = algorithm_name(algorithm)
        reading.add("outrider_spec_verify_calls_total", stats.verify_steps, name)
        reading.add("outrider_spec_drafts_total", stats.drafts, name)
        reading.add("outrider_spec_draft_tokens_total", stats.draft_tokens, name)
        reading.add("outrider_spec_accepted_tokens_total", stats.accepted_tokens, name)
        reading.add("outrider_spec_committed_tokens_total", stats.committed_tokens, name)
        for position, steps in reached(list(stats.accepted_histogram)):
            reading.add("outrider_spec_accepted_tokens_per_position_total", steps, name, str(position))


def _read_drafters(reading: Reading, engine: StepLoop) -> None:
    drafters = list(engine.drafters)
    for algorithm, totals in list(engine.drafters.totals.items()):
        name = algorithm_name(algorithm)
        ours = [drafter for drafter in drafters if drafter.algorithm == algorithm]
        assignments = [assignment for drafter in ours for assignment in list(drafter.assignments.values())]
        reading.add("outrider_drafter_up", len(ours), name)
        reading.add("outrider_drafter_sessions", len(assignments), name)
        reading.add("outrider_brake_silent_sessions", sum(assignment.brake.silent for assignment in assignments), name)
        for drafter in ours[:1]:
            reading.add("outrider_brake_tax_seconds", drafter.record.tax_ms / 1000, name)
        reading.add("outrider_drafter_outbox_bytes", sum(drafter.outbox.num_bytes for drafter in ours), name)
        counts = Counter(dict(totals.counts))  # copied in one go: the engine counts meanwhile
        for drafter in ours:
            counts.update(dict(drafter.counts))
        for result in _RESULTS:
            reading.add("outrider_proposals_total", counts[result], name, result)
        reading.add("outrider_proposed_tokens_total", totals.proposed_tokens, name)
        reading.add_buckets("outrider_proposal_age_seconds", totals.ages, name)
        reading.add("outrider_overlap_total", totals.overlap_hits, name, "hit")
        reading.add("outrider_overlap_total", totals.overlap_misses, name, "miss")
        reading.add("outrider_overlap_accepted_tokens_total", totals.accepted_early, name, "hit")
        reading.add("outrider_overlap_accepted_tokens_total", totals.accepted_fresh, name, "miss")
