"""Which replicas can take a call."""

from __future__ import annotations

from collections.abc import Container, Iterable

from gateway.replica import Replica
from outrider.errors import RETRY_SOON_S, ResourceExhausted, Unavailable


def takers_of(
    serving: Iterable[Replica], *, numerics_id: str | None, avoid: Container[Replica], num_positions: int,
    num_choices: int, sure: bool, kept: int,
) -> list[Replica]:  # fmt: skip
    """Those that serve and can take a call, as ReplicaSet.pick is asked for one; in doubt only where all are.

    kept: sessions that room is left for. Unavailable without any, ResourceExhausted when all are full.
    """
    candidates = [replica for replica in serving if replica not in avoid and not (sure and replica.doubtful)]
    if not candidates:
        raise Unavailable("No verify service is available.")
    holding = [replica for replica in candidates if num_positions <= (replica.context_length or num_positions)]
    if not holding:
        raise Unavailable(f"No verify service that is up holds {num_positions} tokens of prompt and output.")
    giving = [replica for replica in holding if num_choices <= (replica.max_choices or num_choices)]
    if not giving:
        raise Unavailable(f"No verify service that is up gives {num_choices} choices at once.")
    alike = [replica for replica in giving if not _differs(replica, numerics_id)]
    if not alike:
        raise Unavailable("No verify service computes as that which began this answer.")
    with_room = [replica for replica in alike if not replica.is_full(kept)]
    if not with_room:
        most = sum(replica.max_queued for replica in alike)
        raise ResourceExhausted(f"The server is at its limit of {most} waiting requests.", retry_after_s=RETRY_SOON_S)
    return [replica for replica in with_room if not replica.doubtful] or with_room


def _differs(replica: Replica, numerics_id: str | None) -> bool:
    return numerics_id is not None and replica.info is not None and replica.info.model.numerics_id != numerics_id
