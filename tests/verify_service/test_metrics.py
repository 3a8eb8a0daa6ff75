"""What a verify process tells, against what its sessions did; the decode log line."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from outrider.sampling import SamplingParams
from outrider.speculation_count import SpeculationCount
from outrider.v1 import common_pb2
from tests.fake_drafters import FakeDrafter, Truth, perfect, silent, wrong
from tests.verify_service.conftest import Serve, Service, tokens_of
from tests.verify_service.held import MODEL, PROMPT, TEXT
from tests.verify_service.rig import request
from verify_service.counting import Counters, DecodeLog
from verify_service.metrics import make_registry

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def registry_of(service: Service) -> CollectorRegistry:
    return make_registry(service.engine, service.servicer.totals, "toy")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {"model": "toy", **labels})
    assert found is not None, (name, labels)
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("cached", [True, False])
async def test_what_is_not_looked_up_is_no_query(serve: Serve, cached: bool) -> None:
    service = await serve(MODEL, disable_radix_cache=not cached)
    for prompt_logprobs in (False, True, False):
        asked = request(PROMPT, GREEDY)
        asked.prompt_logprobs = prompt_logprobs
        await service.generate(asked)
    registry = registry_of(service)
    assert value(registry, "outrider_prompt_tokens_total") == 3 * len(PROMPT)
    assert value(registry, "outrider_prefix_cache_query_tokens_total") == 2 * cached * len(PROMPT)
    assert value(registry, "outrider_prefix_cache_hit_tokens_total") == cached * (len(PROMPT) - 1)


@pytest.mark.asyncio
async def test_the_numbers_are_those_of_what_was_done(serve: Serve) -> None:
    # Without the brake: of a tree that it trims the rest may be used again.
    service = await serve(MODEL, max_draft_wait_ms=10_000.0, disable_speculation_brake=True)
    drafter = await service.patient_draft(perfect(Truth([TEXT]), 3))
    tokens = tokens_of(await service.generate(request(PROMPT, GREEDY)))
    assert len(tokens) == 24
    await service.inbox.idle()
    registry = registry_of(service)
    assert value(registry, "outrider_generation_tokens_total") == 24
    assert value(registry, "outrider_prompt_tokens_total") == len(PROMPT)
    assert value(registry, "outrider_sessions_total", finish_reason="length") == 1
    assert value(registry, "outrider_requests_running") == 0
    assert value(registry, "outrider_drafter_up", algorithm="NGRAM") == 1
    assert value(registry, "outrider_stage_seconds_count", stage="decode") == 1
    stats = service.engine.stats
    for name, number in (
        ("verify_calls", stats.verify_steps), ("draft_tokens", stats.draft_tokens),
        ("accepted_tokens", stats.accepted_tokens), ("committed_tokens", stats.committed_tokens),
    ):  # fmt: skip
        told = sum(sample.value for sample in samples(registry, f"outrider_spec_{name}_total"))
        assert told == number > 0, name
    by_position = samples(registry, "outrider_spec_accepted_tokens_per_position_total")
    assert sum(sample.value for sample in by_position) == stats.accepted_tokens
    depths = sorted((int(sample.labels["position"]), sample.value) for sample in by_position)
    assert [depth for depth, _ in depths] == list(range(1, len(depths) + 1))
    assert [count for _, count in depths] == sorted((count for _, count in depths), reverse=True)
    used = value(registry, "outrider_proposals_total", algorithm="NGRAM", result="used")
    assert used == value(registry, "outrider_spec_drafts_total", algorithm="NGRAM")
    overlap = [value(registry, "outrider_overlap_total", algorithm="NGRAM", result=r) for r in ("hit", "miss")]
    assert sum(overlap) == used  # a hit where a plain step went ahead and its token is in the tree
    of_both = samples(registry, "outrider_overlap_accepted_tokens_total")
    assert sum(sample.value for sample in of_both) == stats.accepted_tokens
    assert value(registry, "outrider_proposal_age_seconds_count", algorithm="NGRAM") >= used
    assert value(registry, "outrider_proposed_tokens_total", algorithm="NGRAM") >= stats.draft_tokens
    phases = {s.labels["phase"]: s.value for s in samples(registry, "outrider_step_phase_seconds_total")}
    assert phases.keys() == {"idle", "plan", "wait", "tell", "forward", "commit"}
    assert phases["forward"] > 0
    assert value(registry, "outrider_steps_parted_total") == service.engine.halves.num_parted
    steps = [value(registry, "outrider_step_seconds_count", kind=kind) for kind in ("decode", "prefill")]
    assert sum(steps) == value(registry, "outrider_steps_total") == service.engine.counters.steps
    pages = {s.labels["state"]: s.value for s in samples(registry, "outrider_kv_pages")}
    assert sum(pages.values()) == 1024
    assert pages["used"] == 0 < pages["cached"]

    # A drafter that leaves takes no counts with it.
    await leave(service, drafter)
    assert value(registry, "outrider_drafter_up", algorithm="NGRAM") == 0
    assert value(registry, "outrider_proposals_total", algorithm="NGRAM", result="used") == used


@pytest.mark.asyncio
async def test_waits_that_run_out_are_counted(serve: Serve) -> None:
    service = await serve(MODEL, max_draft_wait_ms=1.0)
    await service.draft(silent)
    await service.generate(request(PROMPT, GREEDY))
    await service.inbox.idle()
    registry = registry_of(service)
    assert value(registry, "outrider_drafts_missing_total") == value(registry, "outrider_draft_waits_total") > 0
    plain = value(registry, "outrider_spec_verify_calls_total", algorithm="NONE")
    assert plain == service.engine.stats.verify_steps
    assert value(registry, "outrider_spec_drafts_total", algorithm="NONE") == 0


@pytest.mark.asyncio
async def test_time_goes_by_while_nothing_is_asked(serve: Serve) -> None:
    service = await serve(MODEL)
    await service.generate(request(PROMPT, GREEDY))
    await service.inbox.idle()
    registry = registry_of(service)
    before, after = (value(registry, "outrider_step_phase_seconds_total", phase="idle") for _ in range(2))
    assert before < after
    await service.generate(request(PROMPT, GREEDY))
    assert value(registry, "outrider_step_phase_seconds_total", phase="idle") >= after


@pytest.mark.asyncio
async def test_wrong_drafts_are_waste(serve: Serve) -> None:
    service = await serve(MODEL)
    await service.patient_draft(wrong(Truth([TEXT]), MODEL.vocab_size, 3))
    await service.generate(request(PROMPT, GREEDY))
    registry = registry_of(service)
    assert value(registry, "outrider_spec_draft_tokens_total", algorithm="NGRAM") > 0
    assert value(registry, "outrider_spec_accepted_tokens_total", algorithm="NGRAM") == 0


async def leave(service: Service, drafter: FakeDrafter) -> None:
    await drafter.close()
    await service.inbox.until(lambda: not len(service.engine.drafters))


def samples(registry: CollectorRegistry, name: str) -> list[Any]:
    return [sample for family in registry.collect() for sample in family.samples if sample.name == name]


def test_the_decode_line_says_what_sglangs_does() -> None:
    counters, stats, said = Counters(), SpeculationCount(), []
    log = DecodeLog(2, counters, stats, lambda event, **fields: said.append((event, fields)))
    for accepted in (3, 1, 0, 0):
        stats.count(drafted=4, accepted=accepted, committed=accepted + 1)
        counters.count(accepted + 1, 10)
        log.step(running=1, waiting=2, tokens=50, pool_tokens=200)
    assert [event for event, _ in said] == ["decode batch"] * 2
    assert said[0][1] == {
        "running_req": 1, "token": 50, "token_usage": 0.25, "accept_len": 3.0, "accept_rate": 0.5,
        "gen_throughput": 0.0, "queue_req": 2,
    }  # fmt: skip
    assert (said[1][1]["accept_len"], said[1][1]["accept_rate"]) == (1.0, 0.0)
    assert common_pb2.ALGORITHM_UNSPECIFIED == 0  # what plain steps are counted under
