"""One release beside another: a peer that knows fewer fields than we do, and one that knows more.

Messages of real processes pass through a relay, which leaves in them what the other release would. It makes no
difference which side is the old one: fields that one side does not know are not there for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from google.protobuf.descriptor import FieldDescriptor

from outrider.rpc import create_channel
from outrider.v1 import common_pb2, draft_pb2, verify_pb2, verify_pb2_grpc
from tests.deploy.relay import Change, Relay, first_files, newer, older, relaying
from tests.e2e.small_model import write_small_model
from tests.e2e.stack import Process
from tests.polling import until_async

CHANGES: dict[str, Change] = {"the first release": older(), "a later release": newer()}
SMALL = ("--dtype=float32", "--device=cpu", "--threads=1", "--max-total-tokens=4096", "--disable-speculation-brake")
BODY = {
    "messages": [{"role": "user", "content": "Hello there"}],
    "temperature": 0,
    "max_tokens": 60,
    "ignore_eos": True,
}
_PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model's folder."""
    return write_small_model(tmp_path_factory.mktemp("model"))


class Beside:
    """Real processes, with a relay between some of them."""

    def __init__(self, stack: AsyncExitStack, verify: str) -> None:
        self._stack = stack
        self.verify = verify

    async def relay(self, change: Change) -> tuple[str, Relay]:
        """A relay to verify."""
        return await self._stack.enter_async_context(relaying(self.verify, change))

    async def start(self, *words: str, ready: str) -> str:
        """Starts a process; returns what the pattern's group matches in its output."""
        process = Process(*words)
        self._stack.push_async_callback(asyncio.to_thread, process.stop)
        return (await asyncio.to_thread(process.wait_for, ready)).group(1)

    async def gateway(self, address: str) -> httpx.AsyncClient:
        """Starts a gateway at that verify service; a client of it once it is ready."""
        url = await self.start("gateway", "--port=0", f"--verify-address={address}", ready=r"gateway listens on (\S+)")
        client = await self._stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S))
        await until_async(
            lambda: client.get("/health"), "the gateway is not healthy", done=lambda reply: reply.status_code == 200
        )
        return client

    async def drafter(self, address: str, number: int) -> None:
        """Starts an n-gram drafter; returns when verify has `number` of them."""
        words = ["draft", "--listen=127.0.0.1:0", f"--verify-address={address}"]
        await self.start(*words, ready=r"(draft serves)")
        async with create_channel(self.verify) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            request = verify_pb2.VerifyServiceGetServerInfoRequest()
            await until_async(
                lambda: stub.GetServerInfo(request, timeout=30), "the drafter is not enlisted",
                done=lambda info: len(info.drafters) == number,
            )  # fmt: skip


@pytest.fixture(params=list(CHANGES))
def change(request: pytest.FixtureRequest) -> Change:
    """How the other release changes a message."""
    return CHANGES[request.param]


async def beside(model: Path) -> AsyncIterator[Beside]:
    """A verify service, and room for more."""
    async with AsyncExitStack() as stack:
        made = Beside(stack, "")
        words = ["verify", "--listen=127.0.0.1:0", f"--model-path={model}", *SMALL]
        made.verify = await made.start(*words, ready=r"verify serves \S+ at (\S+)")
        yield made


async def said(client: httpx.AsyncClient, **fields: object) -> tuple[str, int]:
    """The answer's text, and how many drafts it took."""
    reply = await client.post("/v1/chat/completions", json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["speculation"]["accepted_tokens"]


@pytest.mark.asyncio
async def test_another_gateway_drafter_and_client(model: Path, change: Change) -> None:
    """Gateway and drafter of another release than verify, each and both: answers are the same, drafts are taken."""
    async for made in beside(model):
        own = await made.gateway(made.verify)
        expected, _ = await said(own, speculative={"enabled": False})
        address, relay = await made.relay(change)
        other = await made.gateway(address)
        assert (await said(other))[0] == expected
        await made.drafter(address, 1)
        for client in (own, other):
            answers = [await said(client)]
            while answers[-1][1] == 0:  # on a busy machine drafts may all come too late
                answers.append(await said(client))
            assert {text for text, _ in answers} == {expected}
        assert ("GenerateMany" in relay.seen) is relay.knows("outrider.v1.GenerateManyRequest")
        await check_client(made, address)
        assert relay.seen >= {"Generate", "GetServerInfo", "Speculate"}


async def check_client(made: Beside, address: str) -> None:
    """Makes the bare gRPC call, with every kind of field that it had from the start."""
    request = verify_pb2.GenerateRequest(
        request_id="x", prompt_tokens=b"\5\0\0\0\6\0\0\0", logprobs=True, top_logprobs=2, num_choices=2,
        sampling=common_pb2.SamplingParams(temperature=1, seed=3, max_tokens=12, top_p=0.9),
    )  # fmt: skip
    answers = []
    for target in (made.verify, address):
        async with create_channel(target) as channel:
            answers.append(await collect(verify_pb2_grpc.VerifyServiceStub(channel), request))
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [12, 12]


async def collect(stub: verify_pb2_grpc.VerifyServiceAsyncStub, request: verify_pb2.GenerateRequest) -> list[list[int]]:
    """Tokens of each choice."""
    choices: list[list[int]] = [[] for _ in range(request.num_choices)]
    async for response in stub.Generate(request, timeout=_PATIENCE_S):
        choices[response.choice_index] += response.tokens
        assert len(response.logprobs) == len(response.tokens)
    return choices


# Numbers that have outgrown their type; as long as they are small, the bytes are the same.
WIDER = {FieldDescriptor.TYPE_UINT32: FieldDescriptor.TYPE_UINT64}


def test_nothing_that_was_once_there_has_changed() -> None:
    """Fields of the first protos have kept name, number and type, and methods their messages."""
    ours = {file.DESCRIPTOR.name: file.DESCRIPTOR for file in (common_pb2, verify_pb2, draft_pb2)}
    for file in first_files():
        now = ours[file.name]
        for message in file.message_type:
            fields = now.message_types_by_name[message.name].fields_by_name
            for field in message.field:
                kept = fields[field.name]
                assert (kept.number, kept.is_repeated) == (field.number, field.label == 3)
                assert kept.type in {field.type, WIDER.get(field.type)}
        for enum in file.enum_type:
            numbers = {name: value.number for name, value in now.enum_types_by_name[enum.name].values_by_name.items()}
            assert numbers.items() >= {value.name: value.number for value in enum.value}.items()
        for service in file.service:
            methods = now.services_by_name[service.name].methods_by_name
            for method in service.method:
                kept_types = (methods[method.name].input_type.full_name, methods[method.name].output_type.full_name)
                assert kept_types == (method.input_type.lstrip("."), method.output_type.lstrip("."))
