"""What addresses stand for, looked up again and again."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from outrider.args.links import check_address
from outrider.resolving import Resolver, endpoints_of

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("address", "endpoints"),
    [
        ("unix:/run/verify", ["unix:/run/verify"]),
        ("unix-abstract:verify", ["unix-abstract:verify"]),
        ("10.0.0.1:50051", ["10.0.0.1:50051"]),
        ("[::1]:50051", ["[::1]:50051"]),
    ],
)
async def test_addresses_that_stand_for_themselves(address: str, endpoints: list[str]) -> None:
    check_address("--verify-address", address)
    assert await endpoints_of(address) == endpoints


async def test_a_name_is_resolved() -> None:
    assert "127.0.0.1:50051" in await endpoints_of("localhost:50051")


@pytest.mark.parametrize("reason", [OSError("no such name"), UnicodeError("label too long")])
async def test_an_address_that_is_not_found_stands_for_what_it_stood_for_and_is_told_of_once(reason: Exception) -> None:
    found: dict[str, list[str]] = {"a:1": ["1", "2"], "b:1": ["3"]}

    async def look_up(address: str) -> list[str]:
        if address not in found:
            raise reason
        return found[address]

    resolver = Resolver(look_up)
    assert await resolver.resolve(["a:1", "b:1", "c:1"]) == ["1", "2", "3"]
    del found["b:1"]
    found["a:1"] = ["2", "4"]
    with capture_logs() as logs:
        for _ in range(3):
            assert await resolver.resolve(["a:1", "b:1"]) == ["2", "4", "3"]
        found["b:1"] = ["5"]
        assert await resolver.resolve(["a:1", "b:1"]) == ["2", "4", "5"]
    assert [(log["address"], log["error"]) for log in logs] == [("b:1", str(reason))]
