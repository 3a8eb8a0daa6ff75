"""What a peer's status carries: read where it can be, and never a failure of its own."""

from __future__ import annotations

import errno
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from outrider.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from outrider.statuses import details_of, error_of, told_error

CORRUPT = any_pb2.Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff\xff")


def packed(message: Any) -> any_pb2.Any:
    """A detail."""
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


@pytest.mark.parametrize("details", [b"\xff\xff\xff", status_pb2.Status(details=[CORRUPT]).SerializeToString()])
def test_details_that_are_none_leave_the_status_as_it_is(details: bytes) -> None:
    error = error_of(grpc.StatusCode.UNAVAILABLE, "leaving", details)
    assert type(error) is Unavailable
    assert (error.message, error.field, error.code) == ("leaving", None, None)


def test_a_corrupt_detail_hides_no_other() -> None:
    info = packed(error_details_pb2.ErrorInfo(reason="why", domain="outrider"))
    for details in ([info, CORRUPT], [CORRUPT, info]):
        data = status_pb2.Status(details=details).SerializeToString()
        assert error_of(grpc.StatusCode.INVALID_ARGUMENT, "no", data).code == "why"


def test_details_come_back() -> None:
    error = error_of(grpc.StatusCode.INVALID_ARGUMENT, "no", details_of(InvalidArgument("no", field="top_p", code="c")))
    assert (error.field, error.code) == ("top_p", "c")


def test_who_would_wait_for_nothing_is_told_no_delay() -> None:
    details = details_of(ResourceExhausted("a message is too long", field="tokens"))
    assert not any("RetryInfo" in detail.type_url for detail in status_pb2.Status.FromString(details).details)
    error = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", details)
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s is None


@pytest.mark.parametrize(("told_s", "kept_s"), [(-5, 0.0), (0, 0.0), (7, 7.0), (10**10, 60.0)])
def test_a_peers_delay_is_bounded(told_s: int, kept_s: float) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=told_s))
    data = status_pb2.Status(details=[packed(retry)]).SerializeToString()
    error = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", data)
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s == kept_s


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_that_can_have_no_more_may_be_another_day_or_another_replica(number: int) -> None:
    told = told_error(OSError(number, "no more"), "/method")
    assert type(told) is Unavailable
    assert type(told_error(OSError(errno.EACCES, "no"), "/method")) is Internal
