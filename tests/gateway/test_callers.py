"""Keys, and the rates of their holders, by a clock that the test turns."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from structlog.testing import capture_logs

from gateway.callers import Bucket, Caller, Callers, KeyEntry, callers_of
from gateway.errors import HttpError
from outrider.args import GatewayArgs
from outrider.errors import ResourceExhausted, StartupError
from tests.files import replace


class Clock:
    """A clock of seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> Headers:
    """The header of a key."""
    return Headers({"authorization": f"Bearer {key}"})


def test_a_bucket_fills_evenly_and_holds_a_minutes_worth() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert (bucket.level, bucket.wait_s(1)) == (0, 1.0)
    clock.now += 1.5
    assert bucket.level == 1.5
    bucket.take(11)
    assert bucket.wait_s(0) == 9.5
    clock.now += 10**6
    assert bucket.level == 60


def test_requests_over_the_rate_are_told_when_to_come_again() -> None:
    clock = Clock()
    caller = Caller("a", requests=Bucket(2, clock))
    caller.admit()
    caller.admit()
    with pytest.raises(ResourceExhausted, match="2 requests a minute") as refused:
        caller.admit()
    assert refused.value.retry_after_s == 30.0
    assert dict(caller.headers())[b"x-ratelimit-remaining-requests"] == b"0"
    clock.now += 30
    caller.admit()


def test_tokens_are_taken_when_they_are_known() -> None:
    clock = Clock()
    caller = Caller("a", tokens=Bucket(600, clock))
    caller.admit()
    caller.use(700)
    with pytest.raises(ResourceExhausted, match="600 tokens a minute") as refused:
        caller.admit()
    assert refused.value.retry_after_s == pytest.approx(10.0)
    clock.now += 10.1
    caller.admit()


def test_each_key_has_a_rate_of_its_own() -> None:
    clock = Clock()
    callers = Callers([KeyEntry("one", "a"), KeyEntry("two", "b", requests_per_minute=1)], 2, None, clock)
    a, b = callers.find(bearer("one")), callers.find(bearer("two"))
    assert callers.find(bearer("one")) is a
    b.admit()
    with pytest.raises(ResourceExhausted):
        b.admit()
    a.admit()
    a.admit()


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer one two"])
def test_who_has_no_key_is_refused(header: str) -> None:
    with pytest.raises(HttpError) as refused:
        Callers([KeyEntry("one", "a")]).find(Headers({"authorization": header}))
    assert (refused.value.http_status, refused.value.code) == (401, "invalid_api_key")


def test_without_keys_everyone_is_one_caller() -> None:
    callers = Callers([])
    assert callers.find(Headers()) is callers.find(bearer("any"))


def test_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nsk-1 name=alice requests_per_minute=5\n  sk-2   tokens_per_minute=7\nsk-3\n")
    callers = callers_of(GatewayArgs(api_key=("sk-0",), api_key_file=str(path), tokens_per_minute=9))
    assert [entry.key for entry in callers.all_entries()] == ["sk-0", "sk-1", "sk-2", "sk-3"]
    alice, other = callers.find(bearer("sk-1")), callers.find(bearer("sk-2"))
    assert alice.name == "alice"
    assert (alice.requests and alice.requests.per_minute, alice.tokens and alice.tokens.per_minute) == (5, 9)
    assert (other.requests, other.tokens and other.tokens.per_minute) == (None, 7)
    assert "sk-" not in "".join(entry.name for entry in callers.all_entries())


@pytest.mark.parametrize("line", ["", "# none", "sk rate=5", "sk requests_per_minute=0", "sk requests_per_minute=x"])
def test_a_key_file_that_is_wrong(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(StartupError, match="keys") as refused:
        callers_of(GatewayArgs(api_key_file=str(path)))
    assert "sk" not in refused.value.message.replace(str(path), "")


def test_keys_change_without_a_restart(tmp_path: Path) -> None:
    """A new key is let in, an old one is not; who stays keeps what was used; a file that is wrong changes nothing."""
    path = tmp_path / "keys"
    write = partial(replace, path)
    write("stays requests_per_minute=5\ngoes\n")
    callers = callers_of(GatewayArgs(api_key=("flag",), api_key_file=str(path)))
    stays = callers.find(bearer("stays"))
    assert callers.find(bearer("goes"))
    write("comes\nstays requests_per_minute=5\n")
    assert callers.find(bearer("comes"))
    assert callers.find(bearer("flag"))
    assert callers.find(bearer("stays")) is stays
    with pytest.raises(HttpError):
        callers.find(bearer("goes"))
    for wrong in ("comes colour=red\n", "# none\n"):
        write(wrong)
        with capture_logs() as logs:
            assert callers.find(bearer("stays")) is stays
            assert callers.find(bearer("comes"))
        assert ["the keys before stay" in log["event"] for log in logs] == [True]
    path.rename(tmp_path / "keys.old")
    assert callers.find(bearer("stays")) is stays
    write("comes\nstays requests_per_minute=6\n")
    assert callers.find(bearer("stays")) is not stays  # another limit


def test_a_pipe_in_a_key_files_place_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n")
    callers = callers_of(GatewayArgs(api_key_file=str(path)))
    assert callers.find(bearer("first"))
    path.unlink()
    os.mkfifo(path)
    with capture_logs() as logs:
        assert callers.find(bearer("first"))
    assert "It is no regular file" in logs[0]["reason"]
    with pytest.raises(StartupError, match=r"cannot read --api-key-file: .*It is no regular file"):
        callers_of(GatewayArgs(api_key_file=str(path)))


def test_a_key_file_that_can_be_read_again(tmp_path: Path) -> None:
    """The file's time and place are those that it had when it could not be read, as after a chmod."""
    path = tmp_path / "keys"
    path.write_text("before\n")
    callers = callers_of(GatewayArgs(api_key_file=str(path)))
    path.write_bytes(b"\xff")
    os.utime(path, ns=(1, 1))
    assert callers.find(bearer("before"))
    path.write_text("after\n")
    os.utime(path, ns=(1, 1))
    assert callers.find(bearer("after"))


def test_keys_that_are_empty_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--api-key"):
        GatewayArgs(api_key=("",))
    with pytest.raises(StartupError, match="--api-key-file"):
        callers_of(GatewayArgs(api_key_file=str(tmp_path / "none")))
    (tmp_path / "keys").write_text("fine\nschl\u00fcssel\n")
    with pytest.raises(StartupError, match=r"keys, line 2 must be printable ASCII"):
        callers_of(GatewayArgs(api_key_file=str(tmp_path / "keys")))
