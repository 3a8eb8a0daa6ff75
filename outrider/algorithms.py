"""Names of draft algorithms."""

from __future__ import annotations

from outrider.v1 import common_pb2

WIRE_ALGORITHMS = {
    "NGRAM": common_pb2.ALGORITHM_NGRAM,
    "STANDALONE": common_pb2.ALGORITHM_STANDALONE,
    "EAGLE": common_pb2.ALGORITHM_EAGLE,
    "EAGLE3": common_pb2.ALGORITHM_EAGLE3,
    "MTP": common_pb2.ALGORITHM_MTP,
    "NEXTN": common_pb2.ALGORITHM_MTP,  # as SGLang calls it
}


def algorithm_name(algorithm: int) -> str:
    """NGRAM, EAGLE3...; NONE for 0, and UNKNOWN for one that only a newer version has."""
    if algorithm not in common_pb2.Algorithm.values():
        return "UNKNOWN"
    return "NONE" if algorithm == 0 else common_pb2.Algorithm.Name(algorithm).removeprefix("ALGORITHM_")
