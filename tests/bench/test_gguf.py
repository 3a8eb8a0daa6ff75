from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench._gguf import hugging_face_name, permute, write_gguf

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 16, 64, 96, 32
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (FFN, HIDDEN),
    "blk.0.ffn_up.weight": (FFN, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, FFN),
}
TOKENS = [f"token {index}" for index in range(VOCAB)]


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """A GGUF whose tensors are zero, of another type than is wanted."""
    path = tmp_path / "metadata.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * VOCAB)
    writer.add_chat_template("{{ messages }}")
    writer.add_add_bos_token(False)
    for name, shape in SHAPES.items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Weights by Hugging Face's names, in bf16."""
    torch.manual_seed(0)
    return {hugging_face_name(name)[0]: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}


def written(metadata: Path, weights: dict[str, torch.Tensor], kind: str) -> gguf.GGUFReader:
    """A file of a kind, read again."""
    folder = metadata.parent
    save_file(weights, folder / "model.safetensors")
    write_gguf(metadata, folder / "model.safetensors", folder / f"{kind}.gguf", kind)
    return gguf.GGUFReader(folder / f"{kind}.gguf")


def values(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    """Tensors as float32, q and k in Hugging Face's order of rows again."""
    found: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name, part = hugging_face_name(tensor.name)
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if part in ("attn_q", "attn_k"):
            rows, columns = value.shape
            pairs = value.reshape(rows // HEAD_DIM, HEAD_DIM // 2, 2, columns)
            value = pairs.swapaxes(1, 2).reshape(rows, columns)
        found[name] = value
    return found


def test_bf16_holds_the_same_bits(metadata: Path, weights: dict[str, torch.Tensor]) -> None:
    found = values(written(metadata, weights, "bf16"))
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(found[name], value.float().numpy()), name


def test_q8_0_is_near(metadata: Path, weights: dict[str, torch.Tensor]) -> None:
    reader = written(metadata, weights, "q8_0")
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == gguf.GGMLQuantizationType.Q8_0
    assert types["output_norm.weight"] == gguf.GGMLQuantizationType.F32
    found = values(reader)
    for name, value in weights.items():
        step = value.float().abs().max() / 127
        assert np.abs(found[name] - value.float().numpy()).max() <= step, name


@pytest.mark.parametrize(("kind", "file_type"), [("bf16", "MOSTLY_BF16"), ("q8_0", "MOSTLY_Q8_0")])
def test_metadata_is_copied(metadata: Path, weights: dict[str, torch.Tensor], kind: str, file_type: str) -> None:
    def contents(reader: gguf.GGUFReader) -> dict[str, Any]:
        return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}

    before, after = contents(gguf.GGUFReader(metadata)), contents(written(metadata, weights, kind))
    assert after.pop("general.file_type") == gguf.LlamaFileType[file_type]
    assert after.pop("general.quantization_version") == gguf.GGML_QUANT_VERSION
    before.pop("general.file_type")
    assert after == before
    assert after["tokenizer.ggml.tokens"] == TOKENS


def test_permutation_puts_rotary_pairs_side_by_side() -> None:
    rows = np.arange(8.0).reshape(8, 1)  # two heads of four: halves (0, 1), (2, 3)
    assert permute(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
