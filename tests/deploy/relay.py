"""A gRPC server that passes every call on, and what each message becomes on its way through another release."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from outrider.rpc import create_channel
from outrider.v1 import common_pb2, draft_pb2, verify_pb2

FIRST = Path(__file__).parents[1] / "data" / "wire_first.binpb"
_FILES = (common_pb2, verify_pb2, draft_pb2)
_UNKNOWN_NUMBERS = (2001, 5000, 536_870_911)  # far beyond ours, up to the highest there is

Change = Callable[[str, bytes], bytes]  # a message's full name and bytes -> its bytes on the other side


def first_files() -> list[descriptor_pb2.FileDescriptorProto]:
    """The first protos of wire version 1."""
    return list(descriptor_pb2.FileDescriptorSet.FromString(FIRST.read_bytes()).file)


def older() -> Change:
    """A change that leaves of a message the fields that a release with the first protos knows."""
    pool = descriptor_pool.DescriptorPool()
    for file in first_files():
        pool.AddSerializedFile(file.SerializeToString())

    def change(name: str, data: bytes) -> bytes:
        old = message_factory.GetMessageClass(pool.FindMessageTypeByName(name)).FromString(data)
        old.DiscardUnknownFields()
        return old.SerializeToString()

    return change


def newer(seed: int = 1) -> Change:
    """A change that adds fields that nobody here knows, to inner messages too, as a later release might."""
    chance = random.Random(seed)
    classes = {
        descriptor.full_name: message_factory.GetMessageClass(descriptor)
        for file in _FILES
        for descriptor in file.DESCRIPTOR.message_types_by_name.values()
    }

    def change(name: str, data: bytes) -> bytes:
        message = classes[name].FromString(data)
        _widen(message, chance)
        return message.SerializeToString()

    return change


def _widen(message: Message, chance: random.Random) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in [value] if isinstance(value, Message) else value:
            _widen(inner, chance)
    message.MergeFromString(_unknown_field(chance))


def _unknown_field(chance: random.Random) -> bytes:
    """A field of any wire type, as protobuf writes it."""
    number = chance.choice(_UNKNOWN_NUMBERS)
    kind = chance.choice((0, 1, 2, 5))
    value = {0: b"\x96\x01", 1: bytes(8), 2: b"\x03new", 5: bytes(4)}[kind]
    return _varint(number << 3 | kind) + value


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class Relay(grpc.GenericRpcHandler):
    """Passes calls on to `target`, each message changed. Calls of the methods in `seen` came through.

    A method whose messages the other release has not is not there.
    """

    def __init__(self, target: str, change: Change) -> None:
        self._channel = create_channel(target)
        self._change = change
        self.seen: set[str] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Handles any method of ours; the framing of unary and streaming calls is the same."""
        method = handler_call_details.method
        _, service, name = method.split("/")
        found = next((f.DESCRIPTOR.services_by_name.get(service.rpartition(".")[2]) for f in _FILES[1:]), None)
        if not service.startswith("outrider.v1.") or found is None:
            return None
        described = found.methods_by_name[name]
        if not self.knows(described.input_type.full_name):
            return None

        async def relay(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
            self.seen.add(name)
            open_call: Any = self._channel.stream_stream
            call = open_call(method)(
                _changed(self._change, described.input_type.full_name, requests), timeout=context.time_remaining()
            )
            try:
                async for data in _changed(self._change, described.output_type.full_name, call):
                    yield data
            except grpc.aio.AioRpcError as error:
                trailing: Any = error.trailing_metadata() or ()
                await context.abort(error.code(), error.details() or "", tuple(trailing))
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(relay)

    def knows(self, message: str) -> bool:
        """Whether the other release has this message."""
        try:
            self._change(message, b"")
        except KeyError:
            return False
        return True

    async def close(self) -> None:
        """Closes the channel to the target."""
        await self._channel.close(None)


async def _changed(change: Change, name: str, messages: Any) -> AsyncIterator[bytes]:
    async for data in messages:
        yield change(name, data)


@contextlib.asynccontextmanager
async def relaying(target: str, change: Change) -> AsyncGenerator[tuple[str, Relay]]:
    """A relay on a free port, as its address and itself."""
    relay = Relay(target, change)
    server = grpc.aio.server(handlers=[relay])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", relay
    finally:
        await server.stop(None)
        await relay.close()
