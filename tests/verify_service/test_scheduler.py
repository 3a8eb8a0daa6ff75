"""Queues and pages under any order of admission, growth, preemption and removal: none lost, none in two hands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.pages import PagePool
from engine.radix_cache import RadixCache
from outrider.errors import ResourceExhausted
from outrider.sampling import SamplingParams
from outrider.v1 import verify_pb2
from outrider.wire import pack_ids
from tests.fakes import toy_config
from tests.verify_service.rig import build_factory
from verify_service.requests import SessionFactory
from verify_service.scheduler import _MOST_OVERTAKING, Scheduler
from verify_service.session import Phase, Session
from verify_service.session_pages import SessionPages

VOCAB, CONTEXT, MAX_RUNNING, MAX_QUEUED, CHUNK = 3, 24, 3, 4, 5


def make_factory() -> SessionFactory:
    return build_factory(toy_config(VOCAB, CONTEXT))


def make_scheduler(pages: int, page_size: int = 1, *, cache: bool = True, lpm: bool = False) -> Scheduler:
    pool = PagePool(pages, page_size)
    table = np.full((MAX_RUNNING, CONTEXT), -1, np.int32)
    return Scheduler(
        SessionPages(pool, table, cache=RadixCache(pool) if cache else None, move=lambda source, target: None),
        max_running=MAX_RUNNING,
        max_queued=MAX_QUEUED,
        chunk=CHUNK,
        longest_prefix_first=lpm,
    )


def make_sessions(
    factory: SessionFactory, prompt: list[int], *, choices: int = 1, priority: int = 0, salt: str = "",
    prompt_logprobs: bool = False,
) -> list[Session]:  # fmt: skip
    return factory.build(
        verify_pb2.GenerateRequest(
            prompt_tokens=pack_ids(prompt),
            sampling=SamplingParams(max_tokens=CONTEXT).to_proto(),
            num_choices=choices,
            priority=priority,
            cache_salt=salt,
            prompt_logprobs=prompt_logprobs,
        )
    )


def compute(scheduler: Scheduler, session: Session) -> None:
    """A step in which a running session computes all that it has."""
    slots = scheduler.take_slots(session, session.num_uncomputed)
    assert slots is not None
    scheduler.pages.keep(session, slots, list(range(len(slots))))
    scheduler.pages.settle()


class Machine(RuleBasedStateMachine):
    """Steps as the loop makes them, with any outcome; slots remember the path that they were written with."""

    @initialize(page_size=st.sampled_from([1, 2, 3]), spare=st.integers(0, 12), cache=st.booleans(), lpm=st.booleans())
    def start(self, page_size: int, spare: int, cache: bool, lpm: bool) -> None:
        pages = -(-CONTEXT // page_size) + spare // page_size
        self.scheduler = make_scheduler(pages, page_size, cache=cache, lpm=lpm)
        self.scheduler.pages._move = self.move
        self.factory = make_factory()
        self.written: list[tuple[int, ...]] = [()] * (pages * page_size)
        self.alive: list[Session] = []

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        moved = [self.written[slot] for slot in source.tolist()]
        for slot, path in zip(target.tolist(), moved, strict=True):
            self.written[slot] = path

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 4),
        choices=st.integers(1, 2),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.booleans(),
    )
    def submit(self, prompt: list[int], choices: int, priority: int, prompt_logprobs: bool) -> None:
        sessions = make_sessions(
            self.factory, prompt, choices=choices, priority=priority, prompt_logprobs=prompt_logprobs
        )
        waiting = list(self.scheduler.waiting)
        room = MAX_QUEUED + MAX_RUNNING - len(self.scheduler.running) - len(waiting)
        if room < len(sessions):
            with pytest.raises(ResourceExhausted):
                self.scheduler.submit(sessions)
            assert self.scheduler.waiting == waiting
            return
        self.scheduler.submit(sessions)
        self.alive += sessions

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        scheduler = self.scheduler
        self.admit()
        oldest = scheduler.running[0] if scheduler.running else None
        assert bool(self.alive) == (oldest is not None)
        before = oldest.kv_len if oldest is not None else 0
        taken: list[tuple[Session, list[int]]] = []
        for session in list(scheduler.running):
            if session in scheduler.running:
                slots = scheduler.take_slots(session, min(session.num_uncomputed, CHUNK))
                if slots is not None:
                    taken.append((session, slots))
        for session, slots in taken:
            assert session in scheduler.running
            self.finish_step(session, slots, data)
        if oldest is not None:
            assert taken[0][0] is oldest
            assert oldest.kv_len > before or oldest.phase is Phase.FINISHED

    def admit(self) -> None:
        """Where none is admitted, none could be if all were looked at anew."""
        if not self.scheduler.admit():
            noted, self.scheduler._fruitless = self.scheduler._fruitless, None
            assert not self.scheduler.admit()
            self.scheduler._fruitless = noted

    def finish_step(self, session: Session, slots: list[int], data: st.DataObject) -> None:
        """A chunk, or the newest token with a tree of which a path is accepted."""
        scheduler, known = self.scheduler, session.committed.tolist()
        rows, start = list(range(len(slots))), session.kv_len
        if session.num_uncomputed > len(slots):
            self.write(slots, [known[: start + row + 1] for row in rows])
            scheduler.pages.keep(session, slots, rows)
            scheduler.pages.settle()
            return
        nodes = data.draw(st.integers(0, 4)) if len(slots) == 1 and session.output_len else 0
        spare = scheduler.pages.take_spare_slots(session, len(slots), min(nodes, session.remaining - 1))
        path = data.draw(st.lists(st.integers(0, len(spare) - 1), unique=True).map(sorted)) if len(spare) else []
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(path) + 1, max_size=len(path) + 1))
        self.write(slots, [known[: start + row + 1] for row in rows])
        depth_of = {node: depth for depth, node in enumerate(path)}
        self.write(spare, [[*known, *tokens[: depth_of.get(node, 0) + 1]] for node in range(len(spare))])
        is_first = session.output_len == 0
        taken = session.commit(tokens)
        kept = [len(slots) + node for node in path][: len(taken) - 1]
        scheduler.pages.keep(session, [*slots, *spare], [*rows, *kept])
        scheduler.pages.settle()
        if is_first:
            scheduler.pages.share(session)
        if session.finish is not None:
            self.remove(session)

    def write(self, slots: list[int], paths: list[list[int]]) -> None:
        for slot, path in zip(slots, paths, strict=True):
            self.written[slot] = tuple(path)

    @rule(data=st.data(), reusable=st.booleans())
    def cancel(self, data: st.DataObject, reusable: bool) -> None:
        if self.alive:
            self.remove(data.draw(st.sampled_from(self.alive)), reusable=reusable)

    def remove(self, session: Session, *, reusable: bool = True) -> None:
        self.scheduler.remove(session, reusable=reusable)
        self.scheduler.remove(session, reusable=reusable)  # the client may go at the same time
        self.alive.remove(session)
        assert session.phase is Phase.FINISHED

    @invariant()
    def each_slot_holds_what_its_session_says(self) -> None:
        for session in self.scheduler.running:
            slots = self.scheduler.pages.slot_table[session.table_row, : session.kv_len].tolist()
            known = session.committed.tolist()
            assert [self.written[slot] for slot in slots] == [tuple(known[: i + 1]) for i in range(len(slots))]

    @invariant()
    def every_page_has_one_owner(self) -> None:
        scheduler = self.scheduler
        own: list[int] = []
        for session in scheduler.running:
            shared = len(session.prefix.pages) if session.prefix is not None else 0
            own += session.pages[shared:]
            assert len(session.pages) == -(-session.kv_len // scheduler.pages.pool.page_size)
        assert len(set(own)) == len(own)
        cached = scheduler.pages.cache.num_pages if scheduler.pages.cache is not None else 0
        assert len(own) + cached + scheduler.pages.pool.num_free == scheduler.pages.pool.num_pages
        scheduler.pages.pool.check()
        if scheduler.pages.cache is not None:
            scheduler.pages.cache.check()

    @invariant()
    def every_session_is_in_one_place(self) -> None:
        scheduler = self.scheduler
        everywhere = [*scheduler.running, *scheduler.waiting]
        assert sorted(session.session_id for session in everywhere) == sorted(s.session_id for s in self.alive)
        assert len({session.table_row for session in scheduler.running}) == len(scheduler.running)
        assert list(scheduler.sessions()) == everywhere
        ages = [session.admitted for session in scheduler.running]
        assert ages == sorted(ages)
        for session in scheduler.waiting:
            assert (session.table_row, session.kv_len, session.pages, session.prefix) == (-1, 0, [], None)

    def teardown(self) -> None:
        for session in list(self.alive):
            self.remove(session)
        scheduler = self.scheduler
        assert scheduler.pages.num_available == scheduler.pages.pool.num_pages
        if scheduler.pages.cache is not None:
            scheduler.pages.cache.clear()
        assert scheduler.pages.pool.num_free == scheduler.pages.pool.num_pages
        assert sorted(scheduler._rows) == list(range(MAX_RUNNING))


TestScheduler = Machine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_priority_decides_who_is_admitted_next_and_arrival_among_equals() -> None:
    scheduler, factory = make_scheduler(200), make_factory()
    sessions = [make_sessions(factory, [1], priority=priority)[0] for priority in (0, 1, 0, 2)]
    for session in sessions:
        scheduler.submit([session])
    assert [sessions.index(session) for session in scheduler.waiting] == [3, 1, 0, 2]
    assert [sessions.index(session) for session in scheduler.admit()] == [3, 1, 0]


def test_a_preempted_session_comes_before_all_that_never_ran() -> None:
    scheduler, factory = make_scheduler(200, cache=False), make_factory()
    first, second, third = (make_sessions(factory, [1])[0] for _ in range(3))
    scheduler.submit([first, second, third])
    scheduler.admit()
    urgent = make_sessions(factory, [1], priority=9)
    scheduler.submit(urgent)
    scheduler.preempt(third)
    scheduler.preempt(second)
    assert scheduler.waiting == [second, third, *urgent]
    assert scheduler.num_preemptions == 2
    assert scheduler.running == [first]


def test_a_newcomer_is_only_admitted_when_its_tokens_and_a_page_for_each_that_runs_are_there() -> None:
    scheduler, factory = make_scheduler(CONTEXT, cache=False), make_factory()
    (old,) = make_sessions(factory, [0] * 12)
    scheduler.submit([old])
    assert scheduler.admit() == [old]
    (large,) = make_sessions(factory, [1] * 11)
    scheduler.submit([large])
    assert scheduler.admit() == []
    scheduler.remove(large)
    (small,) = make_sessions(factory, [1] * 10)
    scheduler.submit([small])
    assert scheduler.admit() == [small]


def test_of_choices_with_one_prompt_the_first_computes_it_and_the_others_share_it() -> None:
    scheduler, factory = make_scheduler(200), make_factory()
    sessions = make_sessions(factory, BEGINNING, choices=3)
    scheduler.submit(sessions)
    assert scheduler.admit() == sessions[:1]
    first = sessions[0]
    compute(scheduler, first)
    first.commit([2])
    scheduler.pages.share(first)
    assert scheduler.admit() == sessions[1:]
    assert [session.cached_len for session in sessions] == [0, 15, 15]
    assert [session.num_uncomputed for session in sessions] == [1, 1, 1]
    for session in sessions:
        scheduler.remove(session)


def start(scheduler: Scheduler, prompts: list[list[int]], salts: list[str] | None = None) -> list[int]:
    """Submits requests together; the indices of those that are admitted at once."""
    factory, sessions = make_factory(), list[Session]()
    for prompt, salt in zip(prompts, salts or [""] * len(prompts), strict=True):
        sessions += make_sessions(factory, prompt, salt=salt)
    scheduler.submit(sessions)
    return [sessions.index(session) for session in scheduler.admit()]


BEGINNING = [0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 2, 1, 1, 0, 2, 2]


@pytest.mark.parametrize(
    ("second", "waits"),
    [
        pytest.param(BEGINNING, True, id="the same"),
        pytest.param([*BEGINNING, 0, 0, 0], True, id="longer"),
        pytest.param(BEGINNING[:15], True, id="shorter"),
        pytest.param([*BEGINNING[:10], 0, 0, 0, 0, 0, 0], True, id="half of its own"),
        pytest.param([*BEGINNING[:10], 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], False, id="less than half of its own"),
        pytest.param([1, *BEGINNING[1:]], False, id="another first token"),
        pytest.param(BEGINNING[:14], False, id="too little to wait for"),
    ],
)
def test_who_comes_with_a_prompt_that_is_just_being_computed_waits_for_it(second: list[int], waits: bool) -> None:
    assert start(make_scheduler(200), [BEGINNING, second]) == ([0] if waits else [0, 1])


def test_beginnings_are_whole_pages_of_one_salt_behind_what_is_cached() -> None:
    prompts = [[*BEGINNING[:10], *[0, last] * 4] for last in (1, 2)]
    assert start(make_scheduler(200, page_size=3), prompts) == [0]
    assert start(make_scheduler(200, page_size=12), prompts) == [0, 1]
    assert start(make_scheduler(200), [BEGINNING] * 2, ["", "other"]) == [0, 1]
    assert start(make_scheduler(200, cache=False), [BEGINNING] * 2) == [0, 1]
    scheduler, factory = make_scheduler(200), make_factory()
    (known,) = make_sessions(factory, BEGINNING)
    scheduler.submit([known])
    scheduler.admit()
    compute(scheduler, known)
    scheduler.remove(known)
    assert start(scheduler, [[*BEGINNING, 0, 0, 0], [*BEGINNING, 1, 1, 1]]) == [0, 1]


def test_nobody_waits_for_a_prompt_that_is_computed_whatever_is_cached() -> None:
    scheduler, factory = make_scheduler(200), make_factory()
    (scored,) = make_sessions(factory, BEGINNING, prompt_logprobs=True)
    (known,) = make_sessions(factory, BEGINNING)
    scheduler.submit([scored, known])
    assert scheduler.admit() == [scored, known]


def test_who_waits_for_a_beginning_keeps_its_row_and_its_pages_from_later_ones() -> None:
    scheduler, factory = make_scheduler(200), make_factory()
    first, other, waits, late = (
        make_sessions(factory, prompt)[0] for prompt in (BEGINNING, [2, 2, 2], BEGINNING, [1, 1, 1])
    )
    scheduler.submit([first, other, waits, late])
    assert scheduler.admit() == [first, other]
    compute(scheduler, first)
    first.commit([2])
    scheduler.pages.share(first)
    assert scheduler.admit() == [waits]
    scheduler = make_scheduler(2 * CONTEXT)
    scheduler.submit([first := make_sessions(factory, BEGINNING)[0], *make_sessions(factory, [*BEGINNING, 1, 1])])
    scheduler.submit(make_sessions(factory, [2] * 13))
    assert scheduler.admit() == [first]  # 32 pages are left, 18 of them for the second, and one for who runs


def test_while_a_beginning_is_computed_the_queue_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(200)
    assert start(scheduler, [BEGINNING, BEGINNING]) == [0]
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_in_order", pytest.fail)
        assert scheduler.admit() == []
    (first,) = scheduler.running
    compute(scheduler, first)
    first.commit([2])
    scheduler.pages.share(first)
    assert len(scheduler.admit()) == 1


def test_whoever_waits_for_a_beginning_goes_on_when_the_other_is_gone() -> None:
    scheduler, factory = make_scheduler(200), make_factory()
    first, second = (make_sessions(factory, BEGINNING)[0] for _ in range(2))
    scheduler.submit([first, second])
    assert scheduler.admit() == [first]
    scheduler.remove(first, reusable=False)
    assert scheduler.admit() == [second]


def test_the_longest_cached_prefix_goes_first_where_that_is_the_policy() -> None:
    scheduler, factory = make_scheduler(200, lpm=True), make_factory()
    (known,) = make_sessions(factory, [0, 1, 2, 0, 1, 2])
    scheduler.submit([known])
    scheduler.admit()
    compute(scheduler, known)
    scheduler.remove(known)
    (other,) = make_sessions(factory, [2, 2, 2])
    (near,) = make_sessions(factory, [0, 1, 1])
    (nearest,) = make_sessions(factory, [0, 1, 2, 0])
    scheduler.submit([other, near, nearest])
    assert scheduler.admit() == [nearest, near, other]


def test_without_a_free_row_no_prefix_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, factory = make_scheduler(200, lpm=True), make_factory()
    running = [session for token in range(MAX_RUNNING) for session in make_sessions(factory, [token, 1, 2])]
    scheduler.submit(running)
    assert scheduler.admit() == running
    scheduler.submit(make_sessions(factory, [0, 1, 2, 0]))
    monkeypatch.setattr(scheduler.pages.cache, "match", pytest.fail)
    assert scheduler.admit() == []


@pytest.mark.parametrize("lpm", [False, True])
def test_while_pages_are_short_no_prefix_is_looked_up_again(lpm: bool) -> None:
    scheduler, factory = make_scheduler(CONTEXT, lpm=lpm), make_factory()
    old, short = (make_sessions(factory, [token] * 8)[0] for token in (0, 1))
    scheduler.submit([old, short])
    assert scheduler.admit() == [old, short]
    compute(scheduler, old)
    scheduler.submit(make_sessions(factory, [2] * 10))
    assert scheduler.pages.cache is not None
    match, looked_up = scheduler.pages.cache.match, list[int]()
    scheduler.pages.cache.match = lambda tokens, salt=b"": looked_up.append(len(tokens)) or match(tokens, salt)
    assert scheduler.admit() == []
    assert looked_up
    looked_up.clear()
    compute(scheduler, short)
    assert scheduler.admit() == []
    for token in (0, 1, 2):
        old.commit([token])
        compute(scheduler, old)
        assert scheduler.admit() == []
    assert not looked_up
    scheduler.remove(short)
    assert len(scheduler.admit()) == 1


@pytest.mark.parametrize("change", ["urgent", "cancelled", "cached", "preempted"])
def test_who_can_begin_though_no_page_was_freed_does(change: str) -> None:
    scheduler, factory = make_scheduler(CONTEXT), make_factory()
    old, short = (make_sessions(factory, [token] * 8)[0] for token in (0, 1))
    scheduler.submit([old, short])
    assert scheduler.admit() == [old, short]
    for session in (old, short):
        compute(scheduler, session)
        session.commit([1])
    (first,), (second,), (urgent,) = (
        make_sessions(factory, prompt, priority=priority)
        for prompt, priority in (([0] * 8 + [2] * 2, 0), ([2], 0), ([2], 1))
    )
    scheduler.submit([first, second])
    assert scheduler.admit() == []
    if change == "urgent":
        scheduler.submit([urgent])
        assert scheduler.admit() == [urgent]
    elif change == "cancelled":
        scheduler.remove(first)
        assert scheduler.admit() == [second]
    elif change == "cached":
        scheduler.pages.share(old)
        assert scheduler.admit()[0] is first
    else:
        scheduler.preempt(short)
        assert scheduler.admit()[0] is short


def test_who_was_overtaken_often_enough_goes_before_longer_prefixes() -> None:
    scheduler, factory = make_scheduler(200, lpm=True), make_factory()

    def ran(session: Session) -> None:
        compute(scheduler, session)
        scheduler.remove(session)

    def near() -> Session:
        (session,) = make_sessions(factory, [0, 1, 2, 0])
        scheduler.submit([session])
        return session

    near()
    ran(*scheduler.admit())
    running = [near() for _ in range(MAX_RUNNING)]
    assert scheduler.admit() == running
    (other,) = make_sessions(factory, [2, 2, 2])
    scheduler.submit([other])
    overtaken = 0
    while True:
        latest = near()
        ran(running.pop(0))
        (admitted,) = scheduler.admit()
        running.append(admitted)
        if admitted is other:
            break
        assert admitted is latest
        overtaken += 1
    assert overtaken == _MOST_OVERTAKING


def test_who_was_overtaken_often_enough_goes_next_however_many_begin_at_once() -> None:
    pool, factory = PagePool(2000, 1), make_factory()
    scheduler = Scheduler(
        SessionPages(pool, np.full((90, CONTEXT), -1, np.int32), cache=RadixCache(pool)),
        max_running=90, max_queued=100, chunk=CHUNK, longest_prefix_first=True,
    )  # fmt: skip
    (known,) = make_sessions(factory, [0, 1, 2, 0])
    scheduler.submit([known])
    scheduler.admit()
    compute(scheduler, known)
    scheduler.remove(known)
    (other,) = make_sessions(factory, [2, 2, 2])
    near = [session for _ in range(99) for session in make_sessions(factory, [0, 1, 2, 0])]
    scheduler.submit([other])
    scheduler.submit(near)
    assert scheduler.admit() == near[:_MOST_OVERTAKING]
    assert scheduler.admit()[0] is other


def test_a_resumed_answers_tokens_are_no_prompt_that_was_cached() -> None:
    scheduler, factory = make_scheduler(200), make_factory()
    (first,) = make_sessions(factory, [0, 1, 2, 0, 1, 2])
    scheduler.submit([first])
    scheduler.admit()
    compute(scheduler, first)
    scheduler.remove(first)
    (resumed,) = factory.build(
        verify_pb2.GenerateRequest(
            prompt_tokens=pack_ids([0, 1]), resumed_tokens=pack_ids([2, 0, 1]),
            sampling=SamplingParams(max_tokens=9).to_proto(),
        )
    )  # fmt: skip
    scheduler.submit([resumed])
    scheduler.admit()
    assert (resumed.kv_len, resumed.cached_len) == (4, 2)
