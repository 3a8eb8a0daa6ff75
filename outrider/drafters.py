"""`outrider drafters`: an operator's view of a verify service's drafters, and switches for them (AdminService)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

import grpc.aio

from outrider.algorithms import WIRE_ALGORITHMS, algorithm_name
from outrider.args.admin import DraftersArgs
from outrider.dialing import dialer_of
from outrider.errors import StartupError
from outrider.flags import parser_for
from outrider.terminal import shown_line
from outrider.v1 import admin_pb2, admin_pb2_grpc

_MODES = {
    "enable": admin_pb2.DRAFTER_MODE_ENABLED,
    "drain": admin_pb2.DRAFTER_MODE_DRAINING,
    "disable": admin_pb2.DRAFTER_MODE_DISABLED,
}
ACTIONS = ("list", *_MODES)
_COLUMNS = ("verify", "drafter", "algorithm", "mode", "sessions", "silent", "accepted", "gains", "draft model")

Say = Callable[[str], None]


def _complain(line: str) -> None:
    print(shown_line(line), file=sys.stderr)


def main(words: list[str], say: Say = print, complain: Say = _complain) -> int:
    """The command; returns its exit code: 1 when a verify service refused or did not answer, as `complain` hears."""
    if not words:
        raise StartupError(f"ACTION is missing: one of {', '.join(ACTIONS)}; `outrider drafters --help` tells more")
    if words[0] in ("-h", "--help"):
        parser_for(DraftersArgs).print_help()
        return 0
    if words[0] not in ACTIONS:
        raise StartupError(f"ACTION is {words[0]!r}; it must be one of {', '.join(ACTIONS)}")
    action, args = words[0], DraftersArgs.parse(words[1:])
    chosen = args.drafter is not None or args.algorithm is not None
    if action == "list" and chosen:
        raise StartupError("list takes neither --drafter nor --algorithm")
    if action != "list" and not chosen:
        raise StartupError(f"{action} needs --drafter or --algorithm")
    if action == "drain" and args.algorithm is not None:
        raise StartupError("drain takes --drafter; an algorithm is disabled or enabled")
    return asyncio.run(_run(action, args, say, complain))


async def _run(action: str, args: DraftersArgs, say: Say, complain: Say) -> int:
    dial = dialer_of(args, args.verify_address, args.admin_token_file, "--admin-token-file")
    rows: list[tuple[str, ...]] = []
    failed = False
    for address in args.verify_address:
        async with dial(address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            try:
                if action == "list":
                    rows += await _list(stub, args, address, say)
                else:
                    await _switch(stub, action, args, address, say)
            except grpc.aio.AioRpcError as error:
                failed = True
                complain(f"{address}: {error.details() or error.code().name}")
    if action == "list" and rows:
        for line in _table([_COLUMNS, *rows]):
            say(line)
    return int(failed)


async def _list(
    stub: admin_pb2_grpc.AdminServiceAsyncStub, args: DraftersArgs, address: str, say: Say
) -> list[tuple[str, ...]]:
    found = await stub.ListDrafters(admin_pb2.ListDraftersRequest(), timeout=args.timeout_s)
    if not found.drafters:
        say(f"{address}: no drafter is enlisted")
    for algorithm in found.disabled_algorithms:
        say(f"{address}: {algorithm_name(algorithm)} is disabled")
    return [_row(address, drafter, drafter.algorithm in found.disabled_algorithms) for drafter in found.drafters]


async def _switch(
    stub: admin_pb2_grpc.AdminServiceAsyncStub, action: str, args: DraftersArgs, address: str, say: Say
) -> None:
    if args.drafter is not None:
        request = admin_pb2.SetDrafterModeRequest(drafter_id=args.drafter, mode=_MODES[action])
        moved = (await stub.SetDrafterMode(request, timeout=args.timeout_s)).moved_sessions
        say(f"{address}: {args.drafter} is {_mode(_MODES[action])}{_moved(moved)}")
        return
    algorithm = WIRE_ALGORITHMS[(args.algorithm or "").upper()]
    switch = admin_pb2.SetAlgorithmRequest(algorithm=algorithm, enabled=action == "enable")
    moved = (await stub.SetAlgorithm(switch, timeout=args.timeout_s)).moved_sessions
    say(f"{address}: {algorithm_name(algorithm)} is {action}d{_moved(moved)}")


def _row(address: str, drafter: admin_pb2.ManagedDrafter, off: bool) -> tuple[str, ...]:
    share = f"{drafter.accepted_tokens / drafter.draft_tokens:.0%}" if drafter.draft_tokens else "-"
    return (
        address, shown_line(drafter.drafter_id), algorithm_name(drafter.algorithm),
        "algorithm-off" if off else _mode(drafter.mode),
        f"{drafter.sessions}/{drafter.max_sessions}", str(drafter.silent_sessions), share,
        "nothing" if drafter.gains_nothing else "-",
        shown_line(drafter.draft_model) or "-",
    )  # fmt: skip


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _mode(mode: admin_pb2.DrafterMode) -> str:
    return admin_pb2.DrafterMode.Name(mode).removeprefix("DRAFTER_MODE_").lower()


def _moved(sessions: int) -> str:
    return f"; {sessions} sessions were taken from it" if sessions else ""
