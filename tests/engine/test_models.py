"""Logits of the engine's forward pass against transformers', for every family and way of cutting a sequence up."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.feature_spec import FeatureSpec
from engine.runner import ModelRunner
from kernels.norm import rms_norm
from tests.engine.tiny import VOCAB_SIZE, configs, random_tokens, save_model, sessions

TOLERANCE = 2e-4  # of features up to 20


class Pair:
    """The same weights in transformers and in the engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.model: Any = save_model(name, folder)

    def runner(self, **options: object) -> ModelRunner:
        settings: dict[str, Any] = {"dtype": "float32", "num_slots": 400, "max_sessions": 4, "max_len": 200} | options
        return ModelRunner.load(self.folder, **settings)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model.forward(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=sorted(configs()))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair("llama", tmp_path_factory.mktemp("llama-alone"))


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNEL", str(int(request.param == "native")))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_prefill(pair: Pair) -> None:
    runner = pair.runner()
    (session,) = sessions(runner, 1)
    tokens = random_tokens(100, 1)
    close(runner.forward([session.segment(tokens)]), pair.logits(tokens))


def test_logits_of_some_tokens_alone(pair: Pair) -> None:
    wanted = torch.tensor([40, 3, 77])
    runner = pair.runner(output_rows=wanted)
    (session,) = sessions(runner, 1)
    tokens = random_tokens(20, 9)
    close(runner.forward([session.segment(tokens)]), pair.logits(tokens)[:, wanted])
    assert runner.forward([session.segment([3], 0)]).shape == (0, 3)
    assert runner.num_outputs == 3


def test_chunks_and_single_tokens(pair: Pair) -> None:
    runner = pair.runner()
    (session,) = sessions(runner, 1)
    tokens = random_tokens(60, 2)
    cuts = [0, 1, 18, 35, 56, 57, 58, 59, 60]
    pieces = [tokens[a:b] for a, b in itertools.pairwise(cuts)]
    close(torch.cat([runner.forward([session.segment(piece)]) for piece in pieces]), pair.logits(tokens))


@pytest.mark.parametrize("seed", range(4))
def test_every_path_of_a_tree_equals_its_own_sequence(pair: Pair, seed: int) -> None:
    runner = pair.runner()
    (session,) = sessions(runner, 1)
    prefix = random_tokens([0, 1, 17, 90][seed], seed)
    if prefix:
        runner.forward([session.segment(prefix, num_logits=0)])
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 24))
    tokens = random_tokens(count, seed + 10)
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, count))]
    logits = runner.forward([session.tree(tokens, parents)])
    for row in range(count):
        path, node = [], row
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        close(logits[row], pair.logits(prefix + path[::-1])[-1])


def test_prefill_decode_and_tree_in_one_step(pair: Pair) -> None:
    runner = pair.runner()
    first, second, third, fourth = sessions(runner, 4)
    one, two, three = random_tokens(30, 5), random_tokens(40, 6), random_tokens(20, 7)
    runner.forward([first.segment(one[:29], 0), second.segment(two[:10], 0), third.segment(three, 0)])
    tree_tokens, parents = random_tokens(4, 8), [-1, 0, 1, 0]
    logits = runner.forward(
        [
            first.segment(one[29:], 1),
            second.segment(two[10:], 1),
            third.tree(tree_tokens, parents),
            fourth.segment(one, 1),
        ]
    )
    assert logits.shape == (7, VOCAB_SIZE)
    assert logits.dtype == torch.float32
    close(logits[0], pair.logits(one)[-1])
    close(logits[1], pair.logits(two)[-1])
    close(logits[2:5], pair.logits(three + tree_tokens[:3])[-3:])
    close(logits[5], pair.logits([*three, tree_tokens[0], tree_tokens[3]])[-1])
    close(logits[6], logits[0])


def test_accepted_nodes_are_committed_by_rewriting_the_slot_table(llama: Pair) -> None:
    runner = llama.runner()
    (session,) = sessions(runner, 1)
    prefix, tokens, parents = random_tokens(12, 1), random_tokens(5, 2), [-1, 0, 0, 2, 3]
    runner.forward([session.segment(prefix, 0)])
    tree = session.tree(tokens, parents)
    runner.forward([tree])
    kept = [0, 2, 3]
    runner.slot_table[0, 12:15] = np.asarray(tree.slots)[kept]
    session.length += 3
    logits = runner.forward([session.segment([7])])
    close(logits[0], llama.logits([*prefix, *(tokens[row] for row in kept), 7])[-1])


def test_features_are_the_states_that_transformers_shows(pair: Pair) -> None:
    tokens = random_tokens(50, 3)
    with torch.no_grad():
        states = pair.model.forward(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    # transformers' last entry is after the final norm; the one entering layer i is entry i.
    for spec, expected in (
        (FeatureSpec.parse("last"), states[-1][0]),
        (FeatureSpec.parse("aux:0,2"), torch.cat([states[0][0], states[2][0]], dim=-1)),
    ):
        runner = pair.runner(features=spec)
        (session,) = sessions(runner, 1)
        chunk, decode = session.segment(tokens[:49], 0), session.segment(tokens[49:], 1)
        assert runner.forward([chunk]).shape == (0, VOCAB_SIZE)
        close(runner.forward([decode])[0], pair.logits(tokens)[-1])
        assert runner.features is not None
        close(runner.features[np.concatenate([chunk.slots, decode.slots])], expected)


def test_the_state_after_the_last_layer_is_a_feature_too(llama: Pair) -> None:
    runner = llama.runner(features=FeatureSpec.parse("aux:1,3"))
    (session,) = sessions(runner, 1)
    segment = session.segment([5, 6, 7], 1)
    logits = runner.forward([segment])
    assert runner.features is not None
    weights = llama.model.state_dict()
    final = runner.features[segment.slots[-1:], runner.config.hidden_size :]
    normed = rms_norm(final, weights["model.norm.weight"], runner.config.rms_eps)
    close(normed @ weights["lm_head.weight"].T, logits)


def test_bf16_stays_near_fp32(llama: Pair) -> None:
    tokens = random_tokens(64, 4)
    runner = llama.runner(dtype="bfloat16")
    (session,) = sessions(runner, 1)
    logits = runner.forward([session.segment(tokens)])
    exact = llama.logits(tokens)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().mean() < 0.03 * exact.std()


def test_numerics_id_tells_dtypes_and_weights_apart(llama: Pair, tmp_path: Path) -> None:
    ids = {llama.runner(dtype=dtype).numerics_id for dtype in ("float32", "bfloat16", "float32")}
    other = Pair("llama-tied", tmp_path)
    assert len(ids | {other.runner().numerics_id}) == 3


def test_greedy_decoding_equals_generate(pair: Pair) -> None:
    prompt = random_tokens(9, 11)
    settings = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0)
    expected = pair.model.generate(torch.tensor([prompt]), settings, attention_mask=torch.ones(1, 9))[0, 9:].tolist()
    runner = pair.runner()
    (session,) = sessions(runner, 1)
    said = [int(runner.forward([session.segment(prompt, 1)])[0].argmax())]
    while len(said) < 24:
        said.append(int(runner.forward([session.segment(said[-1:])])[0].argmax()))
    # generate stops at the end id.
    assert said[: len(expected)] == expected
