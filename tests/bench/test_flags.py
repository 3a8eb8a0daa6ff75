"""What stands on a benchmark's command line is looked at before anything is measured."""

from __future__ import annotations

import argparse
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import gateway, goodput, layers, peers, serve, speculative, useless, wire
from bench._flags import (
    above_zero,
    counts,
    json_object,
    natural,
    not_below_zero,
    output_file,
    output_folder,
    own_and_other,
    parser_of,
    rates,
    setting,
    shapes,
)
from bench._output import write_json
from bench._prompts import from_file
from bench.goodput import trees
from outrider.errors import StartupError


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_a_time_is_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        above_zero(text)
    assert above_zero("0.5") == 0.5


def test_flags_of_the_command_that_is_started_are_those_unknown_and_all_after_two_dashes() -> None:
    parser = parser_of("mt_bench", "Some.")
    parser.add_argument("--tokens", type=natural, default=8)
    args, other = own_and_other(parser, ["--threads", "1", "--tokens", "4", "--", "--tokens", "5"])
    assert (args.tokens, other) == (4, ["--threads", "1", "--tokens", "5"])
    assert own_and_other(parser, ["--", "--threads", "1"]) == (argparse.Namespace(tokens=8), ["--threads", "1"])


def test_zero_may_be_told_where_nothing_may_be_wanted() -> None:
    assert (natural("0"), not_below_zero("0")) == (0, 0.0)
    for text in ("-1", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            natural(text)
        with pytest.raises(argparse.ArgumentTypeError):
            not_below_zero(text)


@pytest.mark.parametrize("kind", [counts, rates, natural, above_zero, json_object])
def test_what_is_of_another_kind_is_said_in_words(kind: Callable[[str], Any]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a "):
        kind("many")


def test_figures_go_to_a_file_in_a_folder_that_is_there(tmp_path: Path) -> None:
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    for path in (tmp_path, tmp_path / "none" / "new.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="folder"):
            output_file(str(path))


def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="/proc/figures cannot be written"):
        output_file("/proc/figures")
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("{}")
    link.symlink_to(tmp_path / "new.json")
    assert [output_file(str(path)) for path in (kept, link)] == [kept, link]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "link.json"]
    assert kept.read_text() == "{}"


def test_what_fails_to_be_written_at_the_end_is_told_in_a_line() -> None:
    with pytest.raises(StartupError, match=r"^/dev/full cannot be written: No space left on device$"):
        write_json(output_file("/dev/full"), {"figure": 1})


def test_a_file_has_its_old_figures_until_it_has_the_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    file, link = tmp_path / "file.json", tmp_path / "link.json"
    link.symlink_to(file)
    write_json(link, {"figure": 1})
    file.chmod(0o604)
    write_json(link, {"figure": 2})
    assert (link.is_symlink(), file.stat().st_mode & 0o777) == (True, 0o604)
    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(StartupError, match=f"^{link} cannot be written: No space left on device$"):
        write_json(link, {"figure": 3})
    assert json.loads(file.read_text()) == {"figure": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.json", "link.json"]


def test_a_folder_is_made_and_no_file(tmp_path: Path) -> None:
    assert output_folder(str(tmp_path / "a" / "b")).is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(argparse.ArgumentTypeError, match="file cannot be a folder"):
        output_folder(str(tmp_path / "file"))


@pytest.mark.parametrize(
    "words",
    [
        ["--minutes", "-1"],
        ["--minutes", "nan"],
        ["--prefill-tokens", "-5"],
        ["--startup-timeout-s", "nan"],
        ["--logs", __file__],
        ["--install", __file__],
    ],
)
def test_peers_refuse_what_cannot_be_measured(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        peers.parse(words)
    assert refused.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words", "says"),
    [
        (goodput.main, ["--verify-ms", "7.5"], "--verify-ms is for --stand-in"),
        (goodput.main, ["--draft-ms", "4.9"], "--draft-ms is for --stand-in"),
        (goodput.main, ["--accept-length", "2"], "--accept-length is for --stand-in"),
        (goodput.main, ["--stand-in", "--threads", "2"], "--threads is for real networks"),
        (goodput.main, ["--stand-in", "--model-path", "x"], "--model-path is for real networks"),
        (goodput.main, ["--beside", "none"], "argument --beside: none is not a tree, STEPS,BRANCHES,TOKENS"),
        (goodput.main, ["--beside", "1,1,2/3,1,4"], "argument --beside: 1,1,2/3,1,4 is not a tree"),
        (goodput.main, ["--stand-in", "--", "--bogus"], "--bogus is for `outrider draft`"),
        (useless.main, ["--drafter", "ngram", "--draft-ms", "0"], "--draft-ms is for --drafter wrong"),
        (speculative.main, ["--steps", "3"], "--steps is for trees"),
        (speculative.main, ["--speculative-algorithm", "ngram", "--topk", "1"], "--topk is for trees"),
        (gateway.main, ["--tokens", "1"], "--tokens is 1; a long answer has more"),
    ],
)
def test_what_would_change_nothing_is_refused(
    main: Callable[[list[str]], int], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    assert f"error: {says}" in capsys.readouterr().err


def test_a_chain_has_a_token_for_each_step_and_its_root() -> None:
    assert shapes("1,1,2/3,1,4/3,4,8") == [(1, 1, 2), (3, 1, 4), (3, 4, 8)]
    for text, most in (("1,1,9", 2), ("3,1,2", 4)):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is a chain, .* make {most} tokens$"):
            shapes(text)


def test_a_tree_has_no_more_tokens_than_its_branches_make() -> None:
    for text, most in (("1,2,4", 3), ("2,2,8", 7), ("3,4,1", 37)):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} has . tokens; such trees have 2 to {most}$"):
            shapes(text)


def test_goodput_gives_flags_of_models_to_drafters_that_have_one() -> None:
    for name, drafts in (("NGRAM", False), ("eagle3", True), ("STANDALONE", True)):
        assert goodput.drafts_by_model([f"--speculative-algorithm={name}"]) is drafts
    assert not goodput.drafts_by_model(["--speculative-ngram-scope=session"])


def test_goodput_has_the_flags_of_its_networks_alone() -> None:
    stand_in, real = goodput._parse(["--stand-in"], []), goodput._parse([], ["--speculative-algorithm=NGRAM"])
    assert (stand_in.verify_ms, stand_in.draft_ms, stand_in.accept_length, stand_in.threads) == (7.5, 4.9, 3.69, None)
    assert (real.verify_ms, real.draft_ms, real.accept_length, real.threads) == (None, None, None, 2)


@pytest.mark.parametrize("parse", [peers.parse, serve.parse, speculative.parse])
def test_figures_do_not_take_the_place_of_the_prompts(parse: Callable[[list[str]], Any], tmp_path: Path) -> None:
    prompts, link = tmp_path / "prompts.jsonl", tmp_path / "link.jsonl"
    prompts.write_text('{"prompt": "one"}')
    link.symlink_to(prompts)
    with pytest.raises(StartupError, match="which is the file of --prompts"):
        parse(["--prompts", str(prompts), "--output", str(link)])
    assert prompts.read_text() == '{"prompt": "one"}'


@pytest.mark.parametrize("text", ["nan", "-3", "8.5"])
def test_goodput_refuses_what_its_stand_in_cannot_play(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        goodput.main(["--stand-in", "--accept-length", text])
    assert "7 steps give 1 to 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--verify-ms", "0"], "--verify-ms"),
        (["--seconds", "nan"], "--seconds"),
        (["--num-draft-tokens", "1"], "--num-draft-tokens is 1"),
        (["--num-draft-tokens", "9"], "--num-draft-tokens is 9; --num-steps 5 and --topk 1 give 6"),
        (["--num-draft-tokens", "3"], "--num-draft-tokens is 3; --num-steps 5 and --topk 1 give 6"),
        (["--topk", "2", "--num-steps", "2", "--num-draft-tokens", "8"], "--num-steps 2 and --topk 2 give 2 to 7"),
        (["--topk", "2", "--num-draft-tokens", "3"], "give 1 to 3"),
        (["--output", "/nowhere/x.json"], "does not exist"),
        (["--output", "/proc/x.json"], "cannot be written"),
        (["--picture", "x.svg", "--batch", "2"], "--picture draws one session; --batch is 2"),
    ],
)
def test_the_wire_refuses_what_cannot_be_played(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        wire.main(words)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--tokens", "0"), ("--threads", "1025")])
def test_a_step_has_tokens_and_a_process_threads(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        layers.main([flag, value])
    assert refused.value.code == 2
    assert f"argument {flag}: {value} is not at" in capsys.readouterr().err


def test_a_setting_is_told_as_it_was_given() -> None:
    args = argparse.Namespace(batch=[1, 2], stand_in=True, model_path=None, output="x", fixed=trees("1,1,2/2,1,3"))
    assert setting(args) == {"batch": [1, 2], "stand_in": True, "model_path": None, "fixed": ["1,1,2", "2,1,3"]}
    assert json.dumps(setting(args))


def test_prompts_may_hold_what_else_ends_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert from_file(file)[0].messages[0]["content"] == "a\u2028b"
    for turns in (5, {"a": 1}, "abc", []):
        file.write_text(json.dumps({"turns": turns}), encoding="utf-8")
        with pytest.raises(StartupError, match="`turns`"):
            from_file(file)
