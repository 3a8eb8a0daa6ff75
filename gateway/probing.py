"""How replicas are asked whether they are there, and what silence says against them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

# What probes without an answer, in a row, add up to until a replica is down: three that ran out of time, as on a busy
# machine; six, in about a second, that a connection lost; one where there is nothing to connect to.
_LATE, _LOST, DOWN = 2, 1, 6


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """How often replicas are looked at, in seconds."""

    interval_s: float = 1.0
    timeout_s: float = 3.0
    first_retry_s: float = 0.1
    max_retry_s: float = 2.0
    resolve_interval_s: float = 5.0


def weight(code: grpc.StatusCode, state: grpc.ChannelConnectivity) -> int:
    """What a probe that failed says against its replica."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _LATE
    lost = code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    return _LOST if lost and state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE else DOWN
