"""Shipped heads: small on disk, expanded once, for the target that they were trained for and no other."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.checkpoint import open_checkpoint
from engine.config import ModelConfig
from engine.cpu_kernels import cpu_kernels
from engine.loader import load_checkpoint
from engine.models.heads.load import load_head
from engine.models.heads.token_map import load_token_map
from engine.models.llama_weights import tensor_shapes
from engine.packed import SCALE, dequantized, difference, moved, parents, quantized
from engine.quantization import draft_quantization
from engine.shipped import (
    SHIPPED,
    pack,
    shipped_algorithms,
    shipped_head,
    shipped_token_map,
    stored_quantization,
)  # fmt: skip
from outrider import env
from outrider.errors import StartupError
from tests.engine.disk import Disk
from tests.engine.heads import make
from tests.engine.heads.make import Written

EMBEDDED_VOCABULARY = 49_152
LIMIT_BYTES = 32 * 2**20


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    kernels = env.home() / "kernels"  # compiled but once
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "kernels").symlink_to(kernels)
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
    assert stat.S_IMODE((tmp_path / "ship" / "a.safetensors").stat().st_mode) == 0o644
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


def test_a_head_is_on_the_disk_before_it_is_found(
    tmp_path: Path, target: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(make.eagle3(tmp_path / "head").folder, "EAGLE3", target.folder, tmp_path / "ship" / "a.safetensors")
    disk = Disk(monkeypatch)
    folder = shipped_head("EAGLE3", target.folder, folder=tmp_path / "ship")
    assert folder is not None
    disk.check(folder)


def test_a_draft_model_takes_the_rest_from_its_target(tmp_path: Path, target: Written) -> None:
    near, new = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    of_layer = {0: 0, 1: make.LAYERS - 1}
    tensors = {name: tensor for name, tensor in target.tensors.items() if ".layers." not in name}
    for index, source in of_layer.items():
        tensors |= {
            name.replace(f".{source}.", f".{index}.", 1): tensor
            for name, tensor in target.tensors.items() if name.startswith(f"model.layers.{source}.")
        }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors[near] = tensors[near] + 0.03 * tensors[near].std() * torch.randn(tensors[near].shape, generator=generator)
    tensors[new] = torch.randn(tensors[new].shape, generator=generator)
    shallow = make.write(tmp_path / "shallow", target.config | {"num_hidden_layers": 2}, tensors)
    path = tmp_path / "ship" / "standalone.safetensors"
    pack(shallow.folder, "STANDALONE", target.folder, path)
    stored = load_file(path)
    assert set(stored) == {near, near + SCALE, new, new + SCALE}
    assert (stored[near].dtype, stored[new].dtype) == (torch.uint8, torch.int8)
    folder = shipped_head("STANDALONE", target.folder, folder=tmp_path / "ship")
    assert folder is not None
    expanded = load_file(folder / "model.safetensors")
    assert expanded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        error = (expanded[name].float() - tensor).norm() / tensor.norm()
        assert error < (0.02 if name == new else 0.01), name
    _, loaded = load_checkpoint(folder, tensor_shapes(ModelConfig.from_folder(folder)))
    assert len(list(loaded)) == len(expanded)


@given(st.integers(1, 5), st.integers(1, 20), st.floats(1e-6, 1e2), st.integers(0, 2**31))
def test_a_difference_is_off_by_at_most_half_a_step_of_its_row(rows: int, pairs: int, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn((rows, 2 * pairs), generator=generator)
    away = size * torch.randn((rows, 2 * pairs), generator=generator)
    away[0] = 0
    weight = base + away
    back = moved(*difference(weight, base), base).float()
    # Half a step, and bf16's rounding of the result.
    allowed = (weight - base).abs().amax(dim=1, keepdim=True) / 7 / 2 * 1.04 + 1.01 * weight.abs() / 2**8 + 1e-6
    assert ((back - weight).abs() <= allowed).all()


def test_vectors_have_no_parents_but_their_equals(target: Written) -> None:
    whole = open_checkpoint(target.folder, load_format="auto")
    norm = target.tensors["model.norm.weight"]
    assert parents({"model.norm.weight": norm}, whole) == {"model.norm.weight": "model.norm.weight"}
    assert parents({"model.norm.weight": norm * 1.01, "fc.weight": torch.ones(4, 4)}, whole) == {}


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


@pytest.mark.parametrize("bases", ["[]", "{", '{"norm.weight": "model.nowhere"}'])
def test_damaged_bases_are_named(bases: str, tmp_path: Path, target: Written) -> None:
    pack(make.eagle(tmp_path / "head").folder, "EAGLE", target.folder, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "a.safetensors", metadata | {"bases": bases})
    with pytest.raises(StartupError, match=r"a\.safetensors is damaged"):
        shipped_head("EAGLE", target.folder, folder=tmp_path)


def test_what_is_shipped_keeps_to_its_limit() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors")) <= LIMIT_BYTES


def test_the_shipped_map_is_of_the_embedded_models_vocabulary() -> None:
    (path,) = SHIPPED.glob("token_maps/*.safetensors")
    tokens = load_token_map(str(path), EMBEDDED_VOCABULARY)
    assert len(tokens) == 16_384
    # Most frequent first, and each once.
    assert len(tokens.unique()) == len(tokens)
    assert not torch.equal(tokens, tokens.sort().values)


def test_the_algorithms_that_are_shipped_for_a_target(tmp_path: Path, target: Written) -> None:
    folder = tmp_path / "ship"
    for name, made in (("a", make.eagle(tmp_path / "one")), ("b", make.eagle(tmp_path / "two"))):
        pack(made.folder, {"a": "EAGLE", "b": "EAGLE3"}[name], target.folder, folder / f"{name}.safetensors")
    assert shipped_algorithms(target.folder, folder=folder) == ["EAGLE", "EAGLE3"]
    assert shipped_algorithms(make.write_target(tmp_path / "other", seed=9).folder, folder=folder) == []


def test_a_shipped_head_is_computed_with_as_it_is_stored(tmp_path: Path, target: Written) -> None:
    pack(make.eagle(tmp_path / "one").folder, "EAGLE", target.folder, tmp_path / "ship" / "a.safetensors")
    expanded = shipped_head("EAGLE", target.folder, folder=tmp_path / "ship")
    assert expanded is not None
    on_cpu = "int8" if cpu_kernels() is not None else None
    assert stored_quantization(expanded, torch.device("cpu")) == on_cpu
    assert stored_quantization(expanded, torch.device("cuda")) is None
    assert stored_quantization(target.folder, torch.device("cpu")) is None
    cpu = torch.device("cpu")
    assert draft_quantization(None, None, cpu, stored="int8") == "int8"
    assert draft_quantization(None, "int4", cpu, stored="int8") == "int4"
    assert draft_quantization("unquant", "int4", cpu, stored="int8") is None


def test_shipped_heads_draft_from_the_shipped_map(tmp_path: Path, target: Written) -> None:
    pack(make.eagle(tmp_path / "one").folder, "EAGLE", target.folder, tmp_path / "ship" / "a.safetensors")
    expanded = shipped_head("EAGLE", target.folder, folder=tmp_path / "ship")
    assert expanded is not None
    found = shipped_token_map(expanded, Path("models/smollm2-135m-instruct"))
    assert found is not None
    assert Path(found).is_file()
    assert shipped_token_map(expanded, target.folder) is None
    assert shipped_token_map(target.folder, Path("models/smollm2-135m-instruct")) is None


def test_inputs_of_different_size_are_rounded_apart() -> None:
    large, small = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).split(16, dim=1)
    weight = torch.cat([large[:16], 0.01 * small[:16]], dim=1)
    back = dequantized(quantized({"fc.weight": weight, "other.weight": weight}))
    error = {
        name: (tensor[:, 16:].float() - weight[:, 16:]).norm() / weight[:, 16:].norm() for name, tensor in back.items()
    }
    assert error["fc.weight"] < 0.01
    assert error["other.weight"] > 0.1
