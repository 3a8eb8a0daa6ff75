"""Steps, branches and nodes from the flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from draft_service.drafters.factory import make_drafter
from draft_service.drafters.graphs import graph_sizes, tree_sizes
from draft_service.drafters.growing_graphs import TreeSizes
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.shape import TreeShape, possible_steps, tree_shape
from engine.execution import GraphSizes
from outrider.args import DraftArgs
from outrider.errors import StartupError
from outrider.flags import flag_named

ROOT = Path(__file__).parents[2]


def shape(is_head: bool = True, architecture: str = "", **flags: int) -> TreeShape:
    named: dict[str, Any] = {f"speculative_{name}": value for name, value in flags.items()}
    return tree_shape(DraftArgs(**named), is_head=is_head, target_architecture=architecture)


@pytest.mark.parametrize(
    ("is_head", "architecture", "expected"),
    [
        (False, "LlamaForCausalLM", (3, 1, 4)),
        (True, "LlamaForCausalLM", (5, 4, 8)),
        (True, "Grok1ForCausalLM", (5, 4, 8)),
        (True, "DeepseekV3ForCausalLM", (3, 1, 4)),
        (True, "Qwen3ForCausalLM", (3, 1, 4)),
    ],
)
def test_choices_without_flags(is_head: bool, architecture: str, expected: tuple[int, int, int]) -> None:
    assert shape(is_head, architecture) == TreeShape(*expected)


def test_all_three_given() -> None:
    assert shape(num_steps=3, eagle_topk=2, num_draft_tokens=11) == TreeShape(3, 2, 11)
    # A chain's nodes follow its steps.
    assert shape(num_steps=3, eagle_topk=1, num_draft_tokens=9) == TreeShape(3, 1, 4)
    assert shape(num_steps=6, eagle_topk=1) == TreeShape(6, 1, 7)


@pytest.mark.parametrize(("adaptive", "tokens", "told"), [(False, 9, 1), (True, 9, 1), (True, 4, 0), (False, 4, 0)])
def test_tokens_that_a_chain_does_not_follow_are_told_of(adaptive: bool, tokens: int, told: int) -> None:
    flags = DraftArgs(
        speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=tokens,
        speculative_adaptive=adaptive,
    )  # fmt: skip
    with capture_logs() as logs:
        assert tree_shape(flags, is_head=True) == TreeShape(3, 1, 4)
    assert [(entry["given"], entry["used"]) for entry in logs] == [(tokens, 4)] * told


STEPS, TOPK, TOKENS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"num_steps": 3}, f"{STEPS} 3 needs {TOPK} and {TOKENS} too"),
        ({"eagle_topk": 2}, f"{TOPK} 2 needs {STEPS} and {TOKENS} too"),
        ({"num_draft_tokens": 8}, f"{TOKENS} 8 needs {STEPS} and {TOPK} too"),
        ({"num_steps": 3, "eagle_topk": 2}, f"{STEPS} 3 and {TOPK} 2 need {TOKENS} too"),
        ({"num_steps": 3, "num_draft_tokens": 4}, f"{STEPS} 3 and {TOKENS} 4 need {TOPK} too"),
        ({"eagle_topk": 1, "num_draft_tokens": 4}, f"{TOPK} 1 and {TOKENS} 4 need {STEPS} too"),
    ],
)
def test_partial_settings_are_refused(flags: dict[str, int], complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        shape(True, "", **flags)


def test_more_nodes_than_a_tree_has_are_refused() -> None:
    with pytest.raises(StartupError, match="num-draft-tokens is 12; 3 steps of 2 branches give at most 11"):
        shape(num_steps=3, eagle_topk=2, num_draft_tokens=12)


def test_sglangs_rule_for_its_name_of_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "True")
    assert shape(num_steps=3, eagle_topk=1, num_draft_tokens=4) == TreeShape(3, 1, 4)
    with pytest.raises(StartupError, match="SGLANG_ENABLE_SPEC_V2 supports only topk = 1"):
        shape(num_steps=3, eagle_topk=2, num_draft_tokens=4)
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2")
    monkeypatch.setenv("OUTRIDER_ENABLE_SPEC_V2", "1")
    assert shape(num_steps=3, eagle_topk=2, num_draft_tokens=4).topk == 2
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "True")  # which ours then decides over
    for ours in ("0", "1", "auto"):
        monkeypatch.setenv("OUTRIDER_ENABLE_SPEC_V2", ours)
        assert shape(num_steps=3, eagle_topk=2, num_draft_tokens=4).topk == 2


def test_the_factory_makes_ngram_drafters_too() -> None:
    drafter = make_drafter(DraftArgs(speculative_ngram_capacity=1000))
    assert isinstance(drafter, NgramDrafter)
    drafter.close_down()
    with pytest.raises(StartupError, match="must be one of NGRAM, STANDALONE, EAGLE, EAGLE3, NEXTN"):
        make_drafter(DraftArgs(speculative_algorithm="NONE"))


def test_a_wrong_flag_is_said_without_loading_torch() -> None:
    script = (
        "import sys; from draft_service.drafters import factory, shape; "
        "sys.exit(', '.join({'torch', 'numba', 'transformers'} & sys.modules.keys()) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_which_steps_become_cuda_graphs() -> None:
    steps = (1, 2, 3)
    assert graph_sizes(DraftArgs(), (1, 2, 5), 4) == GraphSizes(64, 16, last_logits=4)
    assert graph_sizes(DraftArgs(max_sessions=9), steps, 1) == GraphSizes(9, 4, last_logits=1)
    assert graph_sizes(DraftArgs(cuda_graph_max_bs=80), steps, 1) == GraphSizes(80, 4, last_logits=1, required=True)
    assert graph_sizes(DraftArgs(disable_cuda_graph=True), steps, 4) is None


def test_which_trees_become_cuda_graphs() -> None:
    sizes = tree_sizes(DraftArgs(max_sessions=4), (1, 2), 4, is_quantized=False)
    assert sizes == TreeSizes((1, 2), 4, max_trees=8)
    assert tree_sizes(DraftArgs(cuda_graph_max_bs=2), (1, 2), 4, is_quantized=True).max_trees == 4
    assert tree_sizes(DraftArgs(), (1, 2), 4, is_quantized=True).max_rows < sizes.max_rows


def test_how_deep_trees_may_come_to_be(tmp_path: Path) -> None:
    tree, chain = TreeShape(5, 4, 8), TreeShape(3, 1, 4)
    assert possible_steps(DraftArgs(), tree) == (1, 2, 3, 4, 5, 6, 7)
    assert possible_steps(DraftArgs(), chain, has_layer_for_each=True) == (1, 2, 3)
    assert possible_steps(DraftArgs(speculative_num_steps=3), chain) == (1, 2, 3)
    assert possible_steps(DraftArgs(speculative_adaptive=True), chain) == (1, 3, 7)
    tiers = tmp_path / "tiers.json"
    tiers.write_text('{"1": {"candidate_steps": [0, 12]}, "4": {"candidate_steps": [0]}}', encoding="utf-8")
    adaptive = DraftArgs(speculative_adaptive=True, speculative_adaptive_config=str(tiers))
    assert possible_steps(adaptive, chain) == (1, 12)
    tiers.write_text('{"1": {"candidate_steps": [0]}}', encoding="utf-8")
    assert possible_steps(adaptive, chain) == (1,)


@pytest.mark.parametrize(
    "flags",
    [
        {"disable_cuda_graph": True}, {"cuda_graph_max_bs": 4}, {"quantization": "fp8"},
        {"load_format": "pt"}, {"dtype": "float16"}, {"threads": 3}, {"trust_remote_code": True},
    ],
)  # fmt: skip
def test_what_only_a_draft_model_reads_is_refused_for_ngrams(flags: dict[str, Any]) -> None:
    (name,) = flags
    complaint = f"{flag_named(name)} is for draft models; --speculative-algorithm NGRAM has none"
    for algorithm in ("NGRAM", None):
        with pytest.raises(StartupError, match=complaint):
            make_drafter(DraftArgs(speculative_algorithm=algorithm, **flags))
