import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from kernels.penalties import History, Penalties, penalise
from tests.kernels import oracles

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
LOGITS = st.lists(
    st.one_of(st.just(-math.inf), st.floats(-20, 20, width=32)), min_size=VOCAB, max_size=VOCAB
)  # fmt: skip
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "presence": st.sampled_from([-2.0, 0.3, 2.0]),
        "frequency": st.sampled_from([-0.7, 0.1, 2.0]),
        "repetition": st.sampled_from([0.5, 1.3, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 0.25, 100.0]), max_size=3),
        "min_tokens": st.integers(0, 30),
        "stop_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
    },
)


@settings(deadline=None)
@given(LOGITS, SETTINGS, TOKENS, st.lists(TOKENS, max_size=4), st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_a_rows_history_is_its_own_path(
    logits: list[float], settings: dict[str, Any], prompt: list[int], commits: list[list[int]], path: list[int]
) -> None:
    history = History(prompt)
    for tokens in commits:
        history.commit(tokens)
    row = np.array(logits, dtype=np.float32)
    penalties = Penalties.build(**settings)
    penalise(row, penalties, history, path)
    output = [token for tokens in commits for token in tokens] + path
    assert row.tolist() == [float(x) for x in oracles.penalised(logits, prompt, output, **settings)]
    if penalties.changes_nothing:
        assert row.tolist() == logits


def test_only_its_own_row_changes() -> None:
    logits = torch.zeros(3, VOCAB)
    penalise(logits[1].numpy(), Penalties.build(frequency=1.0, logit_bias={0: 4.0}), History([1]), [5, 5])
    assert logits[1].tolist() == [4.0, 0, 0, 0, 0, -2.0, 0, 0, 0, 0, 0, 0]
    assert not logits[[0, 2]].any()


def test_the_session_is_left_as_it_was() -> None:
    history = History([1, 2])
    history.commit([3])
    penalise(np.zeros(VOCAB, np.float32), Penalties.build(presence=1.0), history, [3, 4])
    assert history.ids.tolist() == [1, 2, 3]
    assert history.counts.tolist() == [0, 0, 1]


def test_repetition_equals_transformers() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)) * 5
    prompt, output = [3, 499, 3, 77], [8, 77, 8]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits.clone())  # pyright: ignore
    history = History(prompt)
    history.commit(output[:2])
    penalise(logits[0].numpy(), Penalties.build(repetition=1.3), history, output[2:])
    assert torch.equal(logits, expected)


def test_stop_ids_are_masked_up_to_the_minimum_only() -> None:
    penalties = Penalties.build(min_tokens=3, stop_ids=[2, 4, 2], logit_bias={2: 100.0})
    history = History([9])
    history.commit([1])
    for path, masked in (([], True), ([5], True), ([5, 6], False)):
        row = np.zeros(VOCAB, np.float32)
        penalise(row, penalties, history, path)
        assert row[[2, 4]].tolist() == ([-math.inf, -math.inf] if masked else [100.0, 0.0])
        assert row[3] == 0.0


def test_history_counts_a_long_output() -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 300, 200).tolist(), rng.integers(0, 300, 1000).tolist()
    history = History(prompt)
    for start in range(0, 1000, 7):
        history.commit(output[start : start + 7])
    assert history.num_output == 1000
    assert sorted(history.ids.tolist()) == sorted({*prompt, *output})
    assert {t: int(c) for t, c in zip(history.ids, history.counts, strict=True)} == {
        token: output.count(token) for token in {*prompt, *output}
    }
    assert history.count(output[0]) == output.count(output[0])
    assert history.count(100_000) == 0


@settings(deadline=None)
@given(TOKENS, TOKENS, st.lists(st.tuples(st.booleans(), TOKENS), max_size=6))
def test_a_copy_goes_its_own_way(prompt: list[int], common: list[int], commits: list[tuple[bool, list[int]]]) -> None:
    history = History(prompt)
    history.commit(common)
    both, outputs = (history, history.copy()), (list(common), list(common))
    for second, tokens in commits:
        both[second].commit(tokens)
        outputs[second].extend(tokens)
    for one, output in zip(both, outputs, strict=True):
        assert one.num_output == len(output)
        assert one.ids.tolist() == list(dict.fromkeys(prompt + output))
        assert one.counts.tolist() == [output.count(token) for token in one.ids.tolist()]
        assert [one.count(token) for token in range(VOCAB)] == [output.count(token) for token in range(VOCAB)]


def test_defaults_change_nothing() -> None:
    assert Penalties().changes_nothing
    assert Penalties.build(min_tokens=5).changes_nothing
    assert not Penalties.build(min_tokens=5, stop_ids=[1]).changes_nothing
    assert not Penalties.build(logit_bias={1: 1.0}).changes_nothing


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="repetition"):
        Penalties(repetition=0.0)
    with pytest.raises(ValueError, match="bias ids"):
        Penalties(bias_ids=np.array([1, 2]), bias_values=np.array([1.0], np.float32))
