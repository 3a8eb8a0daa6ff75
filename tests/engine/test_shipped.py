"""Shipped heads: small on disk, expanded once, for the target that they were trained for and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.config import ModelConfig
from engine.loader import load_checkpoint
from engine.models.heads.load import load_head
from engine.models.heads.token_map import load_token_map
from engine.models.llama_weights import tensor_shapes
from engine.shipped import SHIPPED, dequantized, pack, quantized, shipped_algorithms, shipped_head
from outrider.errors import StartupError
from tests.engine.heads import make
from tests.engine.heads.make import Written

EMBEDDED_VOCABULARY = 49_152
LIMIT_BYTES = 32 * 2**20


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return make.write_target(tmp_path / "target")


@given(st.integers(1, 5), st.integers(1, 40), st.floats(1e-6, 1e4), st.integers(0, 2**31))
def test_a_number_is_off_by_at_most_half_a_step_of_its_row(rows: int, columns: int, size: float, seed: int) -> None:
    weight = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)) * size
    weight[0] = 0
    back = dequantized(quantized({"w": weight}))["w"].float()
    # Half a step, and bf16's rounding of the result.
    allowed = weight.abs().amax(dim=1, keepdim=True) / 127 / 2 * 1.01 + weight.abs() / 2**8
    assert ((back - weight).abs() <= allowed).all()


def test_other_tensors_stay_as_they_are() -> None:
    tensors = {"norm": torch.randn(4).bfloat16(), "d2t": torch.arange(5), "t2d": torch.tensor([True, False])}
    packed = quantized(tensors)
    assert packed.keys() == tensors.keys()
    assert all(torch.equal(dequantized(packed)[name], tensor) for name, tensor in tensors.items())


def test_a_head_is_expanded_once_into_what_loaders_read(tmp_path: Path, target: Written) -> None:
    head = make.eagle3(tmp_path / "head")
    size = pack(head.folder, "EAGLE3", target.folder, tmp_path / "ship" / "a.safetensors")
    assert size < (head.folder / "model.safetensors").stat().st_size / 2
    folder = shipped_head("EAGLE3", target.folder, folder=tmp_path / "ship")
    assert folder is not None
    assert folder.parent == tmp_path / "home" / "heads"
    loaded, _ = load_head(folder, target.folder, max_len=32)
    original, _ = load_head(head.folder, target.folder, max_len=32)
    assert loaded.tokens is not None
    assert original.tokens is not None
    assert torch.equal(loaded.tokens, original.tokens)
    stored = load_file(folder / "model.safetensors")
    assert stored["fc.weight"].dtype is torch.bfloat16
    torch.testing.assert_close(stored["fc.weight"].float(), head.tensors["fc.weight"], atol=0.01, rtol=0.01)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert shipped_head("EAGLE3", target.folder, folder=tmp_path / "ship") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_draft_model_takes_the_rest_from_its_target(tmp_path: Path, target: Written) -> None:
    shallow = make.write(
        tmp_path / "shallow", target.config | {"num_hidden_layers": 1},
        {name: tensor for name, tensor in target.tensors.items() if ".layers." not in name or ".layers.0." in name},
    )  # fmt: skip
    path = tmp_path / "ship" / "standalone.safetensors"
    pack(shallow.folder, "STANDALONE", target.folder, path)
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & load_file(path).keys()
    folder = shipped_head("STANDALONE", target.folder, folder=tmp_path / "ship")
    assert folder is not None
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], target.tensors["lm_head.weight"].bfloat16())
    _, tensors = load_checkpoint(folder, tensor_shapes(ModelConfig.from_folder(folder)))
    assert len(list(tensors)) == len(stored)


def test_only_its_own_algorithm_and_target_get_it(tmp_path: Path, target: Written) -> None:
    pack(make.eagle(tmp_path / "head").folder, "EAGLE", target.folder, tmp_path / "ship" / "a.safetensors")
    assert shipped_head("EAGLE3", target.folder, folder=tmp_path / "ship") is None
    other = make.write_target(tmp_path / "other", seed=9)
    assert shipped_head("EAGLE", other.folder, folder=tmp_path / "ship") is None
    assert shipped_head("EAGLE", target.folder, folder=tmp_path / "nowhere") is None


def test_a_damaged_file_is_named(tmp_path: Path, target: Written) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"damaged")
    with pytest.raises(StartupError, match=r"bad\.safetensors is damaged"):
        shipped_head("EAGLE", target.folder, folder=tmp_path)


def test_what_is_shipped_keeps_to_its_limit() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors")) <= LIMIT_BYTES


def test_the_shipped_map_is_of_the_embedded_models_vocabulary() -> None:
    (path,) = SHIPPED.glob("token_maps/*.safetensors")
    tokens = load_token_map(str(path), EMBEDDED_VOCABULARY)
    assert len(tokens) == 8192
    # Most frequent first, and each once.
    assert len(tokens.unique()) == len(tokens)
    assert not torch.equal(tokens, tokens.sort().values)


def test_the_algorithms_that_are_shipped_for_a_target(tmp_path: Path, target: Written) -> None:
    folder = tmp_path / "ship"
    for name, made in (("a", make.eagle(tmp_path / "one")), ("b", make.eagle(tmp_path / "two"))):
        pack(made.folder, {"a": "EAGLE", "b": "EAGLE3"}[name], target.folder, folder / f"{name}.safetensors")
    assert shipped_algorithms(target.folder, folder=folder) == ["EAGLE", "EAGLE3"]
    assert shipped_algorithms(make.write_target(tmp_path / "other", seed=9).folder, folder=folder) == []
