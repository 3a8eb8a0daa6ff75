"""The C decoder: the same bits however a sequence is cut up, and the fallback where it cannot be built."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.cpu_kernels import cpu_kernels
from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from kernels.native import build
from tests.engine.tiny import SHAPE, VOCAB_SIZE, random_tokens, save_model, saved_model, sessions

folder = saved_model("qwen3")


def load(folder: Path, **options: Any) -> ModelRunner:
    settings: dict[str, Any] = {"dtype": "float32", "num_slots": 1800, "max_sessions": 4, "max_len": 450} | options
    runner = ModelRunner.load(folder, **settings)
    if not runner.backend.startswith("native"):
        pytest.skip("no C compiler")
    return runner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cut_of_a_sequence_changes_no_bit(folder: Path, dtype: str) -> None:
    runner = load(folder, dtype=dtype)
    whole, chunks, single, companion = sessions(runner, 4)
    tokens = random_tokens(150, 1)
    expected = runner.forward([whole.segment(tokens)])
    parts = [runner.forward([chunks.segment(tokens[a:b])]) for a, b in [(0, 37), (37, 38), (38, 150)]]
    assert torch.equal(torch.cat(parts), expected)
    for position, token in enumerate(tokens[:40]):
        logits = runner.forward([companion.segment([token, 7 % VOCAB_SIZE]), single.segment([token])])
        assert torch.equal(logits[2], expected[position])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prefix_len", [1, 60, 245, 420])
def test_a_tree_has_the_bits_of_plain_decoding(folder: Path, dtype: str, prefix_len: int) -> None:
    runner = load(folder, dtype=dtype)
    tree_session, plain = sessions(runner, 2)
    prefix, tokens = random_tokens(prefix_len, 2), random_tokens(20, 3)
    rng = np.random.default_rng(prefix_len)
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, 20))]
    runner.forward([tree_session.segment(prefix, 0)])
    logits = runner.forward([tree_session.tree(tokens, parents)])
    path, node = [], 19
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    for token in prefix:
        runner.forward([plain.segment([token], 0)])
    for row in path:
        assert torch.equal(runner.forward([plain.segment([tokens[row]])])[0], logits[row])


@pytest.mark.parametrize("prefix_len", [3, 60, 260, 420])
def test_a_window_changes_no_bit_of_it(tmp_path: Path, prefix_len: int) -> None:
    config = transformers.MistralConfig(**SHAPE, sliding_window=50)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    runner = load(tmp_path)
    tree_session, plain = sessions(runner, 2)
    prefix, tokens = random_tokens(prefix_len, 7), random_tokens(12, 8)
    parents = [-1, 0, 1, 2, 3, 4, 5, 0, 7, 8, 1, 10]
    runner.forward([tree_session.segment(prefix, 0)])
    logits = runner.forward([tree_session.tree(tokens, parents)])
    for token in prefix:
        runner.forward([plain.segment([token], 0)])
    for row in range(7):
        assert torch.equal(runner.forward([plain.segment([tokens[row]])])[0], logits[row])


@pytest.mark.parametrize("spec", ["last", "aux:0,1,3"])
def test_features_have_the_same_bits_too(folder: Path, spec: str) -> None:
    runner = load(folder, features=FeatureSpec.parse(spec), dtype="bfloat16")
    whole, single = sessions(runner, 2)
    tokens = random_tokens(30, 4)
    together = whole.segment(tokens, 0)
    runner.forward([together])
    alone = [single.segment([token]) for token in tokens]
    for segment in alone:
        runner.forward([segment])
    features = runner.features
    assert features is not None
    assert torch.equal(features[together.slots], features[np.concatenate([s.slots for s in alone])])


def test_thread_counts_change_no_bit(folder: Path) -> None:
    """Attention is cut into pieces with few rows and many threads; with one thread it is not."""
    tokens, results = random_tokens(700, 5), []
    before = torch.get_num_threads()
    for threads in (1, 2, 7):
        runner = load(folder, threads=threads, max_len=900)
        (session,) = sessions(runner, 1)
        prefill = runner.forward([session.segment(tokens, 20)])
        decode = runner.forward([session.segment([3])])
        results.append([prefill, decode, runner.forward([session.tree([5, 6, 7, 8, 9], [-1, 0, 1, 0, 3])])])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("quantization", [None, "int8_dynamic"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_highest_logit_of_each_row_is_found_in_the_same_step(
    tmp_path: Path, quantization: str | None, threads: int
) -> None:
    """The first of equals, over a vocabulary that does not end with a tile; none where one is infinite or NaN."""
    before = torch.get_num_threads()
    save_model("llama", tmp_path, vocab_size=307)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["lm_head.weight"]
    head[150:300] = head[:150]  # each of these twice
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = load(tmp_path, quantization=quantization, threads=threads)
    (session,) = sessions(runner, 1)
    for tokens in (random_tokens(200, 8), [5], random_tokens(9, 9)):
        logits = runner.forward([session.segment(tokens)])
        assert runner.likeliest == logits.numpy().argmax(axis=1).tolist()
    head[301] = 3e38
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = load(tmp_path, threads=threads)
    (session,) = sessions(runner, 1)
    logits = runner.forward([session.segment(random_tokens(200, 8))])
    highest = logits.max(dim=1)  # NaN where there is one
    expected = torch.where(highest.values.isfinite(), highest.indices, -1)
    assert runner.likeliest == expected.tolist()
    assert (expected == -1).sum() > 0
    torch.set_num_threads(before)


def test_more_threads_than_cores_finish_many_steps(folder: Path) -> None:
    """Helpers come late, sleep and leave over and over; every step is whole all the same."""
    runners = [load(folder, threads=5) for _ in range(3)]
    torch.set_num_threads(1)
    tokens = random_tokens(40, 6)
    wrong: list[int] = []

    def work(runner: ModelRunner) -> None:
        for _ in range(40):
            (session,) = sessions(runner, 1)
            expected = runner.forward([session.segment(tokens)])
            session.length = 0
            for position, token in enumerate(tokens[:5]):
                if not torch.equal(runner.forward([session.segment([token])])[0], expected[position]):
                    wrong.append(position)

    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_fallback_gives_the_same_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = load(folder)
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    plain = ModelRunner.load(folder, dtype="float32", num_slots=900, max_sessions=4, max_len=256)
    assert plain.backend.startswith("torch")
    assert plain.numerics_id != native.numerics_id
    tokens = random_tokens(50, 7)
    logits = [runner.forward([sessions(runner, 1)[0].segment(tokens)]) for runner in (native, plain)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", ["no compiler", "broken compiler"])
def test_without_a_compiler_torch_serves(
    folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    compiler = tmp_path / "cc"
    if fault == "no compiler":
        monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    else:
        compiler.write_text("#!/bin/sh\nexit 3\n")
        compiler.chmod(0o755)
        monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    monkeypatch.setenv("OUTRIDER_HOME", str(home))
    runner = ModelRunner.load(folder, dtype="float32", num_slots=9, max_sessions=1, max_len=9)
    assert runner.backend.startswith("torch")
    (session,) = sessions(runner, 1)
    assert runner.forward([session.segment([1, 2])]).isfinite().all()
    assert not list(home.glob("kernels/*"))


def test_that_the_kernels_cannot_be_had_is_found_out_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def fails(folder: Path, max_compilers: int) -> None:
        asked.append(folder)
        raise build.CannotBuild("killed")

    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "1")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.setattr("engine.cpu_kernels.open_library", fails)
    assert [cpu_kernels() for _ in range(3)] == [None] * 3
    assert asked == [tmp_path / "kernels"]


def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "kernels"
    try:
        first = build.load_library(cache)
    except build.CannotBuild as error:
        pytest.skip(str(error))
    (made,) = cache.iterdir()
    assert made.stem.startswith(f"outrider-{build.build_key(first)}-")
    monkeypatch.setattr(build, "compile_library", None)
    build.load_library.cache_clear()
    assert build.load_library(cache)._name == first._name
