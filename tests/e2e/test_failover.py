"""A verify service goes away in the middle of answers of every kind, and each goes on elsewhere as it would have; or
the drafter stops, and costs two waits.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.asking import Lost, Question, Said, chat, every_kind
from tests.e2e.cluster import Cluster, running
from tests.e2e.small_model import write_small_model
from tests.polling import until_async
from verify_service.drafter import MAX_MISSED_IN_A_ROW

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

QUESTIONS = every_kind(300)
_BEGUN = "outrider_prompt_tokens_total"  # only grows: a short answer may be over before anybody looks
Fault = Callable[[Cluster], Awaitable[object]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two replicas and a drafter."""
    model: Path = write_small_model(tmp_path_factory.mktemp("small"))
    async with running(
        model, verify=("--shutdown-grace-s=0.2", "--metrics-port=0"), gateway_flags=("--failover-patience-s=10",)
    ) as cluster:
        await cluster.draft()
        yield cluster
        assert not cluster.complaints(), "\n\n".join(cluster.complaints())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(cluster: Cluster) -> list[Said]:
    """The answers to QUESTIONS, asked one at a time, when nothing goes wrong."""
    return [await cluster.ask(question) for question in QUESTIONS]


async def _kill(cluster: Cluster) -> None:
    await cluster.replicas[0].stop(signal.SIGKILL)
    cluster.replicas[0].front.refuse()  # what it had said and nobody has heard is lost with it


async def _terminate(cluster: Cluster) -> None:
    """Sends SIGTERM; answers that do not end in the short grace are handed over."""
    replica = cluster.replicas[0]
    process, replica.process = replica.process, None
    assert process is not None
    process.popen.send_signal(signal.SIGTERM)
    replica.front.heal()
    assert await asyncio.to_thread(process.popen.wait, 60) == 0  # a second signal would end its grace
    await asyncio.to_thread(process.stop)


async def _reset(cluster: Cluster) -> None:
    cluster.replicas[0].front.refuse()


async def _cut(cluster: Cluster) -> None:
    cluster.replicas[0].front.cut()
    cluster.replicas[0].front.refuse()


async def _all_on_the_first(cluster: Cluster) -> None:
    """The gateway finds only the first replica."""
    if cluster.replicas[0].process is None:
        await cluster.replicas[0].start()
    cluster.replicas[0].front.heal()
    cluster.replicas[1].front.refuse()
    await cluster.until_up(0)


async def _ask_until(cluster: Cluster, questions: list[Question], num_events: int) -> list[asyncio.Task[Said]]:
    """Asks all; returns when the first replica has some and the clients that many events, after which none come."""
    first = cluster.replicas[0]
    count, reached = itertools.count(1), asyncio.Event()

    def on_event() -> None:
        if next(count) == num_events:
            first.front.hold_answers()
            reached.set()

    if num_events == 0:
        first.front.hold_answers()
    begun = await first.metric(_BEGUN)
    asked = [asyncio.create_task(cluster.ask(question, on_event)) for question in questions]
    if num_events == 0:
        await until_async(lambda: first.metric(_BEGUN), "no request began", done=lambda now: now > begun)
    else:
        await reached.wait()
    return asked


@pytest.mark.parametrize(
    ("fault", "num_events"), [(_reset, 0), (_cut, 1), (_kill, 40), (_reset, 150), (_terminate, 60)]
)
async def test_answers_go_on(cluster: Cluster, undisturbed: list[Said], fault: Fault, num_events: int) -> None:
    await _all_on_the_first(cluster)
    first, second = cluster.replicas
    seen = len(cluster.gateway.lines)
    asked = await _ask_until(cluster, QUESTIONS, num_events)
    second.front.heal()
    await until_async(cluster.up, "the second is not up", done=lambda up: 1 in up)
    await fault(cluster)
    for question, task, known in zip(QUESTIONS, asked, undisturbed, strict=True):
        assert await task == known, question.name
    if fault is not _terminate:  # which may have had the time to finish
        cluster.gateway.wait_for("a generate call broke", after=seen)
    await second.until_idle()
    if first.process is not None:
        await first.until_idle()


async def _all_up(cluster: Cluster) -> None:
    """Every replica serves, and has the drafter."""
    for replica in cluster.replicas:
        if replica.process is None:
            await replica.start()
        replica.front.heal()
        await replica.until(lambda info: info.drafters)
    await cluster.until_up(0, 1)


async def _waits(cluster: Cluster) -> list[float]:
    return [await replica.metric("outrider_draft_waits_total") for replica in cluster.replicas]


async def _waits_for_lone_ones(cluster: Cluster, undisturbed: list[Said]) -> list[float]:
    """How often each replica waits for drafts while one session runs at a time.

    Among several, some steps begin without the session whose draft is late, which is then waited for again.
    """
    before = await _waits(cluster)
    for question, known in zip(QUESTIONS, undisturbed, strict=True):
        if len(known.choices) == 1:
            assert await cluster.ask(question) == known, question.name
    return [late - early for early, late in zip(before, await _waits(cluster), strict=True)]


async def test_a_paused_drafter_is_waited_for_twice(cluster: Cluster, undisturbed: list[Said]) -> None:
    """After a drafter stops, verify waits for it twice and no more; questions asked meanwhile are answered."""
    await _all_up(cluster)
    (drafter,) = cluster.drafters
    drafter.popen.send_signal(signal.SIGSTOP)
    try:
        counts = await _waits_for_lone_ones(cluster, undisturbed)
        missed = await _waits(cluster)
        assert list(await asyncio.gather(*map(cluster.ask, QUESTIONS))) == undisturbed
        after = await _waits(cluster)
    finally:
        drafter.popen.send_signal(signal.SIGCONT)
    assert max(counts) == MAX_MISSED_IN_A_ROW
    for count, early, late in zip(counts, missed, after, strict=True):
        assert count < MAX_MISSED_IN_A_ROW or late == early


async def test_a_drafter_pauses_in_the_middle(cluster: Cluster, undisturbed: list[Said]) -> None:
    await _all_up(cluster)
    (drafter,) = cluster.drafters
    paused = asyncio.Event()
    asked = [asyncio.create_task(cluster.ask(question, paused.set)) for question in QUESTIONS]
    await paused.wait()
    drafter.popen.send_signal(signal.SIGSTOP)
    try:
        assert [await task for task in asked] == undisturbed
        assert max(await _waits_for_lone_ones(cluster, undisturbed)) <= MAX_MISSED_IN_A_ROW
    finally:
        drafter.popen.send_signal(signal.SIGCONT)


async def test_no_other_replica(cluster: Cluster, undisturbed: list[Said]) -> None:
    """The only replica goes and does not come back: a clear error, in the stream and before it."""
    await _all_on_the_first(cluster)
    first = cluster.replicas[0]
    # Far longer than it takes to hear its first event on a busy machine.
    long = chat("long", "Hello there", 900, ignore_eos=True, logprobs=True, top_logprobs=20, stream=True)
    asked = await _ask_until(cluster, [long], 1)
    begun = await first.metric(_BEGUN)
    whole = asyncio.create_task(cluster.ask(QUESTIONS[0]))
    await until_async(lambda: first.metric(_BEGUN), "no request began", done=lambda now: now > begun)
    first.front.refuse()
    for task in (*asked, whole):
        with pytest.raises(Lost, match="service_unavailable"):
            await task
    with pytest.raises(Lost, match="503"):
        await cluster.ask(chat("new", "Hello", 5))
    first.front.heal()
    await cluster.until_up(0)
    assert await cluster.ask(QUESTIONS[0]) == undisturbed[0]
