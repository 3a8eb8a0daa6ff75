"""The clients of examples/ against a verify service, each where its tools are installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.deploy.front import Replica, replica
from tests.gateway.fakes import FakeVerify, LoopThread

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SAYS = [11, 12, 13, 14, 15, 16, 17]
FIRST = "11"  # from the prompt's prefill; then two drafts and the target's own
REST = ["[12] [13] 14", "[15] [16] 17", "7 tokens in 2 steps"]
GO_SOURCES = Path("/usr/share/gocode/src/google.golang.org")  # where Debian's packages have them
GO_FOLDERS = [GO_SOURCES / "grpc", GO_SOURCES / "protobuf"]  # the package of the one may come without the other
HAS_GO = all(map(shutil.which, ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")))


@pytest.fixture
def served(tmp_path: Path) -> Generator[tuple[LoopThread, Replica]]:
    """A fake that says SAYS, and waits after its first token."""
    loop, stack = LoopThread(), AsyncExitStack()
    fake = FakeVerify(tmp_path, 100, say=lambda request, choice: SAYS, hold_after=1)
    yield loop, loop.run(stack.enter_async_context(replica(fake)))
    loop.run(stack.aclose())
    loop.close()


def check_client(served: tuple[LoopThread, Replica], command: Sequence[str | Path], folder: Path) -> None:
    """Checks that a client prints the first token before verify makes the second, then the rest, and tells errors."""
    loop, verify = served
    with subprocess.Popen(
        [*command, verify.address, "5", "6"], stdout=subprocess.PIPE, text=True, cwd=folder
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline().strip() == FIRST
        assert not verify.fake.release.is_set()
        loop.run(release(verify.fake))
        assert [line.strip() for line in client.stdout] == REST
    assert client.returncode == 0
    (asked,) = verify.fake.requests
    assert asked.prompt_tokens == b"\5\0\0\0\6\0\0\0"
    assert asked.sampling.HasField("temperature")
    assert asked.sampling.temperature == 0
    loop.run(verify.set_serving(False))
    ended = subprocess.run([*command, "127.0.0.1:1"], capture_output=True, text=True, cwd=folder, check=False)
    assert ended.returncode == 1
    assert "UNAVAILABLE" in ended.stderr or "Unavailable" in ended.stderr
    for no_id in ("x", "99999999999"):
        ended = subprocess.run(
            [*command, "127.0.0.1:1", no_id], capture_output=True, text=True, cwd=folder, check=False
        )
        assert (ended.returncode != 0, ended.stdout, ended.stderr.count("\n")) == (True, "", 1)


async def release(fake: FakeVerify) -> None:
    """Lets verify go on after the first token."""
    await asyncio.wait_for(fake.holding.wait(), 30)
    fake.release.set()


def test_python(served: tuple[LoopThread, Replica]) -> None:
    check_client(served, [sys.executable, EXAMPLES / "python" / "generate.py"], ROOT)


@pytest.mark.skipif(
    not (HAS_GO and all(folder.is_dir() for folder in GO_FOLDERS)),
    reason="needs Debian's golang-go, protobuf-compiler, protoc-gen-go, protoc-gen-go-grpc, golang-google-grpc-dev and "
    "golang-google-protobuf-dev (golang-github-golang-protobuf-1-5-dev has it)",
)
def test_go(served: tuple[LoopThread, Replica], tmp_path: Path) -> None:
    """The client is built from Debian's sources of gRPC below GOPATH, so that no module is fetched."""
    ours = tmp_path / "go" / "src" / "example.com" / "outrider"
    shutil.copytree(EXAMPLES / "go", ours)
    shutil.copy(Path(__file__).with_name("old_codec.go"), ours)
    environment = {
        **os.environ, "PROTOS": str(ROOT / "protos"), "GOPATH": f"{tmp_path / 'go'}:/usr/share/gocode",
        "GO111MODULE": "off", "GOFLAGS": "", "GOCACHE": str(Path.home() / ".cache" / "go-build"),
    }  # fmt: skip
    for command in (["./generate.sh"], ["go", "vet", "."], ["go", "build", "-o", "generate", "."]):
        ended = subprocess.run(command, cwd=ours, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    check_client(served, [ours / "generate"], ours)


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("node", "npm"))), reason="needs node and npm")
def test_typescript(served: tuple[LoopThread, Replica], tmp_path: Path) -> None:
    ours = tmp_path / "typescript"
    shutil.copytree(EXAMPLES / "typescript", ours, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(["npm", "install", "--no-audit"], cwd=ours, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install: {installed.stderr[-200:]}")
    built = subprocess.run(["npm", "run", "build"], cwd=ours, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout
    check_client(served, ["node", ours / "generate.js", ROOT / "protos"], ours)
