"""The gateway's calls to verify over mutual TLS with a token."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway.replicas import ReplicaSet
from outrider import serving
from outrider.args import GatewayArgs
from outrider.dialing import dialer_of
from outrider.v1 import verify_pb2, verify_pb2_grpc
from outrider.wire import pack_ids
from tests.certificates import MutualTls
from tests.gateway.fakes import FAST_PROBE, FakeVerify


@pytest.mark.asyncio
async def test_replicas_are_found_and_asked_once_the_token_is_right(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tls = MutualTls.between(tmp_path, "gateway")
    server = serving.create_server(tls.verify)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(
        FakeVerify(folder, vocab_size=tokenizer.get_vocab_size() + 8), server
    )
    (address,) = serving.listen(server, tls.verify, tls.verify.listen)
    await server.start()
    addresses = (f"localhost:{address.rpartition(':')[2]}",)
    args = GatewayArgs(verify_address=addresses, **tls.client)
    replicas = ReplicaSet(addresses, FAST_PROBE, dialer_of(args, addresses, args.token_file))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        await replicas.start()
        stack.push_async_callback(replicas.close)
        assert not replicas.serving
        tls.correct_token()
        while not replicas.serving:
            await replicas.wait_for_change(1.0)
        request = verify_pb2.GenerateRequest(prompt_tokens=pack_ids([5, 6]))
        request.sampling.max_tokens = 3
        request.sampling.seed = 1
        call = replicas.pick().stub.Generate(request)
        tokens = [token async for response in call for token in response.tokens]
        assert tokens
