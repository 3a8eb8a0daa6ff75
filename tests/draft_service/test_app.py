"""The draft process, started and stopped as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from draft_service.app import cache_kernels, describe, inspect, load, main
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.v1 import verify_pb2 as pb
from tests.draft_service.fake_verify import FakeVerify, opened
from tests.engine.heads import make
from tests.image import hiding_all_but

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from draft_service.app import main
from outrider.args import DraftArgs
sys.exit(main(DraftArgs.parse(sys.argv[1:])))
"""
# Kept between runs, so that only the first one compiles.
ENVIRONMENT = os.environ | {"OUTRIDER_HOME": str(ROOT / ".cache" / "tests")}


@pytest.mark.asyncio
@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_it_serves_drains_when_it_is_asked_to_end_and_exits_with_0(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It runs as in its image, which has no torch."""
    address = f"unix:{tmp_path}/verify.sock"
    async with FakeVerify(address) as verify:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", hiding_all_but("draft") + RUN,
            f"--listen=unix:{tmp_path}/draft.sock", f"--verify-address={address}",
            stdout=asyncio.subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT,
        )  # fmt: skip
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line == f"draft serves NGRAM at unix:{tmp_path}/draft.sock for {address}\n"
        stream = await verify.stream()
        assert str(process.pid) in stream.enlist.drafter_id
        stream.tell(opened=[opened(1, [1, 2, 3, 1, 2], prompt_len=1)])
        await stream.proposals()
        process.send_signal(number)
        (release,) = await stream.releases()
        assert release.reason == pb.RELEASE_REASON_DRAINING
        assert await process.wait() == 0


LOAD_FOR_EVER = """
import sys, time
from draft_service import app
from draft_service.drafters import factory
from outrider.args import DraftArgs

def load(args):
    print("loading", flush=True)
    while True:
        time.sleep(600)

factory.make_drafter = load
sys.exit(app.main(DraftArgs.parse(sys.argv[1:])))
"""


def test_a_signal_ends_it_at_once_while_it_loads(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOAD_FOR_EVER, f"--listen=unix:{tmp_path}/draft.sock"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"loading\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_taken_address_stops_it_with_a_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--listen=no.such.host.invalid:1"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "StartupError: cannot listen on no.such.host.invalid:1" in done.stderr


def test_a_core_that_there_is_not_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.app.configure_logging", lambda name: None)
    monkeypatch.setattr("draft_service.drafters.factory.make_drafter", None)
    with pytest.raises(StartupError, match="--core is 100000"):
        main(DraftArgs(core=100_000, listen="127.0.0.1:0"))


def test_certificates_are_read_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.app.configure_logging", lambda name: None)
    monkeypatch.setattr("draft_service.app.load", None)
    with pytest.raises(StartupError, match="cannot read --ssl-certfile"):
        main(DraftArgs(listen="127.0.0.1:0", ssl_certfile="/nowhere", ssl_keyfile="/nowhere"))


def test_sessions_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    head, target = make.eagle(tmp_path / "head").folder, make.write_target(tmp_path / "target").folder
    args = DraftArgs(
        speculative_draft_model_path=str(head), model_path=str(target), speculative_algorithm="EAGLE", device="cpu",
        max_sessions=2147483647,
    )  # fmt: skip
    with pytest.raises(StartupError, match=r"^no memory for --max-sessions 2147483647"):
        load(args)


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "as before")
    (tmp_path / "file").write_text("")
    cache_kernels(tmp_path / "file" / "numba")


def test_what_verify_must_keep_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make.write_target(tmp_path / "target")
    head = make.eagle3(tmp_path / "head")
    flags = [f"--model-path={target.folder}", f"--speculative-draft-model-path={head.folder}"]
    assert described([*flags, "--speculative-algorithm=EAGLE3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"algorithm": "EAGLE3", "features": "aux:2,4,5"}
    with pytest.raises(StartupError, match="of family eagle3: use EAGLE3"):
        described([*flags, "--speculative-algorithm=EAGLE"])


def test_corpus_files_are_drawn_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make.write_target(tmp_path / "target").folder
    save_words(folder, ["the", "cat", "sat", "on", "a", "mat", "dog", "ran"])
    (tmp_path / "a.txt").write_text("the cat sat on a mat")
    (tmp_path / "b.jsonl").write_text('"the dog ran"\n\n{"text": "a dog sat"}\n')
    corpora = [f"--speculative-ngram-external-corpus-path={tmp_path / name}" for name in ("a.txt", "b.jsonl")]
    flags = [f"--model-path={folder}", "--speculative-ngram-capacity=5000"]
    assert inspected([*flags, *corpora, "--inspect=cat sat on"]) == 0
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[1:]] == ['"a"', '"mat"']
    for name, words in (("c.txt", "cannot read"), ("d.jsonl", "line 1: a string, or"), ("e.jsonl", "line 1: no JSON")):
        (tmp_path / "d.jsonl").write_text('{"txt": 1}')
        (tmp_path / "e.jsonl").write_text("{")
        with pytest.raises(StartupError, match=words):
            inspected([*flags, f"--speculative-ngram-external-corpus-path={tmp_path / name}"])
    with pytest.raises(StartupError, match=r"a text of 6 tokens may take 22 nodes .* of the 20 that are for them"):
        inspected([flags[0], "--speculative-ngram-capacity=40", corpora[0]])
    (tmp_path / "long.txt").write_text("the cat sat on a mat " * 5000)  # the room counts that it takes
    long = f"--speculative-ngram-external-corpus-path={tmp_path / 'long.txt'}"
    assert inspected([flags[0], "--speculative-ngram-capacity=200000", long, "--inspect=cat sat on"]) == 0
    few = "--speculative-ngram-external-corpus-max-tokens=5"
    with pytest.raises(StartupError, match="at most 5 are taken"):
        inspected([*flags, corpora[0], few])


INSPECT = """
import sys
from draft_service.app import inspect
from outrider.args import DraftArgs
args = DraftArgs.parse(sys.argv[1:])
sys.exit(inspect(args, args.inspect))
"""


def test_an_image_for_ngram_drafts_reads_corpus_files(tmp_path: Path) -> None:
    folder = make.write_target(tmp_path / "target").folder
    save_words(folder, ["the", "cat", "sat"])
    (tmp_path / "a.txt").write_text("the cat sat")
    corpus = f"--speculative-ngram-external-corpus-path={tmp_path / 'a.txt'}"
    script = hiding_all_but("draft") + INSPECT
    done = subprocess.run(
        [sys.executable, "-c", script, f"--model-path={folder}", corpus, "--inspect=the cat"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"sat"' in done.stdout


def test_a_package_that_the_image_lacks_is_told_in_a_line() -> None:
    script = hiding_all_but("draft") + "import sys; from outrider.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "draft", "--speculative-algorithm=EAGLE3", "--listen=127.0.0.1:0"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "needs the package 'torch'" in done.stderr


def test_corpus_files_hold_only_tokens_that_the_model_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make.write_target(tmp_path / "target").folder
    save_words(folder, ["the", "cat", "sat", *[f"w{i}" for i in range(make.VOCAB - 3)]])
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["<beyond>"])
    assert tokenizer.get_vocab()["<beyond>"] >= make.VOCAB
    tokenizer.save(str(file))
    (tmp_path / "a.txt").write_text("the cat <beyond>")
    flags = [f"--model-path={folder}", f"--speculative-ngram-external-corpus-path={tmp_path / 'a.txt'}"]
    assert inspected([*flags, "--inspect=the cat"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "─" in line and "beyond" in line] == []


@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE"])
def test_a_tree_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    target = make.write_target(tmp_path / "target").folder
    draft = (make.eagle if algorithm == "EAGLE" else make.write_target)(tmp_path / "draft").folder
    save_words(target, [f"w{i}" for i in range(make.VOCAB)])
    flags = [
        f"--model-path={target}", f"--speculative-draft-model-path={draft}", f"--speculative-algorithm={algorithm}",
        "--speculative-num-steps=3", "--speculative-eagle-topk=2", "--speculative-num-draft-tokens=6",
        "--dtype=float32", "--device=cpu", "--draft-max-total-tokens=512", "--max-sessions=2",
    ]  # fmt: skip
    assert inspected([*flags, "--inspect=w5 w9 w33"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == '"w33"'
    assert len(lines) == 6
    with pytest.raises(StartupError, match="--inspect has 0 tokens"):
        inspected([*flags, "--inspect= "])


def described(words: list[str]) -> int:
    """Does what `outrider draft --describe` does, its log left as tests have it."""
    return describe(DraftArgs.parse(words))


def inspected(words: list[str]) -> int:
    """Does what `outrider draft --inspect` does."""
    args = DraftArgs.parse(words)
    return inspect(args, args.inspect or "")


def save_words(folder: Path, words: list[str]) -> None:
    """A tokenizer of whole words."""
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
