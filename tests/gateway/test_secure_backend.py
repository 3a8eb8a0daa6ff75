"""The gateway's calls to verify over mutual TLS with a token."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway.replicas import ReplicaSet
from outrider import serving
from outrider.args import GatewayArgs, VerifyArgs
from outrider.dialing import dialer_of
from outrider.v1 import verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.certificates import Authority
from tests.gateway.fakes import FAST_PROBE, FakeVerify


@pytest.mark.asyncio
async def test_replicas_are_found_and_asked_once_the_token_is_right(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    (server_cert, server_key), (cert, key) = authority.issue("localhost"), authority.issue("gateway")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("a-token-that-is-not-known")
    theirs.write_text("a-token-between-services")
    verify_args = VerifyArgs(
        listen="127.0.0.1:0", ssl_certfile=server_cert, ssl_keyfile=server_key, ssl_ca_certs=str(authority.path),
        token_file=str(theirs),
    )  # fmt: skip
    server = serving.create_server(verify_args)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(
        FakeVerify(folder, vocab_size=tokenizer.get_vocab_size() + 8), server
    )
    (address,) = serving.listen(server, verify_args, verify_args.listen)
    await server.start()
    addresses = (f"localhost:{address.rpartition(':')[2]}",)
    args = GatewayArgs(
        verify_address=addresses, verify_ssl_ca_certs=str(authority.path), verify_ssl_certfile=cert,
        verify_ssl_keyfile=key, token_file=str(ours),
    )  # fmt: skip
    replicas = ReplicaSet(addresses, FAST_PROBE, dialer_of(args, addresses, args.token_file))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        assert not replicas.serving
        ours.write_text("a-token-between-services")
        while not replicas.serving:
            await replicas.wait_for_change(1.0)
        request = verify_pb2.GenerateRequest(prompt_tokens=pack_ids([5, 6]))
        request.sampling.max_tokens = 3
        request.sampling.seed = 1
        call = replicas.pick().stub.Generate(request)
        tokens = [token async for response in call for token in response.tokens]
        assert tokens
