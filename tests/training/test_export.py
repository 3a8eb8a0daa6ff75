"""Exports are the published formats, and the engine reads back the head that was trained."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.models.heads.load import HeadFolder, load_head
from engine.models.heads.token_map import load_token_map, target_tokens
from outrider.errors import StartupError, Unfinished
from tests.engine.disk import FULL, full_disk
from tests.engine.tiny import save_model
from tests.training.rig import VOCAB_SIZE, head_args, with_other_weights
from training.args import DataArgs, ExportArgs, HeadArgs, TokenMapArgs
from training.batches import Batch
from training.card import card
from training.data.build import asked
from training.data.conversations import COMPOSED, Record
from training.data.store import DataFolder, read_facts
from training.export import export
from training.export import main as export_main
from training.frequencies import main as token_map_main
from training.kinds import EAGLE3
from training.loop import Trainer, facts_of, told_of
from training.losses import unrolled
from training.ranks import Ranks
from training.target_states import target_id

FACTS = ("format", "seed", "target", "vocab_size")
# Six heads as the target has, and three that copy, of 16.
HIDDEN, FFN, QUERY, DRAFTED = 96, 160, 144, 200
ATTENTION = {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight"}
MLP = {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight"}


def exported(algorithm: str, target: Path, data: Path, output: Path) -> tuple[Trainer, dict[str, Any], dict[str, Any]]:
    """A head after no step, its config.json and its tensors."""
    trainer = Trainer(head_args(algorithm, target, data, output), Ranks(0, 1, "cpu"))
    trainer._save("checkpoint.pt")
    folder = output / "published"
    assert export_main(ExportArgs(model_path=str(target), checkpoint=str(output), output=str(folder))) == 0
    return trainer, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def below(prefix: str, names: set[str]) -> set[str]:
    return {prefix + name for name in names}


def test_eagle(target: Path, data: Path, tmp_path: Path) -> None:
    _, config, tensors = exported("EAGLE", target, data, tmp_path)
    assert tensors.keys() == below("layers.0.", ATTENTION | MLP) | {"fc.weight", "fc.bias"}
    assert tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (QUERY, HIDDEN)
    assert (config["architectures"], config["num_hidden_layers"], config["bias"]) == (
        ["LlamaForCausalLMEagle"],
        1,
        True,
    )
    assert (config["hidden_size"], config["num_key_value_heads"], config["vocab_size"]) == (HIDDEN, 9, VOCAB_SIZE)


def test_eagle3(target: Path, data: Path, tmp_path: Path) -> None:
    trainer, config, tensors = exported("EAGLE3", target, data, tmp_path)
    layer = below("midlayer.", ATTENTION | MLP | {"input_layernorm.weight", "hidden_norm.weight"})
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    assert tensors.keys() == layer | norms | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (QUERY, 2 * HIDDEN)
    assert tensors["lm_head.weight"].shape == (DRAFTED, HIDDEN)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert tensors["t2d"].shape == (VOCAB_SIZE,)
    tokens = target_tokens(tensors["d2t"], tensors["t2d"], VOCAB_SIZE, "export")
    assert torch.equal(tokens, trainer.checkpoint.drafted)
    assert torch.equal(tokens, tokens.sort().values)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["fc_norm"], config["tie_word_embeddings"]) == (DRAFTED, True, False)
    # Named by layers whose outputs are read, one less than those entered.
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_nextn(target: Path, data: Path, tmp_path: Path) -> None:
    _, config, tensors = exported("NEXTN", target, data, tmp_path)
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"}
    assert tensors.keys() == below("model.layers.0.", ATTENTION | MLP | own)
    assert (config["num_nextn_predict_layers"], config["num_hidden_layers"]) == (1, 1)


def test_standalone_is_a_whole_model(target: Path, data: Path, tmp_path: Path) -> None:
    _, config, tensors = exported("STANDALONE", target, data, tmp_path)
    assert (config["architectures"], config["num_hidden_layers"]) == (["LlamaForCausalLM"], 2)
    layers = ATTENTION | MLP | {"input_layernorm.weight"}
    outer = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert tensors.keys() == below("model.layers.0.", layers) | below("model.layers.1.", layers) | outer
    assert (tmp_path / "published" / "tokenizer.json").is_file()


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN"])
def test_the_engine_drafts_the_same_tokens(algorithm: str, target: Path, data: Path, tmp_path: Path) -> None:
    trainer, _, tensors = exported(algorithm, target, data, tmp_path)
    assert all(t.dtype is torch.bfloat16 for name, t in tensors.items() if name not in {"d2t", "t2d"})
    assert HeadFolder.open(tmp_path / "published").config.family == trainer.kind.config.family
    loaded, features = load_head(tmp_path / "published", target, max_len=64, dtype="float32")
    assert features == trainer.kind.features
    batch = Batch.of(trainer.dataset.examples(1, held_out=False)[:4])
    states = trainer.target(batch.conversations)
    with torch.no_grad():
        # What was trained, rounded as it is stored.
        for parameter in trainer.network.tensors.values():
            parameter.copy_(parameter.bfloat16())
    with torch.inference_mode():
        own = trainer.network.built()
        for mine, theirs in zip(
            unrolled(trainer.kind, own, batch, states, 3), unrolled(trainer.kind, loaded, batch, states, 3), strict=True
        ):
            logits = loaded.logits(theirs.outputs)
            if loaded.tokens is None:
                logits = logits[:, trainer.checkpoint.drafted]
            torch.testing.assert_close(own.logits(mine.outputs), logits, atol=1e-4, rtol=1e-4)
            assert torch.equal(own.logits(mine.outputs).argmax(-1), logits.argmax(-1))


def test_a_card_tells_how_to_make_a_head_again(target: Path, data: Path, tmp_path: Path) -> None:
    trainer, _, _ = exported("EAGLE", target, data, tmp_path)
    at = trainer.checkpoint
    at.history = [{"seen": 1000 * i, "chain": 1.0 + i / 100} for i in range(31)]
    at.seen = 30_000  # of 4,000 asked for: the schedule goes by these
    text = card(at, "tiny")
    assert text.startswith("# EAGLE draft head for tiny\n")
    assert "| 30,000 | 1.300 |" in text
    assert text.count("\n| ") == 1 + 8
    of_data, line = [line for line in text.splitlines() if line.startswith("$ ")]
    words = shlex.split(line)[1:]
    assert words[:3] == ["outrider", "train", "head"]
    again = HeadArgs.parse(words[3:])
    assert facts_of(again, target) | told_of(again) | {"made_with": []} == at.facts
    assert (again.model_path, again.tokens, again.dtype) == (str(target), 4000, "float32")
    assert "What else the data was made with is not known." in text  # an older data.json says no more
    made = DataArgs.parse(shlex.split(of_data)[4:])
    assert (made.model_path, made.dtype, made.load_format) == (str(target), "float32", "auto")
    assert (tmp_path / "published" / "README.md").is_file()


def test_a_card_tells_how_to_make_its_data_again(target: Path, data: Path, tmp_path: Path) -> None:
    exported("NEXTN", target, data, tmp_path / "head")
    settings: dict[str, Any] = {"model_path": str(target), "dtype": "float32", "output": "data", "batch_size": 8}
    calls = [
        DataArgs(**settings, tokens=90_000, seed=3, sampled_share=0.2, prompts=("a b.jsonl", "c"), exclude=("none",)),
        DataArgs(**settings, tokens=900, seed=3, quantization="int8"),
    ]
    facts = read_facts(data)
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    (folder / "data.json").unlink()
    unused = replace(calls[0], prompts=("typo.jsonl",))
    same = replace(calls[1], tokens=800, share="1/2", threads=1, device="cpu")
    held: list[int] = []
    for number, call in enumerate((unused, calls[0], unused, calls[1], same)):
        store = DataFolder(folder, {name: facts[name] for name in FACTS}, asked=asked(call))
        held.append(store.num_answer_tokens)
        if call is not unused:  # which ends before it has made anything
            store.add(900 + number, [Record(900 + number, COMPOSED, 0.0, [5] * 8, [(3, 8)], key=900 + number)])
            store.flush()
    trainer = Trainer(head_args("NEXTN", target, folder, tmp_path / "head"), Ranks(0, 1, "cpu"))
    text = card(trainer.checkpoint, "tiny")
    made = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("$ outrider train data ")]
    # The first ended early: what it made is what it is to make again.
    assert [DataArgs.parse(words[3:]) for words in made] == [replace(calls[0], tokens=held[3]), calls[1]]
    assert "not known" not in text


def test_a_card_tells_what_a_head_began_from_and_training_goes_on_without(
    target: Path, data: Path, tmp_path: Path
) -> None:
    exported("NEXTN", target, data, tmp_path / "first")
    words, begun = ("NEXTN", target, data, tmp_path / "second"), str(tmp_path / "first" / "published")
    Trainer(head_args(*words, initial_head=begun), Ranks(0, 1, "cpu"))._save("checkpoint.pt")
    for other in (None, begun):
        at = Trainer(head_args(*words, initial_head=other), Ranks(0, 1, "cpu")).checkpoint
        assert f" --initial-head {begun}" in card(at, "tiny")
    with pytest.raises(StartupError, match=f"began with --initial-head {begun}, now it is shipped; leave it out"):
        Trainer(head_args(*words, initial_head="shipped"), Ranks(0, 1, "cpu"))
    with pytest.raises(StartupError, match=r"first/checkpoint.pt began without --initial-head, now it is /nonexistent"):
        Trainer(head_args(*words[:3], tmp_path / "first", initial_head="/nonexistent"), Ranks(0, 1, "cpu"))


def test_a_card_tells_the_tokens_that_were_asked_for_last(target: Path, data: Path, tmp_path: Path) -> None:
    exported("NEXTN", target, data, tmp_path)
    trainer = Trainer(head_args("NEXTN", target, data, tmp_path, tokens=9000), Ranks(0, 1, "cpu"))
    assert " --tokens 9000 " in card(trainer.checkpoint, "tiny")
    trainer.checkpoint.seen = 5000
    trainer._save("checkpoint.pt")
    # It ends where it stands, and the schedule was another's.
    at = Trainer(head_args("NEXTN", target, data, tmp_path, tokens=5000), Ranks(0, 1, "cpu")).checkpoint
    assert " --tokens 9000 " in card(at, "tiny")
    del at.facts["tokens"]  # older ones have none
    assert " --tokens 5000 " in card(at, "tiny")


def test_a_card_tells_what_was_measured(target: Path, data: Path, tmp_path: Path) -> None:
    exported("NEXTN", target, data, tmp_path)
    rounds = {"num_rounds": 10, "num_committed": 17, "accept_length": 1.7}
    none = {"num_rounds": 0, "num_committed": 0, "accept_length": 1.0}
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"math": {"chain": rounds, "tree": none}, "all": {"chain": rounds, "tree": none}}))
    output = str(tmp_path / "head")
    settings: dict[str, Any] = {"model_path": str(target), "checkpoint": str(tmp_path), "output": output}
    assert export_main(ExportArgs(**settings, figures=str(figures))) == 0
    assert "\n| math | 1.70 |  |\n| all | 1.70 |  |\n" in (tmp_path / "head" / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "it is not JSON|Expecting"),
        ("[]", "it has no `all`"),
        ("{}", "it has no `all`"),
        ('{"all": {"chain": {"num_rounds": 1}}}', "all.chain.accept_length is no number"),
        ('{"all": {"chain": {"num_rounds": 1, "accept_length": 1.5}}}', "all.tree.num_rounds is no number"),
        ('{"math": 5, "all": {}}', "math.chain.num_rounds is no number"),
        ('{"all": {"chain": {"num_rounds": "1", "accept_length": 1.5}}}', "all.chain.num_rounds is no number"),
    ],
)
def test_figures_of_another_form_are_told(text: str, fault: str, target: Path, data: Path, tmp_path: Path) -> None:
    exported("NEXTN", target, data, tmp_path)
    (tmp_path / "figures.json").write_text(text)
    args = ExportArgs(
        model_path=str(target), checkpoint=str(tmp_path), output=str(tmp_path / "head"),
        figures=str(tmp_path / "figures.json"),
    )  # fmt: skip
    with pytest.raises(StartupError, match=f"no file of figures that .* wrote: {fault}"):
        export_main(args)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("most_bytes", [10, 5000])
def test_a_full_disk_leaves_the_export_before_and_nothing_else(
    most_bytes: int, target: Path, data: Path, tmp_path: Path
) -> None:
    trainer, _, _ = exported("NEXTN", target, data, tmp_path)
    before = untouched(tmp_path)
    with full_disk(most_bytes), pytest.raises(Unfinished, match=f"cannot be written to .*published: .*{FULL}"):
        export(trainer.kind, trainer.checkpoint, tmp_path / "published", target=target)
    assert untouched(tmp_path) == before
    assert not (tmp_path / "published.partial").exists()


def test_a_checkpoint_of_another_target_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    exported(EAGLE3, target, data, tmp_path / "head")
    save_model("llama", tmp_path / "other", vocab_size=96)
    (tmp_path / "other" / "config.json").write_text(
        (tmp_path / "other" / "config.json").read_text().replace('"intermediate_size": 160', '"intermediate_size": 128')
    )
    args = ExportArgs(model_path=str(tmp_path / "other"), checkpoint=str(tmp_path / "head"), output=str(tmp_path / "x"))
    with pytest.raises(StartupError, match="another target"):
        export_main(args)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_token_map_is_the_most_frequent_tokens_of_the_answers(suffix: str, data: Path, tmp_path: Path) -> None:
    path = tmp_path / f"map{suffix}"
    assert token_map_main(TokenMapArgs(data=str(data), output=str(path), size=30)) == 0
    tokens = load_token_map(str(path), VOCAB_SIZE)
    assert len(tokens) == 30


def test_a_map_needs_data(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no training data"):
        token_map_main(TokenMapArgs(data=str(tmp_path), output=str(tmp_path / "map.pt")))


def test_a_map_on_a_full_disk(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    with full_disk(50), pytest.raises(Unfinished, match=f"the map cannot be written to {path}: .*{FULL}"):
        token_map_main(TokenMapArgs(data=str(data), output=str(path)))
    assert not list(tmp_path.glob("map*"))


def test_an_export_asks_for_nothing_that_it_does_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs nothing: the weights are all that it needs of a target."""
    words = ["--checkpoint=head", "--output=export"]
    assert ExportArgs.parse([*words, "--load-format=pt"]).load_format == "pt"
    for flag in ("--dtype=float32", "--device=cpu", "--threads=1"):
        with pytest.raises(SystemExit):
            ExportArgs.parse([*words, flag])
        assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def untouched(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["notes.txt", "README.md/notes.txt", "src/model.safetensors"])
def test_a_folder_that_holds_anything_else_is_not_replaced(name: str, target: Path, data: Path, tmp_path: Path) -> None:
    trainer, _, _ = exported("NEXTN", target, data, tmp_path)
    folder = tmp_path / "mine"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("years of work")
    (folder / "config.json").write_text("{}")
    (tmp_path / "export").symlink_to(folder)
    before, first = untouched(folder), name.partition("/")[0]
    with pytest.raises(StartupError, match=rf"{folder} holds {first}, which is no export's"):
        export(trainer.kind, trainer.checkpoint, folder, target=target)
    # Before anything is read: there is no checkpoint.
    with pytest.raises(StartupError, match=rf"{folder} holds {first}"):
        export_main(ExportArgs(model_path=str(target), checkpoint=str(tmp_path / "none"), output=str(folder)))
    with pytest.raises(StartupError, match=rf"{tmp_path}/export holds {first}"):
        Trainer(head_args("NEXTN", target, data, tmp_path), Ranks(0, 1, "cpu"))
    assert untouched(folder) == before


def test_what_is_no_export_is_not_replaced(target: Path, data: Path, tmp_path: Path) -> None:
    trainer, _, _ = exported("NEXTN", target, data, tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "head.partial").mkdir()
    (tmp_path / "head.partial" / "notes.txt").write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "config.json").symlink_to(target / "config.json")
    own = tmp_path / "own"
    own.mkdir()
    for name in ("config.json", "model.safetensors"):
        (own / name).write_bytes((target / name).read_bytes())
    before = untouched(tmp_path)
    for name, message in (
        ("file", "is a file; the head needs a folder"),
        ("head", "head.partial holds notes.txt"),
        ("linked", "linked holds config.json"),
        ("own", "is the target's own folder"),
    ):
        with pytest.raises(StartupError, match=message):
            export(trainer.kind, trainer.checkpoint, tmp_path / name, target=own)
    assert untouched(tmp_path) == before


def test_an_export_is_replaced_and_others_files_may_come_meanwhile(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, _ = exported("STANDALONE", target, data, tmp_path)
    folder = tmp_path / "published"
    (folder / "config.json").write_text("stale")
    export(trainer.kind, trainer.checkpoint, folder, target=target)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    monkeypatch.setattr("training.export.card", lambda *_: (folder / "notes.txt").write_text("mine") and "")
    with pytest.raises(StartupError, match=r"published holds notes.txt"):
        export(trainer.kind, trainer.checkpoint, folder, target=target)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "model.safetensors").is_file()


def test_a_checkpoint_of_a_target_with_other_weights_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    trainer, _, _ = exported("EAGLE", target, data, tmp_path / "head")
    other = with_other_weights(target, tmp_path / "other")
    args = ExportArgs(model_path=str(other), checkpoint=str(tmp_path / "head"), output=str(tmp_path / "x"))
    mine, theirs = trainer.checkpoint.facts["target"], target_id(other, "auto")
    with pytest.raises(StartupError, match=f"another target than .*other: {mine}, not {theirs}"):
        export_main(args)
    del trainer.checkpoint.facts["target"]  # older ones have none
    trainer._save("checkpoint.pt")
    assert export_main(args) == 0


def test_a_map_that_cannot_be_written_is_told_in_one_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    for output in ("/proc/x.pt", "/proc/x.safetensors", str(tmp_path / "folder.pt")):
        with pytest.raises(StartupError, match=f"the map cannot be written to {Path(output).parent}"):
            token_map_main(TokenMapArgs(data=str(data), output=output))
