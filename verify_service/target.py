"""What a verify process says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Target:
    """What drafters are told of this process."""

    boot_id: str
    model: common_pb2.ModelInfo
    features: common_pb2.FeatureLayout
    row_bytes: int  # of a feature row; 0: none are kept
    outbox_bytes: int  # that may wait for one of them
