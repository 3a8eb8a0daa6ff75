"""Stands in for a part of `outrider serve`: takes its words, answers what the launcher asks, and does nothing else.

`--die` as the first word: it prints a reason and exits with 1. `--refused`: as a draft service that verify refuses.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import grpc
from google.protobuf.message import Message

from outrider.args import DraftArgs, GatewayArgs, VerifyArgs
from outrider.flags import Args
from outrider.rpc import add_health_and_reflection, bind, create_server, set_serving
from outrider.supervisor import die_with_parent
from outrider.v1 import common_pb2, draft_pb2, verify_pb2


def info_handler(service: str, answers: list[Message]) -> grpc.GenericRpcHandler:
    """GetServerInfo that gives `answers` one after the other, the last for ever."""

    async def answer(request: bytes, context: object) -> Message:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    method = grpc.unary_unary_rpc_method_handler(answer, response_serializer=lambda reply: reply.SerializeToString())
    return grpc.method_handlers_generic_handler(f"outrider.v1.{service}", {"GetServerInfo": method})


def handler_of(args: VerifyArgs | DraftArgs, end: draft_pb2.VerifyLinkState) -> grpc.GenericRpcHandler:
    """The verify service, or a draft service that is connecting when it is asked first, and then `end`."""
    if isinstance(args, VerifyArgs):
        model = common_pb2.ModelInfo(model_path=args.model_path or "/models/default")
        return info_handler("VerifyService", [verify_pb2.VerifyServiceGetServerInfoResponse(model=model)])
    links = (draft_pb2.VerifyLink(state=draft_pb2.VERIFY_LINK_STATE_CONNECTING), draft_pb2.VerifyLink(state=end))
    links[1].last_error = "another vocabulary"
    return info_handler("DraftService", [draft_pb2.DraftServiceGetServerInfoResponse(links=[link]) for link in links])


async def serve_grpc(args: VerifyArgs | DraftArgs, end: draft_pb2.VerifyLinkState) -> None:
    server = create_server()
    server.add_generic_rpc_handlers((handler_of(args, end),))
    health = add_health_and_reflection(server, [])
    bind(server, args.listen)
    if isinstance(args, VerifyArgs) and args.grpc_address is not None:
        bind(server, args.grpc_address)
    await server.start()
    set_serving(health, [], True)
    await until_terminated()
    await server.stop(0)


async def serve_http(args: GatewayArgs) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, args.host, args.port):
        await until_terminated()


async def until_terminated() -> None:
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    await terminated.wait()


def main(words: list[str]) -> None:
    if words[0] == "--die":
        sys.exit("outrider draft: no weights here")
    die_with_parent()
    end = draft_pb2.VERIFY_LINK_STATE_ENLISTED
    if words[0] == "--refused":
        words, end = words[1:], draft_pb2.VERIFY_LINK_STATE_REFUSED
    known: dict[str, type[Args]] = {kind.command: kind for kind in (VerifyArgs, DraftArgs, GatewayArgs)}
    args = known[words[0]].parse(words[1:])
    if isinstance(args, DraftArgs) and args.describe:
        print(json.dumps({"features": "last"}))
    elif isinstance(args, GatewayArgs):
        asyncio.run(serve_http(args))
    elif isinstance(args, VerifyArgs | DraftArgs):
        asyncio.run(serve_grpc(args, end))


if __name__ == "__main__":
    main(sys.argv[1:])
