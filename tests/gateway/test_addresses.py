"""What a gateway's addresses stand for: themselves, names in DNS, and files of both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.addresses import Addresses

pytestmark = pytest.mark.asyncio


async def test_a_name_that_is_not_known_hides_none_of_the_others() -> None:
    addresses = Addresses(["unknown.invalid:50051", "127.0.0.1:50052", "also-unknown.invalid:50051", "127.0.0.1:50053"])
    assert await addresses.resolve() == {"127.0.0.1:50052", "127.0.0.1:50053"}


async def test_a_file_without_addresses_hides_none_of_the_others_and_keeps_only_its_own(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("\n# 127.0.0.1:50051\n127.0.0.1:50052\n")
    two.write_text("127.0.0.1:50053\nunix:/run/verify\n")
    addresses = Addresses([f"file:{one}", f"file:{two}"])
    assert await addresses.resolve() == {"127.0.0.1:50052", "127.0.0.1:50053", "unix:/run/verify"}
    one.write_text("# 127.0.0.1:50052\n")
    two.write_text("127.0.0.1:50054\n")
    assert await addresses.resolve() == {"127.0.0.1:50052", "127.0.0.1:50054"}


async def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    listed.write_text("127.0.0.1:50051\n")
    addresses = Addresses([f"file:{listed}"])
    before = await addresses.resolve()
    listed.unlink()
    os.mkfifo(listed)
    assert await addresses.resolve() == before == {"127.0.0.1:50051"}


async def test_each_set_of_addresses_says_for_itself_what_it_cannot_find(tmp_path: Path) -> None:
    with capture_logs() as logs:
        for addresses in (Addresses([f"file:{tmp_path}/none"]), Addresses([f"file:{tmp_path}/none"])):
            assert await addresses.resolve() == await addresses.resolve() == set()
    assert [log["event"] for log in logs] == ["cannot read verify addresses"] * 2


@pytest.mark.parametrize(
    ("given", "may_change"),
    [(["127.0.0.1:1", "[::1]:1", "unix:/a", "unix-abstract:a"], False), (["file:a"], True), (["[::1]:1", "a:1"], True)],
)
async def test_names_and_files_may_change(given: list[str], may_change: bool) -> None:
    assert Addresses(given).may_change == may_change


@pytest.mark.parametrize(
    "wrong", ["garbage line", "unknown.invalid:50051", "127.0.0.1", "127.0.0.1:port", "a:" + "1" * 5000]
)
async def test_a_wrong_line_hides_none_of_the_others_and_alone_changes_nothing(tmp_path: Path, wrong: str) -> None:
    listed = tmp_path / "listed"
    listed.write_text("127.0.0.1:50051\n127.0.0.1:50052\n")
    addresses = Addresses([f"file:{listed}", "127.0.0.1:50060"])
    before = await addresses.resolve()
    with capture_logs() as logs:
        listed.write_text(f"127.0.0.1:50051\n{wrong}\n127.0.0.1:50053\n")
        assert await addresses.resolve() == {"127.0.0.1:50051", "127.0.0.1:50053", "127.0.0.1:50060"}
    assert [(log["event"], log["address"]) for log in logs] == [(f"cannot use a line of {listed}", wrong)]
    listed.write_text("127.0.0.1:50051\n127.0.0.1:50052\n")
    assert await addresses.resolve() == before
    with capture_logs() as logs:
        listed.write_text(f"{wrong}\n")
        for _ in range(2):
            assert await addresses.resolve() == before
    assert [(log["event"], log["address"]) for log in logs] == [("cannot read verify addresses", f"file:{listed}")]
