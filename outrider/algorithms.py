"""Names of draft algorithms."""

from __future__ import annotations

from outrider.v1 import common_pb2

# NEXTN is what SGLang calls MTP.
WIRE_ALGORITHMS: dict[str, common_pb2.Algorithm] = {
    **{name.removeprefix("ALGORITHM_"): number for name, number in common_pb2.Algorithm.items() if number},
    "NEXTN": common_pb2.ALGORITHM_MTP,
}


def algorithm_name(algorithm: int) -> str:
    """NGRAM, EAGLE3...; NONE for 0, and UNKNOWN for one that only a newer version has."""
    if algorithm not in common_pb2.Algorithm.values():
        return "UNKNOWN"
    return "NONE" if algorithm == 0 else common_pb2.Algorithm.Name(algorithm).removeprefix("ALGORITHM_")
