"""The tuner: SGLang's grid and rules, its fields, and a run over a server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import mt_bench, shipped, speculative, theory
from bench._grid import BATCH_SIZES, DRAFT_TOKENS, STEPS, TOPKS, Setting, best, grid
from draft_service.drafters.shape import TreeShape, tree_shape
from outrider import launcher
from outrider.args import DraftArgs, ServeArgs, VerifyArgs
from outrider.errors import StartupError


def test_the_grid_is_sglangs() -> None:
    settings = grid(BATCH_SIZES, STEPS, TOPKS, DRAFT_TOKENS)
    assert settings[0] == Setting(1, 0, 0, 0)
    assert all(s.num_draft_tokens <= s.steps * s.topk + 1 for s in settings)
    assert all((s.steps > 0) == (s.topk > 0) == (s.num_draft_tokens > 0) for s in settings)
    one = {(s.steps, s.topk, s.num_draft_tokens) for s in settings if s.batch_size == 1}
    assert len(settings) == len(one) * len(BATCH_SIZES)
    assert {(1, 1, 2), (7, 8, 32), (3, 1, 4)} <= one
    assert not {(1, 1, 4), (3, 0, 0), (0, 0, 2), (5, 4, 32)} & one


def test_what_is_measured_is_what_its_flags_start() -> None:
    settings = [setting for setting in grid([1], STEPS, TOPKS, DRAFT_TOKENS) if setting.speculates]
    assert len(set(settings)) == len(settings)
    for setting in settings:
        asked = setting.asked()
        flags = DraftArgs.parse(shlex.split(setting.flags("EAGLE3")))
        shape = tree_shape(flags, is_head=True, target_architecture="LlamaForCausalLM")
        assert shape == TreeShape(asked["num_steps"], asked["topk"], asked["num_draft_tokens"])
        assert asked["topk"] > 1 or asked["num_draft_tokens"] == asked["num_steps"] + 1


@pytest.mark.parametrize(
    ("algorithm", "settings", "nodes"),
    [("EAGLE3", [Setting(1, 7, 8, 48), Setting(1, 3, 1, 4)], 47), ("NGRAM", [Setting(1, 0, 0, 64)], 63)],
)
def test_its_server_takes_the_largest_setting_whole(algorithm: str, settings: list[Setting], nodes: int) -> None:
    args, rest = speculative.parse(["--speculative-algorithm", algorithm])
    served = ServeArgs.parse(speculative.server_flags(args, settings, rest))
    verify = launcher.parts_of(served, "unix:/v", "unix:/d", 1)[0]
    assert VerifyArgs.parse(list(verify.command[5:])).max_verify_nodes == nodes
    with pytest.raises(StartupError, match=f"and a draft then has up to {nodes} nodes .*; --max-verify-nodes is 8:"):
        speculative.server_flags(args, settings, ["--max-verify-nodes=8"])


def test_ngram_has_draft_tokens_alone() -> None:
    assert grid([2], STEPS, TOPKS, [0, 4], ngram=True) == [Setting(2, 0, 0, 0), Setting(2, 0, 0, 4)]
    assert Setting(2, 0, 0, 4).asked() == {"num_draft_tokens": 4}


@pytest.mark.parametrize(
    ("own", "scope"), [([], "session"), (["--speculative-ngram-scope=global"], "global")], ids=["ours", "own"]
)
def test_ngrams_that_were_measured_are_what_is_pasted(own: list[str], scope: str) -> None:
    setting = Setting(2, 0, 0, 4)
    args, rest = speculative.parse(["--speculative-algorithm=ngram", *own])
    measured = ServeArgs.parse(speculative.server_flags(args, [setting], rest))
    pasted = ServeArgs.parse(shlex.split(speculative.to_paste(setting, args.speculative_algorithm, rest)))
    assert pasted.speculative_ngram_scope == measured.speculative_ngram_scope == scope
    assert pasted.speculative_num_draft_tokens == 4
    assert pasted.disable_speculation_brake  # as for a tree that a request fixes


def test_settings_as_requests_and_flags() -> None:
    plain, tree = Setting(1, 0, 0, 0), Setting(4, 5, 4, 8)
    assert (plain.asked(), plain.flags("EAGLE3")) == ({"enabled": False}, "--speculative-algorithm NONE")
    assert tree.asked() == {"num_steps": 5, "topk": 4, "num_draft_tokens": 8}
    args, rest = speculative.parse(["--speculative-algorithm", "EAGLE3", "--dtype", "float32"])
    assert speculative.server_flags(args, [plain, tree, Setting(2, 7, 1, 8)], rest) == [
        "--speculative-algorithm=EAGLE3", "--max-running-requests=4", "--speculative-num-steps=7",
        "--speculative-eagle-topk=4", "--speculative-num-draft-tokens=8", "--dtype", "float32",
    ]  # fmt: skip


def test_flags_of_services_apart_are_left_out_where_there_are_no_drafts() -> None:
    pasted = speculative.to_paste(Setting(1, 0, 0, 0), "EAGLE3", ["--core-placement", "auto", "--dtype=float32"])
    assert (ServeArgs.parse(shlex.split(pasted)).dtype, "placement" in pasted) == ("float32", False)


def test_what_was_passed_on_is_among_the_flags_to_paste() -> None:
    words = [
        "--model-path",
        "a b",
        "--speculative-draft-model",
        "head's",
        "--quantization=int8",
        "--colocate",
        "--max-sessions=9",
    ]
    args, rest = speculative.parse(["--speculative-algorithm", "NEXTN", *words, "--enable-multi-layer-eagle"])
    tree, plain = (
        ServeArgs.parse(shlex.split(speculative.to_paste(setting, args.speculative_algorithm, rest)))
        for setting in (Setting(1, 2, 2, 4), Setting(1, 0, 0, 0))
    )
    assert (tree.speculative_num_steps, tree.speculative_eagle_topk, tree.speculative_num_draft_tokens) == (2, 2, 4)
    assert (tree.speculative_draft_model_path, tree.enable_multi_layer_eagle, tree.colocate) == ("head's", True, True)
    assert (plain.algorithm, plain.speculative_draft_model_path) == ("NONE", None)
    assert (tree.model_path, tree.quantization) == (plain.model_path, plain.quantization) == ("a b", "int8")


@pytest.mark.parametrize(
    "words", [["--port=8000"], ["--port=1"], ["--host", "0.0.0.0"], ["--api-key", "k"], ["--api-key-file", "f"]]
)
def test_what_would_keep_the_benchmark_out_is_refused(words: list[str]) -> None:
    args, rest = speculative.parse(words)
    with pytest.raises(StartupError, match=f"{words[0].partition('=')[0]} is not for this benchmark"):
        speculative.server_flags(args, [Setting(1, 0, 0, 0)], rest)


@pytest.mark.parametrize("main", [theory.main, mt_bench.main, shipped.main])
@pytest.mark.parametrize("flag", ["--port=8000", "--api-key=k", "--speculative-algorithm=NONE"])
def test_others_refuse_it_too(main: Callable[[list[str]], int], flag: str) -> None:
    with pytest.raises(StartupError, match=f"{flag.partition('=')[0]} .*(is not for this benchmark|leaves nothing)"):
        main([flag])


def test_the_metrics_are_read_where_the_benchmark_has_them() -> None:
    with pytest.raises(StartupError, match="--metrics-port is not for this benchmark"):
        theory.main(["--metrics-port=9000"])


@pytest.mark.parametrize("flag", ["--steps", "--topk", "--num-draft-tokens"])
def test_a_tree_has_no_less_than_nothing(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speculative.parse([flag, "-4"])
    assert f"{flag}: -4 is below 0" in capsys.readouterr().err


def test_the_best_of_each_batch_size() -> None:
    rows = [{"batch_size": batch, "speed": speed} for batch, speed in ((1, 2.0), (1, 3.0), (8, 1.0))]
    assert best(rows) == {1: rows[1], 8: rows[2]}


def test_an_empty_grid_is_refused() -> None:
    with pytest.raises(StartupError, match="holds no setting"):
        speculative.main(
            ["--speculative-algorithm", "EAGLE3", "--steps", "1", "--topk", "1", "--num-draft-tokens", "9"]
        )


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output.jsonl"
    words = ["--batch-size", "1", "--num-draft-tokens", "0", "4", "--num-prompts", "1", "--max-tokens", "16"]
    words += ["--threads", "1"]
    assert speculative.main([*words, "--output", str(output), "--plot", str(tmp_path / "grid.svg")]) == 0
    rows = [json.loads(row) for row in output.read_text().splitlines()]
    assert [row["num_draft_tokens"] for row in rows] == [0, 4]
    for row in rows:
        assert list(row) == [
            "batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time", "speed", "completion_tokens",
        ]  # fmt: skip
        assert row["completion_tokens"] == 16
        assert row["speed"] == pytest.approx(row["acc_length"] / row["step_time"], rel=0.01)
    assert rows[0]["acc_length"] == 1.0
    assert "--threads 1 --speculative-algorithm N" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "grid.svg").read_text()
