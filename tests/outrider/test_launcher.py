"""`outrider serve` over stand-ins for the services (tests/outrider/fake_part.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import launcher
from outrider.args import DraftArgs, GatewayArgs, ServeArgs, VerifyArgs
from outrider.args.admin import DraftersArgs
from outrider.colocated import Colocated
from outrider.errors import StartupError
from outrider.launcher import Settings
from outrider.readiness import model_name
from outrider.supervisor import Part, Supervisor

FAKE_PART = Path(__file__).with_name("fake_part.py")


def fake_command(settings: Settings) -> tuple[str, ...]:
    return (sys.executable, str(FAKE_PART), settings.command, *settings.to_argv())


def without(name: str) -> Callable[[Settings], tuple[str, ...]]:
    """Commands of which one dies at its start."""
    die = (sys.executable, str(FAKE_PART), "--die")
    return lambda settings: die if settings.command == name else fake_command(settings)


async def run(args: ServeArgs, command: Callable[[Settings], tuple[str, ...]] = fake_command) -> tuple[int, list[str]]:
    """Exit code, and (address, model) once ready; stops then."""
    seen: list[str] = []

    async def when_ready(served: launcher.Served) -> None:
        seen.extend([served.url, served.model])
        served.stop()

    return await launcher.serve(args, when_ready, command), seen


@pytest.mark.asyncio
@pytest.mark.parametrize("algorithm", ["NGRAM", "NONE"])
async def test_all_parts_come_up_and_end(algorithm: str) -> None:
    code, seen = await run(ServeArgs(port=0, model_path="/models/a-model", speculative_algorithm=algorithm))
    assert code == 0
    url, model = seen
    assert url.startswith("http://127.0.0.1:")
    assert model == "a-model"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


def test_the_command_that_is_told_works_as_it_stands() -> None:
    served = launcher.Served("http://127.0.0.1:1", "m", lambda: None, "unix:/v")
    args = ServeArgs(speculative_algorithm="NGRAM", admin_token_file="/a folder/tokens")
    words = shlex.split(launcher.ready_lines(args, served, 1.0)[-1].removeprefix("Drafters: outrider drafters list"))
    assert DraftersArgs.parse(words).admin_token_file == "/a folder/tokens"


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["verify", "draft", "gateway"])
async def test_the_part_that_fails_is_named(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, seen = await run(ServeArgs(port=0, speculative_algorithm="NGRAM"), without(name))
    assert (code, seen) == (1, [])
    assert f"outrider serve: {name} failed (exit code 1)" in capfd.readouterr().err


@pytest.mark.asyncio
async def test_a_draft_model_that_cannot_be_used_fails_the_start_in_its_own_words() -> None:
    with pytest.raises(StartupError, match="no weights here"):
        await run(ServeArgs(port=0, speculative_algorithm="EAGLE3"), without("draft"))


@pytest.mark.asyncio
async def test_the_time_to_end_has_room_for_the_delay_and_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    class Noting(Supervisor):
        def __init__(self, parts: Sequence[Part], *, startup_timeout_s: float, stop_timeout_s: float) -> None:
            super().__init__(parts, startup_timeout_s=startup_timeout_s, stop_timeout_s=stop_timeout_s)
            given.append(stop_timeout_s)

    monkeypatch.setattr(launcher, "Supervisor", Noting)
    await run(ServeArgs(port=0, speculative_algorithm="NONE", shutdown_grace_s=5.0, drain_delay_s=15.0))
    assert given[0] > 20.0


SLOW = "import sys, time; print('Fetching a model ...', file=sys.stderr, flush=True); time.sleep(600)"


def fetching(settings: Settings) -> tuple[str, ...]:
    """Commands of which the draft service's never comes to an end."""
    return (sys.executable, "-c", SLOW) if settings.command == "draft" else fake_command(settings)


@pytest.mark.asyncio
async def test_what_is_fetched_first_is_shown_and_has_its_time_too(capfd: pytest.CaptureFixture[str]) -> None:
    said = ""
    for time_s in (2.0, 4.0, 8.0, 16.0, 32.0, 64.0):  # a busy machine takes long to start a process
        with pytest.raises(StartupError, match=f"within {time_s:g} s"):
            await run(ServeArgs(port=0, speculative_algorithm="EAGLE3", startup_timeout_s=time_s), fetching)
        said = capfd.readouterr().err
        if "Fetching a model ..." in said:
            break
    assert "Fetching a model ..." in said


SERVE_FETCHING = """
import asyncio, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
from outrider import launcher
from outrider.args import ServeArgs

SLOW = "import os, sys, time; from outrider.stopping import tidied_when_stopped\\nwith tidied_when_stopped():\\n" \\
    " try: print('fetching', os.getpid(), file=sys.stderr, flush=True); time.sleep(600)\\n" \\
    " finally: print('tidied', file=sys.stderr, flush=True)"
args = ServeArgs(port=0, speculative_algorithm="EAGLE3")
asyncio.run(launcher.serve(args, None, lambda settings: (sys.executable, "-c", SLOW)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_parts_are_there_ends_it_and_what_fetches(number: signal.Signals) -> None:
    """Sent to all that a terminal has in the foreground, as Ctrl-C is."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE_FETCHING], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        child = os.pidfd_open(int(process.stderr.readline().split()[-1]))
        os.killpg(process.pid, number)
        assert process.wait(60) == 128 + number
        assert select.select([child], [], [], 60)[0]
        assert process.stderr.read() == "tidied\n"
        os.close(child)


@pytest.mark.asyncio
async def test_a_draft_service_that_verify_refuses_fails_the_start() -> None:
    def command(settings: Settings) -> tuple[str, ...]:
        python, script, *words = fake_command(settings)
        return (python, script, *(["--refused"] if settings.command == "draft" else []), *words)

    with pytest.raises(StartupError, match="verify refuses the draft service: another vocabulary"):
        await run(ServeArgs(port=0), command)


@pytest.mark.asyncio
async def test_clients_reach_verify_at_the_grpc_address() -> None:
    names: list[str] = []

    async def when_ready(served: launcher.Served) -> None:
        assert served.grpc is not None
        names.append(await model_name(served.grpc))
        served.stop()

    args = ServeArgs(port=0, model_path="/models/a-model", served_model_name="another", grpc_address="127.0.0.1:0")
    assert await launcher.serve(args, when_ready, fake_command) == 0
    with contextlib.ExitStack() as held:
        args = replace(args, grpc_address=f"127.0.0.1:{launcher.choose_port('127.0.0.1', 0, held)}")
        assert await launcher.serve(args, when_ready, fake_command) == 0
    assert names == ["a-model", "a-model"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = replace(args, grpc_address=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StartupError, match="cannot listen on"):
            await launcher.serve(args, when_ready, fake_command)


def test_main_says_where_it_serves_when_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(args: ServeArgs, when_ready: Callable[[launcher.Served], Awaitable[None]]) -> int:
        async def stop_then(served: launcher.Served) -> None:
            await when_ready(served)
            served.stop()

        return await real_serve(args, stop_then, fake_command)

    real_serve = launcher.serve
    monkeypatch.setattr(launcher, "serve", serve)
    args = ServeArgs(
        port=0, served_model_name="a-model", speculative_algorithm="EAGLE3", grpc_address="127.0.0.1:0"
    )  # fmt: skip
    assert launcher.main(args) == 0
    line, metrics, grpc, drafters = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"gRPC at 127.0.0.1:[1-9]\d+", grpc)
    assert re.fullmatch(r"Drafters: outrider drafters list --verify-address=unix:/\S+/verify.sock", drafters)
    assert line.startswith("Outrider serves a-model with EAGLE3 drafts at http://127.0.0.1:")
    assert "(ready in " in line
    url = line.split()[7]
    assert re.fullmatch(
        rf"Metrics at (http://127.0.0.1:\d+/metrics) (http://127.0.0.1:\d+/metrics) {url}/metrics", metrics
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"model_path": "/nowhere"}, "--model-path is '/nowhere'; there is no such folder"),
        ({"model_path": "/"}, "--model-path is '/'; there is no config.json in it"),
        ({"tokenizer_path": "/nowhere"}, "--tokenizer-path is '/nowhere'; there is no tokenizer.json in it"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "./nowhere"},
            "--speculative-draft-model-path is './nowhere'",
        ),
        ({"ssl_certfile": "/nowhere", "ssl_keyfile": "/nowhere"}, "cannot read --ssl-certfile"),
        ({"token_file": "/nowhere"}, "cannot read --token-file"),
        ({"admin_token_file": "/nowhere"}, "cannot read --admin-token-file"),
        ({"api_key_file": "/nowhere"}, "cannot read --api-key-file: .*'/nowhere'"),
    ],
)
def test_files_that_are_not_there_are_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], complaint: str
) -> None:
    monkeypatch.setattr(launcher, "serve", None)
    with pytest.raises(StartupError, match=complaint):
        launcher.main(ServeArgs(port=0, **flags))


@pytest.mark.parametrize("name", ["ENABLE_SPEC_V2", "CPU_KERNEL", "NGRAM_FORCE_GREEDY_VERIFY"])
def test_a_variable_that_no_part_could_read_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(launcher, "serve", None)
    monkeypatch.setenv(f"OUTRIDER_{name}", "maybe")
    with pytest.raises(StartupError, match=f"OUTRIDER_{name} is 'maybe'"):
        launcher.main(ServeArgs(port=0))


def test_a_home_without_room_for_the_embedded_model_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_HOME", f"{tmp_path}/file")
    monkeypatch.setattr(launcher, "serve", None)
    with pytest.raises(StartupError, match=r"the embedded model cannot be written .*; set OUTRIDER_HOME to another"):
        launcher.main(ServeArgs(port=0, speculative_algorithm="NGRAM"))


VERIFY, DRAFT = "unix:/run/verify.sock", "unix:/run/draft.sock"


@pytest.fixture(autouse=True)
def _cores_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "cores_of_two", lambda: None)
    monkeypatch.setattr(launcher, "configure_logging", lambda service: None)  # for a whole process, and this goes on


def test_each_part_gets_its_own_flags() -> None:
    args = ServeArgs(
        dtype="float32",
        speculative_algorithm="NGRAM",
        speculative_ngram_branch_length=20,
        api_key=("k",),
        host="0.0.0.0",
    )
    verify, draft, gateway = launcher.parts_of(args, VERIFY, DRAFT, 1234)
    assert [part.name for part in (verify, draft, gateway)] == ["verify", "draft", "gateway"]
    assert [part.disposable for part in (verify, draft, gateway)] == [False, True, False]
    assert VerifyArgs.parse(list(verify.command[5:])) == VerifyArgs(
        listen=VERIFY, dtype="float32", speculative_algorithm="NGRAM"
    )
    assert DraftArgs.parse(list(draft.command[5:])) == DraftArgs(
        listen=DRAFT,
        verify_address=(VERIFY,),
        speculative_algorithm="NGRAM",
        speculative_ngram_branch_length=20,
    )
    assert GatewayArgs.parse(list(gateway.command[5:])) == GatewayArgs(
        verify_address=(VERIFY,), host="0.0.0.0", port=1234, api_key=("k",)
    )
    assert "outrider verify --listen" in " ".join(verify.command)


@pytest.mark.parametrize(
    ("given", "cores"),
    [
        ({}, (4, 7)),
        ({"core_placement": "auto"}, (4, 7)),
        ({"core_placement": "off"}, (None, None)),
        ({"speculative_algorithm": "NONE"}, (None,)),
    ],
)
def test_services_that_share_few_cores_get_one_each(
    given: dict[str, Any], cores: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "cores_of_two", lambda: (4, 7))
    parts = launcher.parts_of(ServeArgs(**given), VERIFY, DRAFT, 1234)[:-1]
    kinds: list[type[VerifyArgs | DraftArgs]] = [VerifyArgs, DraftArgs]
    parsed = [kind.parse(list(part.command[5:])) for kind, part in zip(kinds, parts, strict=False)]
    assert tuple(args.core for args in parsed) == cores


def test_colocated_services_are_one_part_with_the_flags_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "cores_of_two", lambda: (4, 7))
    ngrams: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_ngram_branch_length": 20}
    args = ServeArgs(colocate=True, dtype="float32", **ngrams)
    alone = ServeArgs(dtype="float32", core_placement="off", **ngrams)
    apart = launcher.parts_of(alone, VERIFY, DRAFT, 1234)
    both, gateway = launcher.parts_of(args, VERIFY, DRAFT, 1234)
    assert (both.name, both.disposable) == ("colocated", False)
    settings = Colocated.parse(list(both.command[5:]))
    assert settings.verify == VerifyArgs.parse(list(apart[0].command[5:]))
    assert replace(settings.draft, verify_address=(VERIFY,)) == DraftArgs.parse(list(apart[1].command[5:]))
    assert settings.verify.core is settings.draft.core is None
    assert gateway.command == apart[2].command
    with pytest.raises(StartupError, match="--colocate"):
        ServeArgs(colocate=True, speculative_algorithm="NONE")
    with pytest.raises(StartupError, match="--core-placement auto is for services apart"):
        ServeArgs(colocate=True, core_placement="auto")


@pytest.mark.parametrize(
    ("given", "is_fixed"),
    [
        ({}, False),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}, True),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 1}, True),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_adaptive": True}, False),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}, False),
        ({"disable_speculation_brake": True}, True),
    ],
)
def test_trees_that_flags_fix_are_not_weighed_by_verify(given: dict[str, Any], is_fixed: bool) -> None:
    args = ServeArgs(**{"speculative_algorithm": "EAGLE3", **given})
    verify, _, _ = launcher.parts_of(args, VERIFY, DRAFT, 1)
    assert VerifyArgs.parse(list(verify.command[5:])).disable_speculation_brake is is_fixed


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, (32, 256)),
        ({"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, (32, 256)),
        ({"speculative_num_steps": 7, "speculative_eagle_topk": 8, "speculative_num_draft_tokens": 48}, (47, 256)),
        ({"speculative_num_steps": 40, "speculative_eagle_topk": 1}, (40, 256)),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 48}, (32, 256)),
        ({"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_adaptive": True}, (32, 256)),
        ({"speculative_copy_tokens": 48}, (48, 256)),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 301}, (300, 300)),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 48, "max_verify_nodes": 60}, (60, 256)),
        ({"speculative_algorithm": "NONE"}, (32, 256)),
    ],
)
def test_verify_takes_drafts_as_large_as_flags_make_them(given: dict[str, Any], limits: tuple[int, int]) -> None:
    args = ServeArgs(**{"speculative_algorithm": "EAGLE3", **given})
    verify = VerifyArgs.parse(list(launcher.parts_of(args, VERIFY, DRAFT, 1)[0].command[5:]))
    assert (verify.max_verify_nodes, verify.max_proposal_nodes) == limits


def test_verify_takes_the_longest_of_adaptive_chains(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text('{"1": {"candidate_steps": [3, 40]}, "8": {"candidate_steps": [0, 1]}}')
    given: dict[str, Any] = {
        "speculative_algorithm": "EAGLE3", "speculative_adaptive": True, "speculative_adaptive_config": str(file)
    }  # fmt: skip
    verify = VerifyArgs.parse(list(launcher.parts_of(ServeArgs(**given), VERIFY, DRAFT, 1)[0].command[5:]))
    assert (verify.max_verify_nodes, verify.max_proposal_nodes) == (40, 256)
    with pytest.raises(
        StartupError, match=f"config is {file}, and a draft then has up to 40 .*; --max-verify-nodes is 39"
    ):
        ServeArgs(**given, max_verify_nodes=39)
    with pytest.raises(StartupError, match="--speculative-adaptive is True, and a draft then has up to 7 nodes"):
        ServeArgs(speculative_algorithm="EAGLE", speculative_adaptive=True, max_verify_nodes=6)
    file.write_text("{}")
    with pytest.raises(StartupError, match="it must be an object by batch size"):
        ServeArgs(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"speculative_num_draft_tokens": 48, "max_verify_nodes": 46},
            "--speculative-num-draft-tokens is 48, and a draft then has up to 47 nodes .*; --max-verify-nodes is 46",
        ),
        (
            {"speculative_num_draft_tokens": 48, "max_proposal_nodes": 46},
            "--speculative-num-draft-tokens is 48, and a draft then has up to 47 nodes .*; --max-proposal-nodes is 46",
        ),
        (
            {
                "speculative_algorithm": "EAGLE3", "speculative_num_steps": 33, "speculative_eagle_topk": 1,
                "max_verify_nodes": 32,
            },
            "--speculative-num-steps is 33, and a draft then has up to 33 nodes .*; --max-verify-nodes is 32",
        ),
    ],
)  # fmt: skip
def test_a_limit_below_what_flags_ask_of_drafts_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        ServeArgs(**{"speculative_algorithm": "NGRAM", **given})


def test_a_draft_models_attention_is_the_targets_unless_it_is_named() -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({"attention_backend": "torch_native"}, "torch_native"),
        ({"attention_backend": "triton", "speculative_draft_attention_backend": "auto"}, "auto"),
    ]
    for given, expected in cases:
        args = ServeArgs(speculative_algorithm="EAGLE", **given)
        _, draft, _ = launcher.parts_of(args, "unix:/v", "unix:/d", 1)
        assert DraftArgs.parse(list(draft.command[5:])).speculative_draft_attention_backend == expected
    ngram_args = ServeArgs(speculative_algorithm="NGRAM", attention_backend="torch_native")
    _, ngram, _ = launcher.parts_of(ngram_args, "unix:/v", "unix:/d", 1)
    assert DraftArgs.parse(list(ngram.command[5:])).speculative_draft_attention_backend is None


def test_flags_of_models_are_for_both_where_a_model_drafts() -> None:
    settings: list[dict[str, Any]] = [
        {"cuda_graph_max_bs": 4}, {"disable_cuda_graph": True}, {"dtype": "float32"},
        {"threads": 3}, {"quantization": "int8"}, {"load_format": "pt"}, {"trust_remote_code": True},
    ]  # fmt: skip
    for given in settings:
        for algorithm, reaches in (("STANDALONE", True), ("EAGLE3", True), ("NGRAM", False)):
            args = ServeArgs(speculative_algorithm=algorithm, **given)
            verify, draft, _ = launcher.parts_of(args, "unix:/v", "unix:/d", 1)
            kept = VerifyArgs.parse(list(verify.command[5:])).as_flags()
            own = DraftArgs.parse(list(draft.command[5:])).as_flags()
            for name, value in given.items():
                flag = name.replace("_", "-")
                assert kept[flag] == str(value)
                assert (own[flag] == str(value)) is reaches


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.ExitStack() as held:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}"):
            launcher.choose_port("127.0.0.1", port, held)
        with pytest.raises(StartupError, match="from 0 to 65535"):
            launcher.choose_port("127.0.0.1", 70_000, held)


@pytest.mark.asyncio
async def test_a_socket_for_grpc_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on unix:{tmp_path}/none/grpc.sock: there is no folder"):
        await run(ServeArgs(port=0, grpc_address=f"unix:{tmp_path}/none/grpc.sock"))


@pytest.mark.asyncio
async def test_a_chosen_port_is_kept_for_who_listens_there() -> None:
    with contextlib.ExitStack() as held:
        port = launcher.choose_port("127.0.0.1", 0, held)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # a part may be started again
            async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port) as server:
                assert server.is_serving()
