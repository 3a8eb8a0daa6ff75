"""Prints tokens from Outrider's gRPC API as they come: generate.py ADDRESS [ID...]"""

from __future__ import annotations

import struct
import sys

import grpc

from outrider.v1 import common_pb2, verify_pb2, verify_pb2_grpc

PROMPT = [504, 3575, 282, 4649, 314]


def main() -> int:
    """Returns 0, 1 after an error of the service, or 2 for wrong words."""
    address, *words = sys.argv[1:] or [""]
    try:
        ids = [int(word) for word in words] or PROMPT
        prompt = struct.pack(f"<{len(ids)}i", *ids)
    except (ValueError, struct.error):  # no number, or none of 32 bits
        address, prompt = "", b""
    if not address:
        print(__doc__, file=sys.stderr)
        return 2
    request = verify_pb2.GenerateRequest(
        prompt_tokens=prompt,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=16),
    )
    # Who meets a service's end is told so: gRPC's own retries of such a call can go round for ever.
    with grpc.insecure_channel(address, options=[("grpc.enable_retries", 0)]) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        try:
            for response in stub.Generate(request, timeout=60):
                show(response)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


def show(response: verify_pb2.GenerateResponse) -> None:
    """One line for what one step committed."""
    tokens = [f"[{token}]" if at < response.num_accepted else str(token) for at, token in enumerate(response.tokens)]
    if tokens:
        print(*tokens, flush=True)
    if response.HasField("finish"):
        finish = response.finish
        print(f"{finish.completion_tokens} tokens in {finish.speculation.verify_steps} steps")


if __name__ == "__main__":
    sys.exit(main())
