"""Decoding bodies: the errors' fields, and where the work is done."""

from __future__ import annotations

import json
import threading

import pytest

from gateway.body import BodyDecoder
from gateway.errors import failure
from gateway.offload import INLINE_BYTES, offload
from gateway.schemas import ChatCompletionRequest
from outrider.errors import InvalidArgument

SECRET = "hunter2"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": SECRET},
        {"messages": [{"role": {SECRET: 1}}]},
        {"messages": [], SECRET: 1},
        {"messages": [{"role": "user", "content": [{"type": SECRET}]}], "stop": [SECRET, 5]},
        {"messages": [], "logit_bias": {SECRET: SECRET}},
        {"messages": [], "temperature": [SECRET]},
    ],
)
def test_values_are_never_repeated(body: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BodyDecoder(strict_fields=False).decode(json.dumps(body).encode(), ChatCompletionRequest)
    assert SECRET.encode() not in failure(refused.value).body


def test_unexpected_errors_tell_nothing() -> None:
    failed = failure(ValueError(SECRET))
    assert failed.status == 500
    assert SECRET.encode() not in failed.body


def test_names_of_unknown_fields_can_always_be_sent() -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"\\ud800\\udead":1}'
    with pytest.raises(InvalidArgument) as refused:
        BodyDecoder(strict_fields=True).decode(body, ChatCompletionRequest)
    failure(refused.value)
    BodyDecoder(strict_fields=False)


@pytest.mark.asyncio
async def test_large_work_leaves_the_event_loop() -> None:
    here = threading.current_thread()
    assert await offload(INLINE_BYTES, threading.current_thread) is here
    assert await offload(INLINE_BYTES + 1, threading.current_thread) is not here
