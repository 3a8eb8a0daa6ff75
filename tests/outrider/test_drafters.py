"""`outrider drafters`, against a service that notes what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from outrider import cli, drafters
from outrider.errors import StartupError
from outrider.v1 import admin_pb2 as pb
from outrider.v1 import admin_pb2_grpc, common_pb2


class Noting(admin_pb2_grpc.AdminServiceServicer):
    """A service that has one drafter."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.drafter_id = "host:7"
        self.disabled: common_pb2.Algorithm = common_pb2.ALGORITHM_NGRAM

    def ListDrafters(self, request: pb.ListDraftersRequest, context: grpc.ServicerContext) -> pb.ListDraftersResponse:
        drafter = pb.ManagedDrafter(
            drafter_id=self.drafter_id, algorithm=common_pb2.ALGORITHM_EAGLE3, mode=pb.DRAFTER_MODE_DRAINING,
            sessions=2, max_sessions=8, silent_sessions=1, draft_tokens=10, accepted_tokens=6,
            gains_nothing=True,
        )  # fmt: skip
        return pb.ListDraftersResponse(drafters=[drafter], disabled_algorithms=[self.disabled])

    def SetDrafterMode(
        self, request: pb.SetDrafterModeRequest, context: grpc.ServicerContext
    ) -> pb.SetDrafterModeResponse:
        self.asked.append(request)
        if request.drafter_id != "host:7":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such drafter")
        return pb.SetDrafterModeResponse(moved_sessions=2)

    def SetAlgorithm(self, request: pb.SetAlgorithmRequest, context: grpc.ServicerContext) -> pb.SetAlgorithmResponse:
        self.asked.append(request)
        return pb.SetAlgorithmResponse()


@pytest.fixture
def service(tmp_path: Path) -> Generator[tuple[Noting, str]]:
    server, noting = grpc.server(futures.ThreadPoolExecutor(1)), Noting()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(noting, server)
    address = f"unix:{tmp_path}/verify.sock"
    server.add_insecure_port(address)
    server.start()
    yield noting, address
    stopped: threading.Event = server.stop(None)
    stopped.wait()


def run(*words: str) -> tuple[int, list[str]]:
    said: list[str] = []
    return drafters.main(list(words), said.append), said


def test_list(service: tuple[Noting, str]) -> None:
    _, address = service
    code, (disabled, head, row) = run("list", f"--verify-address={address}")
    assert code == 0
    assert disabled == f"{address}: NGRAM is disabled"
    assert head.split()[:4] == ["verify", "drafter", "algorithm", "mode"]
    assert row.split() == [address, "host:7", "EAGLE3", "draining", "2/8", "1", "60%", "nothing", "-"]


def test_a_drafters_name_sends_a_terminal_nothing(service: tuple[Noting, str]) -> None:
    noting, address = service
    noting.drafter_id = "\x1b[31mhost\n:7"
    _, (_, _, row) = run("list", f"--verify-address={address}")
    assert row.split()[1] == r"\x1b[31mhost\x0a:7"


def test_a_drafter_of_an_algorithm_that_is_off(service: tuple[Noting, str]) -> None:
    noting, address = service
    noting.disabled = common_pb2.ALGORITHM_EAGLE3
    _, (disabled, _, row) = run("list", f"--verify-address={address}")
    assert disabled == f"{address}: EAGLE3 is disabled"
    assert row.split()[2:4] == ["EAGLE3", "algorithm-off"]


def test_switches(service: tuple[Noting, str]) -> None:
    noting, address = service
    at = f"--verify-address={address}"
    for action, mode in (
        ("drain", pb.DRAFTER_MODE_DRAINING), ("disable", pb.DRAFTER_MODE_DISABLED), ("enable", pb.DRAFTER_MODE_ENABLED)
    ):  # fmt: skip
        code, (line,) = run(action, at, "--drafter=host:7")
        assert code == 0
        assert line.startswith(f"{address}: host:7 is {'draining' if action == 'drain' else action + 'd'}; 2 sessions")
        assert noting.asked.pop() == pb.SetDrafterModeRequest(drafter_id="host:7", mode=mode)
    for action in ("disable", "enable"):
        assert run(action, at, "--algorithm=ngram") == (0, [f"{address}: NGRAM is {action}d"])
        request = pb.SetAlgorithmRequest(algorithm=common_pb2.ALGORITHM_NGRAM, enabled=action == "enable")
        assert noting.asked.pop() == request


def test_nextn_is_sglangs_name_of_mtp(service: tuple[Noting, str]) -> None:
    noting, address = service
    code, lines = run("disable", f"--verify-address={address}", "--algorithm=NEXTN")
    assert (code, lines) == (0, [f"{address}: MTP is disabled"])
    assert noting.asked.pop() == pb.SetAlgorithmRequest(algorithm=common_pb2.ALGORITHM_MTP, enabled=False)


def test_refusals_and_absence_are_told(
    service: tuple[Noting, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = service
    gone = f"unix:{tmp_path}/gone.sock"
    words = ["disable", f"--verify-address={address}", f"--verify-address={gone}", "--drafter=nobody"]
    assert drafters.main(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0] == f"{address}: no such drafter"
    assert lines[1].startswith(f"{gone}: ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "ACTION is missing: one of list, "),
        (["stop"], "ACTION"), (["disable"], "--drafter or --algorithm"), (["list", "--drafter=x"], "neither"),
        (["disable", "--drafter=x", "--algorithm=NGRAM"], "exclude"), (["drain", "--algorithm=NGRAM"], "--drafter"),
        (["disable", "--algorithm=NONE"], "must be one of"), (["list", "--timeout-s=0"], "--timeout-s"),
    ],
)  # fmt: skip
def test_wrong_words(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError, match=complaint):
        drafters.main(words)
    assert cli.main(["drafters", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert complaint in said.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drafters", "--help"]) == 0
    assert "--admin-token-file" in capsys.readouterr().out
