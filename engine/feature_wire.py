"""Feature rows as the wire names them: dtypes and kinds. Knows no messages beyond their enums."""

from __future__ import annotations

import torch

from outrider.v1 import common_pb2

WIRE_DTYPES = {
    torch.float32: common_pb2.DTYPE_FLOAT32,
    torch.float16: common_pb2.DTYPE_FLOAT16,
    torch.bfloat16: common_pb2.DTYPE_BFLOAT16,
}
TORCH_DTYPES = {number: dtype for dtype, number in WIRE_DTYPES.items()}


def wire_kind(name: str) -> str:
    """The wire's name of a FeatureSpec's kind."""
    return f"FEATURE_KIND_{name.upper()}"


def kind_name(number: common_pb2.FeatureKind) -> str:
    """The kind's name in a FeatureSpec. ValueError for a number that the wire does not know."""
    return common_pb2.FeatureKind.Name(number).removeprefix("FEATURE_KIND_").lower()
