"""Names of draft algorithms, those of newer versions included."""

from __future__ import annotations

from outrider.algorithms import WIRE_ALGORITHMS, algorithm_name
from outrider.v1 import common_pb2


def test_every_algorithm_has_a_name() -> None:
    assert algorithm_name(common_pb2.ALGORITHM_EAGLE3) == "EAGLE3"
    assert algorithm_name(0) == "NONE"
    assert algorithm_name(99) == "UNKNOWN"
    assert {*WIRE_ALGORITHMS.values(), 0} == set(common_pb2.Algorithm.values())
