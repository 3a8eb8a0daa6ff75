from __future__ import annotations

import pytest

from outrider.model_name import default_model_name
from outrider.v1 import common_pb2, verify_pb2

CACHE = "/root/.cache/huggingface/hub/models--owner--name/snapshots/0a1b2c"


@pytest.mark.parametrize(
    ("asked", "path", "name"),
    [
        ("None", "/cache/models/smollm2-135m-instruct", "SmolLM2-135M-Instruct"),
        ("owner/name", CACHE, "owner/name"),
        ("models/mine", "/home/me/models/mine", "mine"),
        ("/models/mine", "/models/mine", "mine"),
        ("mine", "/home/me/mine", "mine"),
        (None, "/models/mine", "mine"),
    ],
)
def test_the_name_is_the_one_that_people_know(asked: str | None, path: str, name: str) -> None:
    info = verify_pb2.VerifyServiceGetServerInfoResponse(model=common_pb2.ModelInfo(model_path=path))
    if asked is not None:
        info.arguments["model-path"] = asked
    assert default_model_name(info) == name
