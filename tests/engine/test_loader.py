"""Weights: found, checked, refused."""

from __future__ import annotations

import json
import os
import pickle
import struct
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import read_header
from engine.config import ModelConfig
from engine.devices import pick_device
from engine.loader import compute_dtype, load_checkpoint
from engine.model_folder import resolve_model
from engine.models.llama_weights import tensor_shapes
from engine.runner import ModelRunner
from engine.weight_files import INDEX_NAME
from outrider.errors import StartupError
from outrider.text_files import vocab_fingerprint
from tests.engine.tiny import save_model, sessions

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model("llama", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(folder: Path, load_format: str = "auto") -> dict[str, torch.Tensor]:
    shapes = tensor_shapes(ModelConfig.from_folder(folder))
    return dict(load_checkpoint(folder, shapes, load_format=load_format)[1])


def refused(folder: Path, words: str, load_format: str = "auto") -> str:
    with pytest.raises(StartupError, match=words) as caught:
        load(folder, load_format)
    return str(caught.value)


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_every_tensor_comes_as_stored(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    loaded = load(folder)
    assert set(loaded) == set(stored)
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_missing_tensors_are_named_up_to_five(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "mlp" in name]:
            del tensors[name]

    change(folder, edit)
    message = refused(folder, "9 tensors are missing")
    assert message.count("mlp") == 5


def test_wrong_shapes_are_named_with_both_shapes(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(95)}))
    refused(folder, r"model\.norm\.weight is \[95\], config\.json calls for \[96\]")


def test_a_tied_model_has_one_head(tmp_path: Path) -> None:
    save_model("llama-tied", tmp_path)
    assert "lm_head.weight" not in load(tmp_path)

    def store(head: torch.Tensor) -> None:
        change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))

    embedding = load(tmp_path)["model.embed_tokens.weight"]
    store(embedding.clone())
    assert torch.equal(load(tmp_path)["model.embed_tokens.weight"], embedding)
    store(embedding + 1)
    refused(tmp_path, r"lm_head\.weight is not model\.embed_tokens\.weight, though .* tie_word_embeddings true")


def test_extra_tensors_do_not_stop_it(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.layers.7.extra": torch.ones(3)}))
    assert "model.layers.7.extra" not in load(folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite(folder: Path, value: float) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    change(folder, edit)
    message = refused(folder, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity")
    assert str(folder) in message


def test_weights_that_are_not_finite_in_what_is_computed_in(folder: Path) -> None:
    change(folder, lambda tensors: tensors["model.norm.weight"].fill_(-1e6))
    options: dict[str, Any] = {"num_slots": 64, "max_sessions": 1, "max_len": 64, "threads": 1}
    assert ModelRunner.load(folder, dtype="bfloat16", **options)
    with pytest.raises(StartupError, match=r"model\.norm\.weight holds 1e\+06, which is infinity in torch\.float16"):
        ModelRunner.load(folder, dtype="float16", **options)


def test_integers_are_no_weights(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(96, dtype=torch.int64)}))
    refused(folder, "stored as I64")


@pytest.mark.parametrize("keep", [0, 4, 8, 300, -1])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    refused(folder, WEIGHTS)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def damage(folder: Path, edit: Any) -> None:
    header, body = header_of((folder / WEIGHTS).read_bytes())
    edit(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize(
    "edit",
    [
        lambda entry: entry.update(data_offsets=[0, 10]),
        lambda entry: entry.update(data_offsets=[-4, 380]),
        lambda entry: entry.update(data_offsets=[10**12, 10**12 + 384]),
        lambda entry: entry.update(data_offsets="all"),
        lambda entry: entry.update(shape=[-96]),
        lambda entry: entry.update(shape=[96.0]),
        lambda entry: entry.update(shape=[2**63] * 100_000),
        lambda entry: entry.update(dtype="F7"),
        lambda entry: entry.pop("dtype"),
    ],
)
def test_a_damaged_entry(folder: Path, edit: Any) -> None:
    damage(folder, lambda header: edit(header["model.norm.weight"]))
    refused(folder, WEIGHTS)


def test_overlapping_tensors(folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        first, second = (f"model.layers.{i}.input_layernorm.weight" for i in (0, 1))
        header[first]["data_offsets"] = header[second]["data_offsets"]

    damage(folder, edit)
    refused(folder, "starts at")


@pytest.mark.parametrize("length", [2**30, 2**63, 2**64 - 1, 0])
def test_a_header_longer_than_the_file(folder: Path, length: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])
    refused(folder, "header claims")


@pytest.mark.parametrize("text", [b"[1, 2]", b"{nonsense", b"\xff\xfe" * 4])
def test_a_header_that_is_no_object(folder: Path, text: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)
    refused(folder, "header")


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, "neither")


def shard(folder: Path, names: dict[str, str]) -> None:
    (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": names}))


def test_shards(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / part)
    shard(folder, {name: part for part, members in parts.items() for name in members})
    assert all(torch.equal(value, tensors[name]) for name, value in load(folder).items())
    (folder / "b.safetensors").unlink()
    refused(folder, r"b\.safetensors does not exist")
    save_file(tensors, folder / WEIGHTS)
    assert load(folder).keys() == tensors.keys()  # of both the whole file, as transformers does


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "a/../../outside.safetensors",
        "weights.bin",
        "a\0b.safetensors",
        "\ud800.safetensors",
    ],
)
def test_shards_that_leave_the_folder(folder: Path, name: str) -> None:
    shard(folder, {"model.norm.weight": name})
    refused(folder, "no .safetensors file of its folder")


def test_weights_that_config_json_names_come_before_all_others(folder: Path) -> None:
    stored = load(folder)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    config = json.loads((folder / "config.json").read_text())

    def name(file: object) -> None:
        (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": file}))

    save_file(zeros, folder / "zeros.safetensors")
    index = {"weight_map": dict.fromkeys(zeros, "zeros.safetensors")}
    (folder / "zeros.safetensors.index.json").write_text(json.dumps(index))
    (folder / "sub").mkdir()  # an index there names files of the model's folder all the same, not those beside it
    (folder / "sub" / "zeros.safetensors.index.json").write_text(json.dumps(index))
    save_file(stored, folder / "sub" / "zeros.safetensors")
    for file in ("zeros.safetensors", "zeros.safetensors.index.json", "sub/zeros.safetensors.index.json"):
        name(file)
        assert not any(tensor.any() for tensor in load(folder).values())
    for wrong in ("../zeros.safetensors", "zeros.bin", 7):
        name(wrong)
        refused(folder, "transformers_weights is .*; it must name a .safetensors file of its folder, or an index")
    name("zeros.safetensors")
    refused(folder, "transformers_weights is 'zeros.safetensors', which --load-format pt does not read", "pt")
    name("none.safetensors")
    refused(folder, r"none\.safetensors does not exist")


def test_shards_that_are_links_are_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "w"  # as downloads that share a cache leave them
    (folder / WEIGHTS).rename(outside)
    (folder / "w.safetensors").symlink_to(outside)
    shard(folder, {"model.norm.weight": "w.safetensors"})
    assert load(folder)
    outside.unlink()
    refused(folder, rf"w\.safetensors is a link to {outside}, which does not exist")
    (folder / "w.safetensors").unlink()
    (folder / "w.safetensors").symlink_to("w.safetensors")
    refused(folder, r"w\.safetensors cannot be read: .*symbolic links")


def test_shards_linked_within_a_hub_cache(saved: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_bytes((saved / WEIGHTS).read_bytes())
    (snapshot / "w.safetensors").symlink_to(blobs / "123")
    (snapshot / "config.json").write_bytes((saved / "config.json").read_bytes())
    shard(snapshot, {name: "w.safetensors" for name in load_file(saved / WEIGHTS)})
    assert load(snapshot)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": 3}])
def test_an_index_without_a_map(folder: Path, index: dict[str, Any]) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX_NAME).write_text(json.dumps(index))
    refused(folder, "weight_map")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def test_pickled_weights_need_consent(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    pickled(folder)
    message = refused(folder, r"pytorch_model\.bin")
    assert "safetensors" in message
    assert "--load-format pt" in message
    assert "--speculative-draft-load-format pt" in message  # of a head; its target's form is another matter
    assert "`outrider convert`" in message
    torch.save({"state": {}, "param_groups": [3]}, folder / "optimizer.pt")  # a trainer's, beside them
    torch.save({"python": (3, 1)}, folder / "rng_state_0.pth")
    assert all(torch.equal(value, stored[name]) for name, value in load(folder, "pt").items())


def test_of_pickled_weights_those_are_read_that_transformers_reads(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    zeros = {name: torch.zeros_like(value) for name, value in stored.items()}
    names = sorted(stored)
    pickled(folder)
    torch.save(zeros, folder / "pytorch_model_ema.bin")
    (folder / "tokenizer.bin").write_bytes(b"of another program")

    def same() -> bool:
        return all(torch.equal(value, stored[name]) for name, value in load(folder, "pt").items())

    assert same()
    (folder / "pytorch_model.bin").unlink()
    parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for part, members in parts.items():
        torch.save({name: stored[name] for name in members}, folder / part)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: part for part in parts for name in parts[part]}}))
    assert same()
    index.unlink()
    (folder / "tokenizer.bin").unlink()
    refused(folder, r"pytorch_model_ema\.bin: tensor .* is in another file of its folder", "pt")
    (folder / "pytorch_model_ema.bin").rename(folder / "ema.pt")
    assert same()  # of one ending alone


class Payload:
    """Would run code when unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_consent_does_not_run_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / WEIGHTS).unlink()
    monkeypatch.chdir(folder)
    torch.save({"model.norm.weight": Payload()}, folder / "pytorch_model.bin")
    refused(folder, "cannot be read as plain tensors", "pt")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(), protocol=2))
    refused(folder, "cannot be read as plain tensors", "pt")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("things", [{"epoch": 3}, {1: torch.ones(2)}])
def test_pickled_things_that_are_no_named_tensors(folder: Path, things: object) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(things, folder / "pytorch_model.bin")
    refused(folder, "something else", "pt")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(96).to_sparse(),
        torch.ones(96, device="meta"),
        torch.ones(96).to(torch.float8_e4m3fn),
        torch.ones(96, dtype=torch.int64),
    ],
)
def test_pickled_tensors_of_other_kinds(folder: Path, value: torch.Tensor) -> None:
    torch.save(load_file(folder / WEIGHTS) | {"model.norm.weight": value}, folder / "pytorch_model.bin")
    refused(folder, r"tensor model\.norm\.weight is (stored as torch\.|sparse)", "pt")


@pytest.mark.parametrize("data", [b"", b"\x80\x02hello", b"PK\x03\x04"])
def test_damaged_pickles(folder: Path, data: bytes) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    message = refused(folder, r"cannot be read as plain tensors: it is damaged, .* \(\w+Error\)", "pt")
    assert "weights_only" not in message  # which torch would have set to False


@pytest.mark.parametrize("name", [WEIGHTS, "a.safetensors", "pytorch_model.bin", "b.pt"])
def test_what_stands_in_place_of_weights(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    if name == "a.safetensors":
        shard(folder, {"model.norm.weight": name})
    load_format = "auto" if name.endswith("safetensors") else "pt"
    os.mkfifo(folder / name)
    refused(folder, f"{name} is no file", load_format)
    (folder / name).unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 567\n")
    refused(folder, f"{name} is a Git LFS pointer", load_format)


def test_a_tokenizer_that_is_a_pointer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(StartupError, match=r"tokenizer\.json is a Git LFS pointer"):
        vocab_fingerprint(folder)


def test_consent_without_pickled_weights(folder: Path) -> None:
    refused(
        folder, r"no pickled weights .*\*\.pt.*, which pt asks for: --load-format, or .*; auto reads safetensors", "pt"
    )


def test_dummy_weights_are_the_same_every_time(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    first, second = load(folder, "dummy"), load(folder, "dummy")
    assert all(torch.equal(first[name], second[name]) for name in first)
    runner = ModelRunner.load(
        folder, dtype="float32", num_slots=64, max_sessions=1, max_len=64, load_format="dummy", threads=1
    )
    (session,) = sessions(runner, 1)
    logits = runner.forward([session.segment(list(range(60)))])
    assert 0.5 < logits.std() < 8.0
    assert len(set(logits.argmax(dim=1).tolist())) > 10


def test_resolve_model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    with pytest.raises(StartupError, match=r"^--model-path is '.*config.json', a file"):
        resolve_model(folder / "config.json")
    with pytest.raises(StartupError, match=r"^--model-path is '.*absent'; there is no such folder"):
        resolve_model(folder / "absent")
    with pytest.raises(StartupError, match=r"^--other is 'absent'; there is no such folder, and it is no hub id"):
        resolve_model("absent", flag="--other")


def test_a_revision_is_of_a_hub_id(folder: Path) -> None:
    for model in (None, folder):
        with pytest.raises(StartupError, match="--revision is of a hub id; the model is"):
            resolve_model(model, revision="abc")
    with pytest.raises(StartupError, match=r"^--other is of a hub id"):
        resolve_model(folder, revision="abc", revision_flag="--other")
    assert resolve_model(folder, revision="main") == folder


def test_a_hub_id_without_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError, match="nobody/nothing"):
        resolve_model("nobody/nothing")


@pytest.mark.parametrize(
    ("options", "weights", "code"),
    [
        ({}, {"model.safetensors"}, False),
        ({"load_format": "safetensors"}, {"model.safetensors"}, False),
        ({"load_format": "pt", "trust_remote_code": True}, {"pytorch_model.bin"}, True),
        ({"load_format": "dummy"}, set(), False),
    ],
)
def test_of_a_hub_id_the_revision_and_what_may_be_used_is_fetched(
    options: dict[str, Any], weights: set[str], code: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str | None, list[str], list[str]]] = []

    def fetch(hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((hub_id, revision, allow_patterns, ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model("some/model", revision="abc123", **options) == tmp_path
    ((hub_id, revision, patterns, left_out),) = asked
    assert (hub_id, revision) == ("some/model", "abc123")
    files = ["model.safetensors", "pytorch_model.bin", "modeling.py", "config.json", "chat_template.jinja"]
    files += ["consolidated.safetensors", "consolidated.00.pth", "vision/model.safetensors"]
    fetched = {
        name
        for name in files
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in left_out)
    }
    assert fetched == weights | {"config.json", "chat_template.jinja"} | ({"modeling.py"} if code else set())


def test_compute_dtype(saved: Path) -> None:
    config = ModelConfig.from_folder(saved)
    assert compute_dtype("auto", config) is torch.float32
    assert compute_dtype("bfloat16", config) is torch.bfloat16
    with pytest.raises(StartupError, match="int8"):
        compute_dtype("int8", config)


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in {"cpu", "cuda"}
    for name in ("tpu9", "meta", "cuda:99"):
        with pytest.raises(StartupError, match=name):
            pick_device(name)


def test_headers_of_good_files_read(saved: Path) -> None:
    header = read_header(saved / WEIGHTS)
    assert header["model.norm.weight"]["shape"] == [96]
