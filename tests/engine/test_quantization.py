"""Quantised models: close to what they were, the same bits however a sequence is cut, lossless under speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from engine.batch import Segment
from engine.model_folder import resolve_model
from engine.quantization import check_quantization, draft_quantization
from engine.runner import ModelRunner
from outrider.args.quantization import METHODS
from outrider.errors import StartupError
from tests.engine.tiny import Session, random_tokens, saved_model, sessions

ON_CPU = ("int8", "int8_dynamic", "int4")
TEXT = (
    "The river rises in the mountains and flows through three countries before it reaches the sea. Along its banks "
    "stand old towns whose people lived by fishing and trade. In spring, when the snow melts, the water is high and "
    "brown; in late summer one can wade across. A bridge was built in 1887, and since then the ferry runs only for "
    "visitors. Why do rivers bend? Water on the outside of a curve moves faster and carries soil away, while on the "
    "inside it slows down and leaves sand behind, so that every bend becomes wider over the years."
)

folder = saved_model("qwen2")


def load(folder: Path, quantization: str | None, **options: Any) -> ModelRunner:
    settings: dict[str, Any] = {"dtype": "float32", "num_slots": 1200, "max_sessions": 4, "max_len": 300} | options
    return ModelRunner.load(folder, quantization=quantization, **settings)


def load_native(folder: Path, quantization: str, **options: Any) -> ModelRunner:
    runner = load(folder, quantization, **options)
    if not runner.backend.startswith("native"):
        pytest.skip("no C compiler")
    return runner


@pytest.mark.parametrize("kernel", ["1", "0"])
def test_every_method_is_a_model_of_its_own(folder: Path, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", kernel)
    tokens, ids, logits = random_tokens(50, 1), set(), {}
    for method in (None, *ON_CPU):
        runner = load(folder, method)
        ids.add(runner.numerics_id)
        (session,) = sessions(runner, 1)
        logits[method] = runner.forward([session.segment(tokens)])
    assert len(ids) == 4
    spread = logits[None].std()
    errors = {method: float((logits[method] - logits[None]).std() / spread) for method in ON_CPU}
    # A random model has no redundancy: it forgives far less than a trained one.
    assert 0 < errors["int8"] < errors["int8_dynamic"] < errors["int4"] < 0.8
    assert errors["int8"] < 0.08


def test_int8_dynamic_without_the_c_decoder_is_warned_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(method: str) -> bool:
        with capture_logs() as logs:
            load(folder, method)
        return any("speculation and batches change answers" in entry["event"] for entry in logs)

    load_native(folder, "int8_dynamic")
    assert not warned("int8_dynamic")
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    assert warned("int8_dynamic")
    assert not warned("int8")


@pytest.mark.parametrize("method", ON_CPU)
def test_both_decoders_agree(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of weights are the same; of activations, only int8_dynamic's, where rounding may fall to either side."""
    native = load_native(folder, method)
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", "0")
    plain = load(folder, method)
    assert plain.backend.startswith("torch")
    tokens = random_tokens(50, 2)
    one, other = (runner.forward([sessions(runner, 1)[0].segment(tokens)]) for runner in (native, plain))
    assert (one - other).std() < (0.02 if method == "int8_dynamic" else 5e-4) * one.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ON_CPU)
def test_the_cut_of_a_sequence_changes_no_bit(folder: Path, method: str, dtype: str) -> None:
    before = torch.get_num_threads()
    tokens, results = random_tokens(90, 3), []
    for threads in (1, 3):
        runner = load_native(folder, method, dtype=dtype, threads=threads)
        whole, chunks, single, other = sessions(runner, 4)
        expected = runner.forward([whole.segment(tokens)])
        parts = [runner.forward([chunks.segment(tokens[a:b])]) for a, b in [(0, 37), (37, 38), (38, 90)]]
        assert torch.equal(torch.cat(parts), expected)
        for position, token in enumerate(tokens[:20]):
            logits = runner.forward([other.segment([token, 7]), single.segment([token])])
            assert torch.equal(logits[2], expected[position])
        results.append(expected)
    torch.set_num_threads(before)
    assert torch.equal(*results)


def plain_greedy(runner: ModelRunner, session: Session, prompt: list[int], count: int) -> list[int]:
    """The argmax after the prompt, and so on."""
    said = [int(runner.forward([session.segment(prompt, 1)])[0].argmax())]
    while len(said) < count:
        said.append(int(runner.forward([session.segment([said[-1]])])[0].argmax()))
    return said


def tree_greedy(
    runner: ModelRunner, session: Session, prompt: list[int], count: int, likely: list[int], seed: int
) -> tuple[list[int], int]:
    """Decodes greedily by random trees, half of whose nodes are the `likely` tokens; and how many were accepted."""
    rng = np.random.default_rng(seed)
    said = [int(runner.forward([session.segment(prompt, 1)])[0].argmax())]
    num_accepted = 0
    while len(said) < count:
        tokens, parents, depths = [said[-1]], [-1], [0]
        for row in range(1, int(rng.integers(2, 12))):
            parent = int(rng.integers(max(0, row - 2), row))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            ahead = likely[min(len(said) + depths[row] - 1, len(likely) - 1)]
            tokens.append(ahead if rng.random() < 0.5 else int(rng.integers(0, runner.config.vocab_size)))
        segment = session.tree(tokens, parents)
        choices = runner.forward([segment]).argmax(dim=-1).tolist()
        path = [0]
        while True:
            children = [row for row, parent in enumerate(parents) if parent == path[-1]]
            found = [row for row in children if tokens[row] == choices[path[-1]]]
            if not found:
                break
            path.append(found[0])
        commit(session, segment, path)
        said += [tokens[row] for row in path[1:]] + [choices[path[-1]]]
        num_accepted += len(path) - 1
    return said[:count], num_accepted


def commit(session: Session, segment: Segment, path: list[int]) -> None:
    """Keeps the rows of a tree's path."""
    end = session.length + len(path)
    session.runner.slot_table[session.table_row, session.length : end] = np.asarray(segment.slots)[path]
    session.length = end


@pytest.mark.parametrize("method", ON_CPU)
def test_speculation_changes_no_token(folder: Path, method: str) -> None:
    runner = load_native(folder, method, dtype="bfloat16")
    prompt = random_tokens(20, 4)
    plain, *others = sessions(runner, 4)
    expected = plain_greedy(runner, plain, prompt, 40)
    for seed, session in enumerate(others):
        said, num_accepted = tree_greedy(runner, session, prompt, 40, expected, seed)
        assert said == expected
        assert num_accepted > 5


@pytest.mark.slow
def test_the_embedded_model_stays_itself() -> None:
    """Perplexity and first choices of the quantised models, next to bf16's, on a page of prose."""
    from tokenizers import Tokenizer

    folder = resolve_model(None)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    losses, choices = {}, {}
    for method in (None, *ON_CPU):
        runner = load_native(folder, method, dtype="bfloat16", num_slots=256) if method else load(
            folder, None, dtype="bfloat16", num_slots=256
        )  # fmt: skip
        runner.slot_table[0] = np.arange(300)
        rows = np.array(tokens, np.int32)
        logits = runner.forward([Segment(0, 0, rows, np.arange(len(rows), dtype=np.int32), num_logits=len(rows))])
        losses[method] = float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])))
        choices[method] = logits.argmax(dim=-1)
    agreement = {method: float((choices[method] == choices[None]).float().mean()) for method in ON_CPU}
    rise = {method: float(np.exp(losses[method] - losses[None])) for method in ON_CPU}
    assert agreement["int8"] > 0.9
    assert agreement["int8_dynamic"] > 0.9
    assert agreement["int4"] > 0.93  # its files were made from 4-bit weights
    assert rise["int8"] < 1.02
    assert rise["int8_dynamic"] < 1.1
    assert rise["int4"] < 1.03


def test_names_of_methods() -> None:
    cpu = torch.device("cpu")
    assert check_quantization(None, cpu) is None
    assert [check_quantization(method, cpu) for method in ON_CPU] == list(ON_CPU)
    assert check_quantization("w8a8_int8", cpu) == "int8_dynamic"
    assert set(METHODS) == {*ON_CPU, "fp8"}
    for name, message in (
        ("fp8", "fp8 needs a CUDA device"),
        ("awq", "SGLang's and not offered"),
        ("int3", "unknown"),
    ):
        with pytest.raises(StartupError, match=message):
            check_quantization(name, cpu)


def test_a_draft_model_is_quantised_as_its_target_unless_told_otherwise() -> None:
    cpu = torch.device("cpu")
    assert draft_quantization(None, "int8", cpu) == "int8"
    assert draft_quantization("unquant", "int8", cpu) is None
    assert draft_quantization("int4", "int8", cpu) == "int4"
    assert draft_quantization(None, None, cpu) is None
    with pytest.raises(StartupError, match=r"^--speculative-draft-model-quantization fp8 needs a CUDA device"):
        draft_quantization("fp8", "int8", cpu)
    with pytest.raises(StartupError, match=r"^--quantization fp8 needs a CUDA device"):
        draft_quantization(None, "fp8", cpu)
