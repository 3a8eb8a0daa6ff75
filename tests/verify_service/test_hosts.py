"""How often drafters of one host may enlist."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from outrider.errors import ResourceExhausted
from verify_service import hosts
from verify_service.hosts import Hosts


@dataclass
class Clock:
    now_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s.append(seconds)

    def of(self) -> Hosts:
        return Hosts(self, self.sleep)


async def waited(door: Hosts, clock: Clock, peer: str) -> int:
    """Whole seconds until a drafter of this host may enlist."""
    began_s = clock.now_s
    while True:
        try:
            await door.admit(peer)
        except ResourceExhausted as refused:
            clock.now_s += refused.retry_after_s or 0.0
        else:
            return round(clock.now_s - began_s)


@pytest.mark.asyncio
async def test_each_expulsion_doubles_the_wait_up_to_a_minute_and_a_quiet_minute_forgets_it() -> None:
    clock = Clock()
    door, found = clock.of(), list[int]()
    for port in range(8):
        door.expelled(f"ipv4:10.0.0.1:{port}")
        found.append(await waited(door, clock, "ipv4:10.0.0.1:999"))
    assert found == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now_s += 60.0
    door.expelled("ipv4:10.0.0.1:1")
    assert await waited(door, clock, "ipv4:10.0.0.1:2") == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.2:1"),
        ("ipv6:%5B::1%5D:1", "ipv6:%5B::1%5D:2", "ipv6:%5B::2%5D:1"),
        ("unix:", "unix:%00", "ipv4:10.0.0.1:1"),
        ("in-memory", "in-memory", "unix:"),
    ],
)
async def test_other_hosts_do_not_wait(one: str, same: str, other: str) -> None:
    clock = Clock()
    door = clock.of()
    for _ in range(2):
        door.expelled(one)
    await door.admit(other)
    assert clock.slept_s == []
    with pytest.raises(ResourceExhausted, match=r"was thrown out; its next one may enlist in 1\.0 s") as refused:
        await door.admit(same)
    assert refused.value.retry_after_s == pytest.approx(1.0, abs=0.01)
    assert clock.slept_s == [pytest.approx(1.0, abs=0.01)]  # who dials again at once is slowed down


@pytest.mark.asyncio
async def test_many_come_at_once_and_then_one_by_one() -> None:
    clock = Clock()
    door = clock.of()
    for _ in range(64):
        await door.admit("unix:")
    assert clock.slept_s == []
    for _ in range(8):
        await door.admit("unix:")
    assert clock.now_s == pytest.approx(2.0, abs=0.01)
    clock.now_s += 16.0
    for _ in range(64):
        await door.admit("unix:")
    assert clock.now_s == pytest.approx(18.0, abs=0.01)


@pytest.mark.asyncio
async def test_those_who_come_together_too_soon_are_let_in_one_by_one_for_a_second() -> None:
    clock, sleeping = Clock(), list[tuple[float, asyncio.Event]]()

    async def sleep(seconds: float) -> None:
        sleeping.append((clock.now_s + seconds, asyncio.Event()))
        await sleeping[-1][1].wait()

    door = Hosts(clock, sleep)
    tasks = [asyncio.create_task(door.admit("unix:")) for _ in range(74)]
    await asyncio.sleep(0)
    while sleeping:
        clock.now_s = min(at_s for at_s, _ in sleeping)
        for due in [one for one in sleeping if one[0] <= clock.now_s]:
            sleeping.remove(due)
            due[1].set()
        for _ in range(3):
            await asyncio.sleep(0)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(one is None for one in found) == 68
    assert all(one is None or isinstance(one, ResourceExhausted) for one in found)
    assert clock.now_s == pytest.approx(1.0, abs=0.02)


@pytest.mark.asyncio
async def test_a_timer_that_ends_a_moment_early_refuses_nobody() -> None:
    clock = Clock()

    async def sleep(seconds: float) -> None:
        await clock.sleep(seconds - 0.001)

    door = Hosts(clock, sleep)
    door.expelled("ipv4:10.0.0.1:1")
    await door.admit("ipv4:10.0.0.1:2")


@pytest.mark.asyncio
async def test_no_more_are_kept_waiting_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_MAX_HELD", 1)
    begun, never = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        begun.set()
        await never.wait()

    door = Hosts(sleep=sleep)
    door.expelled("unix:")
    held = asyncio.create_task(door.admit("unix:"))
    await begun.wait()
    with pytest.raises(ResourceExhausted):
        await door.admit("unix:")
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert door._num_held == 0


@pytest.mark.asyncio
async def test_of_many_hosts_the_first_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_MAX_HOSTS", 2)
    clock = Clock()
    door = clock.of()
    for number in range(3):
        door.expelled(f"ipv4:10.0.0.{number}:1")
    await door.admit("ipv4:10.0.0.2:1")
    assert clock.slept_s == [pytest.approx(1.0, abs=0.01)]
    await door.admit("ipv4:10.0.0.0:1")
    assert clock.slept_s == [pytest.approx(1.0, abs=0.01)]
