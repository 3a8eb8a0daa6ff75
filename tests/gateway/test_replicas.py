"""Verify services named in a file, which is read again and again."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from gateway.probing import ProbeTimes
from gateway.replica import Replica
from gateway.replicas import ReplicaSet
from outrider.errors import ResourceExhausted, StartupError, Unavailable
from outrider.rpc import create_channel
from outrider.v1 import verify_pb2
from tests.gateway.fakes import FAST_PROBE, FakeVerify, serving


@pytest.mark.asyncio
async def test_addresses_come_from_a_file(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What is added serves, what is taken out is gone, and a file that is not there, or has none, changes nothing."""
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
            with capture_logs() as logs:
                for spoil in (listed.unlink, partial(listed.write_text, "\n")):
                    spoil()
                    await replicas.look_up()  # in vain
                    assert [replica.address for replica in replicas.serving] == [first, second]
            told = [log["error"] for log in logs if log["event"] == "cannot read verify addresses"]
            assert len(told) == 2  # each reason once, however often it was read
            assert told[1] == f"{listed} has no address"
            listed.write_text(second)
            await until_serving(replicas, [second])
        finally:
            await replicas.close()


@pytest.mark.asyncio
async def test_a_process_with_two_addresses_is_shown_once(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """localhost has two addresses for a process that listens on all."""
    verify = FakeVerify(folder, tokenizer.get_vocab_size(), boot_id="both")
    other = FakeVerify(folder, tokenizer.get_vocab_size(), boot_id="other")
    async with (
        serving(verify, f"unix:{tmp_path}/0") as first, serving(verify, f"unix:{tmp_path}/1") as second,
        serving(other, f"unix:{tmp_path}/2") as third,
    ):  # fmt: skip
        nobody = f"unix:{tmp_path}/nobody"
        replicas = ReplicaSet([first, second, third, nobody], FAST_PROBE)
        await replicas.start()
        try:
            await until_serving(replicas, [first, second, third])
            assert replicas.states == [(first, True), (third, True), (nobody, False)]
            assert [address for address, _ in replicas.infos] == [first, third]
            replicas.serving[0].serving = False
            assert replicas.states == [(second, True), (third, True), (nobody, False)]
            assert [address for address, _ in replicas.infos] == [second, third]
        finally:
            await replicas.close()


@pytest.mark.asyncio
async def test_nobody_waits_for_a_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS that does not answer takes ten seconds, in which /health is asked."""
    asked = asyncio.Event()

    async def never(*args: object, **kwargs: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    replicas = ReplicaSet(["verify.example:1"], FAST_PROBE)
    async with asyncio.timeout(30):
        await replicas.start()
        await asked.wait()
        assert replicas.states == []
        await replicas.close()


@pytest.mark.asyncio
async def test_certificates_that_cannot_be_read_for_a_while_end_no_looking(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    fake = FakeVerify(folder, tokenizer.get_vocab_size())
    listed, refusals = tmp_path / "addresses", iter([OSError("gone"), StartupError("half written")])

    def dial(address: str) -> grpc.aio.Channel:
        if (refusal := next(refusals, None)) is not None:
            raise refusal
        return create_channel(address)

    async with serving(fake, f"unix:{tmp_path}/0") as address:
        listed.write_text("")
        replicas = ReplicaSet((f"file:{listed}",), FAST_PROBE, dial)
        await replicas.start()
        try:
            listed.write_text(address)
            await until_serving(replicas, [address])
            assert next(refusals, None) is None
        finally:
            await replicas.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("fault", "times"), [("is_late", 3), ("is_broken", 6)])
async def test_one_that_does_not_answer_is_in_doubt_before_it_is_down(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, fault: str, times: int
) -> None:
    fakes = [FakeVerify(folder, tokenizer.get_vocab_size(), boot_id=f"boot{index}") for index in range(2)]
    async with serving(fakes[0], f"unix:{tmp_path}/0") as first, serving(fakes[1], f"unix:{tmp_path}/1") as second:
        replicas = ReplicaSet([first, second], ProbeTimes(interval_s=1000.0, timeout_s=0.5, max_retry_s=1000.0))
        await replicas.start()
        try:
            await until_serving(replicas, [first, second])
            one, two = replicas.serving
            for _ in range(2):
                setattr(fakes[0], fault, True)
                await replicas.prober.probe(one)
                assert replicas.pick() is two
                replicas.broke(two)
                assert replicas.pick() is one  # rather than none
                with pytest.raises(Unavailable):
                    replicas.pick(sure=True)
                setattr(fakes[0], fault, False)
                await until_well(replicas, one)
                assert replicas.pick(sure=True) is one
                await until_well(replicas, two)
            setattr(fakes[0], fault, True)
            probes = 0
            while one.serving:
                await replicas.prober.probe(one)
                probes += 1
            assert probes == times
            assert replicas.serving == [two]
        finally:
            await replicas.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("asks", ["ask_all", "flush_caches"])
async def test_one_that_leaves_while_all_are_asked_is_left_out(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, asks: str
) -> None:
    """Its channel is closed, which grpc.aio tells as if who asks were cancelled."""
    fakes = [FakeVerify(folder, tokenizer.get_vocab_size(), boot_id=f"boot{index}") for index in range(2)]
    listed = tmp_path / "addresses"
    async with serving(fakes[0], f"unix:{tmp_path}/0") as first, serving(fakes[1], f"unix:{tmp_path}/1") as second:
        listed.write_text(f"{first}\n{second}")
        replicas = ReplicaSet((f"file:{listed}",), ProbeTimes(interval_s=1000.0, timeout_s=1000.0))
        await replicas.start()
        try:
            await until_serving(replicas, [first, second])
            fakes[0].is_late = True
            asked = asyncio.create_task(getattr(replicas, asks)())
            await fakes[0].holding.wait()
            listed.write_text(second)
            await replicas.look_up()
            found = await asked
            assert found == 7 if asks == "flush_caches" else [info.boot_id for info in found] == ["boot1"]
        finally:
            await replicas.close()


@pytest.mark.asyncio
async def test_one_in_doubt_takes_what_no_other_has_the_context_or_the_room_for(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lengths = {"long": 2048, "short": 512}
    fakes = [
        FakeVerify(folder, tokenizer.get_vocab_size(), boot_id=name, context_length=length, max_running=1, max_queued=0)
        for name, length in lengths.items()
    ]
    async with serving(fakes[0], f"unix:{tmp_path}/0") as first, serving(fakes[1], f"unix:{tmp_path}/1") as second:
        replicas = ReplicaSet([first, second], ProbeTimes(interval_s=1000.0, first_retry_s=1000.0))
        await replicas.start()
        try:
            await until_serving(replicas, [first, second])
            long, short = replicas.serving
            fakes[0].is_late = True  # so that it stays in doubt
            replicas.broke(long)
            assert replicas.pick(num_positions=100) is short
            assert replicas.pick(num_positions=1000) is long
            with pytest.raises(Unavailable):
                replicas.pick(num_positions=1000, sure=True)
            short.outstanding = 1
            assert replicas.pick(num_positions=100) is long
            with pytest.raises(ResourceExhausted):
                replicas.pick(num_positions=100, sure=True)
        finally:
            await replicas.close()


@pytest.mark.asyncio
async def test_calls_go_on_when_their_address_is_gone(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A name may be taken back while its service finishes what it has."""
    fake = FakeVerify(folder, tokenizer.get_vocab_size(), hold_after=1)
    listed = tmp_path / "addresses"
    async with serving(fake, f"unix:{tmp_path}/0") as address:
        listed.write_text(address)
        replicas = ReplicaSet((f"file:{listed}",), FAST_PROBE)
        await replicas.start()
        try:
            await until_serving(replicas, [address])
            request = verify_pb2.GenerateRequest(prompt_tokens=b"\5\0\0\0")
            (replica,) = replicas.serving
            call = replica.begin(request, 60.0)
            tokens = [token for response in await call.take() for token in response.tokens]
            listed.write_text(f"unix:{tmp_path}/nobody")
            await until_serving(replicas, [])
            fake.release.set()
            while responses := await call.take():
                tokens += [token for response in responses for token in response.tokens]
            replica.end(call)
            assert tokens == [5, 6, 7]
        finally:
            await replicas.close()


@pytest.mark.asyncio
async def test_an_end_that_comes_while_the_watching_ends_waits_for_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    async def close(grace: float | None) -> None:
        asked.append(grace)

    async with create_channel(f"unix:{tmp_path}/nobody") as channel:
        with monkeypatch.context() as patch:
            patch.setattr(channel, "close", close)
            replica = Replica.at("nobody", channel)
            replica.watch = asyncio.create_task(asyncio.sleep(3600))
            closing = asyncio.create_task(replica.close(3600))
            await asyncio.sleep(0)  # it waits for the watching
            closing.cancel()
            await asyncio.wait([closing])
    assert asked == [None]


async def until_well(replicas: ReplicaSet, replica: Replica) -> None:
    """Asks a replica until it answers: on a machine that stalls an answer may come too late."""
    while not await replicas.prober.probe(replica):
        pass


async def until_serving(replicas: ReplicaSet, addresses: list[str]) -> None:
    """Returns when these serve and no others."""
    while [replica.address for replica in replicas.serving] != addresses:
        await replicas.wait_for_change(10)
