"""Accept length by category: of exported heads, in this process and through the services."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.args import ServeArgs
from outrider.cli import main as outrider
from outrider.errors import StartupError
from outrider.scrape import Scrape, parse
from tests.training.rig import head_args
from training.args import EvalArgs, PackArgs
from training.evaluate import main
from training.export import export
from training.kinds import ALGORITHMS
from training.loop import Trainer
from training.packing import main as pack_main
from training.ranks import Ranks
from training.served import accepted_between, ask_all


def trained(algorithm: str, target: Path, data: Path, output: Path) -> Trainer:
    trainer = Trainer(head_args(algorithm, target, data, output), Ranks(0, 1, "cpu"))
    trainer._save("checkpoint.pt")
    return trainer


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"category": "writing", "turns": ["Hello, world!", "And now?"]}, {"category": "math", "turns": ["1 + 2"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return path


def eval_args(target: Path, head: Path, prompts: Path, **changes: Any) -> EvalArgs:
    settings: dict[str, Any] = {
        "model_path": str(target), "head": str(head), "prompts": str(prompts), "answer_tokens": 16, "dtype": "float32",
        "device": "cpu", "threads": 1, "output": str(head / "figures.json"),
    }  # fmt: skip
    return EvalArgs(**(settings | changes))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_kind_is_measured(
    algorithm: str, target: Path, data: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(algorithm, target, data, tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "README.md").write_text("Measured before.")
    assert main(eval_args(target, tmp_path, prompts, tree_steps=2, tree_topk=2, tree_tokens=4)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "export", "figures.json"}
    assert (tmp_path / "export" / "README.md").read_text() == "Measured before."
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == ["writing", "math", "all"]
    total = figures["all"]
    assert 0 < total["chain"]["num_rounds"] <= total["chain"]["num_committed"]
    # Every answer but its first token, whatever drafts.
    assert total["chain"]["num_committed"] == total["tree"]["num_committed"]
    assert (
        total["chain"]["num_committed"]
        == figures["writing"]["chain"]["num_committed"] + (figures["math"]["chain"]["num_committed"])
    )
    assert "| all |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_services_commit_what_was_computed(target: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    trained("EAGLE3", target, data, tmp_path)
    changes: dict[str, Any] = {"tree_tokens": 0, "max_prompts": 2}
    assert main(eval_args(target, tmp_path, prompts, **changes)) == 0
    computed = json.loads((tmp_path / "figures.json").read_text())["all"]["chain"]
    assert main(eval_args(target, tmp_path, prompts, serve=True, **changes)) == 0
    served = json.loads((tmp_path / "figures.json").read_text())["all"]["chain"]
    assert served["num_rounds"] >= computed["num_rounds"]
    assert served["num_committed"] == pytest.approx(computed["num_committed"], abs=2)


@pytest.mark.slow
def test_the_services_tell_how_far_drafts_were_accepted(target: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    args = eval_args(target, target, prompts, serve=True, tree_tokens=0, output=str(output))  # it drafts for itself
    assert main(args) == 0
    figures = json.loads(output.read_text())
    for category in figures.values():
        served = category["chain"]
        assert sum(served["accepted_by_step"]) == served["num_committed"] - served["num_rounds"]
        assert served["accepted_by_step"] == sorted(served["accepted_by_step"], reverse=True)
    assert len(figures["all"]["chain"]["accepted_by_step"]) == args.steps


@pytest.mark.parametrize("load_format", ["pt", "dummy"])
def test_the_form_of_the_targets_weights_is_not_the_heads(
    target: Path, prompts: Path, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(settings: ServeArgs, when_ready: object) -> int:
        assert (settings.load_format, settings.speculative_draft_load_format) == (load_format, "auto")
        return 0

    monkeypatch.setattr("training.served.serve", serve)
    args = eval_args(target, target, prompts, load_format=load_format)
    assert asyncio.run(ask_all(args, target, "EAGLE3", (3, 1, 4), [])) == []


def test_what_was_accepted_is_counted_by_step_between_two_scrapes() -> None:
    def scrape(*counts: int) -> Scrape:
        name = "outrider_spec_accepted_tokens_per_position_total"
        samples = (f'{name}{{position="{i}"}} {count}\n' for i, count in enumerate(counts, 1))
        return parse(f"# TYPE {name.removesuffix('_total')} counter\n" + "".join(samples), 0.0)

    ten = (9, 8, 7, 6, 5, 4, 3, 2, 1, 1)
    assert accepted_between(scrape(), scrape(*ten)) == list(ten)
    assert accepted_between(scrape(2, 1), scrape(*ten)) == [7, 7, *ten[2:]]
    assert accepted_between(scrape(*ten), scrape(11, 9, *ten[2:])) == [2, 1]
    assert accepted_between(scrape(*ten), scrape(*ten)) == []


def test_figures_that_cannot_be_written_are_refused_before_anything_is_measured(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.evaluate.resolve_model", None)
    for output in ("/proc/x.json", str(tmp_path), f"{prompts}/x.json"):
        with pytest.raises(StartupError, match="the figures cannot be written to"):
            main(eval_args(target, tmp_path, prompts, output=output))


def test_a_head_that_is_not_there_is_refused_at_once(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.evaluate.resolve_model", None)
    with pytest.raises(StartupError, match=r"--head is .*nope', which is no folder"):
        main(eval_args(target, tmp_path / "nope", prompts))


def test_chains_may_be_longer_than_trees_are_deep(target: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    trained("NEXTN", target, data, tmp_path)
    assert main(eval_args(target, tmp_path, prompts, steps=9, tree_steps=2, tree_topk=2, tree_tokens=4)) == 0


def test_a_head_is_packed_for_shipping(target: Path, data: Path, tmp_path: Path) -> None:
    trained("NEXTN", target, data, tmp_path)
    words = ["train", "export", f"--model-path={target}", f"--checkpoint={tmp_path}", f"--output={tmp_path / 'head'}"]
    assert outrider(words) == 0
    path = tmp_path / "packed.safetensors"
    args = PackArgs(head=str(tmp_path / "head"), algorithm="NEXTN", model_path=str(target), output=str(path))
    assert pack_main(args) == 0
    assert path.stat().st_size < (tmp_path / "head" / "model.safetensors").stat().st_size
    assert path.with_suffix(".md").read_text().startswith("# NEXTN draft head")
    settings: dict[str, Any] = {"head": str(tmp_path / "head"), "model_path": str(target), "algorithm": "NEXTN"}
    with pytest.raises(StartupError, match="cannot be packed"):
        pack_main(PackArgs(**settings, output=f"{path}/x.safetensors"))
    with pytest.raises(StartupError, match=r"nowhere/config.json does not exist"):
        pack_main(PackArgs(head=str(tmp_path / "nowhere"), model_path=str(target), output=str(path)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_head_is_packed_as_what_it_is(
    algorithm: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(algorithm, target, data, tmp_path)
    export(trainer.kind, trainer.checkpoint, tmp_path / "head", target=target)
    monkeypatch.setattr("training.packing.SHIPPED", tmp_path / "shipped")
    for other in ALGORITHMS:
        args = PackArgs.parse([f"--head={tmp_path / 'head'}", f"--algorithm={other}", f"--model-path={target}"])
        if other == algorithm:
            assert pack_main(args) == 0
        else:
            with pytest.raises(StartupError, match=rf"head is {algorithm}, and --algorithm is {other};"):
                pack_main(args)
    packed = [path.name for path in (tmp_path / "shipped").glob("*.safetensors")]
    assert packed == [f"{target.name}-{algorithm.lower()}.safetensors"]


def test_the_command_lists_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider(["train"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name}" in listed for name in ("data", "head", "eval", "export", "pack", "token-map"))
    assert outrider(["train", "nothing"]) == 2
    assert outrider(["train", "head"]) == 2
    assert "--data and --output are needed" in capsys.readouterr().err
