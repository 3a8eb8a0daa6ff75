"""How long a host waits whose drafters were thrown out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest

from outrider.errors import ResourceExhausted
from verify_service import expelled
from verify_service.expelled import Expelled


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def waits(hosts: Expelled, clock: Clock, peer: str) -> int:
    """Whole seconds until it may enlist."""
    began_s = clock.now_s
    while True:
        with contextlib.suppress(ResourceExhausted):
            hosts.check(peer)
            return round(clock.now_s - began_s)
        clock.now_s += 1.0


def test_each_time_is_twice_as_long_up_to_a_minute_and_a_quiet_minute_forgets_it() -> None:
    clock = Clock()
    hosts = Expelled(clock)
    found: list[int] = []
    for port in range(8):
        hosts.note(f"ipv4:10.0.0.1:{port}")
        found.append(waits(hosts, clock, "ipv4:10.0.0.1:999"))
    assert found == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now_s += 60.0
    hosts.note("ipv4:10.0.0.1:1")
    assert waits(hosts, clock, "ipv4:10.0.0.1:2") == 1


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.2:1"),
        ("ipv6:%5B::1%5D:1", "ipv6:%5B::1%5D:2", "ipv6:%5B::2%5D:1"),
        ("unix:", "unix:%00", "ipv4:10.0.0.1:1"),
    ],
)
def test_other_hosts_do_not_wait(one: str, same: str, other: str) -> None:
    clock = Clock()
    hosts = Expelled(clock)
    hosts.note(one)
    hosts.check(other)
    with pytest.raises(ResourceExhausted, match=r"may enlist in 1\.0 s") as refused:
        hosts.check(same)
    assert refused.value.retry_after_s == 1.0


def test_of_many_hosts_the_first_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expelled, "_MAX_HOSTS", 2)
    hosts = Expelled(Clock())
    for number in range(3):
        hosts.note(f"ipv4:10.0.0.{number}:1")
    hosts.check("ipv4:10.0.0.0:1")
    for number in (1, 2):
        with pytest.raises(ResourceExhausted):
            hosts.check(f"ipv4:10.0.0.{number}:1")
