"""What heads share with targets whose files call sizes and tensors otherwise than Llama's do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.heads.load import load_head
from engine.models.heads.target import EMBEDDING, OUTPUT_HEAD, TargetShape, shared_tensor
from outrider.errors import StartupError
from tests.engine.heads import make
from tests.engine.heads.make import HIDDEN, VOCAB
from tests.engine.tiny import other_families


def save(name: str, folder: Path) -> Any:
    """A random model of the family with make's heads' sizes."""
    torch.manual_seed(1)
    config = other_families(VOCAB, HIDDEN)[name]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", sorted(other_families(VOCAB, HIDDEN)))
def test_sizes_embedding_and_head_are_the_models_own(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "target")
    target = TargetShape.from_folder(tmp_path / "target")
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (VOCAB, HIDDEN, 7)
    assert torch.equal(shared_tensor(target, EMBEDDING, load_format="auto"), model.get_input_embeddings().weight)
    assert torch.equal(shared_tensor(target, OUTPUT_HEAD, load_format="auto"), model.get_output_embeddings().weight)
    head, features = load_head(make.eagle3(tmp_path / "head").folder, tmp_path / "target", max_len=32)
    assert str(features) == "aux:2,3,4"
    assert torch.equal(head.embedding, model.get_input_embeddings().weight)


def test_gpt2_as_its_authors_publish_it(tmp_path: Path) -> None:
    """Few keys in config.json, and tensors without the base model's prefix."""
    model = save("gpt2", tmp_path)
    kept = {"architectures", "model_type", "n_embd", "n_layer", "n_head", "n_positions", "vocab_size"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key in kept}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    target = TargetShape.from_folder(tmp_path)
    for name in (EMBEDDING, OUTPUT_HEAD):
        assert torch.equal(shared_tensor(target, name, load_format="auto"), model.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, "without code of that folder.*of its own"),
        ({"model_type": "no-such"}, "does not know them: .*no-such"),
        ({"n_embd": -1}, "hidden_size is -1"),
    ],
)
def test_a_target_that_transformers_does_not_know_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save("gpt2", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["OwnForCausalLM"]} | changes))
    with pytest.raises(StartupError, match=words):
        TargetShape.from_folder(tmp_path)
