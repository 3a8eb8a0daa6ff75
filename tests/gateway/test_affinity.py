"""Prompts go where their beginning is, as long as that replica is not much busier than the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.affinity import BLOCK_TOKENS, PrefixMap, block_keys
from outrider.v1 import verify_pb2
from outrider.wire import pack_ids
from tests.gateway.test_backend import ask, backend_of, fake, outputs


@given(st.lists(st.integers(0, 3), max_size=300), st.lists(st.integers(0, 3), max_size=300))
def test_keys_are_shared_as_far_as_whole_blocks_are(first: list[int], second: list[int]) -> None:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    keys, others = block_keys(pack_ids(first)), block_keys(pack_ids(second))
    assert len(keys) == max(0, len(first) - 1) // BLOCK_TOKENS
    shared = min(same // BLOCK_TOKENS, len(keys), len(others))
    assert keys[:shared] == others[:shared]
    assert not set(keys[shared:]) & set(others[shared:])


def test_prompts_of_other_salts_share_no_keys() -> None:
    prompt = bytes(4 * 300)
    assert block_keys(prompt, "mine") == block_keys(prompt, "mine")
    assert not {*block_keys(prompt, "mine"), *block_keys(prompt, "")} & set(block_keys(prompt, "yours"))


def test_a_long_prompt_has_a_bounded_number_of_keys() -> None:
    assert len(block_keys(bytes(4 * 10**6))) == 64


def test_the_map_is_bounded_and_forgets_what_was_used_least_recently() -> None:
    prefixes = PrefixMap(max_entries=2)
    prefixes.remember([b"a", b"b"], "one")
    prefixes.remember([b"a"], "two")
    prefixes.remember([b"c"], "three")
    assert prefixes.find([b"a", b"b"], lambda address: True) == "two"
    assert prefixes.find([b"c", b"a"], lambda address: address != "two") == "three"
    assert prefixes.find([b"b"], lambda address: True) is None


def prompt(word: int, length: int = 3 * BLOCK_TOKENS) -> verify_pb2.GenerateRequest:
    """A request for a prompt of its own."""
    request = ask()
    request.prompt_tokens = pack_ids([word] * length)
    return request


@pytest.mark.asyncio
async def test_a_conversation_stays_with_its_replica(tmp_path: Path) -> None:
    fakes = [fake(tmp_path), fake(tmp_path)]
    async with backend_of(fakes, tmp_path) as backend:
        for word in range(6):
            for turn in range(3):
                await outputs(backend, prompt(word, (3 + turn) * BLOCK_TOKENS))
    for verify in fakes:
        by_word: dict[bytes, int] = {}
        for request in verify.requests:
            by_word[request.prompt_tokens[:4]] = by_word.get(request.prompt_tokens[:4], 0) + 1
        assert set(by_word.values()) <= {3}


@pytest.mark.asyncio
async def test_a_prompts_keys_are_made_once_whatever_becomes_of_its_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bytes] = []

    def counting(prompt_tokens: bytes, cache_salt: str) -> list[bytes]:
        made.append(prompt_tokens)
        return block_keys(prompt_tokens, cache_salt)

    monkeypatch.setattr("gateway.affinity.block_keys", counting)
    fakes = [fake(tmp_path), fake(tmp_path)]
    async with backend_of(fakes, tmp_path) as backend:
        asked = prompt(1)
        asked.num_choices = 3
        for times, apart in enumerate((True, False), 1):
            for verify in fakes:
                verify.break_after = [1]
            await outputs(backend, asked, apart=apart)
            assert made == [asked.prompt_tokens] * times
    assert sum(len(verify.requests) for verify in fakes) > 4


@pytest.mark.asyncio
async def test_it_leaves_a_replica_that_is_much_busier(tmp_path: Path) -> None:
    fakes = [fake(tmp_path), fake(tmp_path)]
    async with backend_of(fakes, tmp_path) as backend:
        await outputs(backend, prompt(1))
        (home,) = [verify for verify in fakes if verify.requests]
        busy = backend.replicas.serving[fakes.index(home)]
        busy.outstanding += 4
        await outputs(backend, prompt(1))
        assert len(home.requests) == 2
        busy.outstanding += 1
        await outputs(backend, prompt(1))
        assert len(home.requests) == 2
        busy.outstanding -= 5
        await outputs(backend, prompt(1))
        assert len(home.requests) == 2  # it lives elsewhere now


@pytest.mark.asyncio
async def test_what_other_gateways_send_counts(tmp_path: Path) -> None:
    fakes = [fake(tmp_path, running=3), fake(tmp_path)]
    async with backend_of(fakes, tmp_path) as backend:
        for _ in range(3):
            await outputs(backend, ask())
    assert [len(verify.requests) for verify in fakes] == [0, 3]
