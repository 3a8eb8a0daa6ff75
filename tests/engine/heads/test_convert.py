"""Published forms in, SGLang's layout out: the same network either way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.convert import convert_head, resolve_source
from engine.models.heads.load import load_head
from outrider.errors import StartupError, Unfinished
from tests.engine.disk import FULL, full_disk
from tests.engine.heads import make
from tests.engine.heads.make import HIDDEN, Written

TOP_KEYS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings", "num_hidden_layers",
}  # fmt: skip


def as_bin(written: Written) -> Written:
    """Writes it as EAGLE's own repositories are: one pickled file, LlamaForCausalLM in config.json."""
    (written.folder / "model.safetensors").unlink()
    torch.save(written.tensors, written.folder / "pytorch_model.bin")
    (written.folder / "config.json").write_text(json.dumps(written.config | {"architectures": ["LlamaForCausalLM"]}))
    return written


def as_speculators(written: Written, kind: str, **top: Any) -> Written:
    """Writes as speculators does: the layer's config nested; `layers.0` or, for EAGLE-1, `transformer`, `fusion_fc`."""
    inner = {key: value for key, value in written.config.items() if key in TOP_KEYS} | {"model_type": "llama"}
    outer = {key: value for key, value in written.config.items() if key not in TOP_KEYS | {"architectures", "bias"}}
    names = ("layers.0.", "transformer."), ("fc.", "fusion_fc.")
    tensors = {}
    for name, tensor in written.tensors.items():
        for old, new in names if kind == "eagle" else (("midlayer.", "layers.0."),):
            name = new + name.removeprefix(old) if name.startswith(old) else name
        tensors[name] = tensor
    config = outer | top | {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": kind, "transformer_layer_config": inner,
        "model_type": "speculator_model", "speculators_config": {"algorithm": kind}, "auto_map": {"": "x.X"},
    }  # fmt: skip
    (written.folder / "model.safetensors").unlink()
    return make.write(written.folder, config, tensors)


def outputs(folder: Path, target: Written) -> torch.Tensor:
    """Logits of a few rows that see only themselves."""
    head, _ = load_head(folder, target.folder, max_len=8, load_format="auto" if has_safetensors(folder) else "pt")
    generator = torch.Generator().manual_seed(0)
    states = head.fuse(torch.randn((5, head.config.feature_width), generator=generator))
    rows = torch.arange(5)
    mixed = head.forward(rows, states, rows, lambda layer, q, k, v, rope: v.repeat_interleave(2, dim=1))
    return head.logits(mixed)


def has_safetensors(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


SOURCES: dict[str, Any] = {
    "eagle, pickled": lambda f: as_bin(make.eagle(f)),
    "eagle, pickled, no bias": lambda f: as_bin(make.eagle(f, bias=False)),
    "eagle, SGLang": lambda f: make.eagle(f, qkv_bias=True),
    "eagle, speculators": lambda f: as_speculators(make.eagle(f), "eagle", fusion_bias=True, layernorms=False),
    "eagle3, pickled": lambda f: as_bin(make.eagle3(f)),
    "eagle3, SGLang": lambda f: make.eagle3(f, fc_norm=True, norm_output=True),
    "eagle3, speculators": lambda f: as_speculators(
        make.eagle3(f), "eagle3", norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 4, 7]
    ),
    "eagle3, two layers": lambda f: make.eagle3(f, spelling="layers.0", layers=2),
}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_converted_head_is_the_same_network(name: str, tmp_path: Path) -> None:
    target = make.write_target(tmp_path / "target")
    source: Written = SOURCES[name](tmp_path / "source")
    converted = convert_head(source.folder, tmp_path / "out" / "head")
    assert torch.equal(outputs(converted.folder, target), outputs(source.folder, target))
    assert load_head(converted.folder, target.folder, max_len=8)[1] == load_head(
        source.folder, target.folder, max_len=8, load_format="auto" if has_safetensors(source.folder) else "pt"
    )[1]  # fmt: skip
    stored = load_file(converted.folder / "model.safetensors")
    assert converted.num_tensors == len(stored)
    assert converted.num_bytes == sum(path.stat().st_size for path in converted.folder.iterdir())
    config = json.loads((converted.folder / "config.json").read_text())
    assert config["hidden_size"] == HIDDEN
    assert not config.keys() & {"transformer_layer_config", "auto_map", "speculators_config"}
    if converted.family == "eagle":
        assert config["architectures"] == ["LlamaForCausalLMEagle"]
        assert stored["fc.bias"].shape == (HIDDEN,)
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert ("midlayer.hidden_norm.weight" in stored) == (config["num_hidden_layers"] == 1)
        assert stored["t2d"].sum() == config["draft_vocab_size"]


def test_a_map_without_its_inverse_gets_one(tmp_path: Path) -> None:
    source = make.rewrite(make.eagle3(tmp_path / "source"), drop=("t2d",))
    stored = load_file(convert_head(source.folder, tmp_path / "out").folder / "model.safetensors")
    assert torch.equal(stored["t2d"], make.eagle3(tmp_path / "again").tensors["t2d"])


def test_aux_layers_keep_their_meaning(tmp_path: Path) -> None:
    source = make.eagle3(tmp_path / "source", eagle_aux_hidden_state_layer_ids=[0, 4, 7])
    converted = convert_head(source.folder, tmp_path / "out")
    config = json.loads((converted.folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 3, 6]
    assert "eagle_aux_hidden_state_layer_ids" not in config


def test_nothing_appears_when_the_source_is_bad(tmp_path: Path) -> None:
    bad = make.rewrite(make.eagle(tmp_path / "source"), drop=("layers.0.mlp.up_proj.weight",))
    with pytest.raises(StartupError, match="missing"):
        convert_head(bad.folder, tmp_path / "out")
    part = make.rewrite(make.eagle3(tmp_path / "part"), drop=("d2t", "t2d"))
    with pytest.raises(StartupError, match="d2t is missing"):
        convert_head(part.folder, tmp_path / "out")
    broken = make.eagle3(tmp_path / "broken")
    d2t = broken.tensors["d2t"] + 0.5
    make.write(broken.folder, broken.config, {**broken.tensors, "d2t": d2t})
    with pytest.raises(StartupError, match="a list of whole numbers is needed"):
        convert_head(broken.folder, tmp_path / "out")
    target = make.add_nextn(make.write_target(tmp_path / "target"))
    with pytest.raises(StartupError, match="nothing to convert"):
        convert_head(target.folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "part", "source", "target"]


def test_an_existing_destination_is_left_alone(tmp_path: Path) -> None:
    source = make.eagle(tmp_path / "source")
    with pytest.raises(StartupError, match="exists"):
        convert_head(source.folder, source.folder)


def test_a_destination_that_cannot_be_written(tmp_path: Path) -> None:
    source = make.eagle(tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be written"):
        convert_head(source.folder, tmp_path / "file" / "out")


def test_weights_that_config_json_names_have_their_usual_name_behind_it(tmp_path: Path) -> None:
    target, source = make.write_target(tmp_path / "target"), make.eagle(tmp_path / "source")
    expected = outputs(source.folder, target)
    (source.folder / "model.safetensors").rename(source.folder / "mine.safetensors")
    (source.folder / "config.json").write_text(
        json.dumps({**source.config, "transformers_weights": "mine.safetensors"})
    )
    convert_head(source.folder, tmp_path / "head")
    assert torch.equal(outputs(tmp_path / "head", target), expected)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source = make.eagle(tmp_path / "source")
    with full_disk(5000), pytest.raises(Unfinished, match=f"head cannot be written: .*{FULL}"):
        convert_head(source.folder, tmp_path / "out" / "head")
    assert not list((tmp_path / "out").iterdir())


def test_code_in_a_pickled_file_does_not_run(tmp_path: Path) -> None:
    source = as_bin(make.eagle(tmp_path / "source"))
    torch.save({"fc.weight": Path("x")}, source.folder / "pytorch_model.bin")
    with pytest.raises(StartupError, match="cannot be read as plain tensors"):
        convert_head(source.folder, tmp_path / "out")


def test_sources(tmp_path: Path) -> None:
    assert resolve_source(tmp_path) == tmp_path.resolve()
    with pytest.raises(StartupError, match="neither a folder nor"):
        resolve_source(tmp_path / "none")
