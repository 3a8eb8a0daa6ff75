"""A tiny target with a tokenizer, conversations of its own, and settings to train on them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from engine.runner import ModelRunner
from tests.engine.tiny import save_model
from tests.gateway.models import byte_level, write_folder
from training.args import HeadArgs
from training.chat_format import ChatFormat
from training.data.completer import Completer, Completion, Conversation
from training.data.conversations import COMPOSED, Record
from training.data.material import Material
from training.data.store import DataFolder
from training.data.templates import Composer
from training.stopping import Stopping
from training.target_states import target_id

VOCAB_SIZE = 420
MAX_LEN = 160


class NeverStopping(Stopping):
    """Hears no signals."""

    def __init__(self) -> None:
        self.asked = False


def make_target(folder: Path) -> Path:
    """A random Llama with a byte-level tokenizer and a chat template."""
    save_model("llama", folder, vocab_size=VOCAB_SIZE)
    return write_folder(folder, byte_level())


def with_other_weights(target: Path, folder: Path) -> Path:
    """A target of the same shape that writes something else."""
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_runner(target: Path, num_rows: int = 4, max_len: int = MAX_LEN) -> ModelRunner:
    """The target in fp32 with room for `num_rows` conversations."""
    return ModelRunner.load(
        target, dtype="float32", num_slots=(num_rows + 1) * max_len, max_sessions=num_rows, max_len=max_len, threads=1
    )


def make_composer() -> Composer:
    """A composer of templates over two texts."""
    return Composer(
        Material.load(), lambda rng: "Whales sing. Nobody knows why, but many have asked.", lambda rng: "def f(x): pass"
    )


def make_chat(target: Path) -> ChatFormat:
    """The target's chat format."""
    return ChatFormat.of_model(target)


def make_data(
    folder: Path, target: Path, *, count: int = 16, answer_tokens: int = 24, start: int = 0, num_asked: int = 8
) -> Path:  # fmt: skip
    """Greedy answers of the target to random ids, in one more shard."""
    store = DataFolder(folder, {"format": 1, "seed": 0, "target": target_id(target, "auto"), "vocab_size": VOCAB_SIZE})
    for index, record in Completer(make_runner(target, 8)).run(
        _conversation(index, answer_tokens, num_asked) for index in range(start, start + count)
    ):
        store.add(index, [record])
    store.flush()
    return folder


def _conversation(index: int, answer_tokens: int, num_asked: int) -> Conversation:
    prompt = random.Random(index).choices(range(3, VOCAB_SIZE), k=num_asked)
    done = yield Completion(prompt, answer_tokens, frozenset({2}), cuts_loops=False)
    tokens = [*prompt, *done.tokens]
    return index, Record(index, COMPOSED, 0.0, tokens, [(len(prompt), len(tokens))], key=index)


def head_args(algorithm: str, target: Path, data: Path, output: Path, **changes: Any) -> HeadArgs:
    """A short training in fp32."""
    settings: dict[str, Any] = {
        "algorithm": algorithm, "model_path": str(target), "data": str(data), "output": str(output), "threads": 1,
        "dtype": "float32", "train_dtype": "float32", "device": "cpu", "draft_vocab_size": 200, "tokens": 4000,
        "batch_tokens": 256, "max_len": 64, "warmup_tokens": 200, "learning_rate": 1e-2,
        "eval_every": 100_000, "eval_conversations": 2, "save_every": 1000,
    }  # fmt: skip
    if algorithm == "STANDALONE":
        settings["num_layers"] = 2
    return HeadArgs(**(settings | changes))
