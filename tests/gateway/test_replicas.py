"""Verify services named in a file, which is read again and again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway.replicas import ReplicaSet
from tests.gateway.fakes import FAST_PROBE, FakeVerify, serving


@pytest.mark.asyncio
async def test_addresses_come_from_a_file(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What is added serves, what is taken out is gone, and a file that is not there changes nothing."""
    fakes = [FakeVerify(folder, tokenizer.get_vocab_size(), boot_id=f"boot{index}") for index in range(2)]
    listed = tmp_path / "addresses"
    async with serving(fakes[0], f"unix:{tmp_path}/0") as first, serving(fakes[1], f"unix:{tmp_path}/1") as second:
        listed.write_text(f"{first}\n\n")
        replicas = ReplicaSet((f"file:{listed}",), FAST_PROBE)
        await replicas.start()
        try:
            await until_serving(replicas, [first])
            listed.write_text(f"{first}\n{second}\n")
            await until_serving(replicas, [first, second])
            listed.unlink()
            await replicas.wait_for_change(0.2)  # read meanwhile, in vain
            assert [replica.address for replica in replicas.serving] == [first, second]
            listed.write_text(second)
            await until_serving(replicas, [second])
        finally:
            await replicas.close()


async def until_serving(replicas: ReplicaSet, addresses: list[str]) -> None:
    """Returns when these serve and no others."""
    while [replica.address for replica in replicas.serving] != addresses:
        await replicas.wait_for_change(10)
